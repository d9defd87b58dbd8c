"""The reference decoder against transformers' Qwen2 and against FP64: logits, page and chunk edges, state, extremes.

Tolerance: FP32 logits differ from transformers' by at most 1e-4 (largest seen: 1.6e-5, on logits up to 6.5). Chunked, stepped
and one-go runs may differ by as much, since a matrix product of one row sums in another order than one of many. With the FP16
cache that engines use, logits move by at most 1e-2 (seen: 4e-3) and differ between one go and single steps by at most 1e-3
(seen: 3e-4): the last bits of FP32 decide now and then how a key rounds. Greedy ids must be equal all the same.
"""

from dataclasses import dataclass

import numpy as np
import oracle
import pytest
import tiny
import torch

from nanoqwen.errors import ContextError, InputError, NonFiniteError
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.reference import ReferenceModel

TOLERANCE = 1e-4
HALF_CACHE = 1e-2
HALF_CACHE_STEPS = 1e-3
LENGTHS = [1, 15, 16, 17, 49]


def weights_with_norms(sizes, seed):
    """Random weights with norm weights that are not all one, so that leaving one out shows."""
    tensors, rng = tiny.weights(sizes, seed=seed), np.random.default_rng(seed + 1000)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.values[...] = rng.uniform(0.5, 1.5, tensor.values.shape)
    return tensors


@dataclass(frozen=True)
class Model:
    sizes: tiny.Sizes
    theta: float
    seed: int


MODELS = {
    "gqa2-untied-64": Model(tiny.Sizes(), 1e6, 1),
    "gqa1-tied-64": Model(tiny.Sizes(kv_heads=4, tied=True), 1e4, 2),
    "gqa7-untied-128": Model(tiny.GQA7, 1e6, 3),
    "gqa7-tied-64-odd-width": Model(tiny.Sizes(hidden=256, heads=7, kv_heads=1, tied=True, explicit_head_dim=64), 1e6, 4),
    "gqa2-untied-128-three-layers": Model(tiny.Sizes(layers=3, heads=2, kv_heads=1, context=96), 1e4, 5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoint folders of MODELS, written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, m in MODELS.items():
        tiny.make(root / name, m.sizes, tensors=weights_with_norms(m.sizes, m.seed), config=tiny.config(m.sizes, rope_theta=m.theta))
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def packs(folders, tmp_path_factory):
    """The same models packed."""
    root = tmp_path_factory.mktemp("packs")
    for name in MODELS:
        pack(folders[name], root / f"{name}.nanoqwen")
    return {name: root / f"{name}.nanoqwen" for name in MODELS}


def run(model, ids, chunks=None):
    """Logits [n, vocab] of `ids` from an empty cache, in chunks of the given sizes (the last one repeats)."""
    out, start, chunks = [], 0, list(chunks or [len(ids)])
    while start < len(ids):
        n = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        out.append(model.forward(torch.tensor(ids[start : start + n]), start).numpy())
        start += n
    return np.concatenate(out)


def worst(a, b):
    """Largest difference of two logit arrays that must be finite."""
    assert a.shape == b.shape and np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a.astype(np.float64) - b).max())


# ------------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(folders, name):
    theirs, ours = oracle.qwen2(folders[name]), ReferenceModel.from_checkpoint(folders[name], poison=True)
    for n in LENGTHS:
        ids = tiny.digit_ids(n)
        want = oracle.qwen2_logits(theirs, ids)
        for chunks in ([n], [1], [7], [15, 1, 1, 30], [16]):
            assert worst(run(ours, ids, chunks), want) <= TOLERANCE, (n, chunks)


def test_logits_of_fp16_weights(folders):
    want, _ = oracle.fp64_logits(folders["gqa2-untied-64"], tiny.digit_ids(17))
    exact = run(ReferenceModel.from_checkpoint(folders["gqa2-untied-64"], "fp32"), tiny.digit_ids(17))
    rounded = run(ReferenceModel.from_checkpoint(folders["gqa2-untied-64"], "fp16"), tiny.digit_ids(17))
    assert worst(exact, want) <= TOLERANCE  # the two oracles agree as well
    assert 0 < worst(rounded, exact) <= 1e-3  # BF16 numbers below 2**-14 lose bits in FP16


