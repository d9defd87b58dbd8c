"""Tokens chosen on a Hopper GPU: the sampling kernel against the host's sampler, and streams against single steps."""

import dataclasses

import numpy as np
import pytest

from nanoqwen.config import Dims
from nanoqwen.engines import HOPPER, hopper_problem
from nanoqwen.errors import ContextError, DeviceError
from nanoqwen.sampling import DEVICE_TEMPERATURES, GREEDY, Sampler, SamplingParams
from nanoqwen.synthetic import synthetic_dims

if problem := hopper_problem():
    pytest.skip(f"needs a Hopper GPU: {problem}", allow_module_level=True)

import cupy
from cardsample import CardSample

from nanoqwen.cuda.constants import LaunchShape, constants_header
from nanoqwen.cuda.launch import Kernels
from nanoqwen.cuda.weights import synthesise
from nanoqwen.engines.hopper import kernel_cache, make_engine

SEVEN = Dims.qwen2_5_coder_7b()
MODELS = {
    "embedded": dataclasses.replace(synthetic_dims("demo"), max_position=1024),
    "two layers of the 7B": dataclasses.replace(SEVEN, num_layers=2, max_position=1024),
}
RULES = [
    {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8037}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8037},
    {"temperature": 1.5, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 2.0, "top_k": 1_000_000}, {"temperature": 30.0, "top_p": 0.9993},
    {"temperature": DEVICE_TEMPERATURES[0]}, {"temperature": DEVICE_TEMPERATURES[1], "top_k": 50, "top_p": 0.3011},
]  # fmt: skip


def rows(size):
    rng = np.random.default_rng(size)
    yield rng.normal(0, 3, size)
    yield rng.normal(0, 15, size)
    yield rng.integers(-2, 3, size)
    yield np.zeros(size)
    yield np.where(rng.random(size) < 0.01, 5.0, rng.normal(-5, 1, size))


@pytest.mark.parametrize("params", RULES, ids=str)
@pytest.mark.parametrize("dims", [SEVEN, synthetic_dims("demo")], ids=["7b", "embedded"])
def test_the_kernel_draws_what_the_sampler_draws(dims, params):
    card = CardSample(dims, kernel_cache())
    for k, logits in enumerate(rows(dims.vocab)):
        logits = logits.astype(np.float32)
        host, mine = (Sampler(SamplingParams(seed=k, **params), dims.vocab - 399, banned_ids=[3, 1000, dims.vocab - 400]) for _ in range(2))
        card.set(logits, mine)
        assert [card.pick(mine) for _ in range(10)] == [host.pick(logits) for _ in range(10)]


def test_what_is_not_finite_is_passed_on():
    card = CardSample(synthetic_dims("demo"), kernel_cache())
    card.set(np.zeros(card.vocab, np.float32), Sampler(SamplingParams(temperature=1.0, seed=0), card.vocab))
    card.place(3, best=-1)
    card.launch(card.stream)
    card.stream.synchronize()
    assert card.told[3] == -1 and card.step.get().tolist() == [0, 4, -1], "and the next step still finds a row"


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def weights(request):
    dims = MODELS[request.param]
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    made = synthesise(dims, 128, Kernels(constants_header(dims, 128, LaunchShape(sms)), kernel_cache(), ["setup/synthetic.cu"]))
    cupy.cuda.runtime.deviceSynchronize()
    return made


@pytest.fixture(params=HOPPER)
def engine(request, weights):
    with make_engine(weights, request.param, cache=kernel_cache()) as opened:
        yield opened


def prompt(engine, count):
    return [pow(7, i, 9973) % engine.dims.vocab for i in range(1, count + 1)]


