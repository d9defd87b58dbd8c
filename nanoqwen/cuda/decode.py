"""One decode step as a list of launches, and the buffers that they share.

The same list serves the eager engine, which launches it from Python, and the graph engine, which captures it. Every
argument is fixed; token and position are read from device memory, and a step leaves there what the next one needs
(kernels/common/step.cuh).
"""

from __future__ import annotations

import ctypes

import cupy
import numpy as np

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.choice import SAMPLE_CTAS, SAMPLE_THREADS, sample_shared_bytes
from nanoqwen.cuda.constants import LaunchShape, padded_rows, record_bytes, row_threads, streams
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.weights import DeviceModel, Int4Matrix

#: The regions of one token's latency, in order; ``kernel_gap`` is the token's time less all of them: what the host adds around the kernels, or,
#: below zero, what their overlap saves (regions are timed one kernel after another).
REGIONS = (
    "embed", "qkv_gemv", "append_tail_kv", "paged_attention", "o_proj", "gate_up_gemv", "swiglu_down", "final_norm", "lm_head", "argmax", "kernel_gap",
)  # fmt: skip

CONSUMERS, STAGES, STAGE_PAGES = 6, 3, 3  # kernels/decode/paged_attention.cu
ARGMAX_CTAS = 132


class DecodeBuffers:
    """Activations and scalars of one sequence on the card. The partial sums of every projection start at zero, and parts that no
    CTA writes stay zero (kernels/common/stream_gemv.cuh)."""

    def __init__(self, dims: Dims, group: int, shape: LaunchShape, max_pages: int) -> None:
        f32, rows = np.float32, padded_rows
        self.step = cupy.zeros(3, dtype=np.int32)  # token, position, next token
        tokens = max_pages * load_settings().kv.page_tokens
        self.told = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * tokens), dtype=np.int32, count=tokens)  # the host's memory; the card writes to it
        self.random = cupy.zeros(tokens, dtype=np.uint64)  # a draw's number at the position that it is made at
        self.rule = cupy.zeros(3, dtype=np.float64)
        self.allowed = cupy.zeros(-(-rows(dims.vocab) // 32), dtype=np.uint32)
        self.block_table = cupy.zeros(max_pages, dtype=np.int32)
        self.residual = cupy.zeros(dims.hidden, dtype=f32)  # before attention
        self.residual_mid = cupy.zeros(dims.hidden, dtype=f32)  # between attention and MLP
        parts = {name: stream.parts for name, stream in streams(dims, group, shape).items()}
        self.qkv = cupy.zeros((parts["qkv"], rows(dims.q_size + 2 * dims.kv_size)), dtype=f32)
        self.o = cupy.zeros((parts["o"], rows(dims.hidden)), dtype=f32)
        self.gate_up = cupy.zeros((parts["gate_up"], rows(2 * dims.intermediate)), dtype=f32)
        self.down = cupy.zeros((parts["down"], rows(dims.hidden)), dtype=f32)
        self.logit_parts = cupy.zeros((parts["head"], rows(dims.vocab)), dtype=f32)
        self.logits = cupy.zeros(rows(dims.vocab), dtype=f32)
        self.q = cupy.zeros((dims.num_heads, dims.head_dim), dtype=f32)
        widest = max(dims.hidden, dims.q_size, dims.intermediate)
        self.x = cupy.zeros(-(-widest // group) * record_bytes(group), dtype=np.uint8)
        self.inner = cupy.zeros_like(self.x)
        self.halves = cupy.zeros((2, dims.hidden), dtype=np.float16)
        splits = shape.attention_splits(dims.num_kv_heads)
        self.sums = cupy.zeros((splits, dims.num_heads, dims.head_dim), dtype=f32)
        self.maxima = cupy.zeros((splits, dims.num_heads), dtype=f32)
        self.denominators = cupy.zeros((splits, dims.num_heads), dtype=f32)
        self.candidates = cupy.zeros((ARGMAX_CTAS, 2), dtype=f32)
        self.arrived = cupy.zeros(1, dtype=np.uint32)
        self.rope = cupy.asarray(rope_table(dims))


def rope_table(dims: Dims) -> np.ndarray:
    """float32 [max_position, head_dim // 2, 2]: cosine and sine of each pair's angle, computed in FP32 like the reference."""
    exponents = np.arange(0, dims.head_dim, 2, dtype=np.float32) / np.float32(dims.head_dim)
    frequencies = (1.0 / np.power(np.float32(dims.rope_theta), exponents)).astype(np.float32)
    angles = np.arange(dims.max_position, dtype=np.float32)[:, None] * frequencies
    return np.stack((np.cos(angles), np.sin(angles)), axis=-1)


def attention_shared_bytes(dims: Dims) -> int:
    """Dynamic shared memory of paged_attention: the ring of pages (or the joined results, if larger) and its barriers."""
    slice_bytes = load_settings().kv.page_tokens * dims.head_dim * load_settings().kv.value_bytes
    ring = STAGES * STAGE_PAGES * 2 * slice_bytes
    joined = STAGE_PAGES * 8 * (dims.head_dim + 2) * 4
    return max(ring, joined) + 2 * STAGES * 8


def part_count(parts: cupy.ndarray | None) -> ctypes.c_int:
    """How many parts a norm adds to the residual: none before the first projection."""
    return ctypes.c_int(0 if parts is None else parts.shape[0])


# [decode_launches]
class _Step:
    """The launches of a step, or of the end of one, as they are made."""

    def __init__(self, kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, pool: cupy.ndarray, shape: LaunchShape) -> None:
        self.kernels, self.weights, self.buffers, self.pool, self.shape = kernels, weights, buffers, pool, shape
        self.streams = streams(weights.dims, weights.group, shape)
        self.launches: list[Launch] = []

    def add(self, name: str, grid: tuple[int, ...], threads: int, args: list, region: str = "", shared: int = 0) -> None:
        # The first kernel waits for everything before it. So the others may read the step's scalars, the block table and finished
        # pages ahead of their own wait.
        self.launches.append(Launch(self.kernels, name, grid, threads, args, region=region, shared=shared, overlap=bool(self.launches)))

    def gemv(self, name: str, matrix: Int4Matrix, x: list, parts: cupy.ndarray, region: str) -> None:
        stream = self.streams[name.removeprefix("gemv_")]
        self.kernels.allow_shared(name, stream.shared)
        self.add(name, (stream.grid,), 32 * self.shape.gemv_warps, [matrix.bundles, *x, parts], region, stream.shared)


def decode_launches(kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, pool: cupy.ndarray, shape: LaunchShape, *, opens_page: bool, draws: bool = False) -> list[Launch]:
    """The launches of one token, in order. ``pool`` is float16 [layers, 2, pages, page]; ``opens_page`` adds page_open in front,
    ``draws`` sample at the end."""
    dims, b = weights.dims, buffers
    step = _Step(kernels, weights, buffers, pool, shape)
    if opens_page:
        pages = ctypes.c_int(pool.shape[2])
        step.add("page_open", (2 * dims.num_layers,), 256, [pool, pages, b.step, b.block_table], "append_tail_kv")
    step.add("embed", (1,), row_threads(dims), [weights.embedding, b.step, b.residual])
    previous = None
    for i, layer in enumerate(weights.layers):
        normed = [b.residual, previous, part_count(previous), layer.input_norm, b.residual_mid]
        step.gemv("gemv_qkv", layer.qkv, normed, b.qkv, "qkv_gemv")
        heads = dims.num_heads + 2 * dims.num_kv_heads
        step.add(
            "rope_append", (heads,), 32,
            [b.qkv, layer.q_bias, layer.k_bias, layer.v_bias, b.rope, b.step, b.block_table, pool[i, 0], pool[i, 1], b.q], "append_tail_kv",
        )  # fmt: skip
        _attention_to_down(step, i)
        previous = b.down
    return step.launches + head_launches(kernels, weights, buffers, shape, draws=draws)


def _attention_to_down(step: _Step, i: int) -> None:
    """What a token still needs of layer ``i`` when its key and value are in their page, its q in ``q`` and its residual in ``residual_mid``."""
    dims, layer, b = step.weights.dims, step.weights.layers[i], step.buffers
    splits, shared = step.shape.attention_splits(dims.num_kv_heads), attention_shared_bytes(dims)
    step.kernels.allow_shared("paged_attention", shared)
    step.add(
        "paged_attention", (dims.num_kv_heads, splits), 32 * (1 + CONSUMERS),
        [b.q, step.pool[i, 0], step.pool[i, 1], b.block_table, b.step, b.sums, b.maxima, b.denominators], "paged_attention", shared,
    )  # fmt: skip
    step.add("attention_combine", (-(-dims.q_size // 128),), 32, [b.sums, b.maxima, b.denominators, b.step, ctypes.c_int(splits), b.x], "paged_attention")
    step.gemv("gemv_o", layer.o, [b.x], b.o, "o_proj")
    normed = [b.residual_mid, b.o, part_count(b.o), layer.post_norm, b.residual]
    step.gemv("gemv_gate_up", layer.gate_up, normed, b.gate_up, "gate_up_gemv")
    step.add("swiglu", (-(-dims.intermediate // 1024),), 256, [b.gate_up, b.inner], "swiglu_down")
    step.gemv("gemv_down", layer.down, [b.inner], b.down, "swiglu_down")
# [/decode_launches]


# [end_launches]
def end_launches(kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, pool: cupy.ndarray, shape: LaunchShape, *, draws: bool = False) -> list[Launch]:
    """The end of a prompt: a step of its last token from the last layer's attention on. A chunk of prefill has left what that begins with
    (``Prefill.run``). Paged attention is the first launch here, and so does not overlap: pages and scalars are a moment old."""
    step = _Step(kernels, weights, buffers, pool, shape)
    _attention_to_down(step, weights.dims.num_layers - 1)
    return step.launches + head_launches(kernels, weights, buffers, shape, draws=draws)
# [/end_launches]


# [head_launches]
def head_launches(kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, shape: LaunchShape, *, draws: bool = False) -> list[Launch]:
    """From the last layer's residual and parts to logits and the next token: the end of a decode step and of a prompt. The token is the
    largest logit's, or with ``draws`` one that ``sample`` draws; whichever kernel chooses writes the next step's scalars."""
    b, threads = buffers, 32 * shape.gemv_warps
    stream = streams(weights.dims, weights.group, shape)["head"]
    kernels.allow_shared("lm_head", stream.shared)
    told, chooses = ctypes.c_uint64(b.told.ctypes.data), ctypes.c_int(not draws)
    out = [
        Launch(kernels, "final_norm", (1,), row_threads(weights.dims), [b.residual, b.down, part_count(b.down), weights.final_norm, b.halves]),
        Launch(kernels, "lm_head", (stream.grid,), threads, [weights.head, b.halves, b.logit_parts], shared=stream.shared),
        Launch(kernels, "argmax", (ARGMAX_CTAS,), 256, [b.logit_parts, b.logits, b.allowed, b.candidates, b.arrived, b.step, told, chooses]),
    ]
    if draws:
        shared = sample_shared_bytes(weights.dims.vocab)
        kernels.allow_shared("sample", shared)
        args = [b.logits, b.allowed, b.rule, b.random, b.step, told]
        out.append(Launch(kernels, "sample", (SAMPLE_CTAS,), SAMPLE_THREADS, args, region="argmax", shared=shared))
    return out
# [/head_launches]
