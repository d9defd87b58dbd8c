"""Tokenizers and engines for tests of text: no weights, no torch.

The tokenizers have Qwen2's form (NFC, its splitter, byte-level BPE) and a vocabulary small enough to read. The engines keep
the contract of `nanoqwen.engines.base.Engine`; what they answer is a function of the ids they hold, so a cache that holds the
wrong ids shows at once.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Callable, Mapping

import numpy as np
import tokenizers
import tokenizers.models
import tokenizers.trainers

import tiny
from nanoqwen.config import Dims
from nanoqwen.engines.base import Engine
from nanoqwen.tokenizer import Tokenizer
from qwen_vocab import added_token

# ------------------------------------------------------------------------------------------------------------ tokenizers

def as_bytes(spec: dict) -> bytes:
    """The content of a `tokenizer.json`."""
    return json.dumps(spec, ensure_ascii=False).encode("utf-8")


def tiny_tokenizer(**meta) -> Tokenizer:
    """The plain fixture: 256 bytes, "in" 256, "er" 257, three markers 258 to 260."""
    return Tokenizer.from_parts(as_bytes(tiny.tokenizer()), meta)


def spec_with_merges(*merges: str, markers: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")) -> dict:
    """`tokenizer.json` with just these merges ("a b", spelled in byte letters) after the 256 bytes, then the markers."""
    spec = tiny.tokenizer(markers=False)
    vocab = {letters: token_id for letters, token_id in spec["model"]["vocab"].items() if token_id < 256}
    for merge in merges:
        vocab.setdefault(merge.replace(" ", ""), len(vocab))
    spec["model"].update(vocab=vocab, merges=[merge.split(" ") for merge in merges])
    spec["added_tokens"] = [added_token(len(vocab) + k, text, special=not text.startswith("<|fim")) for k, text in enumerate(markers)]
    return spec


CORPUS = """\
def read(path, mode='r'):
    # It's a small corpus: code, English, line ends and indentation.
    for line in open(path, mode):
        if line.strip() == '':
            continue
        yield line -> str


class Reader:
    def __init__(self, user, system, assistant):
        self.user = user

    return x


The assistant answers the user, and the user thanks the assistant.\r\n\r\nYou are a helpful assistant.\t\tcafé, naïve, 中文 中文 중국어 👩‍💻 👩‍💻
"""


@lru_cache
def trained_spec(entries: int = 700) -> dict:
    """A BPE of Qwen2's form trained on a screenful of text: merges of newlines, indentation, words and parts of characters."""
    learner = tokenizers.Tokenizer.from_str(as_bytes(tiny.tokenizer(markers=False)).decode())
    learner.model = tokenizers.models.BPE()
    letters = sorted(tiny.tokenizer()["model"]["vocab"], key=len)[:256]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=entries, initial_alphabet=letters, show_progress=False)
    learner.train_from_iterator([CORPUS] * 4, trainer)
    model = json.loads(learner.to_str())["model"]
    spec = tiny.tokenizer()
    spec["model"].update(vocab=model["vocab"], merges=model["merges"])
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
               "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")  # fmt: skip
    spec["added_tokens"] = [added_token(len(model["vocab"]) + k, text, special=k < 3) for k, text in enumerate(markers)]
    return spec


# --------------------------------------------------------------------------------------------------------------- engines

class FakeEngine(Engine):
    """An engine whose logits are `logits_of(held ids)`. `computed` counts the ids that went through prefill and decode."""

    name = "fake"

    def __init__(self, logits_of: Callable[[list[int]], np.ndarray], *, vocab: int = 512, context: int = 8192) -> None:
        dims = Dims(num_layers=1, hidden=128, intermediate=128, num_heads=1, num_kv_heads=1, head_dim=128, vocab=vocab, max_position=context,
                    rope_theta=1e6, rms_eps=1e-6, tied=False)  # fmt: skip
        super().__init__(dims, 128, device="a test", description="a test", context_limit=context)
        self._held: list[int] = []
        self._logits_of = logits_of
        self.computed = 0

    @property
    def tokens(self) -> list[int]:
        return list(self._held)

    def _prefill(self, ids: list[int]) -> np.ndarray:
        logits = np.asarray(self._logits_of([*self._held, *ids]), dtype=np.float32)
        self._held += ids
        self.computed += len(ids)
        return logits

    def _decode(self, token: int) -> np.ndarray:
        return self._prefill([token])

    def _rewind(self, position: int) -> None:
        del self._held[position:]

    def _close(self) -> None:
        self._held = []


def scripted(chain: Mapping[int, int], **options) -> FakeEngine:
    """After id `a` the greedy next is `chain[a]`; after any other id it is that id again."""

    def logits_of(ids: list[int]) -> np.ndarray:
        return one_hot(chain.get(ids[-1], ids[-1]), options.get("vocab", 512))

    return FakeEngine(logits_of, **options)


def replaying(*replies: list[int], vocab: int = 1024) -> FakeEngine:
    """Answers the n-th request with the n-th list of ids. A request is a prefill, a token after it is a decode."""
    engine = FakeEngine(lambda ids: one_hot(next(engine.script), vocab), vocab=vocab)
    waiting, prefill = iter(replies), engine._prefill

    def start_next(ids: list[int]) -> np.ndarray:
        engine.script = iter(next(waiting))
        return prefill(ids)

    engine._prefill, engine._decode = start_next, lambda token: prefill([token])
    return engine


def hashed(seed: int = 0, *, vocab: int = 512, scale: float = 3.0, **options) -> FakeEngine:
    """Random logits that depend on every id held and on its place."""

    def logits_of(ids: list[int]) -> np.ndarray:
        state = np.random.SeedSequence([seed, len(ids), *ids])
        return np.random.default_rng(state).normal(0, scale, vocab)

    return FakeEngine(logits_of, vocab=vocab, **options)


def one_hot(token: int, vocab: int) -> np.ndarray:
    logits = np.zeros(vocab, dtype=np.float32)
    logits[token] = 1
    return logits
