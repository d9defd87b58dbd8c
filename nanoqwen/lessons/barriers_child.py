"""The process that runs the barrier lessons: ``python -m nanoqwen.lessons.barriers_child REQUEST``, both sides JSON.

Its first line is ``ready``; then one line a trial. It leaves after the first trial that costs it the CUDA context.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import cupy
import numpy as np

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.engines.hopper import kernel_cache
from nanoqwen.lessons.barriers import PAGES, SOURCE, UNJOINED, constants

CONSUMERS, WARPS = 4, 5
HEAD, PAGE = Dims.qwen2_5_coder_7b().head_dim, load_settings().kv.page_tokens
CYCLES_A_SECOND = 2e9  # about: it only scales the watchdog's patience
TOLERANCE = 1e-4  # FP32 sums of up to 80 terms of size 1 differ from FP64 by some 1e-7
FLUSH_BYTES = 256 << 20  # several times the L2 of a Hopper card

#: As the kernel numbers them.
PLACES = (
    "has started", "asks for a page", "waits for bytes", "uses a page", "at the __syncthreads in its branch", "at a __syncthreads of all",
    "at the named barrier", "waits for the signal", "has left",
)  # fmt: skip


class Record(ctypes.Structure):
    """The kernel's ``Record``, in pinned memory."""

    _fields_ = [
        ("hung", ctypes.c_int),
        ("places", ctypes.c_int * WARPS),
        ("stale", ctypes.c_int * PAGES * CONSUMERS),
        ("parts", ctypes.c_float * (HEAD + 2) * CONSUMERS),
        ("out", ctypes.c_float * HEAD),
    ]


class Case(ctypes.Structure):
    """The kernel's ``Case``."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("q", "keys", "values", "block_table", "finished", "record")),
        ("patience", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("length", "supply_delay", "use_delay")),
    ]


class Lesson:
    """A query, a cache of PAGES pages in shuffled order, the kernels, and the answers in FP64."""

    def __init__(self, patience: float) -> None:
        rng = np.random.default_rng(5)
        self.q = rng.normal(size=HEAD).astype(np.float32)
        self.k, self.v = rng.normal(size=(2, PAGES * PAGE, HEAD)).astype(np.float16)
        table = rng.permutation(2 * PAGES)[:PAGES].astype(np.int32)
        pools = np.full((2, 2 * PAGES, PAGE, HEAD), np.nan, np.float16)  # pages that nobody owns
        for index, number in enumerate(table):
            rows = slice(index * PAGE, (index + 1) * PAGE)
            pools[0, number], pools[1, number] = self.k[rows], self.v[rows]
        self.kernels = Kernels(constants(), kernel_cache(), [SOURCE])
        self.arrays = [cupy.asarray(a) for a in (self.q, pools[0], pools[1], table)]
        self.finished = cupy.zeros(1, np.uint32)
        self.scratch = cupy.zeros(FLUSH_BYTES, np.uint8)
        self.memory = cupy.cuda.alloc_pinned_memory(ctypes.sizeof(Record))
        self.record = Record.from_address(self.memory.ptr)
        self.patience = int(patience * CYCLES_A_SECOND)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()

    def run(self, trial: dict) -> tuple[dict, bool]:
        """(outcome, whether the context is still alive)."""
        right = self.answer(trial["length"])
        worst: dict = {"wrong_runs": 0, "stale": [0] * PAGES, "stale_total": 0, "wrong_dims": 0, "error": 0.0}
        for _ in range(trial["repeats"]):
            try:
                out, stale = self.once(trial)
            except Exception as error:
                if self.record.hung:
                    names = ["producer", *(f"consumer {i}" for i in range(CONSUMERS))]
                    places = {name: PLACES[place] for name, place in zip(names, self.record.places)}
                    return {**worst, "verdict": "hangs", "places": places, "note": "ended by the watchdog"}, False
                return {"verdict": "fails", "note": str(error).splitlines()[0]}, False
            difference = np.abs(out - right)
            wrong = ~(difference < TOLERANCE)
            worst["wrong_runs"] += bool(wrong.any())
            worst["stale"] = max(worst["stale"], stale, key=sum)
            worst["stale_total"] += sum(stale)
            worst["wrong_dims"] = max(worst["wrong_dims"], int(wrong.sum()))
            worst["error"] = max(worst["error"], float(difference[np.isfinite(difference)].max(initial=0)))
        return {**worst, "verdict": "wrong" if worst["wrong_runs"] else "right"}, True

    def once(self, trial: dict) -> tuple[np.ndarray, list[int]]:
        """(result in FP64, stale tokens a page) of one launch. Raises when it did not survive."""
        record = self.record
        ctypes.memset(self.memory.ptr, 0xFF, ctypes.sizeof(Record))  # NaN and -1: what is not written cannot look right
        record.hung = 0
        record.places = (ctypes.c_int * WARPS)(*([0] * WARPS))
        pointers = [a.data.ptr for a in (*self.arrays, self.finished)]
        case = Case(*pointers, self.memory.ptr, self.patience, trial["length"], trial["supply_delay"], trial["use_delay"])
        with self.stream:
            self.finished.fill(0)
            if trial["cold"]:
                self.scratch += 1
            else:
                sum(a.view(np.uint8).max() for a in self.arrays)  # into L2
        Launch(self.kernels, f"lesson_{trial['kernel']}", (2,), 32 * WARPS, [case], overlap=False)(self.stream)
        self.stream.synchronize()
        stale = np.array(record.stale)
        out = self.join(np.array(record.parts, np.float64)) if trial["kernel"] in UNJOINED else np.array(record.out, np.float64)
        return out, [int(n) for n in np.maximum(stale, 0).sum(axis=0)]

    def join(self, parts: np.ndarray) -> np.ndarray:
        """The consumers' shares (sum, maximum in log2, denominator) as one result."""
        weights = np.exp2(parts[:, HEAD] - parts[:, HEAD].max())
        return weights @ parts[:, :HEAD] / (weights @ parts[:, HEAD + 1])

    def answer(self, length: int) -> np.ndarray:
        k, v = np.float64(self.k[:length]), np.float64(self.v[:length])
        scores = k @ np.float64(self.q) / np.sqrt(HEAD)
        p = np.exp(scores - scores.max())
        return p @ v / p.sum()


def main(request: str) -> None:
    asked = json.loads(request)
    lesson = Lesson(asked["patience"])
    print("ready", flush=True)
    for trial in asked["trials"]:
        outcome, alive = lesson.run(trial)
        print(json.dumps(outcome), flush=True)
        if not alive:
            os._exit(0)  # a dead context cannot be taken down in order


if __name__ == "__main__":
    main(sys.argv[1])
