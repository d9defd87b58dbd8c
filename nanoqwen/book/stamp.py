"""What a chapter's stored Hopper outputs rest on: device, date and the hashes of sources, kept in the notebook's own metadata.

Cells tagged ``gpu`` keep their outputs where there is no card, so nothing there would notice that the code beneath them has moved on. The
stamp does: ``nanoqwen.book.execute`` writes it when it has run a chapter on a Hopper card, and a test compares it (``stale``)::

    "nanoqwen": {
      "rests_on": ["kernels/lessons/barriers.cu"],      written by the chapter's author, kept; paths or patterns from the repository's root
      "device": "NVIDIA H200", "date": "2026-01-31",    where and when the cells tagged gpu were run
      "cells": "...",                                   SHA-256 of their code
      "sources": {"kernels/lessons/barriers.cu": "..."}
    }

Sources are found, not listed: the modules of nanoqwen that a code cell imports (``nanoqwen.book`` aside: it only shows), the files that
``book.show`` prints, those that ``rests_on`` adds (what runs in another process, say, or is compiled), and every header that one of these
includes. What an imported module imports in turn is not followed; name it in ``rests_on`` when the outputs rest on it.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nanoqwen.bench.receipts import hash_source
from nanoqwen.book.build import book_calls, plain_python
from nanoqwen.book.source import book_root
from nanoqwen.errors import InputError
from nanoqwen.machine import nvidia_gpus

KEY, TAG = "nanoqwen", "gpu"


def hopper_card() -> str | None:
    """Name of this machine's Hopper card; None where there is none, or no CuPy to use it with."""
    if importlib.util.find_spec("cupy") is None:
        return None
    return next((gpu.name for gpu in nvidia_gpus() if gpu.capability == (9, 0)), None)


def here() -> str:
    """``NVIDIA H200, 2026-01-31``: what stands under a table or figure that a cell tagged ``gpu`` has just measured."""
    return f"{hopper_card() or 'no Hopper card'}, {_today()}"


def needs_card(cell: Mapping) -> bool:
    """Whether a cell runs on a Hopper card only."""
    return cell["cell_type"] == "code" and TAG in cell["metadata"].get("tags", ())


def stamp(notebook: Mapping, device: str) -> dict:
    """The stamp of a notebook whose cells have just been run on ``device``. Raises InputError for a pattern of ``rests_on`` without a file."""
    return {
        "rests_on": list(notebook["metadata"].get(KEY, {}).get("rests_on", [])),
        "device": device,
        "date": _today(),
        "cells": _cells_hash(notebook),
        "sources": {path: hash_source(path) for path in sources(notebook)},
    }


def stale(path: Path) -> list[str]:
    """What makes the stored Hopper outputs of a notebook doubtful, a line each; empty when they are current or when it has none."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if not any(map(needs_card, notebook["cells"])):
        return []
    stored = notebook["metadata"].get(KEY, {})
    if missing := [key for key in ("device", "date", "cells", "sources") if not stored.get(key)]:
        return [f"its cells tagged {TAG} were never run on a card: the stamp lacks {', '.join(missing)}"]
    found = [] if stored["cells"] == _cells_hash(notebook) else [f"cells tagged {TAG} changed"]
    now = {source: hash_source(source) for source in sources(notebook)}
    found += [f"{source} was not there" for source in now if source not in stored["sources"]]
    for source, digest in stored["sources"].items():
        if source not in now:
            found.append(f"{source} is no longer used")
        elif now[source] != digest:
            found.append(f"{source} changed")
    return found


def sources(notebook: Mapping) -> list[str]:
    """Paths from the repository's root, sorted, of what the notebook rests on."""
    root = book_root()
    found = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = _code(cell)
            found |= {arguments[0] for name, arguments in book_calls(code) if name == "show"}
            found |= {path for path in _imported(code, root) if not path.startswith("nanoqwen/book/")}
    for pattern in notebook["metadata"].get(KEY, {}).get("rests_on", []):
        files = {file.relative_to(root).as_posix() for file in root.glob(pattern) if file.is_file()}
        if not files:
            raise InputError(f"the notebook rests on {pattern}, and no file of the repository is called so")
        found |= files
    return sorted(found | _included(found, root))


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _code(cell: Mapping) -> str:
    """A cell's Python; a notebook stores a text as one string or as its lines."""
    return plain_python(cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]))


def _cells_hash(notebook: Mapping) -> str:
    code = "\0".join(_code(cell) for cell in notebook["cells"] if needs_card(cell))
    return hashlib.sha256(code.encode("utf-8")).hexdigest()


def _imported(code: str, root: Path) -> Iterator[str]:
    """Files of the nanoqwen modules that ``code`` names in an import."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
        if name.split(".")[0] == "nanoqwen" and name != "nanoqwen":
            module = name.replace(".", "/")
            yield from (path for path in (f"{module}.py", f"{module}/__init__.py") if (root / path).is_file())


def _included(paths: set[str], root: Path) -> set[str]:
    """Headers that CUDA sources include, and those that these include."""
    found: set[str] = set()
    todo = [path for path in paths if path.endswith((".cu", ".cuh"))]
    while todo:
        path = todo.pop()
        for name in re.findall(r'^#include "([^"]+)"', (root / path).read_text(encoding="utf-8"), re.MULTILINE):
            for header in (f"{path.rpartition('/')[0]}/{name}", f"kernels/common/{name}"):  # constants.cuh is made for each model: no file
                if (root / header).is_file() and header not in found:
                    found.add(header)
                    todo.append(header)
    return found