CHOICES = {"greedy": GREEDY, "drawn": SamplingParams(temperature=1.0, top_k=40, top_p=0.9037, seed=2)}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("length", [1, 15, 16, 500])
def test_a_stream_is_what_single_steps_and_the_host_give(engine, choice, length):
    count, ids = 200, prompt(engine, length)
    chooser = Sampler(CHOICES[choice], engine.dims.vocab)
    first = engine.prefill_next(ids, chooser)
    chained = [first, *engine.stream(first, count - 1, chooser)]
    engine.reset()
    chooser = Sampler(CHOICES[choice], engine.dims.vocab)
    single = [engine.prefill_next(ids, chooser)]
    while len(single) < count:
        single.append(engine.decode_next(single[-1], chooser))
    assert chained == single
    engine.reset()
    host, logits, by_hand = Sampler(CHOICES[choice], engine.dims.vocab), engine.prefill(ids), []
    for token in chained[:50]:
        by_hand.append(host.pick(logits))
        logits = engine.decode(token)
    assert by_hand == chained[:50]


@pytest.mark.parametrize("choice", CHOICES)
def test_engines_of_the_same_kernels_and_every_repeat_give_the_same(weights, choice):
    runs = {}
    for name in (*HOPPER, *HOPPER):
        with make_engine(weights, name, cache=kernel_cache()) as engine:
            chooser = Sampler(CHOICES[choice], engine.dims.vocab)
            first = engine.prefill_next(prompt(engine, 30), chooser)
            ids = [first, *engine.stream(first, 150, chooser)]
            assert runs.setdefault(name, ids) == ids
    assert runs["eager"] == runs["graph"] and runs["persistent"][:8] == runs["graph"][:8]


def test_a_stream_that_ends_early_leaves_the_cache_as_single_steps_do(engine):
    chooser, ids = Sampler(GREEDY, engine.dims.vocab), prompt(engine, 30)
    first = engine.prefill_next(ids, chooser)
    stream = engine.stream(first, 300, chooser)
    got = [next(stream) for _ in range(19)]
    stream.close()
    after = engine.decode(5)
    engine.reset()
    engine.prefill(ids)
    for token in [first, *got[:-1]]:
        engine.decode(token)
    assert np.array_equal(engine.decode(5), after)


@pytest.mark.parametrize("name", HOPPER[1:])
def test_the_context_is_the_limit(weights, name):
    with make_engine(weights, name, cache=kernel_cache(), context_limit=100) as engine:
        chooser = Sampler(GREEDY, engine.dims.vocab)
        with pytest.raises(ContextError, match="a prompt of 101 tokens is longer than the context of 100 tokens"):
            engine.prefill(prompt(engine, 101))
        first = engine.prefill_next(prompt(engine, 30), chooser)
        with pytest.raises(ContextError):
            engine.stream(first, 71, chooser)
        ids = list(engine.stream(first, 70, chooser))
        assert engine.position == 100
        engine.rewind(99)
        assert engine.decode_next(ids[-2], chooser) == ids[-1]


@pytest.mark.parametrize("name", HOPPER[1:])
def test_out_of_memory_is_one_line_and_the_engine_goes_on(weights, monkeypatch, name):
    pool = cupy.get_default_memory_pool()
    monkeypatch.setattr("nanoqwen.cuda.pages.DevicePages.__init__.__defaults__", (64,))
    with make_engine(weights, name, cache=kernel_cache()) as engine:
        chooser, ids = Sampler(GREEDY, engine.dims.vocab), prompt(engine, 40)
        first = engine.prefill_next(ids, chooser)
        expected = [first, *engine.stream(first, 60, chooser)]  # the pool moves on the way
        engine.reset()
        assert engine.prefill_next(ids, chooser) == first
        try:
            pool.free_all_blocks()
            pool.set_limit(size=pool.used_bytes() + 4096)
            got = [first]
            with pytest.raises(DeviceError, match="no memory left for more KV pages after 128 tokens") as caught:
                for token in engine.stream(first, 400, chooser):
                    got.append(token)
            assert "\n" not in str(caught.value) and got[:61] == expected and engine.position == 128
            with pytest.raises(DeviceError, match="no memory left"):
                engine.prefill(prompt(engine, 600))
            assert engine.position == 128
            engine.rewind(40)
            assert list(engine.stream(first, 60, chooser)) == expected[1:]
        finally:
            pool.set_limit(size=0)
        engine.rewind(128 - 28)
        assert len(list(engine.stream(expected[-1], 300, chooser))) == 300
