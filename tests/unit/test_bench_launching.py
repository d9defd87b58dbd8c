"""Ways to launch a step, on a card that is a queue (``fakecard``): each makes the steps that it names and leaves the engine as it was."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from fakecard import DIMS, PAGE, Card, logits_of

from nanoqwen.bench import card as behind
from nanoqwen.bench import launching
from nanoqwen.bench.ceiling import Ceiling
from nanoqwen.bench.prepare import Setup
from nanoqwen.bench.protocol import Protocol
from nanoqwen.bench.receipts import check_receipt
from nanoqwen.config import Dims, data_path
from nanoqwen.lessons import launching as lesson

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: the test extra brings it on Linux")

PROTOCOL = Protocol(prompt_tokens=80, gen_tokens=64, warmup=1, runs=2)


class Spied:
    """A launch that knows its name and region, and counts."""

    def __init__(self, launch, name: str, calls: list[str]) -> None:
        self.launch, self.name, self.region, self.calls = launch, name, name, calls

    def __call__(self, stream) -> None:
        self.calls.append(self.name)
        self.launch(stream)

    def serial(self) -> Spied:
        return Spied(self.launch, f"{self.name}, serial", self.calls)


@pytest.fixture
def hopper(monkeypatch):
    """The engines on the queue; ``calls`` are launches in the order of the host, ``events`` a clock that ticks."""
    played = Card()
    module = played.install(monkeypatch)
    module.calls, module.played = [], played
    made = module.decode_launches

    def spied(*args, opens_page, draws=False):
        names = ["page_open"] * opens_page + ["body", "lm_head", "argmax"]
        return [Spied(launch, name, module.calls) for launch, name in zip(made(*args, opens_page=opens_page, draws=draws), names)]

    monkeypatch.setattr(module, "decode_launches", spied)
    runtime = module.cupy.cuda.runtime
    runtime.malloc, runtime.free = lambda nbytes: module.calls.append("malloc") or 1, lambda pointer: module.calls.append("free")
    module.cupy.cuda.get_elapsed_time = lambda before, after: 0.25
    event = module.cupy.cuda.Event
    monkeypatch.setattr(event, "synchronize", lambda self: self.stream.synchronize())
    return module


def test_every_variant_is_timed_and_leaves_no_trace(hopper):
    for name in launching.VARIANTS:
        with hopper.played.open(hopper, name) as engine:
            results, samples = launching.engine_results(engine, PROTOCOL, PAGE)
            assert list(results["ms"]) == list(samples) == list(launching.VARIANTS[name])
            assert all(len(taken) == PROTOCOL.runs and all(ms > 0 for ms in taken) for taken in samples.values()) and results["host_ms"] > 0
            position = launching.start_of(PROTOCOL, PAGE) + (PAGE // 2 if name == "eager" else 0)
            assert engine.position == position and len(engine._pages.table.pages) == -(-position // PAGE)
            assert [launch.name for launch in engine._launches[True]] == ["page_open", "body", "lm_head", "argmax"], "changed launches were taken back"
            if name == "eager":
                assert results["regions"] == {kernel: {"ms": 0.25, "launches": 1} for kernel in ("body", "lm_head", "argmax")}


@pytest.mark.parametrize("way", ["run_ahead", "page", "made_anew", "waiting", "allocating"])
def test_however_it_is_launched_a_chain_chooses_the_same_ids(hopper, way):
    with hopper.played.open(hopper, "graph" if way in ("run_ahead", "page") else "eager") as engine:
        prompt = [pow(7, i, 293) for i in range(1, 33)]
        engine.prefill(prompt)
        hopper.calls.clear()
        if way == "page":
            behind.page_ahead(engine)(5, 2)
        elif way == "made_anew":
            behind.made_anew(engine, 5, 32)
        elif way == "run_ahead":
            engine.run_ahead(5, 32)
        else:
            with behind.changed_launches(engine, getattr(behind, way)):
                engine.run_ahead(5, 32)
        engine._stream.synchronize()
        ids, told = [*prompt, 5], np.array(engine._buffers.told[32:64])
        for chosen in told.tolist():
            assert chosen == int(np.argmax(logits_of(ids)[: DIMS.vocab]))
            ids.append(chosen)
        engine.drop_ahead()
        if way == "allocating":
            assert hopper.calls[:6] == ["malloc", "page_open", "free", "malloc", "body", "free"]


def test_patched_steps_decode_the_token_that_the_host_writes(hopper):
    with hopper.played.open(hopper) as engine:
        engine.prefill([3, 4])
        behind.patched_ahead(engine, 9, 3)
        engine._stream.synchronize()
        assert [int(np.argmax(logits_of([3, 4] + [9] * n))) for n in (1, 2, 3)] == engine._buffers.told[2:5].tolist()


def test_the_attribute_is_off_where_it_is_said_to_be(hopper):
    for name in launching.VARIANTS:
        with hopper.played.open(hopper, name) as engine:
            hopper.calls.clear()
            launching.variants(engine, PROTOCOL, PAGE)
            assert {"body, serial", "argmax, serial", "page_open, serial"} <= set(hopper.calls)


def test_the_same_launch_without_its_attribute(hopper):
    import nanoqwen.cuda.launch as launch

    one = launch.Launch({"gemv_o": 7}, "gemv_o", (2, 3), 64, [], region="o_proj", shared=4096)
    other = one.serial()
    assert (one._config.numAttrs, other._config.numAttrs) == (1, 0) and (other.name, other.region, other._function) == ("gemv_o", "o_proj", 7)
    for config in (one._config, other._config):
        assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.sharedMemBytes) == (2, 3, 1, 64, 4096)


def test_the_receipt_has_what_the_chapter_reads(hopper, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launching, "need_hopper", lambda what: None)
    monkeypatch.setattr(launching, "planned", lambda name: None)
    monkeypatch.setattr(launching.Protocol, "standard", classmethod(lambda cls: PROTOCOL))
    monkeypatch.setattr(launching, "measure_ceiling", lambda *args: Ceiling([4000.0], 1, "played", "a queue"))
    monkeypatch.setattr(launching.card, "device_facts", lambda device: ({"name": "a queue"}, {"driver": "0"}))

    class Opened:
        def __init__(self, pack, name, device):
            self.engine = hopper.played.open(hopper, name)

        def __enter__(self):
            return self.engine, Setup(1.0, capture_s=0.5 if self.engine.name == "graph" else None)

        def __exit__(self, *exc):
            self.engine.close()

    monkeypatch.setattr(launching, "opened", Opened)
    monkeypatch.setattr(lesson, "Card", lambda cache: types.SimpleNamespace(sms=132))
    monkeypatch.setattr(lesson, "floors", lambda card: (dict.fromkeys(lesson.FLOORS, 1.0), 9.0))
    monkeypatch.setattr(lesson, "stages", lambda card, overlap: [[[0, 1, 2, 3 + cta] for cta in range(132)] for _ in range(5)])
    write = launching.write_receipt
    monkeypatch.setattr(launching, "write_receipt", lambda *args, **more: write(*args, **more, folder=tmp_path))
    assert launching.main([]) == 0 and "graph: 3 launches" in capsys.readouterr().out
    receipt = json.loads((tmp_path / "launching.json").read_text(encoding="utf-8"))
    assert check_receipt(tmp_path / "launching.json") == [] and {"kernels/lessons/launching.cu", "nanoqwen/engines/hopper.py"} <= set(receipt["sources"])
    found = receipt["results"]
    assert found["capture_ms"] == 500 and found["launches"] == 3 and set(found["empty_us"]) == set(lesson.FLOORS)
    assert found["stages_ns"]["overlap"]["total"] == 134 and len(receipt["samples"]["stages_ns"]["serial"][0]) == launching.KEPT_CTAS
    assert receipt["samples"]["stages_ns"]["serial"][4][-1] == [131, 0, 1, 2, 134]


def test_refusal_is_one_line_without_a_card(capsys, monkeypatch):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: "there is none")
    assert launching.main([]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith(f"{launching.COMMAND}: error: ") and "there is none" in said.err and not said.out


def test_the_kernels_compile_small_and_without_local_memory():
    from nanoqwen.cuda.compile import compile_source
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.errors import DeviceError

    try:
        binary = compile_source(lesson.SOURCE, constants_header(Dims.qwen2_5_coder_7b(), 128, LaunchShape(132)))
    except DeviceError as error:
        pytest.skip(str(error))
    assert set(binary.kernels) == {"launch_nothing", "launch_stages"}
    assert all(use.stack_bytes == use.spill_bytes == 0 and use.registers <= 32 for use in binary.kernels.values())
    assert data_path("kernels", *lesson.SOURCE.split("/")).is_file()
