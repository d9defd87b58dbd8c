"""`bench prefill` on a card that numpy plays: the products alone are the engine's own launches, so are those that are left with one kind left out, and the
engine is as before."""

import types
from collections import Counter
from contextlib import contextmanager

import cardkit
import numpy as np
import pytest
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
            assert counts["gemm_swiglu_middle"] == (layers - 1) * (1 + prefill.COLD_RUNS + runs) + layers * (alone + 6), "a prompt ends in the last layer"
            engine.reset()
            assert (engine.prefill([1, 2, 3]) == before).all()


# -------------------------------------------------------------------------------------------- one kind left out

IDS = [(7 * i + 3) % 50 for i in range(40)]


@contextmanager
def timed_by_kernels(tmp_path, monkeypatch, chunk: int):
    """(card, engine with chunks of ``chunk`` tokens that has had IDS as its prompt). A kernel takes as many ms as ``card.costs`` says; ``card.log`` has them."""
    pack(tiny.make(tmp_path / "source", tiny.Sizes(context=96)), tmp_path / "96.nanoqwen")
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(cardkit, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    with cardkit.played(monkeypatch) as card, open_pack(tmp_path / "96.nanoqwen") as opened:
        from nanoqwen.engines import hopper, open_engine

        monkeypatch.setattr(hopper, "PREFILL_CHUNK", chunk)
        card.pack, card.log, card.costs = opened, [], {}

        def told(name: str, work):
            def kernel(launch) -> None:
                clock.now += card.costs.get(name, 1.0) * 1e-3
                card.log.append(launch)
                work(launch)

            return kernel

        with open_engine(opened, "graph") as engine:
            card.kernels = {name: told(name, work) for name, work in card.kernels.items()}
            engine.prefill(IDS)
            card.log.clear()
            yield card, engine


@pytest.mark.parametrize("chunk", [64, 32])
def test_what_a_kind_of_launch_saves_is_what_its_launches_take(tmp_path, monkeypatch, chunk):
    with timed_by_kernels(tmp_path, monkeypatch, chunk) as (card, engine):
        from nanoqwen.bench import card_prefill

        chunks, layers, norms = -(-len(IDS) // chunk), engine.dims.num_layers, plans.NORMS
        card.costs = dict.fromkeys(norms, 2.0) | {"quantise_tiles": 0.0} | dict.fromkeys(("prefill_attention", "prefill_attention_spread"), 5.0)
        pages, table = engine._pages.pool.copy(), engine._buffers.block_table.copy()
        whole, saved, finite = card_prefill.without_ms(engine, IDS, 3)
        each = {"norm": 2.0 * (2 * layers - 1), "qkv": layers, "rope": layers, "ends": 2.0} | dict.fromkeys(("o", "gate_up", "down"), layers - 1)
        each = {kind: each.get(kind, 5.0 * (layers - 1)) for kind in card_prefill.KINDS}  # the last layer ends behind RoPE
        assert whole == pytest.approx([chunks * sum(each.values())] * 3 * len(card_prefill.KINDS)) and finite
        assert list(saved) == list(card_prefill.KINDS) and all(saved[kind] == pytest.approx([chunks * ms] * 3) for kind, ms in each.items())
        # Both take turns, each kind's runs three times, and a complete run ends it.
        assert sum(launch.name == "embed_rows" for launch in card.log) == chunks * (3 * (2 * len(card_prefill.KINDS) - 1) + 1)
        assert np.array_equal(engine._pages.pool, pages, equal_nan=True) and np.array_equal(engine._buffers.block_table, table), "the cache is as before"


def test_without_a_norm_products_read_what_the_last_one_left(tmp_path, monkeypatch):
    with timed_by_kernels(tmp_path, monkeypatch, 64) as (card, engine):
        from nanoqwen.bench import card_prefill

        prefiller = engine._prefiller
        work, part = (card_prefill._enqueued(engine, IDS, kind) for kind in (None, "norm"))
        work()
        held = prefiller.x, prefiller.x.copy(), prefiller.factor.copy(), prefiller._chains
        card.log.clear()
        part()
        names = Counter(launch.name for launch in card.log)
        assert not any(name.startswith("norm") for name in names) and names["rope_append_parts"] == engine.dims.num_layers
        assert prefiller.x is held[0] and all(np.array_equal(now, then, equal_nan=True) for now, then in ((prefiller.x, held[1]), (prefiller.factor, held[2])))
        assert prefiller._chains is held[3], "the engine launches its own again"
        assert all(launch.given[5] is not prefiller.x for launch in card.log if launch.name.startswith("prefill_attention"))


def test_numbers_that_are_none_are_told(tmp_path, monkeypatch):
    with timed_by_kernels(tmp_path, monkeypatch, 64) as (card, engine):
        from nanoqwen.bench import card_prefill

        rope = card.kernels["rope_append_parts"]

        def overflows(launch) -> None:
            rope(launch)
            if not card.log[-2].name.startswith("gemm"):
                engine._prefiller.q[0, 0, 0] = np.inf

        assert card_prefill.without_ms(engine, IDS, 1)[2] is True
        card.kernels["rope_append_parts"] = overflows
        with np.errstate(invalid="ignore"):
            assert card_prefill.without_ms(engine, IDS, 1)[2] is False


def test_the_lengths_of_the_receipt_have_it(tmp_path, monkeypatch):
    with timed_by_kernels(tmp_path, monkeypatch, 64) as (card, engine):
        from nanoqwen.bench import card_prefill, prefill

        results, samples = prefill.measure(engine, 0, sleep=lambda seconds: None)
        assert [n for n, row in results["lengths"].items() if "without" in row] == ["16"]
        row, raw, runs = results["lengths"]["16"], samples["16"]["chain"], prefill.WITHOUT_RUNS[16]
        assert row["finite_without"] and list(row["without"]) == list(card_prefill.KINDS)
        assert row["chain_ms"] == pytest.approx(8 * engine.dims.num_layers + 2 - 5) and row["without"]["norm"] == pytest.approx(2 * engine.dims.num_layers - 1)
        assert len(raw["ms"]) == runs * len(card_prefill.KINDS) and all(len(taken) == runs for taken in raw["without"].values())
    assert set(prefill.WITHOUT_RUNS) <= set(prefill.LENGTHS)
