"""The only loop over tokens: prompt ids in, a stream of text out.

    generation = generate(engine, tokenizer, tokenizer.encode("def f("), max_tokens=64)
    for piece in generation:
        print(piece.text, end="", flush=True)
    generation.result.finish_reason                      # "stop", "length" or "cancelled"

One step is: next id from the engine -> is it an end id? -> bytes -> whole characters -> no stop string in sight? -> out. Three
things are held back on the way, and only these: the id that ends the reply (it is in neither the text nor the ids), bytes of a
character that is not whole yet, and text that may turn out to be the beginning of a stop string. Who turns logits into an id is the
engine's business (`Engine.stream`): by the sampler given to it, on the host or where the logits are.

A reply ends with

* "stop": the model said an end id, or the text contains a stop string. The text ends before the stop string, the ids contain
  the tokens that spelled it.
* "length": `max_tokens` ids, or prompt and reply together fill the context.
* "cancelled": the caller stopped reading, closed the generation, or an exception came from the engine (Ctrl-C). Ids and text
  so far are kept.

A character that "length" or "cancelled" cuts in two is left out of the text; its tokens are in the ids.
"""

from __future__ import annotations

import statistics
import time
import weakref
from contextlib import closing
from dataclasses import dataclass, field
from typing import Iterator, Sequence

from nanoqwen.engines.base import Engine
from nanoqwen.errors import ContextError, InputError
from nanoqwen.sampling import GREEDY, Sampler, SamplingParams
from nanoqwen.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Piece:
    """One token and the text that it made certain, often "". `id` is None for text released at the very end."""

    text: str
    id: int | None


@dataclass(frozen=True)
class Timings:
    """Milliseconds that the engine and the sampler took; what the caller does between two pieces is not counted.

    A step is one decode and one draw, the one that draws the end id included. None means that there was no such step.
    An engine that `works_ahead` computes while the caller is busy, so there a step is the whole time from one id to the next.
    """

    prompt_tokens: int
    prefill_tokens: int  #: prompt tokens that had to be computed ...
    reused_tokens: int  #: ... and those whose keys and values the engine still held
    ttft_ms: float | None = None  #: prefill and the first draw
    itl_ms: float | None = None  #: inter-token latency: median of the steps after the first token
    itl_mean_ms: float | None = None
    tokens_per_s: float | None = None  #: 1000 / itl_mean_ms: decode alone, without the prefill


