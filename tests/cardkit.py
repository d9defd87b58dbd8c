"""A Hopper card played in numpy: enough of CuPy for the Hopper engines to run here, with kernels written from their contracts
(cardkernels.py).

The engine, its buffers, launches, pages and prefill are the real ones; only the machine below them is not. So the ladder's own code can be
tried without a GPU, and a kernel can be spoiled to see that its check notices. What a kernel does is written with the ladder's twins: such a
card says nothing about the kernels in `kernels/`, which the same checks meet on a real one.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import time
import types
from contextlib import contextmanager

import numpy as np
from cardkernels import SMS, FakeCard


class Array(np.ndarray):
    """A numpy array with the few methods that CuPy's has on top."""

    def get(self, stream=None) -> np.ndarray:
        return np.array(self, copy=True).view(np.ndarray)

    def set(self, values, stream=None) -> None:
        assert isinstance(values, np.ndarray) and values.dtype == self.dtype and values.shape == self.shape and self.flags.c_contiguous
        self[...] = values

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class Stream:
    """Launches happen at once, or are collected while a graph is captured."""

    ptr, captured = 0, None

    def __init__(self, non_blocking: bool = False) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None: ...

    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self):
        launches, self.captured = self.captured, None
        return types.SimpleNamespace(launch=lambda stream: [launch(stream) for launch in launches], upload=lambda stream: None)


class Event:
    """Everything happens at once."""

    def __init__(self, **options) -> None: ...

    def record(self, stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...


class Launch:
    """Has the constructor of the real one; `kernels` below do the work, with what was `given`: the real one has no such attribute, and nothing of the package may ask for it."""

    def __init__(self, kernels, name, grid, threads, args, *, region="", shared=0, overlap=True) -> None:
        self.name, self.region, self.grid, self.given, self.overlap, self.card = name, region or name, grid, args, overlap, kernels.card

    def resize(self, grid) -> None:
        self.grid = grid

    def __call__(self, stream: Stream) -> None:
        if stream.captured is not None:
            stream.captured.append(self.frozen())
        else:
            self.card.kernels[self.name](self)

    def frozen(self):
        """This launch as a graph keeps it: with the grid and the arguments of now, whatever becomes of them."""
        grid, args = self.grid, [a if isinstance(a, np.ndarray) else copy.copy(a) for a in self.given]

        def launch(stream: Stream) -> None:
            now = self.grid, self.given
            self.grid, self.given = grid, args
            try:
                self(stream)
            finally:
                self.grid, self.given = now

        return launch


def _cupy(card: FakeCard) -> types.ModuleType:
    fake = types.ModuleType("cupy")
    for name in ("zeros", "ones", "zeros_like", "ascontiguousarray", "concatenate", "array", "isfinite"):
        setattr(fake, name, lambda *args, _f=getattr(np, name), **kwargs: _f(*args, **kwargs).view(Array))

    def dirty(shape, dtype=float):
        """What nobody has written is NaN, so that who reads it is seen, and in every run."""
        out = np.empty(shape, dtype)
        out.reshape(-1).view(np.uint8)[...] = 0xFF
        return out.view(Array)

    fake.empty, fake.empty_like = dirty, lambda other: dirty(other.shape, other.dtype)
    fake.asarray = lambda values, dtype=None: np.array(values, dtype=dtype).view(Array)
    fake.ndarray, fake.nan, fake.__version__ = Array, np.nan, "played in numpy"
    properties = {"name": b"a card played in numpy", "multiProcessorCount": SMS, "major": 9, "minor": 0}
    runtime = types.SimpleNamespace(
        free=lambda pointer: None, getDeviceProperties=lambda index: properties, memGetInfo=lambda: (1 << 37, 1 << 37), deviceSynchronize=lambda: None,
        getDeviceCount=lambda: 1, getDevice=lambda: 0,
    )  # fmt: skip
    fake.cuda = types.SimpleNamespace(
        Stream=Stream, Event=Event, alloc_pinned_memory=bytearray, runtime=runtime, Device=lambda *a: types.SimpleNamespace(id=0),
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError), get_current_stream=Stream, Graph=object,
        get_elapsed_time=lambda before, after: (after.at - before.at) * 1e3,
    )  # fmt: skip
    return fake


