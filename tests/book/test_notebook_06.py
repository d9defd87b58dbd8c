"""Chapter 6: numbers that stand in its prose, recomputed, and what its prose says about the receipt. (Cells are checked by `pytest --nbval notebooks`.)"""

from __future__ import annotations

import ast
import json
import re

import pytest
from chapter import Chapter

from nanoqwen.bench.launching import VARIANTS
from nanoqwen.book.facts import quoted
from nanoqwen.book.receipts import receipt
from nanoqwen.book.source import show
from nanoqwen.config import Dims, load_settings, repo_root
from nanoqwen.cuda.constants import BUNDLE, LaunchShape, int4_block_bytes, streams

CHAPTER = Chapter("06_eager_graph")
cells, prose = CHAPTER.cells, CHAPTER.prose

DIMS, PAGE = Dims.qwen2_5_coder_7b(), load_settings().kv.page_tokens
REPORTED = {row["engine"]: row["ms_per_token"] for row in quoted()["articles"]["rows"]}
STORY_US = {engine: ms / (10 * DIMS.num_layers) * 1e3 for engine, ms in REPORTED.items()}
LOOP = show("nanoqwen/cuda/decode.py", "decode_launches").code.split("for i, layer in enumerate")[1]
IN_LAYER = len(re.findall(r'\b(?:add|gemv)\(\s*"', LOOP))


@pytest.mark.parametrize(
    "sentence",
    [
        f"needed {REPORTED['eager']} ms a token",
        f"replayed the recording: {REPORTED['graph']} ms",
        f"**{REPORTED['eager']} against {REPORTED['graph']} ms is not eager against graph.**",
        f"{10 * DIMS.num_layers} kernels of equal length that take {REPORTED['graph']} ms together",
        f"captured at positions 512 and {512 + 1} and picked by `position % {PAGE} == 0`",
        f"a place has pages of {PAGE} slots".replace("a place", "Its cache"),
        "so a layer has eight" if IN_LAYER == 8 else "",
        "in eleven ways" if sum(map(len, VARIANTS.values())) == 11 else "",
    ],
)
def test_sentence_says_what_the_package_computes(sentence):
    assert sentence and sentence in prose()


def test_words_that_stand_for_numbers():
    assert round(REPORTED["eager"] / REPORTED["graph"]) == 7 and "seven times faster" in prose()
    readers = DIMS.num_layers * len(re.findall(r"\bb\.step\b", LOOP)) + 2  # and embed and argmax
    assert 80 < readers < 90 and "read by more than eighty nodes" in prose()
    ahead = int(re.search(r"^AHEAD = (\d+)", (repo_root() / "nanoqwen/engines/hopper.py").read_text(encoding="utf-8"), re.MULTILINE).group(1))
    assert ahead == 4 and "`AHEAD` is four" in prose() and "up to three more steps are under way" in prose()
    assert 55 < STORY_US["graph"] < 65 and "Up to about 60 us a launch hides completely" in prose()
    assert 400 < STORY_US["eager"] < 500 and "only at more than 400 us" in prose()
    shape = LaunchShape(132)
    rings = [shape.gemv_warps * stream.stages * BUNDLE * int4_block_bytes(128) for name, stream in streams(DIMS, 128, shape).items() if name != "head"]
    assert 20e3 < min(rings) < 100e3 and 190e3 < max(rings) < 210e3 and "from tens of kilobytes to two hundred on each SM" in prose()
    assert PAGE == 16 and "fifteen of sixteen launches" in prose() and "a copy of 12 bytes" in json.dumps(cells())


def test_the_regions_are_eleven_and_the_names_of_kernels_or_of_the_original():
    listed = re.search(r"REGIONS = (\(.*?\))", (repo_root() / "nanoqwen/cuda/decode.py").read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len(ast.literal_eval(listed)) == 11 and listed.rstrip(" ,\n)").endswith('"kernel_gap"')


def test_what_the_prose_says_holds_in_the_receipt():
    found = receipt("launching").results
    ms = {engine: found["engines"][engine]["ms"] for engine in VARIANTS}
    assert {engine: set(of) for engine, of in VARIANTS.items()} == {engine: set(of) for engine, of in ms.items()}
    eager, graph = ms["eager"], ms["graph"]
    assert found["launches"] == IN_LAYER * DIMS.num_layers + 4
    assert eager["chained"] < 1.25 * graph["chained"], "the fast ways lie close together, and eager is among them"
    for slow in ("waits", "allocates", "made_anew"):
        assert eager[slow] > 1.3 * eager["chained"], "they wait, or do for each token what could be done once"
    assert found["engines"]["eager"]["host_ms"] < graph["chained"], "the host is busy for a part of each token and waits for the rest"
    assert found["engines"]["graph"]["host_ms"] < found["engines"]["eager"]["host_ms"]
    assert found["engines"]["eager"]["host_ms"] / found["launches"] * 1e3 < STORY_US["graph"], "launches hidden behind the story's kernels"
    for engine in ms:
        assert ms[engine]["chained"] < ms[engine]["chained_serial"], "overlap makes the card itself faster"
        assert ms[engine]["chained"] < ms[engine]["patched_awaited"], "the two sides take turns"
    regions = found["engines"]["eager"]["regions"]
    summed = sum(region["ms"] for region in regions.values())
    assert len(regions) == 10 and sum(region["launches"] for region in regions.values()) == found["launches"]
    assert eager["waits"] > summed > eager["chained"], "a large gap, and a negative one"
    assert found["stages_ns"]["overlap"]["total"] < found["stages_ns"]["serial"]["total"]
    empty = found["empty_us"]
    assert empty["waits"] > empty["eager"] > empty["graph"] > 0, "from a graph the card is told beforehand"
