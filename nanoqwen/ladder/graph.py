"""Graph tier: the engine as it generates, against a simulation that computes whole sequences at once.

The engine continues each prompt greedily: chunked prefill, then one token at a time through the paged FP16 cache. The oracle
then sees prompt and continuation as one sequence, without a cache, and says which token it would have chosen at each step.
Both choose after the very same tokens, so one disagreement does not spoil the rest of its prompt (teacher forcing).

Disagreements happen where the two best logits nearly tie, since the cache rounds to FP16; each is listed with that margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from nanoqwen.config import Settings
from nanoqwen.engines.base import Engine
from nanoqwen.generate import generate
from nanoqwen.ladder import twins
from nanoqwen.ladder.prompts import long_text, prompts
from nanoqwen.ladder.report import Check
from nanoqwen.model import flops_per_token
from nanoqwen.packfile import PackFile
from nanoqwen.tokenizer import Tokenizer

#: Above this many floating-point operations the float64 oracle would take minutes on a laptop, and PyTorch in FP32 steps in.
FLOAT64_BUDGET = 4e11
#: Lines of mismatches that are listed; the count is always complete.
LISTED = 20

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Case:
    """One prompt and what the engine made of it, as token ids."""

    label: str
    prompt: list[int]
    reply: list[int]


# [plan]
def plan(tokenizer: Tokenizer, count: int, tokens: int, context: int, settings: Settings) -> list[tuple[str, list[int]]]:
    """`count` labelled prompts as ids. Each leaves room for `tokens` new ones in the context.

    One in three is cut from a long text to a length at which pages, chunks and graph variants have an edge, so that a short
    request also follows a long one; the others have their natural length.
    """
    room = context - tokens
    source = tokenizer.encode(long_text())
    edges = [n for n in settings.ladder.edge_lengths if n <= min(room, len(source))]
    planned = []
    for k, text in enumerate(prompts(count)):
        ids = tokenizer.encode(text)
        if edges and (k % 3 == 2 or len(ids) > room):
            n = edges[k // 3 % len(edges)]
            planned.append((f"{n} tokens of Python", source[:n]))
        elif len(ids) <= room:
            planned.append((repr(text.splitlines()[-1][:40]), ids))
    return planned
# [/plan]


def run(
    pack: PackFile, engine: Engine, tokenizer: Tokenizer, planned: list[tuple[str, list[int]]], tokens: int, settings: Settings,
    oracle_device: str, progress: Progress | None,
) -> tuple[str, list[Check], list[str]]:
    """(name of the oracle, checks, lines about mismatches). `progress` counts prompts and then oracle passes."""
    total = 2 * len(planned)
    cases = []
    for k, (label, prompt) in enumerate(planned):
        reply = generate(engine, tokenizer, prompt, max_tokens=tokens, ignore_eos=True).run().ids
        cases.append(Case(label, prompt, reply))
        if progress:
            progress(k + 1, total, label)
    name, scores = _oracle(pack, cases, oracle_device)
    valid = np.ones(pack.dims.vocab, bool)
    valid[tokenizer.id_limit :] = False
    valid[list(tokenizer.banned_ids)] = False

    compared, mismatches, lines = 0, 0, []
    for k, (case, logits) in enumerate(zip(cases, scores)):
        logits = np.where(valid, logits, -np.inf)
        best = logits.argmax(axis=1)
        for step, (chosen, expected) in enumerate(zip(case.reply, best)):
            compared += 1
            if chosen != expected:
                mismatches += 1
                if len(lines) < LISTED:
                    lines.append(_mismatch(case, step, chosen, int(expected), logits[step], tokenizer))
        if progress:
            progress(len(cases) + k + 1, total, case.label)
    share = (compared - mismatches) / compared if compared else 0.0
    detail = f"{compared - mismatches} of {compared} tokens, {len(cases)} prompts of {_span(cases)} tokens"
    limit = settings.ladder.graph_min_token_match
    return name, [Check("token match", share >= limit, share, limit, "share, at least", detail)], lines


def _oracle(pack: PackFile, cases: list[Case], device: str) -> tuple[str, Iterator[np.ndarray]]:
    """Logits [len(reply), vocab] for each case: at the last prompt token, and at every reply token but the last."""
    sequences = [case.prompt + case.reply[:-1] for case in cases]
    starts = [len(case.prompt) - 1 for case in cases]
    cost = flops_per_token(pack.dims, 0) * sum(map(len, sequences))
    if cost <= FLOAT64_BUDGET:
        return "numpy float64, written apart, whole sequence at once, no cache", _float64(pack, sequences, starts)
    from nanoqwen.ladder.subject import TorchOracle

    oracle = TorchOracle(pack, device)
    return oracle.name, (oracle.logits(ids, start) for ids, start in zip(sequences, starts))


def _float64(pack: PackFile, sequences: list[list[int]], starts: list[int]) -> Iterator[np.ndarray]:
    lengths = [len(ids) for ids in sequences]
    x = twins.embed(pack, [token for ids in sequences for token in ids])
    for layer in range(pack.dims.num_layers):
        x = twins.block(pack, layer, x, lengths)
    for end, n, start in zip(np.cumsum(lengths), lengths, starts):
        yield twins.head(pack, x[end - n + start : end])


def _mismatch(case: Case, step: int, chosen: int, expected: int, logits: np.ndarray, tokenizer: Tokenizer) -> str:
    top = np.sort(logits)[::-1]
    return (
        f"{case.label}, step {step} (position {len(case.prompt) + step}): engine {chosen} {tokenizer.token_text(chosen)!r}, oracle {expected} "
        f"{tokenizer.token_text(expected)!r}; oracle's margin between its two best {top[0] - top[1]:.4g}, to the engine's choice {top[0] - logits[chosen]:.4g}"
    )


def _span(cases: list[Case]) -> str:
    lengths = [len(case.prompt) for case in cases]
    return f"{min(lengths)} to {max(lengths)}" if lengths else "no"
