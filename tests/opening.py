"""Opening a checkpoint in a test: the helpers that every test of ``nanoqwen.checkpoint`` shares."""

from __future__ import annotations

import pytest

from nanoqwen.checkpoint import Checkpoint, open_checkpoint
from nanoqwen.errors import InputError


def refused(source, *fragments: str) -> str:
    """Opening ``source`` fails in one line that contains every fragment; returns the line."""
    with pytest.raises(InputError) as caught:
        open_checkpoint(source, notes=[]).close()
    line = str(caught.value)
    assert "\n" not in line and line.strip() == line
    for fragment in fragments:
        assert fragment in line, line
    return line


def opened(source) -> tuple[Checkpoint, list[str]]:
    """(the open checkpoint, its notes)."""
    notes: list[str] = []
    return open_checkpoint(source, notes=notes), notes
