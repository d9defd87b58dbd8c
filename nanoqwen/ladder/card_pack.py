"""The weights on the card as a file: what a Hopper engine holds, read back under the names of the tensors.

A planned model (``synthetic:7b``) has no payloads on a disk. Its oracles read the card's own copy through the methods of a
``PackFile``: so they compute with the very codes and scales that the kernels stream. That these are the right ones is checked
apart: bit for bit against the recipe in numpy, or against the file where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from nanoqwen import model
from nanoqwen.ladder import layouts
from nanoqwen.ladder.report import Check, none_wrong
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import fp16_rows, int4_rows, is_planned

#: Rows of a tensor that are compared with the recipe: its first and last ones, and some in the middle. Making all of them with
#: numpy would take minutes for the 7B.
ROWS = 48
#: Projections kept on the host at a time: the twins ask for one matrix many times in a row.
KEPT = 4


class CardPack(PackFile):
    """A planned file whose payloads are those on the card. ``int4`` and ``fp16`` copy them to the host."""

    def __init__(self, plan: PackFile, weights) -> None:
        super().__init__(plan.path, None, plan.header, plan.tensors, plan.meta, plan.tokenizer_bytes)
        self.int4 = lru_cache(KEPT)(lambda name: _int4(self, weights, name))
        self.fp16 = lru_cache(KEPT)(lambda name: _fp16(self, weights, name))


def _place(name: str) -> tuple[int, str]:
    """("model.layers.3.mlp.up_proj.weight") -> (3, "up_proj")."""
    words = name.split(".")
    return int(words[2]), words[-2]


def _int4(pack: PackFile, weights, name: str) -> tuple[np.ndarray, np.ndarray]:
    """words uint32 [rows, cols // 8] and scales float16 [rows, groups] of a projection."""
    from nanoqwen.cuda.weights import untile_int4

    layer, kind = _place(name)
    dims, held = pack.dims, weights.layers[layer]
    fused, first = {
        "q_proj": (held.qkv, 0), "k_proj": (held.qkv, dims.q_size), "v_proj": (held.qkv, dims.q_size + dims.kv_size),
        "o_proj": (held.o, 0), "gate_proj": (held.gate_up, 0), "up_proj": (held.gate_up, dims.intermediate), "down_proj": (held.down, 0),
    }[kind]  # fmt: skip
    words, scales = untile_int4(fused, weights.group)
    rows = slice(first, first + pack.tensors[name].rows)
    return words[rows].get(), scales[rows].get()


def _fp16(pack: PackFile, weights, name: str) -> np.ndarray:
    """float16 [rows, cols] of a vocabulary, or [cols] of a norm or bias."""
    dims = pack.dims
    if name in (model.EMBED, model.LM_HEAD):
        if name == model.EMBED and not dims.tied:
            return weights.embedding[: dims.vocab].get()
        padded = -(-dims.vocab // layouts.TILE_ROWS) * layouts.TILE_ROWS
        return layouts.untile(weights.head.get(), padded, dims.hidden)[: dims.vocab]
    if name == model.FINAL_NORM:
        return weights.final_norm.get()
    layer, kind = _place(name)
    held = weights.layers[layer]
    vectors = {"input_layernorm": held.input_norm, "post_attention_layernorm": held.post_norm, "q_proj": held.q_bias, "k_proj": held.k_bias, "v_proj": held.v_bias}
    return vectors[kind].get()


def weight_checks(pack: PackFile, weights) -> Iterator[Check]:
    """Whether what lies on the card is what should: rows of every kind of tensor of the first and the last layer, bit for bit."""
    dims = pack.dims
    held = pack if isinstance(pack, CardPack) else CardPack(pack, weights)
    source = "the recipe" if is_planned(pack) else "the file"
    layers = sorted({0, dims.num_layers - 1})
    kept = {spec.name for layer in layers for spec in model.block_schema(dims, layer)} | {model.EMBED, model.FINAL_NORM, model.LM_HEAD}
    for spec in model.schema(dims):
        if spec.name not in kept:
            continue
        wrong, rows = 0, spans(spec.rows)
        for first, last in rows:
            ours, theirs = _rows(held, spec, first, last), _expected(pack, spec, first, last)
            wrong += sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(ours, theirs))
        yield none_wrong(f"on the card: {spec.name}", wrong, "wrong bytes", f"{sum(b - a for a, b in rows)} rows against {source}, bit for bit")


def spans(rows: int) -> list[tuple[int, int]]:
    """First and last rows of a tensor and some in the middle, as (first, last); the whole of a small one."""
    if rows <= 3 * ROWS:
        return [(0, rows)]
    middle = rows // 2 + 5  # not where a tile of 16 begins
    return [(0, ROWS), (middle, middle + ROWS), (rows - ROWS, rows)]


def _rows(pack: PackFile, spec: model.TensorSpec, first: int, last: int) -> list[np.ndarray]:
    found = pack.int4(spec.name) if spec.int4 else (np.atleast_2d(pack.fp16(spec.name)),)
    return [np.ascontiguousarray(array[first:last]) for array in found]


def _expected(pack: PackFile, spec: model.TensorSpec, first: int, last: int) -> list[np.ndarray]:
    if not is_planned(pack):
        return _rows(pack, spec, first, last)
    made = int4_rows(spec, pack.dims, pack.group_size, first, last) if spec.int4 else (fp16_rows(spec, pack.dims, first, last),)
    return [np.ascontiguousarray(array) for array in made]
