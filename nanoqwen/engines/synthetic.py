"""A synthetic model on a Hopper card, without a file: the weights are made where they are used.

Apart from that the engine is the one of ``nanoqwen.engines.hopper``.
"""

from __future__ import annotations

from nanoqwen.engines import HOPPER, hopper_problem, open_engine
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import is_planned, too_large


def open_synthetic(pack: PackFile, name: str = "graph", device: str | None = None, *, context_limit: int | None = None, seed: int = 0) -> Engine:
    """The "eager" or "graph" engine on the planned file ``pack`` (``synthetic_pack.planned``).

    Raises DeviceError without a Hopper card or with too little memory on it, InputError for dimensions that the kernels do not take.
    """
    if problem := hopper_problem():
        raise DeviceError(f"engine {name}: {problem}; use --engine cpu with synthetic:demo, or see `nanoqwen doctor`")
    import cupy

    from nanoqwen.cuda.constants import LaunchShape, check_supported, constants_header
    from nanoqwen.cuda.launch import Kernels
    from nanoqwen.cuda.memory import check_fits
    from nanoqwen.cuda.prefill import CHUNK
    from nanoqwen.cuda.weights import synthesise
    from nanoqwen.engines.hopper import HopperEngine, kernel_cache

    dims, group = pack.dims, pack.group_size
    check_supported(dims, group)
    index = int((device or "cuda").partition(":")[2] or 0)
    count = cupy.cuda.runtime.getDeviceCount()
    if index >= count:
        raise DeviceError(f"there is no device {device}: {count} NVIDIA GPU(s), counted from cuda:0")
    limit = context_limit or dims.max_position
    if limit > dims.max_position:
        raise InputError(f"a context of {limit} tokens is more than the model's {dims.max_position}; ask for that or less")
    with cupy.cuda.Device(index):
        shape = LaunchShape(cupy.cuda.runtime.getDeviceProperties(index)["multiProcessorCount"])
        check_fits(dims, group, shape, limit, min(CHUNK, limit), cupy.cuda.runtime.memGetInfo()[0], f"cuda:{index}")
        kernels = Kernels(constants_header(dims, group, shape), kernel_cache(), ["setup/synthetic.cu"])
        try:
            weights = synthesise(dims, group, kernels, seed)
            cupy.cuda.runtime.deviceSynchronize()  # the engine works on a stream of its own
            return HopperEngine(weights, name=name, cache=kernel_cache(), context_limit=limit)
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise DeviceError(f"the card has too little memory for weights, workspace and the first KV pages: {e}") from None


def open_file_or_plan(pack: PackFile, name: str | None, device: str | None, **options: object) -> Engine:
    """``open_engine`` for a file, ``open_synthetic`` for a plan. Raises InputError for a plan on an engine that needs the file."""
    if not is_planned(pack):
        return open_engine(pack, name, device, **options)
    if name is None and (device or "cuda").startswith("cuda") and hopper_problem() is None:
        name = "graph"
    if name not in HOPPER:
        raise InputError(too_large(str(pack.path)))
    return open_synthetic(pack, name, device, context_limit=options.get("context_limit"))
