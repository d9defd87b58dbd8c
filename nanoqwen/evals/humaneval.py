"""HumanEval from a model to a score: one greedy completion a task, stored as it is made, run only when that is allowed.

pass@1 with one completion is the share of tasks whose completion passes its checks. Beside it stands all that moves it: prompt
form, system text, stops, decoding, limits, and the hash of the model file. Tasks that could not be attempted would make it a
score of something else, so `attempted` must equal `asked` before there is one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoqwen import __version__
from nanoqwen.engines.base import Engine
from nanoqwen.errors import ContextError, NanoqwenError
from nanoqwen.evals import completions, execute
from nanoqwen.evals.problems import Problem, ProblemSet
from nanoqwen.evals.records import CompletionLog
from nanoqwen.generate import generate
from nanoqwen.sampling import GREEDY
from nanoqwen.tokenizer import Tokenizer

FORMS = ("base", "chat")
#: The one message of the chat form; `{prompt}` is a task's prompt, byte for byte.
CHAT_REQUEST = "Complete the following Python function. Reply with the whole function in one Python code block.\n\n```python\n{prompt}```\n"

Progress = Callable[[int, int, str], None]


# ------------------------------------------------------------------------------------------------------ what was asked


def settings(
    *, model: Mapping[str, Any], problems: ProblemSet, form: str, system: str | None, max_tokens: int, engine: Engine, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Every setting that shapes a completion, as JSON. Two files may be mixed only where all of it is equal."""
    stops = [tokenizer.token_text(token) for token in tokenizer.stop_ids if token in tokenizer.markers.values()]
    return {
        "model": dict(model),
        "problems_sha256": problems.sha256,
        "prompt_form": form,
        "system_text": system,
        # The frame shows the system text that the template adds where none is given.
        "prompt_frame": "{prompt}" if form == "base" else tokenizer.render_chat(messages("{prompt}", system)),
        "stop_tokens": stops,
        "stop_ids": list(tokenizer.stop_ids),
        "stop_strings": [],
        "post_processing": completions.BASE_RULE if form == "base" else completions.CHAT_RULE,
        "decoding": {**asdict(GREEDY), "method": "greedy", "batch": 1, "completions_per_task": 1},
        "max_tokens": max_tokens,
        "context_limit": engine.context_limit,
        "engine": engine.name,
        "device": engine.device,
    }


def model_facts(path: Path, sha256: str, group_size: int) -> dict[str, Any]:
    """Which weights: file name, hash of the whole file, quantisation."""
    return {"file": path.name, "sha256": sha256, "quantisation": f"INT4 symmetric, group {group_size}, FP16 scales; embedding, norms, biases and head FP16"}


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, read in pieces of 16 MiB."""
    digest, done, total = hashlib.sha256(), 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
            done += len(piece)
            if progress:
                progress(done, total, path.name)
    return digest.hexdigest()


def facts() -> dict[str, Any]:
    """When and with what: noted, but no reason to refuse to go on with a file."""
    import numpy
    import torch

    versions = {"nanoqwen": __version__, "python": platform.python_version(), "numpy": numpy.__version__, "torch": torch.__version__}
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "versions": versions, "platform": f"{platform.system()} {platform.machine()}"}


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The conversation of the chat form."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": CHAT_REQUEST.replace("{prompt}", prompt)}]


def prompt_ids(problem: Problem, form: str, system: str | None, tokenizer: Tokenizer) -> list[int]:
    """The ids of a task's request. In the base form they spell the prompt exactly, its last newline included."""
    if form == "base":
        return tokenizer.encode(problem.prompt)
    return tokenizer.encode_chat(messages(problem.prompt, system))


# -------------------------------------------------------------------------------------------------------- completions


