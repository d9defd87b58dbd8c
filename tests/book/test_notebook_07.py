"""Chapter 7: what its prose says in words, recomputed from the package, from the counted instructions and, where it exists, from the measurement.

(Cells are checked by ``pytest --nbval notebooks``. Numbers of the measurement stand in cells only; here are the conclusions that its sentences draw.)
"""

from __future__ import annotations

import numpy as np
import pytest
from chapter import Chapter

from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.book.facts import facts
from nanoqwen.config import Dims
from nanoqwen.cuda.constants import BUNDLE, TILE_ROWS, int4_block_bytes
from nanoqwen.lessons.gemv import BUNDLE_BYTES, GROUP, LANE_WEIGHTS, PATHS, matrix_bytes, shapes

CHAPTER = Chapter("07_unpack_paths")
cells, prose, source = CHAPTER.cells, CHAPTER.prose, CHAPTER.source

DIMS = Dims.qwen2_5_coder_7b()
NAMES = [path.name for path in PATHS]
LARGE = ("gate", "up", "down")


@pytest.fixture(scope="module")
def counted() -> dict:
    return read_receipt(receipts_folder() / "unpack_instructions.json")["results"]


@pytest.fixture(scope="module")
def measured() -> dict:
    return read_receipt(receipts_folder() / "unpack_paths.json")


# ------------------------------------------------------------------------------------------------------ without a measurement


@pytest.mark.parametrize(
    "sentence",
    [
        f"At {facts()['article-share']}% of the card's bandwidth neither the memory nor the arithmetic",
        "so it needs four a layer, for q/k/v, o, gate/up and down",
        "lane t on words 4t to 4t + 3 of it, and each fetches 16 bytes at a time",
        f"All seven run in the *same* frame, the one that the runtime ships, on all {len(shapes(DIMS))} projections".replace("all 7", "all seven"),
    ],
)
def test_sentence_says_what_the_package_computes(sentence):
    assert sentence in prose()


def test_words_that_stand_for_numbers():
    text = prose()
    share = {name: 2 * cols / matrix_bytes(rows, cols) for name, (rows, cols) in shapes(DIMS).items()}
    assert len(PATHS) == 7 and "completely, and five more around them" in text
    assert all(share[name] / 2 < 0.001 for name in LARGE) and "saves a few hundredths of a percent of the traffic of a large projection" in text
    assert share["gate"] < 0.0005 and "Activations are hundredths of a percent of it" in text
    assert BUNDLE_BYTES == BUNDLE * int4_block_bytes(GROUP) and LANE_WEIGHTS == BUNDLE * TILE_ROWS * GROUP // 32
    assert 1000 < 65504 / 8 / 8 < 1024 and "a half2 sum of eight products is at its end when activations pass a thousand" in text
    rows, cols = shapes(DIMS)["gate"]
    assert 4 * 16 * GROUP * matrix_bytes(rows, cols) / (rows * cols) == BUNDLE_BYTES  # as the chapter computes it


def test_the_numpy_twin_makes_the_records_that_the_kernel_describes():
    """The cell's own function, on activations that show where each byte went."""
    space: dict = {"np": np, "GROUP": GROUP, "kinds": {"normal": np.zeros(GROUP, np.float16)}}
    build = source("build")
    exec(build[build.index("ORDER") : build.index("def as_bytes")], space)
    exec(build[build.index("def quantise") : build.index("def integer_sums")], space)
    exec(source("records"), space)
    x = np.zeros(2 * GROUP, np.float16)
    x[GROUP:] = np.arange(GROUP) - 64.0
    x[GROUP + 127] = 127  # so that the step is one
    first, second = space["int8_records"](x)
    assert not first.any() and len(second) == next(p.record for p in PATHS if p.name == "dp4a")
    values = second[:GROUP].view(np.int8)
    for t in range(4):
        for pair in range(2):
            for word in range(2):
                at = 16 * (4 * pair + t) + 8 * word
                columns = 8 * (4 * t + 2 * pair + word) + np.array([0, 4, 1, 5, 2, 6, 3, 7])
                assert (values[at : at + 8] == x[GROUP:][columns].astype(np.int8)).all()
    assert second[GROUP : GROUP + 4].view(np.float32)[0] == 1 / 16


