"""Opening an engine to be measured: what loading, compiling and capturing cost, each on its own line and in no other number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nanoqwen.engines import HOPPER, fastest_hopper, hopper_problem, open_engine
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError
from nanoqwen.packfile import PackFile


@dataclass(frozen=True)
class Setup:
    """Seconds before the first token. ``compile_s`` and ``capture_s`` are None where nothing is compiled or captured."""

    load_s: float
    compile_s: float | None = None
    compiled: str | None = None
    capture_s: float | None = None

    def as_dict(self) -> dict:
        """For a receipt: only what took place."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(self).items() if value is not None}


def kind_of(engine: str) -> str:
    """Whose ceiling an engine is compared with: "hopper" or "pytorch"."""
    return "hopper" if engine in HOPPER else "pytorch"


def default_engine(device: str | None) -> str:
    """The fastest engine that runs here, or on ``device``."""
    if device != "cpu" and hopper_problem() is None:
        return fastest_hopper()
    return "reference" if (device or "cpu").startswith("cuda") else "cpu"


def need_hopper(what: str) -> None:
    """Raise DeviceError in one line where a measurement needs the Hopper kernels and they cannot run."""
    if problem := hopper_problem():
        raise DeviceError(f"{what}, and they cannot run here: {problem}")


@contextmanager
def opened(pack: PackFile, name: str, device: str | None, progress=None) -> Iterator[tuple[Engine, Setup]]:
    """An engine and what it cost to open. Kernels are compiled first, so that neither their time nor PyTorch's import is in ``load_s``."""
    if name not in HOPPER:
        import torch  # noqa: F401

        started = time.perf_counter()
        with open_engine(pack, name, device, progress=progress) as engine:
            yield engine, Setup(time.perf_counter() - started)
        return
    need_hopper(f"engine {name} runs hand-written kernels")
    from nanoqwen.bench.card import capture_seconds, compile_all, current, free_memory
    from nanoqwen.engines.synthetic import open_file_or_plan

    with current(device):
        compile_s, compiled = compile_all(pack.dims, pack.group_size, device, name)
        started = time.perf_counter()
        with open_file_or_plan(pack, name, device, progress=progress) as engine:
            load_s = time.perf_counter() - started
            yield engine, Setup(load_s, compile_s, compiled, capture_seconds(engine))
        del engine
        free_memory()
