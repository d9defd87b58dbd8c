"""PyTorch as a peer: its decoder computes what a dense evaluation computes, faults are seen, and every way in which it can be missing."""

import shutil
import sys
from dataclasses import replace

import pytest
import torch

from nanoqwen import model
from nanoqwen.bench import peer_torch, torch_decoder
from nanoqwen.bench.peers import Skipped
from nanoqwen.bench.protocol import Protocol, mbu
from nanoqwen.config import Dims

SEVEN = Dims.qwen2_5_coder_7b()
SMALL = peer_torch.small_dims(SEVEN, 128)
PROTOCOL = Protocol.standard(prompt_tokens=12, gen_tokens=5, warmup=1, runs=2)


def eager(function, **asked):
    """In place of torch.compile, where it is not what is tested."""
    assert asked["fullgraph"] is True
    return function


# -------------------------------------------------------------------------------------------------- computes the right thing


@pytest.mark.parametrize("dims, group", [
    (SMALL, 128),
    (replace(SMALL, head_dim=64, tied=True, num_heads=12, num_kv_heads=2), 64),
    (replace(SMALL, num_layers=6, num_heads=4, rope_theta=10_000.0), 32),
])  # fmt: skip
def test_logits_are_those_of_the_dense_weights(dims, group):
    assert 0 < peer_torch.disagreement(dims, group, "cpu") < peer_torch.LIMIT_SMALL / 3


def _shifted(quantised):
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised.codes.roll(2, dims=1), 1)


def _of_other_heads(q, keys, values, seen, right=torch_decoder.attend):
    return right(q, keys.roll(1, dims=0), values, seen)


@pytest.mark.parametrize("thing, name, wrong", [
    (torch_decoder.Quantised, "packed", _shifted),
    (torch_decoder, "rotate", lambda heads, cos, sin: heads),
    (torch_decoder, "attend", lambda q, keys, values, seen, right=torch_decoder.attend: right(q, keys, values, torch.ones_like(seen))),
    (torch_decoder, "attend", _of_other_heads),
], ids=["codes moved", "no RoPE", "empty slots seen", "keys of another head"])  # fmt: skip
def test_a_fault_is_far_above_the_limit(monkeypatch, thing, name, wrong):
    monkeypatch.setattr(thing, name, wrong)
    assert peer_torch.disagreement(SMALL, 128, "cpu") > 2 * peer_torch.LIMIT_SMALL
    monkeypatch.setattr(torch, "compile", eager)
    with pytest.raises(Skipped, match="differ by .* so its speed means nothing"):
        peer_torch.run(SMALL, 128, PROTOCOL, "cpu", None)


def test_quantising_keeps_each_weight_within_half_a_step():
    torch.manual_seed(0)
    weight = torch.randn(16, 512)
    made = torch_decoder.Quantised.of(weight, 128)
    assert made.codes.amin() == 0 and made.codes.amax() == 15 and made.scales_and_zeros.shape == (4, 16, 2)
    step = made.scales_and_zeros[..., 0].float().T.repeat_interleave(128, dim=1)
    # BF16 scale and zero point: the ends of a group may be out of reach by a little more.
    assert bool(((made.dense() - weight).abs() < 0.6 * step).all())


def test_a_second_pass_over_a_seed_gives_the_same_weights():
    one, two = (torch_decoder.Weights(SMALL, 128, "cpu", seed) for seed in (3, 3))
    assert all(torch.equal(a.down.codes, b.down.codes) and torch.equal(a.qkv_bias, b.qkv_bias) for a, b in zip(one.layers(), two.layers()))
    assert not torch.equal(one.head, torch_decoder.Weights(SMALL, 128, "cpu", 4).head)


def test_the_step_is_one_graph_and_compiled_it_says_the_same():
    """The graph that torch.compile sees has no break (``fullgraph``) and keeps what the step changes: cache, ids, position."""
    prompt = torch.arange(12)
    with torch.no_grad():
        decoder = torch_decoder.Decoder(torch_decoder.Weights(SMALL, 128, "cpu"), 24)
        decoder.prefill(prompt)
        right = torch.cat([decoder.step() for _ in range(4)]), decoder.ids.clone()
        step = torch.compile(decoder.step, fullgraph=True, backend="aot_eager")
        decoder.prefill(prompt)
        found = torch.cat([step() for _ in range(4)])
    assert int(decoder.position) == 16 and torch.equal(decoder.ids, right[1]) and int((decoder.ids != 0).sum()) > 12
    assert peer_torch._error(found, right[0]) < peer_torch.LIMIT_SMALL


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="PyTorch's compiler for the CPU needs g++")
@pytest.mark.filterwarnings("ignore::EncodingWarning", "ignore::DeprecationWarning")  # PyTorch's own
def test_measured_with_the_compiler_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    results, samples = peer_torch.run(replace(SMALL, num_layers=1), 128, PROTOCOL, "cpu", 20.0, options={})
    assert results["check"]["compiled_against_eager"] < peer_torch.LIMIT_FULL and results["same_ids_in_every_run"] is True
    assert results["setup"]["compile_s"] > results["itl_ms"] / 1e3 and "without a CUDA graph" in results["description"]
    assert len(samples["runs"]) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel of a card has its own order of codes; no NVIDIA GPU here")