@pytest.mark.parametrize("name", ["gqa2-untied-64", "gqa7-untied-128"])
def test_rewinding_is_the_same_as_never_having_gone_on(folders, name):
    theirs, ours = oracle.qwen2(folders[name]), ReferenceModel.from_checkpoint(folders[name], poison=True)
    run(ours, tiny.digit_ids(70))
    for keep in (0, 1, 15, 16, 17, 33, 49):
        ids = tiny.digit_ids(70)[:keep] + tiny.digit_ids(90)[70:]
        run(ours, tiny.digit_ids(70))
        got = ours.forward(torch.tensor(ids[keep:]), keep).numpy()
        assert ours.position == len(ids)
        assert worst(got, oracle.qwen2_logits(theirs, ids)[keep:]) <= TOLERANCE


def test_two_models_side_by_side_do_not_touch(folders):
    names = ["gqa2-untied-64", "gqa7-untied-128"]
    alone = [run(ReferenceModel.from_checkpoint(folders[name]), tiny.digit_ids(40), [1]) for name in names]
    both = [ReferenceModel.from_checkpoint(folders[name]) for name in names]
    turns = [[m.forward(torch.tensor([token]), i).numpy() for m in both] for i, token in enumerate(tiny.digit_ids(40))]
    for k in (0, 1):
        assert np.array_equal(np.concatenate([turn[k] for turn in turns]), alone[k])


def test_last_only_is_the_last_row(folders):
    model = ReferenceModel.from_checkpoint(folders["gqa2-untied-64"])
    whole = run(model, tiny.digit_ids(20))
    last = model.forward(torch.tensor(tiny.digit_ids(20)), 0, last_only=True).numpy()
    assert last.shape == (1, 512) and worst(last, whole[-1:]) <= TOLERANCE


def test_sliding_window_keys_that_are_off_change_nothing(tmp_path):
    off = dict(use_sliding_window=False, sliding_window=64, max_window_layers=1)
    absent = dict.fromkeys(off, tiny.ABSENT)
    models = [ReferenceModel.from_checkpoint(tiny.make(tmp_path / f"{i}", config=tiny.config(**keys))) for i, keys in enumerate((off, absent))]
    a, b = (run(m, tiny.digit_ids(200)) for m in models)
    assert np.array_equal(a, b)
    assert worst(a, oracle.qwen2_logits(oracle.qwen2(tmp_path / "0"), tiny.digit_ids(200))) <= TOLERANCE


# ------------------------------------------------------------------------------------------------------------- pack files


@pytest.mark.parametrize("name", MODELS)
def test_a_pack_file_computes_what_the_int4_simulation_computes(folders, packs, name, monkeypatch):
    simulated = run(ReferenceModel.from_checkpoint(folders[name], "int4"), tiny.digit_ids(49))
    with open_pack(packs[name]) as file:
        resident = run(ReferenceModel.from_pack(file, kv_dtype=torch.float32, weights="resident"), tiny.digit_ids(49))
        monkeypatch.setattr("nanoqwen.weights.BLOCK_WEIGHTS", 1 << 14)  # many blocks even here
        streamed = run(ReferenceModel.from_pack(file, kv_dtype=torch.float32, weights="streamed"), tiny.digit_ids(49))
    assert np.array_equal(resident.view(np.uint32), simulated.view(np.uint32))
    assert worst(streamed, resident) <= TOLERANCE
    assert worst(resident, oracle.qwen2_logits(oracle.qwen2(folders[name], int4=True), tiny.digit_ids(49))) <= TOLERANCE
    # INT4 is another model than FP32, or the simulation simulates nothing.
    assert worst(resident, run(ReferenceModel.from_checkpoint(folders[name]), tiny.digit_ids(49))) > 1e-2


