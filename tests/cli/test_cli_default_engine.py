"""Which engine opens a model when neither an engine nor a device is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanoqwen import engines
from nanoqwen.cli.session import choose_engine
from nanoqwen.config import Dims

PACK = SimpleNamespace(dims=Dims.qwen2_5_coder_7b(), group_size=128)
ODD = SimpleNamespace(dims=replace(PACK.dims, head_dim=96), group_size=128)  # the kernels take heads of 64 and 128


@pytest.fixture
def usable(monkeypatch):
    """`usable("cpu", "graph")`: a machine where these engines work."""

    def pretend(*names: str) -> None:
        monkeypatch.setattr(engines, "available_engines", lambda: [(name, name in names, "") for name in engines.ENGINES])
        monkeypatch.setattr(engines, "hopper_problem", lambda: None if "graph" in names else "no NVIDIA GPU is visible")

    return pretend


def test_the_fastest_that_is_correct(usable):
    usable(*engines.ENGINES)
    assert choose_engine(None, None, PACK) == (engines.ENGINES[-1], None) == ("persistent", None)
    usable("cpu", "reference")
    assert choose_engine(None, None, PACK) == (None, "cuda")
    usable("cpu")
    assert choose_engine(None, None, PACK) == (None, "cpu")


def test_dimensions_that_the_persistent_kernel_does_not_take_go_to_the_next():
    """More KV heads than there are shares of its smallest matrix."""
    small = SimpleNamespace(dims=replace(PACK.dims, hidden=128, num_heads=64, num_kv_heads=64, head_dim=64, intermediate=256, vocab=512), group_size=128)
    assert engines.fastest_hopper(small.dims, 128) == "graph" and engines.fastest_hopper(PACK.dims, 128) == "persistent"


def test_dimensions_that_the_kernels_do_not_take_go_to_pytorch(usable):
    usable("cpu", "reference", "eager", "graph")
    assert choose_engine(None, None, ODD) == (None, "cuda")


def test_what_was_named_is_never_replaced(usable):
    usable("cpu", "reference", "eager", "graph")
    for named in (("cpu", None), ("eager", None), (None, "cpu"), (None, "cuda:1"), ("reference", "cuda")):
        assert choose_engine(*named, PACK) == named
    assert choose_engine("graph", None, ODD) == ("graph", None)  # and is refused when it is opened
