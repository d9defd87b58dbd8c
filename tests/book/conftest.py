"""One build of the book for all tests that look at its pages, in a folder of its own and with warnings as errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_book(source: Path, target: Path) -> subprocess.CompletedProcess:
    """``jupyter-book build source`` into ``target``/_build/html, as `make book` does it."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(source)]
    command += ["--path-output", str(target), "--warningiserror", "--keep-going", "-n"]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=240)


def complaints(done: subprocess.CompletedProcess) -> list[str]:
    """Warnings and errors of a build; its last words when it gave none."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in (done.stdout + done.stderr).splitlines()]
    return [line for line in lines if re.search(r"WARNING|ERROR|rror:", line)] or lines[-20:]


@pytest.fixture(scope="session")
def build(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder of the built pages and what the build said. With --keep-going there are pages even where it complained."""
    pytest.importorskip("jupyter_book", reason="the book extra is not installed")
    target = tmp_path_factory.mktemp("book")
    return target / "_build" / "html", build_book(ROOT, target)


@pytest.fixture(scope="session")
def built(build) -> Path:
    """The folder of the built pages."""
    pages, done = build
    assert (pages / "index.html").is_file(), complaints(done)
    return pages
