"""Prefill of a chunk of tokens on tensor cores: the workspace, and the launches of all layers.

The INT4 weights are multiplied as they are stored (kernels/prefill/gemm_int4.cuh). Between the products stand norms, RoPE and
attention, which leave activations in the order in which the next product reads them (kernels/prefill/tiled_x.cuh). Workspace is
bounded by the chunk, whatever the prompt's length.

A chunk is some two hundred launches, and for a short one the card is hardly slower than the host. So launches are made once, for each
combination of kernels that ``prefill_plan`` may choose, and share what differs between two chunks: position, length, cuts. These are
written into the arguments, which the driver copies when a kernel is launched, and no launch is built for a prompt.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import cupy
import numpy as np

from nanoqwen.config import load_settings
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape
from nanoqwen.cuda.decode import DecodeBuffers
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.prefill_plan import Product, Work, gemm_shared_bytes, gemm_threads, part_floats, products, slab_tokens, x_shape
from nanoqwen.cuda.weights import DeviceModel, Int4Matrix

#: kernels/prefill/prefill_attention.cu: queries and threads of a CTA, pages of a stage, stages.
QUERY_TILE, ATTENTION_THREADS, STAGE_PAGES, STAGES = 64, 128, 4, 2
ROW_THREADS = 256  # a token's CTA in rows.cu and rows_tiled.cu
GEMMS = ("gemm_parts", "gemm_parts_middle", "gemm_parts_narrow", "gemm_residual", "gemm_qkv", "gemm_swiglu", "gemm_swiglu_middle", "gemm_swiglu_narrow")


class Operands(ctypes.Structure):
    """``Operands`` of kernels/prefill/gemm_int4.cuh: the weights and X of a product."""

    _fields_ = [("blocks", ctypes.c_uint64), ("x", ctypes.c_uint64), ("tokens", ctypes.c_int), ("up_a", ctypes.c_uint32), ("up_b", ctypes.c_uint32), ("undo", ctypes.c_float)]


class QkvOut(ctypes.Structure):
    """``QkvOut`` of kernels/prefill/gemm_epilogues.cuh."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("factor", "q_bias", "k_bias", "v_bias", "rope")] + [("first_position", ctypes.c_int)] + [
        (name, ctypes.c_uint64) for name in ("block_table", "keys", "values", "q")
    ]  # fmt: skip


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
    values are appended, which moves with the pool."""

    operands: dict[str, Operands]
    bound: ctypes.c_float
    keys: ctypes.c_uint64
    values: ctypes.c_uint64
    qkv_out: QkvOut


@dataclass
class _Chain:
    """The launches of a chunk with one combination of kernels, what each one's grid follows from, and the length that they are set to."""

    launches: list[Launch]
    kinds: list[str]
    n: int = 0


