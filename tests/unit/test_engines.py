"""The contract of nanoqwen/engines/base.py, held against every engine that can run here.

A new engine joins by being available: `available_engines` lists it, and all of this runs on it. Where one cannot run, one
skipped test says why.
"""

import numpy as np
import pytest
import tiny

from nanoqwen import model
from nanoqwen.engines import ENGINES, HOPPER, available_engines, open_engine
from nanoqwen.errors import ContextError, InputError, NonFiniteError
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams

#: Logits of one engine may differ between one go, chunks and single tokens by this much: a product of one row sums in
#: another order than one of many, and the FP16 cache turns that into its own last bit now and then.
SAME_ENGINE = 2e-3
#: A Hopper engine prefills with FP16 activations and decodes with 16-bit fixed point, so its two ways differ by FP16's rounding: three
#: times what an H200 showed.
HOPPER_WAYS = 9e-3
#: Two engines on the same file and tokens.
TWO_ENGINES = 1e-2

HERE = {name: available for name, available, _ in available_engines()}


@pytest.fixture(params=[name for name in ENGINES if HERE[name]])
def name(request):
    return request.param


@pytest.mark.parametrize("engine, available, reason", available_engines())
def test_which_engines_the_contract_is_held_against(engine, available, reason):
    if not available:
        pytest.skip(f"{engine} is not tested here: {reason}")


@pytest.fixture
def opened(name, packed):
    """Makes engines of the kind under test on the plain fixture, and closes them."""
    made = []

    def make(**options):
        made.append(open_engine(packed, name, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def near(a, b, tolerance=SAME_ENGINE):
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    assert np.isfinite(a).all() and np.isfinite(b).all()
    assert float(np.abs(a - b).max()) <= tolerance
    assert int(a[:261].argmax()) == int(b[:261].argmax())


# ---------------------------------------------------------------------------------------------------- what an engine says


def test_an_engine_says_what_it_is(opened, name):
    engine = opened()
    assert engine.name == name
    assert engine.device and engine.description
    assert engine.context_limit == 8192 and engine.dims.vocab == 512
    assert engine.position == 0
    group = 128
    assert engine.bytes_per_token(100) == model.bytes_per_token(engine.dims, group, 100)["total"]
    assert engine.bytes_per_token(101) - engine.bytes_per_token(100) == 2 * 2 * 2 * 64 * 2  # K, V x layers x heads x 64 x FP16


def test_logits_are_float32_of_the_whole_vocabulary_and_stay_what_they_were(opened):
    engine = opened()
    first = engine.prefill(tiny.digit_ids(5))
    kept = first.copy()
    second = engine.decode(65)
    assert isinstance(first, np.ndarray)
    for logits in (first, second):
        assert logits.dtype == np.float32 and logits.shape == (512,)
    assert np.array_equal(first, kept) and not np.array_equal(first, second)
    assert engine.position == 6


def test_an_engine_knows_the_ids_it_holds(opened):
    engine = opened(context_limit=20)
    engine.prefill([1, 2, 3])
    engine.prefill(np.array([4]))
    engine.decode(np.int64(5))
    assert engine.tokens == [1, 2, 3, 4, 5] and all(type(token) is int for token in engine.tokens)
    for refused in (lambda: engine.prefill([6, 512]), lambda: engine.decode(-1), lambda: engine.prefill([7] * 16), lambda: engine.rewind(6)):
        with pytest.raises(InputError):
            refused()
    engine.tokens.append(9)  # a copy: nobody edits the engine's own
    assert engine.tokens == [1, 2, 3, 4, 5]
    engine.rewind(2)
    engine.decode(8)
    assert engine.tokens == [1, 2, 8] and engine.position == 3
    engine.reset()
    assert engine.tokens == []


# ------------------------------------------------------------------------------------------------------- ways to get there


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 49, 511, 512, 513, 1030])
def test_one_go_and_chunks_and_single_tokens_agree(opened, n):
    engine, ids = opened(), tiny.digit_ids(n)
    ways = HOPPER_WAYS if engine.name in HOPPER else SAME_ENGINE
    whole = engine.prefill(ids)
    assert engine.position == n
    for cut in {c for c in (1, 16, n // 2, n - 1) if 0 < c < n}:
        engine.reset()
        engine.prefill(ids[:cut])
        near(engine.prefill(ids[cut:]), whole, ways)
    engine.reset()
    for token in ids:
        logits = engine.decode(token)
    near(logits, whole, ways)
    assert engine.position == n


def test_repeated_runs_are_equal_bit_for_bit(opened):
    engine = opened()
    runs = []
    for _ in range(3):
        engine.reset()
        runs.append([engine.prefill(tiny.digit_ids(49)), *(engine.decode(token) for token in tiny.digit_ids(20))])
    for run in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 17, 31, 32, 48, 49])
def test_rewind_keeps_a_prefix(opened, keep):
    engine = opened()
    engine.prefill(tiny.digit_ids(49))
    engine.rewind(keep)
    assert engine.position == keep
    ids = tiny.digit_ids(49)[:keep] + tiny.digit_ids(90)[60:]
    got = engine.prefill(ids[keep:])
    assert engine.position == len(ids)
    near(got, opened().prefill(ids))


