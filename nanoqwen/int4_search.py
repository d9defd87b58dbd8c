"""INT4 with searched scales: ``nanoqwen pack --method mse``. The same codes, the same file, another choice of scale.

``int4.quantize`` takes absmax / 7, so that no weight of a group is ever clipped. Two things can be better, and both need nothing but the
weights themselves:

* *A smaller step.* It clips the largest weights and serves all others better. Each group tries the scales r * absmax / 7 for the
  thirteen r of ``RATIOS`` and keeps the one with the smallest sum of squared errors.
* *The sixteenth code.* Codes reach from -8 to 7, so one side has room for one more step. The scale takes the sign that
  puts the group's extreme weight on the side of -8: a group whose extreme is positive gets a negative scale. An FP16 scale has a
  sign anyway, and every reader and kernel multiplies by it as it is.

The first r is 1, where both signs give absmax's own error, and a later candidate must be strictly better; so no group is worse than with
absmax. Candidates are judged with the scale as stored, rounded to FP16. Only elementwise operations decide, in an order that is written down
here, so the same weights give the same bytes on every machine.

What is minimised is the error of the weights, not of the outputs: a weight counts as much as its activation is large, which a
packer without calibration data cannot know.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nanoqwen import int4
from nanoqwen.errors import InputError

#: Shares of absmax / 7 that are tried, largest first: 1, 31/32, ... 20/32. 28/32 is where the step is absmax / 8, all sixteen codes used. In
#: groups of 128 the best share of bell-shaped weights lies around 0.9; a group with one outlier would go lower still.
RATIOS = tuple(np.float32(1 - k / 32) for k in range(13))

#: Weights judged at once. The three float32 arrays of a candidate, 1.5 MiB, then stay in a core's second cache.
CHUNK = 1 << 17


def quantize(w: np.ndarray, group: int, name: str = "", row_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a weight matrix, by search. Arguments, shapes and refusals are those of ``int4.quantize``.

    float32 [rows, cols] -> (codes int8 [rows, cols] in [-8, 7], scales float16 [rows, cols // group], of either sign).
    """
    rows, cols = w.shape
    int4._check_group(cols, group, name)
    groups = np.ascontiguousarray(w, dtype=np.float32).reshape(-1, group)
    codes, scales = np.empty(groups.shape, np.int8), np.empty(len(groups), np.float16)
    step = max(1, CHUNK // group)
    for first in range(0, len(groups), step):
        part = slice(first, first + step)
        columns = np.ascontiguousarray(groups[part].T)  # [group, n]: one group a column, so that steps and sums run along whole rows
        high, low = columns.max(axis=0), columns.min(axis=0)
        if not (np.isfinite(high).all() and np.isfinite(low).all()):
            int4._refuse_non_finite(groups.reshape(rows, cols), name, row_offset)
        int4.group_scales(np.maximum(high, -low), name)  # refuses a scale beyond FP16, by name; all that are tried are smaller
        scales[part] = _search(columns, high, low)
        quotients = groups[part] / _widen(scales[part])[:, None]
        codes[part] = np.clip(np.rint(quotients, out=quotients), int4.CODE_MIN, int4.CODE_MAX, out=quotients)
    return codes.reshape(rows, cols), scales.reshape(rows, cols // group)


def _search(columns: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The best scale of each of n groups, float16 [n]. ``columns`` float32 [group, n]; its largest and smallest weights float32 [n]."""
    absmax = np.abs(np.maximum(high, -low))
    sign = np.where(high > -low, np.float16(-1), np.float16(1))
    scaled, rounded = np.empty_like(columns), np.empty_like(columns)
    least, best = np.full(len(high), np.inf, np.float32), np.zeros(len(high), np.float16)
    for ratio in RATIOS:
        scale = int4.group_scales(absmax * ratio) * sign
        step = _widen(scale)
        np.divide(columns, step, out=scaled)
        np.rint(scaled, out=rounded)
        np.clip(rounded, int4.CODE_MIN, int4.CODE_MAX, out=rounded)
        rounded -= scaled
        rounded *= rounded  # squared errors, in steps
        error = _sum_columns(rounded) * (step * step)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(best, scale, where=better)
    return best + np.float16(0)  # -0 becomes 0


def _widen(scale: np.ndarray) -> np.ndarray:
    """float16 scales as float32 divisors; a group of zeros, whose scale is 0, is divided by 1."""
    step = scale.astype(np.float32)
    step[step == 0] = 1
    return step


def _sum_columns(values: np.ndarray) -> np.ndarray:
    """float32 [group, n] -> the sum of each column, [n], in place: halves are added until an odd number of rows is left, then row by row.

    ``np.sum`` may choose another order on another processor, and two candidates that are nearly equal could change places.
    """
    rows = len(values)
    while rows % 2 == 0:
        rows //= 2
        values[:rows] += values[rows : 2 * rows]
    for row in range(1, rows):
        values[0] += values[row]
    return values[0]


def quantize_pack(w: np.ndarray, group: int, name: str = "", row_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, cols] -> (words uint32 [rows, cols // 8], scales float16 [rows, cols // group]), as ``int4.quantize_pack``."""
    codes, scales = quantize(w, group, name, row_offset)
    return int4._fold(codes), scales


#: What ``pack --method`` may name.
METHODS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {"absmax": int4.quantize_pack, "mse": quantize_pack}


def packer(method: str) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """The function that quantises and packs a block of rows by ``method``. Raises InputError for a method that is not known."""
    try:
        return METHODS[method]
    except KeyError:
        raise InputError(f"quantisation method {method!r} is not known, use one of {', '.join(METHODS)}") from None
