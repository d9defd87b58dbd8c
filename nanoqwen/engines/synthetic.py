"""A synthetic model on a Hopper card, without a file: the weights are made where they are used.

Apart from that the engine is the one of ``nanoqwen.engines.hopper``.
"""

from __future__ import annotations

from nanoqwen.engines import HOPPER, check_hopper_device, fastest_hopper, hopper_problem, open_engine
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import is_planned, too_large


def open_synthetic(pack: PackFile, name: str = "graph", device: str | None = None, *, context_limit: int | None = None, seed: int = 0) -> Engine:
    """The Hopper engine of that name on the planned file ``pack`` (``synthetic_pack.planned``).

    Raises DeviceError without a Hopper card, and like ``hopper.open_on_card``.
    """
    check_hopper_device(name, device)
    if problem := hopper_problem():
        raise DeviceError(f"engine {name}: {problem}; use --engine cpu with synthetic:demo, or see `nanoqwen doctor`")
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.launch import Kernels
    from nanoqwen.cuda.weights import DeviceModel, synthesise
    from nanoqwen.engines.hopper import kernel_cache, open_on_card

    def make(shape: LaunchShape) -> DeviceModel:
        kernels = Kernels(constants_header(pack.dims, pack.group_size, shape), kernel_cache(), ["setup/synthetic.cu"])
        return synthesise(pack.dims, pack.group_size, kernels, seed)

    return open_on_card(pack, name, context_limit, make)


def open_file_or_plan(pack: PackFile, name: str | None, device: str | None, **options: object) -> Engine:
    """``open_engine`` for a file, ``open_synthetic`` for a plan. Raises InputError for a plan on an engine that needs the file."""
    if not is_planned(pack):
        return open_engine(pack, name, device, **options)
    if name is None and (device or "cuda").startswith("cuda") and hopper_problem() is None:
        name = fastest_hopper(pack.dims, pack.group_size)
    if name not in HOPPER:
        raise InputError(too_large(str(pack.path)))
    return open_synthetic(pack, name, device, context_limit=options.get("context_limit"))
