"""The appendices about the story's errors, rented cards and llama.cpp: their tables, their links, and every command they print."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from test_commands import fenced

from nanoqwen.bench import peers
from nanoqwen.bench.protocol import Protocol
from nanoqwen.bench.receipts import write_receipt
from nanoqwen.book import errata, facts, links, receipts, rented, sizes
from nanoqwen.cli import GROUPS
from nanoqwen.cli.parser import build_parser, parse
from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.machine import Driver

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*(ROOT / "book").glob("*.md"), ROOT / "README.md"))


def page(name: str) -> str:
    return (ROOT / "book" / name).read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- commands


def printed(name: str) -> list[list[str]]:
    """The commands of a page's console blocks, as a shell would cut them; `a && b` are two."""
    blocks = [text for language, text in fenced(name) if language == "console"]
    lines = [line[2:] for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    cut = [shlex.split(re.sub(r"\$'(.*?)'", r"'\1'", line), comments=True) for line in lines]
    found: list[list[str]] = []
    for words in cut:
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        found.append(words)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_ours_is_one_that_the_program_takes(name):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for words in printed(name):
        if words[0] == "nanoqwen":
            root, commands = build_parser([group.add_parser for group in GROUPS])
            assert parse(root, commands, words[1:]).run, words
        elif words[0] == "make":
            assert set(w for w in words[1:] if "=" not in w) <= set(targets), words
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        for word in words[1:]:
            if re.match(r"(notebooks|nanoqwen|book|tests)/.*\.\w+$", word):
                assert (ROOT / word).is_file(), f"{name}: {word}"


def test_the_new_pages_print_commands():
    assert len(printed("book/rented_h100.md")) > 20 and len(printed("book/compare_llama_cpp.md")) == 6


def test_a_wrong_option_would_be_found():
    root, commands = build_parser([group.add_parser for group in GROUPS])
    with pytest.raises(Exception, match="--lama-bench"):
        parse(root, commands, ["bench", "e2e", "--lama-bench", "x"])


# ---------------------------------------------------------------------------------------------------------- errata


def rows(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in markdown.splitlines() if line.startswith("|")][2:]


def test_the_arithmetic_of_the_errata():
    """Worked out by hand from the published dimensions."""
    assert [row[1] for row in rows(errata.errata_part("cache"))] == ["1,024", "2,048", "57,344", f"{57344 * 32768:,}"]
    gate, _, down = rows(errata.errata_part("activations"))
    weights = 3584 * 18944 // 2 + 3584 * 18944 // 128 * 2
    assert gate[1:4] == [f"{weights:,}", f"{2 * 3584:,}", f"{3584 + 28 * 2:,}"]
    assert down[1:] == [f"{weights:,}", "37,888", f"{18944 + 148 * 2:,}", f"{100 * (37888 - 19240) / (weights + 37888):.3f}%"]
    eager, graph, bound = rows(errata.errata_part("bandwidth"))
    total = 4_455_270_400
    assert graph[1:] == ["16.7", f"{total / 16.7e6:.0f}", "8.0%", "13"] and eager[1] == "119" and bound[1] == f"{total / 3350e6:.2f}"
    assert [row[1] for row in rows(errata.errata_part("launches"))] == ["282", "102.3", f"{102300 / 282:.0f}", "86%"]


def test_the_lessons_show_both_versions_of_the_story():
    said = {row[0].strip("`"): row[2:] for row in rows(errata.errata_part("lessons"))}
    assert said["branch_join"] == ["right", "reads too early"] and said["branch_signal"] == ["right", "hangs"]
    assert said["fences"] == ["reads too early"] * 2 and said["fences_wait"] == ["right"] * 2


@pytest.fixture
def made_receipts(tmp_path, monkeypatch):
    """An empty folder of receipts, and a function that writes one."""
    monkeypatch.setattr(receipts, "receipts_folder", lambda: tmp_path)

    def write(name: str, results: dict) -> None:
        write_receipt(name, f"run {name}", results, [1], ["nanoqwen/int4.py"], {}, device={"name": "A CARD"}, folder=tmp_path)

    return write


def test_what_was_not_measured_has_no_number(made_receipts):
    for part in ("eager", "paths"):
        assert errata.errata_part(part).startswith("*Not measured yet: ") and not re.search(r"\d(ms| us|%)", errata.errata_part(part))
    assert sum(row[2] == "not measured yet" for row in rows(rented.rented_part("expect"))) == 4


def test_ways_to_launch_come_from_the_receipt(made_receipts):
    from nanoqwen.bench.launching import VARIANTS

    engines = {name: {"ms": {variant: 1 + k / 8 for k, variant in enumerate(told)}, "host_ms": 0.25} for name, told in VARIANTS.items()}
    made_receipts("launching", {"engines": engines, "launches": 283})
    text = errata.errata_part("eager")
    found = rows(text)
    assert found[0][1:] == ["1.000", ""] and found[-1][1] == "" and found[-1][2] == "1.500" and "A CARD" in text and "283 launches" in text
    assert len(found) == len({variant for told in VARIANTS.values() for variant in told})


def test_paths_come_from_the_receipt(made_receipts):
    paths = {"bias": {"us": 9.5, "share": 0.81}, "dp4a": {"us": 11.25, "share": 0.7}}
    made_receipts("unpack_paths", {"shapes": {"q": {"paths": {}}, "gate": {"paths": paths}, "down": {"paths": paths}}, "quantise_us": {"3584": 1.5}})
    text = errata.errata_part("paths")
    assert rows(text) == [["`bias`", "9.50 us, 81%", "9.50 us, 81%"], ["`dp4a`", "11.25 us, 70%", "11.25 us, 70%"]]
    assert "1.50 us for 3,584 columns" in text and "A CARD" in text


def test_unknown_parts_are_refused():
    for make in (errata.errata_part, rented.rented_part):
        with pytest.raises(ValueError, match="no part is called 'x'; there are: "):
            make("x")


def test_every_part_is_on_its_page():
    for name, kind, parts in (("errata.md", "errata", errata.PARTS), ("rented_h100.md", "rented", rented.PARTS)):
        assert sorted(re.findall(rf"^```{{{kind}}} (\w+)$", page(name), re.M)) == sorted(parts)


# ----------------------------------------------------------------------------------------------------------- links


def test_links_follow_headings():
    assert links.chapter_links("4") == "[chapter 04](../notebooks/04_paged_kv.ipynb)"
    assert links.chapter_links("1: The 7B; 4").startswith("[chapter 01, The 7B](../notebooks/01_decode_step.ipynb#the-7b); [chapter 04]")
    with pytest.raises(InputError, match="04_paged_kv.ipynb has no heading 'Nothing'; it has: What a token"):
        links.chapter_links("4: Nothing")


def test_a_chapter_that_is_no_page_is_words(monkeypatch):
    monkeypatch.setattr(links, "pages", lambda: ["book/intro", "notebooks/01_decode_step"])
    assert links.chapter_links("9: Anything; 1") == "chapter 09 (to come); [chapter 01](../notebooks/01_decode_step.ipynb)"


# ---------------------------------------------------------------------------------------------------- rented cards


def test_sizes_are_those_of_the_dimensions():
    layers = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944)
    small = 28 * (2 * 3584 + 3584 + 2 * 512) + 3584
    vocabulary = 152064 * 3584
    source, packed = sizes.stored_bytes(Dims.qwen2_5_coder_7b(), 128)
    assert source == 2 * (layers + small + 2 * vocabulary)
    assert packed == layers // 2 + layers // 128 * 2 + 2 * (small + 2 * vocabulary)
    known = sizes.sizes()
    assert (known["gb-checkpoint"], known["gb-pack-file"], known["minutes-checkpoint"]) == ("15.2", "5.5", "2")
    assert float(known["gb-card"]) > packed / 1e9 + 57344 * 32768 / 1e9


