"""End to end, protocol ``benchmark_e2e``: prefill, time to first token and decode of one engine, each a number of its own."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids, spread
from nanoqwen.bench.prepare import Setup
from nanoqwen.engines import HOPPER
from nanoqwen.engines.base import Engine
from nanoqwen.sampling import GREEDY, Sampler

#: Steps of the device-chained measurement, and steps that wait for the host one by one.
CHAIN, SINGLE_STEPS = 64, 16
#: Engines whose host needs so little time that steps follow each other without a gap.
CHAINED = ("graph", "persistent")


@dataclass(frozen=True)
class Run:
    """One timed run, in milliseconds; ``steps_ms`` are the decode steps after the first token."""

    ttft_ms: float
    steps_ms: list[float]
    ids: list[int]

    @property
    def itl_ms(self) -> float:
        """Mean inter-token latency of the run."""
        return statistics.fmean(self.steps_ms)


def greedy(engine: Engine) -> Sampler:
    """A greedy choice among all rows of the head: random weights have no tokenizer."""
    return Sampler(GREEDY, engine.dims.vocab)


def one_run(engine: Engine, prompt: list[int], gen_tokens: int) -> Run:
    """Prefill ``prompt`` from nothing and generate ``gen_tokens`` tokens, whatever they are; wall clock.

    This is what ``generate`` asks of an engine, less the text: the engine chooses, and the ids come as a stream. A step is the time
    from one id to the next.
    """
    engine.reset()
    chooser, clock = greedy(engine), time.perf_counter
    started = clock()
    ids, arrivals = [engine.prefill_next(prompt, chooser)], [clock()]
    for following in engine.stream(ids[0], gen_tokens - 1, chooser):
        arrivals.append(clock())
        ids.append(following)
    return Run((arrivals[0] - started) * 1e3, [(after - before) * 1e3 for before, after in zip(arrivals, arrivals[1:])], ids)


def measure(engine: Engine, setup: Setup, protocol: Protocol, ceiling: Ceiling, progress=None) -> tuple[dict, dict]:
    """(results, samples) of one engine. Raises ContextError before anything is timed when prompt and reply do not fit."""
    protocol.check_fits(engine.context_limit)
    prompt = prompt_ids(engine.dims.vocab, protocol.prompt_tokens, protocol.seed)
    runs: list[Run] = []
    for k in range(protocol.warmup + protocol.runs):
        run = one_run(engine, prompt, protocol.gen_tokens)
        if k >= protocol.warmup:
            runs.append(run)
        if progress:
            progress(k + 1, protocol.warmup + protocol.runs, engine.name)
    itl, ttft = spread([run.itl_ms for run in runs]), spread([run.ttft_ms for run in runs])
    nbytes = engine.bytes_per_token(protocol.middle)
    results = {
        "device": engine.device,
        "description": engine.description,
        "prefill_ms": ttft["median"],  # the engine chooses the first token as the last thing of a prefill
        "prefill_tokens_per_s": round(protocol.prompt_tokens / ttft["median"] * 1e3, 1),
        "ttft_ms": ttft["median"],
        "itl_ms": itl["median"],
        "tokens_per_s": round(1e3 / itl["median"], 2),
        "mbu": mbu(nbytes, itl["median"], ceiling.gb_s),
        "bytes_per_token": nbytes,
        "ceiling_gb_s": ceiling.gb_s,
        "spread": {"ttft_ms": ttft, "itl_ms": itl},
        "same_ids_in_every_run": all(run.ids == runs[0].ids for run in runs),
        "setup": setup.as_dict(),
    }
    if ceiling.datasheet_gb_s:
        results["datasheet_share"] = mbu(nbytes, itl["median"], ceiling.datasheet_gb_s)
    samples = {"runs": [{"ttft_ms": r.ttft_ms, "steps_ms": [round(s, 4) for s in r.steps_ms]} for r in runs]}
    if engine.name in HOPPER:
        results["itl_unchained_ms"], results["itl_with_logits_ms"] = _one_by_one(engine, prompt)
    if engine.name in CHAINED:
        samples["device_chained_ms"] = _chained(engine, prompt, protocol)
        results["device_chained_ms"] = round(statistics.median(samples["device_chained_ms"]), 4)
        results["device_chained_mbu"] = mbu(nbytes, results["device_chained_ms"], ceiling.gb_s)
    return results, samples


def _one_by_one(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds a token when the host writes the scalars of every step and waits for its id; and when all logits come back with it,
    as sampling on the host needs them."""
    chooser = greedy(engine)

    def with_logits(token: int) -> int:
        return int(np.argmax(engine.decode(token)))

    medians = []
    for step in (lambda token: engine.decode_next(token, chooser), with_logits):
        engine.reset()
        token, times = engine.prefill_next(prompt, chooser), []
        for _ in range(min(SINGLE_STEPS, engine.context_limit - engine.position)):
            before = time.perf_counter()
            token = step(token)
            times.append((time.perf_counter() - before) * 1e3)
        medians.append(round(statistics.median(times), 4))
    return medians[0], medians[1]


def _chained(engine: Engine, prompt: list[int], protocol: Protocol) -> list[float]:
    """Device time of a step around the middle of the run: see ``card.chained_ms``."""
    start = max(1, min(protocol.middle - CHAIN // 2, engine.context_limit - CHAIN))
    engine.reset()
    engine.prefill(prompt_ids(engine.dims.vocab, start, protocol.seed))
    return card.chained_ms(engine, prompt[0], CHAIN, protocol.runs)
