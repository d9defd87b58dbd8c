"""The drawing that opens every chapter: a token's path through the runtime, with the part under study lit.

Two layouts of the same parts, one for a wide column and one for a phone; a media query inside the drawing shows one of them, so that
it also works in a notebook, where the book's style sheet is absent.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Iterable

from nanoqwen.book.display import Html, svg
from nanoqwen.book.palette import css_colour
from nanoqwen.config import Dims

#: Every part that can be lit, and how the alt text calls it.
PARTS = {
    "prompt": "the prompt's tokens",
    "embed": "the embedding row",
    "norm": "RMSNorm",
    "qkv": "the q, k and v projections",
    "rope": "RoPE and the append to the cache",
    "attention": "paged attention",
    "o": "the output projection",
    "gate_up": "the gate and up projections",
    "swiglu": "SwiGLU",
    "down": "the down projection",
    "lm_head": "the output head",
    "sample": "sampling",
    "file": "the .nanoqwen file",
    "kv": "the KV pages",
    "step": "the step as a whole: how its work is launched",
}
#: Names for several parts at once.
GROUPS = {
    "int4": ("qkv", "o", "gate_up", "down"),
    "layer": ("norm", "qkv", "rope", "attention", "o", "gate_up", "swiglu", "down"),
    "cache": ("kv", "rope", "attention"),
    "all": tuple(PARTS),
}

#: What a box reads from HBM at every step: "w" INT4 weights, "h" FP16 rows, "k" KV pages.
_READS = {"embed": "h", "lm_head": "h", "qkv": "w", "o": "w", "gate_up": "w", "down": "w", "attention": "k", "rope": "k"}
_LABEL = {
    "prompt": "prompt", "embed": "embed", "norm": "norm", "qkv": "q k v", "rope": "RoPE", "attention": "attention", "o": "o",
    "gate_up": "gate, up", "swiglu": "SwiGLU", "down": "down", "lm_head": "lm_head", "sample": "sample",
}  # fmt: skip
_BOX_H = 28


@dataclass(frozen=True)
class _Box:
    part: str
    x: float
    y: float
    w: float
    h: float = _BOX_H

    @property
    def mid(self) -> tuple[float, float]:
        return self.x + self.w / 2, self.y + self.h / 2


def token_path(lit: str | Iterable[str] = ()) -> Html:
    """The drawing with the parts in ``lit`` (names in PARTS or GROUPS) lit. Raises ValueError for a name in neither."""
    names = [lit] if isinstance(lit, str) else list(lit)
    if unknown := [name for name in names if name not in PARTS and name not in GROUPS]:
        raise ValueError(f"unknown part {', '.join(unknown)}; parts: {', '.join(PARTS)}; groups: {', '.join(GROUPS)}")
    parts = {part for name in names for part in GROUPS.get(name, (name,))}
    layers = Dims.qwen2_5_coder_7b().num_layers
    spoken = ", ".join(text for part, text in PARTS.items() if part in parts) if len(parts) < len(PARTS) else "all of it"
    alt = (
        f"A token's path: prompt, embedding, {layers} layers of attention and MLP that read INT4 weights and KV pages, "
        f"output head, sampling, and back with the next token. Lit: {spoken or 'nothing'}."
    )
    draw = _Drawing(parts, layers)
    title = "a token's path through the runtime"
    return svg(_MEDIA + draw.wide() + draw.narrow(), title=f"{title}, lit: {', '.join(names) or 'nothing'}", alt=alt)


_MEDIA = (
    "<style>@media (max-width: 640px) {.nq-path-wide {display: none !important}} "
    "@media (min-width: 640.02px) {.nq-path-narrow {display: none !important}}</style>"
)


class _Drawing:
    """Shapes of one drawing. Lit shapes are filled; when most are lit, only tinted, to keep the whole calm."""

    def __init__(self, lit: set[str], layers: int) -> None:
        self.lit, self.layers = lit, layers
        self.soft = len(lit) > 6

    # ---- layouts ------------------------------------------------------------------------------------------
    def wide(self) -> str:
        prompt, embed = _Box("prompt", 4, 68, 62), _Box("embed", 92, 68, 70)
        up = self._row(["norm", "qkv", "rope", "attention", "o"], [50, 60, 64, 84, 42], 206, 50, gap=14)
        low = self._row(["norm", "gate_up", "swiglu", "down"], [50, 84, 76, 66], 206, 102, gap=26.6)
        head, sample = _Box("lm_head", 628, 68, 78), _Box("sample", 738, 68, 62)
        end = 588  # both rows end in a residual sum
        shapes = [
            self._frame("step", 80, 8, 638, 148, "one decode step", 92, 27),
            self._frame("", 192, 38, 414, 106, f"{self.layers} layers", 606, 32),
            *(self._box(box) for box in (prompt, embed, *up, *low, head, sample)),
            self._line(prompt, embed), self._line(embed, None, to=(189, 82)),
            *self._chain(up), *self._chain(low),
            self._plus(end, 64), self._line(up[-1], None, to=(end - 11, 64)),
            self._plus(end, 116), self._line(low[-1], None, to=(end - 11, 116)),
            self._arrow(f"M{end} 73 V82 Q{end} 90 {end - 8} 90 H206 Q198 90 198 98 V108 Q198 116 202 116 H204"),
            self._arrow("M606 82 H626"), self._line(head, sample),
            self._arrow("M769 96 V162 Q769 170 761 170 H135 Q127 170 127 162 V99"),
            self._text(448, 187, "the next token", small=True),
            self._tank("file", 80, 202, 312, ".nanoqwen file", "wh"), self._tank("kv", 406, 202, 312, "KV pages", "k"),
            self._text(72, 220, "in HBM", anchor="end", small=True),
        ]  # fmt: skip
        return self._svg("nq-path-wide", 804, 238, shapes)

    def narrow(self) -> str:
        prompt, embed = _Box("prompt", 24, 6, 118), _Box("embed", 24, 58, 118)
        left = self._column(["norm", "qkv", "rope", "attention", "o"], 24, 132, 118)
        right = self._column(["norm", "gate_up", "swiglu", "down"], 184, 132, 118)
        head, sample = _Box("lm_head", 184, 380, 118), _Box("sample", 184, 432, 118)
        shapes = [
            self._frame("step", 4, 46, 316, 374, "one decode step", 16, 408),
            self._frame("", 12, 102, 300, 264, f"{self.layers} layers", 304, 97),
            *(self._box(box) for box in (prompt, embed, *left, *right, head, sample)),
            self._line(prompt, embed, down=True), self._line(embed, left[0], down=True),
            *self._chain(left, down=True), *self._chain(right, down=True),
            self._plus(83, 340), self._line(left[-1], None, to=(83, 329), down=True),
            self._arrow("M92 340 H155 Q163 340 163 332 V128 Q163 120 171 120 H235 Q243 120 243 126 V130"),
            self._plus(243, 300), self._line(right[-1], None, to=(243, 289), down=True),
            self._arrow("M243 309 V378"), self._line(head, sample, down=True),
            self._arrow("M302 446 H318 Q326 446 326 438 V80 Q326 72 318 72 H145"),
            self._text(176, 451, "the next token", anchor="end", small=True),
            self._tank("file", 4, 476, 164, ".nanoqwen file", "wh"), self._tank("kv", 178, 476, 150, "KV pages", "k"),
        ]  # fmt: skip
        return self._svg("nq-path-narrow", 332, 508, shapes)

    # ---- pieces -------------------------------------------------------------------------------------------
    def _row(self, parts: list[str], widths: list[float], x: float, y: float, gap: float) -> list[_Box]:
        boxes = []
        for part, width in zip(parts, widths):
            boxes.append(_Box(part, x, y, width))
            x += width + gap
        return boxes

    def _column(self, parts: list[str], x: float, y: float, w: float) -> list[_Box]:
        return [_Box(part, x, y + 40 * i, w) for i, part in enumerate(parts)]

    def _chain(self, boxes: list[_Box], down: bool = False) -> list[str]:
        return [self._line(a, b, down=down) for a, b in zip(boxes, boxes[1:])]

    def _line(self, a: _Box, b: _Box | None, to: tuple[float, float] | None = None, down: bool = False) -> str:
        if down:
            x, y = a.mid[0], a.y + a.h
            end = to or (x, b.y - 2)
        else:
            x, y = a.x + a.w, a.mid[1]
            end = to or (b.x - 2, y)
        return self._arrow(f"M{x:g} {y:g} L{end[0]:g} {end[1]:g}")

    def _arrow(self, path: str) -> str:
        return f'<path d="{path}" fill="none" stroke="{css_colour("rule")}" stroke-width="1.4" marker-end="url(#NAME-tip)"/>'

    def _plus(self, x: float, y: float) -> str:
        cross = f"M{x - 4} {y} H{x + 4} M{x} {y - 4} V{y + 4}"
        return f'<circle cx="{x}" cy="{y}" r="9" fill="none" stroke="{css_colour("rule")}"/><path d="{cross}" stroke="currentColor"/>'

    def _fill(self, part: str) -> tuple[str, str, str]:
        """Attributes of a shape and colour and weight of its label."""
        if part not in self.lit:
            return f'fill="none" stroke="{css_colour("rule")}"', "currentColor", "400"
        accent = css_colour("accent")
        if self.soft:
            return f'fill="{accent}" fill-opacity="0.14" stroke="{accent}" stroke-width="1.6"', "currentColor", "600"
        return f'fill="{accent}" stroke="{accent}" stroke-width="1.6"', "var(--nq-on-accent, #ffffff)", "700"

    def _box(self, box: _Box) -> str:
        shape, colour, weight = self._fill(box.part)
        x, y = box.mid
        reads = _READS.get(box.part, "")
        shift = 6 if reads else 0
        mark = self._mark(reads, box.x + 6, y - 4, colour) if reads else ""
        rect = f'<rect x="{box.x}" y="{box.y}" width="{box.w}" height="{box.h}" rx="5" {shape}/>'
        return rect + mark + self._text(x + shift, y + 4.5, _LABEL[box.part], colour, weight)

    def _tank(self, part: str, x: float, y: float, w: float, label: str, reads: str) -> str:
        shape, colour, weight = self._fill(part)
        marks = "".join(self._mark(kind, x + 12 + 14 * i, y + 10, colour) for i, kind in enumerate(reads))
        rect = f'<rect x="{x}" y="{y}" width="{w}" height="{_BOX_H}" rx="5" {shape}/>'
        return rect + marks + self._text(x + 18 + 14 * len(reads), y + 18.5, label, colour, weight, anchor="start")

    def _mark(self, kind: str, x: float, y: float, on: str) -> str:
        """A little square: full for INT4 weights, open for FP16 rows, barred for KV pages."""
        colour = css_colour("hbm") if on == "currentColor" else on
        full = colour if kind == "w" else "none"
        bars = f'<path d="M{x} {y + 3} h8 M{x} {y + 5.6} h8" stroke="{colour}"/>' if kind == "k" else ""
        return f'<rect x="{x}" y="{y}" width="8" height="8" fill="{full}" stroke="{colour}"/>{bars}'

    def _frame(self, part: str, x: float, y: float, w: float, h: float, label: str, tx: float, ty: float) -> str:
        lit = bool(part) and part in self.lit
        stroke = css_colour("accent") if lit else css_colour("rule")
        dash = "" if part else ' stroke-dasharray="4 3"'
        fill = f'fill="{css_colour("accent")}" fill-opacity="0.07"' if lit else 'fill="none"'
        line = f'stroke="{stroke}" stroke-width="{2.4 if lit else 1}"{dash}'
        rect = f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="9" {fill} {line}/>'
        colour, weight = (stroke, "700") if lit else ("currentColor", "400")
        return rect + self._text(tx, ty, label, colour, weight, anchor="start" if part else "end", small=True)

    def _text(
        self, x: float, y: float, text: str, colour: str = "currentColor", weight: str = "400", anchor: str = "middle", small: bool = False
    ) -> str:
        return (
            f'<text x="{x:g}" y="{y:g}" font-size="{12 if small else 13}" font-weight="{weight}" text-anchor="{anchor}" '
            f'fill="{colour}">{html.escape(text)}</text>'
        )

    def _svg(self, name: str, width: int, height: int, shapes: list[str]) -> str:
        tip = (
            '<defs><marker id="NAME-tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{css_colour("rule")}"/></marker></defs>'
        )
        body = (tip + "\n" + "\n".join(shapes)).replace("NAME-tip", f"{name}-tip")
        return f'<svg class="{name}" viewBox="0 0 {width} {height}"><g font-family="var(--nq-figure-font, sans-serif)">\n{body}\n</g></svg>'
