"""The arithmetic paths of chapter 07, measured: ``python -m nanoqwen.bench.unpack_paths``, on a Hopper card.

Every path multiplies each of the seven projections of the 7B, at batch 1, in the frame that the runtime ships. The error is against FP64 on
the same four-bit weights. The time is that of a graph over so many copies of the matrix that together they are several times the L2, so each
launch reads from memory; a path that needs a quantisation kernel has it in the graph, before each of its GEMVs. Each graph runs twice: as
the runtime has it, a kernel asking for its weights while the one before it still runs, and with plain edges (``apart_us``). The same loops then run
on weights that stay in shared memory, which shows what the arithmetic alone could keep up with. Last, the pipes: lanes of one SM that
finish an instruction a clock.

``--instructions`` needs no card, only nvdisasm: it counts the machine instructions of each main loop and writes a receipt of its own.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable

from nanoqwen.bench.ceiling import measure_ceiling
from nanoqwen.bench.program import run_program
from nanoqwen.bench.protocol import spread
from nanoqwen.bench.receipts import nvrtc_version, write_receipt
from nanoqwen.config import Dims
from nanoqwen.cuda import sass
from nanoqwen.cuda.compile import compile_source
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.engines import hopper_problem
from nanoqwen.errors import DeviceError
from nanoqwen.lessons.gemv import BUNDLE_BYTES, LANE_WEIGHTS, PATHS, PIPES, PIPES_SOURCE, SOURCES, Card, Path, header, matrix_bytes, shapes

NAME, COUNTS = "unpack_paths", "unpack_instructions"
COMMAND = "python -m nanoqwen.bench.unpack_paths"
RUNS = 7
L2_TIMES = 4  # the copies together, in sizes of the L2
GRAPH_BYTES = 2_000_000_000  # that one timed sample reads at least
RESIDENT_BUNDLES = 1500  # that each warp multiplies in the loop without loads
PIPE_ROUNDS = {64: 8000, 16: 4000}

_KERNELS = tuple(f"kernels/{source}" for source in (*SOURCES, PIPES_SOURCE)) + (
    "kernels/lessons/lesson_gemv.cuh", "kernels/common/stream_gemv.cuh", "kernels/common/gemv_input.cuh", "kernels/common/int4_unpack.cuh",
    "kernels/common/mbarrier.cuh", "kernels/common/ptx.cuh",
)  # fmt: skip
COUNT_SOURCES = (*_KERNELS, "nanoqwen/cuda/constants.py", "nanoqwen/cuda/sass.py", "nanoqwen/lessons/gemv.py", "nanoqwen/bench/unpack_paths.py")
BENCH_SOURCES = (
    *COUNT_SOURCES, "kernels/setup/ceiling.cu", "kernels/setup/synthetic.cu", "nanoqwen/bench/ceiling.py", "nanoqwen/cuda/launch.py", "nanoqwen/cuda/weights.py",
    "config/nanoqwen.yaml",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ counted, anywhere


def count_instructions(dims: Dims) -> tuple[dict, dict]:
    """(results by path, samples): machine instructions of the main loop on gate's shape, compiled by NVRTC for sm_90a.

    ``bundle`` counts a pass of the loop without loads: a bundle of four blocks, 256 weights a lane. ``frame`` is what the same loop has besides in
    the real kernel: waiting, asking for the next bundle, and the end of a row tile, which may come after any block and is counted
    each time, so it bounds the frame's share from above. Raises DeviceError when NVRTC or nvdisasm is missing.
    """
    constants = header(dims, LaunchShape(132))
    bodies = {name: body for source in SOURCES for name, body in sass.disassemble(compile_source(source, constants).cubin).items()}
    results, samples = {}, {}
    for path in PATHS:
        alone, real = bodies[f"{path.kernel}_resident"], bodies[f"{path.kernel}_gate"]
        counts = sass.count(alone, sass.main_loop(alone, path.marker))
        total = sum(counts.values())
        whole = sum(sass.count(real, sass.smallest_loop(real, path.marker, counts[path.marker])).values())
        results[path.name] = {
            "bundle": total, "frame": whole - total, "per_weight": round(total / LANE_WEIGHTS, 3), "per_weight_with_frame": round(whole / LANE_WEIGHTS, 3),
        }  # fmt: skip
        samples[path.name] = dict(counts.most_common())
    return results, samples


# ---------------------------------------------------------------------------------------------------------- measured, on the card


def errors(card: Card, name: str) -> dict[str, float]:
    """{path: relative L2 error} of projection ``name`` on standard normal activations. Raises DeviceError when two runs differ in a bit."""
    cp = card.cp
    codes, scales = card.weights(name)
    bundles, x = card.bundles(codes, scales)[0], card.activations(codes.shape[1] * 8)
    exact = card.exact(codes, scales, x)
    found = {}
    for path in PATHS:
        first, second = (card.product(path, name, bundles, x) for _ in range(2))
        if not bool((first.view(cp.uint32) == second.view(cp.uint32)).all()):
            raise DeviceError(f"{path.kernel} on {name}: two runs differ")
        found[path.name] = float(cp.sqrt(((first - exact) ** 2).sum() / (exact**2).sum()))
    return found


def timed(card: Card, work: Callable[[], None], runs: int = RUNS) -> list[float]:
    """Milliseconds of ``work``, between two events, ``runs`` times after one that warms up."""
    begin, end, samples = card.cp.cuda.Event(), card.cp.cuda.Event(), []
    for _ in range(runs + 1):
        begin.record(card.stream)
        work()
        end.record(card.stream)
        end.synchronize()
        samples.append(card.cp.cuda.get_elapsed_time(begin, end))
    return samples[1:]


def captured(card: Card, launches: list):
    """A graph of ``launches``, in order."""
    card.stream.begin_capture()
    for launch in launches:
        launch(card.stream)
    return card.stream.end_capture()


def times(card: Card, name: str, ceiling_gb_s: float) -> tuple[dict, dict]:
    """(results, samples) of projection ``name``: microseconds a product of each path, weights rotating through memory."""
    rows, cols = shapes(card.dims)[name]
    nbytes = matrix_bytes(rows, cols)
    copies = -(-L2_TIMES * card.l2_bytes // nbytes)
    replays = max(2, -(-GRAPH_BYTES // (copies * nbytes)))
    matrices, x, out, records = card.bundles(*card.weights(name), copies), card.activations(cols), card.parts(name), card.records(cols)
    card.cp.cuda.Device().synchronize()
    results = {"rows": rows, "cols": cols, "bytes": nbytes, "copies": copies, "paths": {}}
    samples = {}
    for path in PATHS:
        found, raw = {}, {}
        for key, overlap in (("us", True), ("apart_us", False)):
            chain = [launch for bundles in matrices for launch in card.launches(path, name, bundles, x, out, records=records, overlap=overlap)]
            graph = captured(card, chain)
            us = [ms * 1e3 / (replays * copies) for ms in timed(card, lambda run=graph: [run.launch(card.stream) for _ in range(replays)])]
            found[key], raw[key] = spread(us), [round(v, 4) for v in us]
        gb_s = nbytes / found["us"]["median"] / 1e3
        results["paths"][path.name] = {
            "us": found["us"]["median"], "gb_s": round(gb_s, 1), "share": round(gb_s / ceiling_gb_s, 4), "apart_us": found["apart_us"]["median"], "spread_us": found["us"],
        }  # fmt: skip
        samples[path.name] = raw
    return results, samples


def quantise_us(card: Card, cols: int, launches: int = 200) -> float:
    """Microseconds of the quantisation kernel among its like, in a graph."""
    x, records = card.activations(cols), card.records(cols)
    card.cp.cuda.Device().synchronize()
    graph = captured(card, [card.quantise(x, records) for _ in range(launches)])
    return round(statistics.median(timed(card, lambda: graph.launch(card.stream))) * 1e3 / launches, 3)


def resident(card: Card, path: Path, bundles, x) -> dict[str, float]:
    """GB/s of weights that the loop of ``path`` works off when they are in shared memory already; no load from memory in it."""
    warps = card.sms * card.shape.gemv_warps
    out, records = card.cp.zeros(warps, dtype=card.cp.float32), card.records(x.size)
    card.cp.cuda.Device().synchronize()
    card.quantise(x, records)(card.stream)
    launch = card.resident(path, bundles, records if path.prepared else x, out, RESIDENT_BUNDLES)
    ms = statistics.median(timed(card, lambda: launch(card.stream)))
    return {"gb_s": round(warps * RESIDENT_BUNDLES * BUNDLE_BYTES / ms / 1e6, 1), "ms": round(ms, 4)}


def pipes(card: Card) -> tuple[dict[str, float], float]:
    """({instruction: lanes of one SM that finish it a clock}, the SMs' clock in MHz while the first of them ran).

    A tensor-core instruction counts as 32 lanes, as any other does.
    """
    cp = card.cp
    found, clock = {}, 0.0
    for name, (_, steps) in PIPES.items():
        rounds = PIPE_ROUNDS[steps]
        sums, cycles = cp.zeros(card.sms * 1024, dtype=cp.uint32), cp.zeros(card.sms, dtype=cp.int64)
        cp.cuda.Device().synchronize()
        launch = card.launch(f"pipe_{name}", card.sms, 1024, [sums, cycles, rounds, 0x3C003C01, 0x00010203], overlap=False)
        ms = statistics.median(timed(card, lambda: launch(card.stream), 3))
        taken = float(cp.median(cycles))
        found[name] = round(1024 * steps * rounds / taken, 2)
        clock = clock or taken / ms / 1e3
    return found, round(clock, 0)


def measure(tell: Callable[[str], None]) -> tuple[dict, dict, dict, dict[str, str]]:
    """(results, samples, device, versions). Raises DeviceError without a Hopper card."""
    if problem := hopper_problem():
        raise DeviceError(f"this benchmark measures kernels on a Hopper card: {problem}")
    from nanoqwen.bench.card import device_facts
    from nanoqwen.engines.hopper import kernel_cache

    dims = Dims.qwen2_5_coder_7b()
    card = Card(dims, kernel_cache())
    every = shapes(dims)
    found = {name: errors(card, name) for name in every}
    tell(table("relative L2 error", found, lambda v: f"{v:.1e}"))
    ceiling = measure_ceiling("hopper", "cuda")
    device, versions = device_facts(None)
    results: dict = {"ceiling_gb_s": ceiling.gb_s, "shapes": {}}
    if ceiling.datasheet_gb_s:
        results["datasheet_gb_s"] = ceiling.datasheet_gb_s
    samples: dict = {"ceiling": ceiling.as_dict(), "us": {}}
    for name in every:
        shape, raw = times(card, name, ceiling.gb_s)
        for path, error in found[name].items():
            shape["paths"][path]["error"] = float(f"{error:.4g}")
        results["shapes"][name], samples["us"][name] = shape, raw
        card.cp.get_default_memory_pool().free_all_blocks()
    timing = {name: shape["paths"] for name, shape in results["shapes"].items()}
    tell(table("us", timing, lambda v: f"{v['us']:.2f}"))
    tell(table("us, kernels apart", timing, lambda v: f"{v['apart_us']:.2f}"))
    tell(table(f"share of {ceiling.gb_s:.0f} GB/s", timing, lambda v: f"{v['share']:.1%}"))
    results["quantise_us"] = {str(cols): quantise_us(card, cols) for cols in sorted({cols for _, cols in every.values()})}
    bundles, x = card.bundles(*card.weights("gate"))[0], card.activations(every["gate"][1])
    results["resident"] = {path.name: resident(card, path, bundles, x) for path in PATHS}
    results["pipes"], results["sm_mhz"] = pipes(card)
    tell("quantise us " + str(results["quantise_us"]))
    tell("resident GB/s " + ", ".join(f"{k} {v['gb_s']:.0f}" for k, v in results["resident"].items()))
    tell(f"lanes a clock at {results['sm_mhz']:.0f} MHz: " + ", ".join(f"{k} {v}" for k, v in results["pipes"].items()))
    return results, samples, device, versions


def table(title: str, rows: dict[str, dict], show: Callable) -> str:
    """Shapes down, paths across, for a terminal."""
    lines = [f"{title:<24}" + "".join(f"{path.name:>13}" for path in PATHS)]
    return "\n".join(lines + [f"{name:<24}" + "".join(f"{show(values[path.name]):>13}" for path in PATHS) for name, values in rows.items()])


def main(arguments: list[str] | None = None) -> int:
    """Measure or count, print, write the receipt. Returns the exit status: 2 when it was refused, in one line."""

    def counted() -> Callable[[], pathlib.Path]:
        results, samples = count_instructions(Dims.qwen2_5_coder_7b())
        for name, row in results.items():
            print(f"{name:<14}{row}  {samples[name]}")
        protocol = {"target": "sm_90a", "compiler": "NVRTC", "weights_a_bundle_and_lane": LANE_WEIGHTS, "shape": "gate", "nop": "not counted"}
        return lambda: write_receipt(COUNTS, f"{COMMAND} --instructions", results, samples, COUNT_SOURCES, protocol, versions=nvrtc_version())

    def measured() -> Callable[[], pathlib.Path]:
        results, samples, device, versions = measure(print)
        protocol = {
            "batch": 1, "runs": RUNS, "l2_times": L2_TIMES, "bytes_a_sample": GRAPH_BYTES, "weights": "synthetic:7b, layer 0, copies of one matrix",
            "activations": "FP16, standard normal", "in_graph": True, "dp4a": "a quantisation launch before every GEMV",
            "resident_bundles_a_warp": RESIDENT_BUNDLES, "resident_shape": "gate", "lock_clocks": False,
        }  # fmt: skip
        return lambda: write_receipt(NAME, COMMAND, results, samples, BENCH_SOURCES, protocol, device=device, versions=versions)

    return run_program(
        COMMAND, "Error, speed and instructions of the arithmetic paths of chapter 07.", arguments, lambda args: counted() if args.instructions else measured(),
        lambda parser: parser.add_argument("--instructions", action="store_true", help="count machine instructions instead (no card; needs nvdisasm)"),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
