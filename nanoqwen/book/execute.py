"""Run chapters and store their outputs: ``python -m nanoqwen.book.execute [NOTEBOOK ...]``, or ``make notebooks``.

Every notebook runs top to bottom in a fresh kernel, in its own folder. What is written back holds nothing of the
machine: no timings, no kernel name of somebody's environment, only cell tags. Cells tagged ``gpu`` run where there is
a Hopper card and CuPy; the notebook then says which card it was and from which sources (``nanoqwen.book.stamp``).
Elsewhere they are passed over and keep the output and the stamp that they have.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from nanoqwen.book.stamp import KEY, hopper_card, needs_card, stamp

CHAPTERS = Path(__file__).resolve().parents[2] / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def execute(path: Path, *, card: str | None) -> None:
    """Run one notebook, cells tagged ``gpu`` only when ``card`` names a Hopper card, and write it back.

    Raises nbclient's CellExecutionError, file untouched, when a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    on_card = [cell for cell in notebook.cells if needs_card(cell)]
    passed_over = [] if card else on_card
    kept = {c.id: (c.cell_type, c.get("outputs"), c.get("execution_count")) for c in passed_over}
    for cell in passed_over:
        cell.cell_type = "raw"
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in passed_over:
        cell.cell_type, cell.outputs, cell.execution_count = kept[cell.id]
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = number
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
    stored = stamp(notebook, card) if card and on_card else notebook.metadata.get(KEY)
    notebook.metadata = {**METADATA, **({KEY: stored} if stored else {})}
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook, indent=1).rstrip("\n") + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Execute the notebooks named, or all of them in order."""
    card = hopper_card()
    for path in [Path(a) for a in arguments] or sorted(CHAPTERS.glob("*.ipynb")):
        print(path, flush=True)
        execute(path, card=card)


if __name__ == "__main__":
    main(sys.argv[1:])
