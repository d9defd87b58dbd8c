"""How the card chooses, without a card: the sampling kernel's algorithm in numpy against the host's sampler, and what the kernel is told.

The kernel itself is held against the sampler in tests/graph/test_hopper_choice.py.
"""

import numpy as np
import pytest
import samplemodel

from nanoqwen.config import Dims, data_path
from nanoqwen.cuda.choice import SAMPLE_CTAS, SAMPLE_THREADS, allowed_words, sample_shared_bytes
from nanoqwen.sampling import DEVICE_TEMPERATURES, GREEDY, Sampler, SamplingParams
from nanoqwen.synthetic import synthetic_dims

#: Where top-p falls between two equals, a sum decides that is rounded on the host and is not on the card. So: shares that no count of equals gives.
RULES = [
    {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8037}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8037},
    {"temperature": 1.5, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 0.01, "top_p": 0.5031}, {"temperature": 100.0, "top_p": 0.9993},
    {"temperature": 2.0, "top_k": 100_000}, {"temperature": DEVICE_TEMPERATURES[0]}, {"temperature": DEVICE_TEMPERATURES[1], "top_k": 50, "top_p": 0.3011},
]  # fmt: skip


def rows(rng, size):
    """Logits of several shapes: smooth, peaked, with many equals, all equal, with both zeros."""
    yield rng.normal(0, 3, size)
    yield rng.normal(0, 20, size)
    yield rng.integers(-2, 3, size)
    yield np.zeros(size)
    yield np.where(rng.random(size) < 0.5, -0.0, 0.0)
    yield np.where(rng.random(size) < 0.1, 5.0, rng.normal(-5, 1, size))


@pytest.mark.parametrize("params", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 261, 2048])
def test_the_algorithm_draws_what_the_sampler_draws(params, size):
    rng = np.random.default_rng(size)
    for logits in rows(rng, size):
        logits = logits.astype(np.float32)
        banned = sorted(set(rng.integers(0, size, size // 10).tolist()) - {int(logits.argmax())})
        host, card = (Sampler(SamplingParams(seed=7, **params), max(1, size - size // 8), banned) for _ in range(2))
        assert [host.pick(logits) for _ in range(40)] == [samplemodel.pick(card, logits) for _ in range(40)]


def test_the_algorithm_on_a_vocabulary_of_real_size():
    rng, vocab = np.random.default_rng(0), Dims.qwen2_5_coder_7b().vocab
    host, card = (Sampler(SamplingParams(0.8, 50, 0.95, seed=3), 151665) for _ in range(2))
    for _ in range(20):
        logits = rng.normal(0, 4, vocab).astype(np.float32)
        assert host.pick(logits) == samplemodel.pick(card, logits)


def test_the_search_finds_the_key_by_definition():
    rng = np.random.default_rng(1)
    for _ in range(300):
        keys = rng.integers(0, 40, 30).astype(np.uint64)
        measures = rng.integers(0, 5, 30).astype(np.uint64)
        target = int(rng.integers(1, 90))
        reach = [k for k in range(1, 64) if measures[keys >= k].sum() >= target]
        expected = max(reach, default=0)
        found, above = samplemodel.select(6, target, keys, measures)
        assert found == expected
        assert above == (measures[keys > found].sum() if found else measures[keys > 0].sum())


def test_host_and_card_may_take_turns():
    logits = np.random.default_rng(2).normal(0, 2, 300).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=11)
    alone, mixed = Sampler(params, 300), Sampler(params, 300)
    expected = [alone.pick(logits) for _ in range(30)]
    mixed.upcoming(9)  # looked at, not drawn
    assert [(samplemodel.pick(mixed, logits) if k % 3 else mixed.pick(logits)) for k in range(30)] == expected


def test_random_numbers_stay_until_they_are_drawn():
    a, b = (Sampler(SamplingParams(temperature=1.0, seed=5), 10) for _ in range(2))
    first = a.upcoming(4)
    assert np.array_equal(a.upcoming(2), first[:2]) and np.array_equal(a.upcoming(6)[:4], first) and not (first & np.uint64(0x7FF)).any()
    assert a.drew() == b.drew() and int(a.upcoming(1)[0]) == int(first[1])


def test_a_bit_an_id():
    words = allowed_words(100, 90, np.array([0, 33, 95, 1000]))
    assert words.dtype == np.uint32 and words.size == 4
    bits = [words[i // 32] >> np.uint32(i % 32) & 1 for i in range(128)]
    assert [i for i in range(128) if bits[i]] == [i for i in range(90) if i not in (0, 33)]
    assert allowed_words(64, 500).tolist() == [0xFFFFFFFF] * 2, "ids beyond the rows of the head cannot be chosen"


def test_which_choices_are_left_to_the_host():
    assert Sampler(GREEDY, 10).on_device and Sampler(SamplingParams(1.0, 5, 0.5), 10).on_device
    assert not Sampler(SamplingParams(repetition_penalty=1.1), 10).on_device
    assert not Sampler(SamplingParams(temperature=1e-300), 10).on_device and not Sampler(SamplingParams(temperature=1e300), 10).on_device


def test_a_cta_of_the_cluster_fits_an_sm(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    from nanoqwen.cuda.compile import compile_source
    from nanoqwen.cuda.constants import LaunchShape, constants_header

    for dims in (Dims.qwen2_5_coder_7b(), synthetic_dims("32b"), synthetic_dims("demo")):
        use = compile_source("decode/sample.cu", constants_header(dims, 128, LaunchShape(132)), tmp_path).kernels["sample"]
        assert -(-use.registers // 8) * 8 * SAMPLE_THREADS <= 65536
        assert use.shared_bytes + sample_shared_bytes(dims.vocab) <= 227 * 1024


def test_the_launch_is_the_one_of_the_kernel():
    source = data_path("kernels", "decode", "sample.cu").read_text(encoding="utf-8")
    assert f"kCluster = {SAMPLE_CTAS}, kSampleThreads = {SAMPLE_THREADS}," in source
    assert sample_shared_bytes(Dims.qwen2_5_coder_7b().vocab) == 38 * 512 * 8 and sample_shared_bytes(synthetic_dims("demo").vocab) == 512 * 8
    assert sample_shared_bytes(Dims.qwen2_5_coder_7b().vocab) <= 220 * 1024
