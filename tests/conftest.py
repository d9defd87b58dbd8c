"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``.

``make test`` runs them in a few processes (pytest-xdist), a file in one of them."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from nanoqwen.machine import nvidia_driver

try:
    import fcntl
except ImportError:  # Windows, where nothing of a model is run
    fcntl = None

# Before torch is imported anywhere: the models of the tests are tiny, and on a busy machine OpenMP threads that wait for each
# other cost them many times more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `make test` asks this interpreter to name text files that are opened without an encoding; what a test starts need not (torch has some).
os.environ.pop("PYTHONWARNDEFAULTENCODING", None)
# What a script starts with & ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Processes of ``pytest -n auto``: one, this one, where there is a card, which measures what shares it."""
    return 0 if nvidia_driver() or (cores := _cores()) < 2 else min(cores, 4)


def _cores() -> int:
    """Those that this process may have."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def alone(request):
    """Tests that run programs of a model see to it that these leave no process and no folder on the machine: one of them at a time, in whichever process."""
    if "eval" not in request.path.stem or fcntl is None:
        yield
        return
    with open(Path(tempfile.gettempdir()) / "nanoqwen-tests.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file lets go
        yield
