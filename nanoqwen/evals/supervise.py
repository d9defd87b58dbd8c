"""Run one program under limits. A script of its own: `python -I supervise.py`, one job as JSON on stdin, one answer on stdout.

Two processes. The *supervisor* is a fresh small interpreter, so nothing of the caller's memory, limits or environment reaches
the code. It forks the *worker*, which gives up what it can, executes the program, and on success echoes a token:

    caller --job--> supervisor --fork--> worker: own session, limits, empty environment, working folder, no stdin
           <-answer-           <-output, verdict-

Only the token counts as success, and it can be had only after the last check: a program that ends early, whatever its exit
status, has not passed. The supervisor measures time, output, processes and memory from outside, and ends every process that
came of the program, also those that left its session. This keeps accidents small; it does not stop code that was written to
attack. Only the standard library is imported, and no other file of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator

# Numbers of prctl(2), linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 8, 36, 38, 47
PR_CAP_AMBIENT_RAISE = 2
# linux/capability.h: read any file and enter any folder; the version of the structures that capset(2) takes.
CAP_DAC_READ_SEARCH, CAPABILITY_VERSION_3 = 2, 0x20080522
# linux/landlock.h. The system call numbers are the same on every architecture.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_WRITES = 0x1FF2  # write a file, remove and make files and folders of every kind: bits 1 and 4 to 12
LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 13, 1 << 14  # since version 2 and 3
LANDLOCK_TCP, LANDLOCK_SCOPES = 0b11, 0b11  # bind and connect, since version 4; abstract sockets and signals, since version 6
PAGE = os.sysconf("SC_PAGE_SIZE")
LOOK_EVERY_S = 0.02
HAS_PROC = os.path.exists("/proc/self/stat")  # with it, "children" files: every distribution's kernel is built with them


def main() -> None:
    job = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the caller gives up: unwind, and end what was started
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the program become our children instead of init's: none gets lost
    with contextlib.suppress(OSError, AttributeError):
        # Root may. A nice value would not do: each session is scheduled as a group, so a hundred runaway forks with sessions of
        # their own leave an ordinary process a hundredth. Children do not inherit this.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    json.dump(Supervisor(job).run(), sys.stdout)


def prctl(option: int, value: int, more: int = 0) -> bool:
    """prctl(2) where there is one; whether it worked."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, more, 0, 0) == 0
    except (OSError, AttributeError):
        return False


# ------------------------------------------------------------------------------------------------------------ supervisor


