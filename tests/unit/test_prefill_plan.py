"""Prefill without a card: every cut covers its product exactly once, the host's numbers are the kernels' own, and the workspace is what is planned."""

import ctypes
import dataclasses
import re

import cardkit
import numpy as np
import pytest
from kernelmodels import MODELS, SEVEN

from nanoqwen.config import Dims, data_path
from nanoqwen.cuda import prefill_plan as plans
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape, constants_header
from nanoqwen.cuda.memory import workspace_bytes
from nanoqwen.ladder import layouts

LENGTHS = (1, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 100, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 1025, 2047, 2048)


def item_of(w: plans.Work, index: int, group: int) -> tuple[int, int, int, int, int]:
    """(row, first token, width, first unit, last unit): `item_of` of kernels/prefill/gemm_int4.cuh."""
    split, index = divmod(index, w.split_items)
    if index < w.main_items:
        row, token, width = index // w.main_tokens, index % w.main_tokens * w.main_width, w.main_width
    else:
        index -= w.main_items
        row, token, width = w.main_rows + index // w.tail_tokens, index % w.tail_tokens * w.tail_width, w.tail_width
    per_unit = plans.UNIT // group
    units = -(-w.groups // per_unit)
    return row, token, width, units * split // w.splits, units * (split + 1) // w.splits


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize("model", MODELS)
def test_the_items_of_a_product_cover_it_exactly_once(model, sms):
    dims, group = MODELS[model]
    for n in LENGTHS:
        for name, product in plans.products(dims, group, n, PREFILL_CHUNK, sms).items():
            rows, cols = plans.shapes(dims)[name]
            work = product.cut.work(n, cols // group)
            done = np.zeros((product.cut.rows, n, -(-cols // plans.UNIT)), dtype=np.int8)
            for index in range(work.items):
                row, token, width, first, last = item_of(work, index, group)
                assert first < last and token < n
                done[row, token : token + width, first:last] += 1
            assert (done == 1).all(), (name, n, product)
            assert product.cut.rows * product.cut.tiles >= rows // 16 > (product.cut.rows - 1) * product.cut.tiles
            assert product.cut.tiles % 2 == 0 or name != "gate_up", "a gate tile and its tile of up are one item's"
            assert product.cut.tiles == plans.TILES or product.kernel.endswith(("narrow", "middle")) and product.cut.tiles <= plans.MOST_TILES
            compiled = {"narrow": plans.NARROW, "middle": plans.MIDDLE, "qkv": plans.WIDE_QKV}.get(product.kernel.rpartition("_")[2], plans.WIDE)
            assert {product.cut.main_width, product.cut.tail_width} <= {*compiled}
            if product.kernel.startswith("gemm_parts"):
                assert product.cut.splits * n * rows <= plans.part_floats(dims, PREFILL_CHUNK)
            else:
                assert product.cut.splits == 1


def test_the_products_of_the_7b_keep_the_card_busy():
    for n in LENGTHS:
        for name, product in plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132).items():
            items = product.cut.work(n, plans.shapes(SEVEN)[name][1] // 128).items
            assert items >= 66, (name, n, items)


@pytest.mark.parametrize("context", [1, 5, 96, 640, PREFILL_CHUNK])
def test_parts_of_a_short_context_fit(context):
    for n in {1, context // 2 or 1, context}:
        for name, product in plans.products(SEVEN, 128, n, context, 132).items():
            if product.kernel.startswith("gemm_parts"):
                assert product.cut.splits * n * plans.shapes(SEVEN)[name][0] <= plans.part_floats(SEVEN, context)


@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_shapes_of_the_kernels(model):
    """Threads, shared memory and the layout of arguments, as the compiler sees them."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    from nanoqwen.cuda import compile as compiling

    dims, group = MODELS[model]
    room = data_path("kernels")
    source = (room / "prefill/gemm_shapes.cuh").read_text(encoding="utf-8")
    kernels = [found for p in sorted(room.glob("prefill/gemm_*.cu")) for found in re.findall(r"^NANOQWEN_GEMM\((\w+)\) (\w+)\(", p.read_text(encoding="utf-8"), re.M)]
    assert {name for _, name in kernels} == {p.kernel for n in LENGTHS for p in plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132).values()}
    lines = [f"static_assert({shape}::kThreads == {plans.gemm_threads(name)} && {shape}::kShared == {plans.gemm_shared_bytes(name, group)});" for shape, name in kernels]
    lines.append(f"static_assert(sizeof(Work) == {ctypes.sizeof(plans.Work)} && sizeof(Operands) == 32 && sizeof(QkvOut) == 80 && sizeof(SwigluOut) == 32 && sizeof(SwigluDirect) == 32);")
    lines.append(f"static_assert(kUnit == {plans.UNIT} && kSlab == {plans.SLAB} && kSlab == {layouts.SLAB} && kBlockBytes == Int4Block::kBytes && !kBundled);")
    text = source[: source.index("#define NANOQWEN_GEMM")] + 'using namespace nanoqwen;\n#include "int4_block.cuh"\n' + "\n".join(lines)
    headers = {p.name: p.read_text(encoding="utf-8") for folder in ("common", "prefill") for p in (room / folder).glob("*.cuh")}
    compiling._compile(nvrtc, "shapes.cu", text, headers | {"constants.cuh": constants_header(dims, group, LaunchShape(132))})


def test_the_wide_products_are_spelled_out_as_the_instruction_wants_them():
    """wgmma names each accumulator. The header's functions are one pattern for every width, and this is the pattern."""
    header = (data_path("kernels") / "prefill/wgmma.cuh").read_text(encoding="utf-8")
    widths = [int(n) for n in re.findall(r"m64n(\d+)k16", header)]
    assert widths == sorted({8, *plans.NARROW, *plans.MIDDLE, *plans.WIDE, *plans.WIDE_QKV})
    found = header[header.index("__device__ __forceinline__ void wgmma(") :]
    assert found.split() == [*" ".join(spelled(n) for n in widths).split(), *"} // namespace nanoqwen".split()]


def spelled(n: int) -> str:
    registers = n // 2
    names = [f"%{i}" for i in range(registers)]
    lines = "".join(f'"{", ".join(names[i : i + 16])}{", " if i + 16 < registers else ""}" ' for i in range(0, registers, 16))
    outs = ", ".join(f'"+f"(d[{k}])' for k in range(registers))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{registers}], const u32 (&a)[4], u64 b) {{ asm volatile( "
        f'"{{.reg .pred add; setp.eq.u32 add, 0, 0;\\n" "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{" {lines}'
        f'"}}, {{%{registers}, %{registers + 1}, %{registers + 2}, %{registers + 3}}}, %{registers + 4}, add, 1, 1, 0;}}\\n" '
        f': {outs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); }}'
    )


# ------------------------------------------------------------------------------------ on a card that numpy plays


@pytest.fixture
def prefill(monkeypatch):
    """A function that makes the weights of a small model and its Prefill."""
    with cardkit.played(monkeypatch) as card:
        from nanoqwen.cuda.decode import DecodeBuffers
        from nanoqwen.cuda.launch import Kernels
        from nanoqwen.cuda.prefill import Prefill
        from nanoqwen.cuda.weights import synthesise

        class Engine: ...

        def make(dims: Dims, group: int, chunk: int):
            kernels, shape = Kernels("", None), LaunchShape(cardkit.SMS)
            card.engine = Engine()
            card.engine._weights = weights = synthesise(dims, group, kernels)
            return Prefill(kernels, weights, DecodeBuffers(dims, group, shape, 4), shape, chunk)

        yield make


@pytest.mark.parametrize("chunk", [5, 100, 640])
@pytest.mark.parametrize("model", ["heads of 64, group 64, tied", "group 32"])
def test_the_workspace_is_what_the_plan_says(prefill, model, chunk):
    dims, group = MODELS[model]
    dims = dataclasses.replace(dims, num_layers=1, vocab=64)
    made = prefill(dims, group, chunk)
    arrays = [a for a in vars(made).values() if isinstance(a, np.ndarray)]
    assert made.nbytes == sum(a.nbytes for a in arrays) == plans.prefill_bytes(dims, chunk)
    before, after = (workspace_bytes(dims, group, LaunchShape(132), 640, c) for c in (chunk, chunk + 8))
    assert after - before == plans.prefill_bytes(dims, chunk + 8) - plans.prefill_bytes(dims, chunk)


def test_the_workspace_of_the_7b_has_no_second_copy_of_the_weights():
    assert plans.prefill_bytes(SEVEN, PREFILL_CHUNK) <= 300e6


def test_a_chunk_of_another_length_or_place_is_the_same_launches(prefill):
    dims, group = MODELS["group 32"]
    dims = dataclasses.replace(dims, num_layers=2, vocab=64)
    made = prefill(dims, group, 64)
    pools = [np.zeros((2, 2, pages, 16 * dims.kv_size), np.float16).view(cardkit.Array) for pages in (4, 8)]
    first = list(made.launches(40, 0, pools[0]))
    grids = [launch.grid for launch in first]
    again = made.launches(57, 3, pools[1])
    assert all(a is b for a, b in zip(first, again))
    rope = next(launch for launch in again if launch.name == "rope_append_parts")
    assert grids[1] == (40,) and again[1].grid == (57,) and rope.grid == (dims.num_heads + 2 * dims.num_kv_heads, 57)
    assert rope.args[7].value == 3 and (rope.args[9].value, rope.args[10].value) == (pools[1][0, 0].data.ptr, pools[1][0, 1].data.ptr)
    assert next(launch for launch in again if launch.name == "gemm_swiglu_middle").args[0].n == 57
    assert {launch.name for launch in made.launches(3, 0, pools[1])} >= {"gemm_parts_narrow", "gemm_swiglu_narrow"}


@pytest.mark.parametrize("peak, power", [(65504.0, 0), (32768.0, 0), (32752.0, 1), (1.0, 15), (2.0**-14, 29), (2.0**-20, 30), (0.0, 0)])
def test_scales_are_brought_up_to_the_top_of_fp16(prefill, peak, power):
    from nanoqwen.cuda.prefill import scale_power

    assert scale_power(peak) == power
    assert float(np.float16(peak * 2.0**power)) == peak * 2.0**power < 65536


@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_activation_comes_back_from_its_tiles(group):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((21, 256 + group)).astype(np.float16)
    x = np.zeros(plans.x_shape(rows.shape[1], 30), np.float16)
    assert x.shape[1] == 32 and x.shape[0] * 64 % 128 == 0
    layouts.tile_x(x, rows, group)
    assert np.array_equal(layouts.untile_x(x[:, :21], np.arange(21), rows.shape[1], group), rows)
    some = np.array([3, 9, 20])
    assert np.array_equal(layouts.untile_x(x[:, some], some, rows.shape[1], group), rows[some])
    # Eight columns in a row of a lane's weights: k = 2t, 2t + 1, then 8 + 2t, 9 + 2t of one step of the product, and of the next.
    assert layouts.x_places(np.arange(8), group).tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert layouts.x_places(np.array([group // 4, group + 1]), group).tolist() == [2, group + 1]


@pytest.mark.parametrize("rows, cols, group", [(48, 384, 128), (16, 320, 64), (80, 96, 32)])
def test_projections_lie_in_blocks_and_come_back(prefill, rows, cols, group):
    from nanoqwen.cuda.weights import tile_int4, untile_int4

    rng = np.random.default_rng(1)
    codes = rng.integers(0, 1 << 32, (rows, cols // 8), dtype=np.uint32).view(cardkit.Array)
    scales = rng.standard_normal((rows, cols // group)).astype(np.float16).view(cardkit.Array)
    matrix = tile_int4(codes, scales)
    back = untile_int4(matrix, group)
    assert np.array_equal(back[0], codes) and np.array_equal(back[1], scales)
    slices, size = cols // group, 8 * group + 32
    assert matrix.bundles.shape == (-(-rows // 16 * slices // 4), size) and (rows, cols) == (matrix.rows, matrix.cols)
    flat = matrix.bundles.reshape(-1).view(np.uint8)
    for tile, part in ((0, 0), (rows // 16 - 1, slices - 1)):
        block = flat[(tile * slices + part) * size :][:size]
        for g in (0, 3, 7):
            words = block[(g + 8) * group // 2 :][: group // 2].view(np.uint32)
            assert np.array_equal(words, codes[16 * tile + g + 8, part * group // 8 : (part + 1) * group // 8])
            pair = block[8 * group + 4 * g :][:4].view(np.float16)
            assert np.array_equal(pair, scales[[16 * tile + g, 16 * tile + g + 8], part])
    assert not flat[rows // 16 * slices * size :].any(), "what fills the last bundle is zero"


def test_the_cuts_that_were_measured_best_are_chosen():
    """On an H200, for the 7B: (tokens, product) -> tile width and pieces of K."""
    for n, name, width, splits in ((16, "down", 16, 13), (128, "down", 128, 9), (512, "down", 128, 2), (512, "o", 128, 2)):
        found = plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132)[name]
        assert found.kernel.startswith("gemm_parts") and (found.cut.main_width, found.cut.splits) == (width, splits), (n, name, found)
    for name in ("o", "down"):
        assert plans.products(SEVEN, 128, 1024, PREFILL_CHUNK, 132)[name].kernel == "gemm_parts"
