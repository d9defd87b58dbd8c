"""What a Hopper engine says about its prefill from inside: its workspace, its matrix products without what stands between them, and a prompt without
one kind of launch.

Like ``card``, this looks behind the Engine contract on purpose. ``cupy`` is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle

from nanoqwen.bench.card import alternated, timed
from nanoqwen.cuda.prefill_plan import launched_length, shapes
from nanoqwen.engines.base import Engine

#: cuBLAS's numbers for FP16 and for sums in FP32.
CUDA_R_16F, CUBLAS_COMPUTE_32F = 2, 68
#: Kinds of launches of a chunk, in order, and how the names of their kernels begin; a product is told by its place. "ends" are the first and the last one.
KINDS = {
    "norm": "norm_rows_", "qkv": "gemm_", "rope": "rope_", "attention": "prefill_attention", "o": "gemm_", "gate_up": "gemm_", "down": "gemm_",
    "ends": ("embed_rows", "last_row"),
}  # fmt: skip


def workspace_bytes(engine: Engine) -> int | None:
    """Bytes of the buffers that a chunk of a prompt passes through, or None for an engine without a card's prefill."""
    prefiller = getattr(engine, "_prefiller", None)
    return None if prefiller is None else prefiller.nbytes


def chunk_tokens(engine: Engine) -> int:
    """Tokens of the engine's largest chunk; 0 for an engine without a card's prefill."""
    return engine._prefiller.chunk if workspace_bytes(engine) else 0


def products_ms(engine: Engine, n: int, runs: int, name: str | None = None, after: Callable[[], object] = lambda: None) -> list[float]:
    """Device milliseconds of the products of all layers for a chunk of ``n`` tokens, or of those called ``name`` ("qkv", "o", "gate_up", "down"), one
    behind the other in a graph, as the engine launches them; the last layer has all of its own too, which a prompt does without. ``after`` each of the ``runs``.

    They multiply what the last prompt left in the workspace. The engine's cache is as before afterwards.
    """
    import cupy

    prefiller, wanted = engine._prefiller, list(shapes(engine.dims)) if name is None else [name]
    launches = prefiller.launches(launched_length(n, prefiller.chunk), 0, engine._pages.pool, whole=True)
    graph = engine._capture([launch for launch, kind in zip(launches, kinds(launches)) if kind in wanted])
    return timed(engine, lambda: graph.launch(engine._stream), runs, cupy, after)


def kinds(launches: Sequence) -> list[str]:
    """The kind of each launch of a chunk, one of ``KINDS``. What makes digits of down's X is part of down."""
    products = cycle(kind for kind, begin in KINDS.items() if begin == "gemm_")

    def kind_of(name: str) -> str:
        if name.startswith("gemm_"):
            return next(products)
        return "down" if name == "quantise_tiles" else next(kind for kind, begin in KINDS.items() if name.startswith(begin))

    return [kind_of(launch.name) for launch in launches]


def without_ms(engine: Engine, ids: list[int], runs: int) -> tuple[list[float], dict[str, list[float]], bool]:
    """(device milliseconds of every complete run, {kind: milliseconds that each run without it took less}, whether all numbers stayed finite).

    A run is the prompt ``ids``, which must just have been one, from the copy of its ids to its last row, each chunk a graph. Complete runs and runs
    without the kind take turns: both begin on a card as warm as a complete run makes it, with the numbers that a complete run leaves. These matter,
    because what the tensor cores multiply decides how much power they draw, and with it the clock. So:

    - without a norm, nobody writes the X of qkv and of gate and up; attention writes an X of its own, and all of them (o as well) read the last norm's. Of up to 16 tokens
      the norm's are digits, and o reads the last attention's;
    - without attention, o reads the norm's X, or what the last layer's attention left. Without RoPE, queries, keys and values are those of the complete run, and without gate and up, so is down's X;
    - without qkv, o or down, their reader adds the parts that another product has left in the buffer. Residuals are larger then, or rows of o's X more
      alike; the norms bring gate and up and what follows back to the usual size.

    What remains is a bias: with less of its time on tensor cores (no gate and up, say) a run may be given a higher clock, and saves a little more than the
    kind takes; with more of it (no attention) a little less. Launches overlap, so what all kinds save does not add up to the whole. The engine's cache is
    as before afterwards.
    """
    import cupy

    prefiller = engine._prefiller
    whole, rows = _enqueued(engine, ids), min(len(ids), prefiller.chunk)
    complete: list[float] = []
    saved: dict[str, list[float]] = {}
    finite = True
    for kind in KINDS:
        before, after = alternated(engine, [whole, _enqueued(engine, ids, kind)], runs, cupy)
        complete += before
        saved[kind] = [ms - less for ms, less in zip(before, after)]
        with engine._stream:
            finite &= all(bool(cupy.isfinite(a).all()) for a in (prefiller.residual[:rows], prefiller.q[:rows], prefiller.x_inner[:, :rows]))
    whole()
    engine._stream.synchronize()
    return complete, saved, finite


def _enqueued(engine: Engine, ids: list[int], left_out: str | None = None) -> Callable[[], None]:
    """A function that enqueues the prompt ``ids`` from the first position on, without the launches of kind ``left_out``."""
    prefiller, stream, made = engine._prefiller, engine._stream, []
    with _own_x(prefiller) if left_out == "norm" else nullcontext():
        for at in range(0, len(ids), prefiller.chunk):
            chunk = ids[at : at + prefiller.chunk]
            launches = prefiller.launches(launched_length(len(chunk), prefiller.chunk), at, engine._pages.pool)
            kept = [launch for launch, kind in zip(launches, kinds(launches)) if kind != left_out]
            graph = engine._capture(kept)
            graph.upload(stream)
            made.append((chunk, at, graph, kept))  # a graph does not keep the arrays of its launches

    def work() -> None:
        for chunk, at, graph, _ in made:
            prefiller.tell(chunk, at, stream)
            graph.launch(stream)

    return work


@contextmanager
def _own_x(prefiller) -> Iterator[None]:
    """Inside, launches are made in which norms and attention write an X of their own. Products still read the engine's."""
    import cupy

    held = prefiller.x, prefiller._chains
    prefiller.x, prefiller._chains = cupy.empty_like(prefiller.x), {}
    try:
        yield
    finally:
        prefiller.x, prefiller._chains = held


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
