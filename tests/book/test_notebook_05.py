"""Chapter 5: what stands in its prose, recomputed, and what it says of the card, compared with the card's stored answers."""

from __future__ import annotations

import re

import pytest
from chapter import Chapter

from nanoqwen import kv
from nanoqwen.book.facts import limit_ms, quoted
from nanoqwen.config import Dims, data_path, load_settings
from nanoqwen.lessons.barriers import KERNELS, LENGTHS, SOURCE, UNJOINED
from nanoqwen.warpmodel import explore, ring
from nanoqwen.warpmodel.lessons import LESSONS, PAGE_TOKENS, lesson, verdict

CHAPTER = Chapter("05_paged_attention")
cells, prose = CHAPTER.cells, CHAPTER.prose

SETTINGS, DIMS = load_settings(), Dims.qwen2_5_coder_7b()
PAGE = SETTINGS.kv.page_tokens
SHIPPED = data_path("kernels", "decode", "paged_attention.cu").read_text(encoding="utf-8")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen")


def stored(name: str) -> str:
    """Plain text that a cell put out."""
    (cell,) = (c for c in cells() if c["id"] == name)
    parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
    return "\n".join("".join(part) for part in parts)


def on_card(name: str) -> str:
    text = stored(name)
    assert text, f"the cell {name} has no output of a card"
    return text


def line(text: str, *begins: str) -> list[str]:
    """Fields of the one line of a table that begins with these."""
    (found,) = (re.split(r"  +", row.strip()) for row in text.splitlines() if re.split(r"  +", row.strip())[: len(begins)] == list(begins))
    return found[len(begins) :]


def constant(name: str) -> int:
    return int(re.search(rf"\b{name} = (\d+)[,;]", SHIPPED).group(1))


# ----------------------------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    "sentence",
    [
        f"{NUMBERS[len(KERNELS)]} small kernels with their barriers in right and wrong places",
        f"holds {NUMBERS[len(KERNELS)]} versions of one small paged attention: one query head, pages of {PAGE} tokens",
        f"A stage holds {NUMBERS[constant('kConsumers') // 2]} pages, K and V of each",
        f"all {NUMBERS[constant('kConsumers') + 1]} warps meet, consumers store their sums",
        f"the {NUMBERS[DIMS.num_heads // DIMS.num_kv_heads]} heads' high parts fill the upper half of a tile of 16 rows",
        f"each of the {NUMBERS[SHIPPED.count('__syncthreads();')]} `__syncthreads()` stands at top level",
        f"One lane asks for {kv.head_slice_bytes(DIMS, SETTINGS.kv) // 1024} KiB with one instruction",
        f"The model's pages hold {NUMBERS[PAGE_TOKENS]} tokens, so 8 stands for 64, 5 for 49 and 7 for 63",
        f"Each kernel runs at {NUMBERS[len(LENGTHS)]} lengths around a partial last page",
    ],
)
def test_sentence_says_what_the_sources_say(sentence):
    assert sentence in prose()


def test_every_syncthreads_of_the_shipped_kernel_is_at_top_level():
    assert len(re.findall(r"^  __syncthreads\(\);", SHIPPED, re.MULTILINE)) == SHIPPED.count("__syncthreads();")


def test_words_that_stand_for_numbers():
    pages = kv.pages_for(SETTINGS.benchmark.prompt_tokens, PAGE)
    layer = 2 * DIMS.num_kv_heads * pages * kv.head_slice_bytes(DIMS, SETTINGS.kv)
    us = 1e3 * limit_ms(layer, quoted()["bandwidth_gb_s"]["H100 SXM"])
    assert SETTINGS.benchmark.prompt_tokens == 512 and layer == 1 << 20 and 0.30 < us < 0.35
    assert "At the benchmark's 512 tokens a layer's cache is one megabyte, and the memory could deliver it in a third of a microsecond" in prose()


