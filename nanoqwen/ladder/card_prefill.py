"""Unit tier of the Hopper engines, prefill: its kernels watched while the engine runs a chunk of a prompt.

Prefill makes its launches as it goes, so they are not fed one by one. The whole chunk runs, and what a kernel finds and leaves
in the workspace is copied before and after it; the twin gets the former and is compared with the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import cupy
import numpy as np

from nanoqwen.kv import pages_for
from nanoqwen.ladder import twins
from nanoqwen.ladder.card import Card
from nanoqwen.ladder.report import Check, compare, within
from nanoqwen.packfile import PackFile

#: A chunk whose elementwise kernels are looked at: three full pages and one token.
TOKENS = 49
#: Query rows of a chunk that the attention twin computes: every edge of a 64-query tile and of a warp's 16.
EDGES = (0, 1, 15, 16, 17, 48, 63, 64, 65, 127, 128, 255, 256, 383, 447, 448, 495, 496, 510, 511)
#: Half a unit in the last place of FP16, relative, and half the step of its subnormal numbers.
FP16_ROUNDING, FP16_TINY = 2.0**-11, 2.0**-25


class _Watch:
    """Copies of the workspace around chosen kernels. ``wanted`` are (kernel, number of it)."""

    def __init__(self, card: Card, n: int, wanted: Sequence[tuple[str, int]]) -> None:
        self.card, self.n, self.wanted = card, n, set(wanted)
        self.found: dict[tuple[str, int, str], dict[str, np.ndarray]] = {}

    def __call__(self, name: str, k: int, when: str) -> None:
        if (name, k) in self.wanted:
            self.found[name, k, when] = self._copy(name, k)

    def _copy(self, name: str, k: int) -> dict[str, np.ndarray]:
        card, n, dims = self.card, self.n, self.card.dims
        p = card.engine._prefiller
        if name == "dequantise":
            matrix = matrices(card, k // 4)[k % 4][0]
            rows = sample_rows(matrix.rows)
            with card.stream:
                wide = p._wide[: matrix.rows * matrix.cols].reshape(matrix.rows, matrix.cols)[cupy.asarray(rows)]
            return {"rows": rows, "wide": card.read(wide)}
        columns = {"norm_rows": dims.hidden, "swiglu_rows": dims.intermediate}.get(name, dims.q_size)
        products = {"norm_rows": dims.hidden, "rope_append_rows": dims.q_size + 2 * dims.kv_size, "swiglu_rows": 2 * dims.intermediate}.get(name, 0)
        return {
            "residual": card.read(p._residual[:n]), "factor": card.read(p._factor[:n])[:, None], "q": card.read(p._q[:n]),
            "x": card.read(p._x[: n * columns]).reshape(n, columns), "product": card.read(p._product[: n * products]).reshape(n, products),
        }  # fmt: skip


def matrices(card: Card, layer: int) -> list[tuple[object, tuple[str, ...]]]:
    """The projections of a layer in the order of prefill: (matrix on the card, names of the tensors that it stacks)."""
    held, p = card.weights.layers[layer], f"model.layers.{layer}."
    return [
        (held.qkv, tuple(f"{p}self_attn.{x}_proj.weight" for x in "qkv")), (held.o, (p + "self_attn.o_proj.weight",)),
        (held.gate_up, (p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight")), (held.down, (p + "mlp.down_proj.weight",)),
    ]  # fmt: skip


def sample_rows(rows: int, size: int = 32) -> np.ndarray:
    """First and last rows of a matrix and some in the middle."""
    return np.unique(np.clip(np.r_[:size, rows // 2 + 5 : rows // 2 + 5 + size, rows - size : rows], 0, rows - 1))


def checks(pack: PackFile, card: Card, rng: np.random.Generator, limit: float, lengths: list[int], layers: list[int]) -> Iterator[Check]:
    """Every check of the prefill kernels; ``lengths`` are prompts whose last chunk is run, ``layers`` those that are looked at."""
    yield from _elementwise(pack, card, rng, limit, layers)
    for n in lengths:
        yield from _attention(card, rng, limit, n, layers[-1] if n == lengths[-1] else 0)


def _ids(card: Card, n: int) -> list[int]:
    """Varied ids: with one repeated token all values are equal, and page errors cancel."""
    return [pow(7, i, 9973) % card.dims.vocab for i in range(n)]


def _chunk(card: Card, rng: np.random.Generator, n: int, wanted: Sequence[tuple[str, int]]) -> tuple[_Watch, int, np.ndarray]:
    """Run the last chunk of a prompt of ``n`` tokens, random keys and values before it: (what was seen, its position, the table)."""
    dims, chunk = card.dims, card.engine._prefiller._chunk
    position = (n - 1) // chunk * chunk
    table = card.lay_out(n, rng)
    everywhere = slice(0, dims.num_layers)
    if position:
        before = [rng.standard_normal((position, dims.num_kv_heads, dims.head_dim)).astype(np.float16) for _ in range(2)]
        card.put(everywhere, table, *before)
    card.zero(everywhere, table[pages_for(position, card.page_tokens) :])
    watch = _Watch(card, n - position, wanted)
    card.prefill(_ids(card, n - position), position, watch)
    return watch, position, table


def _elementwise(pack: PackFile, card: Card, rng: np.random.Generator, limit: float, layers: list[int]) -> Iterator[Check]:
    dims, n = card.dims, min(TOKENS, card.engine.context_limit)
    wanted = [(name, k) for i in layers for name, k in (
        ("norm_rows", 2 * i), ("norm_rows", 2 * i + 1), ("swiglu_rows", i), ("rope_append_rows", i), *(("dequantise", 4 * i + j) for j in range(4)),
    )]  # fmt: skip
    watch, _, table = _chunk(card, rng, n, wanted)
    seen = watch.found
    for i in layers:
        p = f"model.layers.{i}."
        for j, (_, names) in enumerate(matrices(card, i)):
            if (after := seen.get(("dequantise", 4 * i + j, "after"))) is None:
                continue
            yield compare(f"layer {i} dequantise {j}", after["wide"], _fp16_rows(pack, names, after["rows"]), 0.0, f"{len(after['rows'])} rows, bit for bit")
        for j, gain in enumerate(("input_layernorm", "post_attention_layernorm")):
            before, after = (_wide(seen["norm_rows", 2 * i + j, when]) for when in ("before", "after"))
            # The product before a first norm is the layer before's down projection with its factor; before a second it is o, unscaled.
            total = before["residual"] + (0 if i == j == 0 else before["product"] * (1 if j else before["factor"]))
            yield compare(f"layer {i} norm_rows {j + 1}: residual", after["residual"], total, limit)
            y = twins.rms_norm(total, twins.vector(pack, f"{p}{gain}.weight"), dims.rms_eps)
            yield within(f"layer {i} norm_rows {j + 1}", after["x"] * after["factor"], y, row_bound(y, limit))

        before, after = (_wide(seen["rope_append_rows", i, when]) for when in ("before", "after"))
        bias = np.concatenate([twins.vector(pack, f"{p}self_attn.{x}_proj.bias") for x in "qkv"])
        heads = (before["product"] * before["factor"] + bias).reshape(n, -1, dims.head_dim)
        turned = twins.rope(heads[:, : -dims.num_kv_heads], np.arange(n), dims.rope_theta)
        yield compare(f"layer {i} rope_append_rows: q", after["q"], turned[:, : dims.num_heads], limit)
        expected = np.stack([turned[:, dims.num_heads :], heads[:, -dims.num_kv_heads :]])
        yield within(f"layer {i} rope_append_rows: keys and values", np.stack(card.take(i, table, n)), expected, row_bound(expected, limit))

        before, after = (_wide(seen["swiglu_rows", i, when]) for when in ("before", "after"))
        gate, up = np.split(before["product"] * before["factor"], 2, axis=1)
        y = twins.swiglu(gate, up)
        yield within(f"layer {i} swiglu_rows", after["x"] * after["factor"], y, row_bound(y, limit))


def _attention(card: Card, rng: np.random.Generator, limit: float, n: int, layer: int) -> Iterator[Check]:
    """The last chunk of a prompt of ``n`` tokens, over pages in shuffled order between pages full of NaN."""
    dims = card.dims
    watch, position, table = _chunk(card, rng, n, [("prefill_attention", layer)])
    q = watch.found["prefill_attention", layer, "before"]["q"].astype(np.float64)
    out = watch.found["prefill_attention", layer, "after"]["x"]
    keys, values = (rows.astype(np.float64) for rows in card.take(layer, table, n))
    rows = sorted({r for r in (*EDGES, len(q) - 2, len(q) - 1) if 0 <= r < len(q)})
    expected = np.concatenate([
        twins.attention(q[r : r + 1], keys[: position + r + 1], values[: position + r + 1], position + r) for r in rows
    ])  # fmt: skip
    yield within(
        f"layer {layer} prefill_attention, prompt of {n}", out[rows].astype(np.float64), expected, row_bound(expected, limit),
        f"{len(rows)} rows of the chunk at {position}, {len(table)} shuffled pages between NaN",
    )  # fmt: skip


def row_bound(expected: np.ndarray, limit: float) -> np.ndarray:
    """One rounding to FP16 of each element [..., columns], and ``limit`` of the largest of a row for the FP32 before it."""
    size = np.abs(expected)
    return size * FP16_ROUNDING + limit * size.max(axis=-1, keepdims=True) + FP16_TINY


def _wide(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore"):  # a buffer that nothing has been written to may hold anything
        return {name: array.astype(np.float64) for name, array in arrays.items()}


def _fp16_rows(pack: PackFile, names: Sequence[str], rows: np.ndarray) -> np.ndarray:
    """Rows of stacked projections as float64, once rounded to FP16; rows past the end are padding, zeros."""
    out, first = np.zeros((len(rows), pack.tensors[names[0]].cols)), 0
    for name in names:
        words, scales = pack.int4(name)
        mine = (rows >= first) & (rows < first + len(words))
        if mine.any():
            at = rows[mine] - first
            out[mine] = twins.dequantize(words[at], scales[at]).astype(np.float16)
        first += len(words)
    return out
