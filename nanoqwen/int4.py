"""Symmetric group-wise INT4, and ValueShuffle: eight codes in a 32-bit word.

A row of a projection is cut along its input dimension into groups of ``group`` weights. A group keeps
one FP16 scale and one signed 4-bit code a weight::

    scale = fp16(absmax / 7)        code = clamp(round(w / scale), -8, 7)        w' = code * scale

Rounding is to nearest, ties to even. Codes are computed against the scale *as stored*, so the error of
a weight is at most half of that step (to within FP32's rounding of the quotient). FP16 rounds a scale
by at most 2**-11 of itself: a step is at most that much wider than absmax / 7, and absmax is at most
7.0034 steps, which still rounds to 7. Code -8 is thus never written here; every reader decodes it all
the same, since another packer may use it.

Edges, on purpose:

* A group of zeros gets scale 0 and codes 0, and decodes to exact zeros.
* When absmax / 7 falls below FP16's smallest normal number (2**-14), FP16 is a coarse grid of multiples
  of 2**-24. The scale is then rounded *up* on that grid: rounding down could lose half of it and clip
  the group. Tiny groups cost accuracy, never range.
* absmax / 7 above 65504 has no FP16 scale: refused, by name. A single weight above 65504 is fine as
  long as its scale fits, since nothing here passes through FP16 but the scale.
* NaN and infinity are refused, by name and index.

numpy only: packing a checkpoint needs neither torch nor a GPU.
"""

from __future__ import annotations

import numpy as np

from nanoqwen.errors import InputError

# [shifts]
#: ValueShuffle (layout id 1): bit position of weight i = 0..7 in its word. Even weights fill the low half
#: and odd weights the high half, so ``word >> 4*j & 0x000F000F`` is the pair (w[2j], w[2j+1]), one in each
#: 16-bit half: half2-ready. The same numbers stand in config/nanoqwen.yaml; a test compares them.
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
# [/shifts]

CODE_MIN, CODE_MAX = -8, 7
FP16_MAX = 65504.0
_FP16_SMALLEST_NORMAL = 2.0**-14
_FP16_SUBNORMAL_STEP = 2.0**-24


# [scales]
def group_scales(absmax: np.ndarray, name: str = "") -> np.ndarray:
    """FP16 scales for groups whose largest magnitudes are ``absmax`` (float32, any shape).

    Raises InputError when a scale exceeds FP16.
    """
    ideal = absmax.astype(np.float32) / np.float32(CODE_MAX)
    if ideal.size and float(ideal.max()) > FP16_MAX:
        raise InputError(
            f"{name or 'tensor'}: a weight of magnitude {float(absmax.max()):.6g} needs an INT4 scale above FP16's largest "
            f"number {FP16_MAX:g}; weights beyond {FP16_MAX * CODE_MAX:g} cannot be packed"
        )
    # A subnormal scale is rounded up to the next multiple of 2**-24, so that no weight of the group clips.
    up = np.ceil(ideal / np.float32(_FP16_SUBNORMAL_STEP)) * np.float32(_FP16_SUBNORMAL_STEP)
    return np.where(ideal < _FP16_SMALLEST_NORMAL, up, ideal).astype(np.float16)
# [/scales]


# [quantize]
def quantize(w: np.ndarray, group: int, name: str = "", row_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a weight matrix.

    ``w`` is float32 [rows, cols] with cols a multiple of ``group``. Returns (codes int8 [rows, cols] in
    [-8, 7], scales float16 [rows, cols // group]). Raises InputError for a group that does not divide,
    for NaN or infinity (with the index), and for a scale beyond FP16.
    """
    rows, cols = w.shape
    _check_group(cols, group, name)
    groups = np.ascontiguousarray(w, dtype=np.float32).reshape(rows, cols // group, group)
    absmax = np.abs(np.maximum(groups.max(axis=2), -groups.min(axis=2)))  # abs: a group of zeros may give -0.0
    if not np.isfinite(absmax).all():
        _refuse_non_finite(groups.reshape(rows, cols), name, row_offset)
    scales = group_scales(absmax, name)
    step = scales.astype(np.float32)
    divisor = np.where(step == 0, np.float32(1), step)  # a group of zeros: 0 / 1, no warning
    codes = groups / divisor[..., None]
    np.rint(codes, out=codes)
    np.clip(codes, CODE_MIN, CODE_MAX, out=codes)
    return codes.astype(np.int8).reshape(rows, cols), scales
# [/quantize]


# [pack]
def pack_codes(codes: np.ndarray) -> np.ndarray:
    """int8 codes [rows, cols] in [-8, 7] -> ValueShuffle words uint32 [rows, cols // 8].

    Raises InputError when cols is not a multiple of 8 or a code is outside four bits.
    """
    if codes.shape[1] % 8:
        raise InputError(f"cannot pack rows of {codes.shape[1]} codes: a word holds eight")
    if codes.size and (codes.min() < CODE_MIN or codes.max() > CODE_MAX):
        raise InputError(f"codes must lie in [{CODE_MIN}, {CODE_MAX}], found {codes.min()} to {codes.max()}")
    return _fold(codes.astype(np.int8, copy=False))


def _fold(codes: np.ndarray) -> np.ndarray:
    """int8 codes [rows, cols] -> words uint32 [rows, cols // 8], three shift-or steps a word.

    Four bits of a byte are kept (two's complement). Read as a little-endian uint16, two neighbouring
    nibbles are ``even | odd << 8``; one more shift-or and a mask move the odd one to bit 16. Pair j then
    goes to bits 4j of both halves, which is SHIFTS.
    """
    rows, cols = codes.shape
    nibbles = np.ascontiguousarray(codes).view(np.uint8) & np.uint8(0xF)
    pairs = nibbles.view("<u2").astype(np.uint32).reshape(rows, cols // 8, 4)
    pairs = (pairs | pairs << np.uint32(8)) & np.uint32(0x000F000F)
    word = pairs[..., 0].copy()
    for j in (1, 2, 3):
        word |= pairs[..., j] << np.uint32(4 * j)
    return word
# [/pack]


# [unpack]
def unpack_codes(words: np.ndarray) -> np.ndarray:
    """ValueShuffle words uint32 [rows, cols // 8] -> int8 codes [rows, cols]."""
    rows, n = words.shape
    codes = np.empty((rows, n, 8), dtype=np.int8)
    for i, shift in enumerate(SHIFTS):
        # Shift the nibble to the top of the word, then let an arithmetic shift extend its sign.
        codes[..., i] = ((words << np.uint32(28 - shift)).view(np.int32) >> 28).astype(np.int8)
    return codes.reshape(rows, n * 8)
# [/unpack]


# [dequantize]
def dequantize(words: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """ValueShuffle words uint32 [rows, cols // 8] and scales float16 [rows, cols // group] -> float32 [rows, cols].

    The product of a 4-bit integer and an FP16 number is exact in FP32.
    """
    codes = unpack_codes(np.ascontiguousarray(words))
    rows, cols = codes.shape
    _check_group(cols, group, "")
    out = codes.reshape(rows, cols // group, group).astype(np.float32)
    out *= scales.astype(np.float32)[..., None]
    return out.reshape(rows, cols)
# [/dequantize]


def quantize_pack(w: np.ndarray, group: int, name: str = "", row_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, cols] -> (words uint32 [rows, cols // 8], scales float16 [rows, cols // group]).

    What the packer calls, on blocks of rows that fit a core's cache; ``row_offset`` is the block's first
    row in the whole tensor, for messages.
    """
    codes, scales = quantize(w, group, name, row_offset)
    return _fold(codes), scales


def _check_group(cols: int, group: int, name: str) -> None:
    if group < 8 or group % 8 or cols % group:
        raise InputError(f"{name or 'tensor'}: input dimension {cols} is not a multiple of the group size {group}")


def _refuse_non_finite(w: np.ndarray, name: str, row_offset: int = 0) -> None:
    r, c = (int(v) for v in np.argwhere(~np.isfinite(w))[0])
    raise InputError(
        f"{name or 'tensor'}: value at [{r + row_offset}, {c}] is {w[r, c]}; the checkpoint is damaged, download it again"
    )
