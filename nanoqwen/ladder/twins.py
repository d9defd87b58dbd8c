"""The decoder once more, in float64 numpy, written from the formulas and sharing no code with what it checks.

Nothing here is fast and no result is kept: weights are unpacked nibble by nibble, attention is one dense softmax over the
whole sequence. When this file and an engine agree, two programs that have little in common agree.

Names are the usual ones: n tokens, H query heads on G key/value heads of D, x the residual stream [n, hidden].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from nanoqwen import model
from nanoqwen.config import Dims, load_settings
from nanoqwen.ladder.layouts import from_pages
from nanoqwen.packfile import FP16, PackFile

F64 = np.float64
#: Weights widened to float64 at a time (32 MiB), so that a matrix of any size can be multiplied.
BLOCK_WEIGHTS = 1 << 22


# ------------------------------------------------------------------------------------------------------------ weights


@lru_cache(maxsize=1)
def _half_words() -> list[tuple[list[int], np.ndarray]]:
    """For the low and the high 16 bits of a word: (the weights they hold, a table float64 [65536, 4] of these weights' codes).

    Plain arithmetic on the bit positions of the settings. A nibble is two's complement: 8..15 stand for -8..-1.
    """
    tables, half = [], np.arange(1 << 16)
    for first in (0, 16):
        inside = {bit - first: i for i, bit in enumerate(load_settings().quant.shuffle_bits) if first <= bit < first + 16}
        nibbles = np.stack([half // (1 << bit) % 16 for bit in inside], axis=1)
        tables.append((list(inside.values()), np.where(nibbles >= 8, nibbles - 16, nibbles).astype(F64)))
    return tables


def unpack_words(words: np.ndarray) -> np.ndarray:
    """Words uint32 [rows, cols / 8] -> codes float64 [rows, cols], half a word at a time."""
    codes = np.empty((*words.shape, 8), F64)
    for (inside, table), half in zip(_half_words(), (words % np.uint32(1 << 16), words // np.uint32(1 << 16))):
        codes[..., inside] = table[half]
    return codes.reshape(words.shape[0], -1)


def dequantize(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Words uint32 [rows, cols / 8], scales float16 [rows, groups] -> float64 [rows, cols]: code times the scale of its group."""
    codes = unpack_words(words)
    in_groups = codes.reshape(*scales.shape, -1)
    in_groups *= scales.astype(F64)[..., None]
    return codes


def weight_rows(pack: PackFile, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start..stop-1 of a matrix of the file as float64 [rows, in]."""
    if pack.tensors[name].storage == FP16:
        return pack.fp16(name)[start:stop].astype(F64)
    words, scales = pack.int4(name)
    return dequantize(words[start:stop], scales[start:stop])


def vector(pack: PackFile, name: str) -> np.ndarray:
    """A norm gain or a bias as float64 [n]."""
    return pack.fp16(name).astype(F64)


def stacked(pack: PackFile, names: Sequence[str], x: np.ndarray) -> np.ndarray:
    """`linear` of several matrices on the same x, their outputs side by side: a fused projection."""
    return np.concatenate([linear(pack, name, x) for name in names], axis=1)


def linear(pack: PackFile, name: str, x: np.ndarray) -> np.ndarray:
    """x [n, in] times the transposed matrix `name` of the file -> [n, out], a block of rows at a time."""
    rows = pack.tensors[name].rows
    step = max(1, BLOCK_WEIGHTS // pack.tensors[name].cols)
    return np.concatenate([x @ weight_rows(pack, name, r, r + step).T for r in range(0, rows, step)], axis=1)


# --------------------------------------------------------------------------------------------------------- operations


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x [n, hidden] scaled to root mean square 1 in each row, times gain [hidden]."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * gain


def rope(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotate x [n, heads, D] by the angles of its positions [n], half-split: element i turns with element i + D/2.

    Angles are rounded to float32, as they were in training; exact ones would be another model (2e-4 apart at position 4096).
    """
    d = x.shape[-1]
    frequency = np.float32(1) / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    angle = (positions.astype(np.float32)[:, None] * frequency).astype(F64)  # [n, D/2]
    turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    """Causal grouped-query attention. q [m, H, D] stands at positions first .. first+m-1; k and v [n, G, D] at 0 .. n-1.

    Query head h reads key/value head h // (H / G). Returns [m, H * D].
    """
    m, heads, d = q.shape
    ratio = heads // k.shape[1]
    future = np.arange(k.shape[0])[None, :] > first + np.arange(m)[:, None]
    out = np.empty((m, heads, d), F64)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // ratio].T / np.sqrt(d)  # [m, n]
        scores[future] = -np.inf
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = share / share.sum(axis=-1, keepdims=True) @ v[:, head // ratio]
    return out.reshape(m, heads * d)


def paged_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: Sequence[int], first: int, dims: Dims, page_tokens: int
) -> np.ndarray:
    """`attention` of q [m, H, D] over keys and values that lie in pages of the card's layout, token t in page table[t // page_tokens]."""
    gathered = (from_pages(pages, table, first + len(q), dims, page_tokens).astype(F64) for pages in (keys, values))
    return attention(q, *gathered, first)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, elementwise. The exponent is clamped where float64 would overflow; silu is 0 there anyway."""
    return gate / (1 + np.exp(-np.maximum(gate, -700.0))) * up


# -------------------------------------------------------------------------------------------------------------- model
# Several sequences go through together: their tokens are the rows of one x, and `lengths` says where each begins. So a
# matrix is unpacked once for all of them, and only attention has to know which rows belong together.


def block(pack: PackFile, layer: int, x: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Decoder block `layer`: x float64 [sum(lengths), hidden], each sequence from position 0 on -> the same shape."""
    d, p = pack.dims, f"model.layers.{layer}."
    positions = np.concatenate([np.arange(n) for n in lengths])
    h = rms_norm(x, vector(pack, p + "input_layernorm.weight"), d.rms_eps)

    def project(name: str, heads: int) -> np.ndarray:
        y = linear(pack, f"{p}self_attn.{name}_proj.weight", h) + vector(pack, f"{p}self_attn.{name}_proj.bias")
        return y.reshape(len(x), heads, d.head_dim)

    q = rope(project("q", d.num_heads), positions, d.rope_theta)
    k = rope(project("k", d.num_kv_heads), positions, d.rope_theta)
    v = project("v", d.num_kv_heads)
    ends = np.cumsum(lengths)
    mixed = [attention(q[e - n : e], k[e - n : e], v[e - n : e], 0) for n, e in zip(lengths, ends)]
    x = x + linear(pack, p + "self_attn.o_proj.weight", np.concatenate(mixed))

    h = rms_norm(x, vector(pack, p + "post_attention_layernorm.weight"), d.rms_eps)
    inner = swiglu(linear(pack, p + "mlp.gate_proj.weight", h), linear(pack, p + "mlp.up_proj.weight", h))
    return x + linear(pack, p + "mlp.down_proj.weight", inner)


def embed(pack: PackFile, ids: Sequence[int]) -> np.ndarray:
    """Token ids [n] -> float64 [n, hidden]."""
    return pack.fp16(model.EMBED)[np.asarray(ids)].astype(F64)


def head(pack: PackFile, x: np.ndarray) -> np.ndarray:
    """Residual [n, hidden] -> logits float64 [n, vocab]; a tied head is the embedding matrix."""
    h = rms_norm(x, vector(pack, model.FINAL_NORM), pack.dims.rms_eps)
    return linear(pack, model.EMBED if pack.dims.tied else model.LM_HEAD, h)
