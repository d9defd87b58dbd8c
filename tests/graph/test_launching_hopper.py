"""Ways to launch a step on a Hopper card: the numbers of chapter 06's receipt can be true."""

from __future__ import annotations

import pytest

from nanoqwen.bench import launching
from nanoqwen.bench.prepare import opened
from nanoqwen.bench.protocol import Protocol
from nanoqwen.engines import hopper_problem
from nanoqwen.lessons import launching as lesson
from nanoqwen.synthetic_pack import planned

pytestmark = pytest.mark.skipif(hopper_problem() is not None, reason=f"not measured here: {hopper_problem()}")

PROTOCOL = Protocol.standard(prompt_tokens=100, gen_tokens=64, warmup=1, runs=3)


def test_kernels_wait_for_each_other_and_overlap_only_where_they_may():
    card = lesson.Card()
    serial, overlap = (lesson.stages(card, may) for may in (False, True))  # raises when a CTA was released too early
    for before, after in zip(serial, serial[1:]):
        assert min(cta[0] for cta in after) > max(cta[3] for cta in before) - lesson.SKEW_NS
    assert any(min(cta[0] for cta in after) < max(cta[3] for cta in before) for before, after in zip(overlap, overlap[1:]))
    assert max(cta[3] for cta in overlap[-1]) < max(cta[3] for cta in serial[-1])


def test_an_empty_kernel_costs_most_when_it_is_waited_for():
    us, whole = lesson.floors(lesson.Card())
    assert set(us) == set(lesson.FLOORS) and 0 < us["graph"] < us["waits"] and us["host"] < us["waits"] < 1000 and 0 < whole < 1000


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_waits_cost_and_chains_do_not(name):
    with opened(planned("synthetic:1.5b"), name, None) as (engine, _):
        results, _ = launching.engine_results(engine, PROTOCOL, 16)
    ms = results["ms"]
    assert set(ms) == set(launching.VARIANTS[name]) and min(ms.values()) > 0
    assert ms["chained"] < 1.05 * ms["patched_awaited"]
    if name == "eager":
        assert ms["chained"] < ms["waits"] and ms["chained"] < ms["allocates"] and 0 < results["host_ms"] < ms["waits"]
        assert sum(region["ms"] for region in results["regions"].values()) > 0
