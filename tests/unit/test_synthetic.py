"""Synthetic weights: the same on every machine, centred, and of the magnitudes that the recipe says."""

import numpy as np
import pytest

from nanoqwen import int4, synthetic
from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.model import schema


def test_the_mixer_is_the_published_one():
    # First outputs of SplittableRandom's generator seeded with 1234567, as published with xoshiro's reference code.
    state = np.array([1234567], dtype=np.uint64)
    assert int(synthetic.splitmix64(state)[0]) == 6457827717110365317


def test_streams_do_not_depend_on_where_a_block_starts_and_differ_by_name_and_seed():
    key = synthetic.stream_key(0, "a")
    whole = synthetic.words(key, 0, 1000)
    assert np.array_equal(whole[300:500], synthetic.words(key, 300, 200))
    assert np.array_equal(synthetic.values(key, 0, 100, 1.0)[40:], synthetic.values(key, 40, 60, 1.0))
    assert len({synthetic.stream_key(seed, name) for seed in (0, 1) for name in ("a", "b")}) == 4


def test_codes_are_centred_and_bell_shaped():
    codes = int4.unpack_codes(synthetic.words(synthetic.stream_key(0, "w"), 0, 1 << 15).reshape(64, -1))
    assert codes.min() >= -7 and codes.max() <= 7
    assert abs(codes.mean()) < 0.02 and abs(codes.std() - synthetic.CODE_STD) < 0.02
    per_slot = codes.reshape(-1, 8).mean(0)
    assert np.abs(per_slot).max() < 0.06, "no nibble position is special"


def test_values_have_their_size_and_centre():
    v = synthetic.values(synthetic.stream_key(3, "v"), 0, 1 << 15, 0.5, 2.0).astype(np.float32)
    assert abs(v.mean() - 2.0) < 0.02 and abs(v.std() - 0.5) < 0.02


def test_every_tensor_has_a_recipe_with_finite_positive_scales():
    for name in ("7b", "demo", "0.5b"):
        dims = synthetic.synthetic_dims(name)
        assert not dims.problems()
        for spec in schema(dims):
            r = synthetic.recipe(spec, dims)
            assert r.size > 0
            if spec.int4:  # eight standard deviations of a popcount bell never reach zero
                assert r.centre - 8 * r.size >= 0


def test_names():
    assert synthetic.synthetic_dims("7b") == Dims.qwen2_5_coder_7b()
    with pytest.raises(InputError, match="synthetic:7b"):
        synthetic.synthetic_dims("8b")
