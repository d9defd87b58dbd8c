"""A chapter's notebook as tests read it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nanoqwen.config import repo_root


@dataclass(frozen=True)
class Chapter:
    """``notebooks/<name>.ipynb``. Read anew each time: a test may have executed it."""

    name: str

    def cells(self) -> list[dict]:
        return json.loads((repo_root() / "notebooks" / f"{self.name}.ipynb").read_text(encoding="utf-8"))["cells"]

    def prose(self) -> str:
        """All Markdown, line breaks as spaces."""
        return " ".join(" ".join("".join(c["source"]).split()) for c in self.cells() if c["cell_type"] == "markdown")

    def source(self, cell: str) -> str:
        (found,) = (c["source"] for c in self.cells() if c["id"] == cell)
        return "".join(found)
