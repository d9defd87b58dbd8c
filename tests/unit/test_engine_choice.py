"""Which engine one gets, and the one line that says why it is none."""

import subprocess
import sys

import pytest

from nanoqwen.engines import ENGINES, available_engines, open_engine
from nanoqwen.errors import DeviceError, InputError


def test_the_cpu_is_the_default(packed):
    for choice in ({}, {"name": "cpu"}, {"device": "cpu"}, {"name": "reference", "device": "cpu"}):
        with open_engine(packed, **choice) as engine:
            assert engine.name == "cpu" and engine.device.startswith("CPU, ")
            assert engine.description == "FP32 weights in memory (5 MB), FP16 KV cache"


@pytest.mark.parametrize("choice", [{"device": "cuda"}, {"device": "cuda:1"}, {"name": "reference"}, {"name": "reference", "device": "cuda"}])
def test_a_gpu_that_is_not_there_never_becomes_a_cpu_run(packed, monkeypatch, choice):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="no NVIDIA GPU is visible to PyTorch") as caught:
        open_engine(packed, **choice)
    assert "\n" not in str(caught.value) and "--device cpu" in str(caught.value)


def test_a_gpu_number_that_is_not_there_is_named(packed, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"there is no device cuda:1: PyTorch sees 1 NVIDIA GPU"):
        open_engine(packed, device="cuda:1")


@pytest.mark.parametrize(
    "name, device, message",
    [
        ("fast", None, "there is no engine 'fast', use one of cpu, reference, eager, graph, persistent"),
        (None, "gpu", "there is no device 'gpu', use cpu, cuda or cuda:N"),
        (None, "", "there is no device ''"),
        (None, "cpu:0", "there is no device 'cpu:0'"),
        (None, "cuda:x", "there is no device 'cuda:x'"),
        ("cpu", "cuda", "engine cpu does not run on cuda"),
    ],
)
def test_what_is_unknown_or_contradicts_itself_is_refused(packed, name, device, message):
    with pytest.raises(InputError, match=message):
        open_engine(packed, name, device)


def test_every_engine_is_listed_with_a_reason():
    listed = available_engines()
    assert [name for name, _, _ in listed] == list(ENGINES)
    assert listed[0][1] is True and "threads" in listed[0][2]
    assert all(reason for _, _, reason in listed)


def test_importing_engines_does_not_import_torch():
    code = "import sys, nanoqwen.engines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