def test_a_short_request_after_a_long_one(opened):
    used, fresh, short = opened(), opened(), tiny.digit_ids(77)[-5:]
    used.prefill(tiny.digit_ids(600))
    used.decode(65)
    used.reset()
    assert used.position == 0
    assert np.array_equal(used.prefill(short), fresh.prefill(short))
    for token in tiny.digit_ids(20):
        assert np.array_equal(used.decode(token), fresh.decode(token))


def test_two_engines_side_by_side(opened):
    a, b = opened(), opened()
    alone = [a.decode(token) for token in tiny.digit_ids(40)]
    a.reset()
    for i, token in enumerate(tiny.digit_ids(40)):
        assert np.array_equal(a.decode(token), alone[i])
        b.decode(token + 1)


def test_every_engine_agrees_with_the_cpu(opened, packed):
    engine = opened()
    with open_engine(packed, "cpu") as cpu:
        near(engine.prefill(tiny.digit_ids(49)), cpu.prefill(tiny.digit_ids(49)), TWO_ENGINES)
        for token in tiny.digit_ids(40):
            near(engine.decode(token), cpu.decode(token), TWO_ENGINES)


# ------------------------------------------------------------------------------------------------------ the engine chooses

CHOICES = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.0, top_k=50, top_p=0.9037, seed=4),
    "with a penalty": SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=4),
}  # fmt: skip


@pytest.fixture(params=CHOICES)
def chooser(request):
    """Makes samplers of one kind, with ids that have no token; each begins its random numbers anew."""
    return lambda: Sampler(CHOICES[request.param], 261, banned_ids=[0, 7, 200])


def by_hand(engine, prompt, count, chooser):
    """``count`` ids after ``prompt``: logits to the host, and the sampler there."""
    history = list(prompt)
    logits = engine.prefill(prompt)
    for step in range(count):
        if step:
            logits = engine.decode(history[-1])
        history.append(chooser.pick(logits, history))
    return history[len(prompt) :]


@pytest.mark.parametrize("n", [1, 15, 16, 30, 500])
def test_a_stream_and_single_choices_and_the_sampler_agree(opened, chooser, n):
    engine, prompt = opened(), tiny.digit_ids(n)
    expected = by_hand(engine, prompt, 40, chooser())
    engine.reset()
    mine = chooser()
    first = engine.prefill_next(prompt, mine)
    assert [first, *engine.stream(first, 39, mine)] == expected
    assert engine.tokens == prompt + expected[:-1]
    engine.reset()
    mine = chooser()
    single = [engine.prefill_next(prompt, mine)]
    while len(single) < 20:
        single.append(engine.decode_next(single[-1], mine))
        assert engine.position == n + len(single) - 1
    assert single == expected[:20]


def test_a_stream_can_end_anywhere_and_another_begin(opened, chooser):
    engine, prompt, mine = opened(), tiny.digit_ids(20), chooser()
    expected = by_hand(engine, prompt, 25, chooser())
    engine.reset()
    ids = [engine.prefill_next(prompt, mine)]
    for count in (1, 5, 0, 11, 7):
        stream = engine.stream(ids[-1], 60, mine)
        ids += [next(stream) for _ in range(count)]
        stream.close()
        assert engine.tokens == prompt + ids[:-1]
    assert ids == expected


def test_a_stream_ends_when_the_engine_is_used_for_something_else(opened):
    engine, chooser = opened(), Sampler(GREEDY, 261)
    engine.prefill(tiny.digit_ids(20))
    for use in (lambda: engine.rewind(10), lambda: engine.decode(65), lambda: engine.prefill([65]), lambda: engine.prefill_next([65], chooser)):
        stream = engine.stream(66, 30, chooser)
        next(stream)
        with pytest.raises(InputError):
            engine.decode(10**9)  # refused, so nothing has happened
        next(stream)
        use()
        with pytest.raises(InputError, match="was used for something else, which ended this stream"):
            next(stream)


def test_a_stream_fills_the_context_exactly(opened):
    engine, chooser = opened(context_limit=48), Sampler(GREEDY, 261)
    first = engine.prefill_next(tiny.digit_ids(30), chooser)
    with pytest.raises(ContextError, match="19 steps after 30 tokens do not fit the context of 48 tokens; 18 do"):
        engine.stream(first, 19, chooser)
    assert len(list(engine.stream(first, 18, chooser))) == 18 and engine.position == 48
    for use in (lambda: engine.stream(65, 1, chooser), lambda: engine.decode_next(65, chooser), lambda: engine.prefill_next([65], chooser)):
        with pytest.raises(ContextError):
            use()
    assert engine.position == 48


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_prompt_longer_than_the_context_is_refused_and_the_engine_goes_on(opened):
    engine, fresh = opened(), opened()
    with pytest.raises(ContextError, match=r"a prompt of 8193 tokens is longer than the context of 8192 tokens; shorten it by 1 or more"):
        engine.prefill(tiny.digit_ids(8193))
    assert engine.position == 0
    engine.prefill(tiny.digit_ids(40))
    with pytest.raises(ContextError, match=r"8153 tokens after the 40 tokens already held .* 8192"):
        engine.prefill(tiny.digit_ids(8153))
    assert engine.position == 40
    fresh.prefill(tiny.digit_ids(40))
    assert np.array_equal(engine.decode(65), fresh.decode(65))


