"""End to end, protocol ``benchmark_e2e``: prefill, time to first token and decode of one engine, each a number of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids, spread
from nanoqwen.bench.prepare import Setup
from nanoqwen.engines import HOPPER
from nanoqwen.engines.base import Engine

#: Graph replays of the device-chained measurement, and steps whose logits come to the host.
CHAIN, LOGITS_STEPS = 64, 16


@dataclass(frozen=True)
class Run:
    """One timed run, in milliseconds; ``steps_ms`` are the decode steps after the first token."""

    prefill_ms: float
    ttft_ms: float
    steps_ms: list[float]
    ids: list[int]

    @property
    def itl_ms(self) -> float:
        """Mean inter-token latency of the run."""
        return statistics.fmean(self.steps_ms)


def stepper(engine: Engine) -> Callable[[int], int]:
    """token -> next token, greedy. On a Hopper engine it is chosen on the card; elsewhere it is the argmax of the logits."""
    if engine.name in HOPPER:
        return lambda token: card.greedy_step(engine, token)
    return lambda token: int(np.argmax(engine.decode(token)))


def one_run(engine: Engine, prompt: list[int], gen_tokens: int) -> Run:
    """Prefill ``prompt`` from nothing and generate ``gen_tokens`` tokens, whatever they are; wall clock."""
    engine.reset()
    step, clock = stepper(engine), time.perf_counter
    started = clock()
    logits = engine.prefill(prompt)  # a GPU has finished when the logits are here
    prefilled = clock()
    ids, steps = [int(np.argmax(logits))], []
    first = clock()
    for _ in range(gen_tokens - 1):
        before = clock()
        ids.append(step(ids[-1]))
        steps.append((clock() - before) * 1e3)
    return Run((prefilled - started) * 1e3, (first - started) * 1e3, steps, ids)


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
    itl = spread([run.itl_ms for run in runs])
    nbytes = engine.bytes_per_token(protocol.middle)
    results = {
        "device": engine.device,
        "description": engine.description,
        "prefill_ms": spread([run.prefill_ms for run in runs])["median"],
        "prefill_tokens_per_s": round(protocol.prompt_tokens / statistics.median(run.prefill_ms for run in runs) * 1e3, 1),
        "ttft_ms": spread([run.ttft_ms for run in runs])["median"],
        "itl_ms": itl["median"],
        "tokens_per_s": round(1e3 / itl["median"], 2),
        "mbu": mbu(nbytes, itl["median"], ceiling.gb_s),
        "bytes_per_token": nbytes,
        "ceiling_gb_s": ceiling.gb_s,
        "spread": {"ttft_ms": spread([run.ttft_ms for run in runs]), "itl_ms": itl},
        "same_ids_in_every_run": all(run.ids == runs[0].ids for run in runs),
        "setup": setup.as_dict(),
    }
    if ceiling.datasheet_gb_s:
        results["datasheet_share"] = mbu(nbytes, itl["median"], ceiling.datasheet_gb_s)
    samples = {"runs": [{"prefill_ms": r.prefill_ms, "ttft_ms": r.ttft_ms, "steps_ms": [round(s, 4) for s in r.steps_ms]} for r in runs]}
    if engine.name in HOPPER:
        results["itl_with_logits_ms"] = round(_with_logits(engine, prompt), 4)
    if engine.name == "graph":
        samples["device_chained_ms"] = _chained(engine, prompt, protocol)
        results["device_chained_ms"] = round(statistics.median(samples["device_chained_ms"]), 4)
        results["device_chained_mbu"] = mbu(engine.bytes_per_token(engine.position), results["device_chained_ms"], ceiling.gb_s)
    return results, samples


def _with_logits(engine: Engine, prompt: list[int]) -> float:
    """Milliseconds a token through ``Engine.decode``, which copies all logits to the host, as sampling on the host needs them."""
    engine.reset()
    engine.prefill(prompt)
    times, token = [], prompt[0]
    for _ in range(min(LOGITS_STEPS, engine.context_limit - engine.position)):
        before = time.perf_counter()
        token = int(np.argmax(engine.decode(token)))
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def _chained(engine: Engine, prompt: list[int], protocol: Protocol) -> list[float]:
    """Device time of a step near the middle of the run: see ``card.chained_ms``."""
    wanted = protocol.middle - protocol.middle % 16 + 8  # not the first token of a page
    engine.reset()
    engine.prefill(prompt_ids(engine.dims.vocab, min(wanted, engine.context_limit - 1), protocol.seed))
    return card.chained_ms(engine, prompt[0], CHAIN, protocol.runs)
