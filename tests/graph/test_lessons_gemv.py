"""Chapter 07's GEMVs on a Hopper card: each path within its error, two runs bit-equal, and the two ways to quantise the same."""

from __future__ import annotations

import pytest

from nanoqwen.bench import unpack_paths
from nanoqwen.config import Dims
from nanoqwen.engines import hopper_problem
from nanoqwen.lessons.gemv import PATHS, PIPES, Card, shapes

pytestmark = pytest.mark.skipif(hopper_problem() is not None, reason=f"not measured here: {hopper_problem()}")

#: (least, most) relative L2 error on standard normal activations. The least: an INT8 path as good as FP16 would not be one.
ERRORS = {
    "sign_extend": (0, 1e-6), "prmt": (1e-5, 8e-4), "bias": (1e-5, 8e-4), "tensor": (0, 2e-5), "dp4a": (3e-3, 1e-2), "dp4a_fused": (3e-3, 1e-2),
    "digits": (1e-6, 5e-5),
}  # fmt: skip


@pytest.fixture(scope="module")
def card():
    return Card(Dims.qwen2_5_coder_7b())


@pytest.mark.parametrize("name", shapes(Dims.qwen2_5_coder_7b()))
def test_every_path_on_every_projection(card, name):
    found = unpack_paths.errors(card, name)  # raises when two runs differ
    for path, error in found.items():
        least, most = ERRORS[path]
        assert least <= error <= most, (path, error)


def test_quantised_before_and_inside_are_the_same_numbers(card):
    before, inside = (path for path in PATHS if path.name.startswith("dp4a"))
    bundles, x = card.bundles(*card.weights("q"))[0], card.activations(card.dims.hidden)
    assert (card.product(before, "q", bundles, x) == card.product(inside, "q", bundles, x)).all()


def test_zeros_stay_zeros_and_one_column_is_its_weight(card):
    codes, scales = card.weights("k")
    bundles, cp = card.bundles(codes, scales)[0], card.cp
    for path in PATHS:
        assert not card.product(path, "k", bundles, cp.zeros(card.dims.hidden, dtype=cp.float16)).any(), path.name
        for column in (0, 7, 129, 3583):
            x = cp.zeros(card.dims.hidden, dtype=cp.float16)
            x[column] = 1
            exact = card.exact(codes, scales, x)
            assert float(abs(card.product(path, "k", bundles, x) - exact).max()) <= 1e-5 * float(abs(exact).max()), (path.name, column)


def test_a_loop_without_loads_is_not_slower_than_the_memory_needs(card):
    bundles, x = card.bundles(*card.weights("gate"))[0], card.activations(card.dims.hidden)
    rate = {path.name: unpack_paths.resident(card, path, bundles, x)["gb_s"] for path in PATHS}
    assert rate["sign_extend"] == min(rate.values()) and all(gb_s > 500 for gb_s in rate.values()), rate


def test_pipes_take_no_more_than_the_schedulers_start(card):
    lanes, clock = unpack_paths.pipes(card)
    assert lanes.keys() == PIPES.keys() and all(0 < rate <= 129 for rate in lanes.values()) and 500 < clock < 2500, (lanes, clock)
