"""`nanoqwen pack --method`: the choice is taken, told and recorded."""

from __future__ import annotations

import json

import tiny

from nanoqwen.cli import pack as command
from nanoqwen.int4_search import METHODS


def test_the_choices_are_those_of_the_packer():
    assert command.METHODS == tuple(METHODS)


def test_mse(run, tmp_path):
    source, out = tiny.make(tmp_path / "src"), tmp_path / "m.nanoqwen"
    answer = json.loads(run("pack", source, "-o", out, "--method", "mse", "--json").out)
    assert answer["method"] == "mse"
    assert json.loads(run("inspect", out, "--json").out)["quantise"]["method"] == "mse"
    assert ", mse, " in run("pack", source, "-o", out, "--method", "mse").out
    assert run("validate", out, "--tier", "layer").status == 0, "the engine runs negative scales as the float64 oracle does"


def test_absmax_is_the_default(run, tmp_path):
    source, out = tiny.make(tmp_path / "src"), tmp_path / "m.nanoqwen"
    assert json.loads(run("pack", source, "-o", out, "--json").out)["method"] == "absmax"


def test_another_word_is_refused(run, tmp_path):
    line = run("pack", tiny.make(tmp_path / "src"), "-o", tmp_path / "m.nanoqwen", "--method", "awq").error_line()
    assert "awq" in line and "mse" in line
    assert not (tmp_path / "m.nanoqwen").exists()
