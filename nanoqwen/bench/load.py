"""From a cold start to a model that is ready: ``python -m nanoqwen.bench.load``.

Writes a file with the 7B's shapes, then opens it with the graph engine in fresh processes, each of which reports its steps: importing
the libraries, the first call of CUDA, compiling the kernels, copying the weights to the card, and making the engine (buffers, pages,
both graphs). First with empty caches of compiled kernels, then with filled ones. The file itself stays in the system's page
cache all the time; reading it from a disk costs what the disk does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import HOPPER_SOURCES, cpu_device, source_files, write_receipt
from nanoqwen.errors import DeviceError
from nanoqwen.model import schema
from nanoqwen.packfile import open_pack
from nanoqwen.packwriter import PackWriter
from nanoqwen.synthetic_pack import PREFIX, fp16_rows, int4_rows, planned

NAME = "load"
COMMAND = "python -m nanoqwen.bench.load"
ROOMS = ("nanoqwen/bench/load.py", "nanoqwen/packfile.py", *HOPPER_SOURCES)
COLD_RUNS, WARM_RUNS = 2, 5
BLOCK_ROWS = 256
TIMEOUT_S = 120
#: Steps of one start, in order.
STEPS = ("import_s", "context_s", "compile_s", "upload_s", "engine_s", "first_token_s")


def write_file(path: Path, model: str) -> int:
    """Write ``synthetic:<model>``'s shapes to ``path`` and return the bytes of its tensors.

    The first rows of each tensor follow the recipe and are repeated: for its speed only the number of bytes matters, and all rows by
    numpy would take minutes.
    """
    pack = planned(PREFIX + model)
    dims, group = pack.dims, pack.group_size
    with PackWriter(path, dims, group, schema(dims), pack.meta, pack.tokenizer_bytes, {}) as out:
        for spec in schema(dims):
            block = min(BLOCK_ROWS, spec.rows)
            arrays = int4_rows(spec, dims, group, 0, block) if spec.int4 else (fp16_rows(spec, dims, 0, block),)
            for first in range(0, spec.rows, block):
                rows = min(block, spec.rows - first)
                (out.write_int4 if spec.int4 else out.write_fp16)(spec.name, *(a[:rows] for a in arrays))
    return tensor_bytes(pack)


def tensor_bytes(pack) -> int:
    """Bytes of all payloads: what is copied to the card."""
    return sum(nbytes for entry in pack.tensors.values() for _, nbytes, _ in entry.spans)


def start_once(path: Path) -> dict[str, float]:
    """Open ``path`` in this process, a fresh one: {step: seconds}."""
    clock = _Clock()
    import cupy

    from nanoqwen.cuda.compile import compile_all
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.weights import upload
    from nanoqwen.engines.hopper import HopperEngine, kernel_cache

    clock.lap("import_s")
    cupy.cuda.runtime.free(0)
    sms = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"]
    clock.lap("context_s")
    with open_pack(path) as pack:
        compile_all(constants_header(pack.dims, pack.group_size, LaunchShape(sms)), kernel_cache())
        clock.lap("compile_s")
        weights = upload(pack)
        cupy.cuda.runtime.deviceSynchronize()
        clock.lap("upload_s")
    with HopperEngine(weights, name="graph", cache=kernel_cache()) as engine:
        clock.lap("engine_s")
        engine.prefill([1])
        clock.lap("first_token_s")
    return clock.laps


class _Clock:
    def __init__(self) -> None:
        self.laps, self._last = {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def starts(path: Path, folder: Path, cold: int, warm: int, program: list[str] | None = None) -> Iterator[tuple[str, dict[str, float]]]:
    """("cold" or "warm", seconds of the steps) of ``cold`` starts with caches of their own and of ``warm`` ones that share the last.

    Raises DeviceError when a start fails or takes too long.
    """
    for k in range(cold + warm):
        caches = folder / f"caches{min(k, cold - 1)}"
        yield "cold" if k < cold else "warm", _in_child(path, caches, program or [sys.executable, "-m", "nanoqwen.bench.load", "--child"])


def _in_child(path: Path, caches: Path, program: list[str]) -> dict[str, float]:
    # Ours, CuPy's and the driver's: all three keep compiled kernels.
    places = {"NANOQWEN_CACHE": caches / "nanoqwen", "CUPY_CACHE_DIR": caches / "cupy", "CUDA_CACHE_PATH": caches / "driver"}
    try:
        done = subprocess.run(
            [*program, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", timeout=TIMEOUT_S,
            env={**os.environ, **{name: str(place) for name, place in places.items()}},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DeviceError(f"a start took longer than {TIMEOUT_S} s") from None
    if done.returncode:
        raise DeviceError(f"a start failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summarise(samples: dict[str, list[dict[str, float]]], nbytes: int) -> dict:
    """Medians of the steps, cold and warm, in seconds, and the copy's rate in GB (10**9 bytes) a second."""
    median = {kind: {step: round(statistics.median(run[step] for run in runs), 3) for step in STEPS} for kind, runs in samples.items()}
    ready = {kind: round(statistics.median(sum(run[step] for step in STEPS) for run in runs), 3) for kind, runs in samples.items()}
    upload = statistics.median(run["upload_s"] for run in samples["warm"])
    return {**median, "all_s": ready, "tensor_gb": round(nbytes / 1e9, 3), "upload_gb_s": round(nbytes / 1e9 / upload, 2)}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write the receipt of the 7B. Returns the exit status: 2 when it was refused, in one line."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--folder", type=Path, help="where to put the temporary file (6 GB free for the 7B; default: the system's)")
        parser.add_argument("--model", default="7b", help="which synthetic model's shapes; a receipt is written for %(default)s only")
        parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("file", nargs="?", type=Path, help=argparse.SUPPRESS)

    def measured(args: argparse.Namespace) -> Callable[[], Path] | int:
        if args.child:
            print(json.dumps(start_once(args.file)))
            return 0
        from nanoqwen.bench.prepare import need_hopper

        need_hopper("the weights go to the Hopper engines")
        samples: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="nanoqwen-load-") as folder:
            path = Path(folder) / "model.nanoqwen"
            nbytes = write_file(path, args.model)
            for kind, sample in starts(path, Path(folder), COLD_RUNS, WARM_RUNS):
                samples[kind].append(sample)
                print(kind, ", ".join(f"{step.removesuffix('_s')} {sample[step]:.2f} s" for step in STEPS), flush=True)
        results = summarise(samples, nbytes)
        print(json.dumps(results, indent=2))
        if args.model != "7b":
            return 0
        from nanoqwen.bench.card import device_facts

        device, versions = device_facts(None)
        protocol = {
            "file": f"the shapes of {PREFIX}{args.model}, written just before", "file_cache": "in the system's page cache", "host": cpu_device()["name"],
            "cold": f"{COLD_RUNS} fresh processes, each with empty caches of compiled kernels", "warm": f"{WARM_RUNS} fresh processes, caches filled",
            "steps": list(STEPS), "summary": "medians",
        }  # fmt: skip
        return lambda: write_receipt(NAME, COMMAND, results, samples, source_files(ROOMS), protocol, device=device, versions=versions)

    return run_program(COMMAND, "Load a file of the 7B's shapes with cold and with warm caches of compiled kernels.", arguments, measured, options)


if __name__ == "__main__":
    sys.exit(main())
