"""The model of warps and barriers: its rules one by one, the lessons of chapter 05, and the proof that the shipped ring is right."""

from __future__ import annotations

import random
import re

import pytest

from nanoqwen.config import repo_root
from nanoqwen.book.timeline import timeline
from nanoqwen.warpmodel import (
    ARRANGEMENTS, COPY_ENGINE, FAULTS, Arrive, ArriveExpect, Copy, Kernel, Machine, Read, Sync, SyncArrive, SyncWarp, Wait, Write,
    explore, fences_only, in_branch, ring, tail_branch,
)  # fmt: skip
from nanoqwen.warpmodel.explore import Step
from nanoqwen.warpmodel.machine import Fault


def kinds(kernel: Kernel, **options) -> set[str]:
    report = explore(kernel, **options)
    assert report.complete and set(report.schedules) <= set(FAULTS)
    return set(report.schedules)


def replay(kernel: Kernel, schedule: list[Step]) -> Fault | None:
    """Take the steps of a schedule on a fresh machine; the fault of the last one, if it has one. Any step that is not allowed fails."""
    machine = Machine(kernel)
    state = machine.start()
    for step in schedule:
        if step.fault == "deadlock":
            assert not list(machine.enabled(state))
            continue
        event = next(e for e in machine.enabled(state) if machine.actor(e) == step.actor and machine.operation(e) == step.operation)
        try:
            state = machine.step(state, event)
        except Fault as fault:
            assert step is schedule[-1] and str(fault) == step.note
            return fault
    assert any(step.fault == "deadlock" for step in schedule) or machine.finished(state)
    return None


# ------------------------------------------------------------------------------------------------------------ the rules


def test_plain_memory_needs_a_barrier():
    writer, reader = [Write("x", "new")], [Read("x", "new")]
    assert kinds(Kernel("race", {"a": writer, "b": reader})) == {"early"}
    assert kinds(Kernel("ordered", {"a": [*writer, Sync()], "b": [Sync(), *reader]})) == set()


def test_syncwarp_orders_nothing_between_warps():
    assert kinds(Kernel("syncwarp", {"a": [Write("x", "new"), SyncWarp()], "b": [SyncWarp(), Read("x", "new")]})) == {"early"}


def test_named_barrier_counts_arrivals():
    """bar.arrive counts and does not wait: the writer never blocks, the reader waits for two arrivals of two."""
    kernel = Kernel("named", {"a": [Write("x", "new"), SyncArrive(1, 2)], "b": [Sync(1, 2), Read("x", "new")]})
    assert kinds(kernel) == set()
    short = Kernel("one missing", {"a": [Write("x", "new"), SyncArrive(1, 3)], "b": [Sync(1, 3), Read("x", "new")]})
    assert kinds(short) == {"deadlock"}


def test_barriers_with_different_numbers_do_not_add_up():
    assert kinds(Kernel("two numbers", {"a": [Sync(1, 2)], "b": [Sync(2, 2)]})) == {"deadlock"}
    assert kinds(Kernel("two places, one number", {"a": [SyncWarp(), Sync()], "b": [Sync()]})) == set()


def test_syncthreads_does_not_wait_for_a_warp_that_has_exited():
    kernel = Kernel("exit", {"a": [Sync()], "b": []})
    report = explore(kernel)
    assert report.proved
    assert any("barrier 0" in step.opens for step in report.clean) or report.clean[0].actor == "b"


def test_mbarrier_waits_for_arrivals_and_bytes():
    def kernel(announced: int) -> Kernel:
        return Kernel(
            "bytes",
            {"a": [ArriveExpect("m", announced), Copy("x", "new", 16, "m")], "b": [Wait("m", 0), Read("x", "new")]},
            {"m": 1},
        )

    assert kinds(kernel(16)) == set()
    assert "deadlock" in kinds(kernel(32))
    assert "in flight" in kinds(kernel(0))  # nothing announced: the phase ends with the arrival


def test_a_fresh_mbarrier_lets_parity_one_pass():
    assert kinds(Kernel("fresh", {"a": [Wait("m", 1)]}, {"m": 1})) == set()
    assert kinds(Kernel("fresh", {"a": [Wait("m", 0)]}, {"m": 1})) == {"deadlock"}


def test_a_waiter_two_phases_behind_waits_for_ever():
    """Parity is one bit: who sleeps through two phases finds the barrier as it was."""
    kernel = Kernel("lapped", {"a": [Arrive("m"), Arrive("m")], "b": [Wait("m", 0)]}, {"m": 1})
    assert kinds(kernel) == {"deadlock"}
    assert explore(kernel).clean is not None  # and if it is quick, nothing happens


