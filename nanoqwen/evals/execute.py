"""Run programs that a model wrote: each in processes of its own, under limits, a few at a time. Nothing runs unless asked.

The limits are for time, memory, processes, file size and output; the working folder is temporary and removed; the environment
is empty; whatever the program started is ended. That contains accidents: endless loops, runaway forks, allocations. It is not
a protection against code that means harm: such code still reads what this user reads, and not every way to the network is
closed. Run it on a machine that has nothing to lose.

As root, the program runs under a user id that nothing else on the machine has: the kernel's process limit does not bind root,
and another user can neither signal the caller nor change its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoqwen.errors import InputError, NanoqwenError
from nanoqwen.evals.problems import Problem
from nanoqwen.machine import usable_cores

SUPERVISOR = Path(__file__).with_name("supervise.py")
#: Seconds beyond the time limit after which a supervisor that does not answer is given up: it may have been stopped or killed.
ANSWER_WITHIN_S = 15
#: User ids above this one belong to nobody; each program gets one that no other running program has.
FIRST_FREE_UID = 1_900_000_000
MARK = "NANOQWEN_EVAL_RUN"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Limits:
    """What a program may use; defaults are many times what a sound solution needs. Bytes, seconds, counts."""

    timeout: float = 10.0  #: on the wall, measured from outside
    memory: int = 2 << 30  #: address space of each process, and resident bytes of all together
    processes: int = 16
    file: int = 16 << 20  #: the largest file it may write
    output: int = 1 << 20  #: to stdout and stderr together


@dataclass(frozen=True)
class Outcome:
    """What became of a program. `result` is "passed", "timed out", "failed: ValueError: ..." and the like."""

    passed: bool
    result: str
    seconds: float
    output: str


def run_program(program: str, limits: Limits = Limits()) -> Outcome:
    """Run one source text to its end. Never raises for what the program does; raises InputError where this platform cannot.

    When it returns, the working folder is gone and no process of the program is alive.
    """
    if problem := why_not_here():
        raise InputError(problem)
    mark = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="nanoqwen-eval-")
    try:
        uid = free_uid(folder)
        environment = {MARK: mark, "PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        reads_all = not all(map(reachable_by_all, (os.__file__, sys.executable, sys.prefix, folder)))
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        job = {"program": program, "folder": folder, "environment": environment, "uid": uid, "reads_all": reads_all, "nice": nice, **asdict(limits)}
        return _supervised(job, limits, mark)
    finally:
        remove(folder)


def _supervised(job: dict, limits: Limits, mark: str) -> Outcome:
    # -I: no PYTHON* variables, no user site, no script folder on the path; -B: no .pyc beside what is imported.
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(SUPERVISOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={}, cwd="/", start_new_session=True, text=True, encoding="utf-8",
    )  # fmt: skip
    try:
        said, complaint = process.communicate(json.dumps(job), timeout=limits.timeout + ANSWER_WITHIN_S)
        return Outcome(**json.loads(said))
    except (subprocess.TimeoutExpired, ValueError, TypeError):
        process.kill()
        _, complaint = process.communicate()
        # As this user, a program can kill or stop its supervisor. It gains nothing: no answer, no pass.
        lines = complaint.strip().splitlines()
        return Outcome(False, f"its supervisor did not answer ({lines[-1] if lines else f'ended with {process.returncode}'})"[:500], limits.timeout, "")
    finally:
        if process.poll() is None:  # an exception came up here (Ctrl-C): the supervisor ends what it started, and then itself
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=ANSWER_WITHIN_S)
        if process.returncode != 0:
            end_marked(mark, job["uid"])


def why_not_here() -> str | None:
    """Why programs cannot be run under limits on this platform, or None."""
    if not hasattr(os, "fork"):
        return "this platform has no fork and no resource limits, so completions are not run here; score them on Linux, or in WSL"
    return None


def platform_notes() -> list[str]:
    """What the limits lack on this platform, one line each; empty on a recent Linux."""
    from nanoqwen.evals.supervise import landlock_version

    notes = []
    if not os.path.exists("/proc/self/stat"):
        notes.append("no /proc here: the limits on processes and total memory are not watched, and a process that leaves its session can outlive its test")
    if landlock_version() < 6:
        notes.append("no Landlock of version 6 here (Linux 6.12 or newer has it): a program can signal your processes or write outside its folder")
    return notes


def free_uid(folder: str) -> int | None:
    """As root: an unused user id, made the owner of `folder`. None for another user, and where root cannot give it away."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not sys.platform.startswith("linux"):
        return None
    uid = FIRST_FREE_UID + secrets.randbelow(200_000_000)
    try:
        os.chown(folder, uid, uid)
    except OSError:  # root of a container that does not have this id
        return None
    return uid


def reachable_by_all(path: str) -> bool:
    """Whether any user may enter the folders above `path`."""
    return all(folder.stat().st_mode & 0o001 for folder in Path(path).resolve().parents)


def end_marked(mark: str, uid: int | None) -> None:
    """End what a supervisor that did not finish has left: all processes with this run's mark in their environment, or its user id."""
    word = f"{MARK}={mark}".encode()
    for _ in range(100):
        found = []
        for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else ():
            with contextlib.suppress(OSError):
                if name.isdecimal() and (_environment_of(name, word) or (uid is not None and os.stat(f"/proc/{name}").st_uid == uid)):
                    found.append(int(name))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        if not found:
            return


def _environment_of(name: str, word: bytes) -> bool:
    with open(f"/proc/{name}/environ", "rb") as file:
        return word in file.read().split(b"\0")


def remove(folder: str) -> None:
    """Delete a working folder, also where the program has taken the permissions of what it made there."""
    for path, names, _ in os.walk(folder):  # from the top down: a folder is opened up before it is entered
        for name in names:
            with contextlib.suppress(OSError):
                if not os.path.islink(inner := os.path.join(path, name)):
                    os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ many of them


def run_all(programs: Sequence[tuple[str, str]], limits: Limits = Limits(), progress: Progress | None = None) -> dict[str, Outcome]:
    """Run (name, program) pairs, as many at a time as there are cores (at most 8). {name: Outcome}, in the given order."""
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(max_workers=worker_count()) as pool:
        waiting = {pool.submit(run_program, program, limits): name for name, program in programs}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    name = waiting.pop(future)
                    outcomes[name] = future.result()
                    if progress:
                        progress(len(outcomes), len(programs), name)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    return {name: outcomes[name] for name, _ in programs}


def worker_count() -> int:
    return min(usable_cores(), 8)


def check_known_good(problems: Iterable[Problem], limits: Limits = Limits(), progress: Progress | None = None) -> int:
    """Run the data set's own solutions as if a model had written them; their number.

    Raises NanoqwenError unless every one passes: then the limits or the machine fail good code, and a score would be wrong.
    """
    problems = list(problems)
    outcomes = run_all([(problem.task_id, problem.program(problem.canonical_solution)) for problem in problems], limits, progress)
    failed = {name: outcome for name, outcome in outcomes.items() if not outcome.passed}
    if failed:
        name, outcome = next(iter(failed.items()))
        raise NanoqwenError(
            f"known-good solutions pass {len(problems) - len(failed)} of {len(problems)}, so a score from this machine would be wrong and none is "
            f"made; the first to fail is {name}: {outcome.result} after {outcome.seconds:.1f} s (a busy or slow machine needs a longer --timeout)"
        )
    return len(problems)
