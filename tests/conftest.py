"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``.

``make test`` runs them in a few processes (pytest-xdist), a file in one of them."""

import os
import signal
import sys

import pytest

from nanoqwen.machine import nvidia_driver, usable_cores

# Before torch is imported anywhere, and for child processes too: the models of the tests are tiny, and on a busy machine OpenMP threads
# that wait for each other cost them many times more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a script starts with & ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# xdist's processes are not given this one's -X; they begin before pytest_runtestloop is called here.
ENCODING = "PYTHONWARNDEFAULTENCODING"
if sys.flags.warn_default_encoding:
    os.environ[ENCODING] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    os.environ.pop(ENCODING, None)  # what a test starts is not asked: torch opens files without an encoding


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Processes of ``pytest -n auto``: none but this one where there is a card, which measures what shares it. No more than four, since each comes to take
    a gigabyte."""
    return 0 if nvidia_driver() or usable_cores() < 2 else min(usable_cores(), 4)


@pytest.fixture
def alone(tmp_path_factory):
    """For tests that run programs of a model and look whether these left a process or a folder on the machine: one of them at a time, in whichever process."""
    fcntl = pytest.importorskip("fcntl", reason="no programs are run on this platform")
    with open(tmp_path_factory.getbasetemp().parent / "alone.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file lets go
        yield
