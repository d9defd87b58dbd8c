"""Colours are told apart with every kind of colour vision, stand out from the page, and are the style sheet's."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from nanoqwen.book import palette

CSS = Path(__file__).resolve().parents[2] / "book" / "_static" / "book.css"

# Linear-RGB matrices of Machado, Oliveira and Fernandes (2009), severity 1.0.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
THEMES = {"light": palette.LIGHT, "dark": palette.DARK}


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = xyz / [0.9505, 1.0, 1.089]
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISION)
def test_spaces_and_engines_are_told_apart(theme, vision):
    seen = {name: lab(VISION[vision] @ linear(THEMES[theme][name])) for name in (*palette.MEMORY, *palette.ENGINE)}
    for a, b in itertools.combinations(seen, 2):
        family = any(a in group and b in group for group in (palette.MEMORY, palette.ENGINE))
        assert np.linalg.norm(seen[a] - seen[b]) >= (13 if family else 10), (a, b)


@pytest.mark.parametrize("theme", THEMES)
def test_colours_stand_out_from_the_page(theme):
    for name, colour in THEMES[theme].items():
        if name != "rule":  # hair lines may be faint: nothing is lost when they are not seen
            assert contrast(colour, palette.PAGE[theme]) >= 3, name
    assert contrast(THEMES[theme]["accent"], palette.PAGE[theme]) >= 4.5, "the accent is also a text colour"


def test_ink_is_readable_on_both_pages_where_no_theme_applies():
    assert all(contrast(palette.INK, palette.PAGE["light"]) >= 4.5 for _ in THEMES)


@pytest.mark.parametrize("theme", THEMES)
def test_the_style_sheet_has_the_same_values(theme):
    block = re.search(rf'html\[data-theme="{theme}"\] \{{(.*?)\}}', CSS.read_text(encoding="utf-8"), re.S).group(1)
    values = dict(re.findall(r"--nq-([a-z0-9-]+): (#[0-9a-f]{6})", block))
    assert {name: values[name] for name in THEMES[theme]} == THEMES[theme]
    assert values["page"] == palette.PAGE[theme]
    for text in ("ink", "soft", "link"):
        assert contrast(values[text], values["page"]) >= 4.5, text
        assert contrast(values[text], values["panel"]) >= 4.5, text
    assert contrast(values["on-accent"], values["accent"]) >= 4.5


def test_engines_also_differ_in_marker_and_hatch():
    for marks in (palette.MARKER, palette.HATCH):
        assert marks.keys() == palette.ENGINE.keys() and len(set(marks.values())) == len(marks)
