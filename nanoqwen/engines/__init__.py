"""Engines: one contract, several ways to run a model.

=========== ======================= ====================================================================
name        runs on                 what it is
=========== ======================= ====================================================================
cpu         any machine             the readable decoder of ``nanoqwen/reference.py``
reference   an NVIDIA GPU           the same decoder, on the GPU through PyTorch
eager       a Hopper GPU            hand-written kernels, one launch an operation   (not in this version)
graph       a Hopper GPU            the same kernels, captured into a CUDA graph    (not in this version)
persistent  a Hopper GPU            one kernel that decodes a whole token           (not in this version)
=========== ======================= ====================================================================

``open_engine`` picks by name and device and never falls back: asking for a GPU gives a GPU or a
DeviceError. Importing this package does not import torch.
"""

from __future__ import annotations

import os

from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.packfile import PackFile, open_pack

__all__ = ["ENGINES", "Engine", "available_engines", "open_engine"]

#: Every engine's name. The last three are announced so that asking for one gets a plain answer.
ENGINES = ("cpu", "reference", "eager", "graph", "persistent")
_LATER = ENGINES[2:]


def _not_yet(name: str) -> str:
    return f"engine {name} needs a Hopper GPU and is not part of this version yet"


def open_engine(
    pack: PackFile | str | os.PathLike,
    name: str | None = None,
    device: str | None = None,
    **options: object,
) -> Engine:
    """Open an engine on a pack file (open already, or a path; the engine then owns the file).

    Without ``name`` and ``device`` that is "cpu". ``device`` is "cpu", "cuda" or "cuda:N"; "cuda" alone
    means the engine "reference". ``options`` go to the engine: ``weights`` (memory policy), ``context_limit``,
    ``kv_dtype``, ``progress``. Raises InputError for an unknown name, device or a pair that contradicts
    itself, DeviceError when the device is not there: a GPU request never becomes a CPU run.
    """
    name, device = _choose(name, device)
    owns = not isinstance(pack, PackFile)
    opened = open_pack(pack) if owns else pack
    try:
        from nanoqwen.engines import cpu

        if name == "cpu":
            return cpu.open_cpu(opened, owns_pack=owns, **options)
        return cpu.open_cuda(opened, device, owns_pack=owns, **options)
    except BaseException:
        if owns:
            opened.close()
        raise


def _choose(name: str | None, device: str | None) -> tuple[str, str]:
    """(engine, device) for what was asked, or the error that explains why not."""
    if name is not None and name not in ENGINES:
        raise InputError(f"there is no engine {name!r}, use one of {', '.join(ENGINES)}")
    kind, _, index = (device or "").partition(":")
    if device is not None and (kind not in ("cpu", "cuda") or (":" in device and not (kind == "cuda" and index.isdecimal()))):
        raise InputError(f"there is no device {device!r}, use cpu, cuda or cuda:N")
    if name in _LATER:
        raise DeviceError(f"{_not_yet(name)}; use --engine cpu, or --engine reference on a GPU")
    if name is None:
        name = "reference" if kind == "cuda" else "cpu"
    if name == "cpu" and kind == "cuda":
        raise InputError(f"engine cpu does not run on {device}; use --engine reference for PyTorch on the GPU, or --device cpu")
    if name == "reference" and kind == "cpu":
        name = "cpu"  # the same decoder; "cpu" is its name there
    return name, device or ("cuda" if name == "reference" else "cpu")


def available_engines() -> list[tuple[str, bool, str]]:
    """(name, whether it can be opened here, in words where it runs or why it cannot), for every known engine."""
    try:
        import torch

        from nanoqwen.engines import cpu
    except ImportError as e:
        return [(name, False, f"PyTorch cannot be imported: {e}") for name in ENGINES[:2]] + [(name, False, _not_yet(name)) for name in _LATER]
    problem = cpu.cuda_problem()
    gpu = problem or ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return [
        ("cpu", True, f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads"),
        ("reference", problem is None, gpu),
        *((name, False, _not_yet(name)) for name in _LATER),
    ]
