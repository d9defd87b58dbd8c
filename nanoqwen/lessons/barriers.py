"""Chapter 05's experiments: a small paged attention with its barriers in right and wrong places, run on the card, each bounded.

Some of these kernels never end by themselves. So they run in a child process (``nanoqwen.lessons.barriers_child``), strictly one after the
other: a kernel that hangs may keep every other process from the card. One that does not finish is ended by its own watchdog, which costs
the child its CUDA context; the child then reports and is ended, and the rest goes on in a new one. Should that fail as well, the child is
killed after ``timeout`` seconds. This process never touches the card.

``run([Trial("branch_join", 49)])`` returns plain data; ``sanitize("synccheck", Trial("branch_join", 49))`` asks compute-sanitizer.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import DeviceError, InputError

SOURCE = "lessons/barriers.cu"
#: The most pages that a trial may have: their places in shared memory are static.
PAGES = 5
#: Every kernel of the file.
KERNELS = (
    "right", "branch_join", "branch_exit", "branch_named", "branch_lane", "branch_signal", "branch_two", "branch_each", "paired", "uneven",
    "token_branch", "leavers", "fences", "fences_wait",
)  # fmt: skip
#: Those that leave the consumers' shares of the result to the host.
UNJOINED = ("branch_exit", "leavers")
#: Around a partial last page, as in the original story.
LENGTHS = (48, 49, 63, 64, 65)
#: Cycles by which a warp is held back before it supplies what others should wait for: long beside a copy, short beside the watchdog.
DELAY = 20_000
#: Seconds that the driver is given to take down the context of a child that was killed.
RECOVERY = 10.0


# [trial]
@dataclass(frozen=True)
class Trial:
    """One kernel at one length, ``repeats`` times.

    ``supply_delay`` cycles pass before a warp supplies what others must wait for (it asks for a page, or stores its sums), ``use_delay``
    cycles before a consumer uses a page. ``cold``: the pages are pushed out of L2 before each run.
    """

    kernel: str
    length: int
    supply_delay: int = 0
    use_delay: int = 0
    cold: bool = False
    repeats: int = 1


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    ``verdict`` is "right" (every run), "wrong" (some run), "hangs" (the watchdog or the parent ended it), "fails" (``note`` says how) or
    "not run" (after an earlier trial no process could start any more).
    ``wrong_runs`` of ``trial.repeats`` were wrong. ``stale`` counts, a page, the tokens whose row was not there yet when it was read, in the
    worst run; ``stale_total`` those of all runs and pages. ``wrong_dims`` is the number of wrong elements in the worst run, ``error`` the
    largest difference of a finite element from FP64. ``places``: where each warp stood at the end, of a kernel that hung.
    """

    trial: Trial
    verdict: str
    wrong_runs: int = 0
    stale: tuple[int, ...] = ()
    stale_total: int = 0
    wrong_dims: int = 0
    error: float = 0.0
    places: dict[str, str] = field(default_factory=dict)
    note: str = ""
# [/trial]


def constants() -> str:
    """``constants.cuh`` for the lesson: page and head of the 7B, one KV head."""
    spec = load_settings().kv
    values = {
        "kNumKvHeads": 1, "kHeadDim": Dims.qwen2_5_coder_7b().head_dim, "kPageTokens": spec.page_tokens,
        "kPageAlignBytes": spec.page_align_bytes, "kPages": PAGES,
    }  # fmt: skip
    body = "\n".join(f"constexpr int {name} = {value};" for name, value in values.items())
    return f"#pragma once\n\nnamespace nanoqwen {{\n\n{body}\n\n}}  // namespace nanoqwen\n"


def run(trials: Sequence[Trial], *, timeout: float = 5.0, start: float = 20.0) -> list[Outcome]:
    """Run trials in order; one outcome each, whatever happens to the children.

    A trial may take ``timeout`` seconds, a child ``start`` more until its first one. Raises InputError for a trial that is none, and
    DeviceError when not even the first child can start (no card, no compiler).
    """
    for trial in trials:
        _check(trial)
    outcomes: list[Outcome] = []
    while len(outcomes) < len(trials):
        left = trials[len(outcomes) :]
        try:
            try:
                outcomes += _one_child(left, timeout, start)
            except DeviceError:  # a card that has just lost a context may need a moment
                time.sleep(RECOVERY / 5)
                outcomes += _one_child(left, timeout, start)
        except DeviceError as error:
            if not outcomes:
                raise
            outcomes += [Outcome(trial, "not run", note=str(error)) for trial in left]
    return outcomes


