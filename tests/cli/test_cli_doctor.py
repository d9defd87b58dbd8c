"""The doctor on pretended machines: what it finds, and the one line that mends it."""

from __future__ import annotations

import json

import pytest

from nanoqwen import doctor
from nanoqwen.doctor import Probes, diagnose, missing_extra
from nanoqwen.machine import Driver, Gpu, TorchFacts

PACKAGES = {name.lower().replace("_", "-"): "1.0" for name in doctor.REQUIRED}
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)


def machine(**changes) -> Probes:
    """A healthy laptop without a GPU; keyword arguments replace what a probe returns."""
    seen = {
        "python": (3, 12, 1), "platform": "Linux-test", "packages": PACKAGES, "torch": TorchFacts("2.9", None, False), "driver": None, "gpus": [],
        "headers": None, "cache": ("/home/me/.cache/nanoqwen", "", []), "temp_folder": "/tmp", "environ": {"HOME": "/home/me"}, "demo": (True, "here"),
        "encoding": "utf-8", "engines": [("cpu", True, "PyTorch"), ("reference", False, "no GPU"), ("graph", False, "no NVIDIA GPU is visible")],
    }
    probes = {name: (lambda value: lambda: value)(value) for name, value in {**seen, **changes}.items() if name != "folder_problem"}
    return Probes(**probes, folder_problem=changes.get("folder_problem", lambda folder: None))


def hopper(**changes) -> Probes:
    """A healthy H100 machine."""
    seen = {
        "packages": {**PACKAGES, "cupy-cuda12x": "13.6", "cuda-bindings": "12.9.1"}, "driver": Driver("550.54", 12040), "gpus": [H100],
        "torch": TorchFacts("2.9", "12.6", True), "headers": "/usr/local/cuda/include",
        "engines": [("cpu", True, ""), ("reference", True, ""), ("eager", True, ""), ("graph", True, "this Hopper GPU"), ("persistent", False, "later")],
    }  # fmt: skip
    return machine(**{**seen, **changes})


def finding(probes: Probes, name: str) -> doctor.Finding:
    found = [f for f in diagnose(probes).findings if f.name == name]
    assert len(found) == 1, [f.name for f in diagnose(probes).findings]
    return found[0]


@pytest.mark.parametrize("probes", [machine(), hopper()])
def test_a_healthy_machine_has_nothing_to_mend(probes):
    report = diagnose(probes)
    assert report.cpu_works
    assert {f.status for f in report.findings} == {"ok"}
    assert not any(f.remedy for f in report.findings)


def test_no_gpu_and_no_cupy_is_fine():  # H01
    assert "CPU engine" in finding(machine(), "NVIDIA driver").detail
    assert not any(f.name in ("CuPy", "GPU", "CUDA headers") for f in diagnose(machine()).findings)


def test_two_cupy_wheels():  # H03
    found = finding(hopper(packages={**PACKAGES, "cupy-cuda12x": "13.6", "cupy-cuda13x": "14.0"}), "CuPy")
    assert found.status == "problem"
    for word in ("cupy-cuda12x 13.6", "cupy-cuda13x 14.0", "CUDA 12.4"):
        assert word in found.detail
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in found.remedy and "nanoqwen[cuda12]" in found.remedy


def test_no_cupy_names_the_one_for_this_driver():  # H03
    assert "nanoqwen[cuda12]" in finding(hopper(packages=PACKAGES), "CuPy").remedy
    assert "nanoqwen[cuda13]" in finding(hopper(packages=PACKAGES, driver=Driver("580.95", 13000)), "CuPy").remedy


def test_a_wheel_for_another_cuda_major():  # H03
    found = finding(hopper(packages={**PACKAGES, "cupy-cuda11x": "13.6"}), "CuPy")
    assert found.status == "problem" and "CUDA 11" in found.detail and "nanoqwen[cuda12]" in found.remedy


def test_a_driver_older_than_the_runtime():  # H08
    found = finding(hopper(packages={**PACKAGES, "cupy-cuda13x": "14.0"}), "CuPy")
    assert found.status == "problem"
    assert "13.0" in found.detail and "12.4" in found.detail
    assert "580" in found.remedy and "nanoqwen[cuda12]" in found.remedy


