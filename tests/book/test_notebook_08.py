"""Chapter 8: what its prose says in words, recomputed from the package, from the counted instructions and, where it exists, from the measurement.

(Cells are checked by ``pytest --nbval notebooks``. Numbers stand in cells only; here are the conclusions that its sentences draw.)
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from chapter import Chapter

from nanoqwen import book
from nanoqwen.bench.card_prefill import KINDS
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.book import receipt
from nanoqwen.book.facts import quoted
from nanoqwen.config import Dims, data_path
from nanoqwen.cuda import attention_plan
from nanoqwen.cuda import prefill_plan as planner
from nanoqwen.cuda.constants import PREFILL_CHUNK, TILE_ROWS, int4_block_bytes
from nanoqwen.ladder import layouts

CHAPTER = Chapter("08_prefill_tensor_cores")
cells, prose, source = CHAPTER.cells, CHAPTER.prose, CHAPTER.source

DIMS, GROUP, SMS = Dims.qwen2_5_coder_7b(), 128, 132
PEAK = 1979e12 / 2
SHAPES = planner.shapes(DIMS)
WEIGHTS = DIMS.num_layers * sum(rows * cols for rows, cols in SHAPES.values())


@pytest.fixture(scope="module")
def counted() -> dict:
    return read_receipt(receipts_folder() / "prefill_instructions.json")["results"]


@pytest.fixture(scope="module")
def engine() -> dict:
    (found,) = read_receipt(receipts_folder() / "prefill.json")["results"]["engines"].values()
    return found


@pytest.fixture(scope="module")
def measured(engine) -> dict:
    return {int(n): row for n, row in engine["lengths"].items()}


@pytest.fixture(scope="module")
def chapter() -> dict:
    """The chapter's own names, from the bound to the model's account of the time, but not what is measured."""
    space: dict = {"np": np, "book": book, "PREFILL_CHUNK": PREFILL_CHUNK, "read_gb_s": receipt("ceiling").results["ceiling_gb_s"], "ceiling": receipt("ceiling")}
    for name in ("bound-run", "budget-run", "shapes-run"):
        exec(source(name), space)
    exec("from nanoqwen.cuda.prefill_plan import UNIT, unit_us", space)
    for name in ("deal-run", "plan-run", "waves-run", "spread-run", "prediction-run", "where-run", "where-few-run", "lost-run", "ex2-run"):
        exec(source(name), space)
    return space


# ------------------------------------------------------------------------------------------------------ without a measurement


def test_where_the_limit_changes():
    int4_bytes = WEIGHTS // (TILE_ROWS * GROUP) * int4_block_bytes(GROUP)
    for gb_s in quoted()["bandwidth_gb_s"].values():
        ridge = int4_bytes / (gb_s * 1e9) * PEAK / (2 * WEIGHTS)
        assert 50 < ridge < 100 and "bound by memory up to some tens of tokens" in prose()
    assert 8 < (int4_bytes + 8 * WEIGHTS / 2) / int4_bytes < 9 and "writes four times as many bytes and reads those again" in prose()


def test_the_order_of_x_is_the_packages():
    space: dict = {"np": np, "GROUP": GROUP, "layouts": layouts}
    exec(source("order-build"), space)  # asserts it for itself
    assert sorted(space["place"]) == list(range(GROUP)) and space["x_place"](1) == 1


def test_a_lifted_weight_is_rounded_once():
    """The cells' own functions, against the exact product, where FP16 has its full precision."""
    space: dict = {"np": np}
    build = source("scale-run")
    exec(build[: build.index("# All scales")], space)
    scales = (np.random.default_rng(0).uniform(0.5, 1, 500) * 2.0**-6).astype(np.float16)
    lifted, power = space["lifted"](scales)
    assert 2**15 <= float(lifted.max()) < 2**16 and (lifted.astype(np.float64) == scales.astype(np.float64) * 2.0**power).all()
    codes = np.arange(-8, 8, dtype=np.int16)[:, None]
    exact = codes * lifted.astype(np.float64) * 2.0**-24
    assert (space["weights_of"](codes, lifted[None]) == exact.astype(np.float16)).all(), "rounded once"


