"""Receipts are made again by the commands that stand in them, and by nothing else; one that is not made is what it was."""

from __future__ import annotations

import json
import sys

import pytest

from nanoqwen.bench import again, receipts
from nanoqwen.errors import InputError


def write(name: str, command: str | None = None) -> None:
    receipts.write_receipt(name, command or f"python -m nanoqwen.bench.{name} --receipt", {}, {}, ["source.py"], {}, device={"name": "a card"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A clone with three receipts, all of them current."""
    (tmp_path / "book" / "receipts").mkdir(parents=True)
    (tmp_path / "source.py").write_text("1\n")
    monkeypatch.setattr(receipts, "repo_root", lambda: tmp_path)
    for name in ("alpha", "sanitize", "zeta"):
        write(name)
    return tmp_path / "book" / "receipts"


def make_stale(folder, *names):
    for name in names:
        old = json.loads((folder / f"{name}.json").read_text())
        old["sources"]["source.py"] = "0" * 64
        (folder / f"{name}.json").write_text(json.dumps(old))


def writes(call) -> int:
    """A command that works."""
    write(call[2].rpartition(".")[2])
    return 0


def names(wanted):
    return [job.name for job in wanted]


def test_those_that_are_stale_are_chosen_and_the_sanitizers_come_first(folder):
    assert again.jobs([]) == []
    make_stale(folder, "sanitize", "alpha")
    assert names(again.jobs([])) == ["sanitize", "alpha"] and names(again.jobs(["zeta", "alpha", "zeta"])) == ["alpha", "zeta"]
    with pytest.raises(InputError, match="^there is no receipt beta; there are alpha, sanitize, zeta$"):
        again.jobs(["beta", "alpha"])


def test_a_command_is_run_by_this_interpreter_without_a_shell():
    assert again.calls_of("nanoqwen validate --engine graph --receipt && python -m nanoqwen.bench.load") == [
        [sys.executable, "-m", "nanoqwen", "validate", "--engine", "graph", "--receipt"], [sys.executable, "-m", "nanoqwen.bench.load"],
    ]  # fmt: skip
    for other in ("rm -rf book", "python setup.py", "python -m pip install x", "nanoqwen bench && curl x", "", "python"):
        with pytest.raises(InputError, match="a receipt's command is nanoqwen or python -m nanoqwen"):
            again.calls_of(other)


def test_every_receipt_of_the_book_can_be_made_again():
    there = receipts.receipt_names(receipts.receipts_folder())
    assert names(again.jobs(there))[: len(again.FIRST)] == list(again.FIRST) and len(again.jobs(there)) == len(there)


def test_receipts_are_made_one_after_another(folder, capsys):
    make_stale(folder, "sanitize", "zeta")
    log: list = []
    assert again.make_all(again.jobs([]), lambda call: log.append(call) or writes(call)) == 0
    assert [call[2] for call in log] == ["nanoqwen.bench.sanitize", "nanoqwen.bench.zeta"] and again.jobs([]) == []
    assert "[2 of 2] zeta: made" in capsys.readouterr().out


def test_one_that_fails_is_named_and_the_others_go_on(folder, capsys):
    make_stale(folder, "alpha", "zeta")
    assert again.make_all(again.jobs([]), lambda call: 2 if call[2].endswith("alpha") else writes(call)) == 1
    out, err = capsys.readouterr()
    assert "alpha: not made: python -m nanoqwen.bench.alpha --receipt ended with status 2" in out and "zeta: made" in out and err == "not made: alpha\n"
    assert names(again.jobs([])) == ["alpha"]


@pytest.mark.parametrize("end", [2, KeyboardInterrupt], ids=["fails", "is interrupted"])
def test_a_receipt_is_put_back_when_the_second_part_of_its_command(end, folder):
    """The ladder's: each part writes the receipt, the first without what the others will say. Kept, it would be current and lack them for good."""
    write("validate", "nanoqwen validate --engine graph --receipt && nanoqwen validate --engine eager --receipt")
    make_stale(folder, "validate")
    before, seen = (folder / "validate.json").read_bytes(), []

    def run(call):
        seen.append(call)
        if "graph" in call:
            write("validate", "nanoqwen validate --engine graph --receipt")
            return 0
        if end is KeyboardInterrupt:
            raise KeyboardInterrupt
        return end

    (job,) = again.jobs([])
    if end is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            again.make(job, run)
    else:
        assert "--engine eager --receipt ended with status 2" in again.make(job, run)
    assert len(seen) == 2 and (folder / "validate.json").read_bytes() == before and sorted(path.name for path in folder.iterdir() if path.suffix != ".json") == []


@pytest.mark.parametrize("stale", [True, False])
def test_a_command_that_writes_nothing_is_noticed(stale, folder, capsys):
    if stale:
        make_stale(folder, "alpha")
    assert again.make_all(again.jobs(["alpha"]), lambda call: 0) == 1
    assert "alpha: not made: its command ran and wrote no receipt" in capsys.readouterr().out


def test_a_receipt_that_is_stale_when_it_is_written_is_noticed(folder):
    """A source changed while it was measured."""

    def run(call):
        writes(call)
        (folder.parents[1] / "source.py").write_text("2\n")
        return 0

    (job,) = again.jobs(["alpha"])
    assert again.make(job, run) == "its command ran, and the receipt is older than its sources (source.py changed)"


def test_as_a_program(folder, capsys):
    assert again.main([]) == 0 and capsys.readouterr().out == "every receipt is current\n"
    make_stale(folder, "zeta")
    assert again.main(["--dry"]) == 0 and capsys.readouterr().out == "zeta: python -m nanoqwen.bench.zeta --receipt\n"
    assert again.main(["beta"]) == 2 and "error: there is no receipt beta" in capsys.readouterr().err
    write("eve", "curl somewhere")
    assert again.main(["zeta", "eve"]) == 2, "refused before anything is run"
    assert "this one is 'curl somewhere'" in capsys.readouterr().err
