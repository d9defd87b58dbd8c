"""A card that is a queue: enough of CuPy for the host's half of the Hopper engines to run where there is none.

What an engine launches waits in a queue until somebody waits for it, so an engine that reads too early reads what was there before.
In place of the kernels stand Python functions over the same buffers and pages. Their model remembers the ids in its KV pages, found
through the block table, and computes logits from them: a page too few, a stale row or a wrong number changes the next id.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import samplemodel

import nanoqwen.cuda.constants
import nanoqwen.engines  # noqa: F401  the packages whose modules are imported anew
from nanoqwen.config import Dims

DIMS = Dims(num_layers=2, hidden=128, intermediate=128, num_heads=2, num_kv_heads=1, head_dim=64, vocab=300, max_position=200)
PAGE = 16
#: An id whose row in the cache overflows.
LOUD = 299
_HOPPER_MODULES = ("engines.hopper", "engines.persistent", "cuda.persistent", "cuda.decode", "cuda.launch", "cuda.prefill", "cuda.tensor_map", "cuda.weights", "cuda.staging")


def logits_of(ids: list[int]) -> np.ndarray:
    """float32 [vocab], from every id and its place."""
    return np.random.default_rng(np.random.SeedSequence([len(ids), *ids])).normal(0, 3, DIMS.vocab).astype(np.float32)


class OutOfMemoryError(MemoryError):
    """CuPy's."""


class Array(np.ndarray):
    """An array on the card: host writes are copied and queued, reads wait."""

    def set(self, values, stream):
        stream.enqueue(lambda out=self, held=np.array(values): np.ndarray.__setitem__(out, ..., held))

    def get(self, stream):
        stream.synchronize()
        return np.array(self)

    def __setitem__(self, index, value):  # CuPy's own kernels: in order with the rest
        for stream in Stream.all:
            stream.synchronize()
        super().__setitem__(index, value)


