"""Prefill of a chunk of tokens: dequantise a projection, multiply with cuBLAS, continue with the project's own kernels.

The first, correct path. Each INT4 projection is widened to FP16 in one shared buffer and multiplied by the vendor's
GEMM with FP32 sums; norms, RoPE, page append, attention and SwiGLU are in ``kernels/prefill``. Workspace is bounded by
the chunk, whatever the prompt's length.
"""

from __future__ import annotations

import ctypes

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from nanoqwen.config import load_settings
from nanoqwen.cuda.decode import DecodeBuffers
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.weights import DeviceModel, Int4Matrix

#: Tokens that run through the layers together.
CHUNK = 512
QUERY_TILE, STAGE_PAGES, STAGES = 64, 4, 2  # kernels/prefill/prefill_attention.cu

_R_16F, _R_32F, _COMPUTE_32F, _GEMM_DEFAULT = 2, 0, 68, -1  # cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t


class Prefill:
    """Workspace and launches of prefill for one engine."""

    def __init__(self, kernels: Kernels, weights: DeviceModel, buffers: DecodeBuffers, chunk: int = CHUNK) -> None:
        dims = weights.dims
        self._k, self._w, self._b, self._chunk = kernels, weights, buffers, chunk
        widest = max(m.rows * m.cols for m in (weights.layers[0].qkv, weights.layers[0].o, weights.layers[0].gate_up, weights.layers[0].down))
        columns = max(dims.hidden, dims.q_size, dims.intermediate)
        products = max(dims.q_size + 2 * dims.kv_size, dims.hidden, 2 * dims.intermediate)
        self._wide = cupy.empty(widest, dtype=np.float16)
        self._ids = cupy.empty(chunk, dtype=np.int32)
        self._residual = cupy.empty((chunk, dims.hidden), dtype=np.float32)
        self._x = cupy.empty(chunk * columns, dtype=np.float16)
        self._factor = cupy.empty(chunk, dtype=np.float32)
        self._ones = cupy.ones(chunk, dtype=np.float32)
        self._product = cupy.empty(chunk * products, dtype=np.float32)
        self._q = cupy.empty((chunk, dims.num_heads, dims.head_dim), dtype=np.float32)
        kv = load_settings().kv
        self._shared = STAGES * STAGE_PAGES * 2 * kv.page_tokens * dims.head_dim * kv.value_bytes + 2 * STAGES * 8
        kernels.allow_shared("prefill_attention", self._shared)
        self._one, self._zero = (np.array(v, dtype=np.float32) for v in (1.0, 0.0))

    @property
    def nbytes(self) -> int:
        """Workspace in bytes."""
        return sum(a.nbytes for a in (self._wide, self._residual, self._x, self._product, self._q))

    def run(self, ids: list[int], position: int, pool: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        """Append ``ids`` (at most a chunk) at ``position``; their pages must be in the block table. Leaves the residual of
        the last token in the decode buffers, ready for final_norm."""
        dims, w, b, n = self._w.dims, self._w, self._b, len(ids)
        self._ids[:n].set(np.asarray(ids, dtype=np.int32), stream=stream)
        self._launch(stream, "embed_rows", (n,), 256, [w.embedding, self._ids, self._residual])
        product = factor = None
        for i, layer in enumerate(w.layers):
            self._launch(stream, "norm_rows", (n,), 256, [self._residual, product, factor, layer.input_norm, self._x, self._factor])
            self._multiply(layer.qkv, n, stream)
            heads = dims.num_heads + 2 * dims.num_kv_heads
            self._launch(
                stream, "rope_append_rows", (heads, n), 32,
                [self._product, self._factor, layer.q_bias, layer.k_bias, layer.v_bias, b.rope, ctypes.c_int(position), b.block_table, pool[i, 0], pool[i, 1], self._q],
            )  # fmt: skip
            self._launch(
                stream, "prefill_attention", (dims.num_heads, -(-n // QUERY_TILE)), 128,
                [self._q, pool[i, 0], pool[i, 1], b.block_table, ctypes.c_int(position), ctypes.c_int(n), self._x], self._shared,
            )  # fmt: skip
            self._multiply(layer.o, n, stream)
            self._launch(stream, "norm_rows", (n,), 256, [self._residual, self._product, self._ones, layer.post_norm, self._x, self._factor])
            self._multiply(layer.gate_up, n, stream)
            self._launch(stream, "swiglu_rows", (n,), 256, [self._product, self._factor, self._x, self._factor])
            self._multiply(layer.down, n, stream)
            product, factor = self._product, self._factor
        # Only the last token has a next one to predict: its finished residual goes to the decode step's own end.
        last = self._product[: n * dims.hidden].reshape(n, dims.hidden)[n - 1]
        b.residual[...] = self._residual[n - 1] + last * self._factor[n - 1]

    def _launch(self, stream: cupy.cuda.Stream, name: str, grid: tuple[int, ...], threads: int, args: list, shared: int = 0) -> None:
        Launch(self._k, name, grid, threads, args, shared=shared, overlap=False)(stream)

    def _multiply(self, matrix: Int4Matrix, n: int, stream: cupy.cuda.Stream) -> None:
        """product[n, rows] = x[n, cols] . W^T, FP16 operands, FP32 result."""
        rows, cols = matrix.rows, matrix.cols
        grid = (-(-rows * (cols // 8) // 256),)
        self._launch(stream, "dequantise", grid, 256, [matrix.bundles, self._wide, ctypes.c_int(rows), ctypes.c_int(cols)])
        handle = cupy.cuda.device.get_cublas_handle()
        cublas.setStream(handle, stream.ptr)
        # cuBLAS is column-major: its (rows x n) result with leading dimension rows is our row-major [n, rows].
        cublas.gemmEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, rows, n, cols, self._one.ctypes.data, self._wide.data.ptr, _R_16F, cols,
            self._x.data.ptr, _R_16F, cols, self._zero.ctypes.data, self._product.data.ptr, _R_32F, rows, _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip
