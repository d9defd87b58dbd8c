"""The algorithm of kernels/decode/sample.cu in numpy: the same integers, the same searches, one thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nanoqwen.cuda.choice import allowed_words, rule
from nanoqwen.cuda.constants import padded_rows
from nanoqwen.sampling import Sampler

UNIT = 2.0**44


def key_of(logits: np.ndarray) -> np.ndarray:
    """uint64 [n] in the order of float32 logits, at least 1 for finite ones."""
    bits = (logits.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000)).astype(np.uint64)


def select(bits: int, target: int, keys: np.ndarray, measures: np.ndarray) -> tuple[int, int]:
    """(largest key such that it and all larger ones measure ``target`` or more, what the larger ones measure); (0, ...) when all do not."""
    found = above = 0
    for shift in range(bits - 2, -1, -2):
        following = (keys ^ np.uint64(found)) >> np.uint64(shift)
        sums = [int(measures[following == d].sum(dtype=np.uint64)) for d in range(4)]
        for digit in (3, 2, 1):
            if above + sums[digit] >= target:
                found |= digit << shift
                break
            above += sums[digit]
    return found, above


def even_bits(n: int) -> int:
    return -(-n.bit_length() // 2) * 2


def draw(logits: np.ndarray, allowed: np.ndarray, numbers: np.ndarray, random: int) -> int:
    """The id that the kernel draws from float32 [rows], the bitmap, the rule and one 64-bit number."""
    rows = logits.size
    sharpness, top_p, top_k = (float(x) for x in numbers)
    ids = np.arange(rows)
    may = (allowed[ids // 32] >> (ids % 32).astype(np.uint32) & 1).astype(bool)
    keys = np.where(may, key_of(logits), np.uint64(0))
    largest = logits[may].max().astype(np.float64)
    with np.errstate(over="ignore"):
        weights = np.where(may, np.exp((np.where(may, logits, largest).astype(np.float64) - largest) * sharpness) * UNIT + 0.5, 0).astype(np.uint64)
    place = (rows - ids).astype(np.uint64)
    one = np.ones(rows, dtype=np.uint64)

    if top_k > 0:
        keys[keys < np.uint64(select(32, int(top_k), keys, one)[0])] = 0
    if top_p < 1:
        everything = int(weights[keys > 0].sum(dtype=np.uint64))
        target = min(max(int(np.ceil(top_p * float(everything))), 1), everything)
        edge, above = select(32, target, keys, weights)
        equals = keys == np.uint64(edge)
        each = int(weights[equals].sum(dtype=np.uint64)) // int(equals.sum())
        needed = -(-(target - above) // each)
        last = select(even_bits(rows), needed, np.where(equals, place, np.uint64(0)), one)[0] if needed < equals.sum() else 1
        keys[(keys < np.uint64(edge)) | (equals & (place < np.uint64(last)))] = 0
    kept = np.where(keys > 0, weights, np.uint64(0))
    drawn = int(random) * int(kept.sum(dtype=np.uint64)) >> 64
    return rows - select(even_bits(rows), drawn + 1, np.where(keys > 0, place, np.uint64(0)), kept)[0]


def pick(chooser: Sampler, logits: np.ndarray) -> int:
    """What the card gives for ``chooser.pick(logits)``; uses up the same random number."""
    rows = np.zeros(padded_rows(logits.size), dtype=np.float32)
    rows[: logits.size] = logits
    random = int(chooser.upcoming(1)[0])
    chooser.drew()
    return draw(rows, allowed_words(logits.size, chooser.valid_ids, chooser.banned_ids), rule(chooser), random)


Pick = Callable[[Sampler, np.ndarray], int]
