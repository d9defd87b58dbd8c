"""The frame of a benchmark that is a program of its own, ``python -m nanoqwen.bench.<name>``: parse, measure, write the receipt, or say in one line why not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nanoqwen.errors import NanoqwenError


def run_program(
    command: str,
    description: str,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Callable[[], Path] | int],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> int:
    """Run ``measure`` with the parsed ``arguments`` (None: the process's own) and return the exit status.

    ``measure`` prints what it finds and returns the function that writes the receipt, which is called unless ``--dry`` is among the arguments; the path is
    printed and the status 0. Where there is no receipt to write it returns a status of its own. A NanoqwenError of either is one line on standard error,
    behind the name of the ``command``, and status 2. ``options`` adds arguments to the parser, which has ``--dry`` already; ``description`` is its text.
    Raises SystemExit for arguments that cannot be parsed, as argparse does.
    """
    parser = argparse.ArgumentParser(prog=command, description=description)
    parser.add_argument("--dry", action="store_true", help="print and write no receipt")
    options(parser)
    args = parser.parse_args(arguments)
    try:
        outcome = measure(args)
        if isinstance(outcome, int):
            return outcome
        if not args.dry:
            print(outcome())
    except NanoqwenError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    return 0
