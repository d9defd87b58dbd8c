"""Shipped source between markers: what a chapter prints is what the package runs."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from nanoqwen import config
from nanoqwen.errors import InputError

#: Code-block language by file name ending. "cpp" for CUDA: every viewer of notebooks knows it.
LANGUAGES = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".js": "javascript", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

#: A marker stands alone on its line: a comment sign, then [name] or [/name].
_MARKER = re.compile(r"^\s*(?:#|//)\s*\[(/?)([A-Za-z0-9][A-Za-z0-9_.-]*)\]\s*$")


class MissingRegion(InputError):
    """A region that a page wants to show is not in the file, or its markers do not pair."""


@dataclass(frozen=True)
class Source:
    """A piece of a shipped file. ``first`` and ``last`` are line numbers of ``code`` in it, counted from 1."""

    path: str
    region: str | None
    code: str
    first: int
    last: int

    @property
    def language(self) -> str:
        return LANGUAGES.get(Path(self.path).suffix, "text")

    def caption(self) -> str:
        """``nanoqwen/int4.py, lines 94 to 104``."""
        return f"{self.path}, lines {self.first} to {self.last}" if self.last > self.first else f"{self.path}, line {self.first}"

    def _repr_markdown_(self) -> str:
        where = self.caption().replace(self.path, f"`{self.path}`", 1)
        return f"```{self.language}\n{self.code}\n```\n\n*{where}*"

    def __repr__(self) -> str:
        return f"<source: {self.caption()}>"

    def __str__(self) -> str:
        return self.code


def book_root() -> Path:
    """The clone: source, kernels and receipts are shown from there. Raises InputError in a wheel install."""
    root = config.repo_root()
    if root is None:
        raise InputError("the book's pages read files of the repository; install from a clone (pip install -e .) and try again")
    return root


def show(path: str, region: str | None = None) -> Source:
    """The file ``path`` (relative to the repository, forward slashes), or its ``region``, for display.

    Raises MissingRegion when the file or region does not exist, when a marker lacks its partner, or when a name is used twice.
    """
    file = book_root() / path
    if not file.is_file():
        raise MissingRegion(f"{path}: no such file in the repository")
    lines = file.read_text(encoding="utf-8").splitlines()
    begin, end = (0, len(lines)) if region is None else _bounds(path, lines, region)
    kept = [(number, line) for number, line in enumerate(lines[begin:end], begin + 1) if not _MARKER.match(line)]
    while kept and not kept[0][1].strip():
        kept.pop(0)
    while kept and not kept[-1][1].strip():
        kept.pop()
    if not kept:
        raise MissingRegion(f"{path}: region [{region}] is empty" if region else f"{path}: the file is empty")
    code = textwrap.dedent("\n".join(line for _, line in kept))
    return Source(path, region, code, kept[0][0], kept[-1][0])


def regions(path: str) -> list[str]:
    """Names of all regions in a file, in order; raises MissingRegion when the markers of any do not pair."""
    lines = (book_root() / path).read_text(encoding="utf-8").splitlines()
    names = [m.group(2) for line in lines if (m := _MARKER.match(line)) and not m.group(1)]
    closed = [m.group(2) for line in lines if (m := _MARKER.match(line)) and m.group(1)]
    for name in sorted(set(names) | set(closed)):
        _bounds(path, lines, name)
    return names


def _bounds(path: str, lines: list[str], region: str) -> tuple[int, int]:
    """Half-open range of line indices strictly between the two markers of ``region``."""
    found: dict[str, list[int]] = {"": [], "/": []}
    for number, line in enumerate(lines):
        match = _MARKER.match(line)
        if match and match.group(2) == region:
            found[match.group(1)].append(number)
    opens, closes = found[""], found["/"]
    if not opens and not closes:
        known = [m.group(2) for line in lines if (m := _MARKER.match(line)) and not m.group(1)]
        raise MissingRegion(f"{path}: no region [{region}]; it has {', '.join(known) or 'none'}")
    if len(opens) != 1 or len(closes) != 1 or closes[0] < opens[0]:
        at = ", ".join(str(n + 1) for n in sorted(opens + closes))
        raise MissingRegion(
            f"{path}: region [{region}] needs one opening and one closing marker after it; "
            f"found {len(opens)} and {len(closes)}, lines {at}"
        )
    return opens[0] + 1, closes[0]
