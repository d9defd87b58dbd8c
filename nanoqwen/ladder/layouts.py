"""The card's layouts once more, in numpy: activations as digits, pages of the cache, tiles of the weights.

The kernels' headers define these layouts; here they are written from those definitions, so that a kernel can be fed alone and
its result be read, without another kernel in between. Everything is plain index arithmetic on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nanoqwen.config import Dims
from nanoqwen.kv import pages_for

if TYPE_CHECKING:
    from nanoqwen.cuda.prefill_cut import Work

# ------------------------------------------------------------------------------- activations (kernels/common/activations.cuh)

#: The largest digit pair: 127 * 256, whose high byte still fits after the low byte has been rounded to [-128, 127].
DIGIT_MAX = 127 * 256
#: The order in which the eight bytes of a word lie: the low nibbles' weights, then the high nibbles'.
BYTE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: What the stored scale leaves out: the kernel's codes stand in the upper half of their byte, 16 times too large.
CODE_POSITION = 16
#: Bytes behind the digits of a group: its scale and padding.
RECORD_TAIL = 16


def record_bytes(group: int) -> int:
    """Bytes of one group of activations: two bytes a value, the FP32 scale, padding."""
    return 2 * group + RECORD_TAIL


def encode_records(x: np.ndarray, group: int) -> np.ndarray:
    """Activations [cols] -> records uint8 [cols / group * record_bytes]. A group with NaN or infinity gets the scale NaN."""
    values = np.asarray(x, np.float32).reshape(-1, group)
    sound = np.isfinite(values).all(axis=1)
    values = np.where(sound[:, None], values, np.float32(0))
    largest = np.abs(values).max(axis=1)
    inverse = np.divide(np.float32(DIGIT_MAX), largest, out=np.zeros_like(largest), where=largest > 0)
    q = np.rint(values * inverse[:, None]).astype(np.int32)
    low = (q & 0xFF).astype(np.uint8).view(np.int8).astype(np.int32)
    high = (q - low) >> 8
    scale = np.where(sound, largest * np.float32(1 / (CODE_POSITION * DIGIT_MAX)), np.float32(np.nan)).astype(np.float32)

    out = np.zeros((len(values), record_bytes(group)), np.uint8)
    for plane, digits in enumerate((high, low)):
        words = digits.astype(np.int8).view(np.uint8).reshape(len(values), group // 8, 8)
        out[:, plane * group : (plane + 1) * group] = words[:, :, BYTE_ORDER].reshape(len(values), group)
    out[:, 2 * group : 2 * group + 4] = scale[:, None].view(np.uint8)
    return out.reshape(-1)


def decode_records(records: np.ndarray, cols: int, group: int) -> np.ndarray:
    """Records uint8 of at least ``cols`` values -> float64 [cols]: (256 * high + low) times the scale of the group."""
    groups = cols // group
    rows = np.asarray(records, np.uint8)[: groups * record_bytes(group)].reshape(groups, record_bytes(group))
    digits = np.empty((2, groups, group // 8, 8))
    for plane in (0, 1):
        bytes_ = np.ascontiguousarray(rows[:, plane * group : (plane + 1) * group]).view(np.int8)
        digits[plane][:, :, BYTE_ORDER] = bytes_.reshape(groups, group // 8, 8)
    scale = np.ascontiguousarray(rows[:, 2 * group : 2 * group + 4]).view(np.float32).astype(np.float64) * CODE_POSITION
    return ((256 * digits[0] + digits[1]).reshape(groups, group) * scale).reshape(cols)


def record_bound(x: np.ndarray, group: int) -> np.ndarray:
    """What rounding to digits may move an element of x [cols] by: half a step, the group's absmax / (2 * DIGIT_MAX). float64 [cols]."""
    largest = np.abs(np.asarray(x, np.float64)).reshape(-1, group).max(axis=1)
    return np.repeat(largest / (2 * DIGIT_MAX), group)


# ------------------------------------------------------------------------------ the final norm's output (kernels/decode/lm_head.cu)

#: Columns of a slice of the output head.
HEAD_SLICE = 32