def test_lengths_of_the_model_stand_for_lengths_of_the_card():
    """Full pages; one token in the last; a last page in which every consumer has a token."""
    consumers = int(re.search(r"kConsumers = (\d+)", data_path("kernels", *SOURCE.split("/")).read_text(encoding="utf-8")).group(1))
    for card, model in ((48, 8), (64, 8), (49, 5), (65, 5), (63, 7)):
        tail, small = card % PAGE, model % PAGE_TOKENS
        assert (tail == 0) == (small == 0) and (tail == 1) == (small == 1) and (tail >= consumers) == (small >= 2)


def test_the_text_names_kernels_by_what_the_model_says_of_them():
    said = {name: verdict(explore(lesson(name, 5))) for name in LESSONS}
    branch = [name for name in LESSONS if name.startswith("branch")]
    early, hangs = ([f"`{n}`" for n in branch if said[n] == word] for word in ("reads too early", "hangs"))
    assert f"{early[0]}, {early[1]} and {early[2]} march on" in prose() and len(early) == 3
    assert f"{hangs[0]}, {hangs[1]} and {hangs[2]} hang" in prose() and len(hangs) == 3
    assert {"branch_exit", "leavers"} == set(UNJOINED)
    assert "It is wrong at 49 and right at 63" in prose() and (said["token_branch"], verdict(explore(lesson("token_branch", 7)))) == ("reads too early", "right")


def test_the_barrier_before_the_join_takes_the_longest_schedule():
    broken = [{"empty_barrier": False}, {"wait_full": False}, {"parity_slip": 1}, {"byte_slip": -4096}, {"byte_slip": 4096}, {"join_barrier": False}]
    lengths = [min(map(len, explore(ring(5, stages=2, consumers=2, **part)).schedules.values())) for part in broken]
    assert lengths[-1] == max(lengths) and lengths.count(max(lengths)) == 1 and "is the longest in the table" in prose()


def test_the_chapter_speaks_of_its_points_of_the_original():
    assert "Tensor Memory Accelerator" in prose() and "Both happen, in different kernels" in prose() and "They order threads" in prose()


# ------------------------------------------------------------------------------------------------------------------- the card


def test_card_the_bug_shows_as_the_text_says():
    table = on_card("ending")
    for situation in ("pages in L2", "pages in memory", "supply held back"):
        assert line(table, "`right`", situation) == ["right"] * 5
        buggy = line(table, "`branch_join`", situation)
        assert buggy[LENGTHS.index(48)] == buggy[LENGTHS.index(64)] == "right"
    assert line(table, "`branch_join`", "pages in L2") == ["right"] * 5
    partial = [n for n, length in enumerate(LENGTHS) if length % PAGE]
    cold, held = (line(table, "`branch_join`", situation) for situation in ("pages in memory", "supply held back"))
    assert any("wrong" in cold[n] for n in partial) and "20 of 20 wrong" not in [cold[n] for n in partial]
    assert [held[n] for n in partial] == ["20 of 20 wrong"] * 3


def test_card_rule_and_card_agree_everywhere():
    agree, total = map(int, re.search(r"rule and card agree in (\d+) of (\d+) cases", on_card("compare")).groups())
    assert agree == total >= 50 and "rule:" not in stored("compare")
    assert "One sentence predicted them all" in prose()


def test_card_the_kernels_that_hang_are_those_of_the_rule():
    table = on_card("hanging")
    for name in ("branch_signal", "branch_two"):
        assert line(table, f"`{name}`", "48")[0] == "right" and line(table, f"`{name}`", "49")[0].startswith("hangs")
    assert line(table, "`branch_each`", "16")[0] == "right" and line(table, "`branch_each`", "48")[0].startswith("hangs")


def test_card_without_a_wait_bytes_are_late_and_with_one_never():
    text = on_card("fences-run")
    at_once = {label.strip(): float(share) for label, share in re.findall(r"^  (.+?) +([\d.]+)% at once", text, re.MULTILINE)}
    assert at_once["producer waits for the bytes"] == 0 < at_once["no wait, pages in memory"]
    assert re.search(r"producer waits for the bytes +0\.0% at once$", text, re.MULTILINE)
    assert "`fences`" in stored("compare") and line(stored("compare"), "`fences`") == ["wrong"] * 5
