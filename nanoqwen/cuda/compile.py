"""Kernels to machine code: NVRTC, for exactly one target, cached on disk by what went in.

The target is ``sm_90a``: the architecture-specific one, because wgmma and setmaxnreg exist in no other, and only
that one, because a second plain ``sm_90`` target would reject them. Its code runs on compute capability 9.0 and
nowhere else, which is why engines check the card before they compile.

The kernels include no CUDA header, and their own headers are handed to the compiler as text. So no toolkit has to
be installed, and no folder name with odd letters can stand in the way. NVRTC needs no GPU and no driver: the tests
compile everything on any machine that has the ``cuda-bindings`` and NVRTC wheels.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.config import data_path
from nanoqwen.errors import DeviceError

ARCH = "sm_90a"
OPTIONS = (f"--gpu-architecture={ARCH}", "--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class KernelUse:
    """What one kernel takes, as ptxas reports it: registers a thread, static shared memory and local memory in bytes."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled source: the cubin and, a kernel, its use of the machine."""

    name: str
    cubin: bytes
    kernels: dict[str, KernelUse]


def kernel_sources() -> list[str]:
    """Every kernel source of the runtime, relative to ``kernels/``; lessons are compiled by their own chapters."""
    root = data_path("kernels")
    return sorted(str(p.relative_to(root)).replace(os.sep, "/") for room in ("setup", "decode", "prefill") for p in root.glob(f"{room}/*.cu"))


def compile_all(constants: str, cache: Path | None = None, sources: Sequence[str] | None = None) -> list[Binary]:
    """``compile_source`` of ``sources`` (every source of the runtime), a thread each as far as there are cores: NVRTC compiles
    outside Python's lock. In the order of ``sources``, and so is the error that is raised where several fail."""
    sources = kernel_sources() if sources is None else sources
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda source: compile_source(source, constants, cache), sources))


def compile_source(source: str, constants: str, cache: Path | None = None, written: Mapping[str, str] | None = None) -> Binary:
    """Compile ``kernels/<source>`` with ``constants`` as its ``constants.cuh`` and, by name, the text of other ``written`` headers.

    ``cache`` is a folder for finished cubins, or None. Raises DeviceError in one line when NVRTC is missing or
    refuses the source; the compiler's log then lies in a file that the line names.
    """
    root = data_path("kernels")
    text = (root / source).read_text(encoding="utf-8")
    headers = {p.name: p.read_text(encoding="utf-8") for p in sorted([*(root / "common").glob("*.cuh"), *(root / source).parent.glob("*.cuh")])} | {"constants.cuh": constants, **(written or {})}
    nvrtc = _nvrtc()
    key = hashlib.sha256()
    for part in (str(nvrtc.nvrtcVersion()[1:]), *OPTIONS, source, text, *(f"{n}\0{t}" for n, t in sorted(headers.items()))):
        key.update(part.encode("utf-8") + b"\0")
    stored = cache / f"{Path(source).stem}-{key.hexdigest()[:32]}" if cache else None
    if stored and (found := _load(stored, source)):
        return found
    cubin, log = _compile(nvrtc, source, text, headers)
    binary = Binary(source, cubin, parse_resources(log))
    if stored:
        _store(stored, cubin, log)
    return binary


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
        return nvrtc
    except Exception as e:  # ImportError, or the wheel's own error when libnvrtc cannot be found
        raise DeviceError(
            f"NVRTC, the run-time compiler, is missing ({type(e).__name__}): install the extra that matches the driver, nanoqwen[cuda12] or nanoqwen[cuda13]"
        ) from None


def _compile(nvrtc, source: str, text: str, headers: dict[str, str]) -> tuple[bytes, str]:
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode("utf-8"), source.encode("utf-8"), len(headers), [t.encode("utf-8") for t in headers.values()], [n.encode("utf-8") for n in headers]
    )
    # On a machine with a driver NVRTC keeps a cache of its own, and what comes from it comes without ptxas' report, which is
    # where the kernels' names are read. Older releases have neither that cache nor the option.
    for options in ((*OPTIONS, "--no-cache"), OPTIONS):
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode("ascii") for o in options])
        if status != nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            break
    log = _buffer(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    log_text = log.decode("utf-8", "replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="nanoqwen-nvrtc-", suffix=".log", delete=False) as file:
            file.write(log_text)
        first = next((line for line in log_text.splitlines() if "error" in line), status.name)
        raise DeviceError(f"kernels/{source} does not compile: {first.strip()}; the whole log is in {file.name}")
    cubin = _buffer(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin, log_text


def _buffer(size: int) -> bytes:
    """Bytes for NVRTC to write into. At least two: Python keeps one shared object for each bytes of length one, and a write to
    that would change every other use of it in the process."""
    return bytes(max(2, size))


def parse_resources(log: str) -> dict[str, KernelUse]:
    """Read ptxas' ``-v`` report: {kernel name: use}."""
    found: dict[str, KernelUse] = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", block).group(1)
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block).groups())
        registers = int(re.search(r"Used (\d+) registers", block).group(1))
        shared = re.search(r"(\d+) bytes smem", block)
        found[name] = KernelUse(registers, int(shared.group(1)) if shared else 0, stack, stores + loads)
    return found


def _load(stored: Path, source: str) -> Binary | None:
    try:
        log = stored.with_suffix(".log").read_text(encoding="utf-8")
        return Binary(source, stored.with_suffix(".cubin").read_bytes(), parse_resources(log))
    except OSError:
        return None


def _store(stored: Path, cubin: bytes, log: str) -> None:
    """Best effort, and whole or not at all: a cache that cannot be written costs time, nothing else."""
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        for suffix, data in ((".cubin", cubin), (".log", log.encode("utf-8"))):  # the log last: its presence completes the pair
            with tempfile.NamedTemporaryFile(dir=stored.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, stored.with_suffix(suffix))
    except OSError:
        pass
