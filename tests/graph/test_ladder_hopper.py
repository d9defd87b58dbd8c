"""The ladder on a Hopper GPU: every kernel and whole blocks against float64, for several shapes; and that it would notice.

`tests/unit/test_ladder_card.py` tries the ladder's own code on a card that numpy plays; here it meets the kernels.
"""

from __future__ import annotations

import dataclasses

import pytest

from nanoqwen.bench.sanitize_run import write_pack
from nanoqwen.config import Dims, load_settings
from nanoqwen.engines import HOPPER, hopper_problem, open_engine
from nanoqwen.ladder import layer, run_ladder
from nanoqwen.packfile import open_pack
from nanoqwen.synthetic import synthetic_dims
from nanoqwen.synthetic_pack import planned

if problem := hopper_problem():
    pytest.skip(f"needs a Hopper GPU: {problem}", allow_module_level=True)

from nanoqwen.ladder import card_unit
from nanoqwen.ladder.card import Card, CardBlocks

MODELS = {
    "like the embedded one": (dataclasses.replace(synthetic_dims("demo"), num_layers=2, max_position=4200), 128),
    "heads of 64, group 64, tied": (Dims(2, 448, 1024, 7, 1, 64, 1000, 1024, tied=True), 64),
    "one layer of the 7B": (dataclasses.replace(Dims.qwen2_5_coder_7b(), num_layers=1, vocab=4096, max_position=1024), 128),
}
SETTINGS = load_settings()


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def pack(request, tmp_path_factory):
    dims, group = MODELS[request.param]
    path = tmp_path_factory.mktemp("ladder") / "model.nanoqwen"
    write_pack(path, dims, group)
    with open_pack(path) as opened:
        yield opened


@pytest.fixture(params=["graph", "persistent"])
def card(pack, request):
    with open_engine(pack, request.param) as engine:
        yield Card(engine)


def failed(checks) -> list[str]:
    return [f"{check.name}: {check.value:.3g} of {check.limit:g} ({check.unit}); {check.detail}" for check in checks if not check.passed]


def test_every_kernel(pack, card):
    assert failed(card_unit.checks(pack, card, SETTINGS)) == []


def test_whole_blocks(pack, card):
    ids = [pow(7, i, 9973) % pack.dims.vocab for i in range(60)]
    assert failed(layer.checks(pack, CardBlocks(card), ids, SETTINGS)) == []


@pytest.mark.parametrize("pack", ["heads of 64, group 64, tied"], indirect=True)
@pytest.mark.parametrize("card", ["graph"], indirect=True)
def test_it_would_notice(pack, card):
    """Data that the kernels read is spoiled, one thing at a time, and the check of that kernel fails."""
    import cupy

    held, buffers = card.weights, card.buffers
    spoiled = {
        "final_norm": (held.final_norm, 7), "lm_head": (held.head, 16 * 32 + 5), "gemv_down": (held.layers[0].down.bundles, 3),
        "norm and gemv_qkv": (held.layers[0].input_norm, 20), "rope_append": (held.layers[0].k_bias, 1),
        "rope_append, position 48": (buffers.rope, 48 * pack.dims.head_dim + 2),
    }  # fmt: skip
    for kernel, (array, at) in spoiled.items():
        flat = array.reshape(-1)
        before = flat[at].copy()
        flat[at] = before ^ cupy.uint32(1 << 5) if array.dtype == "uint32" else before + 1
        cupy.cuda.runtime.deviceSynchronize()
        found = failed(card_unit.checks(pack, card, SETTINGS))
        flat[at] = before
        assert any(kernel in line for line in found), (kernel, found)


@pytest.mark.parametrize("pack", ["heads of 64, group 64, tied"], indirect=True)
@pytest.mark.parametrize("card", ["persistent"], indirect=True)
def test_it_would_notice_a_persistent_kernel_that_computes_something_else(pack, card):
    """The kernel has its own pointers: one of them is moved to another layer's norm."""
    kernel = card.engine._kernel
    before = kernel.layers.copy()
    kernel.layers[1, 5] = before[0, 5]
    card.stream.synchronize()
    kernel.layers.device.synchronize()
    found = failed(card_unit.checks(pack, card, SETTINGS))
    kernel.layers[...] = before
    kernel.layers.device.synchronize()
    assert any("persistent kernel: logits" in line for line in found) and all("persistent kernel" in line for line in found), found


@pytest.mark.parametrize("engine", HOPPER)
def test_a_model_without_a_file(engine):
    report = run_ladder(planned("synthetic:demo"), "graph", engine=engine, prompts=12, tokens=16)
    assert failed(check for tier in report.tiers[:3] for check in tier.checks) == []
    token_match, repeat = report.tiers[3].checks
    assert repeat.passed and token_match.value > 0.97, report.tiers[3].lines
