"""nanoqwen/generate.py: where a reply ends, what is shown of it, and what is counted."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest

import textkit
import tiny
from nanoqwen.errors import ContextError, InputError, NonFiniteError
from nanoqwen.engines import open_engine
from nanoqwen.generate import Piece, StopStrings, common_prefix, generate
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.sampling import GREEDY, SamplingParams
from nanoqwen.tokenizer import Tokenizer

A_TO_K = tiny.spelled_chain("1", "ABCDEFGHIJK")
PROMPT = [ord("1")]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return textkit.tiny_tokenizer()


def texts(generation) -> list[str]:
    return [piece.text for piece in generation]


# ----------------------------------------------------------------------------------------------------------------- end ids

@pytest.mark.parametrize("end", [tiny.ENDOFTEXT, tiny.IM_END])
def test_both_end_ids_end_a_reply(tok, end):
    generation = generate(textkit.scripted({49: 65, 65: end}), tok, PROMPT)
    assert list(generation) == [Piece("A", 65)]
    result = generation.result
    assert (result.text, result.ids, result.finish_reason) == ("A", [65], "stop")
    assert result.stopped_by == tok.token_text(end)


def test_finish_reasons_and_counts(tok):
    by_end = generate(textkit.scripted(A_TO_K), tok, PROMPT).run()
    assert (by_end.text, by_end.finish_reason, by_end.stopped_by) == ("ABCDEFGHIJK", "stop", "<|im_end|>")
    by_limit = generate(textkit.scripted(A_TO_K), tok, PROMPT, max_tokens=3).run()
    assert (by_limit.text, by_limit.finish_reason, by_limit.stopped_by) == ("ABC", "length", None)
    by_stop = generate(textkit.scripted(A_TO_K), tok, PROMPT, stop=["DEFG"]).run()
    assert (by_stop.text, by_stop.finish_reason, by_stop.stopped_by) == ("ABC", "stop", "DEFG")
    assert [result.ids for result in (by_end, by_limit, by_stop)] == [list(b"ABCDEFGHIJK"), list(b"ABC"), list(b"ABCDEFG")]
    for result in (by_end, by_limit, by_stop):
        assert result.prompt_ids == PROMPT
        assert (result.engine, result.device) == ("fake", "a test")


def test_a_reply_of_nothing(tok):
    result = generate(textkit.scripted({49: 260}), tok, PROMPT).run()
    assert (result.text, result.ids, result.finish_reason) == ("", [], "stop")


def test_an_end_on_the_last_allowed_token_is_not_looked_for(tok):
    """Two tokens were asked for and two came; that an end would follow is nobody's business."""
    result = generate(textkit.scripted({49: 65, 65: 66, 66: 260}), tok, PROMPT, max_tokens=2).run()
    assert (result.text, result.finish_reason) == ("AB", "length")


def test_an_end_id_without_a_text_ends_too():
    meta = {"stop_ids": [{"id": 260, "text": None, "from": "config.json"}]}
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(tiny.tokenizer(markers=False)), meta)
    result = generate(textkit.scripted({49: 65, 65: 260}), tokenizer, PROMPT).run()
    assert (result.text, result.finish_reason, result.stopped_by) == ("A", "stop", "id 260")


def test_ignoring_ends(tok):
    chain = {49: 65, 65: 260, 260: 66, 66: 65}
    result = generate(textkit.scripted(chain), tok, PROMPT, max_tokens=6, ignore_eos=True).run()
    assert (result.ids, result.text, result.finish_reason) == ([65, 260, 66, 65, 260, 66], "ABAB", "length")


def test_fill_in_the_middle_ends():
    """The model fills the hole and goes on to the next file; neither marker is flagged special in the tokenizer file."""
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(textkit.trained_spec()))
    hole = tokenizer.encode("<|fim_prefix|>def f():\n    return <|fim_suffix|>\n<|fim_middle|>", special=True)
    x = tokenizer.encode("x")[0]
    for marker in ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<|im_end|>"):
        engine = textkit.scripted({hole[-1]: x, x: tokenizer.markers[marker]}, vocab=1024)
        result = generate(engine, tokenizer, hole, max_tokens=5).run()
        assert (result.text, result.finish_reason, result.stopped_by) == ("x", "stop", marker)
    # Without a hole <|fim_pad|> is no end, and still not shown.
    prompt = tokenizer.encode("def")
    result = generate(textkit.scripted({prompt[-1]: tokenizer.markers["<|fim_pad|>"]}, vocab=1024), tokenizer, prompt, max_tokens=2).run()
    assert (result.text, result.finish_reason, len(result.ids)) == ("", "length", 2)


