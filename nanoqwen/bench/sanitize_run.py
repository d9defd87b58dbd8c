"""The program that runs under the sanitizers: every kernel of the runtime on small models, each launch noted by name.

``python -m nanoqwen.bench.sanitize_run FILE [TOOL]`` writes what it launched to FILE. For racecheck readers of a place that is filled again have a fence of their own
(kernels/common/mbarrier.cuh), the persistent kernel is built with an arrival of each lane and one lane that asks (kernels/persistent/README.md, "racecheck"), and the graph engine, which
launches the eager one's kernels once more, is left out. It is started by ``nanoqwen.bench.sanitize``; alone it is a quick
check that the engines run and agree. PyTorch is not imported: under a sanitizer everything takes many times as long.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from nanoqwen.bench.ceiling import SHARED, THREADS, WALKS
from nanoqwen.config import Dims
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.engines import HOPPER
from nanoqwen.errors import DeviceError
from nanoqwen.model import schema
from nanoqwen.packfile import open_pack
from nanoqwen.packwriter import PackWriter
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams
from nanoqwen.synthetic import synthetic_dims
from nanoqwen.synthetic_pack import fp16_rows, int4_rows

SEVEN = Dims.qwen2_5_coder_7b()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the lengths it is tried at: ``prompts`` that are prefilled, each followed by ``steps`` single tokens."""

    dims: Dims
    group: int
    prompts: tuple[int, ...]
    steps: int


#: A page holds 16 tokens; the step after a prompt of 15 fills one, the step after that opens another. Prefill has kernels for a few
#: tokens, for some more and for many (nanoqwen/cuda/prefill_plan.py): each of them is met.
CASES = {
    "embedded": Case(dataclasses.replace(synthetic_dims("demo"), num_layers=2, vocab=1000, max_position=1088), 128, (1, 15, 16, 17, 40, 130, 1025), 3),
    "heads of 64, group 64, tied": Case(Dims(2, 448, 1024, 7, 1, 64, 1000, 1024, tied=True), 64, (15, 49, 400), 3),
    "one layer of the 7B": Case(dataclasses.replace(SEVEN, num_layers=1, vocab=4096, max_position=1024), 128, (15,), 3),
}
#: Tokens of the prompt that follows these steps, at a position that is not zero.
MORE = 5
#: The persistent kernel for the tools: patient, since everything takes many times as long under them, and without loads whose values nobody uses.
#: (Where a warp has no further unit, the shipped kernel loads what lies in some place of the ring, which a copy may be filling: racecheck tells.)
UNDER_TOOLS = {"kPatienceSeconds": 1000, "kIdleLoads": False}
#: And for racecheck: one lane of the producer waits and asks, not eight, each at a barrier of its own.
UNDER_RACECHECK = {**UNDER_TOOLS, "kAsk": 1}
#: The largest difference of its logits from the graph engine's, in parts of the largest logit.
CLOSE = 0.01
#: How ids are chosen on the card.
CHOICES = (GREEDY, SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1))
#: Bytes that the ceiling kernel reads: several turns of the ring for some warps, fewer for others, and a broken chunk of 4 KiB.
CEILING_BYTES = 1000 * 4096 + 1024 + 16


def varied(count: int, vocab: int) -> list[int]:
    """``count`` ids that differ: with one repeated token all values are equal."""
    return [pow(7, i, 9973) % vocab for i in range(count)]


@contextmanager
def noted() -> Iterator[set[str]]:
    """The names of the kernels launched inside, whichever part of the program launches them."""
    from nanoqwen.cuda.launch import Launch

    names, call = set(), Launch.__call__

    def noting(self: Launch, stream: object) -> None:
        names.add(self.name)
        call(self, stream)

    Launch.__call__ = noting
    try:
        yield names
    finally:
        Launch.__call__ = call


def write_pack(path: Path, dims: Dims, group: int) -> None:
    """A synthetic model as a file, by the numpy twin of the recipe; for dimensions that no synthetic model of a name has."""
    with PackWriter(path, dims, group, schema(dims), {"tokenizer_entries": dims.vocab}, b"{}", {}) as out:
        for spec in schema(dims):
            if spec.int4:
                out.write_int4(spec.name, *int4_rows(spec, dims, group, 0, spec.rows))
            else:
                out.write_fp16(spec.name, fp16_rows(spec, dims, 0, spec.rows))


