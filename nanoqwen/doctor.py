"""What this machine has, what is missing, and the one line that mends it.

Everything the doctor knows about the machine comes through `Probes`: small functions that look and never raise. `diagnose`
turns what they saw into findings. So a test can pretend any machine, and the report works where nothing is installed: only
the standard library is imported here.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoqwen.machine import (
    Driver,
    Gpu,
    TorchFacts,
    cuda_header_folder,
    installed_packages,
    normal_name,
    nvidia_driver,
    nvidia_gpus,
    torch_facts,
)

#: Compute capability that the kernels are compiled for. They use Hopper-only instructions, so the target is sm_90a, and
#: code for an architecture-specific target runs on that capability alone, not on newer ones.
KERNEL_CAPABILITY = (9, 0)
#: Smallest Linux driver branch for each CUDA major version, from the CUDA Toolkit release notes (minor version compatibility).
SMALLEST_DRIVER = {11: "450", 12: "525", 13: "580"}
#: CUDA major versions that pyproject.toml offers an extra for: nanoqwen[cuda12], nanoqwen[cuda13].
CUDA_EXTRAS = (12, 13)
#: Oldest CUDA that the driver must speak for the CUDA engines (12040 = 12.4, driver 550), whichever the wheels are: nanoqwen/cuda/launch.py.
OLDEST_DRIVER_CUDA, OLDEST_DRIVER = 12040, "550"
PYTHON_NEEDED = ((3, 10), (3, 14))  # first supported, first not supported; pyproject.toml says the same

REQUIRED = {
    "numpy": "every command",
    "PyYAML": "every command",
    "torch": "generate, chat, run, validate",
    "tokenizers": "generate, chat, run, validate",
    "jinja2": "chat",
    "tqdm": "progress bars",
    "huggingface_hub": "packing a model by its hub name",
}

OK, WARN, PROBLEM = "ok", "warn", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `blocks_cpu` marks a problem without whose remedy nothing runs, not even on the CPU."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    blocks_cpu: bool = False


def cache_folder() -> tuple[str, str, list[str]]:
    """(folder, problem, notes) of the cache that the packed demo model goes to."""
    from nanoqwen import cache
    from nanoqwen.errors import InputError

    notes: list[str] = []
    try:
        return str(cache.cache_folder(os.environ, notes)), "", notes
    except InputError as error:
        return "", str(error), notes


def folder_problem(folder: Path) -> str | None:
    """None when `folder` can be made and written, else the reason."""
    from nanoqwen.cache import why_not_writable

    return why_not_writable(folder)


def demo_state() -> tuple[bool, str]:
    """Whether the shipped checkpoint is here, and a word about its packed copy."""
    from nanoqwen import default_model
    from nanoqwen.errors import InputError

    try:
        name = default_model.pack_name(default_model.CHECKPOINT)
        packed = default_model.cached_pack(name, os.environ)
    except InputError:
        return False, f"not in this installation ({default_model.CHECKPOINT})"
    except ModuleNotFoundError as error:  # reading a packed file needs numpy and PyYAML
        return True, f"here; its packed copy was not looked for, {error.name} is not installed"
    return True, f"packed as {packed}" if packed else "here, not packed yet; `nanoqwen run` does it in a few seconds"


def engines_here() -> list[tuple[str, bool, str]]:
    """(name, whether it can be opened here, where it runs or why it cannot) of every engine; empty when they cannot be asked."""
    try:
        from nanoqwen.engines import available_engines

        return available_engines()
    except Exception:  # a package is missing or broken: said among the packages
        return []


@dataclass(frozen=True)
class Probes:
    """How the doctor looks at the machine. Replace any field to pretend another one."""

    python: Callable[[], tuple[int, int, int]] = lambda: sys.version_info[:3]
    platform: Callable[[], str] = platform.platform
    packages: Callable[[], dict[str, str]] = installed_packages
    torch: Callable[[], TorchFacts | None] = torch_facts
    driver: Callable[[], Driver | None] = nvidia_driver
    gpus: Callable[[], list[Gpu]] = nvidia_gpus
    headers: Callable[[], str | None] = cuda_header_folder
    cache: Callable[[], tuple[str, str, list[str]]] = cache_folder
    folder_problem: Callable[[Path], str | None] = folder_problem
    temp_folder: Callable[[], str] = tempfile.gettempdir
    environ: Callable[[], dict[str, str]] = lambda: dict(os.environ)
    demo: Callable[[], tuple[bool, str]] = demo_state
    engines: Callable[[], list[tuple[str, bool, str]]] = engines_here
    encoding: Callable[[], str] = lambda: getattr(sys.stdout, "encoding", None) or "unknown"


# -------------------------------------------------------------------------------------------------------- findings


@dataclass(frozen=True)
class Report:
    """All findings, and the engines that can be opened here, the default one last."""

    findings: list[Finding]
    engines: list[str]

    @property
    def cpu_works(self) -> bool:
        return not any(f.blocks_cpu and f.status == PROBLEM for f in self.findings)

    @property
    def default_engine(self) -> str | None:
        """What runs when neither an engine nor a device is named: the fastest that is correct."""
        return self.engines[-1] if self.cpu_works and self.engines else None

    def as_dict(self) -> dict:
        return {
            "cpu_works": self.cpu_works, "engines": self.engines, "default_engine": self.default_engine, "findings": [asdict(f) for f in self.findings],
        }  # fmt: skip


def diagnose(probes: Probes = Probes()) -> Report:
    """Look at everything and return the findings, machine first, then packages, GPU, folders."""
    packages = probes.packages()
    driver, gpus = probes.driver(), probes.gpus()
    engines = probes.engines()
    findings = [*_python(probes), *_packages(packages), *_torch(probes.torch(), driver, gpus)]
    findings += [*_driver(driver, gpus), *_gpus(gpus)]
    if driver or gpus:
        findings += [*_cupy(packages, driver), *_bindings(packages, driver), *_headers(probes.headers(), packages, driver)]
        findings += [*_hopper(engines, gpus), *_kernel_cache(probes), *_cupy_cache(probes)]
    findings += [*_cache(probes), *_temp(probes, bool(gpus)), *_demo(probes), *_encoding(probes)]
    return Report(findings, [name for name, works, _ in engines if works])


def _python(probes: Probes) -> Iterator[Finding]:
    version = probes.python()
    shown = ".".join(map(str, version))
    first, beyond = PYTHON_NEEDED
    if tuple(version[:2]) < first:
        yield Finding("Python", PROBLEM, shown, f"install Python {first[0]}.{first[1]} or newer", blocks_cpu=True)
    elif tuple(version[:2]) >= beyond:
        yield Finding("Python", WARN, f"{shown}, tested up to {beyond[0]}.{beyond[1] - 1}", "use a tested version if something fails")
    else:
        yield Finding("Python", OK, shown)
    yield Finding("Platform", OK, probes.platform())


def _packages(packages: dict[str, str]) -> Iterator[Finding]:
    for name, used_by in REQUIRED.items():
        version = packages.get(normal_name(name))
        if version:
            yield Finding(name, OK, version)
        else:
            optional = name in ("tqdm", "huggingface_hub")
            yield Finding(name, WARN if optional else PROBLEM, f"not installed; needed by {used_by}", f"pip install {name}",
                          blocks_cpu=not optional)


def _torch(facts: TorchFacts | None, driver: Driver | None, gpus: list[Gpu]) -> Iterator[Finding]:
    if facts is None:
        return  # already said by _packages
    name = "PyTorch device"
    speaks = driver.cuda if driver else None
    built = _cuda_number(facts.cuda)
    if facts.error:
        yield Finding(name, PROBLEM, f"importing torch fails: {facts.error}", "pip install --force-reinstall torch", blocks_cpu=True)
    elif facts.sees_gpu:
        yield Finding(name, OK, f"built for CUDA {facts.cuda}, sees the GPU")
    elif gpus and built is None:
        yield Finding(name, WARN, "a CPU build: --device cuda cannot work with it", "install a CUDA build of PyTorch (pytorch.org/get-started)")
    elif gpus and speaks and built // 1000 > speaks // 1000:
        yield Finding(name, WARN, f"built for CUDA {facts.cuda}, the driver speaks CUDA {_cuda(speaks)}: sees no GPU",
                      f"update the driver to {SMALLEST_DRIVER.get(built // 1000, 'a newer branch')} or newer, or install PyTorch "
                      f"built for CUDA {_cuda(speaks)} or older")
    elif gpus:
        yield Finding(name, WARN, f"built for CUDA {facts.cuda}, sees no GPU", "check CUDA_VISIBLE_DEVICES, then reinstall PyTorch")
    else:
        yield Finding(name, OK, "CPU" + (f" (built for CUDA {facts.cuda})" if facts.cuda else ""))


def _driver(driver: Driver | None, gpus: list[Gpu]) -> Iterator[Finding]:
    if driver is None:
        yield Finding("NVIDIA driver", OK, "none: everything runs on the CPU engine")
    elif driver.cuda is None:
        yield Finding("NVIDIA driver", WARN, f"{driver.version}, but libcuda cannot be loaded",
                      "in a container, start it with the NVIDIA runtime (--gpus all)")
    else:
        shown = f"{driver.version or 'version unknown'}, speaks CUDA up to {_cuda(driver.cuda)}"
        if gpus and CUDA_EXTRAS[0] * 1000 <= driver.cuda < OLDEST_DRIVER_CUDA:
            yield Finding("NVIDIA driver", PROBLEM, f"{shown}, the CUDA engines need {_cuda(OLDEST_DRIVER_CUDA)}", f"update the driver to {OLDEST_DRIVER} or newer")
        elif gpus:
            yield Finding("NVIDIA driver", OK, shown)
        else:
            yield Finding("NVIDIA driver", WARN, f"{shown}, but shows no GPU", "check CUDA_VISIBLE_DEVICES and nvidia-smi")


def _gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    need = ".".join(map(str, KERNEL_CAPABILITY))
    for gpu in gpus:
        have = ".".join(map(str, gpu.capability))
        detail = f"{gpu.name}, compute capability {have}, {gpu.memory_bytes / 1e9:.0f} GB"
        if gpu.capability == KERNEL_CAPABILITY:
            yield Finding("GPU", OK, detail)
        else:
            yield Finding("GPU", WARN, f"{detail}: the CUDA kernels need {need} (sm_90a), this is {have} ({gpu.name})",
                          "use --device cpu, or --device cuda with the PyTorch engine (--engine reference)")


def cupy_wheels(packages: dict[str, str]) -> list[str]:
    """Installed distributions that bring the module `cupy`; exactly one may be installed."""
    return sorted(name for name in packages if name == "cupy" or re.fullmatch(r"cupy-(cuda\d+x?|rocm-.*)", name))


def fitting_extra(driver: Driver | None) -> str:
    """The extra of this package whose CuPy the driver can run ("cuda12"); the oldest where the driver does not say."""
    major = driver.cuda // 1000 if driver and driver.cuda else CUDA_EXTRAS[0]
    return f"cuda{min(max(major, CUDA_EXTRAS[0]), CUDA_EXTRAS[-1])}"


def missing_extra(probes: Probes = Probes()) -> str:
    """The extra to install so that this machine's GPU can be used, "" when there is no usable driver or CuPy is here."""
    driver = probes.driver()
    if driver is None or (driver.cuda or 0) // 1000 < CUDA_EXTRAS[0] or cupy_wheels(probes.packages()):
        return ""
    return fitting_extra(driver)


