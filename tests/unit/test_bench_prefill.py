"""`bench prefill` on a card that numpy plays: the products alone are the engine's own launches, and the engine is as before."""

import types

import cardkit
import tiny

from nanoqwen.cuda import prefill_plan as plans
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack


def test_the_products_alone_are_those_of_a_chunk(tmp_path, monkeypatch):
    pack(tiny.make(tmp_path / "source", tiny.Sizes(context=96)), tmp_path / "96.nanoqwen")
    with cardkit.played(monkeypatch) as card, open_pack(tmp_path / "96.nanoqwen") as opened:
        from nanoqwen.bench import prefill
        from nanoqwen.engines import open_engine

        card.pack = opened
        products = {name: call for name, call in card.kernels.items() if name.startswith("gemm_")}
        counts = dict.fromkeys(products, 0)
        with open_engine(opened, "graph") as engine:

            def counting(launch: types.SimpleNamespace) -> None:
                counts[launch.name] += 1
                products[launch.name](launch)

            before = engine.prefill([1, 2, 3])
            engine.reset()
            card.kernels |= dict.fromkeys(products, counting)
            results, samples = prefill.measure(engine, 0, sleep=lambda seconds: None)
            card.kernels |= products
            assert list(results["products"]) == ["1", "2", "16", "32", "64"] == list(results["lengths"]) and results["workspace_bytes"] == engine._prefiller.nbytes
            for n, row in results["products"].items():
                assert row["ms"] > 0 and row["tflop_s"] >= 0 and "cublas_ms" not in row and set(row) >= {f"{name}_us" for name in plans.shapes(engine.dims)}
                assert len(samples[n]["products"]["ms"]) == prefill.runs_of(int(n)) and len(samples[n]["products"]["cold_ms"]) == prefill.COLD_RUNS
            # Each length: prompts, then all products after a pause and without, each after one to warm up, then the four products alone.
            layers, runs = engine.dims.num_layers, 20
            alone = (prefill.COLD_RUNS + 1) + (runs + 1)
            assert counts["gemm_swiglu_middle"] == layers * ((1 + prefill.COLD_RUNS + runs) + alone + 6)
            engine.reset()
            assert (engine.prefill([1, 2, 3]) == before).all()
