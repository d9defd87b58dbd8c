"""What only a card can be asked, and only from inside its engine: device time, and launches one by one.

These functions look behind the Engine contract on purpose (the list of launches, the graphs, the stream): a benchmark of
kernels has to. Nothing else does. ``cupy`` is imported where it is used, so this file can be imported anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nanoqwen.bench.receipts import nvrtc_version
from nanoqwen.config import Dims
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError


def current(device: str | None):
    """Context manager: CuPy's current device is the one of "cuda" or "cuda:N"."""
    import cupy

    return cupy.cuda.Device(_index(device))


def compile_all(dims: Dims, group: int, device: str | None, engine: str) -> tuple[float, str]:
    """(seconds, "compiled" or "from the cache") for every kernel of the model that ``engine`` compiles."""
    import cupy

    from nanoqwen.cuda import compile as compiler
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.persistent_plan import compile_persistent
    from nanoqwen.engines.hopper import kernel_cache

    cache = kernel_cache()
    sms = cupy.cuda.runtime.getDeviceProperties(_index(device))["multiProcessorCount"]
    shape = LaunchShape(sms)
    header = constants_header(dims, group, shape)
    held = set(cache.glob("*.log")) if cache else set()
    started = time.perf_counter()
    compiler.compile_all(header, cache)
    if engine == "persistent":
        compile_persistent(dims, group, shape, cache)
    seconds = time.perf_counter() - started
    total = len(compiler.kernel_sources()) + (engine == "persistent")
    fresh = len(set(cache.glob("*.log")) - held) if cache else total
    return seconds, f"{fresh} of {total} sources compiled" if fresh else "all from the cache"


def capture_seconds(engine: Engine) -> float | None:
    """Seconds to make the launches and capture their graphs once more; None for an engine without graphs. (The engine did it while it was opened.)"""
    if engine.name == "eager":
        return None
    started = time.perf_counter()
    if engine.name == "persistent":
        engine._make_launches()
    else:
        for launches in engine._launches.values():
            engine._capture(launches)
    engine._prefiller.prepare(engine._pages.pool, engine._stream)
    return time.perf_counter() - started


def chained_ms(engine: Engine, token: int, steps: int, runs: int) -> list[float]:
    """Device milliseconds of one step: ``steps`` of them between two CUDA events, each launched before the one before it has finished.

    They are decode steps like any other, from the engine's position on, pages opened on the way. The cache is as before afterwards.
    """
    import cupy

    steps = min(steps, engine.context_limit - engine.position)
    try:
        return [ms / steps for ms in timed(engine, lambda: engine.run_ahead(token, steps), runs, cupy)]
    finally:
        engine.drop_ahead()


