"""The processes that run completions: good code passes, hostile code fails, and nothing of it is left.

What is tested here as root also holds for other users, by other means (`supervise.become`, `supervise.stay_inside`); the tests
with `as_caller` take the first of the two away.
"""

import contextlib
import dataclasses
import glob
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch  # noqa: F401  a big process: what it inherits or holds must not reach the programs

from nanoqwen.errors import InputError, NanoqwenError
from nanoqwen.evals import execute, supervise
from nanoqwen.evals.execute import Limits, Outcome, run_program
from nanoqwen.evals.problems import load_problems

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc to see what is left alive")

QUICK = Limits(timeout=1.5, processes=12)
SMALL = Limits(timeout=20, processes=12, memory=500 << 20)
#: Every test program that starts others ends by itself after this time, should all that is tested here fail.
FUSE = "import os, time, signal\nEND = time.time() + 4\n"


def marked() -> list[str]:
    """Processes that carry the mark of a run; those of a program inherit it."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and f"{execute.MARK}=".encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(name)
    return found


@pytest.fixture(autouse=True)
def machine_as_before(alone):
    """No process, no folder: the machine is as it was."""
    folders = set(glob.glob(os.path.join(tempfile.gettempdir(), "nanoqwen-eval-*")))
    yield
    assert marked() == []
    assert set(glob.glob(os.path.join(tempfile.gettempdir(), "nanoqwen-eval-*"))) <= folders


@pytest.fixture
def watchdog():
    """Ends every marked process after some seconds, whatever the code under test does."""

    def bite():
        for _ in range(50):
            for pid in marked():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)

    timer = threading.Timer(8, bite)
    timer.start()
    yield
    timer.cancel()


@pytest.fixture
def as_caller(monkeypatch):
    """Programs run as the user that calls, as they do for everyone but root."""
    monkeypatch.setattr(execute, "free_uid", lambda folder: None)


# ------------------------------------------------------------------------------------------------------- good code


def test_known_good_solutions_pass_in_a_big_process_within_three_minutes():
    ballast = mmap.mmap(-1, 4 << 30)  # more address space than a program may have: a fork of this process could not allocate
    started = time.monotonic()
    assert execute.check_known_good(load_problems().problems) == 164
    assert time.monotonic() - started < 180
    ballast.close()


def test_what_a_program_finds():
    program = (
        "import os, sys, subprocess, decimal\n"
        f"assert set(os.environ) <= {{'{execute.MARK}', 'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE'}}, sorted(os.environ)\n"
        "assert os.listdir('.') == [] and os.path.samefile('.', os.environ['TMPDIR'])\n"
        "assert sys.stdin.read() == '' and __name__ != '__main__'\n"
        "open('a', 'w', encoding='utf-8').write('x'); os.mkdir('b'); os.rename('a', 'b/a')\n"
        "subprocess.run([sys.executable, '-I', '-c', 'import decimal'], check=True)\n"
    )
    outcome = run_program(program)
    assert outcome.passed, outcome


def test_permissions_that_the_program_took_do_not_keep_its_folder():
    assert run_program("import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\n").passed


# ------------------------------------------------------------------------------------------------------ hostile code

HOSTILE = {
    "endless loop": ("while True: pass", "timed out"),
    "sleeps": ("import time\ntime.sleep(999)", "timed out"),
    "10 GB": ("x = bytearray(10 << 30)", "MemoryError"),
    "a limit's worth of memory in each of four": (FUSE + "for _ in range(2): os.fork()\nx = b'x' * (200 << 20)\ntime.sleep(3)", "too much memory"),
    "deletes its folder": ("import os, shutil\nshutil.rmtree(os.getcwd())", ""),
    "writes to stdout for ever": ("while True: print('x' * 1000)", "too much output"),
    "writes to stderr for ever": ("import os\nwhile True: os.write(2, b'x' * 5000)", "too much output"),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(0.3)", ""),
    "stops early": ("import os\nos._exit(0)", "ended before its checks were done (exit status 0)"),
    "leaves early": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "lets a copy answer": ("import os\nif os.fork(): os._exit(0)", "ended before its checks were done"),
    "writes a large file": ("open('x', 'wb').write(b'x' * (64 << 20))", "File too large"),
    "looks for the token": (
        "import gc, sys\nframe, seen = sys._getframe(), []\nwhile frame: seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "import re\nassert re.search(r\"'[0-9a-f]{32}'\", ''.join(seen).replace(__import__('os').environ['%s'], '')), 'no token'" % execute.MARK,
        "no token",
    ),
    "ends by a real-time signal": ("import os\nos.kill(os.getpid(), 40)\nimport time\ntime.sleep(1)", "signal 40"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "signal SIGSEGV"),
    "closes everything": ("import os\nos.closerange(0, 100)", "ended before"),
    "an exception that cannot be printed": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "cannot be printed"),
    "not Python": ("def f(:\n", "SyntaxError"),
    "an assertion": ("assert 1 == 2", "AssertionError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_fails(name, watchdog):
    program, words = HOSTILE[name]
    started = time.monotonic()
    outcome = run_program(program + "\n", SMALL if words == "too much memory" else QUICK)
    assert not outcome.passed and words in outcome.result, outcome
    if words == "timed out":
        assert time.monotonic() - started < QUICK.timeout + 1


@pytest.mark.parametrize("name", ["10 GB", "a limit's worth of memory in each of four", "deletes its folder", "kills its parent"])
def test_hostile_code_fails_as_the_calling_user_too(name, watchdog, as_caller):
    program, words = HOSTILE[name]
    outcome = run_program(program + "\n", SMALL if words == "too much memory" else QUICK)
    assert not outcome.passed and words in outcome.result, outcome


BOMB = FUSE + (
    "while time.time() < END:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass\n    time.sleep(0.002)\nos._exit(0)\n"
)


def test_a_fork_bomb_ends(watchdog):
    outcome = run_program(BOMB, QUICK)
    assert not outcome.passed and outcome.seconds < QUICK.timeout + 2, outcome


def _may_hurry() -> bool:
    """Not root, so the kernel's limit holds; or root with CAP_SYS_NICE (bit 23), so the supervisor is scheduled before the forks."""
    if not os.path.exists("/proc/self/status"):
        return True  # every test here is skipped there
    rights = next(line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("CapEff"))
    return os.geteuid() != 0 or bool(int(rights.split()[1], 16) >> 23 & 1)


