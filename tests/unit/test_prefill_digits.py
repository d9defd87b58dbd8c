"""Products of prefill with digits, without a card: every launch multiplies all of its matrix once, what a warp computes lane by lane is the product, the host's numbers
are the kernels' own, and cuts that were measured best are chosen."""

import numpy as np
import pytest
from kernelmodels import MODELS, SEVEN, prefill_log

from nanoqwen.config import data_path
from nanoqwen.cuda import prefill_digits as digits
from nanoqwen.cuda import prefill_plan as plans
from nanoqwen.cuda.compile import parse_resources
from nanoqwen.cuda.constants import PREFILL_CHUNK
from nanoqwen.cuda.prefill_cut import Work
from nanoqwen.int4 import pack_codes
from nanoqwen.ladder import layouts

# ----------------------------------------------------------------------------------------- the way of each warp


def walked(work: Work, cta: int, splits: int, width: int, group: int):
    """Yields (row of items, column of K, slot of its parts) of a CTA, checking that what a warp has asked for, and the X at the stage where it looks, is what it
    multiplies: DigitRole, Stretch, DigitFeed::fill, run_item and the copies of X of kernels/prefill/gemm_digits.cuh."""
    grid, all_columns = work.grid(132), digits.columns_of(work.groups, group)
    share_begin = lambda c: work.total * c // work.sharers if c < work.sharers else work.total  # noqa: E731
    begin, end = (cta, work.whole) if work.whole else (share_begin(cta), share_begin(cta + 1))

    def stretch(at):
        if work.whole:
            return at, 0, all_columns, at + grid
        row, first = divmod(at, all_columns)
        columns = min(all_columns - first, end - at)
        return row, first, columns, at + columns

    count = all_columns if work.whole else end - begin
    assert count <= digits.x_stages(width, group) <= 32, "a lane of warp 0 asks for each"
    x = [lane if work.whole else (begin + lane) % all_columns for lane in range(count)]
    for share in range(splits):
        asked, at, column, columns, row, first = [], begin, share, 0, 0, 0
        while True:
            while column >= columns and at < end:
                column -= columns
                row, first, columns, at = stretch(at)
            if column >= columns:
                break
            asked.append((row, first + column))
            column += splits
        at, column, x_stage = begin, share, 0
        while at < end:
            row, first, columns, following = stretch(at)
            slot = 0 if work.whole else cta - work.owner(row * all_columns)
            for column in range(column, columns, splits):
                assert asked.pop(0) == (row, first + column) and x[x_stage + column] == first + column
                yield row, first + column, slot
            column = column + splits - columns if column < columns else column - columns
            x_stage += 0 if work.whole else columns
            at = following
        assert not asked


