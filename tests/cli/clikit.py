"""Helpers of the command line's tests: what a command did, the command as a child process, tiny packed models."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tiny

from nanoqwen.pack import pack

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit status and what it wrote."""

    status: int
    out: str
    err: str

    def error_line(self) -> str:
        """The one line of a refusal, without its prefix; fails unless that is all there is."""
        assert self.status == 2, (self.status, self.err)
        assert self.out == "", "a refused command has no output"
        lines = [line for line in self.err.splitlines() if not line.startswith("nanoqwen: engine ")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("nanoqwen: error: "), self.err
        return lines[0].removeprefix("nanoqwen: error: ")


def subprocess_env(**changes: str) -> dict[str, str]:
    """The environment of a child process that finds this package."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **changes}


def nanoqwen(*argv, **kwargs) -> subprocess.CompletedProcess:
    """`python -m nanoqwen ...` as a child process, outputs as bytes."""
    kwargs.setdefault("env", subprocess_env())
    kwargs.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([sys.executable, "-m", "nanoqwen", *map(str, argv)], capture_output=True, timeout=120, **kwargs)


def make_pack(folder: Path, name: str, sizes: tiny.Sizes = tiny.PLAIN, **parts) -> Path:
    """Write a tiny checkpoint under `folder` and pack it to `folder/name.nanoqwen`."""
    source = tiny.make(folder / f"{name}-source", sizes, **parts)
    out = folder / f"{name}.nanoqwen"
    pack(source, out)
    return out
