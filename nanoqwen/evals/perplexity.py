"""Perplexity over strided windows: how well a model predicts a text that is longer than its window.

    logits of a window  -->  loss of each token that no earlier window scored  -->  sums over all texts  -->  exp

Windows of ``window`` tokens begin every ``stride`` tokens. Each scores the tokens that no window before it scored, so every token
but a text's first is predicted exactly once, and all beyond the first window with at least ``window - stride`` tokens of context. Loss is
summed over tokens before anything is divided: a text counts by its length, and a short last window does not weigh as much as
a full one. Perplexity is exp(loss a token). It depends on the tokenizer, so bits per byte, which does not, stands beside it.

A pack file is computed with the FP16 key/value cache that engines use; a checkpoint folder with an FP32 cache, so that ``fp32``
is what `transformers` computes in float32.

An engine gives logits of the newest token only. So it is asked as generation asks it, one token after the other (``stepped_loss``); windows,
context and sums are the same. That is slower than whole windows, and it scores the very path that writes text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from nanoqwen.engines.base import Engine
from nanoqwen.errors import ContextError, InputError, NonFiniteError
from nanoqwen.reference import ReferenceModel

Progress = Callable[[int, int, str], None]

WINDOW, STRIDE = 1024, 512
#: Logits computed at once: 64 MiB of float32, which is 110 tokens of the 7B's vocabulary and a whole window of a small one's.
LOGIT_BUDGET = 1 << 24
#: Tokens that run through the layers together where only their keys and values are wanted.
CONTEXT_CHUNK = 512


@dataclass(frozen=True)
class Score:
    """Of one text or of several: ``loss`` in nats, summed over ``tokens`` predictions; ``bytes`` of UTF-8."""

    name: str
    loss: float
    tokens: int
    bytes: int

    @property
    def mean_loss(self) -> float:
        """Nats a predicted token."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(mean loss); infinity where that exceeds a float64."""
        return math.exp(self.mean_loss) if self.mean_loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, a byte of UTF-8: comparable between tokenizers."""
        return self.loss / math.log(2) / self.bytes

    def as_dict(self) -> dict:
        """For JSON. ``loss`` is nats a predicted token here."""
        return {
            "name": self.name, "loss": self.mean_loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens, "bytes": self.bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text to score: its name, its token ids (no token is put in front), its size in bytes of UTF-8."""

    name: str
    ids: list[int] = field(repr=False)
    bytes: int


# [windows]
def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, scored): the window holds tokens begin to end - 1 and scores its last ``scored`` ones.

    The numbers of ``scored`` add up to length - 1. ``stride`` must be below ``window``: a window's first token is only context.
    """
    done = 1  # nothing predicts a text's first token
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        if end > done:
            yield begin, end, end - done
            done = end
        if end == length:
            return
# [/windows]


def check_protocol(window: int, stride: int, context: int) -> None:
    """Raises InputError unless 1 <= stride < window <= context, the tokens that the model holds."""
    if window > context:
        raise InputError(f"a window of {window} tokens is longer than the model's context of {context}; give --window {context} or less")
    if not 1 <= stride < window:
        wanted = f"it must be from 1 to {window - 1}, a window's first token is context only"
        raise InputError(f"a stride of {stride} tokens does not fit windows of {window}: {wanted}")


def score_texts(
    model: ReferenceModel | Engine, texts: Sequence[Text], *, window: int = WINDOW, stride: int = STRIDE, progress: Progress | None = None
) -> list[Score]:
    """A Score for each text, in their order: losses in nats, summed over the len(ids) - 1 tokens that are predicted, in float64.

    A model takes whole windows at once and gives float32 logits [tokens, vocab]; an engine is asked for float32 logits [vocab], one token at a time, and
    what it held is dropped. ``window`` and ``stride`` are tokens. ``progress`` is called after each window as (tokens predicted so far, tokens to predict in
    all texts, name of the text).

    Raises InputError, before anything is computed, for a protocol that does not fit (``check_protocol``), a text of fewer than two tokens, and an id that
    the model has no row for; NonFiniteError when the model yields NaN or infinity; and what an engine raises, such as DeviceError.
    """
    check_protocol(window, stride, model.context_limit)
    loss_of = stepped_loss if isinstance(model, Engine) else window_loss
    for text in texts:
        if len(text.ids) < 2:
            raise InputError(f"{text.name}: tokens: {len(text.ids)}, needed: at least two, since nothing predicts the first token of a text")
        if max(text.ids) >= model.dims.vocab:
            raise InputError(f"{text.name}: token id {max(text.ids)} has no row in a vocabulary of {model.dims.vocab}; tokenizer and weights do not belong together")
    total, done, scores = sum(len(text.ids) - 1 for text in texts), 0, []
    for text in texts:
        loss = 0.0
        for begin, end, scored in windows(len(text.ids), window, stride):
            loss += loss_of(model, text.ids[begin:end], scored)
            done += scored
            if progress:
                progress(done, total, text.name)
        scores.append(Score(text.name, loss, len(text.ids) - 1, text.bytes))
    return scores


def window_loss(model: ReferenceModel, ids: list[int], scored: int) -> float:
    """Summed loss, in nats, of the last ``scored`` tokens of ``ids``, each predicted from all before it; 1 <= scored < len(ids).

    The cache starts empty. Tokens that predict nothing that counts skip the output head, the largest matrix.
    """
    if len(ids) > model.context_limit:
        raise ContextError(f"{len(ids)} tokens do not fit a context of {model.context_limit}")
    first = len(ids) - 1 - scored  # the logits of this token predict the first one that counts
    for at in range(0, first, CONTEXT_CHUNK):
        model.forward(torch.tensor(ids[at : min(at + CONTEXT_CHUNK, first)]), at, last_only=True)
    step = max(1, min(CONTEXT_CHUNK, LOGIT_BUDGET // model.dims.vocab))
    loss = 0.0
    for at in range(first, len(ids) - 1, step):
        stop = min(at + step, len(ids) - 1)
        logits = model.forward(torch.tensor(ids[at:stop]), at)
        targets = torch.tensor(ids[at + 1 : stop + 1], device=logits.device)
        loss += F.cross_entropy(logits, targets, reduction="none").double().sum().item()
    return loss


# [stepped]
def stepped_loss(engine: Engine, ids: list[int], scored: int) -> float:
    """``window_loss`` by an engine, through ``prefill`` and ``decode``: the context at once, then the scored tokens one by one.

    Whatever the engine held is dropped. Raises NonFiniteError when it yields NaN or infinity.
    """
    engine.reset()
    first = len(ids) - 1 - scored  # the logits of this token predict the first one that counts
    logits = engine.prefill(ids[: first + 1])
    loss = surprise(logits, ids[first + 1])
    for token, following in zip(ids[first + 1 : -1], ids[first + 2 :]):
        loss += surprise(engine.decode(token), following)
    return loss
# [/stepped]


def surprise(logits: np.ndarray, token: int) -> float:
    """-log softmax(logits)[token] in nats, in float64."""
    wide = logits.astype(np.float64)
    top = wide.max()
    loss = float(top + np.log(np.exp(wide - top).sum()) - wide[token])
    if not math.isfinite(loss):
        raise NonFiniteError("the logits are not finite; run without --engine to learn the layer")
    return loss


def together(scores: Sequence[Score]) -> Score:
    """All texts as one: losses, tokens and bytes added up, so that every token weighs the same."""
    return Score("together", sum(s.loss for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))