def check_walk(launch: digits.Digits, row_tiles: int, groups: int, n: int, group: int) -> None:
    work, width, tiles = launch.cut.work(n, groups, group), launch.cut.main_width, launch.cut.tiles
    found = np.zeros((work.items, digits.columns_of(groups, group)), int)
    slots: dict[int, set[int]] = {}
    for cta in range(work.grid(132)):
        for row, column, slot in walked(work, cta, launch.splits, width, group):
            found[row, column] += 1
            slots.setdefault(row, set()).add(slot)
    assert (found == 1).all() and work.items * tiles >= row_tiles > (work.items - 1) * tiles
    assert all(of == set(range(work.parts(row))) for row, of in slots.items())
    assert launch.threads == 32 * tiles // 2 * launch.splits <= 32 * digits.WARPS and launch.shared <= digits.MOST_SHARED


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize("model", MODELS)
def test_a_launch_multiplies_all_of_its_matrix_once(model, sms):
    dims, group = MODELS[model]
    for n in range(1, 17):
        found = plans.products(dims, group, n, PREFILL_CHUNK, sms)
        assert bool(found["qkv"].splits) == bool(found["gate_up"].splits), "one norm writes for both"
        for name in [name for name, product in found.items() if product.splits]:
            assert name != "o", "nobody makes digits of its X"
            rows, cols = plans.shapes(dims)[name]
            p = found[name]
            assert p.kernel == ("gemm_swiglu" if name == "gate_up" else "gemm_parts") + f"_digits{p.cut.main_width}" and p.cut.main_width >= n
            work = p.cut.work(n, cols // group, group)
            assert work.slots * n * rows <= plans.part_floats(dims, PREFILL_CHUNK) and bool(work.sharers) == (name != "gate_up")
            check_walk(digits.Digits(p.cut, p.splits, p.threads, p.shared, "", p.us), rows // 16, cols // group, n, group)


def launches(row_tiles: int, groups: int, n: int, group: int, whole: bool):
    for pairs in range(1, digits.WARPS + 1):
        for sms in (132, 101, 7):
            cut = digits.cut_of(row_tiles, groups, 8 if n <= 8 else 16, pairs, whole=whole, group=group, sms=sms)
            found = (digits.launch_of(cut, splits, row_tiles, groups, n, group, sms) for splits in range(1, digits.WARPS // pairs + 1))
            yield from filter(None, found)


@pytest.mark.parametrize("row_tiles, groups, group", [(36, 28, 128), (30, 148, 128), (22, 9, 64), (18, 33, 32)])
def test_launches_that_no_plan_would_choose_are_walked_too(row_tiles, groups, group):
    tried = 0
    for n in (8, 16):
        for whole in (False, True):
            for launch in launches(row_tiles, groups, n, group, whole):
                check_walk(launch, row_tiles, groups, n, group)
                tried += 1
    assert tried > 40


def test_digits_are_chosen_where_x_fits():
    assert [bool(plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132)["qkv"].splits) for n in (1, 16, 17)] == [True, True, False]
    dims, group = MODELS["32b"]
    assert [bool(plans.products(dims, group, n, PREFILL_CHUNK, 132)["gate_up"].splits) for n in (8, 9)] == [True, False], "5,120 columns: ten of 512, and room for seven"
    assert digits.plan_digits(288, 28, 17, whole=False) is None and digits.plan_digits(288, 28, 16, whole=False, most_slots=0) is None


# --------------------------------------------------------------------------------------------- layout and arithmetic


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("width", digits.WIDTHS)
def test_an_activation_comes_back_from_its_digits(width, group):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((width - 1, 256 + group)) * 2.0 ** rng.uniform(-9, 9, (width - 1, 1))).astype(np.float32)
    rows[2, :group], rows[3, group + 5], rows[1] = 0, np.nan, 0
    units = -(-rows.shape[1] // 128)
    x = np.zeros(units * digits.x_unit_bytes(width, group), np.uint8)
    layouts.digit_x(x, rows, width, group)
    back = layouts.undigit_x(x, np.arange(width - 1), rows.shape[1], width, group)
    bound = np.stack([layouts.record_bound(np.nan_to_num(row), group) for row in rows])
    sound = np.ones(rows.shape, bool)
    sound[3, group : 2 * group] = False
    assert (np.abs(back - rows) <= bound * 1.01)[sound].all() and np.isnan(back[~sound]).all() and not back[1].any()
    # Every byte has one owner, and the token that is not there keeps its zeros.
    high, scale = layouts.digit_places(np.arange(width)[:, None], np.arange(units * 128), width, group)
    owned = np.concatenate([high.reshape(-1), high.reshape(-1) + 64, (scale[:, ::group, None] + np.arange(4)).reshape(-1)])
    assert np.array_equal(np.sort(owned), np.arange(x.size))
    assert not layouts.undigit_x(x, np.array([width - 1]), rows.shape[1], width, group).any()
    assert digits.digit_x_bytes(rows.shape[1]) >= x.size


LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def mma_s8(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """m16n8k32 of kernels/common/ptx.cuh: a uint32 [lane, 4], b uint32 [lane, 2] -> sums [lane, 4]."""
    full_a, full_b = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    bytes_a, bytes_b = (np.ascontiguousarray(v).view(np.int8).reshape(32, -1, 4) for v in (a, b))
    for lane in LANE:
        for r in range(4):
            full_a[G[lane] + 8 * (r % 2), 16 * (r // 2) + 4 * T[lane] :][:4] = bytes_a[lane, r]
        for r in range(2):
            full_b[16 * r + 4 * T[lane] :, G[lane]][:4] = bytes_b[lane, r]
    sums = full_a @ full_b
    return np.stack([sums[G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)], axis=1)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("n", [3, 8, 9, 16])
def test_lanes_multiply_what_the_norm_has_written(n, group):
    """`multiply` of gemm_digits.cuh for a row tile, with its expressions for addresses: sums that lie as gemm_epilogues.cuh wants them are W . X^T."""
    rng = np.random.default_rng(n)
    width, cols, per, steps = 8 if n <= 8 else 16, 128 + group, 128 // group, group // 32
    codes = rng.integers(-8, 8, (16, cols)).astype(np.int8)
    scales = (2.0 ** rng.uniform(-9, -7, (16, cols // group))).astype(np.float16)
    words = pack_codes(codes).reshape(16, cols // group, 4, steps)  # [row, group, t, word]
    rows = rng.standard_normal((n, cols)).astype(np.float32)
    unit_bytes, tile_bytes = digits.x_unit_bytes(width, group), digits.x_unit_bytes(width, group) * 4 // width
    x = np.full(-(-cols // 128) * unit_bytes, 0x5A, np.uint8)  # tokens and columns that nobody has written
    layouts.digit_x(x, rows, width, group)
    acc = np.zeros((32, width // 4, 2))
    for g in range(cols // group):
        inside = g % per
        for tile in range(width // 4):
            mine = x[g // per * unit_bytes + tile * tile_bytes :][:tile_bytes]
            sums = np.zeros((32, 4), np.int64)
            for i in range(steps):
                top, bottom = words[G, g, T, i], words[G + 8, g, T, i]
                a = np.stack([top << np.uint32(4), bottom << np.uint32(4), top, bottom], axis=1) & np.uint32(0xF0F0F0F0)
                word = inside * steps + i
                at = word // 2 * 512 + LANE * 16 + word % 2 * 8
                sums += mma_s8(a, mine[at[:, None] + np.arange(8)].view(np.uint32))
            joined = sums[:, ::2] * 256 + sums[:, 1::2]
            token = tile // 2 * 8 + 2 * T + tile % 2
            assert np.abs(joined).max() < 2**31 and np.abs(sums).max() < 2**23
            x_scale = mine[(1024 + 16 * inside + 4 * T)[:, None] + np.arange(4)].view(np.float32).astype(float)
            acc[:, tile] += joined * scales[np.stack([G, G + 8], axis=1), g].astype(float) * x_scale
    found = np.zeros((n, 16))
    for tile in range(width // 4):  # acc[4 j + 2 half + e]: row g + 8 half, token 8 j + 2 t + e, with j = tile / 2 and e = tile % 2
        token = 8 * (tile // 2) + 2 * T + tile % 2
        for half in range(2):
            found[token[token < n], (G + 8 * half)[token < n]] = acc[token < n, tile, half]
    weights = (codes.reshape(16, -1, group) * scales.astype(float)[:, :, None]).reshape(16, cols)
    want = layouts.undigit_x(x, np.arange(n), cols, width, group) @ weights.T
    assert np.allclose(found, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())
    exact = rows.astype(float) @ weights.T
    assert np.linalg.norm(want - exact) < 6e-5 * np.linalg.norm(exact)


# ------------------------------------------------------------------------------------------------------ the compiler


@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_shapes_of_the_kernels(model):
    """And no kernel spills, though a warp holds a column of weights in registers."""
    _, group = MODELS[model]
    text = (data_path("kernels") / "prefill/gemm_digits.cu").read_text(encoding="utf-8")
    lines = [f"static_assert(kDigitWarps == {digits.WARPS} && kColumnUnits == {digits.UNITS} && kTileTokens == {digits.TILE_TOKENS} && sizeof(DigitOperands) == 24);"]
    for width in digits.WIDTHS:
        laid_out = digits.x_stages(width, group) * digits.UNITS * digits.x_unit_bytes(width, group)
        lines.append(
            f"static_assert(DigitShape<{width}>::kXStages == {digits.x_stages(width, group)} && DigitShape<{width}>::kWeightsAt == {laid_out + digits.BETWEEN} && "
            f"DigitShape<{width}>::kSlotBytes == {digits.pair_bytes(group)} && DigitShape<{width}>::kSumBytes == {64 * width});"
        )
    used = parse_resources(prefill_log(model, "gemm_digits.cu", text + "\n".join(lines)))
    assert set(used) == {f"{name}_digits{width}" for name in ("gemm_parts", "gemm_swiglu") for width in digits.WIDTHS}
    assert all(not use.stack_bytes and not use.spill_bytes for use in used.values())


# ----------------------------------------------------------------------------------------------------- what was measured

#: Microseconds of a launch among launches of the same product in a row, each begun before the one before had ended; on an H200, for the 7B: (tokens, product) -> pairs x splits.
MEASURED = {
    (8, "qkv"): "8x1 4.2, 12x1 4.4, 9x1 4.7, 6x2 5.0, 4x3 5.2, 5x2 5.3, 3x4 5.4, 2x6 5.6",
    (8, "o"): "8x1 3.8, 7x1 3.9, 12x1 4.0, 10x1 4.1, 4x3 4.5, 5x2 4.8, 6x2 4.8, 3x4 4.9",
    (8, "gate_up"): "3x4 18.0, 9x1 18.0, 3x3 18.2, 5x2 18.5, 6x2 19.6, 12x1 20.3, 2x6 20.5, 4x3 20.6",
    (8, "down"): "8x1 10.0, 12x1 10.3, 7x1 10.4, 4x3 10.9, 6x1 11.0, 5x2 11.2, 6x2 11.2, 3x4 11.4",
    (16, "qkv"): "8x1 5.3, 12x1 5.5, 9x1 5.9, 4x3 6.4, 6x2 6.7, 3x4 6.9, 5x2 6.9, 2x6 7.1",
    (16, "o"): "8x1 4.8, 7x1 4.8, 12x1 5.2, 4x3 5.6, 3x4 6.3, 5x2 6.4, 2x6 6.4, 1x7 7.2",
    (16, "gate_up"): "3x4 23.1, 9x1 23.4, 12x1 23.7, 3x3 24.5, 6x2 25.0, 5x2 25.1, 4x3 25.2, 2x6 27.6",
    (16, "down"): "8x1 12.5, 12x1 13.1, 6x2 13.7, 7x1 14.0, 5x2 14.5, 11x1 14.7, 6x1 15.6",
}


@pytest.mark.parametrize("n, name", MEASURED)
def test_the_model_has_learned_what_was_measured(n, name):
    """Each launch to a tenth, and the one that it chooses is as fast as the fastest to 3 %."""
    rows, cols = plans.shapes(SEVEN)[name]
    size, whole = (rows // 16, cols // 128), name == "gate_up"
    measured = {}
    for pairs, splits, us in (map(float, text.replace("x", " ").split()) for text in MEASURED[n, name].split(",")):
        cut = digits.cut_of(*size, n, int(pairs), whole=whole)
        measured[cut, int(splits)] = us
        assert digits.launch_us(cut, int(splits), *size, n, 128, 132) == pytest.approx(us, rel=0.1), (pairs, splits)
    chosen = digits.plan_digits(*size, n, whole=whole)
    assert measured[chosen.cut, chosen.splits] <= 1.03 * min(measured.values())