def test_packed_checkpoint_from_end_to_end(tmp_path):
    """Folder, pack, engine, text: a model that spells A to K and says <|im_end|>."""
    folder = tiny.make(tmp_path / "S", tiny.SCRIPTED, tensors=tiny.scripted(A_TO_K))
    pack(folder, tmp_path / "S.nanoqwen")
    with open_pack(tmp_path / "S.nanoqwen") as file, open_engine(file) as engine:
        tokenizer = Tokenizer.from_pack(file)
        prompt = tokenizer.encode("111")
        assert generate(engine, tokenizer, prompt).run().text == "ABCDEFGHIJK"
        assert texts(generate(engine, tokenizer, prompt, stop=["DEFG"])) == ["A", "B", "C", "", "", "", ""]
        assert (generate(engine, tokenizer, prompt).run().engine, tokenizer.size) == ("cpu", 261)


# ------------------------------------------------------------------------------------------------------------ stop strings

def test_no_part_of_a_stop_string_is_streamed(tok):
    assert texts(generate(textkit.scripted(A_TO_K), tok, PROMPT, stop=["DEFG"])) == ["A", "B", "C", "", "", "", ""]


def test_what_only_began_like_a_stop_string_is_shown(tok):
    pieces = texts(generate(textkit.scripted(A_TO_K), tok, PROMPT, stop=["DEFX", "KL"]))
    assert pieces == ["A", "B", "C", "", "", "", "DEFG", "H", "I", "J", "", "K"]
    assert texts(generate(textkit.scripted(A_TO_K), tok, PROMPT, stop=["CX"], max_tokens=3)) == ["A", "B", "C"]


def test_stop_string_inside_one_token():
    tokenizer = textkit.tiny_tokenizer()
    chain = {49: 65, 65: 256, 256: 66}  # "A", "in", "B"
    result = generate(textkit.scripted(chain), tokenizer, PROMPT, stop=["n"]).run()
    assert (result.text, result.ids) == ("Ai", [65, 256])
    assert generate(textkit.scripted(chain), tokenizer, PROMPT, stop="inB").run().text == "A"


def test_stop_string_with_a_split_character(tok):
    """é is two tokens; the stop string is found when both are there."""
    chain = {49: 65, 65: 0xC3, 0xC3: 0xA9, 0xA9: 66}
    result = generate(textkit.scripted(chain), tok, PROMPT, stop=["é"]).run()
    assert (result.text, result.ids) == ("A", [65, 0xC3, 0xA9])


def test_stop_strings_do_not_depend_on_how_the_text_is_cut():
    """Against a plain definition: the first prefix of the text that ends with a stop string ends the reply there."""

    def by_definition(text: str, stops: list[str]) -> str:
        for end in range(len(text) + 1):
            hits = [stop for stop in stops if text[:end].endswith(stop)]
            if hits:
                return text[: end - max(map(len, hits))]
        return text

    rng = np.random.default_rng(0)
    for _ in range(3000):
        text = "".join(rng.choice(list("ab"), size=12))
        stops = ["".join(rng.choice(list("abc"), size=rng.integers(1, 5))) for _ in range(rng.integers(1, 4))]
        cuts = sorted({0, 12, *rng.integers(0, 13, size=rng.integers(0, 12)).tolist()})
        filter, shown, found = StopStrings(stops), "", None
        for start, end in zip(cuts, cuts[1:]):
            new, found = filter.push(text[start:end])
            shown += new
            assert by_definition(text, stops).startswith(shown)  # nothing is ever taken back
            if found:
                break
        shown += "" if found else filter.flush()
        assert shown == by_definition(text, stops), (text, stops, cuts)


