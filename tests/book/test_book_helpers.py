"""What notebooks import: listings, receipts, tables, figures, the chapter drawing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from nanoqwen import book
from nanoqwen.book import build, receipts, source, style
from nanoqwen.book.source import regions, show


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A small repository: files written into it are what ``show`` and ``receipt`` see."""
    monkeypatch.setattr(source, "book_root", lambda: tmp_path)
    monkeypatch.setattr(receipts, "receipts_folder", lambda: tmp_path / "book" / "receipts")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ---- listings ---------------------------------------------------------------------------------------------------------


def test_a_region_is_dedented_and_keeps_its_line_numbers(clone):
    write(clone / "a.py", "x = 1\n\nclass A:\n    # [f]\n\n    def f(self):\n        # [inner]\n        return 1\n        # [/inner]\n    # [/f]\n")
    shown = show("a.py", "f")
    assert str(shown) == "def f(self):\n    return 1"
    assert (shown.first, shown.last, shown.caption()) == (6, 8, "a.py, lines 6 to 8")
    assert shown._repr_markdown_() == "```python\ndef f(self):\n    return 1\n```\n\n*`a.py`, lines 6 to 8*"
    assert regions("a.py") == ["f", "inner"]


def test_cuda_regions_use_slashes_and_a_language_every_viewer_knows(clone):
    write(clone / "kernels/k.cu", "// [ring]\nint a;  // [not a marker] behind code\n// [/ring]\n")
    assert show("kernels/k.cu", "ring")._repr_markdown_().startswith("```cpp\nint a;  // [not a marker] behind code\n```")


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1\n", r"no region \[f\]; it has none"),
        ("# [g]\nx\n# [/g]\n", r"no region \[f\]; it has g"),
        ("# [f]\nx = 1\n", "found 1 and 0, lines 1"),
        ("# [/f]\nx\n# [f]\n", "found 1 and 1, lines 1, 3"),
        ("# [f]\nx\n# [/f]\n# [f]\ny\n# [/f]\n", "found 2 and 2"),
        ("# [f]\n\n# [/f]\n", "is empty"),
    ],
)
def test_missing_unpaired_doubled_and_empty_regions_are_refused(clone, text, message):
    write(clone / "a.py", text)
    with pytest.raises(book.MissingRegion, match=message):
        show("a.py", "f")


def test_a_missing_file_is_refused(clone):
    with pytest.raises(book.MissingRegion, match="no such file"):
        show("gone.py")


# ---- receipts ---------------------------------------------------------------------------------------------------------

GOOD = {
    "name": "gemv", "command": "nanoqwen bench gemv --layers 28", "date": "2026-01-31T10:00:00Z", "device": {"name": "NVIDIA H200"},
    "versions": {}, "sources": {}, "protocol": {"runs": 3}, "samples": [1.0], "results": {"ms_per_token": 1.5},
}  # fmt: skip


def test_a_receipt_is_read_with_its_caption(clone):
    write(clone / "book/receipts/gemv.json", json.dumps(GOOD))
    made = book.receipt("gemv")
    assert made.results["ms_per_token"] == 1.5 and made.samples == [1.0] and made.protocol == {"runs": 3}
    assert made.caption() == "NVIDIA H200, 2026-01-31, `nanoqwen bench gemv --layers 28`"


def test_a_missing_incomplete_or_renamed_receipt_is_refused(clone):
    with pytest.raises(book.MissingReceipt, match="gemv.json does not exist .there are: none yet"):
        book.receipt("gemv")
    write(clone / "book/receipts/gemv.json", json.dumps({"name": "gemv"}))
    with pytest.raises(book.MissingReceipt, match="lacks command"):
        book.receipt("gemv")
    write(clone / "book/receipts/gemv.json", json.dumps(GOOD | {"name": "other"}))
    with pytest.raises(book.MissingReceipt, match="calls itself 'other'"):
        book.receipt("gemv")


# ---- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_aligns_numbers_and_escapes_bars():
    made = book.table([("a|b", "1,024", ""), ("c", "−2.5", "x")], head=["what", "bytes", "note"], caption="Made up.")
    assert made.markdown() == "| what | bytes | note |\n| :--- | ---: | :--- |\n| a\\|b | 1,024 |  |\n| c | −2.5 | x |\n\n*Made up.*"
    assert repr(made).splitlines() == ["what  bytes  note", "a|b   1,024", "c      −2.5  x", "Made up."]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="row 1 has 1 cells, the head has 2"):
        book.table([(1, 2), (3,)], head=["a", "b"])


# ---- figures ----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects ids, references and texts of markup, and notices tags that do not pair."""

    VOID = {"br", "input"}

    def __init__(self, markup):
        super().__init__()
        self.ids, self.open, self.texts, self.attributes = [], [], [], []
        self.feed(markup)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def plot(figsize=None):
    import matplotlib.pyplot as plt

    book.use_style()
    fig, ax = plt.subplots(figsize=figsize)
    for (name, colour), y in zip(book.ENGINE.items(), (4, 3, 2, 1)):
        ax.barh(name, y, color=colour, hatch=book.HATCH[name])
    ax.set_xlabel("ms a token")
    return fig


