"""What a Hopper engine says about its prefill from inside: its workspace, and its matrix products without what stands between them.

Like ``card``, this looks behind the Engine contract on purpose. ``cupy`` is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable

from nanoqwen.bench.card import timed
from nanoqwen.cuda.prefill_plan import launched_length, shapes
from nanoqwen.engines.base import Engine

#: cuBLAS's numbers for FP16 and for sums in FP32.
CUDA_R_16F, CUBLAS_COMPUTE_32F = 2, 68


def workspace_bytes(engine: Engine) -> int | None:
    """Bytes of the buffers that a chunk of a prompt passes through, or None for an engine without a card's prefill."""
    prefiller = getattr(engine, "_prefiller", None)
    return None if prefiller is None else prefiller.nbytes


def chunk_tokens(engine: Engine) -> int:
    """Tokens of the engine's largest chunk; 0 for an engine without a card's prefill."""
    return engine._prefiller.chunk if workspace_bytes(engine) else 0


def products_ms(engine: Engine, n: int, runs: int, name: str | None = None, after: Callable[[], object] = lambda: None) -> list[float]:
    """Device milliseconds of the products of all layers for a chunk of ``n`` tokens, or of those called ``name`` ("qkv", "o", "gate_up", "down"), one
    behind the other in a graph, as the engine launches them. ``after`` each of the ``runs``.

    They multiply what the last prompt left in the workspace. The engine's cache is as before afterwards.
    """
    import cupy

    prefiller = engine._prefiller
    launches = [launch for launch in prefiller.launches(launched_length(n, prefiller.chunk), 0, engine._pages.pool) if launch.name.startswith("gemm_")]
    names = list(shapes(engine.dims))
    graph = engine._capture(launches if name is None else launches[names.index(name) :: len(names)])
    return timed(engine, lambda: graph.launch(engine._stream), runs, cupy, after)


class Vendor:
    """The products of a layer by cuBLAS: weights in FP16, sums in FP32, every layer with the same random weights. Four times the bytes of INT4, which a
    few tokens wait for; for many, the same work for the tensor cores. Raises ImportError where cuBLAS cannot be loaded."""

    def __init__(self, engine: Engine, most: int) -> None:
        import cupy
        import numpy as np
        from cupy_backends.cuda.libs import cublas

        self._engine, self._cublas, self._cupy = engine, cublas, cupy
        self._one, self._zero = np.array(1, np.float32), np.array(0, np.float32)
        rng, self._shapes = cupy.random.RandomState(0), shapes(engine.dims)
        with engine._stream:
            self._handle = cupy.cuda.device.get_cublas_handle()
            self._weights = {name: self._random(rng, rows * cols, 0.02) for name, (rows, cols) in self._shapes.items()}
            self._x = self._random(rng, most * max(cols for _, cols in self._shapes.values()), 1.0)
            self._y = cupy.empty(most * max(rows for rows, _ in self._shapes.values()), dtype=np.float16)

    def _random(self, rng, size: int, deviation: float):
        out, step = self._cupy.empty(size, dtype="float16"), 1 << 24
        for at in range(0, size, step):
            out[at : at + step] = rng.standard_normal(min(step, size - at), dtype="float32") * deviation
        return out

    def products_ms(self, n: int, runs: int, after: Callable[[], object] = lambda: None) -> list[float]:
        """As ``products_ms`` of the engine, launched by the host one by one."""
        with self._engine._stream:  # CuPy hands cuBLAS its own current stream at every call
            return self._timed(n, runs, after)

    def _timed(self, n: int, runs: int, after: Callable[[], object]) -> list[float]:
        return timed(self._engine, lambda: [self._layer(n) for _ in range(self._engine.dims.num_layers)], runs, self._cupy, after)

    def _layer(self, n: int) -> None:
        blas = self._cublas
        for name, (rows, cols) in self._shapes.items():
            blas.gemmEx(
                self._handle, blas.CUBLAS_OP_T, blas.CUBLAS_OP_N, rows, n, cols, self._one.ctypes.data, self._weights[name].data.ptr, CUDA_R_16F, cols,
                self._x.data.ptr, CUDA_R_16F, cols, self._zero.ctypes.data, self._y.data.ptr, CUDA_R_16F, rows, CUBLAS_COMPUTE_32F, -1,
            )  # fmt: skip