def run_model(case: Case, weights: object, shape: LaunchShape, names: Sequence[str], settings: dict[str, int | bool]) -> None:
    """The Hopper engines ``names`` on ``weights``, "persistent" with ``settings``: prompts and single steps, a shorter sequence after a longer one, and ids chosen on the card, greedy and
    drawn. Raises DeviceError when they disagree: "graph" with "eager" in any bit, "persistent" by more than ``CLOSE``."""
    from nanoqwen.engines.hopper import HopperEngine, kernel_cache
    from nanoqwen.engines.persistent import PersistentEngine

    vocab, found = case.dims.vocab, {}
    for name in names:
        made = partial(PersistentEngine, settings=settings) if name == "persistent" else partial(HopperEngine, name=name)
        with made(weights, cache=kernel_cache(), shape=shape) as engine:
            logits, chosen = [], []
            for length in case.prompts[::-1]:
                ids = varied(length + case.steps, vocab)
                engine.reset()
                logits.append(engine.prefill(ids[:length]))
                logits += [engine.decode(token) for token in ids[length:]]
                logits.append(engine.prefill(ids[:1] * MORE))
            engine.reset()
            logits += [engine.decode(token) for token in varied(2, vocab)]  # from nothing: the first token opens a page
            for params in CHOICES:
                chooser = Sampler(params, vocab)
                engine.reset()
                chosen.append(engine.prefill_next(varied(14, vocab), chooser))
                chosen += engine.stream(chosen[-1], case.steps, chooser)
                chosen.append(engine.decode_next(chosen[-1], chooser))
            found[name] = np.stack(logits), chosen
    eager, ids = found["eager"]
    for name, (logits, chosen) in found.items():
        same = np.abs(logits - eager).max() <= CLOSE * np.abs(eager).max() if name == "persistent" else np.array_equal(logits, eager) and chosen == ids
        if not same:
            raise DeviceError(f"the engines eager and {name} do not agree")


def run_ceiling(kernels: object) -> None:
    """The ceiling kernel on a small buffer. Raises DeviceError when its sum is wrong."""
    import cupy

    from nanoqwen.cuda.launch import Launch

    grid = 8
    kernels.allow_shared("ceiling", SHARED)
    words = cupy.arange(CEILING_BYTES // 4, dtype=np.uint32)
    wanted = int(words.get().sum(dtype=np.uint64)) & 0xFFFFFFFF
    for together in range(len(WALKS)):
        sums = cupy.zeros(grid * THREADS, dtype=np.uint32)
        args = [words, ctypes.c_longlong(CEILING_BYTES // 16), ctypes.c_int(together), sums]
        Launch(kernels, "ceiling", (grid,), THREADS, args, shared=SHARED, overlap=False)(cupy.cuda.get_current_stream())
        if int(sums.get().sum(dtype=np.uint64)) & 0xFFFFFFFF != wanted:
            raise DeviceError("the ceiling kernel did not read every word")


def run_all(tool: str = "") -> dict:
    """Everything, once, for ``tool``: {"kernels": every kernel that the sources hold, "launched": those that ran, "cases": what ran}."""
    import cupy

    from nanoqwen.cuda.constants import constants_header
    from nanoqwen.cuda.launch import Kernels
    from nanoqwen.cuda.persistent_plan import compile_persistent
    from nanoqwen.cuda.weights import synthesise, upload
    from nanoqwen.engines.hopper import kernel_cache

    cupy.cuda.set_allocator(None)  # an allocation an array: in a pool, one array's overrun lands in the next and nobody sees it
    sms, race = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"], tool == "racecheck"
    shape, engines = LaunchShape(sms, readers_fence=race), [name for name in HOPPER if not (race and name == "graph")]
    settings = UNDER_RACECHECK if race else UNDER_TOOLS
    names: set[str] = set()
    with noted() as launched:
        for number, case in enumerate(CASES.values()):
            kernels = Kernels(constants_header(case.dims, case.group, shape), kernel_cache())
            names |= {*kernels.use, *compile_persistent(case.dims, case.group, shape, kernel_cache(), settings).kernels}
            if number == 0:  # one model comes from a file, so that what copies and re-tiles runs too
                with tempfile.TemporaryDirectory() as folder:
                    write_pack(Path(folder) / "model.nanoqwen", case.dims, case.group)
                    with open_pack(Path(folder) / "model.nanoqwen") as pack:
                        run_model(case, upload(pack), shape, engines, settings)
                run_ceiling(kernels)
            weights = synthesise(case.dims, case.group, kernels)
            cupy.cuda.runtime.deviceSynchronize()
            if number:
                run_model(case, weights, shape, engines, settings)
            cupy.cuda.runtime.deviceSynchronize()
    return {"kernels": sorted(names), "launched": sorted(launched), "cases": list(CASES)}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run_all(*sys.argv[2:3])), encoding="utf-8")
