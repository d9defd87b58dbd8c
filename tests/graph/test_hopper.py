"""The Hopper engines against the reference, on a Hopper GPU: page edges, chunks, model shapes, bit-equal repeats.

The reference runs on the same card through PyTorch where that sees it, else on the CPU, with the same FP16 cache. Limits are
three times what was seen on an H200: activations travel as 16-bit fixed point in decode and as FP16 in prefill, and the cache is FP16.
"""

import dataclasses

import numpy as np
import pytest
import torch

from nanoqwen.bench.sanitize_run import write_pack
from nanoqwen.config import Dims
from nanoqwen.engines import HOPPER, hopper_problem, open_engine
from nanoqwen.packfile import open_pack
from nanoqwen.reference import ReferenceModel
from nanoqwen.synthetic import synthetic_dims

if problem := hopper_problem():
    pytest.skip(f"needs a Hopper GPU: {problem}", allow_module_level=True)

SEVEN = Dims.qwen2_5_coder_7b()
MODELS = {
    "like the embedded one": (dataclasses.replace(synthetic_dims("demo"), num_layers=3), 128),
    "heads of 64, group 64, tied": (Dims(2, 448, 1024, 7, 1, 64, 1000, 1024, tied=True), 64),
    "one layer of the 7B": (dataclasses.replace(SEVEN, num_layers=1, vocab=4096, max_position=1024), 128),
}
PREFILL_LIMIT, DECODE_LIMIT = 2e-3, 1.5e-3
#: The persistent kernel adds in another order, and reads its own rows of the cache, which may be rounded to the other neighbour.
SAME_NUMBERS = 1e-3


def ids(count: int, vocab: int) -> list[int]:
    """Varied ids: with one repeated token all values are equal, and page errors cancel."""
    return [pow(7, i, 9973) % vocab for i in range(count)]


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def model(request, tmp_path_factory):
    dims, group = MODELS[request.param]
    path = tmp_path_factory.mktemp("hopper") / "model.nanoqwen"
    write_pack(path, dims, group)
    with open_pack(path) as pack:
        reference = ReferenceModel.from_pack(pack, device="cuda" if torch.cuda.is_available() else "cpu", kv_dtype=torch.float16)

        def expected(tokens: list[int], position: int) -> np.ndarray:
            reference.truncate(position)
            return reference.forward(torch.tensor(tokens), position, last_only=True)[0].cpu().numpy()

        yield pack, expected


@pytest.fixture(params=HOPPER)
def engine(request, model):
    with open_engine(model[0], request.param) as opened:
        yield opened


@pytest.mark.parametrize("length", [1, 15, 16, 17, 49, 511, 512, 513])
def test_prefill_and_the_steps_after_it(engine, model, length):
    _, expected = model
    tokens = ids(length + 4, engine.dims.vocab)
    assert error(engine.prefill(tokens[:length]), expected(tokens[:length], 0)) < PREFILL_LIMIT
    for at in range(length, length + 4):
        ours, theirs = engine.decode(tokens[at]), expected(tokens[at : at + 1], at)
        assert error(ours, theirs) < DECODE_LIMIT and ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("more", [1, 17, 65, 130])
def test_a_prompt_goes_on_where_another_ended(engine, model, more):
    """A few tokens behind many, as a conversation goes on: their attention is another kernel's, unless they are many for a small model."""
    _, expected = model
    tokens, before = ids(700 + more, engine.dims.vocab), 700
    engine.prefill(tokens[:before])
    expected(tokens[:before], 0)
    assert error(engine.prefill(tokens[before:]), expected(tokens[before:], before)) < PREFILL_LIMIT


@pytest.mark.parametrize("length", [2, 16, 17, 33, 512, 513])
def test_a_prompt_ends_as_a_step_does(engine, length):
    """A prompt's last token goes through the last layer as a step does, from what prefill has left of it."""
    tokens = ids(length, engine.dims.vocab)
    whole = engine.prefill(tokens)
    engine.rewind(length - 1)
    assert error(engine.decode(tokens[-1]), whole) < PREFILL_LIMIT


def test_decode_alone_from_nothing_and_bit_equal_repeats(engine, model):
    _, expected = model
    tokens = ids(40, engine.dims.vocab)
    for at, token in enumerate(tokens):
        ours = engine.decode(token)
        assert error(ours, expected([token], at)) < DECODE_LIMIT
    engine.rewind(39)
    assert np.array_equal(engine.decode(tokens[39]), ours)


def test_a_short_sequence_after_a_long_one_sees_none_of_it(engine, model):
    tokens = ids(600, engine.dims.vocab)
    fresh = engine.prefill(tokens[5:10])
    engine.reset()
    engine.prefill(tokens)
    engine.reset()
    assert np.array_equal(engine.prefill(tokens[5:10]), fresh)


def test_engines_of_the_same_kernels_give_the_same_bits_and_the_persistent_one_the_same_numbers(model):
    tokens = ids(60, model[0].dims.vocab)
    results = {}
    for name in HOPPER:
        with open_engine(model[0], name) as opened:
            results[name] = np.stack([opened.prefill(tokens[:30]), *(opened.decode(t) for t in tokens[30:])])
    assert np.array_equal(results["eager"], results["graph"])
    assert error(results["persistent"], results["graph"]) < SAME_NUMBERS


def test_the_card_makes_the_same_synthetic_weights(model):
    import cupy

    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.launch import Kernels
    from nanoqwen.cuda.weights import synthesise, upload

    pack, _ = model
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    kernels = Kernels(constants_header(pack.dims, pack.group_size, LaunchShape(sms)), None, ["setup/synthetic.cu"])
    theirs, ours = upload(pack), synthesise(pack.dims, pack.group_size, kernels)
    for a, b in zip(theirs.layers, ours.layers):
        for name in vars(a):
            left, right = getattr(a, name), getattr(b, name)
            assert bool((getattr(left, "bundles", left) == getattr(right, "bundles", right)).all()), name
    assert bool((theirs.head == ours.head).all()) and bool((theirs.embedding == ours.embedding).all())