@pytest.mark.skipif(not _may_hurry(), reason="root without CAP_SYS_NICE, whom no limit binds")
def test_a_fork_bomb_ends_where_the_kernel_sets_no_limit(watchdog, as_caller):
    outcome = run_program(BOMB, QUICK)  # the limit does not bind root: here the supervisor counts
    assert not outcome.passed and outcome.seconds < QUICK.timeout + 2, outcome


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give programs a user of their own")
def test_the_kernel_limits_processes_of_root_too(watchdog):
    program = FUSE + (
        "assert os.getuid() >= %d\nchildren = 0\ntry:\n    while children < 40:\n"
        "        if os.fork() == 0: time.sleep(0.5); os._exit(0)\n        children += 1\nexcept BlockingIOError: pass\nassert children < 12, children\n"
    ) % execute.FIRST_FREE_UID
    outcome = run_program(program, QUICK)
    assert outcome.passed, outcome


@pytest.mark.parametrize("how", ["as it is", "as the caller"])
def test_what_outlives_a_program_is_ended(how, request, watchdog):
    if how == "as the caller":
        request.getfixturevalue("as_caller")
    program = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(20)'], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(20)\n    os._exit(0)\n"
        "time.sleep(0.2)\n"
    )
    assert run_program(program, Limits(timeout=5)).passed  # it did its work; `machine_as_before` sees that nothing goes on


