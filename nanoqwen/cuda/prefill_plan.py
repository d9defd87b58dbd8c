"""How a chunk of a prompt is cut into work for the tensor cores, and what the workspace takes. Needs no card.

A matrix product of prefill (kernels/prefill/gemm_int4.cuh) is cut into items: some 16-row tiles of the weights, some tokens (a width for
which the kernel is compiled) and a piece of K. One CTA an SM takes items in turn; what is to be avoided is a last round in which most SMs
have nothing. The costs below are a model in cycles of one SM, good to about a tenth: enough to choose between cuts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

from nanoqwen.config import Dims
from nanoqwen.cuda.constants import TILE_ROWS, int4_block_bytes

#: Columns of a unit of K, and of a slab of X.
UNIT, SLAB = 128, 64
#: Row tiles of an item of the wide kernels; the most that the others take.
TILES, MOST_TILES = 16, 24
#: Tile widths of each kernel, as compiled (kernels/prefill/gemm_shapes.cuh): the narrow and the middle ones take prompts of up to their last.
WIDE, WIDE_QKV, NARROW, MIDDLE = (32, 64, 128), (64, 80, 128), (8, 16, 32), (64,)
#: Consumer warpgroups, weight stages, slots of X and tokens of a slot of each GemmShape there, by the end of a kernel's name. Groups smaller
#: than 128 have more scales: one narrow stage less.
SHAPES = {"": (2, 3, 7, 128), "_middle": (3, 3, 8, 64), "_narrow": (3, 4, 6, 32)}
STAGED, STAGE_UNITS = 4, 2
#: Chunks of up to so many tokens leave a product as parts of the sums, which the next kernel adds; longer ones as finished sums.
PARTS_UP_TO = {"qkv": 256, "o": 1024, "down": 1024}
#: The most pieces of K, and the tokens for which the workspace has room for as many.
MOST_SPLITS, SPLIT_TOKENS = 13, 256
#: The model's card: bytes a second of DRAM and of L2 in all, cycles a second, bytes a cycle and SM from L2.
DRAM, L2, CLOCK, L2_SM = 4.5e12, 3.5e12, 1.75e9, 30


class Work(ctypes.Structure):
    """``Work`` of kernels/prefill/gemm_int4.cuh."""

    _fields_ = [(name, ctypes.c_int) for name in ("tiles", "n", "main_rows", "main_width", "tail_width", "main_tokens", "tail_tokens", "main_items", "split_items", "splits", "groups", "items")]


@dataclass(frozen=True)
class Cut:
    """A choice: ``rows`` rows of items of ``tiles`` row tiles each; the first ``main_rows`` of them have ``main_width`` tokens an item, the others
    ``tail_width``; ``splits`` pieces of K."""

    tiles: int
    rows: int
    main_rows: int
    main_width: int
    tail_width: int
    splits: int

    def work(self, n: int, groups: int) -> Work:
        """The structure that the kernel gets, for ``n`` tokens and ``groups`` groups of K."""
        main_tokens, tail_tokens = -(-n // self.main_width), -(-n // self.tail_width)
        main_items = self.main_rows * main_tokens
        split_items = main_items + (self.rows - self.main_rows) * tail_tokens
        return Work(self.tiles, n, self.main_rows, self.main_width, self.tail_width, main_tokens, tail_tokens, main_items, split_items, self.splits, groups, split_items * self.splits)


@dataclass(frozen=True)
class Product:
    """One of a layer's four products in a chunk: the kernel that makes it, and its cut."""

    kernel: str
    cut: Cut


# ------------------------------------------------------------------------------------------------------------ the choice


def unit_cycles(tiles: int, width: int, sharing: int, few: bool) -> float:
    """One unit of K of an item: its bytes from L2, or its share of DRAM when ``sharing`` CTAs run, or what was measured on an H200 for unpacking
    and multiplying: ``few`` kernels wait for their word steps and hardly for their width, the wide ones pay for each token."""
    weights = tiles * 1056
    steps = 1400 + 12 * tiles if few else 1300 + 10.2 * width
    return max((weights + 2 * UNIT * width) / L2_SM, weights * sharing * CLOCK / DRAM, steps)


