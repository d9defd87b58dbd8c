"""The tables of measured numbers, from receipts: for the README, which is plain Markdown, and for the book's pages.

``python -m nanoqwen.book.measured`` writes them into the README between its two marks; a test compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from nanoqwen.bench.receipts import receipts_folder
from nanoqwen.book.facts import quoted
from nanoqwen.book.receipts import Receipt, available, receipt
from nanoqwen.errors import InputError

BEGIN, END = "<!-- measured: written by python -m nanoqwen.book.measured -->", "<!-- /measured -->"
#: Shapes in the order of a decode step: name in gemv.json, words.
SHAPES = (("qkv", "q, k, v"), ("o", "o"), ("gate_up", "gate, up"), ("down", "down"), ("lm_head", "output head (FP16)"))
ENGINES = ("persistent", "graph", "eager")


def measured_markdown() -> str:
    """Every table whose receipt exists, each with the line that names device, date and command. Raises InputError when none does."""
    parts = [make(receipt(name)) for name, make in _PARTS.items() if name in available()]
    if not parts:
        raise InputError(f"{receipts_folder()}: no receipt of a Hopper card yet; run `nanoqwen bench e2e synthetic:7b` on one")
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], made: Receipt) -> str:
    lines = ["| " + " | ".join(head) + " |", "|:---|" + "---:|" * (len(head) - 1), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + f"\n\n{made.caption()}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _end_to_end(made: Receipt) -> str:
    engines, p = made.results["engines"], made.protocol
    rows = []
    for name in ENGINES:
        if found := engines.get(name):
            share = found.get("datasheet_share")
            rows.append([
                f"`{name}`", f"{found['itl_ms']:.3f} ms", f"{found['tokens_per_s']:.0f}", _percent(found["mbu"]), _percent(share) if share else "",
                f"{found['ttft_ms']:.1f} ms",
            ])  # fmt: skip
    labels = {row["of"]: row["label"] for row in quoted()["to_measure"]}
    for name, found in made.results.get("peers", {}).items():
        rows.append([labels.get(f"peers.{name}", name), f"{found['itl_ms']:.3f} ms", f"{found['tokens_per_s']:.0f}", _percent(found["mbu"]) if found.get("mbu") else "", "", f"{found['ttft_ms']:.1f} ms"])
    table = _table(["Engine", "a token", "tokens/s", "of the read ceiling", "of the data sheet", f"first token ({p['prompt_tokens']} in)"], rows, made)
    return (
        f"Weights of the 7B's shapes, batch {p['batch']}, {p['prompt_tokens']} prompt tokens, {p['gen_tokens']} generated, greedy, default clocks. The read "
        f"ceiling, {made.results['ceiling_gb_s']:,.0f} GB/s, is what a kernel that only reads gets from this card in the same run.\n\n{table}"
    )


def _gemv(made: Receipt) -> str:
    shapes = made.results["shapes"]
    rows = [
        [words, f"{found['rows']:,} x {found['cols']:,}", f"{found['us']:.2f} us", f"{found['gb_s']:,.0f}", _percent(found["mbu"])]
        for name, words in SHAPES if (found := shapes.get(name))
    ]  # fmt: skip
    return _table(["Matrix, INT4 unless it says FP16", "rows x columns", "a launch", "GB/s", "of the read ceiling"], rows, made)


def _context(made: Receipt) -> str:
    engines = {name: made.results["engines"][name] for name in ENGINES if name in made.results["engines"]}
    depths = sorted({int(depth) for found in engines.values() for depth in found})
    rows = [
        [f"{depth:,}", *(f"{found[str(depth)]['itl_ms']:.3f} ms, {_percent(found[str(depth)]['mbu'])}" if str(depth) in found else "" for found in engines.values())]
        for depth in depths
    ]  # fmt: skip
    return _table(["Tokens held", *(f"`{name}`, a token, of the ceiling" for name in engines)], rows, made)


def _prefill(made: Receipt) -> str:
    """First tokens by the prompt's length, the products of all layers alone, and cuBLAS in FP16 beside them where it was measured."""
    found = made.results["engines"]["graph"]
    rows = []
    for n, first in found["lengths"].items():
        alone = found["products"].get(n, {})
        rows.append([
            f"{int(n):,}", f"{first['cold_ms']:,.1f} ms", f"{first['ttft_ms']:,.1f} ms", f"{first['tokens_per_s']:,.0f}",
            *(f"{alone[key]:.2f} ms" if key in alone else "" for key in ("cold_ms", "cublas_cold_ms")),
        ])  # fmt: skip
    return _table(["Prompt, tokens", "first token, cold", "sustained", "tokens/s", "products alone, cold", "the same by cuBLAS in FP16"], rows, made)


_PARTS = {"e2e": _end_to_end, "gemv": _gemv, "context": _context, "prefill": _prefill}


def readme_with(text: str, measured: str) -> str:
    """``text`` of the README with ``measured`` between its marks. Raises InputError when a mark is missing."""
    if BEGIN not in text or END not in text:
        raise InputError(f"README.md lacks the marks {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"


def main() -> int:
    """Write the README of the clone."""
    path = receipts_folder().parents[1] / "README.md"
    path.write_text(readme_with(path.read_text(encoding="utf-8"), measured_markdown()), encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
