"""The persistent kernel taken apart: ``python -m nanoqwen.bench.persistent_parts``, on a Hopper card. Chapter 10 reads the receipt.

The kernel is built many times: as it is, as each design that lost, and with parts taken out, which shows what the rest would take alone. Each
build decodes the same tokens behind the same prompt, on one set of weights; beside them the graph engine. One more build stamps
its clocks, for the timeline of a layer. Milliseconds are between CUDA events around a run of tokens, divided by them.

A build that spills registers is measured too, and the receipt says so: the engine refuses such builds, because some gave sums that differed
from run to run. So each build's ids are compared with the graph engine's, and with each other. Four builds that differ in what keeps a copy behind the
loads of what it overwrites are run more often, and compared to the last bit.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import measure_ceiling
from nanoqwen.bench.prepare import need_hopper, opened
from nanoqwen.bench.program import run_program
from nanoqwen.bench.protocol import mbu, prompt_ids, sources, spread
from nanoqwen.bench.receipts import write_receipt
from nanoqwen.config import Dims, data_path
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.cuda.persistent_plan import CHUNK, SPLIT_PAGES, SPLITS, compile_persistent
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError
from nanoqwen.synthetic_pack import planned

NAME = "persistent_parts"
COMMAND = "python -m nanoqwen.bench.persistent_parts"
MODEL = "synthetic:7b"
#: Tokens of a sample, in one launch where nothing else is said.
TOKENS = 32
RUNS = 5
#: Where the kernel as it is and the graph engine are timed; everything else at the first.
DEPTHS = (512, 4096, 32000)


@dataclass(frozen=True)
class Variant:
    """One build: in words, what it has otherwise than the shipped kernel, and in settings."""

    what: str
    settings: dict[str, int | bool] = field(default_factory=dict)
    split_pages: int = SPLIT_PAGES


SHIPPED = Variant("as it is")
#: Designs that give the same results.
DESIGNS = {
    "counters": Variant("values behind counters, with release and acquire", {"kValidate": False}),
    "hint": Variant("a counter says when to look at the values", {"kHint": True}),
    "held_2": Variant("two units wait in registers, not one", {"kHold": 2}),
    "gate_held_2": Variant("two units of gate and up wait in registers, not one", {"kHoldGate": 2}),
    "loaded": Variant("a unit is given back when its loads have brought their values", {"kRelease": 1}),
    "behind": Variant("a unit is given back one unit later", {"kRelease": 2}),
    "late": Variant("all of gate before all of up, the inner vector after both", {"kEarly": 0}),
    "tiles_alone": Variant("each row tile goes to the publisher by itself", {"kTogether": 1}),
    "records": Variant("a warp's x in shared memory", {"kOwnSlices": False}),
    "ring_32": Variant("a ring of 32 units", {"kMostUnits": 32}),
    "ring_24": Variant("a ring of 24 units", {"kMostUnits": 24}),
    "ask_1": Variant("one lane asks for units", {"kAsk": 1}),
    "ask_4": Variant("four lanes ask for units", {"kAsk": 4}),
    "flight_less": Variant("two thirds of the units in flight", {"kAheadEarly": 8, "kAheadPages": 9, "kAheadMiddle": 8, "kAheadLate": 12}),
    "flight_more": Variant("half as many units more in flight", {"kAheadEarly": 18, "kAheadPages": 21, "kAheadMiddle": 18, "kAheadLate": 27}),
    "splits_1": Variant("attention split to single pages", split_pages=1),
    "splits_4": Variant("four pages a split of attention", split_pages=4),
    "splits_8": Variant("eight pages a split of attention", split_pages=8),
}
#: Parts taken out: the results are wrong, the rest does what it did.
WITHOUT = {
    "no_exchange": Variant("nobody waits for values", {"kNoExchange": True}),
    "no_attention": Variant("no attention", {"kNoAttention": True}),
    "neither": Variant("neither", {"kNoExchange": True, "kNoAttention": True}),
    "no_weights": Variant("no weights and no pages: the chain of stages alone", {"kNoWeights": True}),
}
VARIANTS = {"shipped": SHIPPED, **DESIGNS, **WITHOUT}
#: What keeps a copy behind the loads of what it overwrites (kernels/persistent/README.md, "A unit is given back").
REFILL = {
    "fence": Variant("the producer's proxy fence", {}),
    "loads": Variant("arrivals that wait for their loads", {"kRelease": 1, "kFence": False}),
    "both": Variant("both", {"kRelease": 1}),
    "neither": Variant("neither", {"kFence": False}),
}
#: Runs of each of these at a depth, behind a pause of so many seconds: copies then land late, and first stores and loads miss the caches of addresses. Two depths, because whether
#: a race shows depends on who waits for whom.
REFILL_RUNS, PAUSE_S = 60, 0.01
STAMPED = {"kStamps": True}

#: A layer as a consumer warp goes through it: stage, and the stamps (``enum Event`` in exchange.cuh) between which it lies. Each begins where the
#: one before it ends.
STAGES = {
    "x": ("kLayerBegins", "kHaveX"),
    "qkv": ("kHaveX", "kQkvDone"),
    "attention": ("kQkvDone", "kHaveVector"),
    "o": ("kHaveVector", "kODone"),
    "x_again": ("kODone", "kHaveO"),
    "gate_up": ("kHaveO", "kGateUpDone"),
    "inner": ("kGateUpDone", "kInnerDigits"),
    "down": ("kInnerDigits", "kDownDone"),
}
#: Attention again, on the CTAs that have a split of it.
SPLIT_STAGES = {"query": ("kQkvDone", "kHaveQuery"), "pages": ("kHaveQuery", "kSplitDone"), "join": ("kSplitDone", "kVectorDone"), "vector": ("kVectorDone", "kHaveVector")}
#: What the publisher has sent, and when.
SENT = {"qkv": "kQkvOut", "o": "kOOut", "inner": "kInnerOut", "down": "kDownOut"}
#: Microseconds of each stage as they were written down before the kernel first ran on a card.
PLAN_US = {"x": 1.5, "qkv": 0.6, "attention": 4.9, "o": 0.3, "x_again": 1.6, "gate_up": 9.0, "inner": 2.0, "down": 5.7}


def event_names() -> list[str]:
    """The stamps of a layer, in order. Read from the kernel's source, which has no other list."""
    text = data_path("kernels", "persistent", "exchange.cuh").read_text(encoding="utf-8")
    body = re.sub(r"//.*", "", re.search(r"enum Event \{(.*?)\}", text, re.DOTALL).group(1))
    return re.findall(r"\w+", body)[:-1]  # the last is their number


