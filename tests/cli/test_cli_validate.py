"""The ladder: it passes on sound code, and each tier catches a fault of its own kind and stops the climb."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tiny
import torch
from clikit import make_pack

from nanoqwen import kv, reference
from nanoqwen.config import load_settings
from nanoqwen.engines import hopper_problem
from nanoqwen.engines.cpu import ReferenceEngine
from nanoqwen.ladder import graph, run_ladder, twins
from nanoqwen.ladder.prompts import prompts
from nanoqwen.ladder.report import compare, relative_error, within
from nanoqwen.packfile import open_pack
from nanoqwen.tokenizer import Tokenizer

SMALL = ["--prompts", "4", "--tokens", "6"]


def tiers(report) -> dict[str, str]:
    return {tier.name: tier.status for tier in report.tiers}


def climb(path, tier: str = "graph"):
    with open_pack(path) as pack:
        return run_ladder(pack, tier, prompts=4, tokens=6)


# -------------------------------------------------------------------------------------------------------- sound code


def test_the_whole_ladder_passes(run, plain):
    outcome = run("validate", plain, *SMALL)
    assert outcome.status == 0, outcome.out
    for tier in ("file", "unit", "layer", "graph"):
        assert f"{tier}: passed" in outcome.out
    assert "24 of 24 tokens, 4 prompts" in outcome.out
    assert "the full protocol is --prompts 100 --tokens 64" in outcome.out
    assert outcome.out.splitlines()[-1] == "passed"


@pytest.mark.parametrize("sizes", [tiny.GQA7, tiny.TIED, tiny.Sizes(hidden=192, heads=3, kv_heads=1, context=40)], ids=["7:1", "tied", "short context"])
def test_other_shapes_pass(tmp_path, sizes):
    assert climb(make_pack(tmp_path, "m", sizes)).passed


def test_json_and_all(run, plain):
    report = json.loads(run("validate", plain, "--tier", "unit", "--json").out)
    assert report["passed"] is True
    assert [(tier["name"], tier["status"]) for tier in report["tiers"]] == [("file", "passed"), ("unit", "passed")]
    names = {check["name"] for check in report["tiers"][1]["checks"]}
    for n in (1, 15, 16, 17, 49):
        assert {f"attention, prompt of {n}", f"attention, token {n}", f"KV cache, {n} tokens"} <= names
    assert {"rms_norm", "rope", "swiglu", "argmax", "unpack model.layers.0.mlp.down_proj.weight"} <= names
    listed = run("validate", plain, "--tier", "unit", "--all").out
    assert all(name in listed for name in names)


# --------------------------------------------------------------------------------------- faults, one for each tier


def test_unit_catches_a_rotation_of_the_wrong_pairs(plain, monkeypatch):
    def interleaved(x, cos, sin):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + turned * sin[:, None]

    monkeypatch.setattr(reference, "apply_rope", interleaved)
    report = climb(plain)
    assert tiers(report) == {"file": "passed", "unit": "FAILED", "layer": "not run", "graph": "not run"}
    failed = [check for check in report.tiers[1].checks if not check.passed]
    assert [check.name for check in failed] == ["rope"] and "worst at [" in failed[0].detail


def test_unit_catches_a_cache_that_reads_one_slot_too_many(plain, monkeypatch):
    """Slots without a token hold NaN, so what lies behind the last token shows."""
    in_order = kv.PagedKV._in_order

    def shifted(pool, index, length):
        return in_order(pool, index, pool.shape[2] * len(index))[1 : length + 1]

    monkeypatch.setattr(kv.PagedKV, "_in_order", staticmethod(shifted))
    report = climb(plain, "unit")
    failed = {check.name for check in report.tiers[1].checks if not check.passed}
    assert "KV cache, 15 tokens" in failed and "KV cache, 17 tokens" in failed


def test_layer_catches_a_bias_that_is_dropped(plain, monkeypatch):
    block = reference.block

    def without_bias(x, weights, *rest):
        return block(x, dataclasses.replace(weights, qkv_bias=torch.zeros_like(weights.qkv_bias)), *rest)

    monkeypatch.setattr(reference, "block", without_bias)
    report = climb(plain)
    assert tiers(report) == {"file": "passed", "unit": "passed", "layer": "FAILED", "graph": "not run"}


def test_graph_catches_an_engine_that_loses_a_token(run, plain, monkeypatch):
    prefill = ReferenceEngine._prefill
    monkeypatch.setattr(ReferenceEngine, "_prefill", lambda self, ids: prefill(self, [*ids[:-1], ids[0]]))
    outcome = run("validate", plain, *SMALL)
    assert outcome.status == 1
    assert "layer: passed" in outcome.out and "graph: FAILED" in outcome.out
    assert "margin between its two best" in outcome.out and "step 0" in outcome.out
    assert outcome.out.splitlines()[-1] == "did not pass"


def test_graph_catches_a_rounding_that_units_tolerate(plain, monkeypatch):
    """Logits rounded to a coarse grid: no single operation is wrong, and the tokens are."""
    forward = ReferenceEngine._forward
    monkeypatch.setattr(ReferenceEngine, "_forward", lambda self, ids, position: np.round(forward(self, ids, position) / 2) * 2)
    report = climb(plain)
    assert tiers(report)["layer"] == "passed" and tiers(report)["graph"] == "FAILED"
    check = report.tiers[3].checks[0]
    assert 0 < check.value < 1


# ---------------------------------------------------------------------------------------------- the ladder's own parts


def test_a_nan_is_never_within_a_limit():
    expected = np.ones(4)
    for bad in (np.nan, np.inf):
        check = compare("x", np.array([1, 1, bad, 1], np.float32), expected, 10.0)
        assert not check.passed and "worst at [2]" in check.detail
    assert relative_error(np.ones(3), expected) == float("inf")  # a wrong shape
    assert relative_error(np.array([1, 1, 1, 1.5]), expected) == pytest.approx(0.25)


def test_the_large_model_oracle_agrees_with_float64(plain, monkeypatch):
    """Models too large for float64 are compared with PyTorch in FP32; both oracles must say the same."""
    from nanoqwen.ladder.subject import TorchOracle

    with open_pack(plain) as pack:
        ids = list(range(40, 60))
        x = twins.embed(pack, ids)
        for layer in range(pack.dims.num_layers):
            x = twins.block(pack, layer, x, [len(ids)])
        assert relative_error(TorchOracle(pack, "cpu").logits(ids, 3), twins.head(pack, x)[3:]) < 1e-5
        monkeypatch.setattr(graph, "FLOAT64_BUDGET", 0)
        report = run_ladder(pack, "graph", prompts=4, tokens=6)
    assert report.passed and "PyTorch" in report.tiers[3].oracle


def test_the_large_model_oracle_takes_many_sequences_at_once(plain, monkeypatch):
    from nanoqwen.ladder.subject import TorchOracle

    sequences, starts = [list(range(40, 57)), list(range(70, 80)), [99], list(range(100, 145))], [3, 0, 0, 44]
    with open_pack(plain) as pack:
        oracle = TorchOracle(pack, "cpu")
        alone = [oracle.logits(ids, start) for ids, start in zip(sequences, starts)]
        monkeypatch.setattr(TorchOracle, "ROWS", 28)  # the first three together, the last one alone
        together = list(oracle.all(sequences, starts))
    assert [len(logits) for logits in together] == [14, 10, 1, 1]
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(together, alone))


def test_a_repeat_with_other_bits_is_found(plain, monkeypatch):
    rng = np.random.default_rng(0)
    forward = ReferenceEngine._forward
    monkeypatch.setattr(ReferenceEngine, "_forward", lambda self, ids, position: forward(self, ids, position) * np.float32(1 + 1e-6 * rng.random()))
    report = climb(plain)
    assert [check.passed for check in report.tiers[3].checks] == [True, False] and "bit-equal" in report.tiers[3].checks[1].name


def test_bounds_of_single_elements():
    expected, bound = np.array([1.0, 100.0, 0.0]), np.array([0.1, 1.0, 0.0])
    assert within("x", np.array([1.05, 99.2, 0.0]), expected, bound).passed
    for out, word in (([1.2, 100, 0], "[0]: 1.2"), ([1, 100, 1e-9], "[2]: 1e-09"), ([1, np.nan, 0], "[1]: nan"), ([1, 100], "shape")):
        check = within("x", np.array(out, np.float64), expected, bound)
        assert not check.passed and word in check.detail


def test_varied_prompts_keep_the_lengths_and_use_the_whole_vocabulary(plain):
    with open_pack(plain) as pack:
        planned = graph.plan(Tokenizer.from_pack(pack), 30, 16, 8192, load_settings())
    ids = graph.varied(planned, 152064)
    assert [len(i) for _, i in ids] == [len(i) for _, i in planned]
    assert max(map(max, (i for _, i in ids))) > 150000 and len({tuple(i) for _, i in ids}) > 25
    assert all(len(set(i)) > len(i) / 2 for _, i in ids)


def test_sequences_that_go_through_together_do_not_see_each_other(plain):
    with open_pack(plain) as pack:
        a, b = list(range(40, 57)), list(range(70, 80))
        together = twins.block(pack, 0, twins.embed(pack, a + b), [len(a), len(b)])
        alone = twins.block(pack, 0, twins.embed(pack, b), [len(b)])
    assert relative_error(together[len(a) :], alone) < 1e-14


def test_prompts_are_a_hundred_different_ones_with_edges(plain):
    assert len(set(prompts(100))) == 100
    with open_pack(plain) as pack:
        planned = graph.plan(Tokenizer.from_pack(pack), 24, 16, 8192, load_settings())
    lengths = [len(ids) for _, ids in planned]
    assert len(planned) == 24
    assert {1, 15, 16, 17, 49, 511, 512, 513} <= set(lengths)
    assert any(later < earlier for earlier, later in zip(lengths, lengths[1:])), "a short request follows a long one"
    assert all(len(set(ids)) > 5 for _, ids in planned if len(ids) > 10), "varied text: one repeated token hides errors"


def test_a_context_without_room(run, tmp_path):
    sizes = tiny.Sizes(context=16)
    line = run("validate", make_pack(tmp_path, "m", sizes), "--tokens", "16", "--prompts", "1").error_line()
    assert "context of 16" in line


@pytest.mark.parametrize("tier", ["unit", "graph"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_runs_on_it(run, plain, monkeypatch, tier):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in run("validate", plain, "--tier", tier, "--device", "cuda").error_line()
    assert "there is no device 'tpu'" in run("validate", plain, "--tier", tier, "--device", "tpu").error_line()


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_hopper_engine_without_its_card_is_one_line(run, plain, engine):
    if hopper_problem() is None:
        pytest.skip("a Hopper card is here")
    for words in ([plain, "--tier", "unit"], [plain], ["synthetic:7b"], [plain, "--receipt"]):
        assert run("validate", *words, "--engine", engine).error_line().startswith(f"engine {engine}: ")
    assert "does not run on the CPU" in run("validate", plain, "--engine", engine, "--device", "cpu").error_line()


def test_a_receipt_is_refused_for_what_it_is_not_about(run, plain):
    assert "--engine, eager or graph" in run("validate", plain, "--receipt").error_line()
    assert "--engine, eager or graph" in run("validate", plain, "--receipt", "--engine", "cpu").error_line()
    assert "--tier, --prompts and --tokens" in run("validate", plain, "--receipt", "--engine", "graph", "--tier", "unit").error_line()
    assert "--tier, --prompts and --tokens" in run("validate", plain, "--receipt", "--engine", "graph", "--prompts", "3").error_line()
