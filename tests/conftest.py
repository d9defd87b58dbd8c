"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``.

``make test`` runs them in a few processes (pytest-xdist). What is made once for several tests is made in one of them."""

import os
import signal
from pathlib import Path

import pytest

from nanoqwen.machine import nvidia_driver

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


def pytest_itemcollected(item):
    # xdist reads the marks before any pytest_collection_modifyitems of this folder could set them.
    if item.config.pluginmanager.hasplugin("xdist"):
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    """Tests of one group run in one process, in order: those of a file, all that look at the one built book, and all that run programs of a model, which see
    to it that these leave no process and no folder on the machine."""
    stem = Path(item.path).stem
    return "book" if {"build", "built"} & set(item.fixturenames) else "programs" if "eval" in stem else stem