def test_what_it_says_about_the_machine_code(counted):
    for kernel in counted.values():
        assert kernel["from_registers"] and not kernel["spill_bytes"]
        assert all(loop["hgmma"] == 16 for loop in kernel["widths"].values()), "four steps, two products, two row tiles"
    clock = PEAK / 1e6 / (2 * SMS * 2048)
    for name in counted:
        end = name.removeprefix("gemm_parts").removeprefix("gemm_swiglu")
        groups = planner.SHAPES[end].warpgroups
        assert tuple(map(int, counted[name]["widths"])) == planner.SHAPES[end].widths
        for width, loop in counted[name]["widths"].items():
            n, may_cost = int(width), int(width) / 2048 * 128
            assert (loop["per_weight"] > may_cost) == (n == 32), "by the count, only the narrowest tile is bound by instructions"
            assert n < 128 or loop["per_weight"] < may_cost / 2, "the widest leaves the schedulers more than half of their slots"
            on_a_card = planner.unit_us(end, 8 * groups, n, SMS, SMS)
            assert on_a_card > max(groups * 8 * n, groups * loop["instructions"]) / clock, "a unit takes longer than either of the two"
    few = planner.unit_us("_few", 24, 32, SMS, SMS)
    arrives = SMS * 24 * int4_block_bytes(GROUP) / few
    assert 0.7 < arrives / planner.DRAM < 1 and "unpacked as fast as they arrive. Nearly so." in prose()


def test_what_it_says_about_shapes_and_parts():
    for end in planner.SHAPES:
        assert 0.9 < planner.gemm_shared_bytes(end, GROUP) / 232448 <= 1, "their buffers nearly fill the shared memory"
    assert 9 < SHAPES["gate_up"][0] / DIMS.hidden < 11 and "ten times the residual stream" in prose()
    places = layouts.part_places(np.arange(32))
    assert all((places[[g, g + 8, g + 16, g + 24]] == np.arange(4 * g, 4 * g + 4)).all() for g in range(8)), "the four lie side by side"


def test_what_it_says_about_digits():
    for n in (8, 16, 32):
        of = {name: product.kernel for name, product in planner.products(DIMS, GROUP, n, PREFILL_CHUNK, SMS).items()}
        assert {name for name, kernel in of.items() if "digits" in kernel} == ({"qkv", "gate_up", "down"} if n <= 16 else set()), "up to sixteen tokens, and o stays with wgmma"
    body = data_path("kernels", "common", "int4_unpack.cuh").read_text(encoding="utf-8").split("void unpack_bytes(")[1].split("}")[0]
    assert body.count("<<") + body.count("&") - body.count("(&") == 3 and "become bytes in three instructions" in prose()
    kinds = receipt("prefill_instructions").samples["gemm_swiglu_few"]["32"]
    words = 128 // 8  # of a lane in a unit: for each a shift, and for each of its four pairs a mask with an exponent and a multiplication
    assert kinds["HFMA2"] == 4 * words and kinds["LOP3"] >= 4 * words and kinds["SHF"] >= words, "what is more of these is addresses"
    assert "take nine instructions to become FP16" in prose()