# ------------------------------------------------------------------------------------------------------------------ limits

def test_zero_tokens(tok):
    engine = textkit.scripted(A_TO_K)
    generation = generate(engine, tok, PROMPT, max_tokens=0)
    assert list(generation) == []
    result = generation.result
    assert (result.text, result.ids, result.finish_reason, result.timings.prompt_tokens) == ("", [], "length", 1)
    assert engine.computed == 0 and result.timings.prefill_tokens == 0 and result.timings.ttft_ms is None


@pytest.mark.parametrize("bad", [-1, 1.5, "abc", True])
def test_bad_limits_are_refused_by_name(tok, bad):
    with pytest.raises(InputError, match="^max_tokens must be a whole number of at least 0"):
        generate(textkit.scripted(A_TO_K), tok, PROMPT, max_tokens=bad)


def test_one_token(tok):
    assert generate(textkit.scripted(A_TO_K), tok, PROMPT, max_tokens=1).run().ids == [65]


@pytest.mark.parametrize("limit", [100, 10**12, None])
def test_the_context_is_the_limit(tok, limit):
    engine = textkit.scripted({49: 65}, context=16)  # A for ever
    result = generate(engine, tok, PROMPT, max_tokens=limit).run()
    assert (len(result.ids), result.finish_reason) == (15, "length")


def test_a_prompt_that_fills_the_context(tok):
    result = generate(textkit.scripted({}, context=16), tok, [49] * 16).run()
    assert (result.ids, result.finish_reason) == ([], "length")


def test_a_prompt_longer_than_the_context(tok):
    engine = textkit.scripted(A_TO_K, context=128)
    with pytest.raises(ContextError, match="prompt 200 tokens, context 128"):
        generate(engine, tok, tok.encode(tiny.digits(200)))
    assert engine.computed == 0
    assert generate(engine, tok, PROMPT).run().text == "ABCDEFGHIJK"


def test_empty_prompt(tok):
    with pytest.raises(InputError, match="the prompt is empty"):
        generate(textkit.scripted(A_TO_K), tok, tok.encode(""))


def test_empty_stop_string(tok):
    with pytest.raises(InputError, match="stop string must not be empty"):
        generate(textkit.scripted(A_TO_K), tok, PROMPT, stop=["x", ""])


# ---------------------------------------------------------------------------------------------------------------- streaming

def test_streamed_and_whole_are_equal(tok):
    for seed in range(10):
        params = SamplingParams(temperature=1.5, seed=seed)
        streamed = generate(textkit.hashed(seed), tok, [1, 2, 3], max_tokens=60, params=params)
        joined = "".join(texts(streamed))
        whole = generate(textkit.hashed(seed), tok, [1, 2, 3], max_tokens=60, params=params).run()
        assert (joined, streamed.result.ids) == (whole.text, whole.ids)
        assert len(whole.ids) == 60 or whole.finish_reason == "stop"


def test_a_character_is_shown_whole(tok):
    emoji = "👩".encode()
    chain = dict(zip([49, *emoji], [*emoji, 260]))
    assert texts(generate(textkit.scripted(chain), tok, PROMPT)) == ["", "", "", "👩"]


def test_a_character_cut_by_the_limit_is_left_out(tok):
    emoji = "👩".encode()
    chain = dict(zip([49, *emoji], [*emoji, 260]))
    result = generate(textkit.scripted(chain), tok, PROMPT, max_tokens=3).run()
    assert (result.text, result.ids, result.finish_reason) == ("", list(emoji[:3]), "length")


def test_a_character_that_the_model_itself_breaks_off_is_marked(tok):
    generation = generate(textkit.scripted({49: 65, 65: 0xC3, 0xC3: 260}), tok, PROMPT)
    assert list(generation) == [Piece("A", 65), Piece("", 0xC3), Piece("\ufffd", None)]
    assert generation.result.text == "A\ufffd"


def test_padding_ids_are_never_emitted(tok):
    """Half of all raw argmaxes of this engine are padding."""
    engine, raw = textkit.hashed(3), []
    result = generate(engine, tok, [1, 2], max_tokens=50, ignore_eos=True).run()
    for k in range(50):
        raw.append(int(np.argmax(textkit.hashed(3)._logits_of([1, 2, *result.ids[:k]]))))
    assert max(raw) >= tok.size
    assert max(result.ids) < tok.size