def test_too_many_arrivals_are_a_fault():
    kernel = Kernel("overrun", {"a": [ArriveExpect("m", 16), ArriveExpect("m", 16), Copy("x", "new", 32, "m")]}, {"m": 1})
    assert "overrun" in kinds(kernel)


def test_a_copy_must_land_before_the_block_ends():
    assert kinds(Kernel("late", {"a": [Copy("x", "new", 16)]})) == {"late copy"}


def test_unknown_mbarrier_is_refused():
    with pytest.raises(ValueError, match="not initialised: m"):
        Kernel("typo", {"a": [Arrive("m")]})


# ------------------------------------------------------------------------------------------------------------ lesson 1: the branch


@pytest.mark.parametrize("arrangement", ["none", "join", "named"])
def test_in_branch_barrier_lets_consumers_read_what_is_not_there(arrangement):
    """The story's first version, "the others march on": true when nothing else holds them."""
    report = explore(in_branch(arrangement))
    assert set(report.schedules) == {"early", "in flight"}
    assert report.clean is not None  # with luck the bytes come first, so a test may pass


def test_in_branch_barrier_hangs_when_the_others_wait_for_what_comes_after_it():
    """The story's second version, "the GPU hangs": also true, for another kernel."""
    report = explore(in_branch("signal"))
    assert set(report.schedules) == {"deadlock"} and report.clean is None
    stuck = {step.actor: step.operation for step in report.schedules["deadlock"] if step.fault}
    assert stuck == {"producer": Sync(), "consumer 0": Wait("ready", 0), "consumer 1": Wait("ready", 0)}


def test_arrivals_of_two_branches_add_up():
    """The producer's barrier in the branch opens when the consumers arrive at theirs, which stands elsewhere."""
    report = explore(in_branch("join"))
    opened = [step for step in report.clean if "barrier 0" in step.opens]
    assert len(opened) >= 2  # after the initialisation, and the mismatched one


def test_every_arrangement_is_explained_and_others_are_refused():
    assert {name for name in ARRANGEMENTS if in_branch(name)} == {"none", "join", "named", "signal"}
    with pytest.raises(ValueError, match="there are: none, join, named, signal"):
        in_branch("elsewhere")


@pytest.mark.parametrize("tokens", range(1, 9))
def test_barrier_in_the_tails_branch_is_wrong_only_for_a_partial_page(tokens):
    """As 48 tokens are right and 49 are wrong with pages of 16."""
    report = explore(tail_branch(tokens, 2))
    assert report.complete
    assert bool(report.schedules) == (tokens % 2 == 1)
    if report.schedules:
        assert set(report.schedules) == {"early"} and report.clean is not None  # a race that never hangs: one warp is a barrier ahead


# ------------------------------------------------------------------------------------------------------------ lesson 2: what a fence orders


def test_syncwarp_and_syncthreads_do_not_wait_for_a_copy():
    """The barrier does its work: nobody reads before the copy is issued. But issued is not landed."""
    report = explore(fences_only("nobody"))
    assert set(report.schedules) == {"in flight"}
    schedule = report.schedules["in flight"]
    assert any("barrier 0" in step.opens for step in schedule) and COPY_ENGINE not in {step.actor for step in schedule}


@pytest.mark.parametrize("wait", ["producer", "everybody"])
def test_waiting_for_the_bytes_repairs_it(wait):
    assert explore(fences_only(wait)).proved


# ------------------------------------------------------------------------------------------------------------ the shipped ring


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5])
def test_ring_has_no_fault_in_any_interleaving(pages, stages):
    report = explore(ring(pages, stages, consumers=2))
    assert report.proved and report.clean is not None


@pytest.mark.parametrize("pages, stages, consumers", [(7, 3, 2), (4, 2, 3), (5, 2, 3), (4, 3, 1)])
def test_ring_wraps_and_ends_on_a_partial_round(pages, stages, consumers):
    """Seven pages in three stages for two consumers: four rounds, so a stage is used again, and the last round has one page."""
    assert explore(ring(pages, stages, consumers)).proved


@pytest.mark.parametrize(
    "broken, found",
    [
        ({"empty_barrier": False}, "overwritten"),
        ({"wait_full": False}, "in flight"),
        ({"parity_slip": 1}, "early"),
        ({"byte_slip": -4096}, "in flight"),
        ({"byte_slip": 4096}, "deadlock"),
        ({"join_barrier": False}, "overwritten"),
    ],
    ids=["no empty barrier", "no full barrier", "wrong parity", "too few bytes", "too many bytes", "no barrier before the join"],
)
def test_every_part_of_the_ring_is_needed(broken, found):
    assert found in kinds(ring(5, 2, consumers=2, **broken))


