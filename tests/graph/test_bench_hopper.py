"""The benchmarks on a Hopper card: that they run, that their numbers can be true, and that they agree with each other."""

from __future__ import annotations

import pytest

from nanoqwen.bench import suite
from nanoqwen.bench.ceiling import measure_ceiling
from nanoqwen.bench.protocol import Protocol
from nanoqwen.engines import HOPPER, hopper_problem
from nanoqwen.synthetic_pack import planned

pytestmark = pytest.mark.skipif(hopper_problem() is not None, reason=f"not measured here: {hopper_problem()}")

PROTOCOL = Protocol.standard(prompt_tokens=100, gen_tokens=20, warmup=1, runs=3)


def measure(mode: str, *engines: str, name: str = "synthetic:1.5b") -> suite.Report:
    return suite.run(suite.Request(mode, PROTOCOL, engines, ceiling_bytes=2_000_000_000), planned(name), name, tell=pytest.fail)


def test_the_ceiling_is_below_the_data_sheet_and_steady():
    found = measure_ceiling("hopper", "cuda", 4_000_000_000)
    assert found.nbytes == 4_000_000_000 and max(found.samples) < 1.1 * min(found.samples)
    if found.datasheet_gb_s:
        assert 0.8 < found.gb_s / found.datasheet_gb_s < 1


def test_end_to_end_on_all_engines():
    report = measure("e2e", *HOPPER)
    assert set(report.results["engines"]) == set(HOPPER) and all(found["same_ids_in_every_run"] for found in report.results["engines"].values())
    eager, graph, persistent = (report.results["engines"][name] for name in HOPPER)
    assert 0.95 < persistent["itl_ms"] / persistent["device_chained_ms"] < 1.1 and persistent["setup"]["capture_s"] > 0
    assert graph["itl_ms"] < eager["itl_ms"] and "device_chained_ms" not in eager
    # The less the host is in between, the faster; a stream reaches the card's own pace but for noise.
    assert graph["itl_ms"] < graph["itl_unchained_ms"] <= graph["itl_with_logits_ms"] * 1.05
    assert 0.95 < graph["itl_ms"] / graph["device_chained_ms"] < 1.1
    assert 0 < graph["mbu"] < 1 and graph["setup"]["capture_s"] > 0 and "capture_s" not in eager["setup"]
    assert {"name", "sm_count", "l2_mb"} <= report.device.keys() and "cupy" in report.versions


def test_regions_are_the_eleven():
    from nanoqwen.cuda.decode import REGIONS

    regions = measure("itl", "eager").results["engines"]["eager"]["regions_ms"]
    assert set(regions) == set(REGIONS) and all(ms > 0 for region, ms in regions.items() if region != "kernel_gap")


def test_every_streamed_matrix_stays_below_the_ceiling():
    shapes = measure("gemv", "graph", name="synthetic:7b").results["shapes"]
    assert set(shapes) == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert all(0 < s["mbu"] < 1.01 for s in shapes.values()), {name: s["mbu"] for name, s in shapes.items()}  # 1%: the ceiling's own spread


@pytest.mark.parametrize("engine", ["graph", "persistent"])
def test_depth_costs_time(engine):
    request = suite.Request("context", PROTOCOL, [engine], depths=[64, 8192], ceiling_bytes=2_000_000_000)
    found = suite.run(request, planned("synthetic:7b"), "synthetic:7b", tell=pytest.fail).results["engines"][engine]
    assert found["8192"]["itl_ms"] > found["64"]["itl_ms"]