def test_the_memory_policy_says_what_it_chose(packs, monkeypatch):
    with open_pack(packs["gqa2-untied-64"]) as file:
        assert ReferenceModel.from_pack(file).weights.description == "FP32 weights in memory (5 MB)"
        monkeypatch.setattr("nanoqwen.weights.available_memory", lambda device: 8_000_000)
        chosen = ReferenceModel.from_pack(file)
        assert chosen.weights.description == "INT4 weights, dequantised at each use (as FP32 they need 5 MB, half of the free memory is 4 MB)"
        assert worst(run(chosen, tiny.digit_ids(20)), run(ReferenceModel.from_pack(file, weights="resident"), tiny.digit_ids(20))) <= 1e-3
        with pytest.raises(InputError, match="auto, resident, streamed"):
            ReferenceModel.from_pack(file, weights="fast")


def test_a_pack_file_stays_in_its_file_when_streamed(packs):
    with open_pack(packs["gqa2-untied-64"]) as file:
        model = ReferenceModel.from_pack(file, weights="streamed")
        words, _ = file.int4("model.layers.0.self_attn.o_proj.weight")
        assert model.weights.layers[0].o.words.data_ptr() == words.ctypes.data
        assert model.weights.head.weight.data_ptr() == file.fp16("lm_head.weight").ctypes.data
        assert model.weights.embedding.data_ptr() == file.fp16("model.embed_tokens.weight").ctypes.data


# --------------------------------------------------------------------------------------- greedy text at the edges (G01-G06)


