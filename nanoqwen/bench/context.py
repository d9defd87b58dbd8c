"""Decode latency against context depth: keys and values of every cached token are read again for each new one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.e2e import greedy
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids, spread
from nanoqwen.engines.base import Engine

DEPTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32512)


def usable_depths(limit: int, protocol: Protocol, asked: Sequence[int] | None) -> list[int]:
    """The depths to measure, rising: those asked for, else those of ``DEPTHS`` that fit. Raises ContextError for one that does not."""
    for depth in asked or ():
        protocol.check_fits(limit, depth)
    if not asked and DEPTHS[0] + protocol.gen_tokens > limit:
        protocol.check_fits(limit, 1)
        return [limit - protocol.gen_tokens]
    return sorted(set(asked or (d for d in DEPTHS if d + protocol.gen_tokens <= limit)))


def measure(engine: Engine, protocol: Protocol, ceiling: Ceiling, progress=None, depths: Sequence[int] | None = None) -> tuple[dict, dict]:
    """(results by depth, samples by depth). Each depth: the cache is filled up to it, then ``gen_tokens`` steps are timed, again
    and again from the same depth; the warm-up runs are the first ones at the first depth."""
    chosen = usable_depths(engine.context_limit, protocol, depths)
    ids = prompt_ids(engine.dims.vocab, chosen[-1], protocol.seed)
    chooser = greedy(engine)
    engine.reset()
    results, samples = {}, {}
    for index, depth in enumerate(chosen):
        engine.prefill(ids[engine.position : depth])
        runs = []
        warmup = protocol.warmup if index == 0 else 1
        for k in range(warmup + protocol.runs):
            started = time.perf_counter()
            for _ in engine.stream(ids[depth - 1], protocol.gen_tokens, chooser):
                pass
            if k >= warmup:
                runs.append((time.perf_counter() - started) * 1e3 / protocol.gen_tokens)
            engine.rewind(depth)
        median, middle = statistics.median(runs), depth + protocol.gen_tokens // 2
        nbytes = engine.bytes_per_token(middle)
        results[str(depth)] = {
            "itl_ms": round(median, 4), "tokens_per_s": round(1e3 / median, 2), "mbu": mbu(nbytes, median, ceiling.gb_s),
            "bytes_per_token": nbytes, "spread": spread(runs),
        }  # fmt: skip
        samples[str(depth)] = [round(ms, 4) for ms in runs]
        if progress:
            progress(index + 1, len(chosen), f"depth {depth}")
    return results, samples