def test_a_plot_follows_the_theme_and_keeps_its_labels_as_text():
    pytest.importorskip("matplotlib")
    made = book.figure(plot(), title="Engines", alt="Four bars.", caption="As `bench` wrote it.")
    markup = made._repr_html_()
    tags = Tags(markup)
    assert repr(made) == "<figure: Engines>"
    assert "ms a token" in tags.texts and "persistent" in tags.texts
    assert "currentColor" in markup and book.INK not in markup
    for name, colour in book.ENGINE.items():
        assert f"var(--nq-{name}, {colour})" in markup
    # A colour outside a var() would be the same in the light and in the dark.
    drawing = markup[markup.index("<svg") : markup.index("</svg>")]
    assert re.findall(r"(?<!, )#[0-9a-f]{6}\b", drawing) == []
    assert "DejaVu" not in markup and "<metadata" not in markup
    assert "*{" not in markup, "a rule for every element would reach the whole page"
    (svg,) = [attributes for tag, attributes in tags.attributes if tag == "svg"]
    assert svg["role"] == "img" and svg["aria-label"] == "Four bars." and svg["class"] == "nq-plot"
    assert "<code>bench</code>" in markup


def test_coordinates_are_rounded_and_labels_are_not():
    pytest.importorskip("matplotlib")
    fig = plot()
    fig.axes[0].set_xlabel("the host: -0.0017 ms < 12.3456")
    markup = book.figure(fig, title="Digits", alt="Four bars of 0.1234 ms.")._repr_html_()
    tags = Tags(markup)
    assert "the host: -0.0017 ms < 12.3456" in tags.texts and dict(next(a for t, a in tags.attributes if t == "svg"))["aria-label"] == "Four bars of 0.1234 ms."
    drawn = "".join(value for tag, attributes in tags.attributes if tag == "path" for value in attributes.values())
    assert re.search(r"\d\.\d", drawn) and not re.search(r"\.\d{3}", drawn)


def test_a_plot_is_the_same_twice_and_its_ids_are_its_own():
    pytest.importorskip("matplotlib")
    first, second, other = (book.figure(plot(), title=t, alt="Bars.")._repr_html_() for t in ("One", "One", "Two"))
    assert first == second
    ids = Tags(first).ids
    assert ids and len(set(ids)) == len(ids) and all(name.startswith("fig-one-") for name in ids)
    assert not set(ids) & set(Tags(other).ids)
    assert {ref for ref in re.findall(r"url\(#([^)]+)\)", first)} <= set(ids)


def test_a_shown_figure_is_closed():
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    book.figure(plot(), title="Closed", alt="Bars.")
    assert plt.get_fignums() == before


@pytest.mark.parametrize("inches, scrolls", [(style.FIGSIZE, False), ((9.0, 3.0), True)])
def test_no_label_is_drawn_too_small_on_a_phone(inches, scrolls):
    """At 360 CSS pixels a column is 325 wide: a standard figure fits there, a wide one scrolls in its box."""
    pytest.importorskip("matplotlib")
    markup = book.figure(plot(inches), title="Sizes", alt="Bars.")._repr_html_()
    least = float(re.search(r"min-width:(\d+)px", markup).group(1))
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', markup).group(1))
    smallest = min(float(size) for size in re.findall(r"font(?:-size)?: [^;]*?(\d+(?:\.\d+)?)px", markup))
    assert smallest * least / width >= 8.9
    assert (least > 325) == scrolls
    assert 'class="nq-scroll" style="overflow-x:auto" tabindex="0"' in markup


@pytest.mark.parametrize("title, alt", [("", "x"), ("x", "  ")])
def test_a_figure_without_title_or_alt_text_is_refused(title, alt):
    with pytest.raises(ValueError, match="title and an alt text"):
        book.svg('<svg viewBox="0 0 1 1"></svg>', title=title, alt=alt)


# ---- the chapter drawing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lit", [*book.PARTS, *book.GROUPS, "", ("kv", "attention")])
def test_the_token_path_lights_what_it_is_told(lit):
    names = [lit] if isinstance(lit, str) else list(lit)
    names = [name for name in names if name]
    made = book.token_path(names)
    tags = Tags(made._repr_html_())
    parts = {part for name in names for part in book.GROUPS.get(name, (name,))}
    labels = [attributes["aria-label"] for tag, attributes in tags.attributes if tag == "svg"]
    assert len(labels) == 2 and labels[0] == labels[1]
    for part, spoken in book.PARTS.items():
        assert (spoken in labels[0].split("Lit:")[1]) == (part in parts and len(parts) < len(book.PARTS)), part
    # One shape a part and drawing; RMSNorm stands twice in a layer.
    filled = sum("accent" in (attributes.get("fill") or "") for tag, attributes in tags.attributes if tag == "rect" and attributes.get("rx"))
    assert filled == 2 * (len(parts) + ("norm" in parts))
    assert len(set(tags.ids)) == len(tags.ids)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="unknown part softmax; parts: prompt"):
        book.token_path("softmax")


# ---- what the build checks --------------------------------------------------------------------------------------------


def notebook(*cells):
    return json.dumps({"cells": [{"cell_type": "code", "source": code, "outputs": outputs} for code, outputs in cells]})


def test_listings_and_receipts_of_the_stored_chapters_are_current():
    assert build.problems() == []


def test_a_stale_listing_and_a_missing_receipt_are_found(tmp_path):
    current = show("nanoqwen/int4.py", "shifts")._repr_markdown_()
    shown = 'book.show("nanoqwen/int4.py", "shifts")'
    write(tmp_path / "good.ipynb", notebook((shown, [{"data": {"text/markdown": current.splitlines(keepends=True)}}])))
    assert build._notebook_problems(tmp_path / "good.ipynb") == []
    write(
        tmp_path / "bad.ipynb",
        notebook(
            (shown, [{"data": {"text/markdown": current.replace("16", "17", 1)}}]),
            ('book.show("nanoqwen/int4.py", region="gone")', []),
            ('r = book.receipt("never-measured")', []),
        ),
    )
    stale, gone, unmeasured = build._notebook_problems(tmp_path / "bad.ipynb")
    assert "stored listing of nanoqwen/int4.py shifts" in stale
    assert "no region [gone]" in gone
    assert "never-measured.json does not exist" in unmeasured