def _check(trial: Trial) -> None:
    limit = PAGES * load_settings().kv.page_tokens
    if trial.kernel not in KERNELS:
        raise InputError(f"no lesson is called {trial.kernel!r}; there are: {', '.join(KERNELS)}")
    if not 1 <= trial.length <= limit or trial.repeats < 1:
        raise InputError(f"a trial has 1 to {limit} tokens and at least one run, not {trial.length} and {trial.repeats}")


def _command(trials: Sequence[Trial], patience: float) -> list[str]:
    request = json.dumps({"trials": [asdict(trial) for trial in trials], "patience": patience})
    return [sys.executable, "-m", "nanoqwen.lessons.barriers_child", request]


# [child]
def _one_child(trials: Sequence[Trial], timeout: float, start: float) -> list[Outcome]:
    """Outcomes of the first trials, at least one: up to and including the one that ended the child."""
    with tempfile.TemporaryFile() as errors:
        child = _spawn(_command(trials, timeout / 10), stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8")
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=lambda: [lines.put(line) for line in itertools.chain(child.stdout, [None])], daemon=True).start()
        outcomes: list[Outcome] = []
        try:
            _ready(lines, start, errors)
            for trial in trials:
                line = lines.get(timeout=timeout)
                if line is None:
                    outcomes.append(Outcome(trial, "fails", note=_last_line(errors)))
                    break
                outcomes.append(_outcome(trial, json.loads(line)))
                if outcomes[-1].verdict in ("hangs", "fails"):  # its context is gone
                    break
        except queue.Empty:
            outcomes.append(Outcome(trials[len(outcomes)], "hangs", note=f"killed after {timeout:g} s"))
        finally:
            _end(child)
    return outcomes


def _spawn(command: Sequence[str], **options) -> subprocess.Popen:
    """A child with a process group of its own, so that it can be ended together with whatever it started."""
    return subprocess.Popen(command, start_new_session=True, **options)


def _end(child: subprocess.Popen) -> bool:
    """Kill a child's group and wait until it is gone; False when some of it is still there after RECOVERY seconds."""
    until = time.monotonic() + RECOVERY
    try:
        while time.monotonic() < until:
            os.killpg(child.pid, signal.SIGKILL)
            child.poll()  # takes the child off the list; one that the driver holds back stays on it
            time.sleep(0.02)
    except (ProcessLookupError, PermissionError):  # nobody left in the group; on macOS: only what was not taken off the list
        child.poll()
    return child.returncode is not None
# [/child]


def _outcome(trial: Trial, said: dict) -> Outcome:
    return Outcome(trial, **{**said, "stale": tuple(said.get("stale", ()))})


def _ready(lines: queue.Queue[str | None], start: float, errors: IO[bytes]) -> None:
    """Wait for the child's first line."""
    try:
        line = lines.get(timeout=start)
    except queue.Empty:
        raise DeviceError(f"the lesson has not started after {start:g} s") from None
    if line is None:
        raise DeviceError(f"the lesson cannot start: {_last_line(errors)}")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


@dataclass(frozen=True)
class Finding:
    """What compute-sanitizer said of one trial: ``summary`` is its last line, ``messages`` {what it reports: how often}.

    ``finished`` is False when it was stopped after its time. ``log`` is everything it wrote.
    """

    tool: str
    trial: Trial
    summary: str
    messages: dict[str, int]
    finished: bool
    log: str = field(repr=False)


def sanitizer() -> str | None:
    """compute-sanitizer of the toolkit, or None."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.is_file() else None)


def sanitize(tool: str, trial: Trial, *, timeout: float = 60.0) -> Finding:
    """Run one trial under ``compute-sanitizer --tool`` synccheck, racecheck, memcheck or initcheck.

    Raises InputError for a trial that is none, DeviceError when there is no compute-sanitizer.
    """
    _check(trial)
    program = sanitizer()
    if program is None:
        raise DeviceError("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--tool", tool, "--log-file", str(log), *_command([trial], timeout / 4)]
        child = _spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            child.wait(timeout)
            finished = True
        except subprocess.TimeoutExpired:
            finished = False
        finally:
            _end(child)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return Finding(tool, trial, *_read_log(text), finished, text)


def _read_log(text: str) -> tuple[str, dict[str, int]]:
    """(summary, messages) of a log. A message's first line names the fault; indented lines below it say where."""
    lines = [line.removeprefix("=========").rstrip() for line in text.splitlines() if line.startswith("=========")]
    messages: dict[str, int] = {}
    summary = ""
    for line in lines:
        if "SUMMARY" in line:
            summary = line.strip()
        elif line.startswith(" ") and not line.startswith("  ") and "COMPUTE-SANITIZER" not in line:
            name = re.sub(r"\s+at .*$|\+0x[0-9a-f]+.*$| \[\d+ hazards?\]", "", line.strip())
            messages[name] = messages.get(name, 0) + 1
    return summary, messages