def test_the_last_position_can_be_used_and_no_more(opened):
    engine = opened(context_limit=48)
    engine.prefill(tiny.digit_ids(47))
    last = engine.decode(65)
    assert engine.position == engine.context_limit == 48
    with pytest.raises(ContextError, match="the context of 48 tokens is full"):
        engine.decode(65)
    assert engine.position == 48
    engine.rewind(47)
    assert np.array_equal(engine.decode(65), last)
    engine.reset()
    engine.prefill(tiny.digit_ids(48))


@pytest.mark.parametrize("bad", [-1, 512, 10**9])
def test_ids_outside_the_vocabulary_are_named(opened, bad):
    engine = opened()
    engine.prefill([1, 2])
    with pytest.raises(InputError, match=f"token id {bad} is outside the model's vocabulary of 512"):
        engine.prefill([3, bad, 4])
    with pytest.raises(InputError, match=f"token id {bad} "):
        engine.decode(bad)
    assert engine.position == 2
    engine.decode(511)  # a padding row of the embedding is still a row


def test_nothing_to_prefill_and_nowhere_to_rewind(opened):
    engine = opened()
    with pytest.raises(InputError, match="no tokens"):
        engine.prefill([])
    engine.prefill(np.array([1, 2, 3]))
    for position in (-1, 4):
        with pytest.raises(InputError, match=f"cannot rewind to position {position}: 3 tokens are held"):
            engine.rewind(position)
    assert engine.position == 3


def test_a_closed_engine_says_so(opened, name):
    engine = opened()
    engine.prefill(tiny.digit_ids(3))
    engine.close()
    engine.close()
    chooser = Sampler(GREEDY, 261)
    choosing = (lambda: engine.prefill_next([1], chooser), lambda: engine.decode_next(1, chooser), lambda: engine.stream(1, 1, chooser))
    for use in (lambda: engine.prefill([1]), lambda: engine.decode(1), engine.reset, lambda: engine.rewind(0), *choosing):
        with pytest.raises(InputError, match=f"the {name} engine is closed"):
            use()


def test_an_engine_survives_a_value_that_overflows(name, tmp_path):
    """A token whose values leave FP16's range in the cache of layer 1 poisons its own step, nothing else."""
    tensors = tiny.weights()
    loud, quiet = ord("7"), ord("3")
    embed = tensors["model.embed_tokens.weight"].values
    embed[loud] = 0
    embed[loud, 3] = 1  # RMSNorm makes it 16, sqrt(hidden)
    for name_ in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name_}.weight"].values[...] = 0
    tensors["model.layers.1.self_attn.v_proj.weight"].values[0, 3] = 5000  # 80,000 for `loud`; FP16 ends at 65,504
    pack(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "S.nanoqwen")
    chooser = Sampler(SamplingParams(temperature=1.0, seed=1), 261)
    with open_engine(tmp_path / "S.nanoqwen", name) as engine:
        before = engine.prefill([quiet] * 20)
        message, layer = ("the logits are not finite", None) if name in HOPPER else ("after layer 1 of 2", 1)
        for use in (
            lambda: engine.decode(loud), lambda: engine.prefill([quiet] * 5 + [loud]), lambda: engine.decode_next(loud, chooser),
            lambda: engine.prefill_next([loud, quiet], chooser), lambda: next(engine.stream(loud, 20, chooser)),
        ):  # fmt: skip
            with pytest.raises(NonFiniteError, match=message) as caught:
                use()
            assert caught.value.layer == layer
            assert engine.position == 20
        engine.rewind(19)
        near(engine.decode(quiet), before)


# ------------------------------------------------------------------------------------------------------------ the CPU's own


@pytest.mark.parametrize("n", [600, 1024])
def test_a_prefill_that_is_interrupted_leaves_the_engine_as_it_was(packed, monkeypatch, n):
    from nanoqwen import reference

    with open_engine(packed, poison=True) as engine:
        engine.prefill(tiny.digit_ids(20))
        block, calls = reference.block, []

        def ctrl_c(*arguments):
            calls.append(1)
            if len(calls) == 4:  # two layers: the second block of the second chunk
                raise KeyboardInterrupt
            return block(*arguments)

        monkeypatch.setattr(reference, "block", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(tiny.digit_ids(n))
        monkeypatch.undo()
        assert engine.position == 20
        assert engine._model.kv.allocator.used_pages == 2
        with open_engine(packed) as fresh:
            fresh.prefill(tiny.digit_ids(20))
            assert np.array_equal(engine.decode(65), fresh.decode(65))


def test_closing_an_engine_closes_only_a_file_that_it_opened(packed):
    with open_pack(packed) as file:
        engine = open_engine(file)
        engine.close()
        assert file.fp16("model.norm.weight").shape == (256,)
    engine = open_engine(packed)
    own = engine._pack
    engine.close()
    assert own._map is None
