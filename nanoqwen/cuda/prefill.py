"""Prefill of a chunk of tokens on tensor cores: the workspace, and the launches of the layers.

The INT4 weights are multiplied as they are stored (kernels/prefill/gemm_int4.cuh). Between the products stand norms, RoPE and
attention, which leave activations in the order in which the next product reads them (kernels/prefill/tiled_x.cuh); for up to 16 tokens norms leave digits
(digit_x.cuh), a kernel makes digits of the SwiGLU result, and the products behind them are gemm_digits.cuh. Workspace is bounded by the chunk, whatever the prompt's length.

The last layer ends early. Tokens look at each other in attention only, and behind the last layer's there is no attention any more: of all tokens but a
prompt's last one that layer needs keys and values, and nothing else of them is ever read. So a chunk ends when these are in their pages. Its last token's
residual and q go to the decode step's buffers, where the step's own launches finish it (``decode.end_launches``) if the prompt ends there.

A chunk is some two hundred launches. For a long one the host is done with them long before the card; for a short one it is not, and the card
would wait. So short chunks are CUDA graphs, captured when the engine opens, a few lengths that serve all: a chunk is launched for the next of
these, and what comes of the tokens too many is dropped. Position, length and ids lie in device memory (kernels/prefill/span.cuh), so a
graph knows neither. What it does know is where the KV pool lies, and which of two attention kernels suits the position.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import cupy
import numpy as np

from nanoqwen.cuda.attention_plan import ATTENTION_THREADS, ATTENTIONS, attention_grid, attention_kernel, attention_shared_bytes
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape
from nanoqwen.cuda.decode import DecodeBuffers
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.prefill_cut import Work
from nanoqwen.cuda.prefill_digits import MOST_SHARED, WIDTHS, digit_x_bytes
from nanoqwen.cuda.prefill_plan import (
    GRAPH_UP_TO, NORMS, QUANTISE_THREADS, ROPE_THREADS, SHAPES, UNIT, Product, gemm_shared_bytes, graph_lengths, launched_length, norm_kernel, norm_shape, part_floats,
    planned_length, products, slab_tokens, x_shape,
)  # fmt: skip
from nanoqwen.cuda.tensor_map import TensorMap
from nanoqwen.cuda.weights import DeviceModel, Int4Matrix

ROW_THREADS = 256  # a CTA of rows.cu
GEMMS = tuple(name + end for name in ("gemm_parts", "gemm_swiglu") for end in SHAPES)
DIGIT_GEMMS = tuple(f"{name}_digits{width}" for name in ("gemm_parts", "gemm_swiglu") for width in WIDTHS)


class Operands(ctypes.Structure):
    """``Operands`` of kernels/prefill/gemm_unit.cuh: the weights and X of a product."""

    _fields_ = [("blocks", ctypes.c_uint64), ("x", ctypes.c_uint64), ("tokens", ctypes.c_int), ("up_a", ctypes.c_uint32), ("up_b", ctypes.c_uint32), ("undo", ctypes.c_float)]


class DigitOperands(ctypes.Structure):
    """``DigitOperands`` of kernels/prefill/gemm_digits.cuh: the weights and X of a product, and the warps that share its K."""

    _fields_ = [("blocks", ctypes.c_uint64), ("x", ctypes.c_uint64), ("splits", ctypes.c_int)]


class PartsOut(ctypes.Structure):
    """``PartsOut`` of kernels/prefill/gemm_epilogues.cuh."""

    _fields_ = [("rows", ctypes.c_int), ("out", ctypes.c_uint64)]


class SwigluOut(ctypes.Structure):
    """``SwigluValues`` of kernels/prefill/gemm_epilogues.cuh."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("factor", "inner", "out")] + [("tokens", ctypes.c_int)]


def scale_power(peak: float) -> int:
    """The power of two that brings the largest scale of a matrix into [2^15, 2^16), where FP16 has no more above it. Two factors of FP16
    reach 2^30; scales that are smaller than 2^-14 altogether stay below."""
    return min(30, 16 - math.frexp(peak)[1]) if peak > 0 else 0


def _half2(x: float) -> int:
    return int(np.float16(x).view(np.uint16)) * 0x10001


def _operands(matrix: Int4Matrix, x: cupy.ndarray, peak: float) -> Operands:
    power = scale_power(peak)
    first = min(power, 15)
    return Operands(matrix.bundles.data.ptr, x.data.ptr, x.shape[1], _half2(2.0**first), _half2(2.0 ** (power - first)), 2.0 ** (24 - power))