def test_pytorch_built_for_a_newer_cuda_than_the_driver():  # H08
    found = finding(hopper(torch=TorchFacts("2.9", "13.0", False)), "PyTorch device")
    assert found.status == "warn" and "13.0" in found.detail and "12.4" in found.detail and "580" in found.remedy


@pytest.mark.parametrize("capability", [(8, 9), (8, 0), (7, 5), (10, 0)])
def test_a_gpu_that_is_not_hopper(capability):  # H06
    found = finding(hopper(gpus=[Gpu("NVIDIA Something", capability, 24_000_000_000)]), "GPU")
    assert found.status == "warn"
    assert "need 9.0" in found.detail and f"this is {capability[0]}.{capability[1]} (NVIDIA Something)" in found.detail
    assert "--device cpu" in found.remedy


def test_missing_cuda_headers_name_the_wheel_for_cupy():  # H04
    assert "nvidia-cuda-runtime-cu12" in finding(hopper(headers=None), "CUDA headers").remedy
    newer = hopper(headers=None, packages={**PACKAGES, "cupy-cuda13x": "14.0"}, driver=Driver("580.95", 13000))
    assert "nvidia-cuda-runtime " in finding(newer, "CUDA headers").remedy
    assert "our kernels need none" in finding(newer, "CUDA headers").detail
    assert not any(f.name == "CUDA headers" for f in diagnose(hopper(headers=None, packages=PACKAGES)).findings), "nothing here would use them"


def test_cuda_bindings_of_another_major_than_cupy():  # H03
    found = finding(hopper(packages={**PACKAGES, "cupy-cuda12x": "14.2", "cuda-bindings": "13.0.3"}), "cuda-bindings")
    assert found.status == "problem" and "cupy-cuda12x 14.2" in found.detail and "nanoqwen[cuda12]" in found.remedy
    assert finding(hopper(packages={**PACKAGES, "cupy-cuda12x": "14.2"}), "cuda-bindings").status == "warn"


def test_a_driver_too_old_for_the_engines():  # H08
    found = finding(hopper(driver=Driver("535.104", 12020)), "NVIDIA driver")
    assert found.status == "problem" and "12.2" in found.detail and "12.4" in found.detail and "550" in found.remedy


def test_what_the_engines_say_and_which_is_the_default():
    report = diagnose(hopper())
    assert (report.engines, report.default_engine) == (["cpu", "reference", "eager", "graph"], "graph")
    assert (diagnose(machine()).engines, diagnose(machine()).default_engine) == (["cpu"], "cpu")
    broken = hopper(engines=[("cpu", True, ""), ("graph", False, "no NVIDIA GPU can be used (out of memory)")])
    found = finding(broken, "CUDA engines")
    assert found.status == "warn" and "out of memory" in found.detail and diagnose(broken).default_engine == "cpu"
    assert finding(hopper(), "CUDA engines").detail == "this Hopper GPU"
    assert not any(f.name == "CUDA engines" for f in diagnose(hopper(gpus=[Gpu("NVIDIA A100", (8, 0), 1)])).findings)


def test_folders_that_cannot_be_written():  # H11
    chosen = {"HOME": "/home/me", "CUPY_CACHE_DIR": "/scratch/k"}
    cupy = finding(hopper(environ=chosen, folder_problem=lambda folder: "Read-only file system"), "CuPy's cache")
    assert cupy.status == "warn" and "CUPY_CACHE_DIR" in cupy.remedy and "/scratch/k" in cupy.detail
    assert finding(hopper(environ=chosen), "CuPy's cache").detail == "/scratch/k"
    assert finding(hopper(), "CuPy's cache").detail == "/home/me/.cache/nanoqwen/cupy"
    assert finding(hopper(), "Kernel cache").detail == "/home/me/.cache/nanoqwen/kernels"
    kernels = finding(hopper(cache=("", "nothing can be written", [])), "Kernel cache")
    assert kernels.status == "warn" and "NANOQWEN_CACHE" in kernels.remedy
    model = finding(machine(cache=("", "nothing can be written", [])), "Model cache")
    assert model.status == "problem" and "NANOQWEN_CACHE" in model.remedy
    assert finding(machine(cache=("/tmp/x", "", ["home cannot be written"])), "Model cache").status == "warn"


