"""Fixtures of the command line's tests: packed models, and the command run in this process."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import tiny
from clikit import Outcome, make_pack

from nanoqwen.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("inspect", path, stdin=b"...")` -> Outcome, in this process: a subprocess would import PyTorch each time."""

    def call(*argv, stdin: bytes | None = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Folder of packed models that tests only read."""
    folder = tmp_path_factory.mktemp("models")
    make_pack(folder, "plain")
    make_pack(folder, "letters", tiny.SCRIPTED, tensors=tiny.scripted(tiny.spelled_chain("1", "ABCDEFGHIJK")))
    return folder


@pytest.fixture(scope="session")
def plain(models) -> Path:
    """The plain model: random weights, 512 rows, 261 tokens, context 8192."""
    return models / "plain.nanoqwen"


@pytest.fixture(scope="session")
def letters(models) -> Path:
    """A model that continues a text ending in `1` with ABCDEFGHIJK and then ends."""
    return models / "letters.nanoqwen"


@pytest.fixture(scope="session")
def endless(models) -> Path:
    """A model that says ABABAB... until the context of 8192 tokens is full."""
    return make_pack(models, "endless", tiny.SCRIPTED, tensors=tiny.scripted({49: 65, 65: 66, 66: 65}))
