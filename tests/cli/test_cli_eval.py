"""`nanoqwen eval humaneval`: completions without a flag, a score with it, a killed run that goes on, two runs compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from clikit import subprocess_env

from nanoqwen.cli import eval_humaneval, evaluate
from nanoqwen.evals import execute, humaneval
from nanoqwen.evals.problems import load_problems
from nanoqwen.packfile import open_pack
from nanoqwen.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("alone")

ALLOW = "--allow-code-execution"
PROBLEMS = load_problems().problems


def short(folder, *more, prompts=3, tokens=6):
    return ["-o", folder, "--prompts", prompts, "--max-tokens", tokens, "--device", "cpu", *more]


def tasks(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text(encoding="utf-8").split("\n") if line][1:]


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(execute, "run_program", lambda *_: pytest.fail("code was run without the flag"))


# ------------------------------------------------------------------------------------------------ without the flag


def test_nothing_is_run_unasked(run, plain, tmp_path, nothing_runs):
    outcome = run("eval", "humaneval", plain, *short(tmp_path))
    assert outcome.status == 0, outcome.err
    assert outcome.out == f"3 of 3 tasks completed: {tmp_path / 'completions.jsonl'}\n"
    assert ALLOW in outcome.err and "runs the model's code on this machine" in outcome.err
    assert sorted(os.listdir(tmp_path)) == ["completions.jsonl"]
    assert [task["task_id"] for task in tasks(tmp_path)] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]


def test_no_claim_of_protection_anywhere(run):
    text = run("eval", "humaneval", "--help").out + "".join(
        open(module.__file__, encoding="utf-8").read() for module in (eval_humaneval, evaluate, execute, humaneval)
    )
    assert not re.search(r"\b(secure|sandbox\w*|safe|safely)\b", text, re.IGNORECASE)


def test_the_same_completions_as_generate(run, plain, tmp_path, nothing_runs):
    assert run("eval", "humaneval", plain, *short(tmp_path)).status == 0
    prompt = tmp_path / "prompt.txt"
    for problem, task in zip(PROBLEMS, tasks(tmp_path)):
        prompt.write_bytes(problem.prompt.encode("utf-8"))
        answer = json.loads(run("generate", plain, "--prompt-file", prompt, "--max-tokens", 6, "--device", "cpu", "--json").out)
        assert answer["text"].startswith(task["raw"])


def test_prompt_ids_spell_the_data_set(plain):
    with open_pack(plain) as pack:
        tokenizer = Tokenizer.from_pack(pack)
    for problem in PROBLEMS:
        assert tokenizer.decode(humaneval.prompt_ids(problem, "base", None, tokenizer)) == problem.prompt
    asked = tokenizer.decode(humaneval.prompt_ids(PROBLEMS[0], "chat", "Be brief.", tokenizer))
    assert asked.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and f"```python\n{PROBLEMS[0].prompt}```\n<|im_end|>" in asked


# --------------------------------------------------------------------------------------------------- with the flag


def test_a_score_and_all_that_moves_it(run, plain, tmp_path):
    outcome = run("eval", "humaneval", plain, *short(tmp_path, ALLOW, "--timeout", 20))
    assert outcome.status == 0, outcome.err
    assert "known-good solutions: 164 of 164 pass" in outcome.err
    score = json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))
    passed = sum(task["passed"] for task in score["tasks"])
    assert outcome.out == f"pass@1 {100 * passed / 3:.1f}% ({passed} of 3 tasks, the first 3): {tmp_path / 'score.json'}\n"
    assert score["asked"] == score["attempted"] == len(score["tasks"]) == 3 and score["known_good"] == {"passed": 164, "of": 164}
    assert score["model"]["sha256"] == humaneval.file_sha256(plain) and score["model"]["file"] == "plain.nanoqwen"
    assert "INT4" in score["model"]["quantisation"] and "group 128" in score["model"]["quantisation"]
    assert score["prompt_form"] == "base" and score["prompt_frame"] == "{prompt}" and score["system_text"] is None
    assert score["stop_ids"] == [260, 258] and score["stop_tokens"] == ["<|im_end|>", "<|endoftext|>"] and score["stop_strings"] == []
    assert "top-level statement" in score["post_processing"]
    assert score["decoding"]["method"] == "greedy" and score["decoding"]["temperature"] == 0 and score["decoding"]["repetition_penalty"] == 1
    assert score["max_tokens"] == 6 and score["limits"]["timeout"] == 20 and score["engine"] == "cpu" and "CPU" in score["device"]
    assert set(score["versions"]) >= {"nanoqwen", "python", "torch"} and score["date"] and score["problems_sha256"]


def test_perfect_completions_score_one(run, plain, tmp_path, monkeypatch):
    def perfect(problem, *_):
        return {"task_id": problem.task_id, "completion": problem.canonical_solution, "raw": "", "finish_reason": "stop", "tokens": 1}

    monkeypatch.setattr(humaneval, "complete", perfect)
    samples = tmp_path / "other.jsonl"
    samples.write_text("".join(
        json.dumps({"task_id": p.task_id, "completion": p.canonical_solution if n else "    return None\n"}) + "\n" for n, p in enumerate(PROBLEMS[:4])
    ), encoding="utf-8")  # fmt: skip
    outcome = run("eval", "humaneval", plain, *short(tmp_path / "o", ALLOW, "--compare", samples, "--json", prompts=4))
    answer = json.loads(outcome.out)
    assert answer["score"]["pass@1"] == 1.0 and answer["score"]["attempted"] == 4
    comparison = answer["comparison"]
    assert (comparison["same_text"], comparison["texts_compared"]) == (3, 4)
    assert (comparison["same_verdict"], comparison["verdicts_compared"]) == (3, 4)
    assert comparison["only_here_passed"] == ["HumanEval/0"] and comparison["only_there_passed"] == []
    assert json.loads((tmp_path / "o" / "comparison.json").read_text(encoding="utf-8")) == comparison

    text = run("eval", "humaneval", plain, *short(tmp_path / "o", "--compare", tmp_path / "o" / "score.json", prompts=4)).out
    assert "same completion: 4 of 4" in text and "same verdict" not in text


def test_known_good_failing_stops_before_anything(run, plain, tmp_path):
    line = run("eval", "humaneval", plain, *short(tmp_path, ALLOW, "--timeout", 0.001)).error_line()
    assert re.match(r"known-good solutions pass \d+ of 164, so a score from this machine would be wrong and none is made; .*--timeout", line)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------- going on


def test_a_run_that_was_broken_off_goes_on(run, plain, tmp_path, monkeypatch, nothing_runs):
    assert run("eval", "humaneval", plain, *short(tmp_path / "whole", prompts=4)).status == 0
    complete, seen = humaneval.complete, []

    def two_then_ctrl_c(problem, *rest):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(problem.task_id)
        return complete(problem, *rest)

    monkeypatch.setattr(humaneval, "complete", two_then_ctrl_c)
    assert run("eval", "humaneval", plain, *short(tmp_path / "o", prompts=4)).status == 130
    file = tmp_path / "o" / "completions.jsonl"
    assert len(tasks(tmp_path / "o")) == 2
    file.write_bytes(file.read_bytes()[:-20])  # and the second line only half on the disk
    monkeypatch.setattr(humaneval, "complete", complete)
    outcome = run("eval", "humaneval", plain, *short(tmp_path / "o", prompts=4))
    assert outcome.status == 0 and "goes on after 1 completed tasks" in outcome.err
    assert tasks(tmp_path / "o") == tasks(tmp_path / "whole")


def test_a_killed_run_goes_on(endless, tmp_path, run, nothing_runs):
    argv = [str(word) for word in ("eval", "humaneval", endless, *short(tmp_path, prompts=6, tokens=60))]
    child = subprocess.Popen([sys.executable, "-m", "nanoqwen", *argv], env=subprocess_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file, deadline = tmp_path / "completions.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = file.read_bytes()
    assert there.count(b"\n") >= 3
    assert run(*argv).status == 0
    assert file.read_bytes().startswith(there[: there.rfind(b"\n") + 1])
    assert [task["task_id"] for task in tasks(tmp_path)] == [f"HumanEval/{n}" for n in range(6)]


@pytest.mark.parametrize("change, key", [
    (["--max-tokens", 7], "max_tokens 6"), (["--prompt-form", "chat"], 'prompt_form "base"'), (["--context", 4096], "context_limit 8192"),
])  # fmt: skip
def test_other_settings_do_not_mix(run, plain, tmp_path, nothing_runs, change, key):
    assert run("eval", "humaneval", plain, *short(tmp_path, prompts=1)).status == 0
    line = run("eval", "humaneval", plain, *short(tmp_path, prompts=1), *change).error_line()
    assert f"begun with {key}, this run has" in line and "another -o folder" in line


def test_another_model_does_not_mix(run, plain, letters, tmp_path, nothing_runs):
    assert run("eval", "humaneval", plain, *short(tmp_path, prompts=1)).status == 0
    assert "begun with model" in run("eval", "humaneval", letters, *short(tmp_path, prompts=1)).error_line()


def test_a_prompt_beyond_the_context_counts_as_attempted(run, plain, tmp_path, nothing_runs):
    assert run("eval", "humaneval", plain, *short(tmp_path, "--context", 360)).status == 0
    reasons = {task["task_id"]: task["finish_reason"] for task in tasks(tmp_path)}
    assert len(reasons) == 3 and "prompt too long" in reasons.values()


# -------------------------------------------------------------------------------------------------- the shipped model


@pytest.mark.parametrize("form", ["base", "chat"])
def test_the_shipped_checkpoint_end_to_end(run, tmp_path, form):
    outcome = run("eval", "humaneval", *short(tmp_path, ALLOW, "--prompt-form", form, "--timeout", 30, prompts=2, tokens=48))
    assert outcome.status == 0, outcome.err
    score = json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))
    assert score["attempted"] == 2 and score["prompt_form"] == form
    assert all(task["tokens"] > 0 and task["result"] for task in score["tasks"])
    if form == "chat":
        assert "You are nanoqwen" in score["prompt_frame"] and "{prompt}" in score["prompt_frame"]


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("argv, words", [
    (["eval"], "no measure given; the measures are humaneval"),
    (["eval", "mmlu"], "choose from 'humaneval'"),
    (["eval", "humaneval"], "required: -o/--output"),
    (["eval", "humaneval", "-o", "x", "--allow"], "unknown option '--allow'; nanoqwen eval humaneval takes"),
    (["eval", "humaneval", "a", "b", "-o", "x"], "unexpected argument 'b'"),
    (["eval", "humaneval", "-o", "x", "--prompts", "165"], "from 1 to 164"),
    (["eval", "humaneval", "-o", "x", "--timeout", "0"], "must be in (0, 3600]"),
    (["eval", "humaneval", "-o", "x", "--system", "s"], "--prompt-form chat"),
    (["eval", "humaneval", "synthetic:7b", "-o", "x"], "random weights"),
    (["eval", "humaneval", "-o", "x", "--compare", "absent.jsonl"], "absent.jsonl: No such file"),
])  # fmt: skip
def test_wrong_arguments(run, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in run(*argv).error_line()
    assert os.listdir(tmp_path) == []


def test_help_names_the_defaults_in_force(run):
    text = " ".join(run("eval", "humaneval", "--help").out.split())
    assert f"seconds for one program (default: {execute.Limits().timeout:g})" in text
    assert f"(default: {eval_humaneval.DEFAULT_MAX_TOKENS})" in text
