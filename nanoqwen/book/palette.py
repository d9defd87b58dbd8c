"""One colour for each memory space and each engine, in a light and a dark version.

The values were chosen by search: under normal vision and under simulated protanopia, deuteranopia and tritanopia, members of one
family stay at least 13 apart in CIE Lab and any two at least 10, and each has a contrast of 3:1 or more against the page it stands
on. ``tests/book/test_palette.py`` recomputes that. Even so, colour never carries a meaning alone: lines also differ in marker, bars
in hatch, and both are labelled.

A drawing uses the light value. When it is shown in a page, each known value becomes a CSS variable with that value as its fallback,
so the dark theme can put its own version there; ``book/_static/book.css`` defines the same variables for the built book.
"""

from __future__ import annotations

#: Memory spaces of a GPU, from far and large to near and small.
MEMORY = {"hbm": "#0a4d8c", "l2": "#3a96dc", "shared": "#007f5c", "registers": "#b98200"}
#: Engines, from slow to fast.
ENGINE = {"cpu": "#3f444b", "eager": "#a2300a", "graph": "#c76fae", "persistent": "#7a5bd0"}
#: Marker of an engine's line and hatch of its bar (matplotlib's letters).
MARKER = {"cpu": "s", "eager": "^", "graph": "o", "persistent": "D"}
HATCH = {"cpu": "", "eager": "//", "graph": "\\\\", "persistent": "xx"}

#: Text and axes: becomes the page's text colour.
INK = "#59616b"
#: Hair lines, grids, outlines of what is not under study.
RULE = "#aab1b9"
#: The one thing a figure points at.
ACCENT = "#b3480f"

LIGHT = {**MEMORY, **ENGINE, "rule": RULE, "accent": ACCENT}
DARK = {
    "hbm": "#3f86d6", "l2": "#a8dcff", "shared": "#2fd39a", "registers": "#efc22f",
    "cpu": "#c4c7cc", "eager": "#ee6a33", "graph": "#d96a9b", "persistent": "#b39dfa",
    "rule": "#4a525c", "accent": "#ffa366",
}  # fmt: skip
#: Grounds of the built book's two themes, against which contrast is checked.
PAGE = {"light": "#fcfcfa", "dark": "#15191e"}


def css_colour(name: str) -> str:
    """``var(--nq-hbm, #0a4d8c)``: follows the theme, and has a value where no style sheet is."""
    return f"var(--nq-{name}, {LIGHT[name]})"


def follow_theme(svg: str) -> str:
    """Replace the palette's light values in SVG markup by what follows the theme."""
    svg = svg.replace(INK, "currentColor").replace(PAGE["light"], f"var(--nq-page, {PAGE['light']})")
    for name, value in LIGHT.items():
        svg = svg.replace(value, css_colour(name))
    return svg


def jupyter_dark_rule() -> str:
    """A CSS rule that gives figures their dark version in JupyterLab, where the book's style sheet is absent."""
    values = ";".join(f"--nq-{name}:{value}" for name, value in {**DARK, "page": PAGE["dark"]}.items())
    return f'[data-jp-theme-light="false"] .nq-figure{{{values}}}'
