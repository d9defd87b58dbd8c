"""Places for the interactive pieces.

The scripts in ``book/_static`` fill a place in the built book. In a notebook, or without JavaScript, the still figure stays, and it
shows the same facts. All numbers travel with the place as JSON from ``config/nanoqwen.yaml``; the scripts hold none.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from typing import Any, Callable

from nanoqwen.book.display import Html, svg
from nanoqwen.book.facts import quoted
from nanoqwen.book.palette import css_colour
from nanoqwen.config import Dims, load_settings
from nanoqwen.model import bytes_per_token


def widget(name: str) -> Html:
    """The interactive piece ``name``: "nibble-map" or "token-bytes". Raises ValueError for another name."""
    if name not in WIDGETS:
        raise ValueError(f"no widget is called {name!r}; there are: {', '.join(WIDGETS)}")
    config, still = WIDGETS[name]()
    place = f'<div class="nq-widget" data-nq="{name}" data-config="{html.escape(json.dumps(config))}">\n{still.markup}\n</div>'
    return Html(place, f"<widget: {name}>")


def _nibble_map() -> tuple[dict[str, Any], Html]:
    quant = load_settings().quant
    return {"shuffle_bits": quant.shuffle_bits, "id": "nq-nibble-step"}, _nibble_still(quant.shuffle_bits)


def _nibble_still(shifts: tuple[int, ...]) -> Html:
    """The word as two halves of four nibbles, highest bit first."""
    parts = []
    for row, start in enumerate((16, 0)):
        y = 22 + 74 * row
        parts.append(f'<text x="0" y="{y + 24}" font-size="12" fill="currentColor">{"high" if start else "low"} half</text>')
        for column, base in enumerate(range(start + 12, start - 1, -4)):
            x, weight = 76 + 96 * column, shifts.index(base)
            parts += [
                f'<rect x="{x}" y="{y}" width="88" height="36" rx="5" fill="none" stroke="{css_colour("rule")}"/>',
                f'<text x="{x + 44}" y="{y + 24}" font-size="15" font-weight="600" text-anchor="middle" fill="currentColor">w{weight}</text>',
                f'<text x="{x + 44}" y="{y + 52}" font-size="12" text-anchor="middle" fill="currentColor">bits {base + 3} to {base}</text>',
            ]
    order = ", ".join(f"w{i} at bit {bit}" for i, bit in enumerate(shifts))
    markup = f'<svg viewBox="0 0 460 154"><g font-family="var(--nq-figure-font, sans-serif)">{"".join(parts)}</g></svg>'
    return svg(
        markup,
        title="eight weights in a 32-bit word, in ValueShuffle order",
        alt=f"Where each weight sits in the word: {order}.",
        caption="`word >> 4j & 0x000F000F` is the pair (w2j, w2j+1), one weight in each half.",
    )


def _token_bytes() -> tuple[dict[str, Any], Html]:
    settings = load_settings()
    dims = Dims.qwen2_5_coder_7b()
    keys = ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab")
    config = {
        "models": {name: {key: asdict(model)[key] for key in keys} for name, model in settings.models.items()},
        "bits": settings.quant.bits,
        "group": settings.quant.group,
        "groups": settings.quant.allowed_groups,
        "context": settings.benchmark.prompt_tokens,
        "value_bytes": settings.kv.value_bytes,
        "bandwidth": quoted()["bandwidth_gb_s"],
    }
    return config, _bytes_still(bytes_per_token(dims, settings.quant.group, settings.benchmark.prompt_tokens), settings.benchmark.prompt_tokens)


def _bytes_still(sizes: dict[str, int], context: int) -> Html:
    """One bar of all bytes, and a line for each kind."""
    names = {"int4": "INT4 weights", "scales": "their scales", "lm_head": "output head", "kv": f"KV cache of {context} tokens"}
    kinds = {label: sizes[key] for key, label in names.items()}
    total = sizes["total"]
    parts, x = [], 0.0
    for number, (label, size) in enumerate(kinds.items()):
        width = 460 * size / total
        fill = f'fill="{css_colour("hbm")}" fill-opacity="{1 - 0.24 * number:.2f}"'
        y = 62 + 22 * number
        parts += [
            f'<rect x="{x:.1f}" y="4" width="{max(width, 1):.1f}" height="30" {fill}/>',
            f'<rect x="0" y="{y - 10}" width="12" height="12" {fill}/>',
            f'<text x="20" y="{y}" font-size="13" fill="currentColor">{label}</text>',
            f'<text x="300" y="{y}" font-size="13" text-anchor="end" fill="currentColor">{size / 1e9:.3f} GB</text>',
            f'<text x="380" y="{y}" font-size="13" text-anchor="end" fill="currentColor">{100 * size / total:.1f}%</text>',
        ]
        x += width
    markup = f'<svg viewBox="0 0 460 136"><g font-family="var(--nq-figure-font, sans-serif)">{"".join(parts)}</g></svg>'
    spoken = ", ".join(f"{label} {size / 1e9:.3f} GB" for label, size in kinds.items())
    return svg(
        markup,
        title="the bytes one token reads",
        alt=f"Of {total / 1e9:.3f} GB a token: {spoken}; the rest is below a thousandth.",
        caption=f"Qwen2.5-Coder-7B with INT4 projections: {total / 1e9:.3f} GB a token.",
    )


WIDGETS: dict[str, Callable[[], tuple[dict[str, Any], Html]]] = {"nibble-map": _nibble_map, "token-bytes": _token_bytes}
