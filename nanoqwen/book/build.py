"""What the pages take from the repository, checked before they are built: ``python -m nanoqwen.book.build``.

Notebooks are shown with stored outputs, so a build alone would not notice that a listing has moved on or that a receipt is older
than its sources. This does, and so does the book's Sphinx extension, which turns each finding into a warning (an error under -W):

* markers of source regions that do not pair, in any shipped file;
* ``book.show(...)`` of a region that is gone, or whose stored listing is not what the file says today;
* ``book.receipt(...)`` of a receipt that does not exist or is stale;
* a constant without documentation.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from nanoqwen.bench.receipts import check_receipt, receipts_folder
from nanoqwen.book.configdoc import config_markdown
from nanoqwen.book.contents import pages
from nanoqwen.book.facts import facts
from nanoqwen.book.receipts import receipt
from nanoqwen.book.source import book_root, regions, show
from nanoqwen.errors import InputError

#: Where source that pages may show lives.
SHIPPED = ("nanoqwen/**/*.py", "kernels/**/*.cu", "kernels/**/*.cuh", "book/_static/*.js")


def problems() -> list[str]:
    """One line for each thing that would make a page wrong; empty when all is well."""
    found: list[str] = []
    root = book_root()
    for pattern in SHIPPED:
        for file in sorted(root.glob(pattern)):
            found += _said(lambda path=file: regions(path.relative_to(root).as_posix()))
    found += _said(facts) + _said(config_markdown)
    for page in pages():
        notebook = root / f"{page}.ipynb"
        if notebook.is_file():
            found += [f"{page}.ipynb: {line}" for line in _notebook_problems(notebook)]
    return found


def _said(check) -> list[str]:
    try:
        check()
    except InputError as error:
        return [str(error)]
    return []


def _notebook_problems(path: Path) -> list[str]:
    found: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for name, arguments in book_calls("".join(cell["source"])):
            if name == "receipt":
                found += _said(lambda given=arguments: receipt(*given))
                file = receipts_folder() / f"{arguments[0]}.json"
                found += [f"receipt {arguments[0]} is stale: {line}" for line in (check_receipt(file) if file.is_file() else [])]
            elif missing := _said(lambda given=arguments: show(*given)):
                found += missing
            elif show(*arguments)._repr_markdown_() not in _stored_markdown(cell):
                found.append(f"the stored listing of {' '.join(map(str, arguments))} is not what the file says today; run the notebook again")
    return found


def plain_python(code: str) -> str:
    """A cell's code without the lines that only a notebook understands."""
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith(("%", "!")))


def book_calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """Calls of ``book.show`` and ``book.receipt`` with literal arguments in a cell."""
    for node in ast.walk(ast.parse(plain_python(code))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if node.func.value.id == "book" and node.func.attr in ("show", "receipt") and all(isinstance(a, ast.Constant) for a in given):
            yield node.func.attr, [a.value for a in given]


def _stored_markdown(cell: dict) -> list[str]:
    """Markdown outputs of a cell; a notebook stores a text as one string or as its lines."""
    stored = [output.get("data", {}).get("text/markdown", "") for output in cell["outputs"]]
    return [text if isinstance(text, str) else "".join(text) for text in stored]


if __name__ == "__main__":
    lines = problems()
    for line in lines:
        print(f"book: {line}", file=sys.stderr)
    sys.exit(1 if lines else 0)
