"""One figure style for matplotlib, and figures as SVG that belongs to the page it stands in.

The SVG keeps its labels as text, takes the page's text colour and font, has no background, and scales by its viewBox.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from nanoqwen.book.palette import ENGINE, INK, MEMORY, PAGE, RULE, follow_theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

#: Width and height of a figure in inches unless a chapter asks otherwise. At 5 inches a label of 10 points
#: still has 9 CSS pixels on a phone of 360.
FIGSIZE = (5.0, 3.0)
FONT_POINTS = 10


def use_style() -> None:
    """Set matplotlib's defaults to the book's style. Plotting without it raises no error, but looks foreign."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update(matplotlib.rcParamsDefault)
    matplotlib.use("agg")
    matplotlib.rcParams.update({
        "figure.figsize": FIGSIZE,
        "figure.facecolor": "none",
        "figure.constrained_layout.use": True,
        "axes.facecolor": "none",
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": FONT_POINTS,
        "axes.titlelocation": "left",
        "axes.labelsize": FONT_POINTS,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.prop_cycle": matplotlib.cycler(color=[*MEMORY.values(), *ENGINE.values()]),
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "grid.alpha": 0.5,
        "xtick.color": RULE,
        "ytick.color": RULE,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": FONT_POINTS,
        "ytick.labelsize": FONT_POINTS,
        "text.color": INK,
        "font.size": FONT_POINTS,
        "font.family": "DejaVu Sans",  # ships with matplotlib, so a label takes the same room everywhere
        "legend.frameon": False,
        "legend.fontsize": FONT_POINTS,
        "lines.linewidth": 1.8,
        "hatch.color": PAGE["light"],  # hatches are cut out of a bar
        "hatch.linewidth": 1.0,
        "patch.edgecolor": PAGE["light"],
        "savefig.transparent": True,
        "svg.fonttype": "none",
        "svg.hashsalt": "nanoqwen",
    })  # fmt: skip


def to_svg(fig: MplFigure, slug: str) -> str:
    """``fig`` as SVG markup for a page; ``slug`` keeps its ids apart from those of other figures on the page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanoqwen"}):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # matplotlib's rule for joins is meant for its own file; inside a page it would apply to everything. display.py says it again.
    text = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    # A hundredth of a point is finer than any screen, and keeps the page small. Labels stand between tags and keep their digits.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), tag.group()), text)
    # Labels take the font of the page; the size stays. matplotlib writes both as one CSS shorthand.
    text = re.sub(r"(font:[^;\"]*?\d(?:\.\d+)?px)[^;\"]*", r"\1 var(--nq-figure-font, sans-serif)", text)
    text = re.sub(r"font-family:[^;\"]*", "font-family: var(--nq-figure-font, sans-serif)", text)
    return follow_theme(_local_ids(text, slug)).strip()


def _local_ids(text: str, slug: str) -> str:
    """Drop ids that nothing refers to, and prefix the others: ids must be unique in the page, not in the figure."""
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{slug}-{m.group(1)}"' if m.group(1) in used else "", text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{slug}-\1)", text)
    return re.sub(r'href="#([^"]+)"', rf'href="#{slug}-\1"', text)
