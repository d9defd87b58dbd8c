"""What the commands share when they talk: exit codes, two streams, progress, numbers for people.

stdout carries the answer (text, a page, or one JSON object) and nothing else, so it can be piped; which engine runs, notes,
progress and errors go to stderr. Nothing below `nanoqwen.cli` prints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from nanoqwen.errors import InputError

EXIT_OK = 0
EXIT_FAILED = 1  # `validate` ran and the file or the engine did not pass
EXIT_BAD_INPUT = 2  # a wrong argument, a wrong or damaged file, a missing device
EXIT_INTERNAL = 70  # a fault of nanoqwen itself (EX_SOFTWARE of sysexits.h)
EXIT_INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE: the reader of our output went away


class UsageError(InputError):
    """An argument that is unknown, missing or out of its range."""


# --------------------------------------------------------------------------------------------------------- streams


def make_output_safe() -> None:
    """Let every character leave through any terminal: what its encoding lacks is written as a backslash escape.

    Model text holds whatever the model says; a cp1252 or ASCII pipe must not end a run half-way with an encode error.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def out(text: str = "", end: str = "\n") -> None:
    """Write to stdout at once: text that streams must not wait in a buffer."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """One line on stderr that a user should know and a pipe should not carry."""
    sys.stderr.write(f"nanoqwen: {one_line(text)}\n")
    sys.stderr.flush()


def out_json(value: Any) -> None:
    """One JSON object on stdout. On a stream that is not UTF-8, letters are escaped, so that it stays valid JSON."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
    out(json.dumps(value, ensure_ascii=encoding != "utf8", indent=2))


def one_line(text: str) -> str:
    """Join the lines of a message: errors and notes are one line each, whatever a library put into its exception."""
    return " ".join(part.strip() for part in str(text).splitlines() if part.strip())


def close_stdout_quietly() -> None:
    """After a broken pipe, point stdout at the null device, or the interpreter complains once more while it exits."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):  # a captured stream has no descriptor: nothing to silence
        pass


def bad_argument(argument: str, problem: str) -> NoReturn:
    raise UsageError(f"argument {argument}: {problem}")


# -------------------------------------------------------------------------------------------------------- progress


class Progress:
    """A progress bar on stderr, as a context manager and as the `progress` callback of the layers below.

    `show` None means: only when stderr is a terminal. The callback takes (done, total, label); `unit` is what they count.
    """

    def __init__(self, show: bool | None, what: str, unit: str = "B"):
        self.show = sys.stderr.isatty() if show is None else show
        self.what, self.unit = what, unit
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int, label: str) -> None:
        if not self.show:
            return
        if self._bar is None:
            try:
                from tqdm import tqdm  # here, not above: most commands never draw a bar
            except ModuleNotFoundError:  # no bar is no reason to stop
                self.show = False
                return
            self._bar = tqdm(total=total, unit=self.unit, unit_scale=True, desc=self.what, file=sys.stderr, dynamic_ncols=True)
        self._bar.total = total
        self._bar.set_postfix_str(label[-40:], refresh=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


# ------------------------------------------------------------------------------------------------ numbers for people


def human_bytes(count: int) -> str:
    """`4.46 GB`: decimal units, three digits, since memory bandwidth is quoted in powers of ten."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 999.5 or unit == "GB":
            break
        value /= 1000
    if unit == "bytes":
        return f"{count} bytes" if count != 1 else "1 byte"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def plural(count: int, word: str) -> str:
    """`1 token`, `2 tokens`, `1,000 tokens`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def columns(rows: Iterable[Sequence[object]], indent: str = "  ", gap: str = "  ", right: Iterable[int] = ()) -> list[str]:
    """Align rows of cells. Columns named in `right` are set flush right; the last column is never padded."""
    table = [[str(cell) for cell in row] for row in rows]
    if not table:
        return []
    flush_right = set(right)
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(max(map(len, table)))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(widths[i]) if i in flush_right else cell if i == len(row) - 1 else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines
