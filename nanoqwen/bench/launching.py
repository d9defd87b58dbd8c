"""How a step reaches the card, measured: ``python -m nanoqwen.bench.launching``, on a Hopper card. Chapter 06 reads the receipt.

The same kernels, the same token after token, launched in every way between the clumsiest and the one that ``generate`` uses: with a wait
after each launch, one by one, as a graph; with scalars that the host writes or that the step before leaves; with and without the programmatic
attribute. All are wall-clock milliseconds a token, from an idle card until it is idle again. Beside them stand the eleven regions of an eager
step, what the host pays, and two experiments without a model: launches of nothing, and time stamps of kernels that overlap.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import measure_ceiling
from nanoqwen.bench.e2e import CHAIN, greedy
from nanoqwen.bench.prepare import need_hopper, opened
from nanoqwen.bench.program import run_program
from nanoqwen.bench.protocol import Protocol, prompt_ids, sources, spread
from nanoqwen.bench.receipts import write_receipt
from nanoqwen.config import load_settings
from nanoqwen.engines.base import Engine
from nanoqwen.synthetic_pack import planned

NAME = "launching"
COMMAND = "python -m nanoqwen.bench.launching"
MODEL = "synthetic:7b"
#: Steps of one sample of the slow variants; the others take ``CHAIN``.
FEW = 8
#: Steps that are enqueued to time the host alone: their launches must fit into the driver's queue.
HOST_STEPS = 2
REGION_STEPS = 50
#: CTAs of the stamped kernels that the receipt keeps, evenly spread.
KEPT_CTAS = 12
#: What is measured, by engine, clumsiest first.
VARIANTS = {
    "eager": {
        "allocates": "memory from the driver and a wait around each launch",
        "waits": "a wait after each launch",
        "made_anew": "launches made again for each token",
        "patched_awaited": "scalars by the host, which waits for each token",
        "chained_serial": "scalars on the card, no programmatic launch",
        "chained": "scalars on the card",
    },
    "graph": {
        "patched_awaited": "scalars by the host, which waits for each token",
        "patched": "scalars by the host, which knows each token",
        "chained_serial": "scalars on the card, no programmatic launch",
        "chained": "scalars on the card",
        "page": "scalars on the card, one graph for all tokens of a page",
    },
}
_SOURCES = ("nanoqwen/bench/launching.py", "nanoqwen/bench/e2e.py", "nanoqwen/lessons/launching.py", "kernels/lessons/launching.cu")


def start_of(protocol: Protocol, page_tokens: int) -> int:
    """Where the timed steps begin: around the middle of the protocol's run, at the first token of a page."""
    start = protocol.middle - CHAIN // 2
    return max(page_tokens, start - start % page_tokens)


