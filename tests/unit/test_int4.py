"""INT4 quantisation and ValueShuffle: every code at every bit, the edges of a group, and bounds that hold for any weights."""

import warnings

import numpy as np
import pytest

from nanoqwen import int4
from nanoqwen.config import load_settings
from nanoqwen.errors import InputError

CODES = range(-8, 8)
GROUPS = load_settings().quant.allowed_groups
SEEDS = range(6)
# Half a step, and what FP32 may add: the quotient w / step is rounded to 24 bits before it is rounded to an integer.
HALF = 0.5 + 8 * 2.0**-24


@pytest.fixture(autouse=True)
def no_numpy_warnings():
    """A NaN, an overflow or a division by zero anywhere in here is a fault, not a warning."""
    with warnings.catch_warnings(), np.errstate(divide="raise", over="raise", invalid="raise"):
        warnings.simplefilter("error")
        yield


def weights(seed, rows=8, cols=256):
    """float32 [rows, cols]: a different kind of distribution for each seed, magnitudes from 1e-3 to 1e3."""
    rng = np.random.default_rng(seed)
    kind = seed % 3
    w = (
        rng.normal(0, 1, (rows, cols))
        if kind == 0
        else rng.standard_t(3, (rows, cols))
        if kind == 1
        else rng.uniform(0, 1, (rows, cols))  # one sign only
    )
    return (w * 10.0 ** rng.uniform(-3, 3, (rows, 1))).astype(np.float32)


def steps(scales, group):
    """The stored step of every weight, float64 [rows, cols]."""
    return np.repeat(scales.astype(np.float64), group, axis=1)


