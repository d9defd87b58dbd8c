"""How fast ``pack`` is, and how much memory it takes: ``python -m nanoqwen.bench.pack``.

Two checkpoints are made in a temporary folder, with the layers of the 7B and a share of its vocabulary, so that INT4 and
FP16 tensors stand in the 7B's proportion: one of 2 layers (1.1 GB of BF16) and one of 4. Each is packed several times by
the same code as ``nanoqwen pack``, in a process of its own, which reports its seconds and its peak resident memory. The
second, twice as large, must not need more memory than the first.

The bound is a run that reads and writes the same bytes in the same blocks and converts nothing.
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
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanoqwen.bench.receipts import write_receipt
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.checkpoint.hf_config import ARCHITECTURE
from nanoqwen.config import Dims
from nanoqwen.model import schema
from nanoqwen.pack import default_threads, pack, row_ranges

NAME = "pack"
COMMAND = "python -m nanoqwen.bench.pack"
SOURCES = (
    "nanoqwen/bench/pack.py",
    "nanoqwen/checkpoint/__init__.py",
    "nanoqwen/checkpoint/safetensors_io.py",
    "nanoqwen/int4.py",
    "nanoqwen/pack.py",
    "nanoqwen/packwriter.py",
)
SIZES_IN_LAYERS = (2, 4)
WARMUP, RUNS = 1, 5
MB = 1e6  # megabytes are decimal here, as on a disk's label


def sample_dims(layers: int) -> Dims:
    """The 7B cut to ``layers`` layers and to the same share of its vocabulary (rounded to a multiple of 64)."""
    full = Dims.qwen2_5_coder_7b()
    return replace(full, num_layers=layers, vocab=full.vocab * layers // full.num_layers // 64 * 64)


def make_checkpoint(folder: Path, dims: Dims) -> None:
    """Write a checkpoint of random BF16 weights (normal, 0.02) for ``dims`` to ``folder``, a few megabytes at a time."""
    rng = np.random.default_rng(0)
    pool = (rng.normal(0, 0.02, 1 << 22).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    header, offset = {}, 0
    for spec in schema(dims):
        nbytes = 2 * spec.rows * spec.cols
        header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode("utf-8")
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in schema(dims):
            left = spec.rows * spec.cols
            while left:
                start = int(rng.integers(pool.size // 2))  # another stretch of the pool each time
                part = pool[start : start + min(left, pool.size // 2)]
                file.write(part)
                left -= part.size
    config = {
        "architectures": [ARCHITECTURE], "hidden_size": dims.hidden, "intermediate_size": dims.intermediate,
        "num_hidden_layers": dims.num_layers, "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads, "vocab_size": dims.vocab, "hidden_act": "silu",
        "max_position_embeddings": dims.max_position, "rope_theta": dims.rope_theta, "rms_norm_eps": dims.rms_eps,
        "tie_word_embeddings": dims.tied, "torch_dtype": "bfloat16",
    }  # fmt: skip
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    for name, value in (("config.json", config), ("tokenizer.json", tokenizer)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def pack_once(source: Path, out: Path) -> dict:
    """Pack in this process, a fresh one. {"seconds", "cpu_seconds", "source_bytes", "file_bytes", "peak_bytes"}."""
    before = time.process_time()
    report = pack(source, out)
    return {
        "seconds": report.seconds, "cpu_seconds": time.process_time() - before, "source_bytes": report.source_bytes,
        "file_bytes": report.bytes, "peak_bytes": peak_resident_bytes(),
    }  # fmt: skip


def copy_once(source: Path, out: Path) -> dict:
    """The bound: read every block that ``pack`` reads, write as many bytes as it writes, convert nothing."""
    started = time.perf_counter()
    with open_checkpoint(source) as checkpoint, open(out, "wb") as file:
        for spec, first, last in row_ranges(checkpoint.specs):
            rows = checkpoint.read_stored(spec.name, first, last)
            kept = rows.nbytes if not spec.int4 else rows.nbytes * (128 // 2 + 2) // (128 * 2)
            file.write(memoryview(rows).cast("B")[:kept])
        file.flush()
        os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - started, "source_bytes": checkpoint.stored_bytes}


def peak_resident_bytes() -> int:
    """Peak resident memory of this process.

    Linux: VmHWM, which starts anew with the program; ``ru_maxrss`` would inherit the peak of the process that started us.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(folder: Path, layers: int, runs: int = RUNS, warmup: int = WARMUP) -> dict:
    """Samples of both programs on one checkpoint in ``folder``: {"pack": [...], "copy": [...]}, and its largest tensor."""
    dims, out = sample_dims(layers), folder / "out.nanoqwen"
    make_checkpoint(folder, dims)
    samples: dict = {"layers": layers, "largest_tensor_bytes": max(2 * s.rows * s.cols for s in schema(dims)), "pack": [], "copy": []}
    for k in range(warmup + runs):
        for program in ("pack", "copy"):  # alternating, so that a slow spell of the machine meets both
            sample = _in_child(program, folder, out)
            out.unlink()
            if k >= warmup:
                samples[program].append(sample)
    return samples