def greedy_ids(model, prompt, count):
    """`count` greedy ids after `prompt`, padding masked; decodes one by one."""
    logits, ids = run(model, prompt, [512])[-1], []
    for i in range(count):
        ids.append(oracle.greedy(logits))
        logits = model.forward(torch.tensor(ids[-1:]), len(prompt) + i).numpy()[-1]
    return ids


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(pack file, transformers with the same INT4 weights) of the plain fixture."""
    root = tmp_path_factory.mktemp("plain")
    pack(tiny.make(root / "S"), root / "S.nanoqwen")
    with open_pack(root / "S.nanoqwen") as file:
        yield file, oracle.qwen2(root / "S", int4=True)


@pytest.mark.parametrize("n", [15, 16, 17, 49, 511, 512, 513])
def test_greedy_text_at_page_and_chunk_edges(plain, n):
    file, theirs = plain
    model = ReferenceModel.from_pack(file, poison=True)  # FP16 cache, as the engine has it
    ids = greedy_ids(model, tiny.digit_ids(n), 40)
    assert oracle.same_greedy_ids(theirs, tiny.digit_ids(n), ids)
    # One token at a time from the start: the same ids, and logits within the tolerance of the FP16 cache.
    one_go = run(model, tiny.digit_ids(n))[-1:]
    stepped = [model.forward(torch.tensor([token]), i, last_only=True) for i, token in enumerate(tiny.digit_ids(n))]
    assert worst(stepped[-1].numpy(), one_go) <= HALF_CACHE_STEPS
    assert worst(one_go, oracle.qwen2_logits(theirs, tiny.digit_ids(n), last=1)) <= HALF_CACHE


@pytest.mark.parametrize("n", [4095, 4096])
def test_greedy_text_at_the_4096_boundary(plain, n):
    file, theirs = plain
    model = ReferenceModel.from_pack(file, poison=True)
    assert oracle.same_greedy_ids(theirs, tiny.digit_ids(n), greedy_ids(model, tiny.digit_ids(n), 20))


def test_a_second_request_finds_nothing_of_the_first(plain):
    file, _ = plain
    used, fresh = (ReferenceModel.from_pack(file, poison=True) for _ in range(2))
    greedy_ids(used, tiny.digit_ids(600), 20)
    used.truncate(0)
    a, b = (run(m, tiny.digit_ids(77)[-5:]) for m in (used, fresh))
    assert np.array_equal(a, b)
    assert greedy_ids(used, tiny.digit_ids(77)[-5:], 40) == greedy_ids(fresh, tiny.digit_ids(77)[-5:], 40)


# ---------------------------------------------------------------------------------------------------------------- extremes


def test_hidden_values_beyond_fp16(tmp_path):
    """B09: one residual channel in the millions; FP32 carries it, logits equal FP64's.

    That channel drowns the others in every RMSNorm, so the text hardly varies, in FP64 as well.
    """
    tensors = tiny.weights()
    tensors["model.layers.0.mlp.down_proj.weight"].values[5] *= 2000
    tensors["model.layers.0.post_attention_layernorm.weight"].values[...] *= 50
    pack(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "S.nanoqwen")
    want, largest = oracle.fp64_logits(tmp_path / "S", tiny.digit_ids(49), packed=True)
    assert largest > 1e6
    with open_pack(tmp_path / "S.nanoqwen") as file:
        assert worst(run(ReferenceModel.from_pack(file, kv_dtype=torch.float32), tiny.digit_ids(49)), want) <= TOLERANCE
        engine_like = ReferenceModel.from_pack(file)
        assert worst(run(engine_like, tiny.digit_ids(49)), want) <= HALF_CACHE
        ids = greedy_ids(engine_like, tiny.digit_ids(49), 30)
        assert oracle.same_greedy_ids(oracle.qwen2(tmp_path / "S", int4=True), tiny.digit_ids(49), ids)


def test_nan_at_run_time_names_the_layer(tmp_path):
    """B11: norm weights of 3e38 in the middle layer of three; finite as stored, not when used."""
    sizes = tiny.Sizes(layers=3)
    tensors = tiny.weights(sizes)
    tensors["model.layers.1.post_attention_layernorm.weight"].values[...] = 3e38
    model = ReferenceModel.from_checkpoint(tiny.make(tmp_path / "S", sizes, tensors=tensors), poison=True)
    for position in (0, 0):  # the second time finds the model as it was
        with pytest.raises(NonFiniteError, match="after layer 1 of 3") as caught:
            model.forward(torch.tensor(tiny.digit_ids(17)), position)
        assert caught.value.layer == 1
        assert (model.position, model.kv.allocator.used_pages) == (0, 0)


def test_logits_that_overflow_are_told_from_layers(tmp_path):
    tensors = tiny.weights()
    tensors["model.norm.weight"].values[...] = 3e38
    model = ReferenceModel.from_checkpoint(tiny.make(tmp_path / "S", tensors=tensors))
    with pytest.raises(NonFiniteError, match="final norm or lm_head") as caught:
        model.forward(torch.tensor(tiny.digit_ids(3)), 0)
    assert caught.value.layer is None


def test_a_context_that_overflows_is_refused_before_anything_changes(folders):
    model = ReferenceModel.from_checkpoint(folders["gqa2-untied-128-three-layers"], context_limit=50)
    before = run(model, tiny.digit_ids(49))[-1]
    with pytest.raises(ContextError, match="51 tokens do not fit a context of 50"):
        model.forward(torch.tensor(tiny.digit_ids(2)), 49)
    assert model.position == 49
    assert worst(model.forward(torch.tensor(tiny.digit_ids(49)[-1:]), 48).numpy()[0], before) <= TOLERANCE
    with pytest.raises(InputError, match="97 tokens is more than the model's 96"):
        ReferenceModel.from_checkpoint(folders["gqa2-untied-128-three-layers"], context_limit=97)


def test_a_checkpoint_that_fp16_cannot_hold_is_refused_by_name(tmp_path):
    tensors = tiny.weights()
    tensors["model.norm.weight"].values[7] = 1e6
    folder = tiny.make(tmp_path / "S", tensors=tensors)
    ReferenceModel.from_checkpoint(folder, "fp32")
    with pytest.raises(InputError, match="model.norm.weight: holds a value that FP16"):
        ReferenceModel.from_checkpoint(folder, "int4")
    with pytest.raises(InputError, match="use one of fp32, fp16, int4"):
        ReferenceModel.from_checkpoint(folder, "int8")