@dataclass(frozen=True)
class GenerationResult:
    """What came of a generation. `stopped_by` is the end marker or stop string that ended it, None otherwise."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str
    stopped_by: str | None
    params: SamplingParams
    timings: Timings
    engine: str
    device: str


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    params: SamplingParams = GREEDY,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    reuse: bool = False,
) -> Generation:
    """Start a reply to `prompt_ids`; nothing is computed before the Generation is iterated.

    max_tokens: None for as many as the context holds; 0 gives nothing, and "length". A number beyond the context ends there.
    stop: texts that end the reply. ignore_eos: go on after end ids, which then count as ids but are not shown.
    reuse: keep what the engine already holds of this prompt (a chat), instead of starting from nothing.

    Raises InputError (empty prompt, negative `max_tokens`, empty stop string) and ContextError (prompt longer than the
    context) here, before the engine is touched.
    """
    prompt = [int(token) for token in prompt_ids]
    if not prompt:
        raise InputError("the prompt is empty: Qwen has no start token, so there is nothing to continue; give some text")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0):
        raise InputError(f"max_tokens must be a whole number of at least 0, got {max_tokens!r}")
    if len(prompt) > engine.context_limit:
        excess = len(prompt) - engine.context_limit
        raise ContextError(f"prompt {len(prompt)} tokens, context {engine.context_limit}: shorten the prompt by {excess} tokens or more")
    room = engine.context_limit - len(prompt)
    limit = room if max_tokens is None else min(max_tokens, room)
    ends = frozenset() if ignore_eos else tokenizer.end_ids(prompt)
    return Generation(engine, tokenizer, prompt, limit, params, StopStrings(stop), ends, reuse)


#: Whose reply an engine works on: it holds one sequence, so a new reply ends the one before. The values are tickets rather
#: than Generations, which hold their engine and would keep it, weights and all, alive for ever.
_SERVES: weakref.WeakKeyDictionary[Engine, object] = weakref.WeakKeyDictionary()


class Generation:
    """A reply in the making: an iterator of Piece. `result` can be read at any time, `close()` stops the reply."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: list[int],
        limit: int,
        params: SamplingParams,
        stops: StopStrings,
        ends: frozenset[int],
        reuse: bool,
    ) -> None:
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._prompt, self._limit, self._stops, self._ends, self._reuse = prompt, limit, stops, ends, reuse
        self._ids: list[int] = []
        self._text: list[str] = []
        self._finish_reason = "cancelled"  # until something better is known
        self._stopped_by: str | None = None
        self._clock = _Clock(engine.works_ahead)
        self._kept = 0
        self._ticket = object()
        self._loop = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._loop)

    def close(self) -> None:
        """Stop here; what there is stays in `result`."""
        self._loop.close()

    def run(self) -> GenerationResult:
        """Go on to the end and return the result."""
        for _ in self:
            pass
        return self.result

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the request."""
        return list(self._prompt)

    @property
    def result(self) -> GenerationResult:
        """The reply so far; its `finish_reason` is "cancelled" as long as the loop has not come to an end."""
        computed = len(self._prompt) - self._kept if self._clock.steps else 0
        return GenerationResult(
            prompt_ids=list(self._prompt),
            ids=list(self._ids),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            stopped_by=self._stopped_by,
            params=self._params,
            timings=Timings(len(self._prompt), computed, self._kept, **self._clock.summary()),
            engine=self._engine.name,
            device=self._engine.device,
        )

    # [loop]
    def _run(self) -> Iterator[Piece]:
        if self._limit == 0:
            self._finish_reason = "length"
            return
        decoder = StreamDecoder(self._tokenizer)
        with closing(self._choices()) as choices:
            while (token := self._next(choices)) not in self._ends:
                self._ids.append(token)
                text, found = self._stops.push(decoder.push(token))
                if found is not None:
                    self._finish_reason, self._stopped_by = "stop", found
                elif len(self._ids) == self._limit:
                    self._finish_reason = "length"
                    text += self._stops.flush()  # no stop string came of it
                self._text.append(text)
                yield Piece(text, token)
                if self._finish_reason != "cancelled":
                    return
        self._finish_reason, self._stopped_by = "stop", self._end_text(token)
        text, found = self._stops.push(decoder.flush())
        text += "" if found else self._stops.flush()
        if text:
            self._text.append(text)
            yield Piece(text, None)
    # [/loop]

    def _choices(self) -> Iterator[int]:
        """The ids that the engine chooses: the first after the prompt, then as many as may follow it."""
        sampler = Sampler(self._params, self._tokenizer.id_limit, self._tokenizer.banned_ids)
        token = self._prefill(sampler)
        yield token
        yield from self._engine.stream(token, self._limit - 1, sampler)

    def _next(self, choices: Iterator[int]) -> int:
        if self._clock.steps:
            self._check_engine_is_ours()
        with self._clock:
            return next(choices)

    def _prefill(self, sampler: Sampler) -> int:
        """The first id after the prompt. The longest beginning that the engine still holds is not computed again."""
        _SERVES[self._engine] = self._ticket
        held = self._engine.tokens if self._reuse else ()
        # The last prompt token is always computed: its logits are what we are after.
        self._kept = min(common_prefix(held, self._prompt), len(self._prompt) - 1)
        self._engine.rewind(self._kept)
        return self._engine.prefill_next(self._prompt[self._kept :], sampler)

    def _check_engine_is_ours(self) -> None:
        if _SERVES.get(self._engine) is not self._ticket:
            raise InputError("another reply was started on this engine, so this one cannot go on; finish one first, or open a second engine")

    def _end_text(self, token: int) -> str:
        try:
            return self._tokenizer.token_text(token)
        except InputError:  # an end id that a config names and no tokenizer file spells
            return f"id {token}"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids the two begin with in common."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class StopStrings:
    """Watches a stream of text for stop strings and holds back whatever may be the beginning of one.

    The stop string that is complete first wins, and of those that end at the same place the longest; so the result does not
    depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stops] if isinstance(stops, str) else list(stops)
        if "" in self._stops:
            raise InputError("a stop string must not be empty")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that can be shown, the stop string that was found or None). After one was found, nothing more may come."""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, start, found = min(ends)
            return text[:start], found
        start = next((k for k in range(max(0, len(text) - self._longest + 1), len(text)) if self._may_begin(text[k:])), len(text))
        self._held = text[start:]
        return text[:start], None

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)

    def flush(self) -> str:
        """The text held back, once it is certain that no stop string comes of it."""
        held, self._held = self._held, ""
        return held


@dataclass
class _Clock:
    """A stopwatch around each step: `with clock: ...`. With `overlaps` a step begins where the one before it ended."""

    overlaps: bool
    steps: list[float] = field(default_factory=list)  # seconds; the first is prefill and first draw

    def __enter__(self) -> None:
        if not (self.overlaps and self.steps):
            self._start = time.perf_counter()

    def __exit__(self, *exc) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._start)
        self._start = now

    def summary(self) -> dict[str, float]:
        first, later = self.steps[:1], self.steps[1:]
        numbers = {"ttft_ms": first[0] * 1000} if first else {}
        if later:
            mean = statistics.fmean(later)
            numbers |= {"itl_ms": statistics.median(later) * 1000, "itl_mean_ms": mean * 1000, "tokens_per_s": 1 / mean}
        return numbers