def test_a_sound_machine_has_nothing_to_mend():
    from nanoqwen.doctor import OK, diagnose

    assert [f for f in diagnose(rented.SOUND).findings if f.status != OK] == []


def test_every_symptom_has_a_line_and_a_remedy():
    found = rows(rented.rented_part("symptoms"))
    assert len(found) == len(rented.WRONG) > 10 and all(all(cells) for cells in found)
    assert len({cells[1] for cells in found}) == len(found), "each its own line"
    with pytest.raises(ValueError, match="nothing to say"):
        rented.doctor_says(rented.SOUND, "CuPy")


def test_wheels_follow_the_doctor_and_the_lock():
    from nanoqwen.doctor import OLDEST_DRIVER, fitting_extra

    old, new = rows(rented.rented_part("wheels"))
    assert old[0] == f"{OLDEST_DRIVER} or newer" and old[2] == f"`nanoqwen[{fitting_extra(Driver('570', 12080))}]`"
    assert new[:3] == ["580 or newer", "13.0", "`nanoqwen[cuda13]`"]
    for extra, cells in (("cuda12", old), ("cuda13", new)):
        lock = (ROOT / "requirements" / f"{extra}.txt").read_text(encoding="utf-8")
        for pinned in cells[3].split(", "):
            assert pinned.strip("`").replace(" ", "==") in lock, pinned


def test_expectations_come_from_receipts(made_receipts):
    made_receipts("load", {"all_s": {"cold": 12.34, "warm": 3.21}})
    made_receipts("e2e", {"engines": {"graph": {"itl_ms": 1.456}}})
    made_receipts("pack", {"seconds_for_7b_at_this_rate": 14.1})

    found = {cells[0]: cells for cells in rows(rented.rented_part("expect"))}
    assert [found[step][2] for step in ("pack it", "open it, nothing compiled yet", "open it again", "a token")] == ["14 s", "12.3 s", "3.2 s", "1.46 ms"]
    assert all("A CARD" in cells[3] or "computed" in cells[3] for cells in found.values())


# -------------------------------------------------------------------------------------------------------- llama.cpp


def test_the_page_names_the_pinned_peer_and_the_command_that_runs():
    text, peer, gguf = page("compare_llama_cpp.md"), facts.quoted()["llama_cpp"], facts.quoted()["gguf"]
    assert set(re.findall(r"\bb1\d{4}\b", text)) == {peer["build"]}
    assert f"commit `{peer['commit'][:9]}`" in text
    assert set(re.findall(r"[\w.-]+\.gguf", text)) == {gguf["file"], "random-7b-q4_k_m.gguf"} and f"https://huggingface.co/{gguf['repository']}" in text
    shown = re.search(r"^llama-bench (-m .*)$", text, re.M).group(1)
    assert shown.split() == peers.command(peers.Tool("llama-bench", "FILE"), Protocol.standard(), on_gpu=True)[1:]
    explained = re.findall(r"^\| `(-\w+)[ `]", text, re.M)
    assert explained == [word for word in shown.split() if word.startswith("-") and word != "-m"]
