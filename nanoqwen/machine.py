"""Facts about this machine. Every function looks and never raises, and needs nothing but the standard library.

The NVIDIA driver is asked directly through ctypes: the question "is there a GPU, and which" must have an answer where
neither PyTorch nor CuPy is installed, or where one of them is broken.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """`version` is the driver package ("580.95.05") where it can be read, `cuda` the newest CUDA it speaks (12040 = 12.4)."""

    version: str | None
    cuda: int | None


@dataclass(frozen=True)
class TorchFacts:
    version: str
    cuda: str | None  # CUDA version PyTorch was built for, None for a CPU build
    sees_gpu: bool
    error: str = ""  # why it cannot be imported


def usable_cores() -> int:
    """Processors that this process may use: a container or ``taskset`` may leave it fewer than there are. macOS does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_packages() -> dict[str, str]:
    """Every installed distribution, lower-case with dashes -> version."""
    found = {}
    for dist in importlib.metadata.distributions():
        name = (dist.metadata["Name"] if dist.metadata else None) or ""
        if name:
            found[normal_name(name)] = dist.version
    return found


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_facts() -> TorchFacts | None:
    """What PyTorch says of itself; None when it is not installed. Importing it takes a second or two."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return None if error.name == "torch" else TorchFacts("?", None, False, str(error))
    except Exception as error:  # a broken installation raises OSError, ImportError, RuntimeError
        return TorchFacts("?", None, False, str(error).splitlines()[0] if str(error) else type(error).__name__)
    return TorchFacts(torch.__version__, torch.version.cuda, torch.cuda.is_available())


def nvidia_driver() -> Driver | None:
    """The NVIDIA driver, or None when this machine has none."""
    version = None
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
        version = match.group(1) if match else None
    except OSError:
        pass
    library = _cuda_driver_library()
    if library is None:
        return Driver(version, None) if version else None
    number = ctypes.c_int(0)
    failed = library.cuDriverGetVersion(ctypes.byref(number))
    return Driver(version, None if failed else number.value)


def _cuda_driver_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def nvidia_gpus() -> list[Gpu]:
    """Every GPU the driver shows, asked directly, so that neither PyTorch nor CuPy has to work for it."""
    library = _cuda_driver_library()
    count = ctypes.c_int(0)
    if library is None or library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    gpus = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
        name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t(0)
        failed = (
            library.cuDeviceGet(ctypes.byref(device), index)
            or library.cuDeviceGetName(name, len(name), device)
            or library.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            or library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
            or library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        )
        if not failed:
            gpus.append(Gpu(name.value.decode("utf-8", "replace"), (major.value, minor.value), memory.value))
    return gpus


def cuda_header_folder() -> str | None:
    """The folder that holds `cuda_fp16.h` and `vector_types.h` for run-time compilation, or None.

    Looked for in CUDA_PATH and CUDA_HOME, in a conda environment, in the usual toolkit folder, and in the header wheels of pip.
    """
    candidates = [Path(os.environ[v]) / "include" for v in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(v)]
    if os.environ.get("CONDA_PREFIX"):
        candidates += sorted(Path(os.environ["CONDA_PREFIX"]).glob("targets/*/include"))
    candidates.append(Path("/usr/local/cuda/include"))
    for entry in sys.path:
        wheels = Path(entry or ".") / "nvidia"
        candidates += [wheels / "cuda_runtime" / "include", *sorted(wheels.glob("cu[0-9]*/include"))]
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file() and (folder / "vector_types.h").is_file():
            return str(folder)
    return None
