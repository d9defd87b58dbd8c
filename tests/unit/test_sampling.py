"""nanoqwen/sampling.py: greedy is argmax, a seed is a text, and the kept sets are those of transformers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from nanoqwen.errors import InputError, NonFiniteError
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams, penalize, softmax, top_k_ids, top_p_ids


def draws(params: SamplingParams, logits, count: int, valid_ids: int | None = None) -> list[int]:
    logits = np.asarray(logits, dtype=np.float32)
    sampler = Sampler(params, logits.size if valid_ids is None else valid_ids)
    return [sampler.pick(logits) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------------ greedy

def test_greedy_is_argmax_with_the_lowest_id_on_a_tie():
    assert draws(GREEDY, [0, 3, 1, 3], 3) == [1, 1, 1]
    assert draws(GREEDY, [-5, -5, -5], 1) == [0]


def test_temperature_zero_ignores_what_only_narrows_the_draw():
    params = SamplingParams(temperature=0, top_p=0.9, top_k=5, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draws(params, np.arange(100) % 97, 20) == [96] * 20


def test_padding_and_ids_without_a_token_are_never_drawn():
    logits = np.zeros(512, dtype=np.float32)
    logits[300:] = 50
    logits[7] = 40
    for temperature in (0.0, 1.0, 100.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=0), 261, banned_ids=[7, 259])
        drawn = {sampler.pick(logits) for _ in range(300)}
        assert max(drawn) < 261 and not drawn & {7, 259}


def test_padding_may_hold_anything():
    logits = np.zeros(8, dtype=np.float32)
    logits[6:] = np.nan
    logits[3] = 1
    assert Sampler(GREEDY, 6).pick(logits) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_stop_the_run(bad, temperature):
    logits = np.zeros(16, dtype=np.float32)
    logits[5] = bad
    with pytest.raises(NonFiniteError, match=r"not finite \(id 5"):
        Sampler(SamplingParams(temperature=temperature), 16).pick(logits)


# ------------------------------------------------------------------------------------------------------------------- seeds

def test_same_seed_same_draws_at_temperature_one():
    logits = np.random.default_rng(0).normal(0, 1, 50)
    runs = [draws(SamplingParams(temperature=1.0, seed=seed), logits, 12) for seed in range(1, 21)]
    assert runs[0] == draws(SamplingParams(temperature=1.0, seed=1), logits, 12)
    assert len({tuple(run) for run in runs}) > 15


def test_draws_of_a_seed_are_fixed():
    """These numbers may never change: PCG64's raw stream is the same in every numpy."""
    assert draws(SamplingParams(temperature=1.0, seed=1), np.zeros(1000), 8) == [511, 950, 144, 948, 311, 423, 827, 409]


def test_a_seed_does_not_set_the_temperature():
    assert draws(SamplingParams(seed=5), [0, 1, 0.9], 20) == [1] * 20


def test_a_run_without_a_seed_can_be_repeated():
    params = SamplingParams(temperature=1.0)
    assert draws(params, np.zeros(100), 10) == draws(SamplingParams(temperature=1.0, seed=params.seed), np.zeros(100), 10)
    assert params.seed != SamplingParams(temperature=1.0).seed


def test_frequencies_follow_the_probabilities():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    for temperature, expected in ((1.0, [0.5, 0.25, 0.125, 0.125]), (0.5, [16 / 22, 4 / 22, 1 / 22, 1 / 22])):
        counts = np.bincount(draws(SamplingParams(temperature=temperature, seed=11), logits, 20_000), minlength=4)
        assert np.abs(counts / 20_000 - expected).max() < 0.012  # 3.4 standard deviations of the largest


