"""The persistent decoder's ring in small: no schedule has a fault, and each way to break it is found. And its programs say what the kernel says."""

from __future__ import annotations

import re

import pytest

from nanoqwen.config import data_path
from nanoqwen.warpmodel import Copy, Wait, explore
from nanoqwen.warpmodel.persistent import PRODUCER, PUBLISHER, UNIT_BYTES, pages_in_ring, ring_of_units


def source(name: str) -> str:
    return data_path("kernels", "persistent", name).read_text(encoding="utf-8")


@pytest.mark.parametrize("hold", [1, 2])
@pytest.mark.parametrize("stages, buffers, tile_ring", [((1,), 2, 1), ((2, 1), 2, 2), ((3, 2), 2, 1), ((2, 2, 2), 3, 2), ((1, 4), 3, 2)])
def test_the_ring_holds_in_every_schedule(stages, buffers, tile_ring, hold):
    report = explore(ring_of_units(stages, buffers, tile_ring, hold))
    assert report.proved and report.clean is not None, str(report)


@pytest.mark.parametrize("buffers, ahead", [(2, 1), (3, 1), (3, 2), (5, 3), (5, 4)])
def test_a_pair_must_not_be_two_phases_ahead_of_a_landing(buffers, ahead):
    """Two pairs take units by turns, so a pair takes every second one: the ring must be longer than that and what is in flight, unless it
    brings the same pair round to the same place."""
    report = explore(ring_of_units((3, 3), buffers, hold=1, pairs=2, warps=1, ahead=ahead))
    assert report.complete and report.proved == (buffers % 2 == 0 or buffers >= 2 + ahead), str(report)
    assert report.proved or "early" in report.schedules
    assert explore(ring_of_units((3, 3), buffers, pairs=1, warps=2, ahead=min(ahead, buffers))).proved, "one pair takes every unit and cannot show it"


@pytest.mark.parametrize(
    "broken, fault",
    [({"early": True}, "overwritten"), ({"releases": 1}, "overwritten"), ({"wait_tile": False}, "overwritten"), ({"releases": 3}, "deadlock")],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_broken_ring_is_found(broken, fault):
    report = explore(ring_of_units((3, 2), **broken))
    assert report.complete and fault in report.schedules, str(report)


@pytest.mark.parametrize("buffers", [2, 3])
def test_the_tails_page_must_come_first(buffers):
    for pages in range(1, 3 * buffers):
        assert explore(pages_in_ring(pages, buffers)).proved, pages
        in_its_place = explore(pages_in_ring(pages, buffers, tail_first=False))
        assert in_its_place.complete and in_its_place.proved == (pages <= buffers), pages
    assert "deadlock" in explore(pages_in_ring(buffers + 1, buffers, tail_first=False)).schedules


def test_the_producer_never_waits_for_a_stage():
    kernel = ring_of_units((3, 2), 2)
    program = dict(zip(kernel.warps, kernel.programs))
    assert {op.mbarrier.split("[")[0] for op in program[PRODUCER] if isinstance(op, Wait)} == {"empty", "full"}
    assert [op.value for op in program[PRODUCER] if isinstance(op, Copy)] == [f"unit {n}" for n in range(5)]
    assert all("go" in [op.mbarrier for op in program[name] if isinstance(op, Wait)] for name in ("warp 0", "warp 1"))
    assert not [op for op in program[PUBLISHER] if isinstance(op, Wait) and not op.mbarrier.startswith("tile_full")]


def test_its_barriers_are_the_kernels():
    entry = source("persistent.cu")
    counts = dict(re.findall(r"barrier_init\(&s\.(?:units\[i\]\.|fixed\.)(\w+)(?:\[i\])?, ([^)]+)\)", entry))
    assert counts == {
        "full": "1", "empty": "2 * kWarpArrivals", "tile_full": "kConsumers * kWarpArrivals", "tile_empty": "kWarpArrivals", "go": "kWarpArrivals", "begun": "1",
    }  # fmt: skip
    assert "kWarpArrivals = kReadersFence ? 32 : 1" in source("plan.cuh"), "one lane arrives for its warp, but in builds for racecheck"
    kernel = ring_of_units()
    assert kernel.arrivals["full[0]"] == 1 and kernel.arrivals["empty[0]"] == kernel.arrivals["tile_full[0]"] == 2 and kernel.arrivals["go"] == 1
    plan = source("plan.cuh")
    assert "kTile = 16, kUnitBlocks = 4" in plan and UNIT_BYTES == 4 * (16 * 128 // 2 + 16 * 2)
    assert "split.last - 1 -" in source("stream.cuh"), "pages are asked for last first"
