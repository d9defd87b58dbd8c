"""From logits to the next id: greedy by default, or a seeded draw.

The steps and their order are those of transformers: repetition penalty, temperature, top-k, top-p, draw. With temperature 0
there is no draw: the largest logit wins (after a penalty, if one was asked for), the lowest id on an exact tie, and top-k and
top-p, which only ever drop smaller logits, change nothing. The defaults are plain argmax; nothing is taken from a
checkpoint's `generation_config.json` unasked.

Draws are in float64 and use the raw stream of PCG64, which numpy promises never to change, so a seed gives the same text on
every machine whose engine gives the same logits.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Iterable

import numpy as np

from nanoqwen.errors import InputError, NonFiniteError


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token.

    temperature: 0 is argmax; top_k: keep this many largest logits, 0 keeps all; top_p: keep the smallest set of most probable
    tokens whose sum reaches it, 1 keeps all; repetition_penalty: divide positive and multiply negative logits of ids seen in
    the prompt or reply, 1 is off; seed: where there is a draw, None takes a fresh one, which is then stored here, so that any
    run can be repeated. Raises InputError naming the argument.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            ("top_k", _is_count(self.top_k), "a whole number of at least 0 (0 keeps all)"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1 (1 keeps all)"),
            ("repetition_penalty", math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0 (1 is off)"),
            ("seed", self.seed is None or _is_count(self.seed), "a whole number of at least 0"),
        ):
            if not holds:
                raise InputError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if self.seed is None and self.temperature > 0:
            object.__setattr__(self, "seed", secrets.randbits(32))

    def __str__(self) -> str:
        """What is applied, in words: 'greedy' or 'temperature 0.7, top-k 20, seed 5'."""
        parts = []
        if self.temperature == 0:
            parts.append("greedy")
        else:
            parts.append(f"temperature {self.temperature:g}")
            parts += [f"top-k {self.top_k}"] if self.top_k else []
            parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"repetition penalty {self.repetition_penalty:g}"] if self.repetition_penalty != 1 else []
        parts += [f"seed {self.seed}"] if self.temperature else []
        return ", ".join(parts)


GREEDY = SamplingParams()

#: Temperatures at which a card draws (kernels/decode/sample.cu). Beyond them logits that differ get equal weights, or the
#: reciprocal of the temperature overflows; then the host draws.
DEVICE_TEMPERATURES = (1e-3, 1e3)


class Sampler:
    """Draws ids for one reply. `valid_ids`: ids from here on are padding; `banned_ids`: ids below it that have no token.

    An engine that chooses on a card reads the rule from here, and the random numbers of its draws: `upcoming` shows them,
    `drew` uses one up. So host and card may take turns, and the text of a seed stays the same.
    """

    def __init__(self, params: SamplingParams, valid_ids: int, banned_ids: Iterable[int] = ()) -> None:
        self.params = params
        self.valid_ids = valid_ids
        self.banned_ids = np.fromiter(banned_ids, dtype=np.int64)
        self._random = np.random.PCG64(params.seed or 0)
        self._shown: deque[int] = deque()

    @property
    def on_device(self) -> bool:
        """Whether logits and a random number are all it takes. A repetition penalty needs the ids so far, and stays on the host."""
        low, high = DEVICE_TEMPERATURES
        return self.params.repetition_penalty == 1 and (self.params.temperature == 0 or low <= self.params.temperature <= high)

    def upcoming(self, count: int) -> np.ndarray:
        """The numbers of the next `count` draws in units of 2**-64, uint64 with the lower 11 bits 0. They stay to be drawn."""
        while len(self._shown) < count:
            self._shown.append(self._random.random_raw())
        return np.array([self._shown[k] >> 11 << 11 for k in range(count)], dtype=np.uint64)

    def drew(self) -> int:
        """Use up the next raw number: a draw has been made with it."""
        return self._shown.popleft() if self._shown else self._random.random_raw()

    # [pick]
    def pick(self, logits: np.ndarray, history: Iterable[int] = ()) -> int:
        """The next id. `logits` is float32 [vocab]; `history` are the ids so far, read only for a repetition penalty.

        Raises NonFiniteError for NaN or infinity among the ids that have a token.
        """
        scores = logits[: self.valid_ids]  # embedding rows beyond the tokenizer are padding
        if not np.isfinite(scores).all():
            bad = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise NonFiniteError(f"the logits are not finite (id {bad}: {scores[bad]}); the weights or activations overflow")
        if self.banned_ids.size:
            scores = scores.copy()
            scores[self.banned_ids[self.banned_ids < scores.size]] = -np.inf
        p = self.params
        if p.repetition_penalty != 1:
            scores = penalize(scores, history, p.repetition_penalty)
        if p.temperature == 0:
            return int(np.argmax(scores))  # numpy returns the first of equals: the lowest id

        ids = top_k_ids(scores, p.top_k)
        probabilities = softmax(scores[ids], p.temperature)
        kept = top_p_ids(probabilities, p.top_p)
        steps = np.cumsum(probabilities[kept])
        uniform = (self.drew() >> 11) * 2.0**-53  # in [0, 1), so always below the last step, 1
        return int(ids[kept[np.searchsorted(steps / steps[-1], uniform, side="right")]])
    # [/pick]


def penalize(scores: np.ndarray, history: Iterable[int], penalty: float) -> np.ndarray:
    """`scores` [n] with those of the ids in `history` made smaller (for penalty > 1), once each however often they occur."""
    ids = np.array(sorted({token for token in history if token < scores.size}), dtype=np.int64)
    scores = scores.astype(np.float64)
    scores[ids] = np.where(scores[ids] < 0, scores[ids] * penalty, scores[ids] / penalty)
    return scores


def softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Scores [n] -> probabilities, float64 [n]; a score of -inf gets exactly 0."""
    scores = scores.astype(np.float64)
    weights = np.exp((scores - scores.max()) / temperature)  # the largest becomes 0 first: no overflow at any temperature
    return weights / weights.sum()


def top_k_ids(scores: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest of ``scores`` [n] are, ascending; those equal to the k-th all stay. k = 0 keeps all."""
    if k == 0 or k >= scores.size:
        return np.arange(scores.size)
    return np.flatnonzero(scores >= np.partition(scores, -k)[-k])


def top_p_ids(probabilities: np.ndarray, p: float) -> np.ndarray:
    """Where the nucleus of ``probabilities`` [n] is, ascending: the most probable ones, until their sum reaches p.

    The most probable one always stays; among equals the lower place goes first. p = 1 keeps all.
    """
    if p == 1:
        return np.arange(probabilities.size)
    # All those below (1 - p) / n together weigh less than 1 - p, so none is in the nucleus: sort only the others.
    candidates = np.flatnonzero(probabilities >= (1 - p) / probabilities.size)
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    return np.sort(order[: max(1, np.count_nonzero(before < p))])