def cuda_trouble(probes: Probes = Probes()) -> str | None:
    """What keeps CUDA from working, and the remedy, in one line, as far as driver and packages tell; else None."""
    packages, driver = probes.packages(), probes.driver()
    if driver is None:
        return "there is no NVIDIA driver on this machine"
    if not cupy_wheels(packages):
        return None
    wrong = [f for f in (*_driver(driver, probes.gpus()), *_cupy(packages, driver), *_bindings(packages, driver)) if f.status == PROBLEM]
    return f"{wrong[0].name}: {wrong[0].detail}; {wrong[0].remedy}" if wrong else None


def _cupy(packages: dict[str, str], driver: Driver | None) -> Iterator[Finding]:
    """CuPy's wheels are named after the CUDA major version they are built for: it must be one the driver speaks."""
    wheels = cupy_wheels(packages)
    speaks = driver.cuda if driver else None
    major = speaks // 1000 if speaks else None
    oldest = CUDA_EXTRAS[0]
    install = f"pip install 'nanoqwen[{fitting_extra(driver)}]'"
    if major and major < oldest:
        yield Finding("CuPy", PROBLEM, f"the driver speaks CUDA {_cuda(speaks)}, the CUDA engines need {oldest}.0",
                      f"update the driver to {SMALLEST_DRIVER[oldest]} or newer, then {install}")
        return
    if not wheels:
        yield Finding("CuPy", WARN, f"not installed, the CUDA engines need it; the driver speaks CUDA {_cuda(speaks)}", install)
        return
    shown = ", ".join(f"{name} {packages[name]}" for name in wheels)
    replace = f"pip uninstall -y {' '.join(wheels)}, then {install}"
    match = re.match(r"cupy-cuda(\d{2})", wheels[0])
    runtime = int(match.group(1)) if match else None  # None: built from source, or for another vendor
    if len(wheels) > 1:
        yield Finding("CuPy", PROBLEM, f"{len(wheels)} CuPy packages at once ({shown}), one is right; the driver speaks CUDA {_cuda(speaks)}", replace)
    elif runtime and major and runtime > major:
        yield Finding("CuPy", PROBLEM, f"{shown} brings CUDA {runtime}.0, the driver speaks CUDA {_cuda(speaks)}",
                      f"update the driver to {SMALLEST_DRIVER.get(runtime, 'a newer branch')} or newer, or take the wheel for the "
                      f"older CUDA: {replace}")
    elif runtime and runtime < oldest:
        yield Finding("CuPy", PROBLEM, f"{shown} brings CUDA {runtime}, the kernels need CUDA {oldest} or newer (sm_90a)", replace)
    else:
        yield Finding("CuPy", OK, f"{shown}, the driver speaks CUDA {_cuda(speaks)}")


