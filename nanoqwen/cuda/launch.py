"""Modules, kernels and launches, straight on the driver.

A decode step is a few hundred launches with arguments that never change (what changes lives in device memory), so
a ``Launch`` packs its arguments once and its ``__call__`` is a single driver call. The driver is asked through
``cuda.bindings`` because two things are needed that CuPy's kernels do not offer: the programmatic launch attribute,
and a call that costs the host little enough for an honest eager engine.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path

import cupy
import numpy as np
from cuda.bindings import driver

from nanoqwen.cuda.compile import Binary, KernelUse, compile_all
from nanoqwen.errors import DeviceError


def check(result: tuple) -> object:
    """The value of a driver call; DeviceError naming the driver's error when it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver reports {driver.cuGetErrorName(status)[1].decode()}")
    return values[0] if values else None


def load_now(function: object) -> None:
    """Have the driver load a function's code at once, not lazily inside a stream capture."""
    try:
        check(driver.cuFuncLoad(function))
    except RuntimeError:  # how cuda.bindings says that the driver lacks a function; this one came with CUDA 12.4
        raise DeviceError("the NVIDIA driver is older than CUDA 12.4, which the engines need; update it to 550 or newer, or use --engine cpu") from None


def is_busy(stream: cupy.cuda.Stream) -> bool:
    """Whether work on ``stream`` is yet to be done. Raises DeviceError when something on it has failed."""
    status = driver.cuStreamQuery(stream.ptr)[0]
    if status == driver.CUresult.CUDA_ERROR_NOT_READY:
        return True
    check((status,))
    return False


class Kernels:
    """Every kernel of one model on one card: ``kernels["gemv_qkv"]`` is a driver function handle."""

    def __init__(self, constants: str, cache: Path | None, sources: Sequence[str] | None = None) -> None:
        cupy.cuda.runtime.free(0)  # creates CuPy's context, the one that the driver calls below then use
        self.binaries: list[Binary] = compile_all(constants, cache, sources)
        self.use: dict[str, KernelUse] = {}
        self._modules = []
        self._functions: dict[str, object] = {}
        for binary in self.binaries:
            image = np.frombuffer(binary.cubin, dtype=np.uint8)
            module = check(driver.cuModuleLoadData(image.ctypes.data))
            self._modules.append(module)
            for name, use in binary.kernels.items():
                function = check(driver.cuModuleGetFunction(module, name.encode("ascii")))
                load_now(function)
                self._functions[name], self.use[name] = function, use

    def __getitem__(self, name: str) -> object:
        return self._functions[name]

    def allow_shared(self, name: str, nbytes: int) -> None:
        """Let a kernel have ``nbytes`` of dynamic shared memory (the default limit is 48 KiB)."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._functions[name], attribute, nbytes))


def launch_config(grid: tuple[int, ...], threads: int, shared: int, overlap: bool, cooperative: bool = False) -> driver.CUlaunchConfig:
    """How a kernel is launched, as the driver wants to be told; ``overlap`` sets the programmatic attribute, ``cooperative`` the one that has
    all CTAs resident together or the launch refused. A launch has at most one of them."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    if overlap or cooperative:
        attribute = driver.CUlaunchAttribute()
        if cooperative:
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        else:
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


# [launch]
class Launch:
    """One kernel with its grid and its arguments, ready to go.

    ``args`` are CuPy arrays (passed as pointers), or ctypes values. ``overlap`` sets the programmatic attribute: the
    kernel may start while the one before it drains, and must call ``wait_for_previous_kernel`` before it reads results.
    ``cooperative``: all CTAs of the kernel are on the card together, or the launch is refused.
    """

    def __init__(
        self, kernels: Kernels, name: str, grid: tuple[int, ...], threads: int, args: Sequence, *, region: str = "", shared: int = 0, overlap: bool = True,
        cooperative: bool = False,
    ) -> None:
        self.name, self.region = name, region or name
        self._function = kernels[name]
        self._keep = [a for a in args if isinstance(a, cupy.ndarray)]  # the arrays must outlive the launch
        self._values = [ctypes.c_uint64(a.data.ptr) if isinstance(a, cupy.ndarray) else ctypes.c_uint64(0) if a is None else a for a in args]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))
        self._shape = grid, threads, shared
        self._config = launch_config(*self._shape, overlap, cooperative)

    def serial(self) -> Launch:
        """The same launch without the programmatic attribute: it starts when the kernel before it has finished."""
        other = copy.copy(self)
        other._config = launch_config(*self._shape, False)
        return other

    def resize(self, grid: tuple[int, ...]) -> None:
        """Launch with another grid from now on."""
        self._shape = grid, *self._shape[1:]
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]

    def __call__(self, stream: cupy.cuda.Stream) -> None:
        """Launch on ``stream``; returns at once."""
        self._config.hStream = stream.ptr
        status = driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(self._pointers), 0)[0]
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"kernel {self.name} cannot be launched: {driver.cuGetErrorName(status)[1].decode()}")
# [/launch]