def test_cuda_trouble_is_the_first_problem_in_one_line():  # H03, H08: what a command says instead of CUDA's own words
    assert doctor.cuda_trouble(hopper()) is None and doctor.cuda_trouble(machine()) == "there is no NVIDIA driver on this machine"
    assert doctor.cuda_trouble(hopper(packages=PACKAGES)) is None, "nothing is installed, and the caller says that"
    older = doctor.cuda_trouble(hopper(packages={**PACKAGES, "cupy-cuda13x": "14.0", "cuda-bindings": "13.0.3"}))
    for word in ("cupy-cuda13x 14.0", "CUDA 13.0", "CUDA 12.4", "580", "nanoqwen[cuda12]"):
        assert word in older
    assert "\n" not in older
    double = doctor.cuda_trouble(hopper(packages={**PACKAGES, "cupy-cuda12x": "13.6", "cupy-cuda13x": "14.0", "cuda-bindings": "12.9"}))
    assert "2 CuPy packages at once" in double


def test_a_temporary_folder_with_letters():  # H14
    found = finding(hopper(temp_folder="/tmp/тест é"), "Temporary folder")
    assert found.status == "warn" and "TMPDIR" in found.remedy
    assert finding(machine(temp_folder="/tmp/тест é"), "Temporary folder").status == "ok"


def test_a_driver_without_libcuda_and_one_without_gpus():
    assert "--gpus all" in finding(machine(driver=Driver("550.54", None)), "NVIDIA driver").remedy
    assert "CUDA_VISIBLE_DEVICES" in finding(machine(driver=Driver("550.54", 12040)), "NVIDIA driver").remedy


@pytest.mark.parametrize("missing, usable", [("torch", False), ("numpy", False), ("tqdm", True)])
def test_missing_packages(missing, usable):
    packages = {name: version for name, version in PACKAGES.items() if name != missing}
    report = diagnose(machine(packages=packages, torch=None if missing == "torch" else TorchFacts("2.9", None, False)))
    assert report.cpu_works is usable
    assert any(f.name == missing and f"pip install {missing}" in f.remedy for f in report.findings)


def test_a_broken_pytorch_and_an_old_python():
    assert not diagnose(machine(torch=TorchFacts("?", None, False, "libgomp.so.1: cannot open"))).cpu_works
    assert not diagnose(machine(python=(3, 9, 1))).cpu_works
    assert finding(machine(python=(3, 14, 0)), "Python").status == "warn"


def test_a_terminal_that_is_not_utf8():
    assert finding(machine(encoding="cp1252"), "Output encoding").status == "warn"


@pytest.mark.parametrize(
    "probes, extra",
    [
        (machine(), ""),
        (hopper(packages=PACKAGES), "cuda12"),
        (hopper(packages=PACKAGES, driver=Driver("580.95", 13000)), "cuda13"),
        (hopper(packages=PACKAGES, driver=Driver("590.0", 14000)), "cuda13"),
        (hopper(packages=PACKAGES, driver=Driver("470.0", 11040)), ""),
        (hopper(), ""),  # CuPy is here already
    ],
)
def test_the_extra_that_make_asks_for(probes, extra):
    assert missing_extra(probes) == extra


def test_this_machine(run):
    page = run("doctor")
    assert page.status == 0 and page.err == ""
    assert "Python" in page.out and ("CPU engine works" in page.out or "Engines that work here: cpu, " in page.out)
    report = json.loads(run("doctor", "--json").out)
    assert report["cpu_works"] is True and report["engines"][0] == "cpu" and report["default_engine"] in report["engines"]
    assert {"name", "status", "detail", "remedy", "blocks_cpu"} == set(report["findings"][0])


def test_exit_status_when_nothing_can_run(run, monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnose(machine(torch=None, packages={})))
    page = run("doctor")
    assert page.status == 2 and "Not usable yet" in page.out


def test_the_last_line_names_the_engines(run, monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnose(hopper()))
    assert run("doctor").out.splitlines()[-1] == "Engines that work here: cpu, reference, eager, graph. The default is graph."
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnose(machine(cache=("", "nothing can be written", []))))
    assert run("doctor").out.splitlines()[-2:] == ["The CPU engine works, and is the default.", "The problems above concern the GPU or the folders named there."]