def test_ring_is_the_shipped_kernel():
    """The model follows paged_attention.cu: when the kernel's barrier calls change, this says so, and ring() must follow."""
    text = (repo_root() / "kernels/decode/paged_attention.cu").read_text(encoding="utf-8")
    calls = re.findall(r"^ *(?:if \(lane_id\(\) == 0\) )?(barrier_\w+\(.*?\)|fence_\w+\(\)|bulk_copy\(\w|__sync\w+\(\));", text, re.MULTILINE)
    calls += re.findall(r"bulk_copy\(shared\.pages", text)
    assert calls == [
        "barrier_init(&shared.full[i], 1)",
        "barrier_init(&shared.empty[i], kConsumers)",
        "fence_barrier_init()",
        "__syncthreads()",
        "barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1)",
        "fence_for_copies()",
        "barrier_arrive_expect(&shared.full[ring.stage], count * 2 * kSliceBytes)",
        "barrier_wait(&shared.full[ring.stage], ring.parity)",
        "__syncwarp()",
        "barrier_arrive(shared_address(&shared.empty[ring.stage]) + zero)",
        "__syncthreads()",
        "__syncthreads()",
        "bulk_copy(shared.pages",
        "bulk_copy(shared.pages",
    ]


# ------------------------------------------------------------------------------------------------------------ can the search be trusted?

SMALL = [ring(3, 1), ring(3, 2, byte_slip=-4096), ring(3, 1, empty_barrier=False), fences_only(), tail_branch(3), tail_branch(4)]
SMALL += [in_branch(name) for name in ARRANGEMENTS]


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.name)
def test_reduction_changes_no_verdict(kernel):
    def verdict(reduce: bool) -> set[str]:
        return {"wrong bytes" if kind in ("early", "in flight") else kind for kind in kinds(kernel, reduce=reduce)}

    assert verdict(True) == verdict(False)
    assert explore(kernel).states <= explore(kernel, reduce=False).states


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.name)
def test_schedules_can_be_replayed(kernel):
    report = explore(kernel)
    for kind, schedule in report.schedules.items():
        fault = replay(kernel, schedule)
        assert (fault is None) == (kind == "deadlock")
    if report.clean is not None:
        assert replay(kernel, report.clean) is None


def random_walk(kernel: Kernel, rng: random.Random) -> str:
    machine = Machine(kernel)
    state = machine.start()
    while events := list(machine.enabled(state)):
        try:
            state = machine.step(state, rng.choice(events))
        except Fault as fault:
            return fault.kind
    return "" if machine.finished(state) else "deadlock"


def test_random_schedules_agree_with_the_search():
    """A check that shares only the rules with the search: schedules drawn at random find faults where it did, and nowhere else."""
    rng = random.Random(0)
    assert {random_walk(ring(7, 3), rng) for _ in range(300)} == {""}
    assert {random_walk(fences_only(), rng) for _ in range(100)} == {"", "wrong read"}
    assert {random_walk(in_branch("signal"), rng) for _ in range(30)} == {"deadlock"}
    assert {random_walk(ring(5, 2, empty_barrier=False), rng) for _ in range(300)} - {"", "deadlock", "overrun"} == {"wrong read"}


def test_an_incomplete_search_proves_nothing():
    report = explore(ring(5, 3), limit=100)
    assert not report.schedules and not report.complete and not report.proved
    assert "not complete" in str(report)


# ------------------------------------------------------------------------------------------------------------ the drawing


def test_timeline_draws_and_tells_a_schedule():
    schedule = explore(in_branch("join")).schedules["in flight"]
    drawing = timeline(schedule, title="a consumer reads too early")
    assert repr(drawing) == "<figure: a consumer reads too early>"
    assert drawing.markup.count("✗") == 1 and "copy engine" in drawing.markup
    assert "Fault, in flight: a warp reads a buffer while the copy of the bytes it wants is still on its way." in drawing.markup
    assert "opens barrier 0" in drawing.markup


def test_timeline_of_a_clean_schedule_has_no_cross():
    drawing = timeline(explore(ring(2, 2)).clean, title="the ring at work")
    assert "✗" not in drawing.markup and drawing.markup.count("✓") == 4 + 3 * 2  # K and V of two pages; three warps read two sums
    assert "No fault." in drawing.markup


def test_timeline_marks_whoever_is_stuck():
    drawing = timeline(explore(in_branch("signal")).schedules["deadlock"], title="nobody moves")
    assert drawing.markup.count("✗") == 3


def test_timeline_of_nothing_is_refused():
    with pytest.raises(ValueError, match="without steps"):
        timeline([], title="nothing")
