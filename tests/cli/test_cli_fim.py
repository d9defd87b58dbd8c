"""`nanoqwen generate` with a gap: every way of giving the two sides, the middle alone on stdout, refusals before a model loads."""

from __future__ import annotations

import json

import pytest
import textkit
import tiny
from clikit import make_pack

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
ID = {name: 256 + k for k, name in enumerate(MARKERS)}
FORM = [ID["<|fim_prefix|>"], *b"ab", ID["<|fim_suffix|>"], *b"cd", ID["<|fim_middle|>"]]


def gap_model(folder, end: str):
    """A model that fills every gap with XYZ, says `end`, and would go on with more text."""
    chain = {ID["<|fim_middle|>"]: 88, 88: 89, 89: 90, 90: ID[end], ID[end]: 65, 65: 66, 66: 65}
    name = end.strip("<|>")
    return make_pack(folder, name, tiny.SCRIPTED, tensors=tiny.scripted(chain), tokenizer=textkit.spec_with_merges(markers=MARKERS),
                     config=tiny.config(tiny.SCRIPTED, bos_token_id=ID["<|endoftext|>"], eos_token_id=ID["<|im_end|>"]),
                     generation_config=tiny.generation_config(eos_token_id=[ID["<|im_end|>"], ID["<|endoftext|>"]]))


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    return gap_model(tmp_path_factory.mktemp("gaps"), "<|fim_pad|>")


def test_only_the_middle_is_printed(run, gaps):
    outcome = run("generate", gaps, "--prefix", "ab", "--suffix", "cd")
    assert (outcome.status, outcome.out) == (0, "XYZ")


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<|im_end|>"])
def test_every_end(run, tmp_path, end):  # F15
    answer = json.loads(run("generate", gap_model(tmp_path, end), "--prefix", "ab", "--suffix", "cd", "--json").out)
    assert (answer["form"], answer["prompt_ids"]) == ("fill-in-the-middle", FORM)
    assert (answer["text"], answer["finish_reason"], answer["stopped_by"]) == ("XYZ", "stop", end)


def test_every_way_in_gives_the_same_prompt(run, gaps, tmp_path):
    before, after, whole = tmp_path / "before", tmp_path / "after", tmp_path / "whole"
    before.write_bytes(b"ab")
    after.write_bytes(b"cd")
    whole.write_bytes("ab▮cd".encode())
    for stdin, *way in (
        (b"", "--prefix", "ab", "--suffix", "cd"),
        (b"", "--prefix-file", before, "--suffix-file", after),
        (b"ab", "--prefix-file", "-", "--suffix", "cd"),
        (b"cd", "--prefix-file", before, "--suffix-file", "-"),
        (b"", "--prompt-file", whole, "--cursor", "▮"),
        (b"", "--prompt", "ab@@cd", "--cursor", "@@"),
        (b"ab@@cd", "--cursor", "@@"),
    ):
        answer = json.loads(run("generate", gaps, *way, "--max-tokens", "0", "--json", stdin=stdin).out)
        assert answer["prompt_ids"] == FORM, way


def test_a_continuation_says_so(run, gaps):
    answer = json.loads(run("generate", gaps, "--prompt", "ab", "--max-tokens", "0", "--json").out)
    assert (answer["form"], answer["prompt_ids"]) == ("continue", list(b"ab"))


def test_texts_stay_text(run, gaps):
    marker = "<|fim_middle|>"
    answer = json.loads(run("generate", gaps, "--prefix", marker, "--suffix", "", "--max-tokens", "0", "--json").out)
    assert answer["prompt_ids"] == [ID["<|fim_prefix|>"], *marker.encode(), ID["<|fim_suffix|>"], ID["<|fim_middle|>"]]


def test_the_embedded_checkpoint_fills_a_gap(run, tmp_path, monkeypatch):
    """The greedy sample that its training record holds, through the packed file this time."""
    from nanoqwen.demo import training_record

    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path))
    fills = [row for row in json.loads(training_record().read_text(encoding="utf-8"))["results"]["samples"]["int4"] if row["kind"] == "fill"]
    assert fills
    for row in fills:
        outcome = run("generate", f"--prefix={row['prompt'][0]}", f"--suffix={row['prompt'][1]}")
        assert (outcome.status, outcome.out) == (0, row["text"])


def test_a_model_without_markers_is_refused_by_name(run, plain):
    line = run("generate", plain, "--prefix", "a", "--suffix", "b").error_line()
    assert str(plain) in line and "<|fim_prefix|>" in line


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--prefix", "a"], "give --suffix too"),
        (["--suffix", "a"], "give --prefix too"),
        (["--prefix", "a", "--suffix", "b", "--prompt", "c"], "one or the other"),
        (["--prefix", "a", "--suffix", "b", "--special"], "--special"),
        (["--prefix", "a", "--suffix", "b", "--cursor", "c"], "--cursor"),
        (["--prefix", "a", "--prefix-file", "b", "--suffix", "c"], "not allowed with"),
        (["--prefix-file", "-", "--suffix-file", "-"], "read once"),
        (["--prompt", "ab", "--cursor", "@@"], "'@@' is not in the text"),
        (["--prompt", "a@b@", "--cursor", "@"], "2 times"),
        (["--prompt", "ab", "--cursor", ""], "--cursor"),
        (["--prefix", "", "--suffix", ""], "nothing around the gap"),
        (["--prefix-file", "nothing-here.py", "--suffix", ""], "nothing-here.py: No such file"),
    ],
)
def test_refusals(run, gaps, argv, words):
    assert words in run("generate", gaps, *argv).error_line()


def test_a_side_that_is_not_utf8(run, gaps, tmp_path):
    (tmp_path / "side").write_bytes(b"ab\xff")
    line = run("generate", gaps, "--prefix-file", tmp_path / "side", "--suffix", "").error_line()
    assert "offset 2" in line and str(tmp_path / "side") in line