def test_the_kernel_of_a_card_computes_the_same_in_one_cuda_graph():
    for dims, group in ((SMALL, 128), (replace(SMALL, head_dim=64, tied=True), 64)):
        assert peer_torch.disagreement(dims, group, "cuda") < peer_torch.LIMIT_SMALL / 3
    results, _ = peer_torch.run(replace(SMALL, num_layers=1), 128, PROTOCOL, "cuda", 2000.0)
    assert results["cuda_graph"] is True and results["same_ids_in_every_run"] is True


# -------------------------------------------------------------------------------------------------------------- the numbers


def test_what_the_book_reads(monkeypatch):
    monkeypatch.setattr(torch, "compile", eager)
    results, samples = peer_torch.run(SMALL, 128, PROTOCOL, "cpu", 20.0)
    assert results["itl_ms"] > 0 and results["ttft_ms"] > 0 and results["tokens_per_s"] == pytest.approx(1e3 / results["itl_ms"], rel=1e-3)
    assert results["mbu"] == mbu(results["bytes_per_token"], results["itl_ms"], 20.0) and results["depth"] == 12
    assert min(r["itl_ms"] for r in samples["runs"]) == results["spread"]["itl_ms"]["min"] and results["versions"]["torch"] == torch.__version__
    assert results["compile"] == {"fullgraph": True, **peer_torch.OPTIONS} and results["cuda_graph"] is False
    assert results["deviations"] == list(peer_torch.DEVIATIONS)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_ours_and_a_zero_point_a_group(tied):
    """Codes, head, norms and biases take what they take here; a scale and a zero point take 4 bytes where a scale alone takes 2."""
    dims = replace(SMALL, tied=tied)
    with torch.no_grad():
        decoder = torch_decoder.Decoder(torch_decoder.Weights(dims, 128, "cpu"), 16)
    ours = model.bytes_per_token(dims, 128, 0)
    assert decoder.bytes_of_weights() == ours["total"] + ours["scales"]
    embedding = dims.vocab * dims.hidden * 2
    assert decoder.stored_bytes() == decoder.bytes_of_weights() - ours["embed_row"] + (0 if tied else embedding)


# ------------------------------------------------------------------------------------------------------------ what is missing


def found(monkeypatch, *, asked=True, engines=("graph",), device=None, dims=SEVEN, group=128, card=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "a card")
    return peer_torch.find(asked, engines, device, dims, group)


def test_it_is_measured_on_the_engines_card(monkeypatch):
    assert found(monkeypatch) == "cuda" and found(monkeypatch, device="cuda:1") == "cuda:1"
    assert found(monkeypatch, asked=False, card=None) is None, "not asked for is no complaint"


@pytest.mark.parametrize("case, said", [
    ({"card": None}, "sees no NVIDIA GPU"),
    ({"engines": ("cpu",)}, "give --engine graph"),
    ({"device": "cpu", "engines": ("reference",)}, "is measured on an NVIDIA GPU"),
    ({"card": (7, 5)}, "a card has no BF16 tensor cores"),
    ({"group": 16}, "takes groups of 32, 64, 128, 256, not 16"),
    ({"dims": replace(SEVEN, intermediate=100)}, "takes no matrix of 3584 x 100 in groups of 128"),
])  # fmt: skip
def test_what_is_missing_is_named(monkeypatch, case, said):
    with pytest.raises(Skipped, match=said):
        found(monkeypatch, **case)


def test_an_old_pytorch_is_named(monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", object())
    with pytest.raises(Skipped, match="has no _convert_weight_to_int4pack; use 2.5 or newer"):
        found(monkeypatch)


@pytest.mark.parametrize("error, said", [
    (RuntimeError("\nno C compiler\nsecond line"), "RuntimeError: no C compiler$"),
    (torch.cuda.OutOfMemoryError(), "OutOfMemoryError: no message$"),
])  # fmt: skip
def test_whatever_fails_in_pytorch_is_one_line(monkeypatch, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(Skipped, match=said):
        peer_torch.run(SMALL, 128, PROTOCOL, "cpu", None)


def test_a_compiled_step_that_differs_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda: function() + 1)
    with pytest.raises(Skipped, match="its compiled decode step and the eager one differ"):
        peer_torch.run(SMALL, 128, PROTOCOL, "cpu", None)
