"""The persistent kernel's builds, timed on a card that is a queue (``fakecard``); the timeline, from stamps that are known."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from fakecard import Card

from nanoqwen.bench import persistent_parts as parts
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.prepare import Setup
from nanoqwen.bench.receipts import check_receipt
from nanoqwen.cuda.compile import KernelUse
from nanoqwen.cuda.persistent_plan import CHUNK, SETTINGS
from nanoqwen.errors import DeviceError

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: the test extra brings it on Linux")

DEPTHS = (48, 96)
CTAS, LAYERS, GHZ = 3, 6, 1.5


def stamps(us_of_stage: dict[str, float], layer_us: float) -> np.ndarray:
    """Clocks of CTAS SMs that count from different beginnings, one of them about to come round; CTA c takes c percent longer for everything."""
    names = parts.event_names()
    at = np.zeros((CTAS, LAYERS, len(names)), dtype=np.uint64)
    clocks = np.zeros((CTAS, 4), dtype=np.uint64)
    for cta in range(CTAS):
        slower = 1 + cta / 100
        began = [1 << 40, 7, (1 << 32) - 20_000][cta]
        clocks[cta] = [10**18 + cta, began, 10**18 + cta + 10**6, began + int(GHZ * 10**6)]
        for layer in range(LAYERS):
            now = layer * layer_us
            for stage, (_, last) in parts.STAGES.items():
                at[cta, layer, names.index("kLayerBegins")] = began + int(layer * layer_us * slower * GHZ * 1e3)
                now += us_of_stage[stage]
                at[cta, layer, names.index(last)] = began + int(now * slower * GHZ * 1e3)
            for name in ("kRingFull", "kInFlight"):
                at[cta, layer, names.index(name)] = int(2 * GHZ * 1e3)
    return np.concatenate([at.astype(np.uint32).ravel(), clocks.view(np.uint32).ravel()])


def test_a_timeline_is_read_from_stamps():
    planned = dict(zip(parts.STAGES, range(1, 9)))
    found = parts.timeline(stamps(planned, 36.0), CTAS, LAYERS, 2)
    assert found["ghz"] == GHZ and found["layer_us"] == pytest.approx(36 * 1.01, abs=0.01) and found["producer"] == {"no_room": 2.0, "enough_in_flight": 2.0}
    now = 0.0
    for name, us in planned.items():
        stage = found["stages"][name]
        assert (stage["begin"], stage["end"]) == pytest.approx((now * 1.01, (now + us) * 1.01), abs=0.01), name
        assert stage["us"] == pytest.approx([us, us * 1.01, us * 1.02], abs=0.01)
        now += us
    assert set(found["attention"]) == set(parts.SPLIT_STAGES) and found["plan_us"] == parts.PLAN_US


def test_the_stages_follow_each_other_and_are_stamped():
    stages = list(parts.STAGES.values())
    assert stages[0][0] == "kLayerBegins" and all(a[1] == b[0] for a, b in zip(stages, stages[1:])) and list(parts.PLAN_US) == list(parts.STAGES)
    joined = list(parts.SPLIT_STAGES.values())
    assert (joined[0][0], joined[-1][1]) == parts.STAGES["attention"] and all(a[1] == b[0] for a, b in zip(joined, joined[1:]))
    used = {event for pair in (*stages, *joined) for event in pair} | set(parts.SENT.values()) | {"kRingFull", "kInFlight"}
    assert used <= set(parts.event_names())


def test_every_variant_is_a_build_of_its_own_and_differs_from_the_shipped_one():
    differences = [({**SETTINGS, **variant.settings}, variant.split_pages) for variant in parts.VARIANTS.values()]
    assert all(differences.count(one) == 1 for one in differences)
    assert all(set(variant.settings) <= set(SETTINGS) for variant in parts.VARIANTS.values())


def test_every_variant_compiles():
    from nanoqwen.config import Dims
    from nanoqwen.cuda.constants import LaunchShape

    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    for variant in (*parts.VARIANTS.values(), parts.Variant("stamps", parts.STAMPED)):
        use = parts.compile_persistent(Dims.qwen2_5_coder_7b(), 128, LaunchShape(132), None, variant.settings, allow_spill=True).kernels["persistent"]
        assert 0 < use.registers <= 128, variant.what


@pytest.fixture
def hopper(monkeypatch):
    """The graph engine on the queue, and in place of each build the played kernel; one that takes the exchange out tells a wrong fourth id."""
    played = Card()
    module = played.install(monkeypatch)
    module.played, module.splits = played, []
    module.cupy.cuda.get_elapsed_time = lambda before, after: 48.0
    event = module.cupy.cuda.Event
    monkeypatch.setattr(event, "synchronize", lambda self: self.stream.synchronize())

    def made(engine, settings):
        runs = iter(range(1000))

        def launch(buffers, pool, tokens, *, split_pages=parts.SPLIT_PAGES):
            module.splits.append(split_pages)
            right = played._persistent(buffers, pool, tokens)

            def wrong(stream):
                at = engine.position
                right(stream)
                stream.enqueue(lambda: np.ndarray.__setitem__(buffers.told, at + 3, -1 - next(runs)))

            def now_and_then(stream):  # a racing build: every fifth chunk leaves a logit that the others do not
                right(stream)
                stream.enqueue(lambda: np.ndarray.__setitem__(buffers.logits, 5, float(next(runs) % 5 == 0)))

            if settings == parts.REFILL["neither"].settings:
                return now_and_then
            return wrong if settings.get("kNoExchange") else right

        return SimpleNamespace(
            launch=launch, story=lambda: played.story, use=KernelUse(128, 0, 8, 20) if settings.get("kHint") else KernelUse(127, 0, 0, 0),
            size={"ctas": CTAS, "units": 41, "splits": 32, "events": len(parts.event_names())},
            stamps=SimpleNamespace(get=lambda: stamps(dict.fromkeys(parts.STAGES, 3.0), 24.0)),
        )  # fmt: skip

    monkeypatch.setattr(parts, "make_kernel", made)
    monkeypatch.setattr(parts, "PAUSE_S", 0)
    return module


def test_every_build_decodes_the_tokens_of_the_graph_engine_or_the_receipt_says_so(hopper, monkeypatch):
    monkeypatch.setattr(parts, "timeline", lambda stamps, ctas, layers, splits: {"layer_us": 24.0})
    with hopper.played.open(hopper) as engine:
        results, samples = parts.measure_engine(engine, 0.01, lambda line: None, DEPTHS)
        assert engine.position == DEPTHS[-1] and len(engine._pages.table.pages) == DEPTHS[-1] // 16, "as before"
    assert list(results["variants"]) == list(samples["variants"]) == list(parts.VARIANTS) and list(results["depths"]) == ["48", "96"]
    for name, found in results["variants"].items():
        wrong = "kNoExchange" in parts.VARIANTS[name].settings
        assert (found["same_ids"], found["chains"]) == ((3, parts.RUNS + 1) if wrong else (parts.TOKENS, 1)), name
        assert found["ms"] == 1.5 and (found["spill_bytes"] > 0) == ("kHint" in found["settings"]) and len(samples["variants"][name]) == parts.RUNS
    none = {"48": 0, "96": 0}
    assert {name: found["differ"] for name, found in results["refill"].items()} == {"fence": none, "loads": none, "both": none, "neither": {"48": 12, "96": 12}}
    assert all(found["ms"] == {"48": 1.5, "96": 1.5} and found["runs"] == parts.REFILL_RUNS for found in results["refill"].values())
    assert results["launches"] == {"1": 1.5, str(CHUNK): 1.5, str(parts.TOKENS): 1.5}
    assert {variant.split_pages for variant in parts.VARIANTS.values()} == set(hopper.splits)
    assert results["depths"]["96"]["graph"] == 1.5 and results["depths"]["96"]["same_ids"] == parts.TOKENS
    assert results["depths"]["48"]["limit"] < results["depths"]["96"]["limit"] and results["timeline"]["splits"] == 3


def test_a_build_that_stands_still_is_one_line(hopper):
    with hopper.played.open(hopper) as engine:
        engine.prefill([3, 4])
        kernel = parts.make_kernel(engine, {})
        hopper.played.story = "the persistent kernel stood still"
        engine._place = lambda token, position: 1 / 0  # whatever the driver says of the launch
        with pytest.raises(DeviceError, match="stood still"):
            parts.timed(engine, kernel, 5, [0])


def test_the_receipt_has_what_the_chapter_reads(hopper, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(parts, "need_hopper", lambda what: None)
    monkeypatch.setattr(parts, "planned", lambda name: SimpleNamespace(dims=None, group_size=128))
    monkeypatch.setattr(parts, "build", lambda dims, group, sms: None)
    monkeypatch.setattr(parts, "DEPTHS", DEPTHS)
    monkeypatch.setattr(parts, "timeline", lambda stamps, ctas, layers, splits: {"layer_us": 24.0})
    monkeypatch.setattr(parts, "measure_ceiling", lambda *args: Ceiling([4000.0], 1, "played", "a queue"))
    monkeypatch.setattr(parts.card, "device_facts", lambda device: ({"name": "a queue", "sm_count": 132}, {"driver": "0"}))

    class Opened:
        def __init__(self, pack, name, device):
            assert name == "graph"
            self.engine = hopper.played.open(hopper)

        def __enter__(self):
            return self.engine, Setup(1.0)

        def __exit__(self, *exc):
            self.engine.close()

    monkeypatch.setattr(parts, "opened", Opened)
    write = parts.write_receipt
    monkeypatch.setattr(parts, "write_receipt", lambda *args, **more: write(*args, **more, folder=tmp_path))
    assert parts.main([]) == 0 and "shipped" in capsys.readouterr().out
    receipt = json.loads((tmp_path / "persistent_parts.json").read_text(encoding="utf-8"))
    assert check_receipt(tmp_path / "persistent_parts.json") == []
    assert {"kernels/persistent/persistent.cu", "nanoqwen/engines/hopper.py", "nanoqwen/cuda/persistent_plan.py"} <= set(receipt["sources"])
    assert set(receipt["results"]) == {"model", "tokens", "ceiling_gb_s", "variants", "refill", "launches", "depths", "timeline"}


def test_refusal_is_one_line_without_a_card(capsys, monkeypatch):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: "there is none")
    assert parts.main([]) == 2 and capsys.readouterr().err.count("\n") == 1