def _bindings(packages: dict[str, str], driver: Driver | None) -> Iterator[Finding]:
    """The engines reach NVRTC and the driver through cuda-bindings, whose major version must be CuPy's."""
    install = f"pip install 'nanoqwen[{fitting_extra(driver)}]'"
    version = packages.get("cuda-bindings")
    if version is None:
        yield Finding("cuda-bindings", WARN, "not installed, the CUDA engines need it", install)
        return
    wheels = [match for name in cupy_wheels(packages) if (match := re.match(r"cupy-cuda(\d{2})", name))]
    if len(wheels) == 1 and wheels[0].group(1) != version.partition(".")[0]:
        yield Finding("cuda-bindings", PROBLEM, f"{version} beside {wheels[0].string} {packages[wheels[0].string]}: two CUDA versions in one process", install)
    else:
        yield Finding("cuda-bindings", OK, version)


def _headers(folder: str | None, packages: dict[str, str], driver: Driver | None) -> Iterator[Finding]:
    """Our kernels include no CUDA header. CuPy's own small ones, which copy and re-tile while a model is loaded, do."""
    if folder:
        yield Finding("CUDA headers", OK, folder)
    elif cupy_wheels(packages):
        old = any(name.startswith("cupy-cuda12") for name in packages) or not (driver and driver.cuda and driver.cuda >= 13000)
        wheel = "nvidia-cuda-runtime-cu12" if old else "nvidia-cuda-runtime"
        yield Finding("CUDA headers", WARN, "not found in the usual places; our kernels need none, CuPy's own do",
                      f"pip install {wheel} if CuPy cannot compile (the extra cuda{12 if old else 13} brings it)")


