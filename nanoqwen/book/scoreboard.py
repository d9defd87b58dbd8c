"""The scoreboard of the first page: milliseconds a token, on a logarithmic scale.

Three kinds of row, told apart by shape and by words: what the original article reported, what this repository has measured
(from receipts), and what a chapter will measure. A row without a receipt shows no number. The bound is computed, not measured.
"""

from __future__ import annotations

import html
import math

from nanoqwen.book.display import inline
from nanoqwen.book.facts import facts, quoted
from nanoqwen.book.receipts import Receipt, available, receipt
from nanoqwen.config import Dims

#: Ends and ticks of the scale, in milliseconds a token.
_LOW, _HIGH = 0.5, 200.0
_TICKS = (1, 10, 100)


def position(ms: float) -> float:
    """Where ``ms`` stands on the scale, in percent of its width."""
    return 100 * (math.log(ms) - math.log(_LOW)) / (math.log(_HIGH) - math.log(_LOW))


def scoreboard_html() -> str:
    """The scoreboard as a table: it reads in order without its graphics."""
    articles, limit = quoted()["articles"], float(facts()["limit-ms-h100"])
    rows = [_row(r["label"], r["engine"], r["ms_per_token"], f"{articles['device']}, {articles['source']}", "reported") for r in articles["rows"]]
    commands: dict[str, None] = {}
    for r in quoted()["to_measure"]:
        made = receipt(r["receipt"]) if r["receipt"] in available() else None
        ms = measured_ms(made, r["of"]) if made else None
        if ms is not None:
            rows.append(_row(r["label"], r["engine"], ms, f"{made.device}, {made.date}", "measured", limit))
            commands[made.command] = None
        else:
            rows.append(_row(r["label"], r["engine"], None, f"to be measured in chapter {r['chapter']:02d}", "open"))
    computed = f"computed: bytes of a token at an H100's {facts()['h100-gb-s']} GB/s by data sheet"
    bound = _row("the bound: every byte once", "bound", limit, computed, "bound")
    marks = ";".join(f"--t{tick}:{position(tick):.2f}%" for tick in _TICKS)
    ticks = "".join(f'<span style="left:{position(tick):.2f}%">{tick}</span>' for tick in _TICKS)
    bench = f"batch 1, {facts()['bench-prompt']} prompt tokens, {facts()['bench-gen']} generated"
    measured_by = f" Measured by {inline(', '.join(f'`{command}`' for command in commands))}." if commands else ""
    return (
        f'<div class="nq-score" style="--limit:{position(limit):.2f}%;{marks}"><table>'
        f"<caption>Milliseconds to decode one token, {bench}. Shorter is faster; the scale is logarithmic.{measured_by}</caption>"
        '<thead><tr><th scope="col">Runtime</th><th scope="col">ms a token</th></tr></thead>'
        "<tbody>" + "\n".join([*rows, bound]) + "</tbody>"
        f'<tfoot aria-hidden="true"><tr><th></th><td>{ticks}<span>ms</span></td></tr></tfoot></table></div>'
    )


def measured_ms(made: Receipt, entry: str) -> float | None:
    """Milliseconds a token of ``entry`` ("engines.graph", "peers.llama.cpp") in an end-to-end receipt.

    None when it was not measured, or not on a model of the 7B's dimensions: this scoreboard compares one size only.
    """
    seven, model = Dims.qwen2_5_coder_7b(), made.results.get("model", {})
    if (model.get("layers"), model.get("hidden"), model.get("vocab")) != (seven.num_layers, seven.hidden, seven.vocab):
        return None
    kind, _, name = entry.partition(".")
    return made.results.get(kind, {}).get(name, {}).get("itl_ms")


def _row(label: str, engine: str, ms: float | None, note: str, kind: str, limit: float = math.inf) -> str:
    """A value that stands beside its bar begins behind the line at ``limit``, which would cross it out."""
    width = 100.0 if ms is None else position(ms)
    clear = f";--clear:{100 * (position(limit) - width) / width:.2f}%" if ms and ms < limit < math.inf else ""
    value = "not measured yet" if ms is None else f"{ms:.3g} ms"
    return (
        f'<tr class="nq-{kind} nq-engine-{engine}"><th scope="row">{html.escape(label)}<small>{inline(note)}</small></th>'
        f'<td><span class="nq-bar" style="--w:{width:.2f}%{clear}"><span class="nq-value">{value}</span></span></td></tr>'
    )