# ---------------------------------------------------------------------------------------------------------------- sampling

def test_seeds(tok):
    def text(seed: int) -> str:
        return generate(textkit.hashed(), tok, [5], max_tokens=20, params=SamplingParams(temperature=1.0, seed=seed)).run().text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(1, 21)}) > 15


def test_default_is_greedy_whatever_the_checkpoint_says():
    wild = textkit.tiny_tokenizer(generation={"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.7, "do_sample": True})
    plain = textkit.tiny_tokenizer()
    runs = [generate(textkit.hashed(), tokenizer, [5], max_tokens=20).run() for tokenizer in (wild, plain)]
    assert runs[0].ids == runs[1].ids
    assert runs[0].params == GREEDY


def test_repetition_penalty_sees_prompt_and_reply(tok):
    def logits_of(ids):
        logits = np.zeros(512)
        logits[[65, 66, 67]] = [1.3, 1.2, 1.1]
        return logits

    params = SamplingParams(repetition_penalty=2.0)
    assert generate(textkit.FakeEngine(logits_of), tok, [66], max_tokens=3, params=params).run().ids[:2] == [65, 67]


# ------------------------------------------------------------------------------------------------------ stopping and errors

def test_reading_stops_early(tok):
    generation = generate(textkit.scripted(A_TO_K), tok, PROMPT)
    for piece in generation:
        if piece.text == "C":
            break
    assert (generation.result.text, generation.result.finish_reason) == ("ABC", "cancelled")
    generation.close()
    assert list(generation) == []
    assert (generation.result.ids, generation.result.finish_reason) == (list(b"ABC"), "cancelled")


def test_nothing_is_computed_before_it_is_read(tok):
    engine = textkit.scripted(A_TO_K)
    generation = generate(engine, tok, PROMPT)
    assert engine.computed == 0
    assert (generation.result.ids, generation.result.finish_reason) == ([], "cancelled")


class Failing(textkit.FakeEngine):
    """Follows A_TO_K and raises when it holds `after` ids."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__(lambda ids: textkit.one_hot(A_TO_K[ids[-1]], 512))
        self.after, self.error = after, error

    def _prefill(self, ids):
        if self.position == self.after:
            raise self.error
        return super()._prefill(ids)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NonFiniteError("layer 3", 3)])
def test_an_interrupted_reply_keeps_what_it_has(tok, error):
    engine = Failing(4, error)
    generation = generate(engine, tok, PROMPT)
    with pytest.raises(type(error)):
        generation.run()
    assert (generation.result.text, generation.result.finish_reason) == ("ABCD", "cancelled")
    engine.after = -1
    assert generate(engine, tok, PROMPT).run().text == "ABCDEFGHIJK"  # and the engine serves the next


def test_logits_that_are_not_finite_stop_the_reply(tok):
    engine = textkit.FakeEngine(lambda ids: np.full(512, math.nan if len(ids) > 2 else 0.0))
    generation = generate(engine, tok, PROMPT, max_tokens=5)
    with pytest.raises(NonFiniteError):
        generation.run()
    assert generation.result.ids == [0, 0]


def test_two_replies_on_one_engine_do_not_mix(tok):
    engine = textkit.scripted(A_TO_K)
    first = generate(engine, tok, PROMPT)
    next(first)
    second = generate(engine, tok, PROMPT)
    next(second)
    with pytest.raises(InputError, match="another reply was started on this engine"):
        next(first)
    assert second.run().text == "ABCDEFGHIJK"


def test_an_engine_is_not_kept_alive(tok):
    engine = textkit.scripted(A_TO_K)
    generate(engine, tok, PROMPT).run()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------------- reuse and timings

def test_each_request_starts_from_nothing(tok):
    engine = textkit.hashed()
    long = generate(engine, tok, list(range(100)), max_tokens=10).run()
    short = generate(engine, tok, [7, 8, 9], max_tokens=10).run()
    assert short.ids == generate(textkit.hashed(), tok, [7, 8, 9], max_tokens=10).run().ids
    assert (long.timings.prefill_tokens, short.timings.prefill_tokens, short.timings.reused_tokens) == (100, 3, 0)


def test_reuse_computes_only_what_is_new(tok):
    engine = textkit.hashed()
    first = generate(engine, tok, [1, 2, 3], max_tokens=5, ignore_eos=True).run()
    held = engine.tokens
    assert held == [1, 2, 3, *first.ids[:4]]  # the last id was drawn and never fed
    prompt = [*held, 9, 10]
    second = generate(engine, tok, prompt, max_tokens=5, reuse=True).run()
    assert (second.timings.prompt_tokens, second.timings.reused_tokens, second.timings.prefill_tokens) == (9, 7, 2)
    assert second.ids == generate(textkit.hashed(), tok, prompt, max_tokens=5).run().ids


@pytest.mark.parametrize("prompt, kept", [([1, 2, 3], 2), ([1, 2], 1), ([1, 9, 3], 1), ([9], 0), ([1, 2, 3, 4], 3)])
def test_reuse_of_part_of_what_is_held(tok, prompt, kept):
    engine = textkit.hashed()
    generate(engine, tok, [1, 2, 3], max_tokens=1).run()
    result = generate(engine, tok, prompt, max_tokens=4, reuse=True).run()
    assert result.timings.reused_tokens == kept
    assert result.ids == generate(textkit.hashed(), tok, prompt, max_tokens=4).run().ids


def test_common_prefix():
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2], [1, 3]), ([2], [1]))] == [0, 2, 2, 1, 0]


def test_an_engine_that_works_ahead_is_timed_from_id_to_id(tok, monkeypatch):
    """It computes while the reader is busy, so what the reader takes cannot be told apart."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def logits_of(ids):
        now[0] += 0.5
        return textkit.one_hot({49: 65, 65: 66, 66: 260}[ids[-1]], 512)

    engine = textkit.FakeEngine(logits_of)
    engine.works_ahead = True
    generation = generate(engine, tok, PROMPT)
    for _ in generation:
        now[0] += 2
    timings = generation.result.timings
    assert timings.ttft_ms == pytest.approx(500) and timings.itl_ms == timings.itl_mean_ms == pytest.approx(2500)


def test_an_engine_that_chooses_is_asked_for_ids_and_not_for_logits(tok):
    class Choosing(textkit.FakeEngine):
        def _prefill_next(self, ids, chooser):
            self.asked = [("prefill", len(ids))]
            return super()._prefill_next(ids, chooser)

        def _stream_ids(self, token, count, chooser):
            self.asked.append(("stream", token, count))
            try:
                for token in b"BCDEFGH":
                    self._tokens.append(token - 1)
                    yield token
            finally:
                self.asked.append("closed")

        _decode = None

    for stop, ids, end in ((["E"], b"ABCDE", "stop"), ([], b"ABCDEF", "length")):
        engine = Choosing(lambda ids: textkit.one_hot(65, 512))
        result = generate(engine, tok, PROMPT, max_tokens=6, stop=stop).run()
        assert (result.ids, result.finish_reason) == (list(ids), end)
        assert engine.asked == [("prefill", 1), ("stream", 65, 5), "closed"]


def test_timings(tok, monkeypatch):
    """A clock that ticks by itself: each step takes as many seconds as the engine was told to take."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    cost = iter([0.5, 0.1, 0.1, 0.4])

    def logits_of(ids):
        now[0] += next(cost)
        return textkit.one_hot({49: 65, 65: 66, 66: 67, 67: 260}[ids[-1]], 512)

    generation = generate(textkit.FakeEngine(logits_of), tok, [1, 1, 49])
    for _ in generation:
        now[0] += 100  # what the reader does is not counted
    timings = generation.result.timings
    assert (timings.prompt_tokens, timings.prefill_tokens, timings.reused_tokens) == (3, 3, 0)
    assert timings.ttft_ms == pytest.approx(500)
    assert timings.itl_ms == pytest.approx(100)
    assert timings.itl_mean_ms == pytest.approx(200)
    assert timings.tokens_per_s == pytest.approx(5)
