"""The persistent engine's own behaviour on a Hopper GPU: long runs, many starts and stops, settings, and what the host sees of a running kernel.

What it shares with the other engines is tested with them (test_hopper.py, test_hopper_choice.py, test_ladder_hopper.py).
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from nanoqwen.config import Dims
from nanoqwen.engines import hopper_problem
from nanoqwen.errors import DeviceError
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams
from nanoqwen.synthetic import synthetic_dims

if problem := hopper_problem():
    pytest.skip(f"needs a Hopper GPU: {problem}", allow_module_level=True)

import cupy

from nanoqwen.cuda.constants import LaunchShape, constants_header
from nanoqwen.cuda.launch import Kernels
from nanoqwen.cuda.persistent_plan import CHUNK, persistent_bytes
from nanoqwen.cuda.weights import synthesise
from nanoqwen.engines.hopper import kernel_cache, make_engine
from nanoqwen.engines.persistent import PersistentEngine

SEVEN = Dims.qwen2_5_coder_7b()
MODELS = {
    "embedded": dataclasses.replace(synthetic_dims("demo"), max_position=16384),
    "an odd number of layers": dataclasses.replace(synthetic_dims("demo"), num_layers=3, max_position=2048),
    "two layers of the 7B": dataclasses.replace(SEVEN, num_layers=2, max_position=16384),
}


def made(dims: Dims):
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    weights = synthesise(dims, 128, Kernels(constants_header(dims, 128, LaunchShape(sms)), kernel_cache(), ["setup/synthetic.cu"]))
    cupy.cuda.runtime.deviceSynchronize()
    return weights


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def weights(request):
    return made(MODELS[request.param])


@pytest.fixture
def engine(weights):
    with make_engine(weights, "persistent", cache=kernel_cache()) as opened:
        yield opened


def prompt(engine, count):
    return [pow(7, i, 9973) % engine.dims.vocab for i in range(1, count + 1)]


def greedy(engine):
    return Sampler(GREEDY, engine.dims.vocab)


def left_on_the_card(engine, first: int, start: int, count: int) -> tuple:
    """Decodes ``count`` tokens behind ``start``, a few a launch, the host waiting behind each. Returns the ids, and copies of all that the kernel leaves
    behind: keys and values of those tokens in every layer, the last token's logits, and the words that the CTAs exchanged in the last layer.
    An id hides an error that does not turn the order of the two largest logits; these do not."""
    kv, told = engine._kv, engine._buffers.told
    engine.drop_ahead()
    engine._place(first, start)
    at = start
    while at < start + count:
        tokens = engine._room(at, start + count - at)
        told[at : at + tokens] = -2
        engine._launch(at, tokens=tokens)
        engine._stream.synchronize()
        at += tokens
    pages = engine._pages.table.pages[start // kv.page_tokens : -(-(start + count) // kv.page_tokens)]
    rows = engine._pages.pool[:, :, pages].view(np.uint16)
    return told[start : start + count].tolist(), rows, engine._buffers.logits.view(np.uint32).copy(), engine._kernel.words.copy()


@pytest.mark.parametrize("settings", [None, {"kStamps": True}], ids=["as it is", "stamped"])
@pytest.mark.parametrize("dims", [MODELS["two layers of the 7B"], SEVEN], ids=["two layers of the 7B", "7B"])
def test_hundreds_of_runs_are_bit_equal(dims, settings):
    """Behind a pause, so that caches are cold and copies land late; from a position that opens a page, and over one. Stamps make other accesses to
    memory, and have shown a race that hid without them."""
    start, count, least, seconds = 512, 32, 100, 10.0
    with PersistentEngine(made(dims), cache=kernel_cache(), settings=settings) as engine:
        assert (engine._kernel.use.spill_bytes, engine._kernel.use.stack_bytes) == (0, 0)
        ids = prompt(engine, start)
        for position in (start - 7, start):
            engine.reset()
            engine.prefill(ids[:position])
            expected = left_on_the_card(engine, ids[-1], position, count)
            began, runs, wrong = time.perf_counter(), 0, []
            while runs < least // 2 or time.perf_counter() - began < seconds / 4:
                time.sleep(0.01)
                found = left_on_the_card(engine, ids[-1], position, count)
                if found[0] != expected[0] or any(bool((a != b).any()) for a, b in zip(found[1:], expected[1:])):
                    layers = cupy.flatnonzero((found[1] != expected[1]).any(axis=(1, 2, 3))).tolist()
                    wrong.append((runs, layers[:1], sum(a != b for a, b in zip(found[0], expected[0]))))
                runs += 1
            assert not wrong, f"from {position}: {len(wrong)} of {runs} runs differ (run, first layer whose keys or values do, ids): {wrong[:5]}"


def test_the_plan_has_room_for_its_buffers(engine):
    kernel = engine._kernel
    held = sum(x.nbytes for x in (kernel.words, kernel.counts, kernel.serial, kernel.candidates, kernel.layers))
    assert held <= persistent_bytes(engine.dims, engine.group, engine._shape.sms) <= held + 4096
    assert (kernel.use.spill_bytes, kernel.use.stack_bytes) == (0, 0)


def test_ten_thousand_tokens_in_a_row(engine):
    """No hang, no memory taken on the way, and the same ids a second time."""
    count = min(10_000, engine.context_limit - 40)
    runs = []
    for _ in range(2):
        engine.reset()
        first = engine.prefill_next(prompt(engine, 30), greedy(engine))
        ids = engine.stream(first, count, greedy(engine))
        got = [next(ids) for _ in range(count // 2)]
        runs.append([*got, *ids])
    assert runs[0] == runs[1] and len(runs[0]) == count
    assert 0 <= min(runs[0]) and max(runs[0]) < engine.dims.vocab


@pytest.mark.parametrize("weights", ["two layers of the 7B"], indirect=True)
def test_a_thousand_starts_and_stops_leave_nothing(engine):
    """Streams that are left at every place of a chunk, drawn ones among them, and rewinds."""
    drawn = Sampler(SamplingParams(temperature=0.9, top_k=40, seed=1), engine.dims.vocab)
    engine.prefill(prompt(engine, 20))
    expected = list(engine.stream(7, 12, greedy(engine)))
    pool = cupy.get_default_memory_pool()
    for k in range(1000):
        engine.rewind(20)
        stream = engine.stream(7, 12, drawn if k % 10 == 9 else greedy(engine))
        got = [next(stream) for _ in range(1 + k % 9)]
        if k % 3:
            stream.close()  # else it is left, and the next call ends it
        if k % 10 != 9:
            assert got == expected[: len(got)], k
        if k == 50:
            engine._stream.synchronize()
            held, free = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    stream.close()
    engine._stream.synchronize()
    assert pool.used_bytes() == held and abs(cupy.cuda.runtime.memGetInfo()[0] - free) <= 8 << 20
    assert len(engine._pages.table.pages) == -(-engine.position // 16)


@pytest.mark.parametrize("weights", ["embedded"], indirect=True)
def test_engines_opened_and_closed_many_times(weights):
    pool, held = cupy.get_default_memory_pool(), []
    for k in range(20):
        with make_engine(weights, "persistent", cache=kernel_cache(), context_limit=512) as engine:
            engine.prefill(prompt(engine, 5))
            stream = engine.stream(3, 30, greedy(engine))
            next(stream)
        del engine, stream
        held.append(pool.used_bytes())
    assert max(held[5:]) - min(held[5:]) < 1 << 20, held


def test_ids_arrive_one_by_one(weights):
    """Of a launch of several tokens the first id is there before the last."""
    with make_engine(weights, "persistent", cache=kernel_cache()) as engine:
        engine.prefill(prompt(engine, 16))
        told, arrivals = engine._buffers.told, []
        engine._place(5, 16)
        told[16 : 16 + CHUNK] = -2
        engine._stream.synchronize()
        engine._launch(16, tokens=CHUNK)
        for at in range(16, 16 + CHUNK):
            while told[at] == -2:
                pass
            arrivals.append(time.perf_counter())
        gaps = np.diff(arrivals)
        engine.drop_ahead()
    assert (gaps > 0).all() and gaps.min() > 5e-6, gaps


@pytest.mark.parametrize("weights", ["an odd number of layers"], indirect=True)
@pytest.mark.parametrize("settings", [{"kValidate": False}, {"kHint": True}, {"kEarly": 0}, {"kHold": 2}, {"kRelease": 2}, {"kFence": False}, {"kOwnSlices": False}, {"kJitter": True}], ids=str)
def test_other_settings_give_the_same_ids(weights, settings):
    runs = []
    for chosen in (None, settings):
        with PersistentEngine(weights, cache=kernel_cache(), settings=chosen) as engine:
            first = engine.prefill_next(prompt(engine, 30), greedy(engine))
            runs.append([first, *engine.stream(first, 40, greedy(engine))])
    assert runs[0] == runs[1]


def test_a_card_that_is_too_small_is_refused(weights, monkeypatch):
    from nanoqwen.cuda import persistent

    monkeypatch.setattr(persistent.driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: (persistent.driver.CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(DeviceError, match="CTAs on the card at once, this one holds 0; use --engine graph"):
        PersistentEngine(weights, cache=kernel_cache())
