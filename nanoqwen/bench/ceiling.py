"""The streaming-read ceiling: how many bytes a second this memory gives to a program that does nothing but read.

Measured first in every run, in the same process and on the same device as what is compared with it. On a Hopper card it is the
kernel ``kernels/setup/ceiling.cu``; elsewhere a sum by PyTorch over one large array, with the threads that the engine has,
which is what such a program can ask of this memory and not a data sheet's number.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from nanoqwen.config import repo_root
from nanoqwen.errors import DeviceError, InputError

WARMUP, RUNS = 2, 7
CPU_BYTES, GPU_BYTES = 512_000_000, 6_000_000_000
THREADS, SHARED = 512, 16 * 3 * 4096  # kernels/setup/ceiling.cu
WALKS = ("a stretch a warp", "all together")
#: Names that drivers give, and the row of book/quoted.yml with the data sheet's bandwidth of exactly that card.
_DATASHEETS = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100 SXM"}


@dataclass(frozen=True)
class Ceiling:
    """GB/s (10**9 bytes), the median of several passes over ``nbytes`` bytes, with all of them; ``how`` says what read."""

    samples: list[float]
    nbytes: int
    how: str
    device: str

    @property
    def gb_s(self) -> float:
        """The median."""
        return round(statistics.median(self.samples), 2)

    @property
    def datasheet_gb_s(self) -> float | None:
        """What the card's data sheet promises; None for any device but those that the book quotes."""
        return datasheet_gb_s(self.device)

    def as_dict(self) -> dict:
        """For a receipt's samples."""
        return {"gb_s": [round(s, 2) for s in self.samples], "bytes": self.nbytes, "how": self.how, "device": self.device}


def datasheet_gb_s(device: str) -> float | None:
    """The data sheet's GB/s of a card known by its driver's name, from the clone's ``book/quoted.yml``, else None."""
    root, row = repo_root(), _DATASHEETS.get(device)
    if row is None or root is None or not (root / "book" / "quoted.yml").is_file():
        return None
    import yaml

    return yaml.safe_load((root / "book" / "quoted.yml").read_text(encoding="utf-8"))["bandwidth_gb_s"][row]


def measure_ceiling(kind: str, device: str, nbytes: int | None = None) -> Ceiling:
    """The ceiling of ``kind`` "hopper" (the kernel), or "pytorch" on ``device`` "cpu" or "cuda:N"."""
    if kind == "hopper":
        return kernel_ceiling(device, nbytes or GPU_BYTES)
    return torch_ceiling(device, nbytes or CPU_BYTES)


def torch_ceiling(device: str, nbytes: int) -> Ceiling:
    """Sum ``nbytes`` of int64 on a PyTorch device, several times. Raises InputError when there is no room for them."""
    import torch

    where = torch.device(device)
    try:
        array = torch.ones(nbytes // 8, dtype=torch.int64, device=where)  # written: untouched pages would all be the one page of zeros
    except RuntimeError:
        raise InputError(f"the ceiling reads {nbytes / 1e6:,.0f} MB, which do not fit in memory; use a smaller --ceiling-mb") from None
    samples = []
    for run in range(WARMUP + RUNS):
        started = time.perf_counter()
        total = int(array.sum())  # .item(): a GPU has finished when the number is here
        seconds = time.perf_counter() - started
        if total != array.numel():
            raise DeviceError(f"the sum of {array.numel():,} ones on {device} is {total:,}: this memory cannot be measured")
        if run >= WARMUP:
            samples.append(array.numel() * 8 / seconds / 1e9)
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
        return Ceiling(samples, array.numel() * 8, "PyTorch sum of int64 on the card", name)
    threads = torch.get_num_threads()
    return Ceiling(samples, array.numel() * 8, f"PyTorch sum of int64, {threads} thread{'s' if threads != 1 else ''}", "CPU")


def kernel_ceiling(device: str, nbytes: int) -> Ceiling:
    """Read ``nbytes`` of pseudo-random words with ``kernels/setup/ceiling.cu``, timed by CUDA events.

    Raises DeviceError when the kernel's sum is not the one that CuPy finds: then it did not read what it claims.
    """
    import ctypes

    import cupy
    import numpy as np

    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.launch import Kernels, Launch
    from nanoqwen.engines.hopper import kernel_cache
    from nanoqwen.synthetic import stream_key, synthetic_dims

    with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        nbytes = min(nbytes, cupy.cuda.runtime.memGetInfo()[0] // 2) // 16 * 16
        if nbytes < 8 * properties["l2CacheSize"]:
            raise DeviceError(
                f"a pass over {nbytes / 1e6:.0f} MB does not see past the L2 of {properties['l2CacheSize'] / 1e6:.0f} MB; free memory, or use a larger --ceiling-mb"
            )
        shape = LaunchShape(properties["multiProcessorCount"])
        kernels = Kernels(constants_header(synthetic_dims("demo"), 128, shape), kernel_cache(), ["setup/synthetic.cu", "setup/ceiling.cu"])
        kernels.allow_shared("ceiling", SHARED)
        buffer, sums = cupy.empty(nbytes // 4, dtype=np.uint32), cupy.zeros(shape.sms * THREADS, dtype=np.uint32)
        cupy.cuda.get_current_stream().synchronize()  # a non-blocking stream does not wait for the zeros
        stream = cupy.cuda.Stream(non_blocking=True)
        key = ctypes.c_uint64(stream_key(0, "ceiling"))
        Launch(kernels, "fill_words", (1024,), 256, [buffer, ctypes.c_longlong(buffer.size), key], overlap=False)(stream)
        stream.synchronize()  # the sum below is made on another stream
        wanted = int(cupy.sum(buffer, dtype=np.uint64)) & 0xFFFFFFFF
        begin, end, walks = cupy.cuda.Event(), cupy.cuda.Event(), {}
        for together, walk in enumerate(WALKS):
            args = [buffer, ctypes.c_longlong(nbytes // 16), ctypes.c_int(together), sums]
            read = Launch(kernels, "ceiling", (shape.sms,), THREADS, args, shared=SHARED, overlap=False)
            walks[walk] = []
            for run in range(WARMUP + RUNS):
                begin.record(stream)
                read(stream)
                end.record(stream)
                end.synchronize()
                if run >= WARMUP:
                    walks[walk].append(nbytes / (cupy.cuda.get_elapsed_time(begin, end) / 1e3) / 1e9)
            found = int(cupy.sum(sums, dtype=np.uint64)) & 0xFFFFFFFF
            if found != wanted:
                raise DeviceError(f"the ceiling kernel's sum is {found}, it should be {wanted}: it did not read every word")
        walk = max(walks, key=lambda name: statistics.median(walks[name]))
        name = properties["name"].decode()
        del buffer, sums
        cupy.get_default_memory_pool().free_all_blocks()
    return Ceiling(walks[walk], nbytes, f"kernels/setup/ceiling.cu, {walk}, CUDA events", name)
