"""Prefill without a card: every cut covers its product exactly once, the host's numbers are the kernels' own, and the workspace is what is planned."""

import ctypes
import dataclasses
import re
import types

import cardkit
import numpy as np
import pytest
from kernelmodels import MODELS, SEVEN, prefill_log
from wgmmatext import wrapper

from nanoqwen.config import Dims, data_path
from nanoqwen.cuda import prefill_plan as plans
from nanoqwen.cuda.compile import parse_resources
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape
from nanoqwen.cuda.memory import workspace_bytes
from nanoqwen.cuda.prefill_cut import Work
from nanoqwen.ladder import layouts

LENGTHS = (1, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 100, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 1025, 2047, 2048)


class Walk:
    """The way of CTA `cta` through its items: first_position, next_position and item_at of kernels/prefill/gemm_work.cuh."""

    def __init__(self, work: Work, cta: int, grid: int, group: int) -> None:
        self.w, self.cta, self.grid, self.units = work, cta, grid, plans.units_of(work.groups, group)

    def begin(self, cta: int) -> int:
        return self.w.total * cta // self.w.sharers if cta < self.w.sharers else self.w.total

    def __iter__(self):
        w, at, end = self.w, self.cta if self.cta < self.w.whole else self.w.whole + self.begin(self.cta), self.w.whole + self.begin(self.cta + 1)
        while at < end:
            yield self.item(at)
            if at >= w.whole:
                at = min(at + w.quanta - (at - w.whole) % w.quanta, end)
            else:
                at += self.grid
                at = at if at < w.whole else w.whole + self.begin(self.cta)

    def item(self, at: int) -> tuple[int, int, int, int, int, int]:
        """(row, first token, width, slot, first unit, last unit)."""
        w, slot, first, last = self.w, 0, 0, self.units
        if at >= w.whole:
            of, inside = divmod(at - w.whole, w.quanta)
            first, last = inside * w.quantum, min(last, (inside + self.begin(self.cta + 1) - (at - w.whole)) * w.quantum)
            slot, at = self.cta - w.owner(of * w.quanta), w.whole + of
        if at < w.main_items:
            return at // w.main_tokens, at % w.main_tokens * w.main_width, w.main_width, slot, first, last
        at -= w.main_items
        return w.main_rows + at // w.tail_tokens, at % w.tail_tokens * w.tail_width, w.tail_width, slot, first, last