def test_what_it_says_about_cuts(chapter):
    cut = {name: product.cut for name, product in planner.products(DIMS, GROUP, 512, PREFILL_CHUNK, SMS).items()}
    rows = {name: -(-of_rows // TILE_ROWS // 16) for name, (of_rows, _) in SHAPES.items()}
    plain = rows["gate_up"] * (512 // 128) / SMS
    assert 4 < plain < 4.5 and "run four full rounds and then a fifth for less than half of the card" in prose()
    assert rows["down"] * (512 // 128) < SMS and "Down has fewer items than the card has multiprocessors" in prose()
    assert cut["gate_up"].tail_width < cut["gate_up"].main_width and not cut["gate_up"].sharers
    work = cut["down"].work(512, SHAPES["down"][1] // GROUP, GROUP)
    assert work.sharers == 2 * work.items < SMS and work.slots == 2 and "Two halves for each item" in prose()
    assert all(kind in prose() for kind in ("shared items", "narrower tiles at the end", "other row counts"))
    few = planner.products(DIMS, GROUP, 16, PREFILL_CHUNK, SMS)["gate_up"].cut
    assert few.work(16, 28, GROUP).items == SMS, "an item takes as many row tiles as make the number of items come out right"
    shown = {name: {how: float(busy.max()) for how, busy in of.items()} for name, of in chapter["shown"].items()}
    assert all(of["planned"] < of["plain"] for of in shown.values()) and chapter["idle"](chapter["shown"]["down"]["plain"]) > 0.5


def test_every_piece_that_is_dealt_finds_its_slot(chapter):
    """The chapter's own dealing against the package's owner of a quantum, which the kernel computes the same way."""
    for n in (1, 64, 130, 512, 1024):
        for name in SHAPES:
            _, work = chapter["planned"](n, name)
            for cta, item, first, _, slot in chapter["deal"](work):
                if item >= work.whole:
                    begins = (item - work.whole) * work.quanta
                    assert slot == cta - work.owner(begins) and work.owner(begins + first // work.quantum) == cta


def test_what_it_says_about_short_prompts_and_graphs():
    text = prose()
    assert "there is one graph for each of a few lengths" in text and len(planner.graph_lengths(PREFILL_CHUNK)) < 20
    assert "A chunk is some two hundred launches, eight in each layer" in text


def test_what_it_says_about_attention(chapter):
    plain, spread = attention_plan.ATTENTIONS
    choice = chapter["choice"]
    assert all(kernel == plain for (_, before), kernel in choice.items() if not before), "for a prompt that begins, that is the least work"
    assert choice[16, 2000] == choice[128, 2000] == choice[16, 16000] == spread and choice[512, 16000] == plain
    assert attention_plan.CLUSTER == 4 and attention_plan.TILE[spread] == 64 and "a *cluster* of four CTAs shares 64 queries" in prose()


def test_what_it_says_about_another_card(chapter):
    longer, ratio = chapter["longer"], SMS / chapter["FEWER"] - 1
    gate_up = list(SHAPES).index("gate_up")
    assert abs(longer[2048][gate_up] - ratio) < 0.03, "about as much longer as one expects"
    assert all(more < ratio for n, row in longer.items() for k, more in enumerate(row) if (n, k) != (2048, gate_up) and k != gate_up), "elsewhere smaller"


def test_what_it_says_about_workspace_and_attention():
    small, large = (planner.prefill_bytes(DIMS, chunk) for chunk in (4096, 16384))
    assert 3.5 < large / small < 4.1 and "for long ones in proportion" in prose()
    assert 4 * planner.part_floats(DIMS, 512) > planner.prefill_bytes(DIMS, 512) / 2 and "for short ones the buffer of parts weighs most" in prose()
    assert WEIGHTS / (DIMS.num_layers * DIMS.q_size) > DIMS.max_position and "Beyond the context of this model" in prose()


def test_a_chunk_is_some_two_hundred_launches():
    layer = book.show("nanoqwen/cuda/prefill.py", "chain").code.split("for layer, held in zip")[1].rpartition("before = ")[0]
    calls = len(re.findall(r"\bnormed\(|\badd\((?!\"last_row)|\bproduct\(\"", layer))
    assert layer.count('add("quantise_tiles"') == 1, "one more of up to 16 tokens"
    calls -= 1
    assert calls == 8 and 190 < 2 + calls * DIMS.num_layers - 5 < 240
    assert "A chunk is some two hundred launches, eight in each layer" in prose()
    assert set(re.findall(r'"(\w+)": "', source("reasons-run"))) | set(planner.shapes(DIMS)) | {"ends"} == set(KINDS), "each kind of launch has a column, the first and the last one but for"


def test_shape_of_the_chapter():
    """The drawing, a prediction before anything is computed, a takeaway, four exercises with executed answers; lines fit their box."""
    every = ["".join(c["source"]) for c in cells()]
    where = [next(i for i, s in enumerate(every) if mark in s) for mark in ("book.token_path(", ":class: predict", ":class: lost", ":class: takeaway", "## Exercises")]
    assert where == sorted(where) and where[0] == 1
    answers = [c for c in cells()[where[-1] :] if c["cell_type"] == "code"]
    assert len(answers) == 4 and all("hide-cell" in c["metadata"]["tags"] for c in answers)
    for cell in cells():
        if cell["cell_type"] == "code" and "hide-input" not in cell["metadata"].get("tags", []):
            assert all(len(line) <= 96 for line in "".join(cell["source"]).splitlines()), cell["id"]


# --------------------------------------------------------------------------------------------------------- with the measurement


def test_the_prediction_is_above_the_bound_and_near_the_first_token(chapter):
    e2e = receipt("e2e")
    n = e2e.protocol["prompt_tokens"]
    predicted, first = chapter["predicted_ms"](n), e2e.results["engines"]["graph"]["ttft_ms"]
    assert chapter["bound_ms"](n) < predicted < 1.1 * first and first < 1.3 * predicted


def test_the_loop_is_the_largest_step(chapter):
    for n in (512, 2048):
        steps = list(chapter["where"](n).values())
        assert steps == sorted(steps) and np.argmax(np.diff(steps)) == 0, "units that take longer than their products"
    assert "The largest step is the loop itself" in prose()
    few = list(chapter["steps_few"].values())
    assert few == sorted(few) and all(step > 0.05 * few[-1] for step in np.diff(few)[[0, 2]]) and "For a few tokens no line is small" in prose()


def test_what_it_says_about_errors():
    ladder = receipt("validate")
    model = "synthetic:7b, graph"
    for name in ladder.samples:
        layer = [check for check in ladder.samples[name]["layer"] if "tokens" in check[0]]
        assert layer and all(value < limit for _, value, limit, _ in layer)
    error = {what.split(", ")[1].split()[0]: value for what, value, _, unit in ladder.samples[model]["unit"] if what.endswith(" down") and unit == "relative error"}
    cols = SHAPES["down"][1] // GROUP
    splits = {n: planner.products(DIMS, GROUP, int(n), PREFILL_CHUNK, SMS)["down"].cut.work(int(n), cols, GROUP).slots for n in error}
    fewest, most = min(splits, key=splits.get), max(splits, key=splits.get)
    assert splits[fewest] < splits[most] and error[fewest] > 1.5 * error[most], "many short pieces err less than a few long ones"


def test_what_it_says_about_the_time_to_the_first_token(measured):
    ms = {n: row["ttft_ms"] for n, row in measured.items()}
    assert all(row["same_id_in_every_run"] for row in measured.values())
    assert ms[16] < 1.5 * ms[1], "level as long as the memory is the limit"
    assert 3 < ms[2048] / ms[512] < 5, "then rising with the arithmetic"
    rate = {n: row["products_tflop_s"] for n, row in measured.items()}
    assert rate[2048] > rate[16384] > rate[32000], "beyond a chunk the rate over the whole time falls"
    assert max(rate.values()) * 1e12 < PEAK


def test_what_it_says_about_targets(engine, measured):
    """The chapter's sentences about misses are those that the measurement asks for, no more and no fewer."""
    space: dict = {"book": book, "measured": receipt("prefill"), "found": measured}
    (space["engine"],) = receipt("prefill").results["engines"]
    exec(source("targets-run"), space)
    missed, text = set(space["missed"]), prose()
    assert ("Sixteen tokens are missed" in text) == any(n == 16 for n, _ in missed)
    assert ("A few hundred tokens are missed" in text) == bool(missed & {(128, "cold"), (128, "sustained"), (512, "cold")})
    assert ("even for a cold card" in text) == ((4096, "cold") in missed)
    long_ones = missed & {(512, "sustained"), (4096, "sustained")}
    assert ("Long prompts in a row are missed" in text) == bool(long_ones) and ("None of the times is missed" in text) == (not missed)
    assert all(measured[n]["ttft_ms"] > 1.03 * measured[n]["cold_ms"] for n, _ in long_ones), "the clock, and nothing else"
    if any(n == 16 for n, _ in missed):
        alone = engine["products"]["16"]["ms"]
        assert ("The products alone take all of the time that there was" in text) == (alone >= space["TARGETS"][16])
        assert alone > space["TARGETS"][16] / 2


def test_what_it_says_about_the_vendor(engine):
    row = engine["products"][str(PREFILL_CHUNK)]
    assert row["cublas_ms"] > 0.85 * row["ms"] and "for a full chunk nearly all of it hides under the products" in prose()
    packed = WEIGHTS // (TILE_ROWS * GROUP) * int4_block_bytes(GROUP) + 2 * 2 * DIMS.vocab * DIMS.hidden
    assert 2 * WEIGHTS > packed and "more memory than the whole packed model" in prose()
