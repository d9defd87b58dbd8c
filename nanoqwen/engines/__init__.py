"""Engines: one contract, several ways to run a model.

=========== ======================= ====================================================================
name        runs on                 what it is
=========== ======================= ====================================================================
cpu         any machine             the readable decoder of ``nanoqwen/reference.py``
reference   an NVIDIA GPU           the same decoder, on the GPU through PyTorch
eager       a Hopper GPU            hand-written kernels, one launch an operation
graph       a Hopper GPU            the same kernels, captured into a CUDA graph
persistent  a Hopper GPU            one kernel that decodes a few whole tokens
=========== ======================= ====================================================================

``open_engine`` picks by name and device and never falls back: asking for a GPU gives a GPU or a
DeviceError. Importing this package does not import torch.
"""

from __future__ import annotations

import os

from nanoqwen import cache
from nanoqwen.config import Dims
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.packfile import PackFile, open_pack

__all__ = ["ENGINES", "HOPPER", "Engine", "available_engines", "fastest_hopper", "open_engine"]

#: Every engine's name, slower ones first. Where an engine is not named, the last one that is correct there runs: this order decides.
ENGINES = ("cpu", "reference", "eager", "graph", "persistent")
#: Those that run hand-written Hopper kernels.
HOPPER = ENGINES[2:]


def fastest_hopper(dims: Dims | None = None, group: int = 0) -> str:
    """The fastest Hopper engine, of a model's dimensions if they are given: the persistent kernel does not take all that the others take."""
    from nanoqwen.cuda.persistent_plan import persistent_takes

    return next(name for name in reversed(HOPPER) if name != "persistent" or dims is None or persistent_takes(dims, group))


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
        if name in HOPPER:
            if problem := hopper_problem():
                raise DeviceError(f"engine {name}: {problem}; use --engine cpu, or see `nanoqwen doctor`")
            from nanoqwen.engines import hopper

            return hopper.open_hopper(opened, name, owns_pack=owns, **options)
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
    if name is None:
        name = "reference" if kind == "cuda" else "cpu"
    if name in HOPPER:
        check_hopper_device(name, device)
    if name == "cpu" and kind == "cuda":
        raise InputError(f"engine cpu does not run on {device}; use --engine reference for PyTorch on the GPU, or --device cpu")
    if name == "reference" and kind == "cpu":
        name = "cpu"  # the same decoder; "cpu" is its name there
    return name, device or ("cpu" if name == "cpu" else "cuda")


def check_hopper_device(name: str, device: str | None) -> None:
    """Raise InputError unless ``device`` is where the Hopper engines run: the first visible card.

    Their driver calls go to one context; which card is the first is for CUDA_VISIBLE_DEVICES to say.
    """
    kind, _, index = (device or "cuda").partition(":")
    if kind == "cpu":
        raise InputError(f"engine {name} does not run on the CPU; use --device cuda, or --engine cpu")
    if index not in ("", "0"):
        raise InputError(f"engine {name} runs on the first visible card only; to use card {index}, set CUDA_VISIBLE_DEVICES={index} and leave --device at cuda")


def hopper_problem() -> str | None:
    """Why the Hopper kernels cannot run here, in words, or None. Looks and never raises."""
    cache.use_for_cupy(os.environ)
    extras = "install the extra that matches the driver, nanoqwen[cuda12] or nanoqwen[cuda13]"
    try:
        import cupy
        from cuda.bindings import driver, nvrtc  # noqa: F401

        nvrtc.nvrtcVersion()  # loads the library
    except ModuleNotFoundError as e:
        return _cuda_trouble() or f"{e.name or 'CuPy'} is not installed; {extras}"
    except Exception as e:  # a library of theirs cannot be loaded, or a folder of theirs made
        first = str(e).strip().partition("\n")[0]
        return _cuda_trouble() or cache.cupy_trouble(e, os.environ) or f"CuPy or NVRTC cannot be loaded ({type(e).__name__}: {first}); {extras}"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no NVIDIA GPU is visible"
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    except Exception as e:  # no driver, or one older than the runtime
        return _cuda_trouble() or f"no NVIDIA GPU can be used ({e})"
    if (properties["major"], properties["minor"]) != (9, 0):
        return f"the kernels need compute capability 9.0, this is {properties['major']}.{properties['minor']} ({properties['name'].decode()})"
    return None


def _cuda_trouble() -> str | None:
    """What the doctor says is wrong with driver and packages: numbers and a remedy, where CUDA's own message has none."""
    from nanoqwen.doctor import cuda_trouble

    return cuda_trouble()


def available_engines() -> list[tuple[str, bool, str]]:
    """(name, whether it can be opened here, in words where it runs or why it cannot), for every known engine."""
    problem = hopper_problem()
    hopper = [(name, problem is None, problem or "hand-written kernels, this Hopper GPU") for name in HOPPER]
    try:
        import torch

        from nanoqwen.engines import cpu
    except ImportError as e:
        return [(name, False, f"PyTorch cannot be imported: {e}") for name in ENGINES[:2]] + hopper
    problem = cpu.cuda_problem()
    gpu = problem or ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return [("cpu", True, f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads"), ("reference", problem is None, gpu), *hopper]
