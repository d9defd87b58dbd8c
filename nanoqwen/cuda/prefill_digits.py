"""How a product for up to 16 tokens is cut whose X is digits (kernels/prefill/gemm_digits.cuh). Needs no card.

A CTA has ``pairs`` x ``splits`` warps. ``pairs`` pairs of 16-row tiles are an item; the columns (of 512) of K that a CTA has of its items are dealt to the splits in turn.
Many pairs: little of X to fetch, many parts. Many splits: few parts, more of X. Costs are a model in microseconds, there to choose between cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoqwen.cuda.constants import TILE_ROWS, int4_block_bytes
from nanoqwen.cuda.prefill_cut import L2, UNIT, Cut

#: Tokens for which the kernels are compiled; the most warps of a CTA; units of K in a column; tokens of a tile of X. As compiled (DigitShape).
WIDTHS, WARPS, UNITS, TILE_TOKENS = (8, 16), 12, 4, 4
#: Barriers, and what warps ask for next: bytes between X and the weights.
BETWEEN = 1024
#: Bytes of shared memory that a CTA may have and, so that an SM has never two of them, that it asks for at least.
MOST_SHARED, LEAST_SHARED = 232448, 116 * 1024

# ---- The model, a sum fitted to 63 launches timed in a row on one H200 with the 7B's matrices (the tests have them): 4 % off, at most 10 %. A term alone means little.

#: What it would not see, since no launch that was timed had so few warps: a warp has one column under way, and cannot have the next one sooner than so many microseconds
#: later, by width.
TURN = {8: 1.4, 16: 2.0}
#: By width: from one launch to the next without work; a column of a warp's; each item's end but the first's; each end at which shares meet.
LAUNCH, COLUMN, END, MEET = {8: 2.33, 16: 2.77}, {8: 0.06, 16: 0.36}, {8: 0.08, 16: 0.45}, {8: 0.30, 16: 0.25}
#: Bytes a microsecond: weights of all SMs together; weights of the SM that has most, since an SM has only so many copies under way and one that idles has none; X of
#: all SMs, out of L2.
ALL, BUSIEST, X = 6.9e6, {8: 136e3, 16: 101e3}, 8.1e6


#: A launch that makes digits of a product's X, where no kernel before leaves it so: of the 7B's 18,944 columns.
QUANTISE = 2.0


@dataclass(frozen=True)
class Digits:
    """A launch: the cut, splits, threads and bytes of dynamic shared memory of a CTA, the end of the kernel's name, and how long the model thinks that it takes with the
    reading of its parts, in microseconds."""

    cut: Cut
    splits: int
    threads: int
    shared: int
    end: str
    us: float


def x_stages(width: int, group: int) -> int:
    """Columns of X for which a CTA has room: DigitShape::kXStages."""
    return 28 // (width // TILE_TOKENS) - (group < UNIT)


def x_unit_bytes(width: int, group: int) -> int:
    """A unit of X in memory: its tiles of four tokens (kernels/prefill/digit_x.cuh)."""
    return width // TILE_TOKENS * TILE_TOKENS * (2 * UNIT + 4 * (UNIT // group))


def digit_x_bytes(cols: int) -> int:
    """Room for 16 tokens of ``cols`` columns, with the scales of the smallest groups."""
    return -(-cols // UNIT) * x_unit_bytes(WIDTHS[-1], 32)


def columns_of(groups: int, group: int) -> int:
    """Columns of K, the last of which may be shorter."""
    return -(-groups * group // (UNIT * UNITS))


def pair_bytes(group: int) -> int:
    """A column of a pair of row tiles, a warp's place: DigitShape::kSlotBytes."""
    return 2 * UNITS * (UNIT // group) * int4_block_bytes(group)


def shared_bytes(width: int, pairs: int, splits: int, group: int) -> int:
    """Dynamic shared memory that DigitShape lays out: X, barriers, a place a warp, sums of shares."""
    x = x_stages(width, group) * UNITS * x_unit_bytes(width, group)
    return max(LEAST_SHARED, x + BETWEEN + pairs * splits * pair_bytes(group) + pairs * (splits - 1) * TILE_ROWS * width * 4)


def cut_of(row_tiles: int, groups: int, width: int, pairs: int, *, whole: bool, group: int = 128, sms: int = 132) -> Cut:
    """Items of ``pairs`` pairs of row tiles; shared by CTAs of as many columns each as divide them evenly, unless ``whole``."""
    items = -(-row_tiles // (2 * pairs))
    if whole:
        return Cut(2 * pairs, items, items, width, width)
    total = items * columns_of(groups, group)
    return Cut(2 * pairs, items, items, width, width, 0, UNITS, -(-total // -(-total // sms)))


def launch_of(cut: Cut, splits: int, row_tiles: int, groups: int, n: int, group: int, sms: int) -> Digits | None:
    """A launch with that cut, or None where it does not fit: warps, shared memory, or columns of X."""
    pairs, width = cut.tiles // 2, cut.main_width
    shared, columns = shared_bytes(width, pairs, splits, group), columns_of(groups, group)
    work = cut.work(n, groups, group)
    if pairs * splits > WARPS or shared > MOST_SHARED or (-(-work.total // work.sharers) if work.sharers else columns) > x_stages(width, group):
        return None
    read = work.slots * 2 * n * row_tiles * TILE_ROWS * 4 / L2 if work.sharers else 0.0
    return Digits(cut, splits, 32 * pairs * splits, shared, f"_digits{width}", launch_us(cut, splits, row_tiles, groups, n, group, sms) + read)


def launch_us(cut: Cut, splits: int, row_tiles: int, groups: int, n: int, group: int, sms: int) -> float:
    """Predicted time of a launch, without the reading of its parts."""
    work, columns, width = cut.work(n, groups, group), columns_of(groups, group), cut.main_width
    ctas, bytes_ = work.grid(sms), pair_bytes(group)
    if work.sharers:
        most = x = -(-work.total // work.sharers)
        ends = 1 + (columns % most != 0) if most < columns else -(-most // columns) + (most % columns != 0)
    else:
        ends, x = -(-work.items // ctas), columns
        most = ends * columns
    arrive = row_tiles * columns * bytes_ / 2 / ALL + most * cut.tiles / 2 * bytes_ / BUSIEST[width] + x * UNITS * x_unit_bytes(width, group) * ctas / X
    of_warp = -(-most // splits)
    return LAUNCH[width] + max(arrive + of_warp * COLUMN[width], of_warp * TURN[width]) + (ends - 1) * END[width] + ends * (splits > 1) * MEET[width]


@lru_cache(maxsize=None)
def plan_digits(row_tiles: int, groups: int, n: int, *, whole: bool, group: int = 128, sms: int = 132, most_slots: int = 16) -> Digits | None:
    """The cheapest launch for ``n`` tokens of ``row_tiles`` 16-row tiles; ``whole``: gate and up, no parts. None: too many tokens, or nothing fits."""
    if n > WIDTHS[-1]:
        return None
    width, choices = next(w for w in WIDTHS if w >= n), []
    for pairs in range(1, WARPS + 1):
        cut = cut_of(row_tiles, groups, width, pairs, whole=whole, group=group, sms=sms)
        if cut.work(n, groups, group).slots <= most_slots:
            choices += [launch_of(cut, splits, row_tiles, groups, n, group, sms) for splits in range(1, WARPS // pairs + 1)]
    return min(filter(None, choices), key=lambda launch: (launch.us, launch.cut.tiles, launch.splits), default=None)