def test_a_program_without_a_supervisor_is_ended(watchdog, as_caller, tmp_path, monkeypatch):
    script = tmp_path / "supervise.py"  # one that does nothing against signals, as on a kernel without Landlock
    script.write_text(Path(supervise.__file__).read_text(encoding="utf-8").replace("stay_inside(job", "str(job"), encoding="utf-8")
    monkeypatch.setattr(execute, "SUPERVISOR", script)
    monkeypatch.setattr(execute, "ANSWER_WITHIN_S", 1)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        program = FUSE + f"if os.fork() == 0: time.sleep(4)\nos.kill(os.getppid(), {int(number)})\ntime.sleep(4)\n"
        outcome = run_program(program, Limits(timeout=1))
        assert not outcome.passed and "did not answer" in outcome.result


def test_programs_end_with_their_caller(watchdog):
    code = "from nanoqwen.evals.execute import *\nrun_program('import time, sys\\nprint(1)\\ntime.sleep(4)\\n')"
    root = str(Path(__file__).resolve().parents[2])
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root})
    deadline = time.monotonic() + 10
    while not (started := [pid for pid in supervise.children_of(caller.pid) if supervise.children_of(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started
    caller.kill()
    caller.wait()
    supervisor = started[0]
    while supervise.state_of(supervisor) not in "ZX" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), "nanoqwen-eval-*")):  # the caller had no time to
        os.rmdir(folder)


@pytest.mark.skipif(supervise.landlock_version() < 6, reason="this kernel's Landlock does not restrict signals")
@pytest.mark.parametrize("act", [
    "open(%(victim)r, 'w', encoding='utf-8')", "os.remove(%(victim)r)", "os.kill(os.getppid(), 19)", "socket.create_connection(('127.0.0.1', 9))",
])  # fmt: skip
def test_the_kernel_refuses_what_reaches_outside(act, tmp_path, as_caller):
    victim = tmp_path / "victim"
    victim.write_text("here", encoding="utf-8")
    outcome = run_program(f"import os, socket\n{act % {'victim': str(victim)}}\n")
    assert not outcome.passed and "PermissionError" in outcome.result, outcome
    assert victim.read_text(encoding="utf-8") == "here"


# ------------------------------------------------------------------------------------------------ the runner's own faults


def test_no_timer_of_the_platform_is_used(monkeypatch):
    for name in ("setitimer", "SIGALRM"):
        monkeypatch.delattr(signal, name)
    for source in (execute.__file__, supervise.__file__):
        text = Path(source).read_text(encoding="utf-8")
        assert "setitimer(" not in text and "SIGALRM" not in text
    assert run_program("while True: pass\n", Limits(timeout=0.5)).result == "timed out"


def test_a_machine_that_fails_good_code_gets_no_score():
    slow = [dataclasses.replace(p, canonical_solution="    while True: pass\n") if n == 1 else p for n, p in enumerate(load_problems().problems[:3])]
    with pytest.raises(NanoqwenError, match=r"known-good solutions pass [012] of 3, so .* first to fail is HumanEval/[012]: timed out .* --timeout"):
        execute.check_known_good(slow, Limits(timeout=0.2))


def test_a_platform_without_fork_is_refused(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(InputError, match="no fork"):
        run_program("pass\n")


def test_what_a_platform_lacks_is_said(monkeypatch):
    monkeypatch.setattr(supervise, "landlock_version", lambda: 0)
    assert any("Landlock" in line for line in execute.platform_notes())
    monkeypatch.setattr(execute.os.path, "exists", lambda path: False)
    assert any("/proc" in line for line in execute.platform_notes())


def test_many_programs_keep_their_order_and_report():
    seen = []
    programs = [("slow", "import time\ntime.sleep(0.3)\n"), ("bad", "assert 0\n"), ("good", "pass\n")]
    outcomes = execute.run_all(programs, progress=lambda done, total, name: seen.append((done, total)))
    assert list(outcomes) == ["slow", "bad", "good"]
    assert [outcome.passed for outcome in outcomes.values()] == [True, False, True]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert isinstance(outcomes["bad"], Outcome)