def variants(engine: Engine, protocol: Protocol, page_tokens: int) -> dict[str, list[float]]:
    """{variant: milliseconds a token of each run} of ``VARIANTS[engine.name]``."""
    start, runs = start_of(protocol, page_tokens), protocol.runs
    engine.reset()
    engine.prefill(prompt_ids(engine.dims.vocab, start, protocol.seed))
    token, chooser = prompt_ids(engine.dims.vocab, 1, protocol.seed)[0], greedy(engine)

    def timed(work: Callable[[int], object], steps: int = CHAIN) -> list[float]:
        return card.wall_ms(engine, lambda: work(steps), steps, runs)

    def chained(steps: int) -> None:
        engine.run_ahead(token, steps)

    def awaited(steps: int) -> None:
        following = token
        for _ in range(steps):
            following = engine.decode_next(following, chooser)
        engine.rewind(start)

    found = {"patched_awaited": timed(awaited), "chained": timed(chained)}
    with card.changed_launches(engine, lambda launch: launch.serial()):
        found["chained_serial"] = timed(chained)
    if engine.name == "graph":
        found["patched"] = timed(lambda steps: card.patched_ahead(engine, token, steps))
        ahead = card.page_ahead(engine)
        found["page"] = timed(lambda steps: ahead(token, steps // page_tokens))
    else:
        found["made_anew"] = timed(lambda steps: card.made_anew(engine, token, steps), FEW)
        for name, change in (("waits", card.waiting), ("allocates", card.allocating)):
            with card.changed_launches(engine, change):
                found[name] = timed(chained, FEW)
    return {name: found[name] for name in VARIANTS[engine.name]}


def host_ms(engine: Engine, protocol: Protocol) -> list[float]:
    """Milliseconds of the host for the launch of one step, the card far behind it; the engine holds a prompt."""
    return card.wall_ms(engine, lambda: engine.run_ahead(0, HOST_STEPS), HOST_STEPS, protocol.runs, to_end=False)


def regions(engine: Engine, protocol: Protocol, page_tokens: int) -> dict[str, dict]:
    """{region: {"ms", "launches"}} of one eager step that does not begin a page, between events around every launch."""
    position = start_of(protocol, page_tokens) + page_tokens // 2
    engine.reset()
    engine.prefill(prompt_ids(engine.dims.vocab, position, protocol.seed))
    launches = Counter(region for _, region in card.launches_of(engine))
    ms = card.region_ms(engine, 0, REGION_STEPS)
    return {region: {"ms": round(ms[region], 5), "launches": count} for region, count in launches.items()}


def engine_results(engine: Engine, protocol: Protocol, page_tokens: int) -> tuple[dict, dict]:
    """(results, samples) of one engine."""
    samples = variants(engine, protocol, page_tokens)
    results = {"ms": {name: spread(taken)["median"] for name, taken in samples.items()}, "host_ms": spread(host_ms(engine, protocol))["median"]}
    if engine.name == "eager":
        results["regions"] = regions(engine, protocol, page_tokens)
    return results, {name: [round(ms, 4) for ms in taken] for name, taken in samples.items()}


def experiments() -> tuple[dict, dict]:
    """(results, samples) of what needs no model: an empty kernel, and kernels that stamp the time."""
    from nanoqwen.engines.hopper import kernel_cache
    from nanoqwen.lessons import launching as lesson

    cards = lesson.Card(kernel_cache())
    us, graph_host_us = lesson.floors(cards)
    results = {"empty_us": us, "empty_launches": lesson.LAUNCHES, "graph_host_us": graph_host_us, "stages_ns": {}}
    samples = {}
    for name, overlap in (("serial", False), ("overlap", True)):
        stamps = lesson.stages(cards, overlap)
        ends = [max(cta[3] for cta in kernel) for kernel in stamps]
        results["stages_ns"][name] = {"total": ends[-1], "between_ends": statistics.median(b - a for a, b in zip(ends, ends[1:]))}
        kept = [round(i * (cards.sms - 1) / (KEPT_CTAS - 1)) for i in range(KEPT_CTAS)]
        samples[name] = [[[cta, *kernel[cta]] for cta in kept] for kernel in stamps]
    return results, {"stages_ns": samples}


def measure(tell: Callable[[str], None]) -> tuple[dict, dict, dict, dict[str, str]]:
    """(results, samples, device, versions). Raises DeviceError without a Hopper card."""
    need_hopper("this benchmark launches kernels")
    protocol, page_tokens = Protocol.standard(), load_settings().kv.page_tokens
    pack = planned(MODEL)
    ceiling = measure_ceiling("hopper", "cuda")
    device, versions = card.device_facts(None)
    results: dict = {"model": MODEL, "position": start_of(protocol, page_tokens), "ceiling_gb_s": ceiling.gb_s, "engines": {}}
    samples: dict = {"ceiling": ceiling.as_dict(), "ms": {}}
    for name in VARIANTS:
        with opened(pack, name, None) as (engine, setup):
            results["engines"][name], samples["ms"][name] = engine_results(engine, protocol, page_tokens)
            results["launches"] = len(card.launches_of(engine))
            results["bytes_per_token"] = engine.bytes_per_token(protocol.middle)
            if setup.capture_s is not None:
                results["capture_ms"] = round(setup.capture_s * 1e3, 2)
        found = results["engines"][name]
        tell(f"{name}: {results['launches']} launches, host {found['host_ms']:.3f} ms a step, ms a token " + ", ".join(f"{k} {v:.3f}" for k, v in found["ms"].items()))
    measured = results["engines"]["eager"]["regions"]
    tell("regions us " + ", ".join(f"{k} {v['ms'] * 1e3:.1f}" for k, v in measured.items()) + f", together {sum(v['ms'] for v in measured.values()):.3f} ms")
    more, stamps = experiments()
    tell(f"empty kernel us {more['empty_us']}, a graph's launch {more['graph_host_us']} us; stages ns {more['stages_ns']}")
    return results | more, samples | stamps, device, versions


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write the receipt. Returns the exit status: 2 when it was refused, in one line."""

    def measured(args: argparse.Namespace) -> Callable[[], Path]:
        results, samples, device, versions = measure(print)
        protocol = {
            "batch": 1, "model": MODEL, "runs": Protocol.standard().runs, "steps": CHAIN, "steps_of_slow_variants": FEW, "time": "wall clock, idle card to idle card",
            "regions": f"mean of {REGION_STEPS} eager steps, between CUDA events", "greedy": True, "lock_clocks": False,
        }  # fmt: skip
        rests_on = {*sources("launching", tuple(VARIANTS)), *_SOURCES}
        return lambda: write_receipt(NAME, COMMAND, results, samples, rests_on, protocol, device=device, versions=versions)

    return run_program(COMMAND, "Ways to launch a decode step, for chapter 06.", arguments, measured)


if __name__ == "__main__":
    raise SystemExit(main())