def encode_halves(y: np.ndarray) -> np.ndarray:
    """y [hidden] -> float16 [hidden / 32, 2, 32]: high parts and low parts, slice by slice."""
    y = np.asarray(y, np.float32)
    high = y.astype(np.float16)
    low = (y - high.astype(np.float32)).astype(np.float16)
    return np.stack([part.reshape(-1, HEAD_SLICE) for part in (high, low)], axis=1)


def decode_halves(halves: np.ndarray) -> np.ndarray:
    """float16 of [hidden / 32, 2, 32], in any shape -> float64 [hidden]: high + low."""
    return np.asarray(halves).reshape(-1, 2, HEAD_SLICE).astype(np.float64).sum(axis=1).reshape(-1)


# ------------------------------------------------------------------------------------------ pages (kernels/common/kv_page.cuh)


def element(page: np.ndarray, kv_head: np.ndarray, token: np.ndarray, i: np.ndarray, dims: Dims, page_tokens: int) -> np.ndarray:
    """Where element ``i`` of a key or value lies in a layer's flat pool. All arguments are integers and broadcast.

    A page is [kv_head][token][head_dim]; inside a token's row the 16-byte chunk c lies at chunk c ^ (token % 8).
    """
    row = (page * dims.num_kv_heads + kv_head) * page_tokens + token % page_tokens
    return row * dims.head_dim + ((i // 8) ^ (token % 8)) * 8 + i % 8


def _everything(n: int, dims: Dims) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices token [n, 1, 1], KV head [G, 1], element [D]: together they broadcast to [n, G, D]."""
    return np.arange(n)[:, None, None], np.arange(dims.num_kv_heads)[:, None], np.arange(dims.head_dim)


def to_pages(rows: np.ndarray, dims: Dims, page_tokens: int) -> np.ndarray:
    """Keys or values [n, G, D] -> float16 [pages, page], in the order of the sequence; rows past the end are zero."""
    pages = pages_for(len(rows), page_tokens)
    out = np.zeros(pages * page_tokens * dims.kv_size, np.float16)
    token, kv_head, i = _everything(len(rows), dims)
    out[element(token // page_tokens, kv_head, token, i, dims, page_tokens)] = rows
    return out.reshape(pages, -1)


def from_pages(pages: np.ndarray, table: Sequence[int], n: int, dims: Dims, page_tokens: int) -> np.ndarray:
    """The first ``n`` tokens of a sequence, [n, G, D] in the pages' type: token t lies in page ``table[t // page_tokens]`` of ``pages``."""
    token, kv_head, i = _everything(n, dims)
    return np.asarray(pages).reshape(-1)[element(np.asarray(table)[token // page_tokens], kv_head, token, i, dims, page_tokens)]


# ------------------------------------------------------------------------- activations of prefill (kernels/prefill/tiled_x.cuh)

#: Columns of a slab.
SLAB = 64


def x_places(columns: np.ndarray, group: int) -> np.ndarray:
    """The place in a row at which each of ``columns`` lies: K is permuted inside groups, as the lanes of a quad hold the weights."""
    within, lane = columns % group, group // 4
    of_lane = within % lane
    return columns - within + 16 * (of_lane // 4) + 8 * (of_lane % 4 // 2) + 2 * (within // lane) + columns % 2


def x_element(token: np.ndarray, column: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slab, token, element of 64) of an activation; the 16-byte chunk c of a token's row lies at chunk c ^ (token % 8). Arguments broadcast."""
    place = x_places(column, group)
    return place // SLAB, token, ((place % SLAB // 8) ^ (token % 8)) * 8 + place % 8


def tile_x(x: np.ndarray, rows: np.ndarray, group: int) -> None:
    """Write ``rows`` [n, cols] into x float16 [slabs, tokens, 64]."""
    n, cols = rows.shape
    x[x_element(np.arange(n)[:, None], np.arange(cols), group)] = rows


def untile_x(x: np.ndarray, tokens: np.ndarray, cols: int, group: int) -> np.ndarray:
    """Rows [len(tokens), cols] of an activation, of which x [slabs, len(tokens), 64] has those tokens."""
    slab, _, element = x_element(np.asarray(tokens)[:, None], np.arange(cols), group)
    return np.asarray(x)[slab, np.arange(len(tokens))[:, None], element]


# -------------------------------------------------------------- activations of prefill as digits (kernels/prefill/digit_x.cuh)

#: Columns of a unit, tokens of a tile.
UNIT, TILE_TOKENS = 128, 4


def digit_places(token: np.ndarray, column: np.ndarray, width: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the high digit of a token's column lies in the bytes of an activation for ``width`` tokens, and where its scale does. The low digit lies 64 bytes behind the
    high one. Arguments broadcast."""
    tile_bytes = 2 * UNIT * TILE_TOKENS + 4 * TILE_TOKENS * (UNIT // group)
    tile = (column // UNIT * (width // TILE_TOKENS) + token // 8 * 2 + token % 2) * tile_bytes
    within, p, lane = column % UNIT, token % 8 // 2, group // 4
    word = within // group * (group // 32) + within % lane // 8
    digits = tile + word // 2 * 512 + (8 * p + within % group // lane) * 16 + word % 2 * 8 + np.argsort(BYTE_ORDER)[column % 8]
    return digits, tile + 2 * UNIT * TILE_TOKENS + 4 * (TILE_TOKENS * (within // group) + p)


def digit_x(x: np.ndarray, rows: np.ndarray, width: int, group: int) -> None:
    """Write ``rows`` [n, cols] as digits into x uint8, an activation for ``width`` tokens."""
    n, cols = rows.shape
    high, scale = digit_places(np.arange(n)[:, None], np.arange(cols), width, group)
    for token, row in enumerate(rows):
        records = encode_records(row, group).reshape(-1, record_bytes(group))
        for digit in (0, 1):
            words = records[:, digit * group : (digit + 1) * group].reshape(-1, 8)
            x[high[token] + 64 * digit] = words[:, np.argsort(BYTE_ORDER)].reshape(-1)
        x[scale[token, ::group, None] + np.arange(4)] = records[:, 2 * group : 2 * group + 4]


def undigit_x(x: np.ndarray, tokens: np.ndarray, cols: int, width: int, group: int) -> np.ndarray:
    """Rows float64 [len(tokens), cols] of an activation uint8 for ``width`` tokens: (256 * high + low) times the scale of the group."""
    x = np.asarray(x)
    high, scale = digit_places(np.asarray(tokens)[:, None], np.arange(cols), width, group)
    scales = np.ascontiguousarray(x[scale[..., None] + np.arange(4)]).view(np.float32)[..., 0].astype(np.float64) * CODE_POSITION
    return (256 * x[high].view(np.int8).astype(np.float64) + x[high + 64].view(np.int8)) * scales


# ------------------------------------------------------------------- parts of a product's sums (kernels/prefill/gemm_work.cuh)


def part_places(row: np.ndarray) -> np.ndarray:
    """The place of each row among a token's values: of 32 rows, r + 8 i for i = 0..3 lie side by side."""
    return row // 32 * 32 + row % 8 * 4 + row % 32 // 8


def part_counts(work: Work, rows: int) -> np.ndarray:
    """In how many parts the sums of each token and row come, int [work.n, rows]."""
    items = np.array([work.parts(item) for item in range(work.items)]).reshape(work.main_rows, work.main_tokens)
    return items[np.arange(rows) // TILE_ROWS // work.tiles][:, np.arange(work.n) // work.main_width].T


def add_parts(parts: np.ndarray, work: Work, tokens: np.ndarray) -> np.ndarray:
    """The sums [len(tokens), rows], float64, of which parts [slots, len(tokens), rows] has those tokens. Slots that no CTA wrote may hold anything."""
    with np.errstate(invalid="ignore"):
        parts = np.asarray(parts).astype(np.float64)
    rows = parts.shape[-1]
    written = np.arange(len(parts))[:, None, None] < part_counts(work, rows)[tokens]
    return np.where(written, parts[..., part_places(np.arange(rows))], 0).sum(axis=0)


# ------------------------------------------------------------------------------------------- weights (nanoqwen/cuda/weights.py)

TILE_ROWS = 16


def untile(blocks: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Blocks of 16 rows x one slice, [..., 16, width], tile after tile and padded at the end -> [rows, cols], rows a multiple of 16."""
    width = blocks.shape[-1]
    tiles, slices = rows // TILE_ROWS, cols // width
    used = blocks.reshape(-1, TILE_ROWS, width)[: tiles * slices]
    return used.reshape(tiles, slices, TILE_ROWS, width).transpose(0, 2, 1, 3).reshape(rows, cols)
