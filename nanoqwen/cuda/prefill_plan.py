"""How a chunk of a prompt is cut into work for the tensor cores, and what the workspace takes. Needs no card.

A matrix product of prefill (kernels/prefill/gemm_int4.cuh) is cut into items: some 16-row tiles of the weights and some tokens, a width for which the
kernel is compiled. One CTA an SM takes whole items in turn; what is to be avoided is a last round in which most SMs have nothing. Where sums may leave
in parts, the items of that round are shared: their K, laid end to end, is divided evenly among the SMs (kernels/prefill/gemm_work.cuh). Gate and up,
whose SwiGLU needs finished sums, have narrower token tiles in the last round instead. Costs are a model in microseconds, there to choose between cuts.

For up to 16 tokens, the two products that read a norm take its output as digits, where that fits; ``prefill_digits`` cuts these. So does down, if a launch in front of it
that makes digits of its X pays; o, which is small, would gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoqwen.config import Dims
from nanoqwen.cuda.constants import TILE_ROWS, int4_block_bytes
from nanoqwen.cuda.prefill_cut import L2, UNIT, Cut, units_of
from nanoqwen.cuda.prefill_digits import QUANTISE, Digits, digit_x_bytes, plan_digits

#: Columns of a slab of X.
SLAB = 64
#: Tokens from which on a chunk is planned and cut for a multiple of as many: every wide tile is one, so the number of token tiles is the planned one.
LONG, LONG_STEP = 512, 128
#: Chunks of up to so many tokens are launched as one captured graph, for the planned length.
GRAPH_UP_TO = 256


@dataclass(frozen=True)
class Shape:
    """A GemmShape of kernels/prefill/gemm_shapes.cuh: consumer ``warpgroups``, weight ``stages`` (``stages_small`` with groups below 128, which have more
    scales), ``slots`` of X of ``tokens`` each; the compiled ``widths`` of a tile (without 96 for such groups), and the row tiles that an item may have."""

    warpgroups: int
    stages: int
    stages_small: int
    slots: int
    tokens: int
    widths: tuple[int, ...]
    tiles: tuple[int, ...]

    def widths_for(self, group: int) -> tuple[int, ...]:
        return self.widths if group == UNIT else tuple(w for w in self.widths if w != 96)


#: By the end of a kernel's name: Wide, Middle, Few.
SHAPES = {
    "": Shape(2, 3, 3, 7, 128, (64, 96, 128), (16,)),
    "_middle": Shape(3, 3, 3, 8, 64, (64,), tuple(range(4, 25, 2))),
    "_few": Shape(3, 4, 3, 6, 32, (32,), tuple(range(4, 25, 2))),
}
#: Barriers of staged results, and units of K in a weight stage.
STAGED, STAGE_UNITS = 4, 2
#: The most parts that a sum comes in, and the tokens for which the workspace has room for as many; of a whole chunk it has room for two.
MOST_SLOTS, SLOT_TOKENS, CHUNK_SLOTS = 16, 256, 2

#: The kernels of a norm: CTAs that share a token, and the most warps that one of them may have (kernels/prefill/rows_tiled.cu).
NORMS = {"norm_rows_tiled": (1, 20), "norm_rows_spread": (4, 16), "norm_rows_digits": (4, 16)}
#: Threads of a CTA of rope_append_parts, and of quantise_tiles.
ROPE_THREADS, QUANTISE_THREADS = 128, 128
#: A token is spread over several CTAs in chunks of up to so many tokens: behind them every SM has one anyway.
NORM_SPREAD_UP_TO = 96

# ---- The model, fitted to launches timed on one H200 with the 7B's matrices.

#: A unit of K of an item: of 256 rows on wide tiles of so many tokens, all SMs at work; and, for the others, of an item of no row tiles and of each one.
WIDE_UNIT = {64: 1.08, 96: 1.27, 128: 1.40}
OTHER_UNIT = {"_middle": (1.12, 0.010), "_few": (0.68, 0.0125)}
#: SMs without work leave power to the others, whose clock rises: the share of a wide unit's time that each share of idle SMs saves, as far as was measured.
POWER, MOST_IDLE = 0.7, 0.15
#: From one launch to the next without work; the end of an item of SwiGLU; that of 256 rows and 128 tokens whose sums are written.
RAMP, SWIGLU_END, PARTS_END, LEAST_END = 5.0, 1.5, 3.0, 0.5
#: Bytes a microsecond of DRAM when all SMs copy.
DRAM = 4.3e6
#: An SM that has nothing: decides between cuts that are alike.
IDLE = 0.01


@dataclass(frozen=True)
class Product:
    """One of a layer's four products in a chunk: the kernel that makes it, its cut, and how long the model thinks that takes, in microseconds; threads and
    bytes of dynamic shared memory of a CTA. ``splits``: warps that share the K of a pair of row tiles where X comes as digits, else 0."""

    kernel: str
    cut: Cut
    us: float
    threads: int
    shared: int
    splits: int = 0


# ------------------------------------------------------------------------------------------------------------ the choice


def unit_us(end: str, tiles: int, width: int, ctas: int, sms: int) -> float:
    """One unit of K of an item while ``ctas`` CTAs run."""
    if end:
        none, each = OTHER_UNIT[end]
        return none + each * tiles
    return WIDE_UNIT[width] * (1 - POWER * min(1 - ctas / sms, MOST_IDLE))


def launch_us(busiest: float, row_tiles: int, units: int, group: int, ctas: int, sms: int) -> float:
    """A launch whose busiest CTA has so much to do: not before DRAM has delivered the weights."""
    return RAMP + IDLE * (sms - ctas) + max(busiest, row_tiles * units * (UNIT // group) * int4_block_bytes(group) / DRAM)


def whole_us(cut: Cut, n: int, row_tiles: int, groups: int, group: int, sms: int, end: str) -> float:
    """Predicted time of a launch of whole items."""
    units, work = units_of(groups, group), cut.work(n, groups, group)
    ctas = min(sms, work.items)
    main, tail = (units * unit_us(end, cut.tiles, w, ctas, sms) + SWIGLU_END for w in (cut.main_width, cut.tail_width))

    def rounds(items: int, cta: int) -> int:
        return (items - cta + ctas - 1) // ctas

    # CTA c takes items c, c + ctas, ... The load changes only behind the last CTA of a partial round.
    edges = {0, work.main_items % ctas, work.items % ctas}
    busiest = max(rounds(work.main_items, c) * main + (rounds(work.items, c) - rounds(work.main_items, c)) * tail for c in edges)
    return launch_us(busiest, row_tiles, units, group, ctas, sms)


def parts_us(cut: Cut, n: int, row_tiles: int, groups: int, group: int, sms: int, end: str) -> float:
    """Predicted time of a launch that leaves parts, and of reading them."""
    units, work = units_of(groups, group), cut.work(n, groups, group)
    ctas = work.grid(sms)
    fewest, most = work.total // work.sharers, -(-work.total // work.sharers)
    aligned = fewest == most and (work.quanta % most == 0 or most % work.quanta == 0) or (work.sharers % (work.items - work.whole) == 0)
    ends = -(-most // work.quanta) if aligned else (most - 1) // work.quanta + 2
    rounds = work.whole // sms
    busiest = (rounds * units + min(most * cut.quantum, -(-most // work.quanta) * units)) * unit_us(end, cut.tiles, cut.main_width, ctas, sms)
    busiest += (rounds + ends) * (LEAST_END + PARTS_END * cut.tiles * min(cut.main_width, n) / (16 * 128))
    written = work.whole + sum(work.parts(item) for item in range(work.whole, work.items))
    read = written * cut.tiles * TILE_ROWS * min(cut.main_width, n) * 4 / L2
    return launch_us(busiest, row_tiles, units, group, ctas, sms) + read


def kind(n: int, name: str) -> tuple[str, ...]:
    """Ends of the names of the kernels among which product ``name`` of ``n`` tokens has a choice, if X comes as FP16."""
    if n <= SHAPES["_few"].tokens:
        return ("_few",)
    if n <= SHAPES["_middle"].tokens:
        return ("_middle",) if name == "gate_up" else ("_middle", "")
    return ("",)


def _widths(end: str, n: int, group: int) -> list[int]:
    """Widths that are not all wider than needed; long chunks are cut as they are planned."""
    widths = SHAPES[end].widths_for(group)
    useful = [w for i, w in enumerate(widths) if i == 0 or widths[i - 1] < n]
    return useful if n <= LONG else [w for w in useful if w % LONG_STEP == 0]


@lru_cache(maxsize=None)
def plan_whole(row_tiles: int, groups: int, n: int, *, group: int = 128, end: str = "", sms: int = 132) -> tuple[float, Cut]:
    """(predicted microseconds, cut): the cheapest cut of ``row_tiles`` row tiles, those of gate and of up together, into whole items."""
    choices = []
    for tiles in SHAPES[end].tiles:
        rows = -(-row_tiles // tiles)
        for main in _widths(end, n, group):
            for tail in [w for w in SHAPES[end].widths_for(group) if w <= main]:
                tokens = -(-n // main)
                main_rows = rows if tail == main else rows * tokens // sms * sms // tokens
                cut = Cut(tiles, rows, main_rows, main, tail)
                choices.append((whole_us(cut, n, row_tiles, groups, group, sms, end), -main, -tail, -tiles, cut))
    us, *_, cut = min(choices, key=lambda c: c[:-1])
    return us, cut


@lru_cache(maxsize=None)
def plan_parts(row_tiles: int, groups: int, n: int, *, group: int = 128, end: str = "", most_slots: int = MOST_SLOTS, sms: int = 132) -> tuple[float, Cut]:
    """(predicted microseconds, cut): the cheapest cut of ``row_tiles`` row tiles whose sums may come in up to ``most_slots`` parts."""
    units, choices = units_of(groups, group), []
    for tiles in SHAPES[end].tiles:
        rows = -(-row_tiles // tiles)
        for width in _widths(end, n, group):
            items = rows * -(-n // width)
            for whole in range(0, items // sms * sms + 1, sms):
                for quantum, sharers in _shares(items - whole, units, sms):
                    # A last round that is full is shared too, an item each.
                    cut = Cut(tiles, rows, rows, width, width, whole - sms * (whole == items), quantum, sharers)
                    if cut.work(n, groups, group).slots <= most_slots:
                        choices.append((parts_us(cut, n, row_tiles, groups, group, sms, end), -quantum, -width, -tiles, cut))
    us, *_, cut = min(choices, key=lambda c: c[:-1])
    return us, cut


def _shares(shared: int, units: int, sms: int) -> list[tuple[int, int]]:
    """(quantum, sharers) to consider for so many shared items: all SMs, or as many CTAs for each item."""
    if not shared:
        return [(units, sms)]
    found = []
    for quantum in (4, 2, 1):
        total = shared * -(-units // quantum)
        found += [(quantum, s) for s in sorted({min(sms, total), *(shared * k for k in range(1, sms // shared + 1) if shared * k <= total)})]
    return found


def planned_length(n: int) -> int:
    """The length whose cuts serve a chunk of ``n`` tokens: a little more. Few lengths are planned that way, and the next one is found ready."""
    step = 8 if n <= SHAPES["_middle"].tokens else 32 if n <= LONG else LONG_STEP
    return -(-n // step) * step


def launched_length(n: int, chunk: int) -> int:
    """Tokens for which a chunk of ``n`` is launched: of a short one a few more, so that a few graphs serve all of them."""
    return min(planned_length(n), chunk) if n <= GRAPH_UP_TO else n


def graph_lengths(chunk: int) -> list[int]:
    """The lengths that are launched as graphs, ascending, for chunks of up to ``chunk`` tokens."""
    return sorted({launched_length(n, chunk) for n in range(1, min(GRAPH_UP_TO, chunk) + 1)})


def shapes(dims: Dims) -> dict[str, tuple[int, int]]:
    """{"qkv": (rows, columns), ...}: the four products of a layer."""
    return {
        "qkv": (dims.q_size + 2 * dims.kv_size, dims.hidden), "o": (dims.hidden, dims.q_size),
        "gate_up": (2 * dims.intermediate, dims.hidden), "down": (dims.hidden, dims.intermediate),
    }  # fmt: skip


def products(dims: Dims, group: int, n: int, chunk: int, sms: int) -> dict[str, Product]:
    """The four products of a layer for ``n`` of at most ``chunk`` tokens on ``sms`` SMs."""
    at, found = planned_length(n), {}
    most_slots = min(MOST_SLOTS, part_tokens(chunk) // at)
    digits = _digits(dims, group, at, most_slots, sms)
    for name, (rows, cols) in shapes(dims).items():
        begin, choices = "gemm_swiglu" if name == "gate_up" else "gemm_parts", []
        if name in digits:
            launch = digits[name]
            found[name] = Product(begin + launch.end, launch.cut, launch.us, launch.threads, launch.shared, launch.splits)
            continue
        if name == "down" and (launch := plan_digits(rows // TILE_ROWS, cols // group, at, whole=False, group=group, sms=sms, most_slots=most_slots)):
            choices.append(Product(begin + launch.end, launch.cut, launch.us + QUANTISE, launch.threads, launch.shared, launch.splits))
        for end in kind(n, name):
            common = {"group": group, "sms": sms, "end": end}
            size = rows // TILE_ROWS, cols // group, at
            us, cut = plan_whole(*size, **common) if name == "gate_up" else plan_parts(*size, most_slots=most_slots, **common)
            choices.append(Product(begin + end, cut, us, gemm_threads(end), gemm_shared_bytes(end, group)))
        found[name] = min(choices, key=lambda product: product.us)
    return found


def _digits(dims: Dims, group: int, n: int, most_slots: int, sms: int) -> dict[str, Digits]:
    """Launches of the products that read a norm, from digits; none if one of them does not fit: the same norm writes for both."""
    found = {}
    for name in ("qkv", "gate_up"):
        rows, cols = shapes(dims)[name]
        found[name] = plan_digits(rows // TILE_ROWS, cols // group, n, whole=name == "gate_up", group=group, sms=sms, most_slots=most_slots)
    return {} if None in found.values() else found


# --------------------------------------------------------------------------------------------------- launches and bytes


def norm_kernel(n: int, reader: Product) -> str:
    """The kernel that takes the norms of a chunk of ``n`` tokens, whose output ``reader`` multiplies with."""
    if reader.splits:
        return "norm_rows_digits"
    return "norm_rows_spread" if n <= NORM_SPREAD_UP_TO else "norm_rows_tiled"


def norm_shape(kernel: str, dims: Dims) -> tuple[int, int]:
    """(CTAs a token, threads of a CTA) of a norm: a warp has a unit of columns, or several of them where a CTA would have too many warps. RowShape::kThreads."""
    ctas, most_warps = NORMS[kernel]
    units = -(-units_of(dims.hidden, 1) // ctas)
    return ctas, 32 * -(-units // -(-units // most_warps))


def gemm_threads(kernel: str) -> int:
    """Threads of a CTA: GemmShape::kThreads."""
    return 128 * (1 + _shape(kernel).warpgroups)


def gemm_shared_bytes(kernel: str, group: int) -> int:
    """Dynamic shared memory of a CTA: GemmShape::kShared."""
    shape = _shape(kernel)
    stages = shape.stages if group == UNIT else shape.stages_small
    stage = 8 * shape.warpgroups * STAGE_UNITS * (UNIT // group) * int4_block_bytes(group)
    return shape.slots * shape.tokens * 2 * SLAB + stages * stage + 8 * (2 * stages + 2 * shape.slots + STAGED)


def _shape(kernel: str) -> Shape:
    return SHAPES[next((end for end in SHAPES if end and kernel.endswith(end)), "")]


def slab_tokens(chunk: int) -> int:
    """Tokens of a slab of X: the chunk in whole groups of eight, the swizzle's period and the least that is copied."""
    return -(-chunk // 8) * 8


def x_shape(cols: int, chunk: int) -> tuple[int, int, int]:
    """[slabs, tokens, 64] of an activation in the order of kernels/prefill/tiled_x.cuh; K is padded to whole units."""
    return -(-cols // UNIT) * (UNIT // SLAB), slab_tokens(chunk), SLAB


def part_tokens(chunk: int) -> int:
    """Tokens times slots for which the buffer of partial sums has room."""
    return max(CHUNK_SLOTS * planned_length(chunk), MOST_SLOTS * min(planned_length(chunk), SLOT_TOKENS))


def part_floats(dims: Dims, chunk: int) -> int:
    """FP32 values of the buffer that partial sums are written to."""
    return part_tokens(chunk) * max(dims.q_size + 2 * dims.kv_size, dims.hidden)


def prefill_bytes(dims: Dims, chunk: int) -> int:
    """The workspace of chunks of ``chunk`` tokens: span and ids, residual, the two activations and two as digits, their factors, q and partial sums."""

    def x_bytes(cols: int) -> int:
        slabs, tokens, width = x_shape(cols, chunk)
        return 2 * slabs * tokens * width

    rows = 4 * (2 + chunk * (1 + dims.hidden + dims.q_size)) + 2 * 4 * slab_tokens(chunk)
    digits = digit_x_bytes(dims.hidden) + digit_x_bytes(dims.intermediate)
    return rows + x_bytes(max(dims.hidden, dims.q_size)) + x_bytes(dims.intermediate) + digits + 4 * part_floats(dims, chunk)