def check_walk(work: Work, rows: int, group: int, sms: int) -> None:
    """All CTAs together do every item from its first unit to its last, in as many parts as the readers count."""
    grid, units, found = work.grid(sms), plans.units_of(work.groups, group), {}
    assert 1 <= grid <= sms
    for cta in range(grid):
        for row, token, width, slot, first, last in Walk(work, cta, grid, group):
            assert first < last <= units and token < work.n
            found.setdefault((row, token, width), []).append((slot, first, last))
    assert len(found) == work.items
    covered = np.zeros((rows, work.n), np.int8)
    for (row, token, width), parts in found.items():
        covered[row, token : token + width] += 1
        parts.sort()
        assert [slot for slot, *_ in parts] == list(range(len(parts))) and len(parts) <= work.slots
        assert parts[0][1] == 0 and parts[-1][2] == units and all(a[2] == b[1] for a, b in zip(parts, parts[1:]))
        if rows == work.main_rows:
            assert len(parts) == work.parts(row * work.main_tokens + token // work.main_width)
    assert (covered == 1).all()


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize("model", MODELS)
def test_the_items_of_a_product_cover_it_exactly_once(model, sms):
    dims, group = MODELS[model]
    for n in LENGTHS:
        for name, product in plans.products(dims, group, n, PREFILL_CHUNK, sms).items():
            if product.splits:
                continue  # test_prefill_digits.py walks through these
            rows, cols = plans.shapes(dims)[name]
            cut, work = product.cut, product.cut.work(n, cols // group, group)
            shape = plans.SHAPES[product.kernel.removeprefix("gemm_swiglu" if name == "gate_up" else "gemm_parts")]
            check_walk(work, cut.rows, group, sms)
            assert cut.rows * cut.tiles >= rows // 16 > (cut.rows - 1) * cut.tiles
            assert cut.tiles % 2 == 0 and cut.tiles in shape.tiles and cut.tiles <= 8 * shape.warpgroups, "a warp takes two"
            assert {cut.main_width, cut.tail_width} <= {*shape.widths_for(group)} and (n <= shape.tokens or shape.tokens == 128)
            if name == "gate_up":
                assert not work.sharers, "SwiGLU needs finished sums"
            else:
                assert cut.main_rows == cut.rows and work.slots * n * rows <= plans.part_floats(dims, PREFILL_CHUNK)


def test_cuts_that_no_plan_would_choose_are_covered_too():
    rng = np.random.default_rng(0)
    for _ in range(300):
        row_tiles, groups, n, sms, tiles, width = 2 * rng.integers(1, 40), rng.integers(1, 50), rng.integers(1, 700), rng.integers(1, 20), 2 * rng.integers(2, 9), rng.choice((64, 96, 128))
        rows = -(-row_tiles // tiles)
        whole = rng.integers(0, (rows * -(-n // width) - 1) // sms + 1) * sms
        cut = plans.Cut(*map(int, (tiles, rows, rows, width, width, whole, rng.integers(1, 5), rng.integers(1, sms + 1))))
        check_walk(cut.work(int(n), int(groups), 128), int(rows), 128, int(sms))


def test_a_length_has_the_token_tiles_that_it_was_planned_with():
    """So its parts need no more slots than were planned."""
    for n in range(1, PREFILL_CHUNK + 1):
        at = plans.planned_length(n)
        for name, product in plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132).items():
            if name != "gate_up":
                works = [product.cut.work(length, plans.shapes(SEVEN)[name][1] // 128, 128) for length in (n, at)]
                assert works[0].main_tokens == works[1].main_tokens and works[0].sharers == works[1].sharers, (n, name)
        if n <= plans.GRAPH_UP_TO:
            assert n <= plans.launched_length(n, PREFILL_CHUNK) == at
        else:
            assert plans.launched_length(n, PREFILL_CHUNK) == n
    lengths = plans.graph_lengths(PREFILL_CHUNK)
    assert lengths[-1] == plans.GRAPH_UP_TO and lengths == sorted({plans.planned_length(n) for n in range(1, plans.GRAPH_UP_TO + 1)})
    assert plans.graph_lengths(5) == [5] and plans.graph_lengths(20) == [8, 16, 20]


def test_the_products_of_the_7b_keep_the_card_busy():
    for n in LENGTHS:
        for name, product in plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132).items():
            work = product.cut.work(n, plans.shapes(SEVEN)[name][1] // 128, 128)
            assert work.grid(132) >= 66, (name, n, work.grid(132))


@pytest.mark.parametrize("context", [1, 5, 96, 640, PREFILL_CHUNK])
def test_parts_of_a_short_context_fit(context):
    for n in {1, context // 2 or 1, context}:
        for name, product in plans.products(SEVEN, 128, n, context, 132).items():
            rows, cols = plans.shapes(SEVEN)[name]
            for length in {n, plans.launched_length(n, context)} if name != "gate_up" else ():
                assert product.cut.work(length, cols // 128, 128).slots * length * rows <= plans.part_floats(SEVEN, context)


@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_shapes_of_the_kernels(model):
    """Threads, shared memory and the layout of arguments, as the compiler sees them."""
    _, group = MODELS[model]
    source = (data_path("kernels") / "prefill/gemm_shapes.cuh").read_text(encoding="utf-8")
    kernels = gemm_kernels()
    assert set(kernels) == {name + end for name in ("gemm_parts", "gemm_swiglu") for end in plans.SHAPES}
    assert {name + end for n in LENGTHS for name, of in (("gemm_parts", "o"), ("gemm_swiglu", "gate_up")) for end in plans.kind(n, of)} == set(kernels)
    lines = [f"static_assert({shape}::kThreads == {plans.gemm_threads(name)} && {shape}::kShared == {plans.gemm_shared_bytes(name, group)});" for name, shape in kernels.items()]
    lines.append(f"static_assert(sizeof(Work) == {ctypes.sizeof(Work)} && sizeof(Operands) == 32 && sizeof(PartsOut) == 16 && sizeof(SwigluOut) == 32 && sizeof(SwigluDirect) == 32);")
    lines.append(f"static_assert(kUnit == {plans.UNIT} && kSlab == {plans.SLAB} && kSlab == {layouts.SLAB} && kStagedRing == {plans.STAGED} && kStageUnits == {plans.STAGE_UNITS});")
    text = source[: source.index("#define NANOQWEN_GEMM")] + "using namespace nanoqwen;\n" + "\n".join(lines)
    prefill_log(model, "shapes.cu", text)  # raises when an assertion does not hold


@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_shapes_of_the_norms(model):
    """And nothing that a norm or RoPE holds while its loads are under way goes to local memory."""
    dims, _ = MODELS[model]
    lines = [f"static_assert({shape}::kCtas == {ctas} && {shape}::kThreads == {threads});" for shape, (ctas, threads) in
             (("Tiled", plans.norm_shape("norm_rows_tiled", dims)), ("Spread", plans.norm_shape("norm_rows_spread", dims)), ("Spread", plans.norm_shape("norm_rows_digits", dims)))]  # fmt: skip
    lines.append(f"static_assert(kRopeThreads == {plans.ROPE_THREADS} && kQuantiseThreads == {plans.QUANTISE_THREADS});")
    text = (data_path("kernels") / "prefill/rows_tiled.cu").read_text(encoding="utf-8") + "\n".join(lines)
    used = parse_resources(prefill_log(model, "rows_tiled.cu", text))
    assert all(not use.stack_bytes and not use.spill_bytes for use in used.values()) and {*plans.NORMS} < {*used}


def test_few_tokens_are_spread_over_the_card():
    readers = {n: plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132)["qkv"] for n in (1, 16, 17, 96, 97, 2048)}
    assert [plans.norm_kernel(*of) for of in readers.items()] == ["norm_rows_digits"] * 2 + ["norm_rows_spread"] * 2 + ["norm_rows_tiled"] * 2
    assert plans.norm_shape("norm_rows_tiled", SEVEN) == (1, 448) and plans.norm_shape("norm_rows_spread", SEVEN) == (4, 224)


def gemm_kernels() -> dict[str, str]:
    """{kernel: its shape} of all sources."""
    sources = sorted((data_path("kernels") / "prefill").glob("gemm_*.cu"))
    return {name: shape for p in sources for shape, name in re.findall(r"^NANOQWEN_GEMM\((\w+)\) (\w+)\(", p.read_text(encoding="utf-8"), re.M)}


@pytest.mark.parametrize("model", MODELS)
def test_no_product_waits_where_the_compiler_could_not_prove_its_registers_safe(model):
    """ptxas then puts a wait behind each wgmma and says so (C7510 to C7514)."""
    for source in ("gemm_parts.cu", "gemm_swiglu.cu"):
        log = prefill_log(model, source, (data_path("kernels") / "prefill" / source).read_text(encoding="utf-8"))
        assert "HGMMA" not in log and not re.search(r"C75\d\d|serializ", log), source


def test_the_wide_products_are_spelled_out_as_the_instruction_wants_them():
    """wgmma names each accumulator. The header's functions are one pattern for every width, and this is the pattern."""
    header = (data_path("kernels") / "prefill/wgmma.cuh").read_text(encoding="utf-8")
    widths = [int(n) for n in re.findall(r"m64n(\d+)k16", header)]
    of_attention = {64, 128}  # tokens of a step, and either head's dimensions
    assert widths == sorted({w for shape in plans.SHAPES.values() for w in shape.widths} | of_attention)
    found = header[header.index("template <bool kAdd") :]
    assert found.split() == [*" ".join(spelled(n) for n in widths).split(), *"} // namespace nanoqwen".split()]


def spelled(n: int) -> str:
    flags, switches = n // 2 + 5, ('"n"(static_cast<int>(kAdd))', '"n"(static_cast<int>(kTransposed))')
    template = "template <bool kAdd = true, bool kTransposed = false> "
    return wrapper(template, "wgmma", n, clear=f"setp.ne.u32 add, %{flags}, 0", transposed=f"%{flags + 1}", more=switches)


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

        def make(dims: Dims, group: int, chunk: int, capture=None):
            kernels, shape = Kernels("", None), LaunchShape(cardkit.SMS)
            card.engine = Engine()
            card.engine._weights = weights = synthesise(dims, group, kernels)
            return Prefill(kernels, weights, DecodeBuffers(dims, group, shape, 4), shape, chunk, capture)

        yield make


@pytest.mark.parametrize("chunk", [5, 100, 640])
@pytest.mark.parametrize("model", ["heads of 64, group 64, tied", "group 32"])
def test_the_workspace_is_what_the_plan_says(prefill, model, chunk):
    dims, group = MODELS[model]
    dims = dataclasses.replace(dims, num_layers=1, vocab=64)
    made = prefill(dims, group, chunk)
    arrays = [a for a in vars(made).values() if isinstance(a, np.ndarray)]
    views = made.span.nbytes + made.ids.nbytes  # of one array
    assert made.nbytes == sum(a.nbytes for a in arrays) - views == plans.prefill_bytes(dims, chunk)
    before, after = (workspace_bytes(dims, group, LaunchShape(132), 640, c) for c in (chunk, chunk + 8))
    assert after - before == plans.prefill_bytes(dims, chunk + 8) - plans.prefill_bytes(dims, chunk)


def test_the_workspace_of_the_7b_has_no_second_copy_of_the_weights():
    assert plans.prefill_bytes(SEVEN, PREFILL_CHUNK) <= 300e6


@pytest.fixture
def small(prefill):
    """(a Prefill of two layers for chunks of up to 64 tokens, what it captured, two pools)."""
    dims, group = MODELS["group 32"]
    dims = dataclasses.replace(dims, num_layers=2, vocab=64)
    captured = []

    def capture(launches):
        captured.append([(launch.name, launch.grid) for launch in launches])
        return types.SimpleNamespace(launch=lambda stream: ran.append(len(captured) - 1), upload=lambda stream: None, of=captured[-1])

    ran: list[int] = []
    pools = [np.zeros((2, 2, pages, 16 * dims.kv_size), np.float16).view(cardkit.Array) for pages in (4, 8)]
    return prefill(dims, group, 64, capture), captured, pools


def test_a_chunk_of_another_length_is_the_same_launches(small):
    made, _, pools = small
    first = list(made.launches(60, 0, pools[0]))
    grids = [launch.grid for launch in first]
    again = made.launches(57, 0, pools[1])
    assert all(a is b for a, b in zip(first, again))
    rope = next(launch for launch in again if launch.name == "rope_append_parts")
    dims = made._w.dims
    assert first[1].name == "norm_rows_spread" and grids[1] == (4 * 60,) and again[1].grid == (4 * 57,)
    assert rope.grid == (57, -(-(dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim // 8 // 128))
    assert rope.given[7] is made.span and (rope.given[9].value, rope.given[10].value) == (pools[1][0, 0].data.ptr, pools[1][0, 1].data.ptr)
    assert next(launch for launch in again if launch.name == "gemm_swiglu_middle").given[0].n == 57
    assert {launch.name for launch in made.launches(20, 0, pools[1])} >= {"gemm_parts_few", "gemm_swiglu_few", "norm_rows_spread"}
    assert {launch.name for launch in made.launches(3, 0, pools[1])} >= {"norm_rows_digits", "gemm_parts_digits8", "gemm_swiglu_digits8", "gemm_parts_few", "quantise_tiles"}


def test_few_tokens_pass_between_kernels_as_digits(small):
    """Who writes digits, who reads them, and where; o and attention go on with FP16."""
    made, _, pools = small
    launches = made.launches(13, 0, pools[0], whole=True)
    layer = [launch for launch in launches[1:] if launch.name != "last_row"][: (len(launches) - 2) // 2]
    names = ("norm_rows_digits", "gemm_parts_digits16", "rope_append_parts", None, "gemm_parts_few", "norm_rows_digits", "gemm_swiglu_digits16", "quantise_tiles", "gemm_parts_digits16")
    assert all(name in (None, launch.name) for name, launch in zip(names, layer, strict=True))
    norms, tiles = (layer[0], layer[5]), layer[7]
    assert all(norm.given[5] is made.x_digits and norm.given[6].value == 16 and norm.given[7] is made.factor and norm.grid == (4 * 13,) for norm in norms)
    assert all(layer[i].given[1].x == made.x_digits.data.ptr and layer[i].given[1].splits for i in (1, 6))
    assert tiles.given[0] is made.x_inner and tiles.given[2].value == 16 and tiles.given[3] is made.inner_digits and tiles.grid == (13, -(-made._w.dims.intermediate // 512))
    assert layer[8].given[1].x == made.inner_digits.data.ptr and layer[4].given[1].x == made.x.data.ptr == layer[3].given[5].data.ptr
    assert layer[1].grid == (layer[1].given[0].grid(cardkit.SMS),) and not made.x_digits.any(), "finite from the start"


def test_a_chunk_ends_with_the_last_keys_and_values(small):
    made, _, pools = small
    chunk, whole = made.launches(20, 0, pools[0]), made.launches(20, 0, pools[0], whole=True)
    assert [launch.name for launch in chunk[-2:]] == ["rope_append_parts", "last_row"] and all(a is b for a, b in zip(chunk, whole))
    dims = made._w.dims
    assert chunk[-1].grid == (-(-(dims.hidden + dims.q_size) // 1024),) and [launch.overlap for launch in whole] == [False] + [True] * (len(whole) - 1)
    layers = [launch for launch in whole[1:] if launch.name != "last_row"]
    first, last = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    assert [(launch.name, launch.grid) for launch in first] == [(launch.name, launch.grid) for launch in last] and len(whole) - len(chunk) == 5
    again = made.launches(19, 0, pools[0], whole=True)
    assert again[-1] is whole[-1] and again[-1].given[0].n == 19 and next(x for x in again[::-1] if x.name.startswith("norm")).grid == (4 * 19,)


@pytest.mark.parametrize("draws", [False, True])
def test_a_prompt_ends_with_launches_of_a_step(small, draws):
    from nanoqwen.cuda.decode import decode_launches, end_launches

    made, _, pools = small
    args = made._k, made._w, made._b, pools[0], LaunchShape(cardkit.SMS)
    step, end = decode_launches(*args, opens_page=True, draws=draws), end_launches(*args, draws=draws)

    def told(launch):
        return launch.name, launch.region, launch.grid, [a.data.ptr if isinstance(a, np.ndarray) else getattr(a, "value", a) for a in launch.given]

    assert [told(launch) for launch in end] == [told(launch) for launch in step[-len(end) :]] and end[0].name == "paged_attention"
    for launches in (step, end):
        assert not launches[0].overlap and all(launch.overlap for launch in launches[1:]), "it reads scalars and pages ahead of its own wait"


def test_short_chunks_are_graphs_of_a_few_lengths(small):
    made, captured, pools = small
    stream = cardkit.Stream()
    made.prepare(pools[0], stream)
    assert len(captured) == len(plans.graph_lengths(64)) == 8 and [grids[1][1] for grids in captured] == [(4 * n,) for n in plans.graph_lengths(64)]
    made.run([5, 6, 7], 4, pools[0], stream)
    assert made._told[:5].tolist() == [4, 3, 5, 6, 7] and made.ids[:3].tolist() == [5, 6, 7] and made.span.tolist() == [4, 3]
    made.run(list(range(17)), 30, pools[0], stream)
    assert len(captured) == 8 or captured[8:] and all("spread" in str(names) for names in captured[8:]), "nothing is captured twice"
    held = len(captured)
    made.run([1], 0, pools[1], stream)
    assert len(captured) == held + 1 and captured[-1][1][1] == (4 * 8,), "the pool moved: once more"


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
    """On an H200, for the 7B: (tokens, product) -> widths of main and last tiles, CTAs that share."""
    for n, name, widths, sharers in ((512, "o", (128, 128), 112), (512, "down", (128, 128), 112), (512, "qkv", (128, 128), 132), (128, "gate_up", (128, 64), 0), (512, "gate_up", (128, 64), 0)):
        cut = plans.products(SEVEN, 128, n, PREFILL_CHUNK, 132)[name].cut
        assert (cut.main_width, cut.tail_width) == widths and cut.sharers == sharers, (n, name, cut)
    assert plans.products(SEVEN, 128, 128, PREFILL_CHUNK, 132)["down"].cut.main_width == 128
