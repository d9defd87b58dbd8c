"""The index arithmetic of prefill's products, thread by thread in numpy, against a plain matrix product: no card.

Addresses are the kernels' expressions (gemm_int4.cuh, gemm_unit.cuh, gemm_epilogues.cuh, tiled_x.cuh); what the hardware does, the fragments of wgmma and
the swizzle on address bits, is written from the PTX manual. One item of 256 rows, tokens in the middle of a slab, K that ends inside a unit.
"""

import types

import numpy as np
import pytest

from nanoqwen.int4 import SHIFTS, pack_codes
from nanoqwen.ladder import layouts

TOKENS, FIRST, WIDTH, CAPACITY, ROW = 13, 8, 16, 32, 1  # of the item; its first; of its tile; of a slab; its place among the rows of items
THREADS = np.arange(256)
PAIR, LANE = THREADS // 32, THREADS % 32
G, T = LANE // 4, LANE % 4


def x_chunk(token, chunk):
    return token * 64 + (chunk ^ (token & 7)) * 8


def parts_tile(rows: int, pair: int, m: int) -> int:
    """`row_tile` of PartsOut."""
    tile = ROW * 16 + 2 * pair + m
    return tile if tile < rows // 16 else -1


def swiglu_tile(intermediate: int, pair: int, m: int) -> int:
    """`row_tile` of SwigluValues."""
    tile = ROW * 8 + pair
    return tile + m * (intermediate // 16) if tile < intermediate // 16 else -1


def make(rows: int, cols: int, group: int):
    """(weights float64, their blocks as bytes, X float16 [tokens, cols], tiled X as a line)."""
    rng = np.random.default_rng(rows + cols)
    codes = rng.integers(-8, 8, (rows, cols)).astype(np.int8)
    scales = (2.0 ** rng.uniform(-9, -7, (rows, cols // group))).astype(np.float16)
    words = pack_codes(codes).reshape(rows // 16, 16, cols // group, group // 8).transpose(0, 2, 1, 3).reshape(-1, 2 * group)
    pairs = np.ascontiguousarray(scales.reshape(rows // 16, 2, 8, -1).transpose(0, 3, 2, 1)).view(np.uint32).reshape(-1, 8)
    blocks = np.concatenate((words, pairs), axis=1).reshape(-1).view(np.uint8)
    x = rng.standard_normal((FIRST + TOKENS, cols)).astype(np.float16)
    tiled = np.zeros((-(-cols // 128) * 2, CAPACITY, 64), np.float16)
    layouts.tile_x(tiled, x, group)
    weights = (codes.reshape(rows, -1, group) * scales.astype(np.float64)[:, :, None]).reshape(rows, cols)
    return weights, blocks, x, tiled.reshape(-1)


def fragments(stage: np.ndarray, unit: int, group: int, groups: int) -> np.ndarray:
    """A of a unit as the threads hold it, [thread, word step, product, m, register, element]: `load` and `unpack` of Unit."""
    of_unit, steps, block = 128 // group, group // 32, 8 * group + 32
    out = np.zeros((256, 4, 2, 2, 4, 2))
    for m in range(2):
        slot = (2 * PAIR + m) * 2 * of_unit * block
        for i in range(4):
            j = unit % 2 * of_unit + i // steps
            scale = stage[(slot + j * block + 8 * group + G * 4)[:, None] + np.arange(4)].view(np.float16).astype(float) * (i // steps < groups - unit * of_unit)
            for r in range(2):
                word = stage[(slot + j * block + (LANE + 32 * r) * 4 * steps + 4 * (i % steps))[:, None] + np.arange(4)].view(np.uint32)[:, 0]
                for pair in range(4):
                    bits = (word >> np.uint32(4 * pair) & 0x000F000F) ^ 0x00080008
                    for e in range(2):
                        out[:, i, pair // 2, m, pair % 2 * 2 + r, e] = ((bits >> np.uint32(16 * e) & 0xFFFF).astype(int) - 8) * scale[:, r]
    return out


def matrix_b(slab: np.ndarray, i: int, h: int) -> np.ndarray:
    """B [16, tokens] of a product: the descriptor's start, then the 128-byte swizzle on address bits."""
    token, k = np.meshgrid(np.arange(WIDTH), np.arange(16))
    at = i % 2 * 64 + h * 32 + token // 8 * 1024 + token % 8 * 128 + 2 * k
    return slab[(at ^ (at >> 7 & 7) << 4) // 2].astype(float)


def multiply(blocks: np.ndarray, tiled: np.ndarray, cols: int, group: int, row_tile) -> np.ndarray:
    """The accumulators of the consumers, [thread, m, element]."""
    of_unit, groups, block = 128 // group, cols // group, 8 * group + 32
    units, acc, stale = -(-cols // 128), np.zeros((256, 2, WIDTH // 2)), np.random.default_rng(0)
    for first in range(0, units, 2):  # a weight stage; what no copy overwrites is stale
        stage = stale.integers(0, 16, 16 * 2 * of_unit * block).astype(np.uint8)
        count = min(min(2, units - first) * of_unit, groups - first * of_unit)
        for lane in range(16):
            if (tile := row_tile(lane // 2, lane % 2)) >= 0:
                at = (tile * groups + first * of_unit) * block
                stage[lane * 2 * of_unit * block :][: count * block] = blocks[at : at + count * block]
        for unit in range(first, min(first + 2, units)):
            a = fragments(stage, unit, group, groups)
            for k in range(2):
                slab = np.zeros(WIDTH * 64, np.float16)
                copied = min(WIDTH, -(-TOKENS // 8) * 8) * 64
                slab[:copied] = tiled[((2 * unit + k) * CAPACITY + FIRST) * 64 :][:copied]
                for i in (2 * k, 2 * k + 1):
                    for h in range(2):
                        b = matrix_b(slab, i, h)
                        for m in range(2):
                            f = a[:, i, h, m].reshape(64, 4, 4, 2)  # [quad, t, register, element]
                            for half in range(2):  # row g + 8 half of the quad's warp: columns 2 t, 2 t + 1, then 8 + 2 t, 9 + 2 t
                                rows = np.concatenate((f[:, :, half].reshape(64, 8), f[:, :, 2 + half].reshape(64, 8)), axis=1) @ b
                                for j in range(WIDTH // 8):
                                    for e in range(2):
                                        acc[:, m, 4 * j + 2 * half + e] += rows[THREADS // 4, 8 * j + 2 * T + e]
    return acc


@pytest.mark.parametrize("group, cols", [(128, 384), (64, 448), (32, 96)])
def test_sums_land_where_the_readers_look(group, cols):
    rows = 288
    weights, blocks, x, tiled = make(rows, cols, group)
    acc = multiply(blocks, tiled, cols, group, lambda pair, m: parts_tile(rows, pair, m))
    out = np.full((1, TOKENS, rows), np.nan)
    for thread in THREADS:  # `finish` of PartsOut
        if (tile := parts_tile(rows, PAIR[thread], 0)) < 0:
            continue
        for j in range(WIDTH // 8):
            for e in range(2):
                if (token := 2 * T[thread] + 8 * j + e) < TOKENS:
                    mine = acc[thread, :, 4 * j + e], acc[thread, :, 4 * j + 2 + e]
                    out[0, token, tile * 16 + 4 * G[thread] :][:4] = mine[0][0], mine[1][0], mine[0][1], mine[1][1]
    whole = types.SimpleNamespace(items=2, parts=lambda item: 1, main_rows=2, main_tokens=1, main_width=WIDTH, tiles=16, n=TOKENS)
    found = layouts.add_parts(out, whole, np.arange(TOKENS))
    mine = np.arange(256, rows)
    assert np.isfinite(found[:, mine]).all() and np.isnan(found[:, :256]).all()
    assert np.allclose(found[:, mine], (x[FIRST:].astype(float) @ weights.T)[:, mine], rtol=1e-9, atol=1e-12)
    four = np.arange(rows // 4)  # how the kernels read: part_row, and the rows 8, 16 and 24 behind it
    for r in range(4):
        assert np.array_equal(layouts.part_places(four // 8 * 32 + four % 8 + 8 * r), 4 * four + r)


@pytest.mark.parametrize("group, cols", [(128, 256), (64, 192), (32, 160)])
def test_gate_and_up_meet_and_leave_as_the_next_x(group, cols):
    """With g + 3 u in the place of SwiGLU: staged in the tile's held slabs (`stage` and `store` of SwigluOut)."""
    intermediate = 160
    weights, blocks, x, tiled = make(2 * intermediate, cols, group)
    acc = multiply(blocks, tiled, cols, group, lambda pair, m: swiglu_tile(intermediate, pair, m))
    value, held = acc[:, 0] + 3 * acc[:, 1], np.full((2, WIDTH * 64), np.nan)
    for thread in THREADS:
        odd, other = G[thread] & 1, thread ^ 4
        for half in range(2):
            place = int(layouts.x_places(np.array(PAIR[thread] * 16 + 8 * half + G[thread] // 2 * 2), group))
            at = x_chunk(2 * T[thread] + odd, place % 64 // 8) + place % 8
            for j in range(WIDTH // 8):
                mine, received = value[thread, 4 * j + 2 * half + odd], value[other, 4 * j + 2 * half + odd]
                both = (received, mine) if odd else (mine, received)
                held[place // 64, at + j * 512 :][:2] = both if swiglu_tile(intermediate, PAIR[thread], 0) >= 0 else (0, 0)
    y = np.full((-(-intermediate // 128) * 2, CAPACITY * 64), np.nan)
    count = min(WIDTH, -(-TOKENS // 8) * 8) * 64
    y[2 * ROW : 2 * ROW + 2, FIRST * 64 : FIRST * 64 + count] = held[:, :count]
    tokens, columns = np.arange(FIRST, FIRST + TOKENS), np.arange(ROW * 128, (ROW + 1) * 128)
    slab, token, element = layouts.x_element(tokens[:, None], columns, group)
    want = x[FIRST:].astype(float) @ weights.T
    expected = np.where(columns < intermediate, np.take(want[:, :intermediate] + 3 * want[:, intermediate:], columns % intermediate, axis=1), 0)
    assert np.allclose(y[slab, token * 64 + element], expected)


def test_the_codes_of_a_word_are_shuffled_as_the_unpack_takes_them():
    """Pair p of a word, shifted by 4 p, has code 2 p in its low half and code 2 p + 1 in its high half."""
    assert [SHIFTS[2 * p + e] for p in range(4) for e in range(2)] == [4 * p + 16 * e for p in range(4) for e in range(2)]
