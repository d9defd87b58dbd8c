"""Chapter 9: what its prose says in numbers, and what its mistakes stand for. (Cells are checked by `pytest --nbval notebooks`.)"""

from __future__ import annotations

import json

import pytest

from nanoqwen.config import Dims, load_settings, repo_root
from nanoqwen.ladder import layer
from nanoqwen.ladder.report import PASSED, Tier

CELLS = json.loads((repo_root() / "notebooks/09_validation.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
SHOWN = {cell["id"]: "".join(cell["outputs"][0]["data"]["text/plain"]) for cell in CELLS if cell["cell_type"] == "code" and cell["outputs"] and "data" in cell["outputs"][0]}
PROSE = " ".join(" ".join("".join(cell["source"]).split()) for cell in CELLS if cell["cell_type"] == "markdown")
LADDER = load_settings().ladder


@pytest.mark.parametrize(
    "sentence",
    [
        f"Two correct decoders write {LADDER.graph_prompts * LADDER.graph_tokens:,} tokens",
        "from a hundred prompts" if LADDER.graph_prompts == 100 else "",
        "allow half a percent" if LADDER.graph_min_token_match == 0.995 else "",
        "How many of the next forty tokens are equal?" if "AFTER = 40\n" in CODE["forced-run"] else "",
        "takes a RoPE base of 10,000 instead of a million" if "10_000.0" in CODE["faults-code"] and Dims.qwen2_5_coder_7b().rope_theta == 1e6 else "",
        "an eps ten times larger" if "10 * eps" in CODE["ex1-run"] else "",
    ],
)
def test_sentence_says_what_config_and_cells_say(sentence):
    assert sentence and sentence in PROSE


def test_the_rungs_are_those_of_the_config_and_the_rule_is_shown():
    assert LADDER.tiers == ("unit", "layer", "graph")
    assert "before.status != PASSED" in PROSE and Tier("unit").status != PASSED
    assert 'book.show("nanoqwen/ladder/__init__.py", "climb")' in CODE["ladder-show"]


def test_the_length_of_the_layer_rung_is_the_one_of_the_original_bug():
    page = load_settings().kv.page_tokens
    assert layer.TOKENS == 3 * page + 1 and "a length that the original's bug would have shown at" in PROSE


def test_every_rung_finds_a_mistake_that_the_one_below_lets_pass():
    """Read from the stored table, which nbval compares with a fresh run."""
    lines = SHOWN["faults-run"].splitlines()[1:]
    found = {line.split("  ")[0]: next(rung for rung in LADDER.tiers if f"  {rung} " in line) for line in lines}
    assert set(found.values()) == set(LADDER.tiers) and len(found) == 6
    assert found["position of the step before"] == "graph" and found["attention scale rounded to FP16"] == "unit"


def test_nan_passes_every_test_for_an_excess():
    table = SHOWN["nan-run"].splitlines()[1:]
    assert sum("**no**" in line for line in table) == 5 and sum(line.endswith("yes") for line in table) == 2
    assert "seven ways to ask" in PROSE and len(table) == 7