def test_extreme_temperatures():
    logits = np.random.default_rng(2).normal(0, 20, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(draws(SamplingParams(temperature=1e-300, seed=0), logits, 20)) == {int(logits.argmax())}
        assert len(set(draws(SamplingParams(temperature=1e300, seed=0), logits, 200))) > 40


# ---------------------------------------------------------------------------------------------- against transformers' steps

@pytest.fixture(scope="module")
def hf():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")

    def apply(name: str, scores: np.ndarray, *args, history=(0,)) -> np.ndarray:
        step = getattr(process, name)(*args)
        return step(torch.tensor([list(history)]), torch.tensor(scores, dtype=torch.float64)[None])[0].numpy()

    return apply


def logit_rows():
    rng = np.random.default_rng(4)
    for size in (1, 2, 5, 100, 3000):
        for scale in (0.1, 1, 4, 20):
            yield rng.normal(0, scale, size)
    yield np.zeros(50)
    yield rng.integers(0, 4, 200).astype(float)  # many ties


def test_top_k_keeps_what_transformers_keeps(hf):
    for scores in logit_rows():
        for k in (1, 2, 20, 10_000):
            assert top_k_ids(scores, k).tolist() == np.flatnonzero(np.isfinite(hf("TopKLogitsWarper", scores, k))).tolist()
        assert top_k_ids(scores, 0).tolist() == list(range(scores.size))


def test_top_p_keeps_what_transformers_keeps(hf):
    for scores in logit_rows():
        for p in (0.01, 0.5, 0.9, 0.999):
            ours, theirs = top_p_ids(softmax(scores), p), np.flatnonzero(np.isfinite(hf("TopPLogitsWarper", scores, p)))
            if np.unique(scores).size == scores.size:
                assert ours.tolist() == theirs.tolist()
            else:  # which of several equals stay is not laid down there; ours are the lowest ids
                assert abs(ours.size - theirs.size) <= 1
                assert softmax(scores)[ours].sum() >= p - 1e-12


def test_top_p_of_equals_takes_the_lowest_ids():
    assert top_p_ids(np.full(8, 1 / 8), 0.25).tolist() == [0, 1]
    assert top_p_ids(np.tile([9 / 8192, 7 / 8192], 512), 0.28125).tolist() == list(range(0, 512, 2))
    assert top_p_ids(np.full(8, 1 / 8), 0.26).tolist() == [0, 1, 2]
    assert top_p_ids(np.array([0.1, 0.7, 0.2]), 0.0).tolist() == [1]
    assert top_p_ids(np.array([0.1, 0.7, 0.2]), 0.8).tolist() == [1, 2]


def test_repetition_penalty_is_transformers(hf):
    rng = np.random.default_rng(5)
    for scores in logit_rows():
        history = rng.integers(0, scores.size, 12)
        for penalty in (1.1, 0.8, 2.0):
            theirs = hf("RepetitionPenaltyLogitsProcessor", scores, penalty, history=history)
            np.testing.assert_allclose(penalize(scores, history.tolist(), penalty), theirs, rtol=1e-12)


def test_all_steps_in_transformers_order(hf):
    """The distribution of the whole chain: penalty, temperature, top-k, top-p."""
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, seed=9)
    scores = np.random.default_rng(6).normal(0, 3, 200).astype(np.float32)
    history = [3, 3, 50, 199, 7]
    theirs = scores.astype(np.float64)
    chain = {"RepetitionPenaltyLogitsProcessor": 1.1, "TemperatureLogitsWarper": 0.7, "TopKLogitsWarper": 20, "TopPLogitsWarper": 0.8}
    for name, argument in chain.items():
        theirs = hf(name, theirs, argument, history=history)
    expected = softmax(theirs)
    sampler = Sampler(params, scores.size)
    counts = np.bincount([sampler.pick(scores, history) for _ in range(20_000)], minlength=200) / 20_000
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    assert np.abs(counts - expected).max() < 0.015


def test_penalty_applies_to_greedy_too_and_only_when_asked():
    logits = np.array([2.0, 1.9, -1.0], dtype=np.float32)
    assert Sampler(SamplingParams(), 3).pick(logits, [0, 0]) == 0
    assert Sampler(SamplingParams(repetition_penalty=1.1), 3).pick(logits, [0, 0]) == 1
    assert Sampler(SamplingParams(repetition_penalty=1.1), 3).pick(logits, [500]) == 0  # an id beyond the tokenizer
    assert logits.tolist() == pytest.approx([2.0, 1.9, -1.0])  # the engine's array is not written to


# --------------------------------------------------------------------------------------------------------------- arguments

@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 1.5),
    ],
)
def test_arguments_are_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"^{name} must be"):
        SamplingParams(**{name: value})


def test_words_for_what_is_applied():
    assert str(GREEDY) == "greedy"
    everything = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, seed=5)
    assert str(everything) == "temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.1, seed 5"
    assert str(SamplingParams(repetition_penalty=1.1, top_k=5)) == "greedy, repetition penalty 1.1"
