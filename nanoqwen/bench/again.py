"""Receipts again, each by the command that stands in it: ``python -m nanoqwen.bench.again [NAME ...]``, or ``make receipts``.

Without names, those that are older than their sources. What tells most comes first: the sanitizers and the validation ladder, since a fault that they find makes every
other number worthless. A receipt whose command does not come to its end is put back as it was; the others go on, and the exit status is 1.
Most commands need a Hopper card and say so in a line where there is none.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import check_receipt, read_receipt, receipt_names, receipts_folder
from nanoqwen.errors import InputError

COMMAND = "python -m nanoqwen.bench.again"
#: Receipts that are made before all others, in this order.
FIRST = ("sanitize", "validate")


@dataclass(frozen=True)
class Job:
    """A receipt to be made: its file, the command that stands in it, and the argument lists that this is."""

    path: Path
    command: str
    calls: list[list[str]]

    @property
    def name(self) -> str:
        return self.path.stem


def calls_of(command: str) -> list[list[str]]:
    """The argument lists of a receipt's ``command``: its parts between ``&&``, with this interpreter for ``python`` and for ``nanoqwen``.

    Raises InputError for a command that begins with neither: a receipt is read from a file, and nothing else in it is started.
    """
    found = []
    for part in command.split("&&"):
        program, *rest = shlex.split(part) or [""]
        if program == "nanoqwen":
            found.append([sys.executable, "-m", "nanoqwen", *rest])
        elif program == "python" and rest[:1] == ["-m"] and rest[1:] and rest[1].startswith("nanoqwen."):
            found.append([sys.executable, *rest])
        else:
            raise InputError(f"a receipt's command is nanoqwen or python -m nanoqwen..., this one is {command!r}")
    return found


def jobs(names: Sequence[str]) -> list[Job]:
    """The receipts ``names``, or without any those that are not current, in the order in which they are made.

    Raises InputError for a name that there is no receipt of, with those that there are, and for a command that is not started: all before anything runs.
    """
    folder = receipts_folder()
    there = receipt_names(folder)
    if unknown := sorted(set(names) - set(there)):
        raise InputError(f"there is no receipt {', '.join(unknown)}; there are {', '.join(there)}")
    wanted = set(names) or {name for name in there if check_receipt(folder / f"{name}.json")}
    found = []
    for name in sorted(wanted, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        command = read_receipt(folder / f"{name}.json")["command"]
        found.append(Job(folder / f"{name}.json", command, calls_of(command)))
    return found


def make(job: Job, run: Callable[[list[str]], int]) -> str | None:
    """Run the command of ``job``. Returns why its receipt was not made, or None.

    A command of several parts writes the receipt anew at each, and one that lacks a peer writes it without: if it does not come to its end, or is
    interrupted, the file is what it was.
    """
    before, written = job.path.read_bytes(), job.path.stat()
    made = False
    try:
        for call in job.calls:
            if status := run(call):
                return f"{shlex.join(['python', *call[1:]])} ended with status {status}"
        now = job.path.stat()
        if (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns):
            return "its command ran and wrote no receipt"
        if changed := check_receipt(job.path):
            return f"its command ran, and the receipt is older than its sources ({changed[0]})"
        made = True
    finally:
        if not made:
            temporary = job.path.with_suffix(".json.tmp")
            temporary.write_bytes(before)
            os.replace(temporary, job.path)
    return None


def _run(call: list[str]) -> int:
    return subprocess.run(call, cwd=receipts_folder().parents[1], check=False).returncode


def make_all(wanted: Sequence[Job], run: Callable[[list[str]], int] = _run) -> int:
    """Make the receipts one after another and say how each ended. Returns the exit status: 1 if one of them was not made."""
    failed = []
    for number, job in enumerate(wanted, 1):
        label = f"[{number} of {len(wanted)}] {job.name}"
        print(f"{label}: {job.command}", flush=True)
        started = time.perf_counter()
        why = make(job, run)
        print(f"{label}: {f'not made: {why}' if why else 'made'}, {time.perf_counter() - started:.0f} s", flush=True)
        failed += [job.name] if why else []
    if failed:
        print(f"not made: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """Make what is asked for. Returns the exit status: 1 when a receipt was not made, 2 for a request that was refused in one line."""

    def measure(args: argparse.Namespace) -> int:
        wanted = jobs(args.names)
        if not wanted:
            print("every receipt is current")
        if not args.dry:
            return make_all(wanted)
        for job in wanted:
            print(f"{job.name}: {job.command}")
        return 0

    text = "Make receipts again, each by the command that stands in it. With --dry they are listed."
    return run_program(COMMAND, text, arguments, measure, lambda parser: parser.add_argument("names", nargs="*", metavar="NAME", help="without any: those that are older than their sources"))


if __name__ == "__main__":
    raise SystemExit(main())
