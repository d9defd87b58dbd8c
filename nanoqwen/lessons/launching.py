"""Chapter 06's kernels on the card (kernels/lessons/launching.cu): what a launch costs when the kernel does nothing, and what overlaps.

No model is needed. ``floors`` times launches of an empty kernel, launched one by one and from a graph; ``stages`` runs a chain of kernels that
stamp the time, with and without the programmatic attribute. ``cupy`` is imported where it is used, so this file can be imported anywhere.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from nanoqwen.config import Dims
from nanoqwen.cuda.constants import LaunchShape, constants_header
from nanoqwen.errors import DeviceError

SOURCE = "lessons/launching.cu"
#: The chain of stamped kernels: how many, nanoseconds of prologue and of the shortest CTA's work, and shared memory that leaves room for one CTA an SM.
KERNELS, PROLOGUE_NS, WORK_NS, SHARED = 5, 2000, 3000, 120 * 1024
#: What the SMs' clocks may differ by, nanoseconds, before an order of stamps is called wrong.
SKEW_NS = 500
#: Launches that are enqueued together: fewer than the driver's queue holds, so that the host never waits for room.
LAUNCHES, REPLAYS = 256, 20
#: What ``floors`` measures, microseconds a launch.
FLOORS = {
    "waits": "eager, the host waits after each",
    "eager": "eager, enqueued ahead",
    "eager_overlap": "eager, enqueued ahead, programmatic",
    "host": "of it the host's own time",
    "graph": "from a graph",
    "graph_overlap": "from a graph, programmatic",
}


class Card:
    """The kernels, loaded, and a stream."""

    def __init__(self, cache=None) -> None:
        import cupy

        from nanoqwen.cuda.launch import Kernels

        self.cp = cupy
        self.sms = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"]
        dims = Dims.qwen2_5_coder_7b()
        self.kernels = Kernels(constants_header(dims, 128, LaunchShape(self.sms)), cache, [SOURCE])
        self.kernels.allow_shared("launch_stages", SHARED)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def launch(self, name: str, threads: int, args: list, shared: int = 0):
        """A ``Launch`` of one CTA for each SM."""
        from nanoqwen.cuda.launch import Launch

        return Launch(self.kernels, name, (self.sms,), threads, args, shared=shared)

    def captured(self, launches: list):
        """A graph of ``launches``, in order."""
        self.stream.begin_capture()
        for launch in launches:
            launch(self.stream)
        return self.stream.end_capture()


def floors(card: Card, runs: int = 5) -> tuple[dict[str, float], float]:
    """({what: microseconds a launch} of an empty kernel, microseconds of the host for the launch of a graph of ``LAUNCHES``): medians."""
    overlapping = card.launch("launch_nothing", 128, [])
    serial = overlapping.serial()

    def one_by_one(launch, wait: bool = False) -> None:
        for _ in range(LAUNCHES):
            launch(card.stream)
            if wait:
                card.stream.synchronize()

    graphs = [card.captured([serial, *[launch] * (LAUNCHES - 1)]) for launch in (serial, overlapping)]
    us = {
        "waits": _us(card, lambda: one_by_one(serial, wait=True), runs),
        "eager": _us(card, lambda: one_by_one(serial), runs),
        "eager_overlap": _us(card, lambda: one_by_one(overlapping), runs),
        "host": _us(card, lambda: one_by_one(serial), runs, to_end=False),
        **{name: _us(card, lambda g=graph: [g.launch(card.stream) for _ in range(REPLAYS)], runs) / REPLAYS for name, graph in zip(("graph", "graph_overlap"), graphs)},
    }
    graph_host = _us(card, lambda: graphs[0].launch(card.stream), runs, to_end=False)
    return {name: round(value / LAUNCHES, 3) for name, value in us.items()}, round(graph_host, 2)


def _us(card: Card, work: Callable[[], object], runs: int, to_end: bool = True) -> float:
    """Median microseconds of ``work`` on an idle card, until the card has finished or until the host is free again."""
    samples = []
    for _ in range(runs + 1):
        card.stream.synchronize()
        started = time.perf_counter()
        work()
        if to_end:
            card.stream.synchronize()
        samples.append(time.perf_counter() - started)
    card.stream.synchronize()
    return statistics.median(samples[1:]) * 1e6


def stages(card: Card, overlap: bool, runs: int = 3) -> list[list[list[int]]]:
    """[kernel][CTA][start, ready, released, end]: nanoseconds since the first start, of a graph of ``KERNELS`` launches, the last of ``runs``.

    Raises DeviceError when a CTA worked before the kernel before it had finished.
    """
    cp = card.cp
    stamps = [cp.zeros((card.sms, 4), dtype=cp.uint64) for _ in range(KERNELS)]
    cp.cuda.Device().synchronize()  # a non-blocking stream does not wait for the zeros
    launches = [card.launch("launch_stages", 32, [s, ctypes.c_int(PROLOGUE_NS), ctypes.c_int(WORK_NS)], SHARED) for s in stamps]
    graph = card.captured([launches[0].serial(), *(launch if overlap else launch.serial() for launch in launches[1:])])
    for _ in range(runs):
        graph.launch(card.stream)
        card.stream.synchronize()
    taken = [s.get().astype("int64") for s in stamps]
    first = min(int(t.min()) for t in taken)
    found = [(t - first).tolist() for t in taken]
    for before, after in zip(found, found[1:]):
        if min(cta[2] for cta in after) < max(cta[3] for cta in before) - SKEW_NS:
            raise DeviceError("launch_stages: a CTA was released before the kernel before it had finished")
    return found