class Prefill:
    """Workspace and launches of prefill for one engine, whose chunks have up to ``chunk`` tokens."""

    def __init__(self, kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, shape: LaunchShape, chunk: int = PREFILL_CHUNK) -> None:
        dims = weights.dims
        self.chunk = chunk
        self._k, self._w, self._b, self._sms = kernels, weights, buffers, shape.sms
        f32 = np.float32
        self.ids = cupy.empty(chunk, dtype=np.int32)
        self.residual = cupy.empty((chunk, dims.hidden), dtype=f32)
        # Columns that pad K meet weights of zero, and must be finite for that: activations begin as zeros. The norm's and attention's share
        # one buffer; whoever writes it last before a product has written all that is read, or left finite numbers of the same chunk.
        self.x = cupy.zeros(x_shape(max(dims.hidden, dims.q_size), chunk), dtype=np.float16)
        self.x_inner = cupy.zeros(x_shape(dims.intermediate, chunk), dtype=np.float16)
        self.factor = cupy.empty(slab_tokens(chunk), dtype=f32)  # of the rows of x after a norm
        self.inner = cupy.empty(slab_tokens(chunk), dtype=f32)  # of the rows of x_inner
        self.q = cupy.empty((chunk, dims.num_heads, dims.head_dim), dtype=f32)
        self.parts = cupy.empty(part_floats(dims, chunk), dtype=f32)
        kv = load_settings().kv
        self._attention_shared = STAGES * STAGE_PAGES * 2 * kv.page_tokens * dims.head_dim * kv.value_bytes + 2 * STAGES * 8
        kernels.allow_shared("prefill_attention", self._attention_shared)
        for kernel in GEMMS:
            kernels.allow_shared(kernel, gemm_shared_bytes(kernel, weights.group))
        self._position, self._n = ctypes.c_int(0), ctypes.c_int(0)
        self._work = {name: Work() for name in ("qkv", "o", "gate_up", "down")}
        self.splits = {name: ctypes.c_int(0) for name in self._work}
        self._layers = self._measured()
        self._pool: tuple | None = None  # where the pool lay at the last chunk, and its shape
        self._chains: dict[tuple[str, ...], _Chain] = {}
        for n in range(chunk, 0, -1):  # all cuts and all chains: a prompt finds them ready
            self._chain(self._products(n))

    @property
    def nbytes(self) -> int:
        """Workspace in bytes; ``prefill_plan.prefill_bytes`` says it before anything is allocated."""
        return sum(a.nbytes for a in (self.ids, self.residual, self.x, self.x_inner, self.factor, self.inner, self.q, self.parts))

    def run(self, ids: list[int], position: int, pool: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        """Append ``ids`` (at most a chunk) at ``position``; their pages must be in the block table. Leaves the residual of
        the last token in the decode buffers, ready for final_norm. Returns before the card has finished."""
        self.ids[: len(ids)].set(np.asarray(ids, dtype=np.int32), stream=stream)
        for launch in self.launches(len(ids), position, pool):
            launch(stream)

    # [launches]
    def launches(self, n: int, position: int, pool: cupy.ndarray) -> list[Launch]:
        """The launches of ``n`` tokens at ``position``, in order: embed_rows, every layer's in equal number, last_row. They are good until the next
        call, which may set the same ones to another chunk."""
        chosen = self._products(n)
        chain = self._chain(chosen)
        self._position.value, self._n.value = position, n
        for name, product in chosen.items():
            matrix = getattr(self._w.layers[0], name)
            ctypes.pointer(self._work[name])[0] = product.cut.work(n, matrix.cols // self._w.group)
            self.splits[name].value = product.cut.splits
        moved = self._pool != (pool.data.ptr, pool.shape)
        for i, layer in enumerate(self._layers):
            layer.qkv_out.first_position = position
            if moved:
                layer.keys.value, layer.values.value = pool[i, 0].data.ptr, pool[i, 1].data.ptr
                layer.qkv_out.keys, layer.qkv_out.values = layer.keys.value, layer.values.value
        self._pool = pool.data.ptr, pool.shape
        if n != chain.n:
            for launch, kind in zip(chain.launches, chain.kinds):
                launch.resize(self._grid(kind, n))
            chain.n = n
        return chain.launches
    # [/launches]

    def _products(self, n: int) -> dict[str, Product]:
        return products(self._w.dims, self._w.group, n, self.chunk, self._sms)

    def _grid(self, kind: str, n: int) -> tuple[int, ...]:
        dims = self._w.dims
        if kind in self._work:
            return (min(self._sms, self._work[kind].items),)
        return {
            "row": (n,), "head": (dims.num_heads + 2 * dims.num_kv_heads, n), "attention": (dims.num_heads, -(-n // QUERY_TILE)),
            "hidden": (-(-dims.hidden // ROW_THREADS),),
        }[kind]  # fmt: skip

    # [chain]
    def _chain(self, chosen: dict[str, Product]) -> _Chain:
        """The launches with these kernels. Grids are set when a length is."""
        names = tuple(product.kernel for product in chosen.values())
        if names in self._chains:
            return self._chains[names]
        w, b, splits, position = self._w, self._b, self.splits, self._position
        tokens, nothing = ctypes.c_int(self.x.shape[1]), ctypes.c_int(0)
        made: list[Launch] = []
        kinds: list[str] = []

        def add(name: str, kind: str, threads: int, args: list, shared: int = 0) -> None:
            made.append(Launch(self._k, name, (1,), threads, args, shared=shared, overlap=bool(made)))
            kinds.append(kind)

        def product(name: str, out: list) -> bool:
            """Whether it leaves parts."""
            kernel = chosen[name].kernel
            add(kernel, name, gemm_threads(kernel), [self._work[name], layer.operands[name], *out], gemm_shared_bytes(kernel, w.group))
            return kernel.startswith("gemm_parts")

        def into_residual(name: str, factor: cupy.ndarray | None) -> bool:
            in_parts = chosen[name].kernel.startswith("gemm_parts")
            return product(name, [ctypes.c_int(w.dims.hidden), *([self.parts] if in_parts else [self.residual, factor])])

        add("embed_rows", "row", ROW_THREADS, [w.embedding, self.ids, self.residual])
        waits = False  # parts of the projection before, with its factor
        for layer, held in zip(self._layers, w.layers):
            before = [self.parts, splits["down"], self.inner] if waits else [None, nothing, None]
            add("norm_rows_tiled", "row", ROW_THREADS, [self.residual, *before, held.input_norm, self.x, tokens, self.factor, layer.bound, None])
            if chosen["qkv"].kernel == "gemm_qkv":
                product("qkv", [layer.qkv_out])
            else:
                product("qkv", [ctypes.c_int(held.qkv.rows), self.parts])
                biases = [held.q_bias, held.k_bias, held.v_bias]
                add("rope_append_parts", "head", 32, [self.parts, splits["qkv"], self.factor, *biases, b.rope, position, b.block_table, layer.keys, layer.values, self.q])
            add(
                "prefill_attention", "attention", ATTENTION_THREADS,
                [self.q, layer.keys, layer.values, b.block_table, position, self._n, self.x, tokens], self._attention_shared,
            )  # fmt: skip
            before = [self.parts, splits["o"], None] if into_residual("o", None) else [None, nothing, None]
            add("norm_rows_tiled", "row", ROW_THREADS, [self.residual, *before, held.post_norm, self.x, tokens, self.factor, layer.bound, self.inner])
            product("gate_up", [SwigluOut(self.factor.data.ptr, self.inner.data.ptr, self.x_inner.data.ptr, tokens.value)])
            waits = into_residual("down", self.inner)
        before = [self.parts, splits["down"], self.inner] if waits else [None, nothing, None]
        # Only the last token has a next one to predict: its finished residual goes to the decode step's own end.
        add("last_row", "hidden", ROW_THREADS, [self.residual, *before, self._n, b.residual])
        return self._chains.setdefault(names, _Chain(made, kinds))
    # [/chain]

    def _measured(self) -> list[_Layer]:
        """The layers' arguments. Largest scales and row norms are found on the card, all of them before the host waits once."""
        w, b, dims, stream = self._w, self._b, self._w.dims, cupy.cuda.get_current_stream()
        found = cupy.zeros((len(w.layers), 6), dtype=np.uint32)
        tiles = dims.intermediate // 16
        for i, held in enumerate(w.layers):
            for k, name in enumerate(self._work):
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
            pointers = [a.data.ptr for a in (self.factor, held.q_bias, held.k_bias, held.v_bias, b.rope)]
            out = QkvOut(*pointers, 0, b.block_table.data.ptr, 0, 0, self.q.data.ptr)
            layers.append(_Layer(operands, ctypes.c_float(float(row[4]) * float(row[5])), ctypes.c_uint64(0), ctypes.c_uint64(0), out))
        return layers
