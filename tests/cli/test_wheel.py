"""A wheel carries everything: built here, unpacked elsewhere, it runs without the clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    return next(out.glob("nanoqwen-*.whl"))


def test_constants_kernels_and_the_checkpoint_are_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"nanoqwen/_data/kernels/{p.relative_to(ROOT / 'kernels').as_posix()}" for p in (ROOT / "kernels").rglob("*.cu*")}
    assert kernels and kernels <= names
    assert {"nanoqwen/_data/config/nanoqwen.yaml", "nanoqwen/demo/checkpoint/model.safetensors", "nanoqwen/demo/checkpoint/tokenizer.json"} <= names
    assert not [n for n in names if n.startswith(("tests", "notebooks", "book/")) or "__pycache__" in n]


def test_it_runs_outside_the_clone(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "NANOQWEN_CACHE": str(tmp_path / "cache")}
    program = "import nanoqwen, sys; from nanoqwen.cli import main; print(nanoqwen.__file__, file=sys.stderr); sys.exit(main(['run', '--device', 'cpu']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr.splitlines()[0], "the clone was imported, not the wheel"
    assert done.stdout.startswith("def fibonacci(n):\n")