def kernel_ms(engine: Engine, kernel, token: int, steps: int, each: int, runs: int, **choices: int) -> tuple[list[float], list[list[int]]]:
    """(device milliseconds of a token, ids told) of every run of ``steps`` tokens by the persistent ``kernel``, which has the weights of ``engine``
    and decodes ``each`` tokens a launch, in a graph; ``choices`` go to its launch. The cache of ``engine`` is as before afterwards.

    Raises DeviceError when the kernel's watchdog has ended it: nothing on the card answers this process any more.
    """
    import cupy

    at, chains = engine.position, []
    engine._hold(at + steps)
    graph = engine._capture([kernel.launch(engine._buffers, engine._pages.pool, each, **choices)] * (steps // each))

    def work() -> None:
        engine._place(token, at)
        graph.launch(engine._stream)

    try:
        samples = timed(engine, work, runs, cupy, lambda: chains.append(engine._buffers.told[at : at + steps].tolist()))
    except Exception:
        if story := kernel.story():
            raise DeviceError(story) from None
        raise
    engine.drop_ahead()
    return [ms / steps for ms in samples], chains


def gemv_graph_us(engine: Engine, name: str, rounds: int, runs: int) -> list[float]:
    """Microseconds of one launch of kernel ``name``, in a graph of all layers' launches, ``rounds`` times over."""
    import cupy

    launches = [launch for launch in engine._launches[False] if launch.name == name] * rounds
    graph = engine._capture(launches)
    return [ms * 1e3 / len(launches) for ms in timed(engine, lambda: graph.launch(engine._stream), runs, cupy)]


def gemv_bytes(engine: Engine) -> dict[str, tuple[int, int, int]]:
    """Kernel -> (rows, columns, bytes that one launch reads) of every streamed matrix."""
    layer, head = engine._weights.layers[0], engine._weights.head
    found = {f"gemv_{name}": (m.rows, m.cols, m.nbytes) for name, m in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down))}
    return {**found, "lm_head": (head.size // engine.dims.hidden, engine.dims.hidden, head.nbytes)}


def region_ms(engine: Engine, token: int, steps: int) -> dict[str, float]:
    """Device milliseconds of each region in one eager step, between CUDA events around every launch; mean over ``steps``. The step is always
    the one at the engine's position, which must not begin a page; the cache is as before, because the position has not moved.

    The events keep a kernel from starting while the one before it drains, so the sum is above the step's own time.
    """
    import cupy

    launches = engine._launches[False]
    events = [cupy.cuda.Event() for _ in range(len(launches) + 1)]
    totals: dict[str, float] = {}
    for step in range(steps + 1):
        engine._place(token, engine.position)  # the step moves on by itself
        events[0].record(engine._stream)
        for launch, event in zip(launches, events[1:]):
            launch(engine._stream)
            event.record(engine._stream)
        events[-1].synchronize()
        for launch, before, after in zip(launches, events, events[1:]):
            if step:  # the first one warms up
                totals[launch.region] = totals.get(launch.region, 0.0) + cupy.cuda.get_elapsed_time(before, after) / steps
    return totals


def wall_ms(engine: Engine, work: Callable[[], object], steps: int, runs: int, to_end: bool = True) -> list[float]:
    """Wall-clock milliseconds of a step: ``work`` makes ``steps`` of them, from an idle card until it is idle again, or with ``to_end=False``
    until the host is free. After each of the ``runs`` (and the one that warms up) the cache is as before."""
    samples = []
    for _ in range(runs + 1):
        engine._stream.synchronize()
        started = time.perf_counter()
        work()
        if to_end:
            engine._stream.synchronize()
        samples.append((time.perf_counter() - started) * 1e3 / steps)
        engine.drop_ahead()
    engine._stream.synchronize()
    return samples[1:]


def patched_ahead(engine: Engine, token: int, steps: int) -> None:
    """Enqueue ``steps`` steps whose scalars the host writes, without a wait in between: as if it knew each token in advance."""
    for position in range(engine.position, engine.position + steps):
        engine._place(token, position)
        engine._launch(position)


def made_anew(engine: Engine, token: int, steps: int) -> None:
    """Enqueue ``steps`` steps that follow each other, by a program that keeps nothing: it makes every ``Launch`` of every token again."""
    from nanoqwen.engines import hopper

    engine._place(token, engine.position)
    for position in range(engine.position, engine.position + steps):
        engine._hold(position + 1)
        opens = position % engine._kv.page_tokens == 0
        for launch in hopper.decode_launches(engine._kernels, engine._weights, engine._buffers, engine._pages.pool, engine._shape, opens_page=opens):
            launch(engine._stream)


@contextmanager
def changed_launches(engine: Engine, change: Callable) -> Iterator[None]:
    """Inside, each kernel of a greedy step is launched as ``change(launch)``, a function of the stream; a graph engine captures that anew."""
    engine._stream.synchronize()
    try:
        engine._launches = {opens: [change(launch) for launch in step] for opens, step in engine._launches.items()}
        engine._graphs = engine._captured(engine._launches)
        yield
    finally:
        engine._stream.synchronize()
        engine._make_launches()


def waiting(launch) -> Callable:
    """``launch`` by a host that waits for the kernel."""

    def call(stream) -> None:
        launch(stream)
        stream.synchronize()

    return call


def allocating(launch, nbytes: int = 1 << 20) -> Callable:
    """``launch`` by a program that asks the driver for memory before each kernel and gives it back behind it (which waits for the card)."""
    import cupy

    def call(stream) -> None:
        pointer = cupy.cuda.runtime.malloc(nbytes)
        launch(stream)
        stream.synchronize()
        cupy.cuda.runtime.free(pointer)

    return call


def page_ahead(engine: Engine) -> Callable[[int, int], None]:
    """A graph of all steps of one page, the one that opens it first; ``page_ahead(engine)(token, pages)`` enqueues so many pages of steps from
    the engine's position on, which must begin a page."""
    page_tokens = engine._kv.page_tokens
    graph = engine._capture(engine._launches[True] + engine._launches[False] * (page_tokens - 1))

    def ahead(token: int, pages: int) -> None:
        engine._place(token, engine.position)
        for page in range(pages):
            engine._hold(engine.position + (page + 1) * page_tokens)
            graph.launch(engine._stream)

    return ahead


def launches_of(engine: Engine, opens_page: bool = False) -> list[tuple[str, str]]:
    """(kernel, region) of every launch of a greedy step, in order."""
    return [(launch.name, launch.region) for launch in engine._launches[opens_page]]


def device_facts(device: str | None) -> tuple[dict, dict[str, str]]:
    """(device, versions) for a receipt."""
    import cupy

    from nanoqwen.machine import nvidia_driver

    properties = cupy.cuda.runtime.getDeviceProperties(_index(device))
    driver = nvidia_driver()
    facts = {
        "name": properties["name"].decode(), "sm_count": properties["multiProcessorCount"], "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "l2_mb": round(properties["l2CacheSize"] / 1e6, 1), "clocks": "default",
    }  # fmt: skip
    versions = {
        "cupy": cupy.__version__, **nvrtc_version(), "cuda_runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "driver": (driver.version if driver else None) or "unknown",
    }  # fmt: skip
    return facts, versions


def free_memory() -> None:
    """Give the memory of a closed engine back to the card, for the next one."""
    import gc

    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def timed(engine: Engine, work: Callable[[], object], runs: int, cupy, after: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds between two events around ``work``, ``runs`` times after one warm-up; ``after`` each of them, untimed, the card idle."""
    return alternated(engine, [work], runs + 1, cupy, after)[0][1:]


def alternated(engine: Engine, works: Sequence[Callable[[], object]], rounds: int, cupy, after: Callable[[], object] = lambda: None) -> list[list[float]]:
    """Milliseconds between two events around each of ``works``, one list each: all of them in turn, ``rounds`` times, nothing to warm up; ``after`` each of
    them, untimed, the card idle."""
    begin, end, samples = cupy.cuda.Event(), cupy.cuda.Event(), [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, samples):
            begin.record(engine._stream)
            work()
            end.record(engine._stream)
            end.synchronize()
            taken.append(cupy.cuda.get_elapsed_time(begin, end))
            after()
    return samples


def _index(device: str | None) -> int:
    return int((device or "cuda").partition(":")[2] or 0)