def _hopper(engines: list[tuple[str, bool, str]], gpus: list[Gpu]) -> Iterator[Finding]:
    """What the engines themselves say, last: by now everything that can be missing has a finding of its own."""
    for name, works, why in engines:
        if name == "graph" and any(gpu.capability == KERNEL_CAPABILITY for gpu in gpus):
            yield Finding("CUDA engines", OK if works else WARN, why, "" if works else "mend what is named above; until then the CPU engine runs")


def _kernel_cache(probes: Probes) -> Iterator[Finding]:
    """Where nanoqwen/engines/hopper.py keeps compiled kernels: a folder below the one of packed models."""
    folder, problem, _ = probes.cache()
    if problem:
        yield Finding("Kernel cache", WARN, "none, so each start compiles every kernel again", "set NANOQWEN_CACHE to a folder that can be written")
    else:
        yield Finding("Kernel cache", OK, str(Path(folder) / "kernels"))


def _cupy_cache(probes: Probes) -> Iterator[Finding]:
    """CuPy's own compiled kernels: beside ours (nanoqwen/cache.py), or where CUPY_CACHE_DIR says, and then it must be writable."""
    chosen, (folder, problem, _) = probes.environ().get("CUPY_CACHE_DIR"), probes.cache()
    if chosen and (reason := probes.folder_problem(Path(chosen))):
        yield Finding("CuPy's cache", WARN, f"{chosen} cannot be written ({reason})", "set CUPY_CACHE_DIR to a folder that can, or unset it")
    elif chosen or not problem:
        yield Finding("CuPy's cache", OK, chosen or str(Path(folder) / "cupy"))


