"""`synthetic:NAME` where a FILE is expected: a small one is made and kept, a large one is a plan that only a Hopper card fills."""

from __future__ import annotations

import json

import pytest

from nanoqwen import synthetic_pack
from nanoqwen.engines import hopper_problem


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path))
    return tmp_path


def test_a_small_one_is_made_once_and_works_like_any_file(run, cache):
    first = run("generate", "synthetic:demo", "--prompt", "def f", "--max-tokens", "5", "--json", "--engine", "cpu")
    assert first.status == 0 and first.err.count("made synthetic:demo as ") == 1, first.err
    again = run("generate", "synthetic:demo", "--prompt", "def f", "--max-tokens", "5", "--json", "--engine", "cpu")
    assert "made synthetic:demo" not in again.err and len(list(cache.iterdir())) == 1
    assert len(json.loads(first.out)["ids"]) == 5 and json.loads(first.out)["ids"] == json.loads(again.out)["ids"]
    assert run("validate", "synthetic:demo", "--prompts", "2", "--tokens", "3", "--engine", "cpu").out.splitlines()[-1] == "passed"
    assert "Checksums: all good" in run("inspect", "synthetic:demo", "--verify").out


def test_a_large_one_is_inspected_from_its_plan(run, cache):
    facts = json.loads(run("inspect", "synthetic:7b", "--json").out)
    assert facts["path"] == "synthetic:7b" and facts["dims"]["layers"] == 28 and facts["bytes_per_token"]["total"] == 4_455_270_400
    assert "not a file here: sizes and offsets are those that it would have" in facts["notes"]
    assert "there is nothing to verify" in run("inspect", "synthetic:7b", "--verify").error_line()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("words", [["generate", "--prompt", "a", "--engine", "cpu"], ["validate"]])
def test_a_large_one_on_the_cpu_is_refused_with_what_it_would_take(run, words):
    assert run(words[0], "synthetic:7b", *words[1:]).error_line() == synthetic_pack.too_large("synthetic:7b")


@pytest.mark.skipif(hopper_problem() is None, reason="a Hopper card is here")
def test_a_large_one_on_a_card_that_is_not_there(run):
    line = run("generate", "synthetic:7b", "--prompt", "a", "--engine", "graph").error_line()
    assert line.startswith("engine graph: ") and "--engine cpu with synthetic:demo" in line


def test_an_unknown_name_lists_the_known_ones(run):
    for command in (["inspect"], ["validate"], ["bench", "e2e"], ["generate", "--prompt", "a"]):
        assert "use one of synthetic:7b, synthetic:demo" in run(*command, "synthetic:8b").error_line()
