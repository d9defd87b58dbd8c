"""Chapters 1 and 2: numbers that stand in their prose, recomputed. (Cells are checked by `pytest --nbval notebooks`.)

A number in a sentence cannot fail by itself when a constant changes; here it does.
"""

from __future__ import annotations

from math import factorial

import pytest
from chapter import Chapter

from nanoqwen.book.facts import limit_ms, quoted
from nanoqwen.config import Dims, load_settings
from nanoqwen.model import bytes_per_token, flops_per_token, kv_bytes_per_token, schema
from nanoqwen.packwriter import plan

SETTINGS, DIMS = load_settings(), Dims.qwen2_5_coder_7b()
GROUP, BENCH = SETTINGS.quant.group, SETTINGS.benchmark
COUNT = bytes_per_token(DIMS, GROUP, BENCH.prompt_tokens + BENCH.gen_tokens // 2)
H100, H200 = quoted()["bandwidth_gb_s"]["H100 SXM"], quoted()["bandwidth_gb_s"]["H200"]
REPORTED = {row["engine"]: row["ms_per_token"] for row in quoted()["articles"]["rows"]}
LIMIT = limit_ms(COUNT["total"], H100)
WEIGHTS = sum(s.rows * s.cols for s in schema(DIMS))
FILE = plan(DIMS, GROUP, schema(DIMS), {}, b"", {})[0].file_bytes
SMALL = Dims(24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True)  # Qwen2.5-0.5B

CHAPTERS = ("01_decode_step", "02_pack_format")


@pytest.mark.parametrize(
    "sentence",
    [
        f"through {DIMS.num_layers} layers",
        f"**{REPORTED['graph']} ms** a token on an H100, and {REPORTED['eager']} ms before CUDA graphs",
        f"llama.cpp takes {REPORTED['peer']} ms",
        f"448 numbers here, {DIMS.hidden:,} in the 7B",
        f"{BENCH.prompt_tokens} tokens of prompt, and half of the {BENCH.gen_tokens} new ones",
        f"FP16 matrix of {DIMS.vocab:,} rows",
        f"Four heads times {DIMS.head_dim} components times two bytes is indeed {DIMS.kv_size * 2 // 1024} KiB",
        f"At {DIMS.max_position:,} it is not",
        f"of {COUNT['total'] / 1e9:.1f} GB next to nothing is left",
        f"used {COUNT['total'] / REPORTED['graph'] / 1e6 / H100:.0%} of the bandwidth it was waiting for",
        f"more than {10 * DIMS.num_layers} a token",
        f"The step from {REPORTED['eager']} to {REPORTED['graph']} ms",
        f"{WEIGHTS / 1e9:.1f} billion weights at four bits are {WEIGHTS / 2e9:.1f} GB",
        f"{flops_per_token(DIMS, 576) / 1e9:.0f} GFLOP on a card that does {1979 // 2} TFLOP/s",
        f"Off by a factor of {kv_bytes_per_token(DIMS) // 1024},",
        f"{COUNT['total'] / 1e9:.1f} GB a token: {LIMIT:.1f} ms on an H100 and {limit_ms(COUNT['total'], H200):.1f} ms on an H200",
        f"its own {4096 * kv_bytes_per_token(DIMS) / 1e6:.0f} MB of keys and values",
        f"is it {WEIGHTS / sum(s.rows * s.cols for s in schema(SMALL)) // 1 - 1:.0f} times faster than the 7B?",
    ],
)
def test_numbers_in_chapter_1(sentence):
    assert sentence in Chapter("01_decode_step").prose()


def test_numbers_in_words_in_chapter_1():
    text = Chapter("01_decode_step").prose()
    a_block = (COUNT["int4"] + COUNT["scales"]) / DIMS.num_layers
    assert "as much as nine blocks" in text and round(COUNT["lm_head"] / a_block) == 9
    assert "A quarter of it is the output head" in text and 0.23 < COUNT["lm_head"] / COUNT["total"] < 0.27
    times = REPORTED["graph"] / LIMIT
    assert "a factor of twelve and a half" in text and "twelve times the limit" in text and 12.25 < times < 12.75
    assert "Seven times better than it was, and three times worse" in text
    assert round(REPORTED["eager"] / REPORTED["graph"]) == 7 and round(REPORTED["graph"] / REPORTED["peer"]) == 3
    intensity = flops_per_token(DIMS, 576) / COUNT["total"]
    assert "about three operations with each byte" in text and round(intensity) == 3
    assert "could do close to a hundred times that" in text and 85 < 1979 / 2 * 1e3 / H100 / intensity < 100
    assert "At five microseconds each, submitting the work takes as long as the work" in text
    assert 0.95 < 10 * DIMS.num_layers * 5e-3 / LIMIT < 1.1
    assert "Several hundred microseconds" in text and 200 < (REPORTED["eager"] - REPORTED["graph"]) / 280 * 1e3 < 999
    small = bytes_per_token(SMALL, GROUP, 576)
    assert "about ten times" in text and 9 < COUNT["total"] / small["total"] < 11
    assert "more than half of its bytes are the head" in text and small["lm_head"] / small["total"] > 0.5


@pytest.mark.parametrize(
    "sentence",
    [
        f"can stand in {factorial(8):,} orders",
        f"a vocabulary of {DIMS.vocab:,} rows",
        f"A row of the 7B's q_proj is {DIMS.hidden // 2:,} bytes",
        f"reading {FILE / 1e9:.1f} GB to say hello",
        f"whether to trust {FILE / 1e9:.1f} GB",
        f"A group of {GROUP} weights as one record of {GROUP // 2 + 2} bytes: 2 of scale, {GROUP // 2} of codes",
        f"closer to {4 + 16 / GROUP}, four bits a code and a sixteen-bit scale for every {GROUP}",
        f"The 7B in BF16 is a little over {2 * WEIGHTS / 1e9 // 1:.0f} GB",
        f"multiplies all {GROUP} weights of its group",
    ],
)
def test_numbers_in_chapter_2(sentence):
    assert sentence in Chapter("02_pack_format").prose()


def test_numbers_in_words_in_chapter_2():
    text = Chapter("02_pack_format").prose()
    plain = 2 * DIMS.vocab * DIMS.hidden * 2
    assert "Two fifths of the file are not quantised" in text and 0.38 < plain / FILE < 0.42
    assert "fourteen lines" in text and DIMS.hidden // 2 == 14 * SETTINGS.format.align_bytes
    assert "a few dozen kilobytes of header and table" in text and 24e3 < 256 + len(schema(DIMS)) * SETTINGS.format.entry_bytes < 60e3
    share = SMALL.vocab * SMALL.hidden / sum(s.rows * s.cols for s in schema(SMALL))
    assert "more than a quarter of its weights are embedding rows" in text and 0.25 < share < 0.33


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_code_fits_the_column(chapter):
    """A line that is longer than the page's code box is cut off on paper and hidden on a screen. Folded cells may be wider."""
    for cell in Chapter(chapter).cells():
        folded = "hide-input" in cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and not folded:
            for line in "".join(cell["source"]).splitlines():
                assert len(line) <= 96, f"{cell['id']}: {line}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_shape_of_a_chapter(chapter):
    """The drawing first, then a prediction before anything is computed, a takeaway, and exercises with folded answers."""
    sources = ["".join(c["source"]) for c in Chapter(chapter).cells()]
    where = [next(i for i, s in enumerate(sources) if mark in s) for mark in ("book.token_path(", ":class: predict", ":class: takeaway", "## Exercises")]
    assert where == sorted(where) and where[0] == 1
    answers = [c for c in Chapter(chapter).cells()[where[-1] :] if c["cell_type"] == "code"]
    assert len(answers) >= 4 and all("hide-cell" in c["metadata"]["tags"] and c["outputs"] for c in answers)
