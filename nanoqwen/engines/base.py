"""The contract that every engine keeps, so that one token loop and one test suite serve them all.

An engine holds a model and the KV cache of one sequence. It is a small state machine over token
positions: ``prefill`` and ``decode`` append tokens and return the logits of the last one, ``rewind``
drops tokens from the end, ``reset`` drops all. Whatever an engine refuses, it refuses before it changes
anything, and stays usable.

The public methods here check their arguments once for all engines; an engine implements the five
underscored ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from nanoqwen import model
from nanoqwen.config import Dims
from nanoqwen.errors import ContextError, InputError


class Engine(ABC):
    """One model, one sequence.

    ``name`` is what ``--engine`` calls it; ``device`` says in words where it runs ("CPU, 2 threads");
    ``description`` how weights and cache are held; ``context_limit`` is the most tokens it can hold.
    """

    name: str

    def __init__(self, dims: Dims, group: int, *, device: str, description: str, context_limit: int) -> None:
        self.dims = dims
        self.group = group
        self.device = device
        self.description = description
        self.context_limit = context_limit
        self._tokens: list[int] = []
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
        logits = self._prefill(ids)
        self._tokens += ids
        return logits

    def decode(self, token: int) -> np.ndarray:
        """Append one token; returns its logits, float32 [vocab]. Raises like ``prefill``; ContextError when the context is full."""
        self._check_open()
        token = int(token)
        self._check_ids([token])
        if self.position >= self.context_limit:
            raise ContextError(f"the context of {self.context_limit} tokens is full, {self.position} tokens are held; start again or rewind")
        logits = self._decode(token)
        self._tokens.append(token)
        return logits

    def rewind(self, position: int) -> None:
        """Keep the first ``position`` tokens and drop the rest. Raises InputError when fewer are held."""
        self._check_open()
        if not 0 <= position <= self.position:
            raise InputError(f"cannot rewind to position {position}: {self.position} tokens are held")
        self._rewind(position)
        del self._tokens[position:]

    def reset(self) -> None:
        """Drop all tokens."""
        self.rewind(0)

    def close(self) -> None:
        """Release weights and cache. A second call does nothing; any other use afterwards raises InputError."""
        if not self._closed:
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

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the {self.name} engine is closed; open it again")

    def _check_ids(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.dims.vocab:
            bad = next(i for i in ids if not 0 <= i < self.dims.vocab)
            raise InputError(f"token id {bad} is outside the model's vocabulary of {self.dims.vocab} rows")