def cycles(cut: Cut, n: int, groups: int, row_tiles: int, group: int, sms: int, widths: tuple[int, ...] = WIDE) -> float:
    """Predicted time of a launch and of reading its parts."""
    units = -(-groups * group // UNIT)
    work = cut.work(n, groups)
    ctas = min(sms, work.items)
    token = 165 if widths == WIDE_QKV else 20  # of an item's end: bias, RoPE and pages, or sums written
    few = widths in (NARROW, MIDDLE)
    main, tail = (-(-units // cut.splits) * unit_cycles(cut.tiles, w, ctas if w >= n else 0, few) + 1000 + token * w for w in (cut.main_width, cut.tail_width))

    def rounds(items: int, cta: int) -> int:
        return (items - cta + ctas - 1) // ctas

    # CTA c takes items c, c + ctas, ... The load changes only behind the last CTA of a partial round.
    edges = {0, work.main_items % ctas, work.items % ctas} if cut.splits == 1 else {0}
    busiest = max(rounds(work.main_items * cut.splits, c) * main + (rounds(work.items, c) - rounds(work.main_items * cut.splits, c)) * tail for c in edges)
    memory = row_tiles * groups * int4_block_bytes(group) / DRAM * CLOCK  # until DRAM has delivered the weights
    parts = cut.splits * n * row_tiles * TILE_ROWS * 8 / L2 * CLOCK  # written and read again
    return 3000 + max(busiest, memory) + parts + 10 * (sms - ctas)


@lru_cache(maxsize=None)
def plan(row_tiles: int, groups: int, n: int, *, group: int = 128, widths: tuple[int, ...] = WIDE, most_splits: int = 1, pairs: bool = False, sms: int = 132) -> Cut:
    """The cheapest cut of ``row_tiles`` row tiles. ``most_splits`` is 1 where the epilogue needs whole sums; ``pairs``: a row tile and its partner
    (gate and up) belong together."""
    units = -(-groups * group // UNIT)
    few = widths in (NARROW, MIDDLE)
    step = 2 if pairs else 1
    choices = []
    for tiles in range(4, MOST_TILES + 1, step) if few else (TILES,):
        rows = -(-row_tiles // tiles)
        for splits in range(1, min(most_splits, units) + 1):
            for main in widths:
                if main > widths[0] and main // 2 >= n:
                    continue
                for tail in [w for w in widths if w == main or w < main and splits == 1 and not few]:
                    main_rows = rows if tail == main else rows * -(-n // main) // sms * sms // -(-n // main)
                    cut = Cut(tiles, rows, main_rows, main, tail, splits)
                    choices.append((cycles(cut, n, groups, row_tiles, group, sms, widths), splits, -main, -tail, -tiles, cut))
    return min(choices, key=lambda c: c[:-1])[-1]


def kind(n: int) -> tuple[str, tuple[int, ...]]:
    """(end of the kernels' names, their widths) for a chunk of ``n`` tokens."""
    return ("_narrow", NARROW) if n <= NARROW[-1] else ("_middle", MIDDLE) if n <= MIDDLE[-1] else ("", WIDE)


def planned_length(n: int) -> int:
    """The length whose cuts serve a chunk of ``n`` tokens: a little more. Few lengths are planned that way, and the next one is found ready."""
    step = 8 if n <= MIDDLE[-1] else 32 if n <= 512 else 128
    return -(-n // step) * step


def shapes(dims: Dims) -> dict[str, tuple[int, int]]:
    """{"qkv": (rows, columns), ...}: the four products of a layer."""
    return {
        "qkv": (dims.q_size + 2 * dims.kv_size, dims.hidden), "o": (dims.hidden, dims.q_size),
        "gate_up": (2 * dims.intermediate, dims.hidden), "down": (dims.hidden, dims.intermediate),
    }  # fmt: skip


def products(dims: Dims, group: int, n: int, chunk: int, sms: int) -> dict[str, Product]:
    """The four products of a layer for ``n`` of at most ``chunk`` tokens on ``sms`` SMs."""
    end, widths = kind(n)
    at, found = planned_length(n), {}
    for name, (rows, cols) in shapes(dims).items():
        common = {"group": group, "sms": sms}
        in_parts = n <= PARTS_UP_TO.get(name, 0)
        if name == "gate_up":
            kernel, more = "gemm_swiglu" + end, {"widths": widths, "pairs": True}
        elif in_parts or end:
            kernel, more = "gemm_parts" + end, {"widths": widths, "most_splits": max(1, min(MOST_SPLITS, part_floats(dims, chunk) // (rows * at)))}
        else:
            kernel, more = ("gemm_qkv", {"widths": WIDE_QKV}) if name == "qkv" else ("gemm_residual", {"widths": WIDE})
        found[name] = Product(kernel, plan(rows // TILE_ROWS, cols // group, at, **common, **more))
    return found


# --------------------------------------------------------------------------------------------------- launches and bytes


def gemm_threads(kernel: str) -> int:
    """Threads of a CTA: GemmShape::kThreads."""
    return 128 * (1 + _shape(kernel)[0])


def gemm_shared_bytes(kernel: str, group: int) -> int:
    """Dynamic shared memory of a CTA: GemmShape::kShared."""
    warpgroups, stages, slots, tokens = _shape(kernel)
    stages -= int(kernel.endswith("_narrow") and group != 128)
    stage = 8 * warpgroups * STAGE_UNITS * (UNIT // group) * int4_block_bytes(group)
    return slots * tokens * 2 * SLAB + stages * stage + 8 * (2 * stages + 2 * slots + STAGED)


def _shape(kernel: str) -> tuple[int, int, int, int]:
    return SHAPES[next((end for end in SHAPES if end and kernel.endswith(end)), "")]


def slab_tokens(chunk: int) -> int:
    """Tokens of a slab of X: the chunk in whole groups of eight, the swizzle's period and the least that is copied."""
    return -(-chunk // 8) * 8


def x_shape(cols: int, chunk: int) -> tuple[int, int, int]:
    """[slabs, tokens, 64] of an activation in the order of kernels/prefill/tiled_x.cuh; K is padded to whole units."""
    return -(-cols // UNIT) * (UNIT // SLAB), slab_tokens(chunk), SLAB


def part_floats(dims: Dims, chunk: int) -> int:
    """FP32 values of the buffer that partial sums are written to."""
    return max(chunk, min(chunk, SPLIT_TOKENS) * MOST_SPLITS) * max(dims.q_size + 2 * dims.kv_size, dims.hidden)


def prefill_bytes(dims: Dims, chunk: int) -> int:
    """The workspace of chunks of ``chunk`` tokens: ids, residual, the two activations, their factors, q and partial sums."""

    def x_bytes(cols: int) -> int:
        slabs, tokens, width = x_shape(cols, chunk)
        return 2 * slabs * tokens * width

    rows = 4 * chunk * (1 + dims.hidden + dims.q_size) + 2 * 4 * slab_tokens(chunk)
    return rows + x_bytes(max(dims.hidden, dims.q_size)) + x_bytes(dims.intermediate) + 4 * part_floats(dims, chunk)
