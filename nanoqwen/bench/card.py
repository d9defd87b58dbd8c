"""What only a card can be asked, and only from inside its engine: device time, launches one by one, the greedy token.

These functions look behind the Engine contract on purpose (the list of launches, the graphs, the stream): a benchmark of
kernels has to. Nothing else does. ``cupy`` is imported where it is used, so this file can be imported anywhere.
"""

from __future__ import annotations

import time

import numpy as np

from nanoqwen.config import Dims
from nanoqwen.engines.base import Engine
from nanoqwen.errors import NonFiniteError


def current(device: str | None):
    """Context manager: CuPy's current device is the one of "cuda" or "cuda:N"."""
    import cupy

    return cupy.cuda.Device(_index(device))


def greedy_step(engine: Engine, token: int) -> int:
    """One decode step whose next token is chosen on the card: 4 bytes come back, not the logits."""
    engine.step(token)
    following = int(engine._buffers.step[3].get(stream=engine._stream))
    if following < 0:
        raise NonFiniteError("the logits are not finite; run with --engine cpu to learn the layer")
    engine._tokens.append(token)
    return following


def compile_all(dims: Dims, group: int, device: str | None) -> tuple[float, str]:
    """(seconds, "compiled" or "from the cache") for every kernel of the model."""
    import cupy

    from nanoqwen.cuda.compile import compile_source, kernel_sources
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.engines.hopper import kernel_cache

    cache = kernel_cache()
    sms = cupy.cuda.runtime.getDeviceProperties(_index(device))["multiProcessorCount"]
    header = constants_header(dims, group, LaunchShape(sms))
    held = set(cache.glob("*.log")) if cache else set()
    started = time.perf_counter()
    for source in kernel_sources():
        compile_source(source, header, cache)
    seconds = time.perf_counter() - started
    fresh = len(set(cache.glob("*.log")) - held) if cache else len(kernel_sources())
    return seconds, f"{fresh} of {len(kernel_sources())} sources compiled" if fresh else "all from the cache"


def capture_seconds(engine: Engine) -> float | None:
    """Seconds to capture both graphs once more; None for an engine without graphs. (The engine did it while it was opened.)"""
    if engine.name != "graph":
        return None
    started = time.perf_counter()
    for launches in engine._launches.values():
        engine._capture(launches)
    return time.perf_counter() - started


def chained_ms(engine: Engine, token: int, replays: int, runs: int) -> list[float]:
    """Device milliseconds of one step: ``replays`` of the graph back to back, between two CUDA events, without the host in between.

    The position stays the engine's: each replay decodes the same token at the same place, so it reads the same bytes. Position
    must not begin a page. The cache is as before, because the position after it has not moved.
    """
    import cupy

    engine._buffers.step.set(np.array([token, engine.position, 0, -1], dtype=np.int32), stream=engine._stream)
    graph = engine._graphs[False]
    return [ms / replays for ms in _timed(engine, lambda: [graph.launch(engine._stream) for _ in range(replays)], runs, cupy)]


def gemv_graph_us(engine: Engine, name: str, rounds: int, runs: int) -> list[float]:
    """Microseconds of one launch of kernel ``name``, in a graph of all layers' launches, ``rounds`` times over."""
    import cupy

    launches = [launch for launch in engine._launches[False] if launch.name == name] * rounds
    graph = engine._capture(launches)
    return [ms * 1e3 / len(launches) for ms in _timed(engine, lambda: graph.launch(engine._stream), runs, cupy)]


def gemv_bytes(engine: Engine) -> dict[str, tuple[int, int, int]]:
    """Kernel -> (rows, columns, bytes that one launch reads) of every streamed matrix."""
    layer, head = engine._weights.layers[0], engine._weights.head
    found = {f"gemv_{name}": (m.rows, m.cols, m.nbytes) for name, m in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down))}
    return {**found, "lm_head": (head.size // engine.dims.hidden, engine.dims.hidden, head.nbytes)}


def region_ms(engine: Engine, token: int, steps: int) -> dict[str, float]:
    """Device milliseconds of each region in one eager step, between CUDA events around every launch; mean over ``steps``.

    The events keep a kernel from starting while the one before it drains, so the sum is above the step's own time.
    """
    import cupy

    engine._buffers.step.set(np.array([token, engine.position, 0, -1], dtype=np.int32), stream=engine._stream)
    launches = engine._launches[False]
    events = [cupy.cuda.Event() for _ in range(len(launches) + 1)]
    totals: dict[str, float] = {}
    for step in range(steps + 1):
        events[0].record(engine._stream)
        for launch, event in zip(launches, events[1:]):
            launch(engine._stream)
            event.record(engine._stream)
        events[-1].synchronize()
        for launch, before, after in zip(launches, events, events[1:]):
            if step:  # the first one warms up
                totals[launch.region] = totals.get(launch.region, 0.0) + cupy.cuda.get_elapsed_time(before, after) / steps
    return totals


def device_facts(device: str | None) -> tuple[dict, dict[str, str]]:
    """(device, versions) for a receipt."""
    import cupy
    from cuda.bindings import nvrtc

    from nanoqwen.machine import nvidia_driver

    properties = cupy.cuda.runtime.getDeviceProperties(_index(device))
    driver = nvidia_driver()
    facts = {
        "name": properties["name"].decode(), "sm_count": properties["multiProcessorCount"], "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "l2_mb": round(properties["l2CacheSize"] / 1e6, 1), "clocks": "default",
    }  # fmt: skip
    versions = {
        "cupy": cupy.__version__, "nvrtc": ".".join(map(str, nvrtc.nvrtcVersion()[1:])), "cuda_runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "driver": (driver.version if driver else None) or "unknown",
    }  # fmt: skip
    return facts, versions


def free_memory() -> None:
    """Give the memory of a closed engine back to the card, for the next one."""
    import gc

    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def _timed(engine: Engine, work, runs: int, cupy) -> list[float]:
    """Milliseconds between two events around ``work``, ``runs`` times after one warm-up."""
    begin, end, samples = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(runs + 1):
        begin.record(engine._stream)
        work()
        end.record(engine._stream)
        end.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(begin, end))
    return samples[1:]


def _index(device: str | None) -> int:
    return int((device or "cuda").partition(":")[2] or 0)
