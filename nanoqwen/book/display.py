"""What a cell shows: framed figures and tables, with plain text for a terminal."""

from __future__ import annotations

import html
import re
import sys
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from nanoqwen.book import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from nanoqwen.book.receipts import Receipt

#: No label of a figure is drawn smaller than this, in CSS pixels: a narrow screen scrolls the figure in its box instead.
MIN_LABEL_PX = 9.0


#: A label's size: in a style (``font-size: 10px``, ``font: 700 10px ...``) or as an attribute.
_FONT_SIZE = re.compile(r'font(?:-size)?(?::\s*(?:[a-z0-9]+ )*?|=")(\d+(?:\.\d+)?)(?:px|")')


#: A cell that counts as a number: an optional sign and a digit, or nothing, or a dash for "none".
_NUMBER = re.compile(r"[-+−±≈~<>≤≥]?\s?[\d.]|[-–]?$")


class Html:
    """Markup for a page, and one line of plain text for a terminal (and for the comparison of stored outputs)."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup = markup
        self.text = text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


class Table:
    """Rows of strings; numbers to the right."""

    def __init__(self, rows: list[list[str]], head: list[str], right: list[bool], notes: list[str]) -> None:
        self.rows, self.head, self.right, self.notes = rows, head, right, notes

    def markdown(self) -> str:
        rule = ["---:" if right else ":---" for right in self.right]
        lines = [self.head, rule, *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return body + "".join(f"\n\n*{note}*" for note in self.notes)

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        columns = list(zip(self.head, *self.rows))
        widths = [max(len(cell) for cell in column) for column in columns]
        lines = [
            "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, self.right)).rstrip()
            for line in [self.head, *self.rows]
        ]
        return "\n".join(lines + self.notes)


def table(rows: Iterable[Sequence[Any]], *, head: Sequence[str], caption: str | None = None, receipt: Receipt | None = None) -> Table:
    """A table of ``rows`` under the column names ``head``; cells are shown with ``str``.

    A column whose cells all begin with a digit or a sign is aligned to the right. ``receipt`` adds device, date and command below.
    Raises ValueError when a row's length differs from the head's.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(head):
            raise ValueError(f"row {number} has {len(row)} cells, the head has {len(head)}")
    right = [bool(cells) and all(_NUMBER.match(row[i]) for row in cells) for i in range(len(head))]
    notes = ([caption] if caption else []) + ([receipt.caption()] if receipt else [])
    return Table(cells, list(head), right, notes)


def figure(fig: MplFigure, *, title: str, alt: str, caption: str | None = None, receipt: Receipt | None = None) -> Html:
    """A matplotlib figure for the page. Closes ``fig``.

    ``title`` names it (and is its plain text), ``alt`` says in words what it shows; both are required. ``caption`` stands below it
    and may hold `code`. ``receipt`` adds device, date and command. Raises ValueError for an empty title or alt text.
    """
    from nanoqwen.book.style import to_svg

    markup = to_svg(fig, _slug(title))
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(fig)  # else the notebook would show it a second time, as a bitmap
    return _frame(markup, "nq-plot", title, alt, caption, receipt)


def svg(markup: str, *, title: str, alt: str, caption: str | None = None, receipt: Receipt | None = None) -> Html:
    """The same frame around a drawing made by hand: ``markup`` is one ``<svg viewBox=...>`` element or several of different widths."""
    return _frame(markup, "nq-drawing", title, alt, caption, receipt)


def _frame(markup: str, kind: str, title: str, alt: str, caption: str | None, receipt: Receipt | None) -> Html:
    if not title.strip() or not alt.strip():
        raise ValueError("a figure needs a title and an alt text that says what it shows")
    markup = re.sub(r"<svg\b[^>]*>", lambda m: _open_tag(m.group(0), kind, alt, markup), markup)
    notes = [inline(caption)] if caption else []
    if receipt:
        notes.append(f'<span class="nq-receipt">{inline(receipt.caption())}</span>')
    below = f"<figcaption>{'<br>'.join(notes)}</figcaption>" if notes else ""
    dark = f"<style>{palette.jupyter_dark_rule()}</style>"
    # tabindex: a box that scrolls must be reachable by keyboard.
    box = f'<div class="nq-scroll" style="overflow-x:auto" tabindex="0" role="group" aria-label="{html.escape(title)}">\n{markup}\n</div>'
    return Html(f'<figure class="nq-figure" style="margin:1em 0">{dark}{box}{below}</figure>', f"<figure: {title}>")


def _open_tag(tag: str, kind: str, alt: str, markup: str) -> str:
    """The opening ``<svg>`` tag with a size that fits the column, scales down, and stops where labels get too small."""
    box = re.search(r'viewBox="([^"]+)"', tag)
    if not box:
        raise ValueError("a drawing needs a viewBox, or it cannot scale")
    width = float(box.group(1).split()[2])
    unit = 96 / 72 if "pt\"" in tag else 1.0  # matplotlib counts in points
    sizes = [float(size) for size in _FONT_SIZE.findall(markup)]
    least = width * MIN_LABEL_PX / min(sizes) if sizes else 0
    style = f"display:block;width:100%;max-width:{width * unit:.0f}px;min-width:{min(least, width * unit):.0f}px;height:auto;stroke-linejoin:round"
    own = re.search(r'class="([^"]*)"', tag)
    classes = kind + (f" {own.group(1)}" if own else "")
    said = f'role="img" aria-label="{html.escape(alt)}"'
    return f'<svg class="{classes}" viewBox="{box.group(1)}" xmlns="http://www.w3.org/2000/svg" {said} style="{style}">'


def inline(text: str) -> str:
    """Plain text with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _slug(title: str) -> str:
    return "fig-" + (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "x")