def timeline(stamps: np.ndarray, ctas: int, layers: int, splits: int) -> dict:
    """Microseconds of a layer, from the beginning of the layer on the same SM: medians over CTAs and over all layers but the first two and the last.

    ``stamps`` is uint32: cycles [ctas][layers][event], then four uint64 a CTA: nanoseconds and cycles when it began and when it ended. ``splits``:
    so many of the first CTAs have a split of attention.
    """
    names = event_names()
    at = {name: column for name, column in zip(names, np.moveaxis(stamps[: ctas * layers * len(names)].reshape(ctas, layers, len(names)), 2, 0))}
    ns_begin, begin, ns_end, end = stamps[ctas * layers * len(names) :].view(np.uint64).reshape(ctas, 4).T
    ghz = float(np.median((end - begin) / (ns_end - ns_begin)))
    inside = slice(2, layers - 1)

    def us(cycles: np.ndarray) -> np.ndarray:
        return cycles.astype(np.float64) / (ghz * 1e3)

    def since(first: str, last: str, who: slice = slice(None)) -> np.ndarray:
        return us(at[last][who, inside] - at[first][who, inside])  # unsigned: a clock that came round counts on

    def stages(of: dict[str, tuple[str, str]], who: slice) -> dict:
        found = {}
        for name, (first, last) in of.items():
            taken = since(first, last, who)
            found[name] = {
                "begin": round(float(np.median(since("kLayerBegins", first, who))), 3), "end": round(float(np.median(since("kLayerBegins", last, who))), 3),
                "us": [round(float(np.percentile(taken, p)), 3) for p in (10, 50, 90)],
            }  # fmt: skip
        return found

    return {
        "ghz": round(ghz, 3),
        "layer_us": round(float(us(np.diff(at["kLayerBegins"][:, 2:], axis=1)).mean()), 3),
        "stages": stages(STAGES, slice(None)),
        "attention": stages(SPLIT_STAGES, slice(splits)),
        "sent": {name: round(float(np.median(since("kLayerBegins", event))), 3) for name, event in SENT.items()},
        "producer": {"no_room": round(float(us(at["kRingFull"][:, inside]).mean()), 3), "enough_in_flight": round(float(us(at["kInFlight"][:, inside]).mean()), 3)},
        "plan_us": PLAN_US,
    }


