"""The host's half of the Hopper engines on a card that is a queue (``fakecard``): steps launched ahead, pages, errors, endings.

The same engines on a real card: tests/graph/test_hopper_choice.py.
"""

import gc

import numpy as np
import pytest
from fakecard import DIMS, LOUD, PAGE, Card, logits_of

from nanoqwen.errors import ContextError, DeviceError, InputError, NonFiniteError
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: the test extra brings it on Linux")

PROMPT = [pow(7, i, 293) for i in range(1, 13)]


@pytest.fixture
def card():
    return Card()


@pytest.fixture
def hopper(card, monkeypatch):
    return card.install(monkeypatch)


@pytest.fixture(params=["eager", "graph", "persistent"])
def engine(request, card, hopper):
    with card.open(hopper, request.param) as opened:
        yield opened


def greedy():
    return Sampler(GREEDY, DIMS.vocab, banned_ids=[LOUD])


def drawing(**changes):
    return Sampler(SamplingParams(**{"temperature": 0.9, "top_k": 40, "top_p": 0.9037, "seed": 3, **changes}), DIMS.vocab - 1)


def expected(prompt, count, chooser):
    """``count`` ids after ``prompt``, by the host alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(chooser.pick(logits_of(ids), ids))
    return ids[len(prompt) :]


def consistent(engine):
    """The engine holds what it says: pages for its tokens, and the next id follows from them."""
    assert len(engine._pages.table.pages) == -(-engine.position // PAGE)
    assert engine.decode_next(7, greedy()) == expected([*engine.tokens[:-1], 7], 1, greedy())[0]


@pytest.mark.parametrize("chooser", [greedy, drawing], ids=["greedy", "drawn"])
def test_a_stream_is_what_single_steps_give(engine, chooser):
    one, host = chooser(), chooser()
    first = engine.prefill_next(PROMPT, one)
    ids = [first, *engine.stream(first, 99, one)]
    assert ids == expected(PROMPT, 100, host)
    assert engine.tokens == PROMPT + ids[:-1]
    engine.reset()
    one, single = chooser(), []
    single.append(engine.prefill_next(PROMPT, one))
    for _ in range(40):
        single.append(engine.decode_next(single[-1], one))
    assert single == ids[:41]


def test_draws_that_need_more_random_numbers_than_go_to_the_card_together(card, hopper, monkeypatch):
    monkeypatch.setattr(hopper, "DRAWS", 8)
    with card.open(hopper) as engine:
        chooser = drawing()
        first = engine.prefill_next(PROMPT, chooser)
        assert [first, *engine.stream(first, 60, chooser)] == expected(PROMPT, 61, drawing())


def test_pages_are_opened_by_the_position_and_by_nothing_else(engine, card):
    engine.prefill(PROMPT)
    card.log.clear()
    list(engine.stream(5, 40, greedy()))
    bodies = "".join("P" if name == "page_open" else "b" for name in card.log if name in ("page_open", "body"))
    at, seen = len(PROMPT), []
    for letter in bodies:
        if letter == "P":
            seen.append(at)
        else:
            at += 1
    assert seen == [16, 32, 48] and at == len(PROMPT) + 40


def test_steps_are_launched_before_the_one_before_is_read_and_no_more_than_asked_for(engine, card, hopper):
    engine.prefill(PROMPT)
    card.log.clear()
    ids = engine.stream(5, 10, greedy())
    next(ids)
    assert card.log.count("body") == 1, "the first id is here as soon as its own step is done"
    engine._stream.synchronize()
    ahead = 10 if engine.name == "persistent" else hopper.AHEAD  # to the end of the page, and a chunk more: there are no others
    assert card.log.count("body") == ahead
    assert sum(1 for _ in ids) == 9
    engine._stream.synchronize()
    assert card.log.count("body") == 10


@pytest.mark.parametrize("read", [1, 3, 4, 5, 20])
def test_a_stream_that_is_closed_early_leaves_nothing_behind(engine, read):
    first = engine.prefill_next(PROMPT, greedy())
    ids = engine.stream(first, 60, greedy())
    got = [next(ids) for _ in range(read)]
    ids.close()
    assert engine.tokens == [*PROMPT, first, *got[:-1]] and got == expected([*PROMPT, first], read, greedy())
    consistent(engine)


def test_a_draw_that_was_not_read_is_still_to_be_drawn(engine):
    chooser, ids = drawing(), []
    token = engine.prefill_next(PROMPT, chooser)
    ids.append(token)
    for _ in range(5):  # five streams, closed early each time
        stream = engine.stream(token, 30, chooser)
        ids += [next(stream), next(stream)]
        stream.close()
        token = ids[-1]
    assert ids == expected(PROMPT, 11, drawing())


@pytest.mark.parametrize("use", [lambda e: e.rewind(3), lambda e: e.decode(1), lambda e: e.prefill([1, 2]), lambda e: list(e.stream(1, 2, greedy()))])
def test_any_other_use_ends_a_stream(engine, use):
    engine.prefill(PROMPT)
    ids = engine.stream(5, 60, greedy())
    next(ids)
    held = engine.tokens
    use(engine)
    assert engine.tokens[:3] == held[:3]
    with pytest.raises(InputError, match="was used for something else, which ended this stream"):
        next(ids)
    consistent(engine)


def test_what_is_refused_does_not_end_a_stream(engine):
    engine.prefill(PROMPT)
    ids = engine.stream(5, 6, greedy())
    got = [next(ids)]
    for refused in (lambda: engine.decode(-1), lambda: engine.rewind(500), lambda: engine.prefill([])):
        with pytest.raises(InputError):
            refused()
    assert [*got, *ids] == expected([*PROMPT, 5], 6, greedy())


def test_an_abandoned_stream_ends_and_closing_the_engine_ends_it_too(engine):
    engine.prefill(PROMPT)
    for _ in engine.stream(5, 60, greedy()):
        break
    gc.collect()
    consistent(engine)
    ids = engine.stream(5, 60, greedy())
    next(ids)
    engine.close()
    with pytest.raises(InputError):
        next(ids)


def test_the_context_is_filled_to_the_last_position(engine):
    room = DIMS.max_position - len(PROMPT)
    engine.prefill(PROMPT)
    with pytest.raises(ContextError, match=rf"{room + 1} steps after 12 tokens do not fit the context of 200 tokens; {room} do"):
        engine.stream(5, room + 1, greedy())
    assert list(engine.stream(5, room, greedy())) == expected([*PROMPT, 5], room, greedy())
    assert engine.position == engine.context_limit
    with pytest.raises(ContextError, match="is full"):
        engine.stream(5, 1, greedy())


def test_a_pool_that_moves_under_a_stream(card, hopper, monkeypatch):
    monkeypatch.setattr("nanoqwen.cuda.pages.DevicePages.__init__.__defaults__", (32,))
    for name in ("eager", "graph", "persistent"):
        with card.open(hopper, name) as engine:
            assert engine._pages.pool.shape[2] == 2
            first = engine.prefill_next(PROMPT, greedy())
            assert [first, *engine.stream(first, 150, greedy())] == expected(PROMPT, 151, greedy())
            assert engine._pages.pool.shape[2] >= 11


@pytest.mark.parametrize("name", ["eager", "graph", "persistent"])
def test_a_pool_that_moves_under_a_prompt(card, hopper, monkeypatch, name):
    """What ends a prompt reads the cache too, and must know where it lies now."""
    monkeypatch.setattr("nanoqwen.cuda.pages.DevicePages.__init__.__defaults__", (32,))
    with card.open(hopper, name) as engine:
        engine.prefill(PROMPT)
        held = engine._pages.pool
        assert np.array_equal(engine.prefill(PROMPT * 3), logits_of(PROMPT * 4)) and engine._pages.pool is not held
        held, chooser = engine._pages.pool, drawing()
        assert engine.prefill_next(PROMPT * 6, chooser) == expected(PROMPT * 10, 1, drawing())[0] and engine._pages.pool is not held
        consistent(engine)


def test_out_of_memory_comes_after_every_id_that_was_computed(card, hopper, monkeypatch):
    monkeypatch.setattr("nanoqwen.cuda.pages.DevicePages.__init__.__defaults__", (32,))
    with card.open(hopper) as engine:
        first = engine.prefill_next(PROMPT, greedy())
        card.free, got = 0, []
        with pytest.raises(DeviceError, match=r"no memory left for more KV pages after 32 tokens \(Out of memory allocating \d+ bytes\); the engine") as caught:
            for token in engine.stream(first, 100, greedy()):
                got.append(token)
        assert "\n" not in str(caught.value)
        assert engine.position == 32 and got == expected([*PROMPT, first], 20, greedy())
        for use in (lambda: engine.prefill([1] * 100), lambda: engine.decode(1), lambda: engine.decode_next(1, greedy()), lambda: engine.prefill_next([1], greedy())):
            with pytest.raises(DeviceError, match="no memory left"):
                use()
            assert engine.position == 32
        engine.rewind(20)
        consistent(engine)
        card.free = float("inf")
        assert list(engine.stream(4, 100, greedy())) == expected([*PROMPT, first, *got[:7], 7, 4], 100, greedy())


@pytest.mark.parametrize("chooser", [greedy, drawing], ids=["greedy", "drawn"])
def test_a_value_that_overflows_ends_the_stream_and_spoils_nothing(engine, chooser):
    engine.prefill(PROMPT)
    with pytest.raises(NonFiniteError):
        list(engine.stream(LOUD, 20, chooser()))
    assert engine.position == len(PROMPT)
    consistent(engine)
    for use in (lambda: engine.decode(LOUD), lambda: engine.decode_next(LOUD, chooser()), lambda: engine.prefill([3, LOUD]), lambda: engine.prefill_next([3, LOUD, 5], chooser())):
        with pytest.raises(NonFiniteError):
            use()
        assert engine.position == len(PROMPT) + 1
    engine.rewind(5)
    consistent(engine)


def test_ctrl_c_while_waiting(engine, monkeypatch):
    engine.prefill(PROMPT)
    ids = engine.stream(5, 60, greedy())
    next(ids)

    def interrupted(awaited):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if engine.name == "persistent":
            patch.setattr("nanoqwen.engines.persistent.is_busy", interrupted)
        else:
            patch.setattr(type(engine._arrivals[0]), "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(ids)
    assert engine.position == len(PROMPT) + 1
    consistent(engine)


def test_a_capture_that_fails_leaves_the_stream_usable(card, hopper, monkeypatch):
    with card.open(hopper) as engine:
        engine.prefill(PROMPT)
        make = hopper.decode_launches

        def broken(*arguments, **options):
            def fail(stream):
                raise DeviceError("kernel sample cannot be launched")

            return [*make(*arguments, **options), fail]

        monkeypatch.setattr(hopper, "decode_launches", broken)
        with pytest.raises(DeviceError, match="cannot be launched"):
            list(engine.stream(5, 3, drawing()))
        monkeypatch.setattr(hopper, "decode_launches", make)
        consistent(engine)
        assert list(engine.stream(9, 20, drawing())) == expected([*engine.tokens[:13], 9], 20, drawing())


def test_a_penalty_is_the_hosts_business(engine, card):
    chooser, host = (drawing(repetition_penalty=1.3) for _ in range(2))
    first = engine.prefill_next(PROMPT, chooser)
    card.log.clear()
    assert [first, *engine.stream(first, 30, chooser)] == expected(PROMPT, 31, host)
    assert "sample" not in card.log


def test_logits_and_choices_may_take_turns(engine):
    ids, chooser, host = list(PROMPT), drawing(), drawing()
    assert np.array_equal(engine.prefill(PROMPT), logits_of(ids))
    for token in (4, 8, 15, 16, 23, 42):
        ids.append(token)
        if token % 2:
            assert engine.decode_next(token, chooser) == host.pick(logits_of(ids))
        else:
            assert np.array_equal(engine.decode(token), logits_of(ids))


def test_measurements_ahead_of_the_position_leave_no_trace(engine):
    engine.prefill(PROMPT)
    engine.run_ahead(5, 40)
    engine.run_ahead(5, 40)
    engine.drop_ahead()
    assert engine.position == len(PROMPT)
    consistent(engine)


# ---------------------------------------------------------------------------------------------- the persistent engine's own


@pytest.fixture
def persistent(card, hopper):
    with card.open(hopper, "persistent") as opened:
        yield opened


def test_a_launch_decodes_a_few_tokens_and_none_reaches_into_a_second_page(persistent, monkeypatch):
    launched = []
    monkeypatch.setattr(persistent, "_launch", lambda at, draws=False, tokens=1, launch=persistent._launch: (launched.append((at, tokens)), launch(at, draws, tokens))[1])
    persistent.prefill(PROMPT)  # 12 tokens
    assert list(persistent.stream(5, 11, greedy())) == expected([*PROMPT, 5], 11, greedy())
    assert launched == [(12, 4), (16, 7)]
    persistent.rewind(15)
    launched.clear()
    persistent.run_ahead(5, 9)
    persistent.drop_ahead()
    assert launched == [(15, 1), (16, 8)]
    list(persistent.stream(5, 3, drawing()))
    assert launched[2:] == [(15, 1), (16, 1), (17, 1)], "a draw needs all logits"


def test_an_id_is_read_while_the_kernel_goes_on(persistent, card):
    persistent.prefill(PROMPT)
    card.log.clear()
    ids = persistent.stream(5, 40, greedy())
    next(ids)
    assert card.log.count("body") == 1
    for _ in range(20):
        next(ids)
    assert card.log.count("body") == 21


def test_what_a_stream_that_was_left_still_tells_is_not_taken_for_an_id_of_the_next(persistent):
    first = persistent.prefill_next(PROMPT, greedy())
    ids = persistent.stream(first, 60, greedy())
    next(ids)
    ids.close()
    persistent.rewind(len(PROMPT))
    assert list(persistent.stream(7, 10, greedy())) == expected([*PROMPT, 7], 10, greedy())


def test_the_watchdogs_story_is_the_error_of_this_call_and_of_all_that_follow(persistent, card, monkeypatch):
    persistent.prefill(PROMPT)
    ids = persistent.stream(5, 40, greedy())
    next(ids)

    def trapped(*_):
        card.story = "the persistent kernel stood still: CTA 3 waited for the end of the token"
        raise DeviceError("the CUDA driver reports CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr("nanoqwen.engines.persistent.is_busy", trapped)
    with pytest.raises(DeviceError, match="stood still: CTA 3 waited for the end"):
        next(ids)
    for use in (lambda: persistent.decode(1), lambda: persistent.prefill([1]), lambda: persistent.stream(1, 3, greedy()), persistent.reset):
        with pytest.raises(DeviceError, match="stood still"):
            use()
    monkeypatch.setattr(persistent._stream, "synchronize", trapped, raising=False)
    persistent.close()


def test_a_kernel_that_ends_without_an_id_is_not_waited_for(persistent, monkeypatch):
    persistent.prefill(PROMPT)
    monkeypatch.setattr("nanoqwen.engines.persistent.is_busy", lambda stream: False)
    with pytest.raises(DeviceError, match="ended without an id"):
        next(persistent.stream(5, 4, greedy()))


def test_a_launch_that_the_driver_refuses_names_the_way_out(persistent, monkeypatch):
    persistent.prefill(PROMPT)

    def refused(*_, **__):
        raise DeviceError("kernel persistent cannot be launched: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")

    monkeypatch.setattr(persistent, "_capture", refused)
    monkeypatch.setattr(persistent, "_chunks", {})
    with pytest.raises(DeviceError, match="cannot have the 4 CTAs .* at once .*; use --engine graph"):
        persistent.decode(5)
    assert persistent.position == len(PROMPT)