class Supervisor:
    """One job: {"program", "folder", "environment", "uid", "reads_all", "nice", and "timeout", "memory", "processes", "file", "output"}.

    Sizes in bytes, times in seconds; `uid` is None, or an unused user id to change to (needs root), with `reads_all` for
    `become`; `nice` is the caller's.
    """

    def __init__(self, job: dict) -> None:
        self.job = job
        self.output = bytearray()
        self.output_bytes = 0
        self.worker = 0
        self.exit_code: int | None = None
        self.caller = os.getppid()

    def run(self) -> dict:
        """{"passed", "result", "seconds", "output"}: `output` is the end of what the program wrote, at most 2,000 bytes."""
        release, verdict, output = os.pipe(), os.pipe(), os.pipe()
        started = time.monotonic()
        self.worker = os.fork()
        if self.worker == 0:
            work(self.job, release[0], verdict[1], output[1])
        token = secrets.token_hex(16)  # after the fork: the worker has no copy of it
        os.write(release[1], token.encode())
        for end in (release[0], release[1], verdict[1], output[1]):
            os.close(end)
        os.set_blocking(output[0], False)
        os.set_blocking(verdict[0], False)
        try:
            fault = self._watch(started, output[0], verdict[0])
        finally:
            self._end_all()
        seconds = time.monotonic() - started
        said = read_what_is_there(verdict[0]).decode("utf-8", "replace")
        if fault is None and self.output_bytes > self.job["output"]:
            fault = "too much output"
        if fault is None and not os.path.isdir(self.job["folder"]):
            fault = "deleted its working folder"
        passed = fault is None and said == token
        result = fault or ("passed" if passed else said or f"ended before its checks were done ({self._how_it_ended()})")
        return {"passed": passed, "result": result[:500], "seconds": seconds, "output": self.output[-2000:].decode("utf-8", "replace")}

    def _watch(self, started: float, output: int, verdict: int) -> str | None:
        """Until the worker has ended or a limit is passed; the limit in words, or None."""
        next_look = started
        listening = [output, verdict]
        while True:
            ready = select.select(listening, [], [], LOOK_EVERY_S)[0]
            if output in ready and self._read(output) == 0:
                listening.remove(output)  # closed: it would be ready for ever
            if verdict in ready:
                listening.remove(verdict)  # the worker is about to end
            if self._ended():
                self._read(output)
                return None
            now = time.monotonic()
            if now - started > self.job["timeout"]:
                return "timed out"
            if self.output_bytes > self.job["output"]:
                return "too much output"
            if os.getppid() != self.caller:
                return "the caller is gone"
            if not listening:
                time.sleep(LOOK_EVERY_S / 4)
            if now >= next_look:
                next_look = now + LOOK_EVERY_S
                if fault := self._over_a_limit():
                    return fault

    def _read(self, output: int) -> int:
        """Take what the program wrote; its number of bytes, -1 when there is nothing now, 0 at the end."""
        try:
            piece = os.read(output, 1 << 16)
        except BlockingIOError:
            return -1
        self.output_bytes += len(piece)
        self.output = (self.output + piece)[-4000:]
        return len(piece)

    def _ended(self) -> bool:
        """Whether the worker has ended. Orphans that ended are taken off the process table on the way."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.worker:
                    self.exit_code = os.waitstatus_to_exitcode(found[1])
        return self.exit_code is not None

    def _over_a_limit(self) -> str | None:
        """Processes and memory of all that came of the program: a limit for each would let ten of them take ten times as much."""
        most = self.job["processes"] + 1
        alive = list(itertools.islice(descendants(os.getpid()), most))  # no more: they may multiply faster than they are counted
        if len(alive) > self.job["processes"]:
            return "too many processes"
        if sum(map(resident_bytes, alive)) > self.job["memory"]:
            return "too much memory"
        return None

    def _end_all(self) -> None:
        """Stop all, then kill all, until nothing is left."""
        give_up = time.monotonic() + 10
        kill(-self.worker)  # its process group: all there is without /proc
        while True:
            if self.job["uid"] is not None:
                kill_all_of_user(self.job["uid"])
            alive = list(descendants(os.getpid(), stop=True))
            for pid in alive:
                kill(pid)
            if self._ended() and not alive:
                return
            if time.monotonic() > give_up:
                return  # stuck in the kernel; the signal is pending
            time.sleep(0.001)

    def _how_it_ended(self) -> str:
        if self.exit_code is not None and self.exit_code < 0:
            names = {int(number): number.name for number in signal.Signals}
            return f"signal {names.get(-self.exit_code, -self.exit_code)}"
        return f"exit status {self.exit_code}"


def descendants(above: int, stop: bool = False) -> Iterator[int]:
    """The living processes that came of the process `above`.

    With `stop`, each is stopped before its children are listed. A process with a signal pending cannot fork, so the list is
    complete however fast they multiply; one that lost its parent on the way is the subreaper's child in the next look.
    """
    for pid in children_of(above):
        if stop:
            kill(pid, signal.SIGSTOP)
        if state_of(pid) not in "ZX":
            yield pid
            yield from descendants(pid, stop)


def children_of(pid: int) -> list[int]:
    """The children of a process, dead ones that nobody has waited for included; none without /proc."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    return found


def state_of(pid: int) -> str:
    """The state letter of a process, proc(5): Z has ended; X for one that is gone."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()  # the name before ")" may hold anything
    return "X"


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use; pages that it shares count for each."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    return 0


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def kill_all_of_user(uid: int) -> None:
    """Every process of a user id that only the program has, in one blow: the kernel lets no fork slip through kill(-1)."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.setuid(uid)
            os.kill(-1, signal.SIGKILL)  # all that this user may signal, but not the sender
        os._exit(0)
    os.waitpid(child, 0)


def read_what_is_there(fd: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096)
    return b""


# ---------------------------------------------------------------------------------------------------------------- worker