def complete(problem: Problem, form: str, system: str | None, max_tokens: int, engine: Engine, tokenizer: Tokenizer) -> dict[str, Any]:
    """One task's record: `raw` is what the model wrote, `completion` what is scored. Greedy, from an empty cache.

    In the base form the reply ends where `completions.find_end` is certain of its end, which spares the rest of the tokens
    and changes nothing: the cut lies before. A prompt beyond the context is a record with an empty completion.
    """
    record: dict[str, Any] = {"task_id": problem.task_id}
    try:
        generation = generate(engine, tokenizer, prompt_ids(problem, form, system, tokenizer), max_tokens=max_tokens, params=GREEDY)
    except ContextError as error:
        return {**record, "completion": "", "raw": "", "finish_reason": "prompt too long", "note": str(error), "tokens": 0}
    raw, ended = "", False
    for piece in generation:
        raw += piece.text
        if form == "base" and "\n" in piece.text and completions.find_end(problem.prompt, problem.entry_point, raw) is not None:
            generation.close()
            ended = True
            break
    result = generation.result
    if form == "base":
        completion = completions.cut(problem.prompt, problem.entry_point, raw)
    else:
        completion = completions.completion_of_reply(problem.entry_point, raw)
    reason = "end of the function" if ended else result.finish_reason
    return {**record, "completion": completion, "raw": raw, "finish_reason": reason, "tokens": len(result.ids), "prompt_tokens": len(result.prompt_ids)}


def complete_all(
    problems: Sequence[Problem], log: CompletionLog, engine: Engine, tokenizer: Tokenizer, progress: Progress | None = None
) -> None:
    """Complete what the log lacks, in order, one at a time. What was finished stays when this is broken off."""
    asked = log.header["settings"]
    done = sum(problem.task_id in log.done for problem in problems)
    for problem in problems:
        if problem.task_id in log.done:
            continue
        if progress:
            progress(done, len(problems), problem.task_id)
        log.append(complete(problem, asked["prompt_form"], asked["system_text"], asked["max_tokens"], engine, tokenizer))
        done += 1
    if progress:
        progress(done, len(problems), "done")


# -------------------------------------------------------------------------------------------------------------- score


def score(
    problems: Sequence[Problem], log: CompletionLog, limits: execute.Limits, known_good: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Run the completions and make the score file's content. Call `execute.check_known_good` first; `known_good` is its answer."""
    missing = [problem.task_id for problem in problems if problem.task_id not in log.done]
    if missing:
        raise NanoqwenError(f"{log.path}: {len(missing)} of {len(problems)} tasks have no completion ({missing[0]} is the first), so there is no score yet")
    outcomes = verdicts(problems, {task: record["completion"] for task, record in log.done.items()}, limits, progress)
    tasks = []
    for problem in problems:
        record, outcome = log.done[problem.task_id], outcomes[problem.task_id]
        tasks.append({
            "task_id": problem.task_id,
            "passed": outcome.passed,
            "result": outcome.result,
            "seconds": round(outcome.seconds, 3),
            "finish_reason": record["finish_reason"],
            "tokens": record["tokens"],
            "completion": record["completion"],
        })
    passed = sum(task["passed"] for task in tasks)
    return {
        "kind": "nanoqwen-humaneval-score",
        "pass@1": passed / len(tasks),
        "passed": passed,
        "attempted": len(tasks),
        "asked": len(problems),
        "tasks_of_data_set": "all" if len(problems) == known_good else f"the first {len(problems)}",
        "known_good": {"passed": known_good, "of": known_good},
        **log.header["settings"],
        "limits": asdict(limits),
        **facts(),
        "completions": {"file": log.path.name, "begun": log.header.get("date"), "versions": log.header.get("versions")},
        "tasks": tasks,
    }


def verdicts(
    problems: Sequence[Problem], completed: Mapping[str, str], limits: execute.Limits, progress: Progress | None = None
) -> dict[str, execute.Outcome]:
    """Run the completions of the given problems, those that there are. {task_id: Outcome}."""
    programs = [(problem.task_id, problem.program(completed[problem.task_id])) for problem in problems if problem.task_id in completed]
    return execute.run_all(programs, limits, progress)


def write_score(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON beside `path` and rename it: the name never holds half a score."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogatepass")
    os.replace(temporary, path)
