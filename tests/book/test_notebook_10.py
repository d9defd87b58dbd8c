"""Chapter 10: its models, what its prose says in words, and what it says about the receipts; the page beside the kernel. (Cells are checked by ``pytest --nbval notebooks``.)"""

from __future__ import annotations

import json
import re

import pytest

from nanoqwen.bench import persistent_parts
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.config import Dims, data_path, load_settings, repo_root
from nanoqwen.cuda.constants import BUNDLE, TILE_ROWS
from nanoqwen.cuda.persistent_plan import CONSUMERS, SETTINGS, persistent_ctas

DIMS, GROUP, SMS = Dims.qwen2_5_coder_7b(), load_settings().quant.group, 132
CELLS = json.loads((repo_root() / "notebooks/10_persistent_decoder.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
PROSE = " ".join(" ".join("".join(cell["source"]).split()) for cell in CELLS if cell["cell_type"] == "markdown")
KERNEL = "".join(path.read_text(encoding="utf-8") for path in sorted(data_path("kernels", "persistent").glob("*.cu*")))


@pytest.fixture(scope="module")
def measured() -> dict:
    return read_receipt(receipts_folder() / "persistent_parts.json")["results"]


# ------------------------------------------------------------------------------------------------------------------ models


@pytest.fixture(scope="module")
def exchange() -> dict:
    space: dict = {}
    exec(CODE["exchange-model"], space)
    return space


@pytest.mark.parametrize("ctas, layers", [(1, 3), (2, 4), (3, 3)])
def test_one_bit_is_enough(exchange, ctas, layers):
    assert exchange["schedules"]([exchange["decoder"](layers)] * ctas)[0] == {}


def test_the_exchange_that_breaks_is_found(exchange):
    schedules, decoder = exchange["schedules"], exchange["decoder"]
    assert set(schedules([decoder(3)] * 2, tag=lambda step: 0)[0]) == {"a wrong value"}
    assert set(schedules([decoder(3, ("o",))] * 2)[0]) == {"it stands still"}
    three = [decoder(5, ("qkv", "split", "o"))] * 2
    for silent in ((2,), (2, 3), (2, 3, 4)):
        wrong, _ = schedules(three, idle={(1, "split", step) for step in silent})
        assert bool(wrong) == bool(len(silent) % 2), silent
    assert [bool(schedules([decoder(2)] * 3, sms=sms)[0]) for sms in (1, 2, 3)] == [True, True, False]


def test_a_store_that_never_becomes_visible_would_be_noticed(exchange):
    """The model's own mutant: CTA 1 never writes what CTA 0 waits for."""
    program = exchange["decoder"](1)
    wrong, _ = exchange["schedules"]([program, program], idle=(), tag=lambda step: step & 1 if step else 7)
    assert wrong == {}
    wrong, _ = exchange["schedules"]([[("write", "o", 1), ("read", "o", 1)], [("write", "o", 2)]])
    assert set(wrong) == {"it stands still"}


@pytest.fixture(scope="module")
def stream() -> dict:
    space: dict = {"unit_us": 0.1, "all_units": {"qkv": 1500, "o": 1200, "gate_up": 12000, "down": 6000}, "CTAS": 100, "layer_floor": 20.7}
    exec(CODE["stream-model"], space)
    return space


def test_the_stream_is_bound_by_its_bytes_or_by_its_waits(stream):
    layer, stages = stream["layer_us"], stream["stages_with"]
    floor = 0.1 * sum(stream["share"].values())
    waits = (1, 4, 1, 2)
    assert layer(30, stages((0,) * 4, (0.05,) * 4)) == pytest.approx(floor, rel=0.01)
    assert layer(1000, stages(waits, (0.01,) * 4)) == pytest.approx(floor, rel=0.01), "room for everything hides every wait"
    by_room = [layer(room, stages(waits, (0.05,) * 4)) for room in (5, 10, 20, 40, 80)]
    assert by_room == sorted(by_room, reverse=True) and by_room[0] > floor + 4
    slow = layer(1000, stages(waits, (0.2,) * 4))
    assert slow == pytest.approx(sum(waits) + 0.2 * sum(stream["share"].values()), rel=0.02), "slower than memory: everything adds up"


# ------------------------------------------------------------------------------------------------------------------ words


def test_words_that_stand_for_numbers():
    assert CONSUMERS == 14 and "Inside a CTA there are sixteen warps" in PROSE and "Fourteen eat them, in seven pairs" in PROSE and "16 * 32" in CODE["resources-run"]
    assert BUNDLE == 4 and "each warp takes two of its four blocks" in PROSE and f"{TILE_ROWS} finished rows belong to one CTA" in PROSE
    assert len(persistent_parts.STAGES) == len(persistent_parts.PLAN_US) == 8 and "in which of the eight stages" in PROSE
    assert persistent_ctas(DIMS, GROUP, SMS) == SMS and "One CTA on each multiprocessor" in PROSE
    assert (15 * 8, SMS - 15 * 8) == (120, 12) and "Only fifteen such clusters fit on the card at once: that is a hundred and twenty multiprocessors" in PROSE
    assert DIMS.num_layers % 2 == 0 and "The 7B has an even number of layers" in PROSE
    assert SETTINGS["kAsk"] == 8 and "where now eight lanes wait together for eight places" in PROSE and "the eight copies of a round" in PROSE
    assert SETTINGS["kInnerBatch"] == 2 and "where now two looks of two chunks" in PROSE
    assert "exchanges = 6" in CODE["guesses"] and "the CTAs hand over six vectors" in PROSE


def test_it_exchanges_six_kinds_of_words():
    plan = data_path("kernels", "persistent", "plan.cuh").read_text(encoding="utf-8")
    found = re.findall(r"constexpr int k(\w+)At = ", plan.split("exchanged words")[1].split("kExchangeWords")[0])
    assert {name.replace("Sum", "").replace("Max", "").replace("Den", "") for name in found} == {"Qkv", "Vector", "O", "Inner", "Down", "Split"}


def test_what_it_says_about_cuts():
    space: dict = {"CTAS": SMS}
    exec(CODE["cut-run"].split("rows = []")[0], space)
    assert "* static_cast<u32>(cta) / kCtas" in KERNEL, "begin, as the cell has it"
    sizes = {"qkv": (DIMS.q_size + 2 * DIMS.kv_size, DIMS.hidden), "o": (DIMS.hidden, DIMS.q_size), "down": (DIMS.hidden, DIMS.intermediate)}
    for rows, cols in sizes.values():
        tiles, in_tile = rows // TILE_ROWS, cols // GROUP / BUNDLE
        whole, cut = space["shares"](tiles), space["shares"](int(tiles * in_tile))
        assert sum(whole) == tiles and max(cut) - min(cut) == 1, "nobody has more than one bundle above another"
        assert max(whole) * in_tile > 1.15 * tiles * in_tile / SMS, "the slowest CTA of each small matrix has far more than its share"
    gate = space["shares"](DIMS.intermediate // TILE_ROWS)
    assert max(gate) < 1.01 * sum(gate) / SMS, "gate and up have so many tiles that whole ones do"


def test_every_wait_but_the_publishers_is_unwatched():
    watched = {match for path in data_path("kernels", "persistent").glob("*.cuh") if "wait_watched([&]" in path.read_text(encoding="utf-8") for match in [path.name]}
    assert watched == {"publish.cuh"} and "only a few are watched, those of the publisher" in PROSE
    assert SETTINGS["kPatienceSeconds"] >= 1 and "When it has waited for seconds" in PROSE


def test_no_measurement_is_typed():
    assert re.findall(r"\d[\d.,]*\s?(?:ms|us|ns|GB/s|MB|KB|KiB|tok/s|tokens/s|%|x)\b", PROSE) == []


def test_shape_of_the_chapter():
    """The drawing, a prediction before anything is computed, a second one before the measurement, a takeaway, four exercises with executed answers; lines fit their box."""
    every = ["".join(cell["source"]) for cell in CELLS]
    marks = ("book.token_path(", ":class: predict", "## Why kernels end", "Before you look", "## Measured", ":class: lost", ":class: takeaway", "## Exercises")
    where = [next(i for i, text in enumerate(every) if mark in text) for mark in marks]
    assert where == sorted(where) and where[0] == 1
    assert "persistent_parts" in every[where[3] - 1] and '["ms"]' not in "".join(CODE[i] for i in ("units-run", "stream-model", "plan-run", "room-run")), "only the ring's size is read before"
    answers = [cell for cell in CELLS[where[-1] :] if cell["cell_type"] == "code"]
    assert len(answers) == 4 and all("hide-cell" in cell["metadata"]["tags"] for cell in answers)
    assert [cell["id"] for cell in CELLS if "gpu" in cell["metadata"].get("tags", [])] == ["ids-card"]
    for cell in CELLS:
        if cell["cell_type"] == "code" and "hide-input" not in cell["metadata"].get("tags", []):
            assert all(len(line) <= 96 for line in "".join(cell["source"]).splitlines()), cell["id"]


def test_the_kernels_page_names_what_there_is():
    """kernels/persistent/README.md: its files, its names, no times."""
    folder = data_path("kernels", "persistent")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"^\| `([\w.]+)`", page, re.MULTILINE) if "." in name} == {path.name for path in folder.iterdir() if path.suffix in (".cu", ".cuh")}
    known = KERNEL + (repo_root() / "nanoqwen/cuda/persistent.py").read_text(encoding="utf-8") + (repo_root() / "nanoqwen/cuda/persistent_plan.py").read_text(encoding="utf-8")
    known += (repo_root() / "nanoqwen/bench/persistent_instructions.py").read_text(encoding="utf-8") + (repo_root() / "tests/graph/test_persistent_hopper.py").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`(k[A-Z]\w+|[A-Z]{4,}|[a-z]+_[a-z_]+)`", page)}
    assert named and all(re.search(rf"\b{name}\b", known) for name in named - {"static_assert", "__syncwarp"}), sorted(name for name in named if name not in known)
    assert not re.findall(r"\d[\d.,]*\s?(?:ms|us|ns|GB/s|KB|KiB)\b", page)
    assert "NOTES.md" not in KERNEL


# ------------------------------------------------------------------------------------------------------------ the receipt


def test_the_kernel_is_faster_than_the_graph_and_slower_than_its_bound(measured):
    for depth in measured["depths"].values():
        assert depth["limit"] < depth["persistent"] < depth["graph"], "faster than the graph at every depth"
    assert measured["variants"]["shipped"]["spill_bytes"] == 0 and measured["variants"]["shipped"]["chains"] == 1


def test_what_it_says_about_the_parts(measured):
    ms = {name: variant["ms"] for name, variant in measured["variants"].items()}
    limit = measured["depths"]["512"]["limit"]
    assert ms["shipped"] / 2 < ms["no_weights"] < ms["shipped"], "the chain without a weight takes most of a token's time"
    assert limit < ms["neither"] < ms["shipped"] < ms["no_weights"] + ms["neither"]
    assert ms["no_weights"] < ms["neither"], "the stream without its waits takes longer still"
    left = ms["shipped"] - ms["neither"]
    assert left < ms["no_weights"] / 2, "most of the chain is hidden"
    assert left > ms["neither"] - limit, "what is left of it is the larger part of what the token takes above the bound"
    assert ms["no_attention"] - ms["neither"] < left / 2, "without attention the waits that remain cost little"
    assert ms["counters"] > ms["shipped"], "values that validate themselves won"
    refill = {name: found["ms"]["512"] for name, found in measured["refill"].items()}
    again = [ms["shipped"], measured["depths"]["512"]["persistent"], refill["fence"]]
    apart = max(again) / min(again)  # what the same build is apart from itself within the process: less than that says nothing
    assert [name for name in persistent_parts.DESIGNS if ms[name] < ms["shipped"] / apart] == ["loaded"], "ahead this time"
    assert all(ms[name] > apart**2 * ms["shipped"] for name in ("ask_1", "ring_24", "counters", "records", "flight_less", "late", "hint", "ring_32")), "its upper lines"
    assert persistent_parts.DESIGNS["loaded"].settings == persistent_parts.REFILL["both"].settings and refill["both"] < refill["fence"], "as both among the refills"
    assert ms["flight_more"] > ms["shipped"], "a token gains nothing"


def test_what_it_says_about_refills(measured):
    differ = {name: list(found["differ"].values()) for name, found in measured["refill"].items()}
    assert differ == {"fence": [0, 0], "loads": [0, 0], "both": [0, 0], "neither": [0, 0]}, "nothing differs in the last row"


def test_what_it_says_about_the_plan(measured):
    stages, plan = measured["timeline"]["stages"], measured["timeline"]["plan_us"]
    missed = {name: stages[name]["us"][1] - plan[name] for name in plan}
    total = measured["timeline"]["layer_us"] - sum(plan.values())
    assert total > 0 and missed["attention"] > 0 < missed["gate_up"]
    assert missed["attention"] + missed["gate_up"] > total / 2, "two stages carry most of the difference"