def build(dims: Dims, group: int, sms: int) -> None:
    """Compile all builds side by side into the cache."""
    from nanoqwen.engines.hopper import kernel_cache

    builds = [*(variant.settings for variant in (*VARIANTS.values(), *REFILL.values())), STAMPED]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:  # NVRTC compiles outside Python's lock
        list(threads.map(lambda settings: compile_persistent(dims, group, LaunchShape(sms), kernel_cache(), settings, allow_spill=True), builds))


def make_kernel(engine: Engine, settings: dict[str, int | bool]):
    """A build on the weights of ``engine``."""
    from nanoqwen.cuda.persistent import PersistentKernel
    from nanoqwen.engines.hopper import kernel_cache

    return PersistentKernel(engine._weights, engine._shape, kernel_cache(), settings, allow_spill=True)


def timed(engine: Engine, kernel, token: int, wanted: Sequence[int], each: int = TOKENS, split_pages: int = SPLIT_PAGES) -> tuple[dict, list[float]]:
    """({ms, registers, spill_bytes, same_ids, chains}, samples) of a build from the engine's position on. ``same_ids``: how many of the first ids
    are ``wanted``, at least, in any run; ``chains``: how many different runs there were."""
    samples, chains = card.kernel_ms(engine, kernel, token, TOKENS, each, RUNS, split_pages=split_pages)
    same = min(next((k for k, (ours, theirs) in enumerate(zip(chain, wanted)) if ours != theirs), len(wanted)) for chain in chains)
    found = {
        "ms": spread(samples)["median"], "registers": kernel.use.registers, "spill_bytes": kernel.use.spill_bytes + kernel.use.stack_bytes,
        "units": kernel.size["units"], "same_ids": same, "chains": len(set(map(tuple, chains))),
    }  # fmt: skip
    return found, [round(ms, 4) for ms in samples]