def test_what_it_says_about_the_machine_code(counted):
    weight, whole = ({name: counted[name][key] for name in NAMES} for key in ("per_weight", "per_weight_with_frame"))
    model = {"sign_extend": 31, "prmt": 19, "bias": 17, "tensor": 6, "dp4a": 5}
    for name in ("sign_extend", "prmt", "bias"):
        assert weight[name] / (model[name] / 8) < 1.15 and whole[name] / (model[name] / 8) < 1.35
    for name in ("tensor", "dp4a"):
        assert 1.4 < weight[name] / (model[name] / 8) < 2.5 and whole[name] / (model[name] / 8) > 1.8
    assert "That guess was right for the cheap ways" in prose() and "far too dark for the others" in prose()


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


def test_what_it_says_about_the_budget(measured, counted):
    results, device = measured["results"], measured["device"]
    rows, cols = shapes(DIMS)["gate"]
    weights_a_clock = results["ceiling_gb_s"] * 1e9 * rows * cols / matrix_bytes(rows, cols) / device["sm_count"] / (results["sm_mhz"] * 1e6)
    budget = 128 / weights_a_clock
    assert counted["sign_extend"]["per_weight"] > budget, "needs more than this card's memory leaves it"
    assert all(counted[name]["per_weight_with_frame"] < budget for name in ("prmt", "bias")), "the half2 ways fit"
    assert all(counted[name]["per_weight_with_frame"] < budget / 2 for name in NAMES[3:]), "less than half of what there is"


def test_what_it_says_about_pipes_and_errors(measured):
    pipes = measured["results"]["pipes"]
    assert all(58 < pipes[name] < 68 for name in ("lop3", "shift", "prmt", "i2f", "f16_to_f32", "imad", "dp4a")), "half the width"
    assert all(pipes[name] > 110 for name in ("ffma", "hfma2"))
    for shape in measured["results"]["shapes"].values():
        error = {name: shape["paths"][name]["error"] for name in NAMES}
        assert error["dp4a"] > 10 * error["prmt"] > 50 * error["digits"], "INT8, FP16 sums, two digits"


def test_what_it_says_about_the_wall(measured):
    alone = {name: row["gb_s"] for name, row in measured["results"]["resident"].items()}
    ceiling, every = measured["results"]["ceiling_gb_s"], measured["results"]["shapes"]
    assert alone["sign_extend"] < ceiling < min(alone[name] for name in NAMES[1:]), "the baseline never gets there; every other path does more"
    assert max(alone.values()) > 2 * alone["prmt"] and max(alone.values()) > 3 * alone["sign_extend"], "differ by a factor of several"
    for name in LARGE:
        us = {path: every[name]["paths"][path]["us"] for path in NAMES}
        cheap = [us[path] for path in ("tensor", "dp4a_fused", "digits")]
        assert max(cheap) < 1.25 * min(cheap), (name, "the cheap ways lie close together, whatever their headroom")
        assert us["sign_extend"] > max(cheap), (name, "sign extension is behind all of them")
        assert max(every[name]["paths"][path]["gb_s"] for path in NAMES) < ceiling, "no whole kernel reaches the ceiling"
        assert us["dp4a"] < us["sign_extend"] and min(us["dp4a"], us["dp4a_fused"]) < us["prmt"], (name, "on this card the INT8 side wins")
        long_vector = name == "down"  # 18,944 values, which each CTA would quantise for itself
        assert (us["dp4a"] < us["dp4a_fused"]) == long_vector, (name, "inside for the short vector, a kernel for the long one")
        assert every[name]["paths"]["sign_extend"]["apart_us"] > us["sign_extend"], "every GEMV pays the ramp anew"