class StagingCard:
    """What `nanoqwen.cuda.staging` asks of CuPy, at once and in one memory."""

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def stream(self) -> None: ...

    def event(self) -> None: ...

    def copy(self, out, offset: int, source: np.ndarray, stream, event) -> None:
        out.reshape(-1).view(np.uint8)[offset : offset + source.nbytes] = source

    def wait(self, event) -> None: ...

    def release(self) -> None: ...


class Kernels:
    """Compiles nothing."""

    def __init__(self, constants: str, cache, sources=None) -> None:
        self.card = Kernels.current

    def allow_shared(self, name: str, nbytes: int) -> None: ...


class PersistentKernel:
    """Its token is the other engines' launches, one after the other. A test may put something in the place of ``spoil``, which runs
    behind each token, of ``tokens`` in this launch."""

    spoil = staticmethod(lambda card, tokens: None)

    def __init__(self, weights, shape, cache, settings) -> None:
        self.card, self.size = Kernels.current, {"ctas": SMS}

    def story(self) -> None: ...

    def launch(self, buffers, pool, tokens, *, chooses=True):
        def token(stream) -> None:
            for _ in range(tokens):
                for launch in self.card.engine._launches[int(buffers.step[1]) % 16 == 0]:
                    launch(stream)
                self.spoil(self.card, tokens)

        def launch(stream) -> None:
            if stream.captured is not None:
                stream.captured.append(token)
            else:
                token(stream)

        return launch


@contextmanager
def played(monkeypatch):
    """Inside, `nanoqwen.engines` finds a Hopper card: yields the FakeCard. The modules that saw it are gone afterwards."""
    card = Kernels.current = FakeCard()

    def taken_out() -> dict[str, types.ModuleType]:
        """The modules that import CuPy or its users, removed from where `import` looks: among the modules and in their packages."""
        names = [n for n in sys.modules if n.startswith(("nanoqwen.cuda.", "nanoqwen.engines.hopper", "nanoqwen.engines.persistent", "nanoqwen.ladder.card"))]
        modules = {name: sys.modules.pop(name) for name in names}
        for name in names:
            package, _, last = name.rpartition(".")
            vars(sys.modules[package]).pop(last, None)
        return modules

    real = taken_out()
    driver, nvrtc = types.ModuleType("driver"), types.ModuleType("nvrtc")
    stubs = {
        "cupy": _cupy(card), "cuda": types.ModuleType("cuda"),
        "cuda.bindings": types.SimpleNamespace(driver=driver, nvrtc=nvrtc),
    }  # fmt: skip
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    import nanoqwen.cuda.launch as launch

    launch.Launch, launch.Kernels = Launch, Kernels
    import nanoqwen.cuda.staging as staging

    staging.Card = StagingCard
    from nanoqwen.cuda import tensor_map

    def encoded(*described: int) -> int:
        """A map that says what it was asked for; the driver's is opaque."""
        card.map = (ctypes.c_uint64 * 16)(*described)
        return ctypes.addressof(card.map)

    tensor_map._encoded = encoded
    import nanoqwen.cuda.persistent as persistent

    persistent.PersistentKernel = PersistentKernel
    from nanoqwen.engines import hopper

    hopper.compile_persistent = lambda *_: None
    made = hopper.HopperEngine.__init__

    def remember(engine, *args, **kwargs) -> None:
        card.engine = engine
        made(engine, *args, **kwargs)

    hopper.HopperEngine.__init__ = remember
    monkeypatch.setattr(hopper, "kernel_cache", lambda: None)
    for module in ("nanoqwen.engines", "nanoqwen.engines.synthetic"):
        monkeypatch.setattr(f"{module}.hopper_problem", lambda: None)
    try:
        yield card
    finally:
        taken_out()
        for name, module in real.items():
            package, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], last, module)