class Stream:
    """What is enqueued runs when somebody waits."""

    all: list[Stream] = []

    def __init__(self, non_blocking: bool = False) -> None:
        self.queue, self.captured = [], None
        Stream.all.append(self)

    def enqueue(self, work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def synchronize(self, upto: int | None = None) -> None:
        """All of the queue, or all but its last entries."""
        assert self.captured is None, "nothing may wait for a stream that captures"
        while self.queue and (upto is None or len(self.queue) > upto):
            self.queue.pop(0)()

    def is_busy(self) -> bool:
        """While the host looks, the card gets on."""
        if self.queue:
            self.queue.pop(0)()
        return bool(self.queue)

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> SimpleNamespace:
        work, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda stream: [stream.enqueue(w) for w in work])

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.reached = True

    def record(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False
        stream.enqueue(lambda: setattr(self, "reached", True))

    def synchronize(self) -> None:
        while not self.reached:
            self.stream.queue.pop(0)()


class Card:
    """``install`` puts the stand-ins in place; ``log`` lists the kernels that ran, ``free`` are the values that may yet be allocated,
    ``chunks`` the tokens of each capture of the persistent kernel, ``story`` what its watchdog says."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free: float = float("inf")
        self.chunks: list[int] = []
        self.story: str | None = None

    def install(self, monkeypatch) -> ModuleType:
        """nanoqwen.engines.hopper, on this card."""
        Stream.all = []
        runtime = SimpleNamespace(getDeviceProperties=lambda index: {"name": b"a queue", "multiProcessorCount": 132})
        cupy = ModuleType("cupy")
        cupy.ndarray = Array
        cupy.zeros, cupy.empty = (lambda shape, dtype: self._new(np.zeros(shape, dtype))), (lambda shape, dtype: self._new(np.full(shape, np.nan, dtype)))
        cupy.zeros_like, cupy.asarray = (lambda a: np.zeros_like(a)), (lambda a, dtype=None: np.array(a, dtype).view(Array))
        cupy.cuda = SimpleNamespace(
            Stream=Stream, Event=Event, Device=lambda: SimpleNamespace(id=0), runtime=runtime, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            alloc_pinned_memory=bytearray,
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        hopper = _import_anew(monkeypatch)
        monkeypatch.setattr(hopper, "Kernels", lambda constants, cache: None)
        monkeypatch.setattr(hopper, "Prefill", lambda kernels, weights, buffers, shape, chunk, capture: SimpleNamespace(run=self._prefill(buffers), prepare=lambda pool, stream: None))
        monkeypatch.setattr(hopper, "end_launches", self._head)
        monkeypatch.setattr(hopper, "decode_launches", self._decode)
        persistent = sys.modules["nanoqwen.engines.persistent"]
        monkeypatch.setattr(persistent, "PersistentKernel", lambda weights, shape, cache, settings: SimpleNamespace(launch=self._persistent, story=lambda: self.story, size={"ctas": 4}))
        monkeypatch.setattr(persistent, "is_busy", Stream.is_busy)
        monkeypatch.setattr(persistent, "LOOKS", 1)
        return hopper

    def open(self, hopper: ModuleType, name: str = "graph", **options):
        return hopper.make_engine(SimpleNamespace(dims=DIMS, group=128, entries=DIMS.vocab), name, **options)

    def _new(self, array: np.ndarray) -> Array:
        if array.size > self.free:
            raise OutOfMemoryError(f"Out of memory allocating {array.nbytes} bytes.")
        return array.view(Array)

    # ------------------------------------------------------------------------------------------------------ kernels

    def _kernel(self, name: str, work):
        def run():
            self.log.append(name)
            work()

        def launch(stream):
            stream.enqueue(run)

        launch.serial = lambda: launch
        return launch

    def _decode(self, kernels, weights, buffers, pool, shape, *, opens_page, draws=False):
        opening = [self._kernel("page_open", lambda: _page_open(buffers, pool))] if opens_page else []
        return [*opening, self._kernel("body", lambda: _body(buffers, pool)), *self._head(kernels, weights, buffers, pool, shape, draws=draws)]

    def _persistent(self, buffers, pool, tokens, *, chooses=True):
        """Token by token, so that an id is told while later ones are yet to come. The kernel opens pages itself."""

        def opening():
            if buffers.step[1] % PAGE == 0:
                self.log.append("page_open")
                _page_open(buffers, pool)

        head = self._head(None, None, buffers, pool, None, draws=not chooses)
        token = [self._kernel("body", lambda: _body(buffers, pool)), *(head if chooses else head[:-1])]

        def launch(stream):
            self.chunks.append(tokens)
            for _ in range(tokens):
                stream.enqueue(opening)
                for work in token:
                    work(stream)

        return launch

    def _head(self, kernels, weights, buffers, pool, shape, *, draws=False):
        def lm_head():
            np.ndarray.__setitem__(buffers.logits, slice(0, DIMS.vocab), _logits(pool, buffers.block_table, int(buffers.step[1])))

        def argmax():
            ids = np.arange(DIMS.vocab)
            scores = np.where(buffers.allowed[ids // 32] >> (ids % 32).astype(np.uint32) & 1, buffers.logits[: DIMS.vocab], -np.inf)
            best = -1 if np.isnan(scores).any() else int(np.argmax(scores))
            if draws:
                np.ndarray.__setitem__(buffers.step, 2, best)
            else:
                _advance(buffers, best)

        def sample():
            best = int(buffers.step[2])
            number = int(buffers.random[buffers.step[1]])
            _advance(buffers, best if best < 0 else samplemodel.draw(np.array(buffers.logits), np.array(buffers.allowed), np.array(buffers.rule), number))

        sampling = [self._kernel("sample", sample)] if draws else []
        return [self._kernel("lm_head", lm_head), self._kernel("argmax", argmax), *sampling]

    def _prefill(self, buffers):
        def run(chunk, at, pool, stream):
            def work():
                _append(pool, buffers.block_table, at, chunk)
                np.ndarray.__setitem__(buffers.step, slice(None), [chunk[-1], at + len(chunk) - 1, -1])

            self._kernel("prefill", work)(stream)

        return run


def _import_anew(monkeypatch) -> ModuleType:
    """The engine and what it imports, with whatever ``cupy`` is now; as before when the test ends."""
    homes = [(sys.modules[f"nanoqwen.{name.split('.')[0]}"], name.split(".")[1], f"nanoqwen.{name}") for name in _HOPPER_MODULES]
    for package, short, full in homes:
        monkeypatch.delitem(sys.modules, full, raising=False)
        monkeypatch.delattr(package, short, raising=False)
    hopper, _ = (importlib.import_module(f"nanoqwen.engines.{name}") for name in ("hopper", "persistent"))
    for package, short, full in homes:
        if full in sys.modules:
            module = sys.modules.pop(full)
            delattr(package, short)
            monkeypatch.setitem(sys.modules, full, module)
            monkeypatch.setattr(package, short, module, raising=False)
    return hopper


def _page_open(buffers, pool) -> None:
    np.ndarray.__setitem__(pool, (slice(None), slice(None), int(buffers.block_table[buffers.step[1] // PAGE])), 0)


def _body(buffers, pool) -> None:
    _append(pool, buffers.block_table, int(buffers.step[1]), [int(buffers.step[0])])


def _advance(buffers, chosen: int) -> None:
    """kernels/common/step.cuh."""
    buffers.told[buffers.step[1]] = chosen
    np.ndarray.__setitem__(buffers.step, slice(None), [max(chosen, 0), buffers.step[1] + 1, chosen])


def _rows(pool: np.ndarray, table: np.ndarray, pages: int) -> np.ndarray:
    """The first number of every token's row in every layer, K and V [layers, 2, pages * 16]: the id, or NaN."""
    shaped = np.asarray(pool).reshape(*pool.shape[:3], DIMS.num_kv_heads, PAGE, DIMS.head_dim)
    return np.concatenate([shaped[:, :, table[i], 0, :, 0] for i in range(pages)], axis=-1)


def _append(pool, table, at: int, ids: list[int]) -> None:
    shaped = np.asarray(pool).reshape(*pool.shape[:3], DIMS.num_kv_heads, PAGE, DIMS.head_dim)
    for position, token in enumerate(ids, at):
        shaped[:, :, table[position // PAGE], 0, position % PAGE] = np.nan if token == LOUD else token


def _logits(pool, table, position: int) -> np.ndarray:
    """Of the token at ``position``. Whole pages are read, as attention does: NaN anywhere in them spoils the sum."""
    rows = _rows(pool, table, position // PAGE + 1)
    if np.isnan(rows).any():
        return np.full(DIMS.vocab, np.nan, np.float32)
    assert (rows == rows[:1, :1]).all(), "every layer holds the same"
    return logits_of(rows[0, 0, : position + 1].astype(int).tolist())