def _in_child(program: str, source: Path, out: Path) -> dict:
    command = [sys.executable, "-m", "nanoqwen.bench.pack", "--child", program, str(source), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return json.loads(done.stdout)


def summarise(samples: list[dict]) -> dict:
    """What the book quotes, from the samples of all sizes; rates in MB (10**6 bytes) of BF16 input a second, medians."""
    rate = [[s["source_bytes"] / s["seconds"] / MB for s in size["pack"]] for size in samples]
    bound = [[s["source_bytes"] / s["seconds"] / MB for s in size["copy"]] for size in samples]
    last = samples[-1]
    full = sum(2 * s.rows * s.cols for s in schema(Dims.qwen2_5_coder_7b()))
    median = statistics.median(rate[-1])
    return {
        "input_mb_per_s": round(median, 1),
        "input_mb_per_s_min": round(min(rate[-1]), 1),
        "input_mb_per_s_max": round(max(rate[-1]), 1),
        "bound_mb_per_s": round(statistics.median(bound[-1]), 1),
        "share_of_bound": round(median / statistics.median(bound[-1]), 3),
        "input_mb_per_cpu_second": round(statistics.median(s["source_bytes"] / s["cpu_seconds"] / MB for s in last["pack"]), 1),
        "peak_resident_mb": [round(max(s["peak_bytes"] for s in size["pack"]) / MB, 1) for size in samples],
        "input_mb": [round(size["pack"][0]["source_bytes"] / MB, 1) for size in samples],
        "largest_tensor_mb": round(last["largest_tensor_bytes"] / MB, 1),
        "seconds_for_7b_at_this_rate": round(full / MB / median, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the receipt, print where it is and what it says."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Speed and peak memory of `nanoqwen pack` on 7B-shaped layers.")
    parser.add_argument("--folder", type=Path, help="where to put the temporary checkpoint (3 GB free; default: the system's)")
    parser.add_argument("--busy", action="store_true", help="measure although other programs run; the receipt records the load")
    parser.add_argument("--child", nargs=3, metavar=("PROGRAM", "SRC", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        program, source, out = options.child
        print(json.dumps({"pack": pack_once, "copy": copy_once}[program](Path(source), Path(out))))
        return
    load, threads = os.getloadavg()[0], default_threads()
    if load > threads / 4 and not options.busy:
        sys.exit(
            f"other programs keep this machine busy (load {load:.1f} on {threads} cores), so the receipt would be wrong; "
            "--busy measures anyway and records the load"
        )
    samples = []
    for layers in SIZES_IN_LAYERS:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="nanoqwen-bench-") as folder:
            samples.append(measure(Path(folder), layers))
    protocol = {
        "input": "random BF16 weights, layers of Qwen2.5-Coder-7B and the same share of its vocabulary",
        "layers": list(SIZES_IN_LAYERS), "threads": threads, "load_at_start": round(load, 2), "warmup": WARMUP, "runs": RUNS,
        "file_cache": "warm: the input was just written", "includes": "all checks, checksums, fsync and rename",
        "bound": "the same blocks read and as many bytes written, nothing converted, one thread",
    }  # fmt: skip
    results = summarise(samples)
    path = write_receipt(NAME, COMMAND, results, samples, SOURCES, protocol)
    print(f"{path}\n{json.dumps(results, indent=2)}")


if __name__ == "__main__":
    main()