def differing(engine: Engine, kernel, token: int) -> int:
    """Of ``REFILL_RUNS`` runs of ``TOKENS`` tokens from the engine's position on, those that leave others than the most frequent keys, values and logits behind."""
    at, page = engine.position, engine._kv.page_tokens
    engine._hold(at + TOKENS)
    graph = engine._capture([kernel.launch(engine._buffers, engine._pages.pool, CHUNK)] * (TOKENS // CHUNK))
    pages = engine._pages.table.pages[at // page : -(-(at + TOKENS) // page)]
    left: Counter[bytes] = Counter()
    for _ in range(REFILL_RUNS):
        time.sleep(PAUSE_S)
        engine._place(token, at)
        graph.launch(engine._stream)
        engine._stream.synchronize()
        left[sha256(engine._pages.pool[:, :, pages].tobytes() + engine._buffers.logits.tobytes()).digest()] += 1
    engine.drop_ahead()
    return REFILL_RUNS - max(left.values())


def measure_engine(engine: Engine, gb_s: float, tell: Callable[[str], None], depths: Sequence[int]) -> tuple[dict, dict]:
    """(results, samples) of all builds on the weights of the graph engine ``engine``."""
    ids = prompt_ids(engine.dims.vocab, max(depths))
    results: dict = {"variants": {}, "refill": {}, "launches": {}, "depths": {}}
    samples: dict = {"variants": {}, "launches": {}, "depths": {}}
    shipped = make_kernel(engine, SHIPPED.settings)
    engine.reset()
    for depth in depths:
        engine.prefill(ids[engine.position : depth])
        token = ids[depth - 1]
        graph = card.chained_ms(engine, token, TOKENS, RUNS)
        wanted = engine._buffers.told[depth : depth + TOKENS].tolist()
        found, ours = timed(engine, shipped, token, wanted)
        nbytes = engine.bytes_per_token(depth + TOKENS // 2)
        persistent, beside = found["ms"], spread(graph)["median"]
        results["depths"][str(depth)] = {
            "persistent": persistent, "graph": beside, "bytes_per_token": nbytes, "limit": round(nbytes / gb_s / 1e6, 4), "mbu": mbu(nbytes, persistent, gb_s),
            "same_ids": found["same_ids"],
        }  # fmt: skip
        samples["depths"][str(depth)] = {"persistent": ours, "graph": [round(ms, 4) for ms in graph]}
        tell(f"at {depth}: {results['depths'][str(depth)]}")
        if depth == depths[0]:
            for name, variant in VARIANTS.items():
                kernel = shipped if variant is SHIPPED else make_kernel(engine, variant.settings)
                found, samples["variants"][name] = timed(engine, kernel, token, wanted, split_pages=variant.split_pages)
                results["variants"][name] = {"settings": variant.settings, "split_pages": variant.split_pages, **found}
                tell(f"{name:<14}{found['ms']:.4f} ms, registers {found['registers']}, spilled {found['spill_bytes']}, ids {found['same_ids']} of {TOKENS} in {found['chains']} chains")
            for each in (1, CHUNK):
                found, samples["launches"][str(each)] = timed(engine, shipped, token, wanted, each)
                results["launches"][str(each)] = found["ms"]
            results["launches"][str(TOKENS)] = results["variants"]["shipped"]["ms"]
            results["timeline"] = stamped(engine, token, wanted)
            tell(f"ms by tokens a launch {results['launches']}; timeline {results['timeline']}")
        for name, variant in REFILL.items() if depth in depths[:2] else ():
            kernel = shipped if variant.settings == SHIPPED.settings else make_kernel(engine, variant.settings)
            found, _ = timed(engine, kernel, token, wanted)
            of = results["refill"].setdefault(name, {"settings": variant.settings, "runs": REFILL_RUNS, "ms": {}, "differ": {}})
            of["ms"][str(depth)], of["differ"][str(depth)] = found["ms"], differing(engine, kernel, token)
            tell(f"a copy is kept behind loads by {variant.what}: {of}")
    return results, samples


def stamped(engine: Engine, token: int, wanted: Sequence[int]) -> dict:
    """The timeline of a build that stamps its clocks, and what the stamps cost it."""
    kernel = make_kernel(engine, STAMPED)
    found, _ = timed(engine, kernel, token, wanted)
    pages = -(-(engine.position + TOKENS) // engine._kv.page_tokens)
    splits = min(-(-pages // SPLIT_PAGES), SPLITS, kernel.size["splits"]) * engine.dims.num_kv_heads
    if len(event_names()) != kernel.size["events"]:
        raise DeviceError(f"the kernel has {kernel.size['events']} stamps, its source {len(event_names())}")
    return {"splits": splits, **found, **timeline(kernel.stamps.get(), kernel.size["ctas"], engine.dims.num_layers, splits)}


def measure(tell: Callable[[str], None]) -> tuple[dict, dict, dict, dict[str, str]]:
    """(results, samples, device, versions). Raises DeviceError without a Hopper card, and when a build stands still."""
    need_hopper("this benchmark launches kernels")
    pack = planned(MODEL)
    device, versions = card.device_facts(None)
    build(pack.dims, pack.group_size, device["sm_count"])
    ceiling = measure_ceiling("hopper", "cuda")
    with opened(pack, "graph", None) as (engine, _):
        results, samples = measure_engine(engine, ceiling.gb_s, tell, DEPTHS)
    return {"model": MODEL, "tokens": TOKENS, "ceiling_gb_s": ceiling.gb_s, **results}, {"ceiling": ceiling.as_dict(), **samples}, device, versions


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write the receipt. Returns the exit status: 2 when it was refused, in one line."""

    def measured(args: argparse.Namespace) -> Callable[[], Path]:
        results, samples, device, versions = measure(print)
        protocol = {
            "batch": 1, "model": MODEL, "prompt": "varied ids, a seeded hash of the position", "depths": list(DEPTHS), "tokens_a_sample": TOKENS, "runs": RUNS,
            "variants": f"at {DEPTHS[0]}, one launch for all tokens of a sample", "time": "CUDA events", "greedy": True, "lock_clocks": False,
        }  # fmt: skip
        rests_on = {*sources(NAME, ("graph", "persistent")), "nanoqwen/bench/persistent_parts.py"}
        return lambda: write_receipt(NAME, COMMAND, results, samples, rests_on, protocol, device=device, versions=versions)

    return run_program(COMMAND, "The persistent kernel's parts, bounds and lost designs, for chapter 10.", arguments, measured)


if __name__ == "__main__":
    raise SystemExit(main())