def slow_pack(codes):
    """ValueShuffle as the sentence says it: nibble i of a word goes to bit SHIFTS[i]."""
    rows, cols = codes.shape
    words = np.zeros((rows, cols // 8), np.uint32)
    for r in range(rows):
        for c in range(cols):
            words[r, c // 8] |= np.uint32((int(codes[r, c]) & 0xF) << int4.SHIFTS[c % 8])
    return words


# ------------------------------------------------------------------------------------------------------------- ValueShuffle


def test_shifts_are_the_configured_ones():
    quant = load_settings().quant
    assert int4.SHIFTS == quant.shuffle_bits == (0, 16, 4, 20, 8, 24, 12, 28)
    assert (int4.CODE_MIN, int4.CODE_MAX) == (quant.code_min, quant.code_max) == (-8, 7)
    assert sorted(int4.SHIFTS) == list(range(0, 32, quant.bits))  # every nibble of the word is used once


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("code", CODES)
def test_every_code_at_every_position(code, position):
    alone = np.zeros((1, 8), np.int8)
    alone[0, position] = code
    word = int4.pack_codes(alone)
    assert word.tolist() == [[(code & 0xF) << int4.SHIFTS[position]]]
    among = np.random.default_rng(position).integers(-8, 8, (64, 8)).astype(np.int8)  # the other seven at random
    among[:, position] = code
    packed = int4.pack_codes(among)
    assert ((packed >> np.uint32(int4.SHIFTS[position])) & np.uint32(0xF) == code & 0xF).all()
    assert np.array_equal(int4.unpack_codes(packed), among)


def test_all_words_of_a_half_survive():
    """2**16 words run through every content of both 16-bit halves: unpack, then pack, gives the word back."""
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(2**16).astype(np.uint32)
    words = (high << np.uint32(16) | low).reshape(16, -1)
    codes = int4.unpack_codes(words)
    assert codes.dtype == np.int8 and codes.min() == -8 and codes.max() == 7
    assert np.array_equal(int4.pack_codes(codes), words)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fold_equals_the_slow_loop(seed):
    codes = np.random.default_rng(seed).integers(-8, 8, (5, 64)).astype(np.int8)
    words = int4.pack_codes(codes)
    assert words.dtype == np.uint32 and words.shape == (5, 8)
    assert np.array_equal(words, slow_pack(codes))
    assert np.array_equal(int4.unpack_codes(words), codes)


def test_shift_and_mask_give_neighbours_in_the_two_halves():
    codes = np.random.default_rng(1).integers(-8, 8, (1, 8 * 50)).astype(np.int8)
    words = int4.pack_codes(codes)
    for j in range(4):
        pair = (words >> np.uint32(4 * j)) & np.uint32(0x000F000F)
        assert np.array_equal(pair & np.uint32(0xFFFF), codes[:, 2 * j :: 8].astype(np.uint32) & np.uint32(0xF))
        assert np.array_equal(pair >> np.uint32(16), codes[:, 2 * j + 1 :: 8].astype(np.uint32) & np.uint32(0xF))


def test_layouts_of_the_arrays_do_not_matter():
    codes = np.random.default_rng(2).integers(-8, 8, (16, 64)).astype(np.int8)
    words = int4.pack_codes(codes)
    assert np.array_equal(int4.pack_codes(np.asfortranarray(codes)), words)
    assert np.array_equal(int4.pack_codes(np.repeat(codes, 2, axis=0)[::2]), words)
    assert np.array_equal(int4.pack_codes(codes.astype(np.int64)), words)
    assert np.array_equal(int4.unpack_codes(np.asfortranarray(words)), codes)
    assert np.array_equal(int4.unpack_codes(np.repeat(words, 2, axis=1)[:, ::2]), codes)
    assert np.array_equal(int4.unpack_codes(words.astype("<u4")), codes)
    frozen = words.copy()
    frozen.flags.writeable = False  # as from a read-only map of a file
    assert np.array_equal(int4.unpack_codes(frozen), codes)


def test_pack_codes_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="rows of 12 codes: a word holds eight"):
        int4.pack_codes(np.zeros((2, 12), np.int8))
    for bad in (8, -9, 127, -128):
        codes = np.zeros((2, 8), np.int8)
        codes[1, 3] = bad
        with pytest.raises(InputError, match=rf"\[-8, 7\], found .*{abs(bad)}"):
            int4.pack_codes(codes)
    with pytest.raises(InputError, match="found 0 to 256"):
        int4.pack_codes(np.full((1, 8), 256, np.int16) * np.eye(1, 8, dtype=np.int16))  # 256 would wrap to 0 in int8
    assert int4.pack_codes(np.zeros((0, 8), np.int8)).shape == (0, 1)


# ------------------------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_scale_and_codes_are_the_formula(seed, group):
    w = weights(seed)
    codes, scales = int4.quantize(w, group)
    assert codes.dtype == np.int8 and codes.shape == w.shape
    assert scales.dtype == np.float16 and scales.shape == (8, 256 // group)
    for r in range(8):
        for g in range(256 // group):
            part = w[r, g * group : (g + 1) * group]
            scale = np.float16(np.abs(part).max() / np.float32(7))
            assert scales[r, g] == scale
            expected = [int(np.rint(v / np.float32(scale))) for v in part]
            assert codes[r, g * group : (g + 1) * group].tolist() == expected


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_error_is_at_most_half_a_step(seed, group):
    """Of the stored step, always; and rounding the scale to FP16 widens a step by at most 2**-11 of itself."""
    w = weights(seed, rows=32)
    words, scales = int4.quantize_pack(w, group)
    error = np.abs(int4.dequantize(words, scales, group).astype(np.float64) - w)
    step = steps(scales, group)
    assert (error <= HALF * step).all()
    absmax = np.abs(w.astype(np.float64)).reshape(32, -1, group).max(axis=2)
    assert (step.reshape(32, -1, group)[..., 0] <= absmax / 7 * (1 + 2.0**-11 + 2.0**-23)).all()
    assert (error.reshape(32, -1, group) <= (HALF * (1 + 2.0**-11 + 2.0**-23) / 7 * absmax)[..., None]).all()


def test_rounding_a_scale_never_clips_and_never_reaches_minus_eight():
    """Groups of one magnitude, both signs, over whole binades of absmax: the extreme weight is always code 7 or -7."""
    for exponent in (-14, -10, 0, 10, 15):
        top = np.linspace(1, 2, 20_001, endpoint=False, dtype=np.float64) * 2.0**exponent * 7
        top = top[top <= 65504 * 7].astype(np.float32)
        w = np.zeros((len(top), 8), np.float32)
        w[:, 0], w[:, 1] = top, -top
        codes, scales = int4.quantize(w, 8)
        assert (codes[:, 0] == 7).all() and (codes[:, 1] == -7).all()
        ratio = scales[:, 0].astype(np.float64) * 7 / top
        assert abs(ratio - 1).max() <= 2.0**-11 + 2.0**-23


def test_ties_go_to_even():
    w = np.zeros((1, 32), np.float32)
    w[0, :15] = [7, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, -0.5, -1.5, -2.5, -3.5, -4.5, -5.5, -6.5]  # absmax 7: the step is 1
    codes, scales = int4.quantize(w, 32)
    assert scales[0, 0] == 1
    assert codes[0, :15].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, -2, -2, -4, -4, -6, -6]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_group_of_zeros_is_exact(zero):
    w = np.random.default_rng(0).normal(0, 1, (3, 256)).astype(np.float32)
    w[0, :128] = zero
    w[1, :] = zero
    w[2, 128:] = np.where(np.arange(128) % 2, 0.0, -0.0)
    with np.errstate(all="raise"):
        words, scales = int4.quantize_pack(w, 128)
        back = int4.dequantize(words, scales, 128)
    assert back[w == 0].tobytes() == bytes(4 * (w == 0).sum())  # +0.0 everywhere, bit for bit
    assert scales.view(np.uint16)[[0, 1, 1, 2], [0, 0, 1, 1]].tolist() == [0, 0, 0, 0]
    again = int4.quantize_pack(w.copy(), 128)
    assert words.tobytes() == again[0].tobytes() and scales.tobytes() == again[1].tobytes()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_group_of_one_sign(sign):
    """Case B07: alternating 0.5 and 0.7 must not collapse into one value."""
    w = np.where(np.arange(128) % 2, 0.7, 0.5).astype(np.float32)[None] * np.float32(sign)
    words, scales = int4.quantize_pack(w, 128)
    back = int4.dequantize(words, scales, 128)
    assert scales[0, 0] == np.float16(np.float32(0.7) / np.float32(7))
    assert float(scales[0, 0]) <= 0.7 / 7 * (1 + 2.0**-11)
    assert (np.abs(back - w) <= 0.5 * float(scales[0, 0])).all()
    assert len(np.unique(back)) == 2 and (np.sign(back) == sign).all()


def test_an_outlier_beyond_fp16():
    """Case B03: 1e5 stored as BF16 is 99,840. Only the scale passes through FP16, so nothing becomes infinite."""
    w = np.random.default_rng(0).normal(0, 0.02, (2, 256)).astype(np.float32)
    w[0, 0] = 99_840
    with np.errstate(all="raise"):
        words, scales = int4.quantize_pack(w, 128)
        back = int4.dequantize(words, scales, 128)
    assert np.isfinite(scales).all() and np.isfinite(back).all()
    assert abs(back[0, 0] - 99_840) <= 0.5 * float(scales[0, 0])
    assert (back[0, 1:128] == 0).all()  # the price: a step of 14,264 leaves nothing of the other 127
    assert (np.abs(back[:, 128:] - w[:, 128:]) <= HALF * steps(scales, 128)[:, 128:]).all()  # and its neighbours are untouched


def test_a_scale_beyond_fp16_is_refused_by_name():
    w = np.zeros((2, 128), np.float32)
    w[1, 5] = 65504 * 7
    _, scales = int4.quantize(w, 128, "model.layers.0.mlp.up_proj.weight")
    assert scales[1, 0] == 65504  # the largest weight that fits, either sign
    assert int4.quantize(-w, 128)[1][1, 0] == 65504
    w[1, 5] = np.nextafter(np.float32(65504 * 7 + 4), np.float32(np.inf))
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.up_proj\.weight.*458532.*65504.*458528"):
        int4.quantize(w, 128, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(InputError, match="^tensor: .*cannot be packed"):
        int4.quantize(np.full((1, 128), -3e38, np.float32), 128)


@pytest.mark.parametrize("exponent", range(-27, -13))
def test_subnormal_scales_keep_their_range(exponent):
    """Below 2**-14 the grid of scales is coarse; a scale rounds up on it, so the largest weight is never clipped."""
    rng = np.random.default_rng(-exponent)
    w = (rng.uniform(-1, 1, (64, 128)) * rng.uniform(3.5, 14, (64, 1)) * 2.0**exponent).astype(np.float32)
    with np.errstate(all="raise"):
        words, scales = int4.quantize_pack(w, 128)
        back = int4.dequantize(words, scales, 128)
    scale = scales.astype(np.float64)
    absmax = np.abs(w.astype(np.float64)).max(axis=1, keepdims=True)
    small = absmax / 7 < 2.0**-14
    assert (scale[small] * 7 >= absmax[small] * (1 - 2.0**-23)).all()  # covered
    assert (scale[small] - absmax[small] / 7 < 2.0**-24 * (1 + 2.0**-20)).all()  # by less than one multiple of 2**-24
    assert (np.abs(back - w.astype(np.float64)) <= HALF * steps(scales, 128)).all()


def test_magnitudes_at_the_bottom_of_fp32():
    """absmax / 7 may underflow FP32 itself; such a group becomes zeros, wrong by less than 1e-44."""
    for value in (1e-45, 7e-45, 1e-40, 1e-38):
        w = np.full((1, 32), value, np.float32)
        words, scales = int4.quantize_pack(w, 32)
        back = int4.dequantize(words, scales, 32)
        assert (np.abs(back.astype(np.float64) - w) <= max(0.5 * float(scales[0, 0]), 1e-44)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(3, 7), (0, 0), (5, 255)])
def test_non_finite_weights_are_refused_by_name_and_index(bad, at):
    """Case B01. The row is counted in the whole tensor, also when the packer hands over a block of it."""
    name = "model.layers.1.mlp.up_proj.weight"
    w = np.random.default_rng(0).normal(0, 1, (6, 256)).astype(np.float32)
    w[at] = bad
    for offset in (0, 640):
        for function in (int4.quantize, int4.quantize_pack):
            with pytest.raises(InputError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight.*\[{at[0] + offset}, {at[1]}\] is {bad}"):
                function(w, 128, name, row_offset=offset)
    w[5, 255] = np.nan  # two bad ones: the first in reading order is named
    with pytest.raises(InputError, match=rf"\[{at[0]}, {at[1]}\]"):
        int4.quantize(w, 64, name)


def test_group_sizes_that_do_not_divide_are_refused():
    w = np.zeros((2, 192), np.float32)
    with pytest.raises(InputError, match="gate: input dimension 192 is not a multiple of the group size 128"):
        int4.quantize(w, 128, "gate")
    for group in (0, -8, 4, 12):
        with pytest.raises(InputError, match=f"group size {group}"):
            int4.quantize(w, group)
    words, scales = int4.quantize_pack(w, 64)
    with pytest.raises(InputError, match="192 is not a multiple of the group size 128"):
        int4.dequantize(words, scales, 128)


# --------------------------------------------------------------------------------------------------- properties of any weights


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_dequantised_values_are_exact_products(seed, group):
    words, scales = int4.quantize_pack(weights(seed), group)
    back = int4.dequantize(words, scales, group)
    assert back.dtype == np.float32
    assert np.array_equal(back.astype(np.float64), int4.unpack_codes(words) * steps(scales, group))


def test_dequantize_reads_every_code_also_minus_eight():
    """Our quantiser never writes -8, but a file from another packer may hold it."""
    codes = np.tile(np.arange(-8, 8, dtype=np.int8), 2)[None]
    back = int4.dequantize(int4.pack_codes(codes), np.float16([[0.25]]), 32)
    assert np.array_equal(back, codes * np.float32(0.25))
    back = int4.dequantize(int4.pack_codes(codes), np.float16([[-2.0**-24]]), 32)  # a subnormal scale, and a negative one
    assert np.array_equal(back, codes * np.float32(-(2.0**-24)))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fast_path_writes_the_same_bytes(seed):
    w = weights(seed)
    codes, scales = int4.quantize(w, 128)
    for variant in (w, np.asfortranarray(w), np.repeat(w, 2, axis=0)[::2], w.astype(np.float64)):
        before = variant.copy()
        words, fast_scales = int4.quantize_pack(variant, 128)
        assert words.tobytes() == int4.pack_codes(codes).tobytes()
        assert fast_scales.tobytes() == scales.tobytes()
        assert np.array_equal(variant, before)  # the input is left alone


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_blocks_of_rows_give_the_whole(block):
    w = weights(0, rows=20)
    words, scales = int4.quantize_pack(w, 64)
    parts = [int4.quantize_pack(w[r : r + block], 64, row_offset=r) for r in range(0, 20, block)]
    assert np.array_equal(np.concatenate([p[0] for p in parts]), words)
    assert np.array_equal(np.concatenate([p[1] for p in parts]), scales)
    empty = int4.quantize_pack(w[:0], 64)
    assert empty[0].shape == (0, 32) and empty[1].shape == (0, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_symmetries(seed):
    w = weights(seed)
    codes, scales = int4.quantize(w, 64)
    flipped, same = int4.quantize(-w, 64)
    assert np.array_equal(flipped, -codes) and scales.tobytes() == same.tobytes()  # no zero point: -w is -codes
    doubled, twice = int4.quantize(w * np.float32(4), 64)
    normal = np.repeat(scales >= np.float16(2.0**-14), 64, axis=1)
    assert np.array_equal(doubled[normal], codes[normal])  # a power of two moves to the scale
    assert np.array_equal(twice[scales >= np.float16(2.0**-14)], scales[scales >= np.float16(2.0**-14)] * np.float16(4))


@pytest.mark.parametrize("seed", SEEDS)
def test_quantising_twice_changes_nothing(seed):
    w = weights(seed)
    words, scales = int4.quantize_pack(w, 128)
    assert (scales >= np.float16(2.0**-14)).all()
    again, same = int4.quantize_pack(int4.dequantize(words, scales, 128), 128)
    assert again.tobytes() == words.tobytes() and same.tobytes() == scales.tobytes()


def test_a_smaller_group_never_has_a_wider_step():
    w = weights(1, rows=16)
    wide = steps(int4.quantize(w, 128)[1], 128)
    for group in (64, 32, 8):
        assert (steps(int4.quantize(w, group)[1], group) <= wide).all()
