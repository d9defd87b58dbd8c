"""The contract that every engine keeps, so that one token loop and one test suite serve them all.

An engine holds a model and the KV cache of one sequence. It is a small state machine over token
positions: ``prefill`` and ``decode`` append tokens and return the logits of the last one, ``rewind``
drops tokens from the end, ``reset`` drops all. Whatever an engine refuses, it refuses before it changes
anything, and stays usable.

Who only wants the next id says so: ``prefill_next`` and ``decode_next`` take a ``Sampler`` and return its choice,
and ``stream`` goes on from there, id after id. An engine that can choose where the logits are then sends
4 bytes instead of all of them, and may work ahead of its caller; one that cannot leaves the choice to the sampler.

The public methods here check their arguments once for all engines; an engine implements the four
underscored ones that are abstract, and the three about choosing if it can do better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from itertools import chain

import numpy as np

from nanoqwen import model
from nanoqwen.config import Dims
from nanoqwen.errors import ContextError, InputError
from nanoqwen.sampling import Sampler


class Engine(ABC):
    """One model, one sequence.

    ``name`` is what ``--engine`` calls it; ``device`` says in words where it runs ("CPU, 2 threads");
    ``description`` how weights and cache are held; ``context_limit`` is the most tokens it can hold;
    ``works_ahead`` says that a ``stream`` computes while its caller deals with the last id.
    """

    name: str
    works_ahead: bool = False

    def __init__(self, dims: Dims, group: int, *, device: str, description: str, context_limit: int) -> None:
        self.dims = dims
        self.group = group
        self.device = device
        self.description = description
        self.context_limit = context_limit
        self._tokens: list[int] = []
        self._streaming: Generator[int, None, None] | None = None
        self._closed = False

    @property
    def position(self) -> int:
        """Tokens held: the position of the next one."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids held, in order. Whoever wants to go on from a part of them compares, and rewinds."""
        return list(self._tokens)

    def bytes_per_token(self, context: int) -> int:
        """Bytes of the packed model that a decode step must read with ``context`` tokens cached: the numerator of MBU.

        INT4 codes, scales, FP16 head, norms and biases, one embedding row, FP16 keys and values. An engine
        that holds wider copies reads more than it must; ``description`` says so.
        """
        return model.bytes_per_token(self.dims, self.group, context)["total"]

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        """Append ``tokens`` at ``position``; returns the logits of the last one, float32 [vocab].

        May be called again to go on. Raises InputError for no tokens or an id outside the vocabulary,
        ContextError when they do not fit, both before anything changes; NonFiniteError when a hidden
        value is NaN or infinite, and then ``position`` is what it was.
        """
        ids = self._accept_prompt(tokens)
        logits = self._prefill(ids)
        self._tokens += ids
        return logits

    def decode(self, token: int) -> np.ndarray:
        """Append one token; returns its logits, float32 [vocab]. Raises like ``prefill``; ContextError when the context is full."""
        token = self._accept(token)
        logits = self._decode(token)
        self._tokens.append(token)
        return logits

    def prefill_next(self, tokens: Sequence[int], chooser: Sampler) -> int:
        """Append ``tokens`` and return the id that ``chooser`` takes after them. Raises like ``prefill``; nothing is held then."""
        ids = self._accept_prompt(tokens)
        following = self._prefill_next(ids, chooser)
        self._tokens += ids
        return following

    def decode_next(self, token: int, chooser: Sampler) -> int:
        """Append one token and return the id that ``chooser`` takes after it. Raises like ``decode``; nothing is held then."""
        token = self._accept(token)
        following = self._decode_next(token, chooser)
        self._tokens.append(token)
        return following

    def stream(self, token: int, count: int, chooser: Sampler) -> Iterator[int]:
        """Append ``token`` and choose the next id, append that and choose again: an iterator over ``count`` ids, each as soon as it is known.

        After every id the engine holds what as many calls of ``decode_next`` would have left: all but the newest. Close the iterator
        to stop early; whatever was computed ahead is dropped. Any other call that changes the engine ends the stream too, and its
        next id is an InputError. Raises like ``decode``, at once for what can be known at once: ContextError when ``count``
        steps do not fit.
        """
        token = self._accept(token)
        if self.position + count > self.context_limit:
            raise ContextError(
                f"{count} steps after {self.position} tokens do not fit the context of {self.context_limit} tokens; {self.context_limit - self.position} do"
            )
        self._streaming = self._stream_ids(token, count, chooser)
        return self._watch(self._streaming)

    def _watch(self, ids: Generator[int, None, None]) -> Iterator[int]:
        """The same ids, as long as the stream is the last thing that was asked of the engine."""
        try:
            while True:
                if self._streaming is not ids:
                    raise InputError(f"the {self.name} engine was used for something else, which ended this stream")
                try:
                    following = next(ids)
                except StopIteration:
                    return
                yield following
        finally:
            if self._streaming is ids:
                self._end_stream()

    def _end_stream(self) -> None:
        """Stop the stream that runs, if one does: it drops what it computed ahead."""
        ids, self._streaming = self._streaming, None
        if ids is not None:
            ids.close()

    def rewind(self, position: int) -> None:
        """Keep the first ``position`` tokens and drop the rest. Raises InputError when fewer are held."""
        self._check_open()
        if not 0 <= position <= self.position:
            raise InputError(f"cannot rewind to position {position}: {self.position} tokens are held")
        self._end_stream()
        self._rewind(position)
        del self._tokens[position:]

    def reset(self) -> None:
        """Drop all tokens."""
        self.rewind(0)

    def close(self) -> None:
        """Release weights and cache. A second call does nothing; any other use afterwards raises InputError."""
        if not self._closed:
            self._end_stream()
            self._closed = True
            self._tokens.clear()
            self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _prefill(self, ids: list[int]) -> np.ndarray:
        """Append checked ids at ``position``; logits of the last, float32 [vocab]. On any error the cache is as before."""

    @abstractmethod
    def _decode(self, token: int) -> np.ndarray:
        """Append one checked id at ``position``; its logits, float32 [vocab]. On any error the cache is as before."""

    @abstractmethod
    def _rewind(self, position: int) -> None:
        """Drop the tokens from ``position`` on."""

    @abstractmethod
    def _close(self) -> None:
        """Release everything. Called once."""

    def _prefill_next(self, ids: list[int], chooser: Sampler) -> int:
        """Append checked ids and choose the next. On any error the cache is as before."""
        return self._pick(self._prefill(ids), ids, chooser)

    def _decode_next(self, token: int, chooser: Sampler) -> int:
        """Append one checked id and choose the next. On any error the cache is as before."""
        return self._pick(self._decode(token), [token], chooser)

    def _stream_ids(self, token: int, count: int, chooser: Sampler) -> Generator[int, None, None]:
        """``count`` ids after the checked ``token``; adds to ``_tokens`` what it appended before it yields. When it is closed or fails,
        the cache is that of ``_tokens``."""
        for _ in range(count):
            following = self._decode_next(token, chooser)
            self._tokens.append(token)
            token = following
            yield token

    def _pick(self, logits: np.ndarray, ids: list[int], chooser: Sampler) -> int:
        """The sampler's choice after ``ids``, which the cache holds already and ``_tokens`` does not."""
        try:
            return chooser.pick(logits, chain(self._tokens, ids))
        except BaseException:
            self._rewind(self.position)
            raise

    def _accept_prompt(self, tokens: Sequence[int]) -> list[int]:
        """``tokens`` as a list of ids that can be appended, or the error that says why not."""
        self._check_open()
        ids = [int(token) for token in tokens]
        if not ids:
            raise InputError("there are no tokens to prefill; an empty prompt has no next token")
        self._check_ids(ids)
        if self.position + len(ids) > self.context_limit:
            held = f" after the {self.position} tokens already held" if self.position else ""
            raise ContextError(
                f"a prompt of {len(ids)} tokens{held} is longer than the context of {self.context_limit} tokens; shorten it by "
                f"{self.position + len(ids) - self.context_limit} or more"
            )
        self._end_stream()
        return ids

    def _accept(self, token: int) -> int:
        """``token`` as an id that can be appended, or the error that says why not."""
        self._check_open()
        token = int(token)
        self._check_ids([token])
        if self.position >= self.context_limit:
            raise ContextError(f"the context of {self.context_limit} tokens is full, {self.position} tokens are held; start again or rewind")
        self._end_stream()
        return token

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the {self.name} engine is closed; open it again")

    def _check_ids(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.dims.vocab:
            bad = next(i for i in ids if not 0 <= i < self.dims.vocab)
            raise InputError(f"token id {bad} is outside the model's vocabulary of {self.dims.vocab} rows")
