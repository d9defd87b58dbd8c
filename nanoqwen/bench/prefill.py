"""Prefill against the length of a prompt: time to first token, and the rate of the layers' products that it amounts to. On a Hopper engine also these
products alone, beside the vendor's library with FP16 weights, and for a few lengths what a prompt saves without each kind of launch.

*Cold* is a prompt after a pause, as a person types; *sustained* is one prompt behind the other, which is where the card lowers its clock.
"""

from __future__ import annotations

import statistics
import time

from nanoqwen.bench import card_prefill
from nanoqwen.bench.e2e import greedy
from nanoqwen.bench.protocol import prompt_ids, spread
from nanoqwen.cuda.prefill_plan import shapes
from nanoqwen.engines.base import Engine

LENGTHS = (1, 2, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 32000)
PAUSE_S, COLD_RUNS = 0.25, 3
#: Lengths at which cuBLAS multiplies beside: bound by memory, between, and bound by the tensor cores.
VENDOR_LENGTHS = (128, 512, 2048)
#: Lengths at which each kind of launch is left out, and how often: some five seconds of a card in all.
WITHOUT_RUNS = {16: 7, 128: 7, 512: 4, 4096: 2}


def protocol(seed: int) -> dict:
    """The protocol as a receipt states it."""
    return {
        "name": "prefill", "batch": 1, "greedy": True, "lock_clocks": False, "seed": seed, "prompt": "varied ids, a seeded hash of the position",
        "cold": f"median of {COLD_RUNS} prompts (1 of the longest), each after {PAUSE_S} s", "sustained": "median of prompts one behind the other",
        "products": "the four products of all layers in one graph, between two events; cuBLAS the same shapes in FP16, launched one by one",
        "without": f"median of what runs without a kind of launch take less than the complete ones they take turns with; runs by length {WITHOUT_RUNS}",
    }  # fmt: skip


def usable_lengths(limit: int) -> list[int]:
    """Those of ``LENGTHS`` that a context of ``limit`` tokens holds, with room for the first token of the answer."""
    return [n for n in LENGTHS if n < limit] or [max(1, limit - 1)]


def runs_of(n: int) -> int:
    """Sustained runs of a prompt of ``n`` tokens: fewer of the long ones."""
    return 20 if n <= 512 else 6 if n <= 4096 else 2


def operations(engine: Engine, n: int, whole: bool = False) -> int:
    """Floating-point operations of the layers' four products for ``n`` tokens: a multiplication and an addition a weight. Of a prompt the last layer takes
    the last token alone behind its keys and values; with ``whole`` all layers take all tokens."""
    weights = {name: rows * cols for name, (rows, cols) in shapes(engine.dims).items()}
    dropped = 0 if whole else (n - 1) * (sum(weights.values()) - weights["qkv"])
    return 2 * (n * engine.dims.num_layers * sum(weights.values()) - dropped)


def measure(engine: Engine, seed: int, progress=None, sleep=time.sleep) -> tuple[dict, dict]:
    """(results, samples): ``lengths`` {tokens: times}; on a Hopper engine also ``products`` {tokens: times} of a chunk and the workspace. The
    ``products_tflop_s`` of a length is over the whole time, that of ``products`` (of all layers for all tokens) is not.

    On a Hopper engine the lengths of ``WITHOUT_RUNS`` have ``chain_ms``, the device milliseconds of all launches, and ``without``: {kind of
    ``card_prefill.KINDS``: milliseconds less when launches of that kind are left out}. ``finite_without`` says that no number became infinite or NaN then.
    """
    lengths = usable_lengths(engine.context_limit)
    ids, chooser = prompt_ids(engine.dims.vocab, lengths[-1], seed), greedy(engine)
    results: dict = {"lengths": {}}
    samples: dict = {}
    most = min(card_prefill.chunk_tokens(engine), lengths[-1])
    vendor = _vendor(engine, most)

    def once(n: int) -> tuple[float, int]:
        engine.reset()
        started = time.perf_counter()
        token = engine.prefill_next(ids[:n], chooser)
        return (time.perf_counter() - started) * 1e3, token

    for index, n in enumerate(lengths):
        _, token = once(n)  # grows the pool, fills the caches
        cold = []
        for _ in range(COLD_RUNS if n <= 4096 else 1):
            sleep(PAUSE_S)
            cold.append(once(n))
        sustained = [once(n) for _ in range(runs_of(n))]
        same = all(found == token for _, found in cold + sustained)
        cold_ms, ms = [t for t, _ in cold], [t for t, _ in sustained]
        median = statistics.median(ms)
        results["lengths"][str(n)] = {
            "cold_ms": round(statistics.median(cold_ms), 4), "ttft_ms": round(median, 4), "tokens_per_s": round(1e3 * n / median, 1),
            "products_tflop_s": round(operations(engine, n) / (median * 1e9), 2), "spread": spread(ms), "same_id_in_every_run": same,
        }  # fmt: skip
        samples[str(n)] = {"cold_ms": [round(t, 4) for t in cold_ms], "ms": [round(t, 4) for t in ms]}
        if n <= most:
            results.setdefault("products", {})[str(n)], samples[str(n)]["products"] = _products(engine, n, vendor, sleep)
        if most and n in WITHOUT_RUNS:
            measured, samples[str(n)]["chain"] = _without(engine, ids[:n])
            results["lengths"][str(n)] |= measured
        if progress:
            progress(index + 1, len(lengths), f"{n} tokens")
    if workspace := card_prefill.workspace_bytes(engine):
        results["workspace_bytes"] = workspace
    return results, samples


def _vendor(engine: Engine, most: int) -> card_prefill.Vendor | None:
    """cuBLAS for chunks of up to ``most`` tokens, if there are any and it can be loaded."""
    try:
        return card_prefill.Vendor(engine, most) if most else None
    except ImportError:
        return None


def _products(engine: Engine, n: int, vendor: card_prefill.Vendor | None, sleep) -> tuple[dict, dict]:
    """(results, samples) of the products of ``n`` tokens that have just been a prompt."""
    kinds = {"cold_ms": (COLD_RUNS, lambda: sleep(PAUSE_S)), "ms": (runs_of(n), lambda: None)}
    found = {kind: card_prefill.products_ms(engine, n, runs, after=after) for kind, (runs, after) in kinds.items()}
    if vendor and n in VENDOR_LENGTHS:
        found |= {f"cublas_{kind}": vendor.products_ms(n, runs, after) for kind, (runs, after) in kinds.items()}
    each = {f"{name}_us": [1e3 * ms / engine.dims.num_layers for ms in card_prefill.products_ms(engine, n, 5, name)] for name in shapes(engine.dims)}
    results = {kind: round(statistics.median(samples), 4) for kind, samples in (found | each).items()}
    results["tflop_s"] = round(operations(engine, n, whole=True) / (results["ms"] * 1e9), 2)
    return results, {kind: [round(ms, 4) for ms in samples] for kind, samples in found.items()}


def _without(engine: Engine, ids: list[int]) -> tuple[dict, dict]:
    """(results, samples) of the prompt ``ids``, which has just been one, without each kind of launch."""
    whole, saved, finite = card_prefill.without_ms(engine, ids, WITHOUT_RUNS[len(ids)])
    without = {kind: round(statistics.median(ms), 4) for kind, ms in saved.items()}
    samples = {"ms": [round(t, 4) for t in whole], "without": {kind: [round(t, 4) for t in ms] for kind, ms in saved.items()}}
    return {"chain_ms": round(statistics.median(whole), 4), "without": without, "finite_without": finite}, samples