def _cache(probes: Probes) -> Iterator[Finding]:
    folder, problem, notes = probes.cache()
    if problem:
        yield Finding("Model cache", PROBLEM, problem, "set NANOQWEN_CACHE to a folder that can be written")
    elif notes:
        yield Finding("Model cache", WARN, notes[0], "set NANOQWEN_CACHE to a folder that can be written")
    else:
        yield Finding("Model cache", OK, folder)


def _temp(probes: Probes, has_gpu: bool) -> Iterator[Finding]:
    try:
        folder = probes.temp_folder()
    except OSError as error:
        yield Finding("Temporary folder", PROBLEM, str(error), "set TMPDIR to a folder that can be written")
        return
    if has_gpu and not folder.isascii():
        yield Finding("Temporary folder", WARN, f"{folder} holds letters outside ASCII, which some CUDA compilers cannot open",
                      "set TMPDIR to a plain path if a kernel does not compile")
    else:
        yield Finding("Temporary folder", OK, folder)


def _demo(probes: Probes) -> Iterator[Finding]:
    here, detail = probes.demo()
    if here:
        yield Finding("Embedded checkpoint", OK, detail)
    else:
        yield Finding("Embedded checkpoint", WARN, detail, "install nanoqwen again; commands with a FILE work without it")


def _encoding(probes: Probes) -> Iterator[Finding]:
    encoding = probes.encoding()
    if encoding.lower().replace("-", "") == "utf8":
        yield Finding("Output encoding", OK, encoding)
    else:
        yield Finding("Output encoding", WARN, f"{encoding}: characters outside it are shown as backslash escapes",
                      "set PYTHONIOENCODING=utf-8 if your terminal can show it")


def _cuda(number: int | None) -> str:
    """12040 -> "12.4", the way the driver counts."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "unknown"


def _cuda_number(text: str | None) -> int | None:
    """ "12.4" -> 12040; None for a build without CUDA."""
    major, _, minor = (text or "").partition(".")
    return int(major) * 1000 + int(minor or 0) * 10 if major.isdigit() and (minor or "0").isdigit() else None


if __name__ == "__main__":  # `python -m nanoqwen.doctor` is `nanoqwen doctor`
    from nanoqwen.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
