"""Receipts are made again by the commands that stand in them, and by nothing else."""

from __future__ import annotations

import json
import sys

import pytest

from nanoqwen.bench import again, receipts
from nanoqwen.errors import InputError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A clone with three receipts: two older than their only source, one current."""
    (tmp_path / "book" / "receipts").mkdir(parents=True)
    (tmp_path / "source.py").write_text("1\n")
    monkeypatch.setattr(receipts, "repo_root", lambda: tmp_path)
    for name in ("alpha", "sanitize", "zeta"):
        receipts.write_receipt(name, f"python -m nanoqwen.bench.{name} --receipt", {}, {}, ["source.py"], {}, device={"name": "a card"})
    return tmp_path / "book" / "receipts"


def make_stale(folder, *names):
    for name in names:
        old = json.loads((folder / f"{name}.json").read_text())
        old["sources"]["source.py"] = "0" * 64
        (folder / f"{name}.json").write_text(json.dumps(old))


def renewing(folder, log, *, status=0, renew=True):
    """A stand-in for running a command: it is written down, and makes the receipt current."""

    def run(call):
        log.append(call)
        if renew and not status:
            name = call[2].rpartition(".")[2]
            receipts.write_receipt(name, f"python -m nanoqwen.bench.{name} --receipt", {}, {}, ["source.py"], {}, device={"name": "a card"})
        return status

    return run


def test_those_that_are_stale_are_chosen_and_the_sanitizers_come_first(folder):
    assert again.chosen([]) == []
    make_stale(folder, "sanitize", "alpha")
    assert again.chosen([]) == ["sanitize", "alpha"] and again.chosen(["zeta", "alpha", "zeta"]) == ["alpha", "zeta"]
    with pytest.raises(InputError, match="^there is no receipt beta; there are alpha, sanitize, zeta$"):
        again.chosen(["beta", "alpha"])


def test_a_command_is_run_by_this_interpreter_without_a_shell():
    assert again.calls("nanoqwen validate --engine graph --receipt && python -m nanoqwen.bench.load") == [
        [sys.executable, "-m", "nanoqwen", "validate", "--engine", "graph", "--receipt"], [sys.executable, "-m", "nanoqwen.bench.load"],
    ]  # fmt: skip
    for other in ("rm -rf book", "python setup.py", "python -m pip install x", "nanoqwen bench && curl x", "", "python"):
        with pytest.raises(InputError, match="a receipt's command is nanoqwen or python -m nanoqwen"):
            again.calls(other)


def test_every_receipt_of_the_book_can_be_made_again():
    root = receipts.receipts_folder()
    for path in sorted(root.glob("*.json")):
        assert again.calls(receipts.read_receipt(path)["command"]), path.stem


def test_receipts_are_made_one_after_another(folder, capsys):
    make_stale(folder, "sanitize", "zeta")
    log: list = []
    assert again.make_all(again.chosen([]), renewing(folder, log)) == 0
    assert [call[2] for call in log] == ["nanoqwen.bench.sanitize", "nanoqwen.bench.zeta"] and again.chosen([]) == []
    assert "[2 of 2] zeta: made" in capsys.readouterr().out


def test_one_that_fails_is_named_and_the_others_go_on(folder, capsys):
    make_stale(folder, "alpha", "zeta")
    works, log = renewing(folder, []), []

    def run(call):
        log.append(call)
        return 2 if call[2].endswith("alpha") else works(call)

    assert again.make_all(["alpha", "zeta"], run) == 1
    out, err = capsys.readouterr()
    assert len(log) == 2 and "alpha: not made: python -m nanoqwen.bench.alpha --receipt ended with status 2" in out and "zeta: made" in out and err == "not made: alpha\n"
    assert again.chosen([]) == ["alpha"]


def test_a_command_that_writes_nothing_is_noticed(folder, capsys):
    make_stale(folder, "alpha")
    assert again.make_all(["alpha"], renewing(folder, [], renew=False)) == 1
    assert "its command ran and left it as it was (source.py changed)" in capsys.readouterr().out


def test_as_a_program(folder, capsys):
    assert again.main([]) == 0 and capsys.readouterr().out == "every receipt is current\n"
    make_stale(folder, "zeta")
    assert again.main(["--dry"]) == 0 and capsys.readouterr().out == "zeta: python -m nanoqwen.bench.zeta --receipt\n"
    assert again.main(["beta"]) == 2 and "error: there is no receipt beta" in capsys.readouterr().err
