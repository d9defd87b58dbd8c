"""The card's layouts in numpy against the kernels' own words for them, lane by lane and index by index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoqwen import int4, reference
from nanoqwen.config import Dims
from nanoqwen.ladder import layouts, twins

RNG = np.random.default_rng(0)
DIMS = {"heads of 128": Dims(2, 384, 512, 3, 1, 128, 64, 128), "heads of 64, two KV heads": Dims(1, 256, 512, 4, 2, 64, 64, 128)}


def bytes_of(word: int) -> list[int]:
    return [word >> 8 * i & 0xFF for i in range(4)]


def byte_perm(a: int, b: int, selector: int) -> list[int]:
    """PTX prmt: byte i of the result is byte (selector >> 4 i) & 7 of the pair."""
    pair = bytes_of(a) + bytes_of(b)
    return [pair[selector >> 4 * i & 7] for i in range(4)]


def write_digits(x: np.ndarray, group: int) -> np.ndarray:
    """`write_digits` of kernels/common/activations.cuh for 128 values, one lane after the other."""
    out = np.zeros(128 // group * (2 * group + 16), np.uint8)
    packed = []
    for lane in range(32):
        first = lane * 4 // group * group
        largest = np.abs(x[first : first + group]).max()
        inverse = np.float32(32512) / largest if largest > 0 else np.float32(0)
        high = low = 0
        for i in range(4):
            q = int(np.rint(x[4 * lane + i] * inverse))
            below = (q & 0xFF) - (256 if q & 0x80 else 0)
            low |= (below & 0xFF) << 8 * i
            high |= ((q - below) >> 8 & 0xFF) << 8 * i
        packed.append((high, low, largest))
    for lane in range(32):
        odd, element = lane & 1, 4 * lane
        (high, low, largest), (other_high, other_low, _) = packed[lane], packed[lane ^ 1]
        received = other_low if odd else other_high
        front, back = (received, low) if odd else (high, received)
        at, within = element // group * (2 * group + 16), element % group
        where = at + (group if odd else 0) + within // 8 * 8
        out[where : where + 8] = byte_perm(front, back, 0x5140) + byte_perm(front, back, 0x7362)
        if within == 0:
            out[at + 2 * group : at + 2 * group + 4] = np.frombuffer(np.float32(largest * np.float32(1 / (16 * 32512))).tobytes(), np.uint8)
    return out


@pytest.mark.parametrize("group", [32, 64, 128])
def test_records_have_the_bytes_that_a_warp_writes(group):
    x = (RNG.standard_normal(128) * 3).astype(np.float32)
    x[group - 1] = -40  # the largest magnitude is negative
    x[5] = 0
    assert np.array_equal(layouts.encode_records(x, group), write_digits(x, group))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_records_come_back_within_half_a_step(group):
    x = RNG.standard_normal(4 * group) * np.repeat([1e-6, 1.0, 7e4, 0.0], group)
    back = layouts.decode_records(layouts.encode_records(x, group), len(x), group)
    assert np.all(np.abs(back - x) <= layouts.record_bound(x, group) * (1 + 1e-2))
    assert not back[3 * group :].any(), "a group of zeros stays zero"
    assert np.abs(back).max() == pytest.approx(np.abs(x).max(), rel=1e-6), "the largest element keeps its value"


def test_a_record_that_is_not_finite_shows_and_leaves_the_others_alone():
    x = np.ones(3 * 32)
    x[40], x[70] = np.nan, np.inf
    back = layouts.decode_records(layouts.encode_records(x, 32), 96, 32)
    assert np.isnan(back[32:]).all() and np.allclose(back[:32], 1)


def test_longer_buffers_are_read_as_far_as_they_are_meant():
    records = layouts.encode_records(np.arange(64.0), 32)
    assert np.array_equal(layouts.decode_records(np.r_[records, np.full(80, 255, np.uint8)], 64, 32), layouts.decode_records(records, 64, 32))


def test_halves_lie_where_the_final_norm_writes_them_and_carry_22_bits():
    y = RNG.standard_normal(96).astype(np.float32)
    flat = layouts.encode_halves(y).reshape(-1)
    for i in range(96):
        at = i // 32 * 64 + i % 32
        assert flat[at] == np.float16(y[i]) and flat[at + 32] == np.float16(y[i] - np.float32(np.float16(y[i])))
    assert np.abs(layouts.decode_halves(flat) - y).max() < 1e-6


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_pages_are_laid_out_as_the_kernels_index_them(dims):
    n, table = 35, [4, 0, 2]
    rows = RNG.standard_normal((n, dims.num_kv_heads, dims.head_dim)).astype(np.float16)
    logical = layouts.to_pages(rows, dims, 16)
    pool = np.full((6, 16 * dims.kv_size), np.nan, np.float16)
    pool[table] = logical
    for token, kv_head, i in [(0, 0, 0), (1, 0, 9), (15, dims.num_kv_heads - 1, 63), (16, 0, 8), (34, dims.num_kv_heads - 1, dims.head_dim - 1), (23, 0, 17)]:
        slot = token % 16
        row = kv_head * 16 * dims.head_dim + slot * dims.head_dim  # page_row of kv_page.cuh
        swizzled = ((i // 8) ^ (token % 8)) * 8 + i % 8
        assert pool[table[token // 16], row + swizzled] == rows[token, kv_head, i]
    assert np.array_equal(layouts.from_pages(pool, table, n, dims, 16), rows)
    assert np.count_nonzero(logical) == np.count_nonzero(rows), "rows past the end are zero"


def test_tiles_of_the_head_become_rows_again():
    rows, cols = 48, 96
    matrix = np.arange(rows * cols).reshape(rows, cols)
    blocks = [matrix[16 * t : 16 * t + 16, 32 * s : 32 * s + 32] for t in range(3) for s in range(3)]
    padded = np.stack([*blocks, np.full((16, 32), -1)])
    assert np.array_equal(layouts.untile(padded, rows, cols), matrix)


# -------------------------------------------------------------------------------------------------------------- twins


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("n, first", [(1, 0), (1, 40), (20, 21)])
def test_paged_attention_is_attention(dims, n, first):
    length, d = first + n, dims.head_dim
    q = RNG.standard_normal((n, dims.num_heads, d))
    k, v = (RNG.standard_normal((length, dims.num_kv_heads, d)).astype(np.float16) for _ in range(2))
    table = RNG.permutation(7)[: -(-length // 16)]
    pools = [np.full((7, 16 * dims.kv_size), np.nan, np.float16) for _ in range(2)]
    for pool, rows in zip(pools, (k, v)):
        pool[table] = layouts.to_pages(rows, dims, 16)
    ours = twins.paged_attention(q, *pools, table, first, dims, 16)
    theirs = reference.attention(*(torch.from_numpy(a).double().float() for a in (q, k, v)), first).numpy()
    assert np.abs(ours - theirs).max() < 1e-5


def test_words_unpack_as_the_packer_packed_them():
    codes = RNG.integers(-8, 8, (5, 64)).astype(np.int8)
    words = int4.pack_codes(codes)
    assert np.array_equal(twins.unpack_words(words), codes)
    scales = RNG.random((5, 2)).astype(np.float16)
    assert np.array_equal(twins.dequantize(words, scales), int4.dequantize(words, scales, 32))
