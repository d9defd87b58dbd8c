"""What conftest.py promises the tests holds in this process and in those of pytest-xdist."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
INNER = """
import os, signal, subprocess, sys

def test_inner():
    assert sys.flags.warn_default_encoding == {flag}
    child = "import signal, sys; print(sys.flags.warn_default_encoding, signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert done.stdout == "0 True\\n"
    assert ("PYTEST_XDIST_WORKER" in os.environ) == {worker}
"""


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("processes", [0, 1])
def test_files_without_an_encoding_are_told_and_ctrl_c_reaches_what_tests_start(processes, flag, tmp_path):
    """Started as a script's `&` starts it, with SIGINT ignored."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_inner.py").write_text(INNER.format(flag=flag, worker=bool(processes)), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONWARN"))} | {"PYTHONPATH": str(CONFTEST.parents[1])}
    command = [sys.executable, *["-X", "warn_default_encoding"] * flag, "-m", "pytest", "-q", "-n", str(processes), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
