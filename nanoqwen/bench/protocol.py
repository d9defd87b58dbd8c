"""What every benchmark shares: the protocol, the prompt, how samples become one number, what a receipt rests on.

The protocol is ``benchmark`` of ``config/nanoqwen.yaml``: batch 1, a prompt of varied seeded ids, greedy decoding, untimed
runs first, then several timed ones. End ids are ignored: every run makes all its tokens, whatever they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from nanoqwen.bench.receipts import HOPPER_SOURCES, PERSISTENT_SOURCES, source_files
from nanoqwen.config import Dims, load_settings, repo_root
from nanoqwen.engines import HOPPER
from nanoqwen.errors import ContextError
from nanoqwen.synthetic import splitmix64

RUNS = 5

#: Files whose change makes a number of any benchmark wrong; ``sources`` adds the engine's.
_BENCH = (
    "nanoqwen/bench/protocol.py", "nanoqwen/bench/prepare.py", "nanoqwen/bench/ceiling.py", "nanoqwen/engines/base.py", "nanoqwen/model.py",
    "nanoqwen/synthetic.py", "config/nanoqwen.yaml",
)  # fmt: skip
_MODES = {
    "e2e": ("nanoqwen/bench/e2e.py", "nanoqwen/bench/peers.py", "nanoqwen/bench/gguf.py"),
    "itl": ("nanoqwen/bench/itl.py", "nanoqwen/bench/e2e.py"),
    "context": ("nanoqwen/bench/context.py", "nanoqwen/bench/e2e.py"),
    "gemv": ("nanoqwen/bench/gemv.py",),
    "prefill": ("nanoqwen/bench/prefill.py", "nanoqwen/bench/card_prefill.py", "nanoqwen/bench/e2e.py"),
}
_PYTORCH = ("nanoqwen/engines/cpu.py", "nanoqwen/reference.py", "nanoqwen/weights.py", "nanoqwen/kv.py")
_HOPPER = ("nanoqwen/engines/synthetic.py", "nanoqwen/bench/card.py")


@dataclass(frozen=True)
class Protocol:
    """What is timed and how often. Tokens, and numbers of runs."""

    prompt_tokens: int
    gen_tokens: int
    warmup: int
    runs: int
    seed: int = 0

    @classmethod
    def standard(cls, **changes: int | None) -> Protocol:
        """``benchmark_e2e`` of the yaml; a change that is None keeps the standard value."""
        b = load_settings().benchmark
        usual = {"prompt_tokens": b.prompt_tokens, "gen_tokens": b.gen_tokens, "warmup": b.warmup, "runs": RUNS, "seed": 0}
        return cls(**{**usual, **{name: value for name, value in changes.items() if value is not None}})

    @property
    def middle(self) -> int:
        """Tokens in the cache half-way through the decode: the context that MBU is computed at."""
        return self.prompt_tokens + self.gen_tokens // 2

    def as_dict(self) -> dict:
        """The protocol as a receipt states it."""
        b = load_settings().benchmark
        standard = (self.prompt_tokens, self.gen_tokens, self.warmup) == (b.prompt_tokens, b.gen_tokens, b.warmup) and self.runs >= RUNS
        return {
            "name": b.name if standard else f"{b.name}, shortened", "batch": 1, **asdict(self), "greedy": True, "lock_clocks": False,
            "end_ids": "ignored: every run makes all its tokens", "prompt": "varied ids, a seeded hash of the position",
            "context_of_mbu": self.middle,
        }  # fmt: skip


    def check_fits(self, limit: int, depth: int | None = None) -> None:
        """Raise ContextError, before anything is timed, when prompt (or ``depth``) and generated tokens are more than ``limit``."""
        before = self.prompt_tokens if depth is None else depth
        if before + self.gen_tokens > limit:
            what = "prompt" if depth is None else "context"
            raise ContextError(
                f"{before:,} {what} tokens and {self.gen_tokens:,} generated make {before + self.gen_tokens:,}, the model's context is {limit:,} tokens; ask for fewer"
            )


def prompt_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    """``count`` ids below ``vocab``, varied and the same on every machine. (One repeated id would make all keys of the cache equal.)"""
    return (splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) % np.uint64(vocab)).astype(int).tolist()


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, float]:
    """{"median", "min", "max"} of the runs."""
    return {name: round(f(samples), digits) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def mbu(nbytes: int, milliseconds: float, gb_s: float | None) -> float | None:
    """Share of the read ceiling: ``nbytes`` in ``milliseconds`` against ``gb_s`` (10**9 bytes a second). None without a ceiling."""
    return None if not gb_s else round(nbytes / (milliseconds / 1e3) / (gb_s * 1e9), 4)


def model_facts(name: str, dims: Dims, group: int, stored_bytes: int, weights: int) -> dict:
    """Which model was measured: ``stored_bytes`` of ``weights`` numbers give the bits a weight."""
    return {
        "name": name, "layers": dims.num_layers, "hidden": dims.hidden, "vocab": dims.vocab, "group": group,
        "bits_per_weight": round(8 * stored_bytes / weights, 3), "kv_type": "FP16",
    }  # fmt: skip


def sources(mode: str, engines: Sequence[str]) -> list[str]:
    """The files a receipt of ``mode`` over ``engines`` rests on, relative to the root of the clone."""
    found = [*_BENCH, *_MODES.get(mode, ())]
    if {"cpu", "reference"} & set(engines):
        found += _PYTORCH
    if repo_root() is not None and set(HOPPER) & set(engines):
        found += [*_HOPPER, *source_files(HOPPER_SOURCES)]
    if repo_root() is not None and "persistent" in engines:
        found += source_files(PERSISTENT_SOURCES)
    return sorted(set(found))
