"""The protocol of the benchmarks: what is timed, in which order, and what is refused before anything is."""

import pytest
from benchkit import DIMS, Card, CardEngine, CountingEngine

from nanoqwen.bench import card, context, e2e, gemv, itl, prefill
from nanoqwen.bench.ceiling import Ceiling, datasheet_gb_s, torch_ceiling
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids, sources, spread
from nanoqwen.bench.prepare import Setup
from nanoqwen.config import load_settings, repo_root
from nanoqwen.errors import ContextError

CEILING = Ceiling([90.0, 100.0, 110.0], 1000, "made up", "NVIDIA H200")
SMALL = Protocol.standard(prompt_tokens=20, gen_tokens=5, warmup=2, runs=3)


# ------------------------------------------------------------------------------------------------------- protocol


def test_the_standard_protocol_is_the_one_of_the_yaml():
    b, p = load_settings().benchmark, Protocol.standard()
    assert (p.prompt_tokens, p.gen_tokens, p.warmup) == (b.prompt_tokens, b.gen_tokens, b.warmup) == (512, 128, 3)
    assert p.as_dict()["name"] == "benchmark_e2e" and p.middle == 576
    assert SMALL.as_dict()["name"] == "benchmark_e2e, shortened", "a shorter run must not bear the protocol's name"


def test_prompts_are_varied_seeded_and_inside_the_vocabulary():
    ids = prompt_ids(2048, 512)
    assert ids == prompt_ids(2048, 512) and ids != prompt_ids(2048, 512, 1) and ids[:100] == prompt_ids(2048, 100)
    assert 0 <= min(ids) and max(ids) < 2048 and len(set(ids)) > 400


def test_prompt_and_reply_must_fit_the_context():
    Protocol.standard(prompt_tokens=30, gen_tokens=10).check_fits(40)
    with pytest.raises(ContextError, match="31 prompt tokens and 10 generated make 41, the model's context is 40"):
        Protocol.standard(prompt_tokens=31, gen_tokens=10).check_fits(40)


def test_mbu_is_bytes_over_time_over_ceiling():
    assert mbu(4_567_000_000, 1.0, 4567.0) == 1.0 and mbu(4_567_000_000, 2.0, 4567.0) == 0.5 and mbu(1, 1.0, None) is None
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_sources_exist_and_follow_the_engine():
    for mode in ("e2e", "itl", "context", "prefill", "gemv", "ceiling"):
        for engine in ("cpu", "graph"):
            assert all((repo_root() / path).is_file() for path in sources(mode, [engine]))
    assert "kernels/decode/gemv_int4.cu" in sources("e2e", ["graph"]) and "nanoqwen/reference.py" not in sources("e2e", ["graph"])
    assert "nanoqwen/reference.py" in sources("e2e", ["cpu"]) and not any(p.startswith("kernels/") for p in sources("e2e", ["cpu"]))


# -------------------------------------------------------------------------------------------------------- ceiling


def test_the_cpu_ceiling_reads_what_it_says():
    found = torch_ceiling("cpu", 8_000_000)
    assert found.nbytes == 8_000_000 and len(found.samples) == 7 and min(found.samples) <= found.gb_s <= max(found.samples) + 0.01
    assert found.device == "CPU" and "PyTorch sum" in found.how and found.datasheet_gb_s is None


def test_a_data_sheet_is_quoted_for_exactly_the_cards_it_is_of():
    assert datasheet_gb_s("NVIDIA H200") == 4800 and datasheet_gb_s("NVIDIA H100 80GB HBM3") == 3350
    assert datasheet_gb_s("NVIDIA H100 PCIe") is None and datasheet_gb_s("CPU") is None


# --------------------------------------------------------------------------------------------------------- prefill


def test_prompts_of_all_lengths_are_prefilled_cold_and_sustained():
    engine, pauses = CountingEngine(limit=40), []
    results, samples = prefill.measure(engine, 0, sleep=pauses.append)
    assert list(results["lengths"]) == list(samples) == ["1", "2", "16", "32"] and "workspace_bytes" not in results
    assert len(pauses) == 4 * prefill.COLD_RUNS and set(pauses) == {prefill.PAUSE_S}
    for n, row in results["lengths"].items():
        assert row["same_id_in_every_run"] and row["cold_ms"] > 0 and row["ttft_ms"] > 0 and row["tokens_per_s"] > 0
        assert len(samples[n]["cold_ms"]) == prefill.COLD_RUNS and len(samples[n]["ms"]) == prefill.runs_of(int(n))
        assert engine.log.count(("prefill", int(n))) == 1 + prefill.COLD_RUNS + prefill.runs_of(int(n))


def test_lengths_of_prompts_leave_room_for_an_answer():
    assert prefill.usable_lengths(32768) == list(prefill.LENGTHS) and prefill.usable_lengths(2048)[-1] == 1024 and prefill.usable_lengths(1) == [1]


# ------------------------------------------------------------------------------------------------------ end to end


def test_a_run_prefills_once_and_makes_every_token():
    engine = CountingEngine()
    run = e2e.one_run(engine, list(range(20)), 5)
    assert [what for what in engine.log if what[0] != "rewind"] == [("prefill", 20), ("decode", 20), ("decode", 21), ("decode", 22), ("decode", 23)]
    assert run.ids == [20, 21, 22, 23, 24] and len(run.steps_ms) == 4, "the first token comes with the prefill: 5 tokens are 4 steps"
    assert run.ttft_ms > 0


