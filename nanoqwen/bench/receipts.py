"""Receipts: what was measured, where, when, with which sources. Tables, figures and prose of the book read them.

A receipt is ``book/receipts/<name>.json``::

    name, command, date            what to run to get it again, and when it was last run (UTC)
    device, versions               the machine: a CPU's model and cores, or a GPU's facts; Python and libraries
    sources {path: sha256}         every file whose change would make the numbers wrong
    protocol, samples, results     what was timed and how often; the raw runs; the numbers the book quotes

A test recomputes the hashes (``check_receipt``) and fails on a receipt that is older than its sources.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from nanoqwen import __version__
from nanoqwen.config import repo_root
from nanoqwen.errors import InputError
from nanoqwen.machine import usable_cores

#: What every number of the Hopper engines rests on: the kernels and the code that plans, compiles and launches them.
HOPPER_SOURCES = (
    "kernels/common/*.cuh", "kernels/setup/*.cu", "kernels/decode/*.cu", "kernels/prefill/*.cu", "kernels/prefill/*.cuh", "nanoqwen/cuda/*.py",
    "nanoqwen/engines/hopper.py", "config/nanoqwen.yaml",
)  # fmt: skip

#: And what those of the persistent engine rest on beside them.
PERSISTENT_SOURCES = ("kernels/persistent/*.cu", "kernels/persistent/*.cuh", "nanoqwen/engines/persistent.py")

KEYS = ("name", "command", "date", "device", "versions", "sources", "protocol", "samples", "results")


def receipts_folder() -> Path:
    """``book/receipts`` of the clone. Raises InputError when the package does not run from one."""
    root = repo_root()
    if root is None:
        raise InputError("receipts belong to a clone of the repository; this nanoqwen is an installed package")
    return root / "book" / "receipts"


def receipt_names(folder: Path) -> list[str]:
    """Names of all receipts in ``folder``, sorted."""
    return sorted(path.stem for path in folder.glob("*.json"))


def source_files(patterns: Iterable[str]) -> list[str]:
    """The files of the clone that match ``patterns``, sorted, as paths relative to its root. Raises InputError outside a clone."""
    root = receipts_folder().parents[1]
    return sorted({str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)})


def write_receipt(
    name: str,
    command: str,
    results: Mapping,
    samples: Mapping | list,
    sources: Iterable[str],
    protocol: Mapping,
    *,
    device: Mapping | None = None,
    versions: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Path:
    """Write one receipt and return its path. ``sources`` are paths relative to the repository root.

    ``device`` and further ``versions`` are given by a GPU protocol; a CPU is described here. Raises InputError outside a
    clone and for a source that does not exist.
    """
    folder = folder or receipts_folder()
    receipt = {
        "name": name,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": dict(device or cpu_device()),
        "versions": {**base_versions(), **(versions or {})},
        "sources": {source: hash_source(source) for source in sorted(sources)},
        "protocol": dict(protocol),
        "samples": samples,
        "results": dict(results),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(receipt, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_receipt(path: Path) -> dict:
    """A receipt as a dict. Raises InputError when it is missing, not JSON, or lacks one of ``KEYS``."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such receipt") from None
    except ValueError:
        raise InputError(f"{path}: not valid JSON") from None
    if missing := [key for key in KEYS if key not in receipt]:
        raise InputError(f"{path}: lacks {', '.join(missing)}")
    return receipt


def check_receipt(path: Path) -> list[str]:
    """The sources that changed or vanished since the receipt was written; empty when it is current."""
    stale = []
    for source, digest in read_receipt(path)["sources"].items():
        try:
            if hash_source(source) != digest:
                stale.append(f"{source} changed")
        except InputError:
            stale.append(f"{source} is gone")
    return stale


def hash_source(source: str) -> str:
    """SHA-256 of a file of the repository, by its path from the root. Raises InputError when it does not exist."""
    root = repo_root()
    if root is None or not (root / source).is_file():
        raise InputError(f"{source}: no such file in the repository")
    # Text is hashed with Unix line ends, so that a checkout on another platform does not make every receipt stale.
    return hashlib.sha256((root / source).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def cpu_device() -> dict:
    """This machine's processor: {"name", "cores", "memory_gib"}; ``cores`` are those this process may use."""
    cores = usable_cores()
    return {"name": f"{_cpu_model()}, {cores} cores", "cores": cores, "memory_gib": _memory_gib()}


def base_versions() -> dict[str, str]:
    """Versions of what every protocol uses."""
    import numpy

    return {"nanoqwen": __version__, "python": platform.python_version(), "numpy": numpy.__version__, "system": platform.system()}


def nvrtc_version() -> dict[str, str]:
    """{"nvrtc": "13.0"}: the compiler of the kernels. Needs the package ``cuda-bindings`` and no card."""
    from cuda.bindings import nvrtc

    return {"nvrtc": ".".join(map(str, nvrtc.nvrtcVersion()[1:]))}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
