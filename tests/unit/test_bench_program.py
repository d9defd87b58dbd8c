"""The frame of a benchmark that is a program of its own."""

import pytest

from nanoqwen.bench.program import run_program
from nanoqwen.errors import InputError


def run(arguments, measure, options=lambda parser: None):
    return run_program("python -m nanoqwen.bench.something", "Something.", arguments, measure, options)


def test_the_receipt_is_written_last_and_its_path_printed(capsys, tmp_path):
    def measure(args):
        print("found", args.times)
        return lambda: tmp_path / "something.json"

    assert run(["--times", "3"], measure, lambda parser: parser.add_argument("--times", type=int)) == 0
    assert capsys.readouterr().out == f"found 3\n{tmp_path / 'something.json'}\n"


def test_dry_measures_and_writes_nothing(capsys):
    def write():
        raise AssertionError("a receipt")

    asked = []
    assert run(["--dry"], lambda args: asked.append(args.dry) or write) == 0 and asked == [True] and capsys.readouterr().out == ""


@pytest.mark.parametrize("status", [0, 1])
def test_without_a_receipt_the_status_is_what_measure_says(capsys, status):
    assert run([], lambda args: status) == status and capsys.readouterr().out == ""


def test_a_refusal_is_one_line_wherever_it_comes_from(capsys):
    def refuse(*args):
        raise InputError("there is no card")

    for measure in (refuse, lambda args: refuse):
        assert run([], measure) == 2
        assert capsys.readouterr().err == "python -m nanoqwen.bench.something: error: there is no card\n"


def test_other_errors_are_bugs_and_stay_visible():
    with pytest.raises(ZeroDivisionError):
        run([], lambda args: 1 // 0)
    with pytest.raises(SystemExit):
        run(["--unheard-of"], lambda args: 0)
