"""Why the Hopper engines cannot run, on pretended machines: a CuPy made of a few functions stands in for the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nanoqwen import cache, doctor, engines


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """`pretend(count=1, capability=(9, 0))`: CuPy and cuda-bindings that say so; an exception in place of a value is raised."""
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # set first, so that what the code sets is undone
    monkeypatch.setattr(doctor, "cuda_trouble", lambda: None)

    def give(value):
        if isinstance(value, Exception):
            raise value
        return value

    def call(count=1, capability=(9, 0), nvrtc=(0, 13, 0)):
        properties = {"major": capability[0], "minor": capability[1], "name": b"NVIDIA Something"}
        cupy = ModuleType("cupy")
        cupy.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: give(count), getDevice=lambda: 0, getDeviceProperties=lambda device: properties)
        )
        bindings = ModuleType("cuda.bindings")
        bindings.driver, bindings.nvrtc = None, SimpleNamespace(nvrtcVersion=lambda: give(nvrtc))
        for name, module in {"cupy": cupy, "cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return engines.hopper_problem()

    return call


def test_a_hopper_card(pretend):
    assert pretend() is None


@pytest.mark.parametrize("capability", [(8, 9), (8, 0), (7, 5), (10, 0)])
def test_another_card_is_refused_before_anything_is_compiled(pretend, capability):  # H06
    said = pretend(capability=capability)
    assert "need compute capability 9.0" in said and f"this is {capability[0]}.{capability[1]} (NVIDIA Something)" in said


def test_no_card_and_a_driver_that_is_too_old(pretend, monkeypatch):  # H08
    assert pretend(count=0) == "no NVIDIA GPU is visible"
    insufficient = RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")
    assert "insufficient" in pretend(count=insufficient)
    monkeypatch.setattr(doctor, "cuda_trouble", lambda: "CuPy: brings CUDA 13.0, the driver speaks CUDA 12.4; update the driver")
    assert pretend(count=insufficient) == "CuPy: brings CUDA 13.0, the driver speaks CUDA 12.4; update the driver"


def test_libraries_that_an_extra_brings(pretend):  # H03, H04: CuPy's wheel alone has no NVRTC
    missing = RuntimeError('Failure finding "libnvrtc.so.13"\n  listdir(...)')
    said = pretend(nvrtc=missing)
    assert "cannot be loaded" in said and "nanoqwen[cuda12] or nanoqwen[cuda13]" in said and "\n" not in said
    assert "libnvrtc.so.13" in said


class Broken:
    """In front of the import system: importing cupy fails in the given way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name == "cupy":
            raise self.error


@pytest.mark.parametrize(
    "error, words",
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), ["cupy is not installed", "nanoqwen[cuda12]"]),  # H01
        (ImportError("libnvrtc.so.12: cannot open shared object file\nand much more"), ["cannot be loaded", "libnvrtc.so.12: cannot open"]),  # H03
        (PermissionError(13, "Permission denied", "/opt/site-packages/cupy/core.so"), ["cannot be loaded", "Permission denied", "nanoqwen[cuda12]"]),
    ],
)
def test_an_import_that_fails(monkeypatch, tmp_path, error, words):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "cuda_trouble", lambda: None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    said = engines.hopper_problem()
    assert all(word in said for word in words) and "\n" not in said


def test_cupys_cache_lies_in_ours_and_not_in_a_home_that_may_be_read_only(pretend, tmp_path):  # H11
    pretend()
    assert Path(os.environ["CUPY_CACHE_DIR"]) == tmp_path / "cache" / "cupy"
    chosen = {"CUPY_CACHE_DIR": "/scratch/k"}
    cache.use_for_cupy(chosen)
    assert chosen == {"CUPY_CACHE_DIR": "/scratch/k"}
    (tmp_path / "file").write_text("", encoding="utf-8")
    nowhere = {"NANOQWEN_CACHE": str(tmp_path / "file" / "below")}
    cache.use_for_cupy(nowhere)
    assert "CUPY_CACHE_DIR" not in nowhere


@pytest.mark.parametrize("chosen", ["below", "below/more", ""])
def test_a_cache_folder_that_cannot_be_made_is_named_and_nothing_is_to_be_installed(monkeypatch, tmp_path, chosen):
    """CuPy makes its folder while it is imported: the one that is chosen, or one in the home folder when no other can be written."""
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("HOME", str(file))
    monkeypatch.setenv("NANOQWEN_CACHE", str(file / "ours"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(file / chosen) if chosen else "")
    folder = file / (chosen or ".cupy/kernel_cache")
    with pytest.raises(OSError) as caught:
        os.makedirs(folder)
    monkeypatch.setattr(doctor, "cuda_trouble", lambda: None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(caught.value), *sys.meta_path])
    said = engines.hopper_problem()
    assert f"{folder} cannot be written (Not a directory)" in said and "install" not in said and "\n" not in said
    assert "set it to a folder that can" in said if chosen else "set CUPY_CACHE_DIR to one that can" in said
    assert said.startswith("CUPY_CACHE_DIR: ") == bool(chosen)
