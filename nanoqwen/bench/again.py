"""Receipts again, each by the command that stands in it: ``python -m nanoqwen.bench.again [NAME ...]``, or ``make receipts``.

Without names, those that are older than their sources. What tells most comes first: the sanitizers and the validation ladder, since a fault that they find makes every
other number worthless. A command that fails ends nothing but its own receipt, which stays what it was; the others go on, and the exit status is 1.
Most commands need a Hopper card and say so in a line where there is none.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import check_receipt, read_receipt, receipts_folder
from nanoqwen.errors import InputError

COMMAND = "python -m nanoqwen.bench.again"
#: Receipts that are made before all others, in this order.
FIRST = ("sanitize", "validate")


def chosen(names: Sequence[str]) -> list[str]:
    """The receipts ``names``, or without any those that are not current, in the order in which they are made.

    Raises InputError for a name that there is no receipt of, with those that there are.
    """
    there = sorted(path.stem for path in receipts_folder().glob("*.json"))
    if unknown := sorted(set(names) - set(there)):
        raise InputError(f"there is no receipt {', '.join(unknown)}; there are {', '.join(there)}")
    wanted = names or [name for name in there if check_receipt(receipts_folder() / f"{name}.json")]
    return sorted(set(wanted), key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def calls(command: str) -> list[list[str]]:
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


def make(name: str, run: Callable[[list[str]], int]) -> str | None:
    """Run the command of receipt ``name``. Returns why it was not made, or None."""
    path = receipts_folder() / f"{name}.json"
    for call in calls(read_receipt(path)["command"]):
        if status := run(call):
            return f"{shlex.join(['python', *call[1:]])} ended with status {status}"
    if changed := check_receipt(path):
        return f"its command ran and left it as it was ({changed[0]})"
    return None


def _run(call: list[str]) -> int:
    return subprocess.run(call, cwd=receipts_folder().parents[1], check=False).returncode


def make_all(names: Sequence[str], run: Callable[[list[str]], int] = _run) -> int:
    """Make the receipts ``names`` one after another and say how each ended. Returns the exit status: 1 if one of them was not made."""
    failed = {}
    for number, name in enumerate(names, 1):
        print(f"[{number} of {len(names)}] {name}: {read_receipt(receipts_folder() / f'{name}.json')['command']}", flush=True)
        started = time.perf_counter()
        if why := make(name, run):
            failed[name] = why
        print(f"[{number} of {len(names)}] {name}: {f'not made: {why}' if why else 'made'}, {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        print(f"not made: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """Make what is asked for. Returns the exit status: 1 when a receipt was not made, 2 for a request that was refused in one line."""

    def measure(args: argparse.Namespace) -> int:
        names = chosen(args.names)
        if not names:
            print("every receipt is current")
        if args.dry:
            for name in names:
                print(f"{name}: {read_receipt(receipts_folder() / f'{name}.json')['command']}")
            return 0
        return make_all(names)

    text = "Make receipts again, each by the command that stands in it."
    return run_program(COMMAND, text, arguments, measure, lambda parser: parser.add_argument("names", nargs="*", metavar="NAME", help="without any: those that are older than their sources"))


if __name__ == "__main__":
    raise SystemExit(main())