def work(job: dict, release: int, verdict: int, output: int) -> None:
    """In the forked child: give up what can be given up, execute, echo the token. Does not return."""
    worker = os.getpid()
    try:
        confine(job, keep=(release, verdict, output), output=output)
        # Not "__main__": a completion's own demonstration under that name is not part of the answer.
        exec(compile(job["program"], "<completion>", "exec"), {"__name__": "completion"})
        said = os.read(release, 64)  # not before: until here the token is not in this process's memory
    except BaseException as error:  # SystemExit too: leaving early is not passing
        said = describe(error)
    if os.getpid() != worker:
        os._exit(0)  # a copy that the program forked does not answer in its place
    with contextlib.suppress(OSError):
        os.write(verdict, said)
    os._exit(0)  # at once: no thread, exit handler or output buffer of the program can add anything


def describe(error: BaseException) -> bytes:
    try:
        words = f"failed: {type(error).__name__}: {error}".rstrip(": ")
    except BaseException:  # a __str__ that raises
        words = "failed: an exception that cannot be printed"
    return words.encode("utf-8", "backslashreplace")[:500]


def confine(job: dict, keep: tuple[int, ...], output: int) -> None:
    """Session, descriptors, folder, environment, user, rights, limits: in this order, since each step takes away what it needs."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for fd in range(3, 64):
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, job["nice"])
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.stdin, sys.stdout, sys.stderr = open(0, encoding="utf-8"), open(1, "w", 1, encoding="utf-8"), open(2, "w", 1, encoding="utf-8")
    sys.argv = ["completion"]
    own_tasks = 0
    if job["uid"] is None:
        own_tasks = tasks_of_user(os.getuid())
    else:
        become(job["uid"], reads_all=job["reads_all"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # no way up through a set-user-id program
    stay_inside(job["folder"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which clears it
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, int(job["timeout"]) + 2)  # a stop should the supervisor be gone; the clock on the wall comes first
    limit(resource.RLIMIT_FSIZE, job["file"])
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_AS, job["memory"])
    if HAS_PROC:  # the limit counts all tasks of the user, so those of before are added
        limit(resource.RLIMIT_NPROC, own_tasks + job["processes"])


def become(uid: int, reads_all: bool) -> None:
    """Change from root to `uid` for good. `reads_all` keeps one right of root's: to read any file.

    A Python that lives under /root could not import its own library otherwise. The right to signal other users' processes,
    to write their files, and to pass the process limit is gone either way.
    """
    os.setgroups([])
    os.setgid(uid)
    if reads_all:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setuid(uid)
    if reads_all:
        bit = 1 << CAP_DAC_READ_SEARCH
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable: low words, then high words
        if ctypes.CDLL(None, use_errno=True).capset(header, sets) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH)  # for the processes that it starts


def landlock_version() -> int:
    """The version of the kernel's Landlock, 0 where there is none (before Linux 5.13, switched off, or another system)."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def stay_inside(folder: str) -> None:
    """Ask the kernel to refuse, from here on and for all children: writing outside `folder`, signals to other processes, TCP.

    As far as its Landlock goes; what an older kernel does not know stays possible. Reading is not restricted: Python has to.
    """
    version = landlock_version()
    if version < 1:
        return
    writes = LANDLOCK_WRITES | (LANDLOCK_REFER if version >= 2 else 0) | (LANDLOCK_TRUNCATE if version >= 3 else 0)
    handled = (ctypes.c_uint64 * 3)(writes, LANDLOCK_TCP if version >= 4 else 0, LANDLOCK_SCOPES if version >= 6 else 0)
    known = 8 * (1 if version < 4 else 2 if version < 6 else 3)  # bytes of the structure that this version has
    syscall = ctypes.CDLL(None).syscall
    rules = syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(known), ctypes.c_uint32(0))
    if rules < 0:
        return
    for path, rights in ((folder, writes), (os.devnull, writes & (1 << 1 | LANDLOCK_TRUNCATE))):
        fd = os.open(path, os.O_RDONLY)
        rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)  # a packed structure: 64-bit rights, 32-bit descriptor
        syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0)  # 1: a path and all beneath it
        os.close(fd)
    syscall(LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def limit(what: int, value: int) -> None:
    """Lower a limit, soft and hard; one that is lower already stays. macOS refuses some: the supervisor's clock remains."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (value, value))


def tasks_of_user(uid: int) -> int:
    """Threads and processes that this user runs now."""
    count = 0
    for name in os.listdir("/proc") if HAS_PROC else ():
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


if __name__ == "__main__":
    main()
