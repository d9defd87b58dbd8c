"""Inter-token latency of single tokens: its distribution, and on a Hopper card where the time goes, in eleven regions."""

from __future__ import annotations

import math
import statistics

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.e2e import CHAIN, CHAINED, one_run
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids
from nanoqwen.bench.prepare import Setup
from nanoqwen.engines import HOPPER
from nanoqwen.engines.base import Engine


def percentile(sorted_samples: list[float], share: float) -> float:
    """The smallest sample that is not below ``share`` of all (nearest rank)."""
    return sorted_samples[max(0, math.ceil(share * len(sorted_samples)) - 1)]


def measure(engine: Engine, setup: Setup, protocol: Protocol, ceiling: Ceiling, progress=None) -> tuple[dict, dict]:
    """(results, samples). ``regions_ms`` and ``kernel_gap`` exist for eager; the others have ``kernel_gap`` alone."""
    protocol.check_fits(engine.context_limit)
    prompt = prompt_ids(engine.dims.vocab, protocol.prompt_tokens, protocol.seed)
    steps: list[list[float]] = []
    for k in range(protocol.warmup + protocol.runs):
        run = one_run(engine, prompt, protocol.gen_tokens)
        if k >= protocol.warmup:
            steps.append([round(ms, 4) for ms in run.steps_ms])
        if progress:
            progress(k + 1, protocol.warmup + protocol.runs, engine.name)
    ordered = sorted(ms for run in steps for ms in run)
    median = statistics.median(ordered)
    results = {
        "device": engine.device, "itl_ms": round(median, 4), "mean_ms": round(statistics.fmean(ordered), 4), "min_ms": ordered[0], "max_ms": ordered[-1],
        "p90_ms": percentile(ordered, 0.9), "p99_ms": percentile(ordered, 0.99), "steps": len(ordered),
        "mbu": mbu(engine.bytes_per_token(protocol.middle), median, ceiling.gb_s), "setup": setup.as_dict(),
    }  # fmt: skip
    if engine.name in HOPPER:
        results |= _regions(engine, prompt, protocol, median)
    return results, {"steps_ms": steps}


def _regions(engine: Engine, prompt: list[int], protocol: Protocol, wall_ms: float) -> dict:
    """What the card does in a step near the middle of the run, and what the host adds: wall clock less device time."""
    position = protocol.middle - protocol.middle % 16 + 8  # not the first token of a page
    engine.reset()
    engine.prefill(prompt_ids(engine.dims.vocab, min(position, engine.context_limit - 1), protocol.seed))
    if engine.name in CHAINED:
        device_ms = statistics.median(card.chained_ms(engine, prompt[0], CHAIN, protocol.runs))
        return {"device_ms": round(device_ms, 4), "regions_ms": {"kernel_gap": round(wall_ms - device_ms, 4)}}
    regions = card.region_ms(engine, prompt[0], 10 * protocol.runs)
    device_ms = sum(regions.values())
    return {"device_ms": round(device_ms, 4), "regions_ms": {**{k: round(v, 5) for k, v in regions.items()}, "kernel_gap": round(wall_ms - device_ms, 4)}}