def test_warm_up_runs_are_made_and_not_counted():
    engine = CountingEngine()
    results, samples = e2e.measure(engine, Setup(0.5), SMALL, CEILING)
    assert engine.log.count(("prefill", 20)) == 5 and len(samples["runs"]) == 3
    assert results["same_ids_in_every_run"] and results["setup"] == {"load_s": 0.5}
    assert results["bytes_per_token"] == engine.bytes_per_token(22) and results["tokens_per_s"] == pytest.approx(1e3 / results["itl_ms"], rel=1e-2)
    assert results["mbu"] == mbu(results["bytes_per_token"], results["itl_ms"], 100.0)
    assert results["datasheet_share"] < results["mbu"], "the data sheet promises more than can be read"
    assert "device_chained_ms" not in results


def test_nothing_is_timed_when_the_context_is_too_short():
    engine = CountingEngine(limit=24)
    for measure in (e2e.measure, itl.measure):
        with pytest.raises(ContextError, match="make 25"):
            measure(engine, Setup(0), SMALL, CEILING)
    assert engine.log == []


# --------------------------------------------------------------------------------------------------------- context


def test_depths_are_filled_step_by_step_and_each_run_starts_at_its_depth():
    engine = CountingEngine()
    results, samples = context.measure(engine, SMALL, CEILING, depths=[40, 16])
    assert list(results) == ["16", "40"] and {len(s) for s in samples.values()} == {3}
    assert [what for what in engine.log if what[0] == "prefill"] == [("prefill", 16), ("prefill", 24)]
    assert engine.position == 40 and results["40"]["bytes_per_token"] > results["16"]["bytes_per_token"]


def test_depths_that_fit_are_chosen_and_one_that_does_not_is_refused():
    assert context.usable_depths(4096, SMALL, None) == [128, 512, 1024, 2048]
    assert context.usable_depths(40, SMALL, None) == [35]
    with pytest.raises(ContextError, match="100 context tokens and 5 generated make 105"):
        context.usable_depths(40, SMALL, [100])


# --------------------------------------------------------------------------------- inside a card, on a made-up clock


@pytest.fixture
def clock(monkeypatch):
    made = Card()
    monkeypatch.setitem(__import__("sys").modules, "cupy", made.cupy)
    return made


def test_the_graph_engine_is_also_timed_without_the_host(clock):
    engine = CardEngine("graph", clock)
    results, samples = e2e.measure(engine, Setup(0.5, 1.5, "all from the cache", 0.01), SMALL, CEILING)
    assert results["device_chained_ms"] == 6.0 and samples["device_chained_ms"] == [6.0] * 3, "five launches, one of two milliseconds"
    assert engine.log.count(("run ahead", 64)) == 4 and engine.log[-1] == ("drop ahead",), "a warm-up and three runs, and nothing is left of them"
    assert results["device_chained_mbu"] == mbu(results["bytes_per_token"], 6.0, 100.0)
    assert results["itl_with_logits_ms"] > 0 and results["itl_unchained_ms"] > 0 and results["setup"]["compiled"] == "all from the cache"


def test_a_chain_near_the_end_of_the_context_is_as_long_as_fits(clock):
    engine = CardEngine("graph", clock, limit=30)
    engine.prefill(list(range(20)))
    assert card.chained_ms(engine, 1, 64, 1) == [6.0] and engine.log[-3:] == [("run ahead", 10), ("run ahead", 10), ("drop ahead",)]


def test_regions_are_summed_by_name_and_the_gap_is_the_rest(clock):
    engine = CardEngine("eager", clock)
    eager, samples = itl.measure(engine, Setup(0), SMALL, CEILING)
    assert engine.placed == 31 and engine.position % 16 == 8, "each step is the one at the same position, which begins no page"
    assert {k: v for k, v in eager["regions_ms"].items() if k != "kernel_gap"} == {"embed": 1.0, "qkv_gemv": 2.0, "o_proj": 1.0, "lm_head": 2.0}
    assert eager["device_ms"] == 6.0 and eager["regions_ms"]["kernel_gap"] == pytest.approx(eager["itl_ms"] - 6.0, abs=1e-3)
    graph, _ = itl.measure(CardEngine("graph", clock), Setup(0), SMALL, CEILING)
    assert list(graph["regions_ms"]) == ["kernel_gap"] and graph["device_ms"] == 6.0
    assert len(samples["steps_ms"]) == 3 and eager["min_ms"] <= eager["itl_ms"] <= eager["p90_ms"] <= eager["p99_ms"] <= eager["max_ms"]


def test_a_kernel_is_timed_over_all_layers(clock, monkeypatch):
    monkeypatch.setattr(card, "gemv_bytes", lambda engine: {"gemv_qkv": (768, 384, 150_000_000), "lm_head": (2048, 384, 200_000_000)})
    shapes, samples, notes = gemv.measure(CardEngine("graph", clock), SMALL, CEILING, 50_000_000)
    assert shapes["qkv"]["us"] == 1000.0 and shapes["qkv"]["gb_s"] == 150.0 and shapes["qkv"]["mbu"] == 1.5
    assert shapes["lm_head"]["us"] == 2000.0 and shapes["lm_head"]["gb_s"] == 100.0
    assert samples["qkv"] == [1000.0] * 3 and notes == []
    _, _, notes = gemv.measure(CardEngine("graph", clock), SMALL, CEILING, 400_000_000)
    assert any("this is not memory bandwidth" in note for note in notes)


def test_percentiles_are_samples():
    ordered = [float(i) for i in range(1, 101)]
    assert (itl.percentile(ordered, 0.9), itl.percentile(ordered, 0.99), itl.percentile([5.0], 0.99)) == (90.0, 99.0, 5.0)
    assert DIMS.max_position == 4096
