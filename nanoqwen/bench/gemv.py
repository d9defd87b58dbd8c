"""The INT4 GEMV and the output head alone, on a Hopper card: each over the rotating layers of the model, inside a graph.

Rotating, because one layer's matrix may fit the L2 of 50 MB and would then measure that; inside a graph, because a launch on
its own costs as much as the read. The launches are those of the decode step.
"""

from __future__ import annotations

from nanoqwen.bench import card
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.protocol import Protocol, spread
from nanoqwen.engines.base import Engine

#: Engines with a launch for each matrix.
ENGINES = ("eager", "graph")
ROUNDS = 4  # times that a graph goes over all layers
KERNELS = ("gemv_qkv", "gemv_o", "gemv_gate_up", "gemv_down", "lm_head")


def measure(engine: Engine, protocol: Protocol, ceiling: Ceiling, l2_bytes: int) -> tuple[dict, dict, list[str]]:
    """(results by shape, samples by shape, notes). ``engine`` is an open Hopper engine; ``l2_bytes`` the card's cache."""
    results, samples, notes = {}, {}, []
    for kernel, (rows, cols, nbytes) in card.gemv_bytes(engine).items():
        name = kernel.removeprefix("gemv_")
        us = card.gemv_graph_us(engine, kernel, ROUNDS, protocol.runs)
        middle = spread(us)
        gb_s = nbytes / (middle["median"] * 1e-6) / 1e9
        layers = 1 if name == "lm_head" else engine.dims.num_layers
        if nbytes * layers < 3 * l2_bytes:
            notes.append(f"{name}: all layers together are {nbytes * layers / 1e6:.0f} MB beside an L2 of {l2_bytes / 1e6:.0f} MB, so this is not memory bandwidth")
        results[name] = {
            "us": middle["median"], "gb_s": round(gb_s, 1), "mbu": round(gb_s / ceiling.gb_s, 4), "rows": rows, "cols": cols, "bytes": nbytes,
            "spread_us": middle,
        }  # fmt: skip
        samples[name] = [round(v, 4) for v in us]
    return results, samples, notes
