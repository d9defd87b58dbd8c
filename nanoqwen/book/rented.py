"""The tables of the page "Run it on a rented H100": what a step takes, and what `nanoqwen doctor` says when something is wrong.

The doctor's lines are not copied: it is asked about machines that it is told to imagine.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nanoqwen.book.display import Table, table
from nanoqwen.book.facts import facts, quoted
from nanoqwen.book.receipts import Receipt, available, receipt
from nanoqwen.book.sizes import download_minutes
from nanoqwen.book.source import book_root
from nanoqwen.doctor import (
    CUDA_EXTRAS,
    KERNEL_CAPABILITY,
    OLDEST_DRIVER,
    OLDEST_DRIVER_CUDA,
    REQUIRED,
    SMALLEST_DRIVER,
    Finding,
    Probes,
    diagnose,
    fitting_extra,
)
from nanoqwen.machine import Driver, Gpu, TorchFacts, normal_name

_H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)
_PACKAGES = {**{normal_name(name): "1.0" for name in REQUIRED}, "cupy-cuda12x": "14.2.0", "cuda-bindings": "12.9.10"}

#: A rented machine on which all is well.
SOUND = Probes(
    python=lambda: (3, 12, 3),
    platform=lambda: "Linux",
    packages=lambda: dict(_PACKAGES),
    torch=lambda: TorchFacts("2.13.0", "12.9", True),
    driver=lambda: Driver("570.86.15", 12080),
    gpus=lambda: [_H100],
    headers=lambda: "found",
    cache=lambda: ("found", "", []),
    folder_problem=lambda folder: None,
    temp_folder=lambda: "temporary",
    environ=dict,
    demo=lambda: (True, "here"),
    engines=lambda: [("cpu", True, ""), ("reference", True, ""), ("graph", True, "")],
    encoding=lambda: "utf-8",
)


def _packages(**changes: str | None):
    """The packages of a sound machine with some in another version (None: absent). Dashes of names are underscores here."""
    changed = {name.replace("_", "-"): version for name, version in changes.items()}
    return lambda: {name: version for name, version in {**_PACKAGES, **changed}.items() if version is not None}


#: (symptom, the machine, the finding that tells): each is a sound machine with one thing wrong.
WRONG: tuple[tuple[str, Probes, str], ...] = (
    ("`nvidia-smi` is not found", replace(SOUND, driver=lambda: None, gpus=list), "NVIDIA driver"),
    ("in a container: the driver is there, its library is not", replace(SOUND, driver=lambda: Driver("570.86.15", None), gpus=list), "NVIDIA driver"),
    ("the driver is there, the card is not", replace(SOUND, gpus=list), "NVIDIA driver"),
    ("an old image: the driver is older than the engines need", replace(SOUND, driver=lambda: Driver("535.183.01", 12020)), "NVIDIA driver"),
    ("the card is not a Hopper", replace(SOUND, gpus=lambda: [Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85_000_000_000)]), "GPU"),
    ("`--engine graph` says that CuPy is missing", replace(SOUND, packages=_packages(cupy_cuda12x=None)), "CuPy"),
    ("CuPy is there and CUDA calls fail", replace(SOUND, packages=_packages(cupy_cuda12x=None, cupy_cuda13x="14.2.0", cuda_bindings="13.5.0")), "CuPy"),
    ("two sets of wheels were installed", replace(SOUND, packages=_packages(cupy_cuda13x="14.2.0")), "CuPy"),
    ("the bindings belong to another CUDA", replace(SOUND, packages=_packages(cuda_bindings="13.5.0")), "cuda-bindings"),
    ("the first copy to the card fails to compile", replace(SOUND, headers=lambda: None), "CUDA headers"),
    ("PyTorch sees no card", replace(SOUND, torch=lambda: TorchFacts("2.13.0+cpu", None, False)), "PyTorch"),
    ("every start compiles again", replace(SOUND, cache=lambda: ("", "no folder for the cache can be written", [])), "Kernel cache"),
)


def doctor_says(machine: Probes, name: str) -> Finding:
    """The finding called ``name`` on that machine. Raises ValueError when the doctor says there what it says of a sound one."""
    usual = diagnose(SOUND).findings
    found = [f for f in diagnose(machine).findings if f not in usual and f.name.startswith(name)]
    if not found:
        raise ValueError(f"the doctor has nothing to say about {name!r} there")
    return found[0]


def symptoms() -> Table:
    """What is wrong, the doctor's line, the doctor's remedy."""
    rows = []
    for words, machine, name in WRONG:
        finding = doctor_says(machine, name)
        remedy = f"`{finding.remedy}`" if finding.remedy else "take a machine with a card"
        rows.append((words, f"`{finding.name}: {finding.detail}`", remedy))
    return table(rows, head=["What you see", "What `nanoqwen doctor` says", "What mends it"])


def expect() -> Table:
    """The steps of the page with what each takes, from arithmetic and receipts."""
    known, gguf = facts(), quoted()["gguf"]["gb"]
    line = "computed, a line that delivers 1 Gbit/s"
    load, e2e, pack = (_receipt(name) for name in ("load", "e2e", "pack"))
    graph = e2e.results["engines"].get("graph") if e2e else None
    rows = [
        ("download the checkpoint", f"{known['gb-checkpoint']} GB", f"{known['minutes-checkpoint']} min", line),
        ("pack it", f"{known['gb-pack-file']} GB written", _of(pack, lambda r: f"{r['seconds_for_7b_at_this_rate']:.0f} s"), _where(pack)),
        ("open it, nothing compiled yet", f"{known['gb-card']} GB on the card", _of(load, lambda r: f"{r['all_s']['cold']:.1f} s"), _where(load)),
        ("open it again", "the same", _of(load, lambda r: f"{r['all_s']['warm']:.1f} s"), _where(load)),
        ("a token", f"{known['gb-per-token']} GB read", f"{graph['itl_ms']:.2f} ms" if graph else _NOT, _where(e2e if graph else None)),
        ("download the GGUF, to compare", f"{gguf} GB", f"{download_minutes(int(gguf * 1e9), 1):.1f} min", line),
    ]  # fmt: skip
    return table(rows, head=["Step", "How much", "How long", "From"])


_NOT = "not measured yet"


def _receipt(name: str) -> Receipt | None:
    return receipt(name) if name in available() else None


def _of(made: Receipt | None, show) -> str:
    return show(made.results) if made else _NOT


def _where(made: Receipt | None) -> str:
    return made.caption() if made else ""


def wheels() -> Table:
    """Driver, the CUDA it speaks, and the extra that `make run` installs there, as the doctor chooses it."""
    rows = []
    for branch, cuda in ((OLDEST_DRIVER, OLDEST_DRIVER_CUDA), (SMALLEST_DRIVER[CUDA_EXTRAS[-1]], CUDA_EXTRAS[-1] * 1000)):
        extra = fitting_extra(Driver(branch, cuda))
        rows.append((f"{branch} or newer", f"{cuda // 1000}.{cuda % 1000 // 10}", f"`nanoqwen[{extra}]`", ", ".join(_locked(extra))))
    caption = f"Older drivers: the CPU engines run, the kernels do not. `nvidia-smi` shows the first two in its first lines. Card: compute capability {'.'.join(map(str, KERNEL_CAPABILITY))}."
    return table(rows, head=["Driver", "CUDA that it speaks", "Extra", "Brings, as locked"], caption=caption)


def _locked(extra: str) -> list[str]:
    """CuPy and the bindings in ``requirements/<extra>.txt``, for the newest Python."""
    text = (book_root() / "requirements" / f"{extra}.txt").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(cupy-cuda\d+x|cuda-bindings)(?:\[ctk\])?==(\S+)", text, re.M))  # the last line of a name wins
    return [f"`{name} {version}`" for name, version in sorted(found.items(), reverse=True)]


PARTS = {"symptoms": symptoms, "expect": expect, "wheels": wheels}


def rented_part(name: str) -> str:
    """Markdown of one part. Raises ValueError for a name that is none."""
    if name not in PARTS:
        raise ValueError(f"no part is called {name!r}; there are: {', '.join(PARTS)}")
    return PARTS[name]().markdown()