@dataclass
class _Layer:
    """What the launches of a layer are given besides arrays: operands of the four products, the bound of gate times up, and where keys and
    values are, which moves with the pool."""

    operands: dict[str, Operands]
    bound: ctypes.c_float
    keys: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)
    values: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)
    key_map: TensorMap = field(default_factory=TensorMap)
    value_map: TensorMap = field(default_factory=TensorMap)


@dataclass
class _Chain:
    """The launches of a chunk with one combination of kernels, and behind them the rest of the last layer; what each one's grid follows from; how many of
    them are the chunk; and the length that they are set to."""

    launches: list[Launch]
    kinds: list[str]
    chunk: int
    length: int = 0


class Prefill:
    """Workspace and launches of prefill for one engine, whose chunks have up to ``chunk`` tokens. ``capture`` makes a graph of launches; without it short
    chunks are launched like long ones."""

    def __init__(
        self, kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, shape: LaunchShape, chunk: int = PREFILL_CHUNK,
        capture: Callable[[list[Launch]], cupy.cuda.Graph] | None = None,
    ) -> None:
        dims = weights.dims
        self.chunk = chunk
        self._k, self._w, self._b, self._sms = kernels, weights, buffers, shape.sms
        f32 = np.float32
        self._told = cupy.zeros(2 + chunk, dtype=np.int32)  # one copy from the host
        self.span, self.ids = self._told[:2], self._told[2:]
        self.residual = cupy.empty((chunk, dims.hidden), dtype=f32)
        # Columns that pad K meet weights of zero, and must be finite for that: activations begin as zeros. The norm's and attention's share
        # one buffer; whoever writes it last before a product has written all that is read, or left finite numbers of the same chunk.
        self.x = cupy.zeros(x_shape(max(dims.hidden, dims.q_size), chunk), dtype=np.float16)
        self.x_inner = cupy.zeros(x_shape(dims.intermediate, chunk), dtype=np.float16)
        self.x_digits = cupy.zeros(digit_x_bytes(dims.hidden), dtype=np.uint8)  # the norm's, where the product reads digits: finite scales from the start
        self.inner_digits = cupy.zeros(digit_x_bytes(dims.intermediate), dtype=np.uint8)  # x_inner for down, likewise
        self.factor = cupy.empty(slab_tokens(chunk), dtype=f32)  # of the rows of x or x_digits after a norm
        self.inner = cupy.empty(slab_tokens(chunk), dtype=f32)  # of the rows of x_inner
        self.q = cupy.empty((chunk, dims.num_heads, dims.head_dim), dtype=f32)
        self.parts = cupy.empty(part_floats(dims, chunk), dtype=f32)
        for kernel in ATTENTIONS:
            kernels.allow_shared(kernel, attention_shared_bytes(dims))
        for kernel in GEMMS:
            kernels.allow_shared(kernel, gemm_shared_bytes(kernel, weights.group))
        for kernel in DIGIT_GEMMS:
            kernels.allow_shared(kernel, MOST_SHARED)
        self.work = {name: Work() for name in ("qkv", "o", "gate_up", "down")}
        self._layers = self._measured()
        self._pool: tuple | None = None  # where the pool lay at the last chunk, and its shape
        self._capture, self._graphs = capture, {}
        self._chains: dict[tuple[str, ...], _Chain] = {}
        for n in sorted({planned_length(n) for n in range(1, chunk + 1)}):  # all cuts and all chains: a prompt finds them ready
            for attention in ATTENTIONS:
                self._chain(n, self._products(n), attention)

    @property
    def nbytes(self) -> int:
        """Workspace in bytes; ``prefill_plan.prefill_bytes`` says it before anything is allocated."""
        return sum(a.nbytes for a in (self._told, self.residual, self.x, self.x_inner, self.x_digits, self.inner_digits, self.factor, self.inner, self.q, self.parts))

    def prepare(self, pool: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        """Capture what chunks of a prompt's beginning need."""
        self._graphs.clear()
        if self._capture:
            for length in graph_lengths(self.chunk):
                self._graph(length, 0, pool).upload(stream)

    def run(self, ids: list[int], position: int, pool: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        """Append ``ids`` (at most a chunk) at ``position``; their pages must be in the block table. Leaves the last token in the decode buffers, ready for
        ``decode.end_launches``: its residual and q in the last layer, and the step's scalars. Returns before the card has finished."""
        self.tell(ids, position, stream)
        length = launched_length(len(ids), self.chunk)
        if self._capture and length <= GRAPH_UP_TO:
            self._graph(length, position, pool).launch(stream)
        else:
            for launch in self.launches(length, position, pool):
                launch(stream)

    def tell(self, ids: list[int], position: int, stream: cupy.cuda.Stream) -> None:
        """Write what the launches of a chunk read: its span and its ids."""
        self._told[: 2 + len(ids)].set(np.array([position, len(ids), *ids], dtype=np.int32), stream=stream)

    def _graph(self, length: int, position: int, pool: cupy.ndarray) -> cupy.cuda.Graph:
        """The launches of ``length`` tokens as a graph. Most are captured before the first prompt; another one where a prompt goes on at a position that
        suits the other attention kernel, and each of them once more after the pool moved."""
        self._follow(pool)
        key = length, self._attention(length, position)
        if key not in self._graphs:
            self._graphs[key] = self._capture(self.launches(length, position, pool))
        return self._graphs[key]

    # [launches]
    def launches(self, length: int, position: int, pool: cupy.ndarray, *, whole: bool = False) -> list[Launch]:
        """The launches of a chunk, in order: embed_rows; every layer's in equal number, but of the last layer those up to rope_append_parts only; last_row.
        ``whole`` adds the others of the last layer, which no prompt needs, but whoever looks at kernels may. ``length`` is the chunk's tokens or more;
        ``position`` decides which attention kernel is among them, and nothing else. They are good until the next call, which may set the same ones to another
        length."""
        self._follow(pool)
        chosen = self._products(length)
        chain = self._chain(length, chosen, self._attention(length, position))
        for name, product in chosen.items():
            matrix = getattr(self._w.layers[0], name)
            ctypes.pointer(self.work[name])[0] = product.cut.work(length, matrix.cols // self._w.group, self._w.group)
        if length != chain.length:
            for launch, kind in zip(chain.launches, chain.kinds):
                launch.resize(self._grid(kind, length))
            chain.length = length
        return chain.launches if whole else chain.launches[: chain.chunk]
    # [/launches]

    def _follow(self, pool: cupy.ndarray) -> None:
        """Have everything point into the pool where it lies now. Graphs know where it lay when they were captured."""
        if self._pool == (pool.data.ptr, pool.shape):
            return
        for i, layer in enumerate(self._layers):
            layer.keys.value, layer.values.value = pool[i, 0].data.ptr, pool[i, 1].data.ptr
            layer.key_map.point_at(pool[i, 0], self._w.dims)
            layer.value_map.point_at(pool[i, 1], self._w.dims)
        self._graphs.clear()
        self._pool = pool.data.ptr, pool.shape

    def _products(self, n: int) -> dict[str, Product]:
        return products(self._w.dims, self._w.group, n, self.chunk, self._sms)

    def _attention(self, length: int, position: int) -> str:
        return attention_kernel(self._w.dims, length, position, self._sms)

    def _grid(self, kind: str, length: int) -> tuple[int, ...]:
        dims = self._w.dims
        if kind in self.work:
            return (self.work[kind].grid(self._sms),)
        if kind in ATTENTIONS:
            return attention_grid(kind, dims, length)
        if kind in NORMS:
            return (norm_shape(kind, dims)[0] * length,)
        pairs = (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim // 2
        last = dims.hidden + dims.q_size  # values of a token that last_row copies
        units = -(-dims.intermediate // UNIT)  # a warp each
        return {
            "row": (length,), "tiles": (length, -(-32 * units // QUANTISE_THREADS)), "pairs": (length, -(-pairs // (4 * ROPE_THREADS))), "last": (-(-last // (4 * ROW_THREADS)),),
        }[kind]  # fmt: skip

    # [chain]
    def _chain(self, n: int, chosen: dict[str, Product], attention: str) -> _Chain:
        """The launches of ``n`` tokens with these kernels. Grids are set when a length is."""
        norm = norm_kernel(n, chosen["qkv"])
        names = (*(product.kernel for product in chosen.values()), attention, norm)
        if names in self._chains:
            return self._chains[names]
        w, b, work = self._w, self._b, self.work
        tokens = ctypes.c_int(self.x.shape[1])
        # What a norm writes: of FP16 the slab's tokens say where, of digits the tokens that the product is compiled for.
        normed_x = [self.x_digits, ctypes.c_int(chosen["qkv"].cut.main_width)] if chosen["qkv"].splits else [self.x, tokens]
        made: list[Launch] = []
        kinds: list[str] = []

        def add(name: str, kind: str, threads: int, args: list, shared: int = 0) -> None:
            made.append(Launch(self._k, name, (1,), threads, args, shared=shared, overlap=bool(made)))
            kinds.append(kind)

        def product(name: str, out: ctypes.Structure) -> None:
            how, operands = chosen[name], layer.operands[name]
            if how.splits:
                operands = DigitOperands(operands.blocks, (self.inner_digits if name == "down" else self.x_digits).data.ptr, how.splits)
            add(how.kernel, name, how.threads, [work[name], operands, out], how.shared)

        def normed(*args) -> None:
            add(norm, norm, norm_shape(norm, w.dims)[1], [self.residual, *args])

        def parts(rows: int) -> PartsOut:
            return PartsOut(rows, self.parts.data.ptr)

        add("embed_rows", "row", ROW_THREADS, [w.embedding, self.ids, self.residual])
        before = [None, work["down"], None]  # the parts that wait to be added, how they lie, and their factor
        for layer, held in zip(self._layers, w.layers):
            normed(*before, held.input_norm, *normed_x, self.factor, layer.bound, None)
            product("qkv", parts(held.qkv.rows))
            biases = [held.q_bias, held.k_bias, held.v_bias]
            add("rope_append_parts", "pairs", ROPE_THREADS, [self.parts, work["qkv"], self.factor, *biases, b.rope, self.span, b.block_table, layer.keys, layer.values, self.q])
            if layer is self._layers[-1]:  # a chunk is complete; the rest of this layer is for whoever asks for the whole
                add("last_row", "last", ROW_THREADS, [self.residual, self.q, self.ids, self.span, b.residual_mid, b.q, b.step])
                chunk = len(made)
            add(attention, attention, ATTENTION_THREADS, [self.q, layer.key_map, layer.value_map, b.block_table, self.span, self.x, tokens], attention_shared_bytes(w.dims))
            product("o", parts(w.dims.hidden))
            normed(self.parts, work["o"], None, held.post_norm, *normed_x, self.factor, layer.bound, self.inner)
            product("gate_up", SwigluOut(self.factor.data.ptr, self.inner.data.ptr, self.x_inner.data.ptr, tokens.value))
            if chosen["down"].splits:
                add("quantise_tiles", "tiles", QUANTISE_THREADS, [self.x_inner, tokens, ctypes.c_int(chosen["down"].cut.main_width), self.inner_digits])
            product("down", parts(w.dims.hidden))
            before = [self.parts, work["down"], self.inner]
        return self._chains.setdefault(names, _Chain(made, kinds, chunk))
    # [/chain]

    def _measured(self) -> list[_Layer]:
        """The layers' arguments. Largest scales and row norms are found on the card, all of them before the host waits once."""
        w, dims, stream = self._w, self._w.dims, cupy.cuda.get_current_stream()
        found = cupy.zeros((len(w.layers), 6), dtype=np.uint32)
        tiles = dims.intermediate // 16
        for i, held in enumerate(w.layers):
            for k, name in enumerate(self.work):
                matrix: Int4Matrix = getattr(held, name)
                blocks = ctypes.c_int(matrix.rows // 16 * (matrix.cols // w.group))
                Launch(self._k, "largest_scale", (self._sms,), ROW_THREADS, [matrix.bundles, blocks, found[i, k:]], overlap=False)(stream)
            for k in range(2):
                groups = ctypes.c_int(dims.hidden // w.group)
                Launch(self._k, "projection_bound", (tiles,), 32, [held.gate_up.bundles, groups, ctypes.c_int(k * tiles), found[i, 4 + k :]], overlap=False)(stream)
        rows = found.get(stream=stream).view(np.float32)
        inputs = {"qkv": self.x, "o": self.x, "gate_up": self.x, "down": self.x_inner}
        layers = []
        for held, row in zip(w.layers, rows):
            operands = {name: _operands(getattr(held, name), x, float(peak)) for (name, x), peak in zip(inputs.items(), row)}
            layers.append(_Layer(operands, ctypes.c_float(float(row[4]) * float(row[5]))))
        return layers
