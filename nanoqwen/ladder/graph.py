"""Graph tier: the engine as it generates, against a simulation that computes whole sequences at once.

The engine continues each prompt greedily: chunked prefill, then one token at a time through the paged FP16 cache. The oracle
then sees prompt and continuation as one sequence, without a cache, and says which token it would have chosen at each step.
Both choose after the very same tokens, so one disagreement does not spoil the rest of its prompt (teacher forcing).

Disagreements happen where the two best logits nearly tie, since the cache rounds to FP16; each is listed with that margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanoqwen.config import Settings
from nanoqwen.engines.base import Engine
from nanoqwen.generate import generate
from nanoqwen.ladder import twins
from nanoqwen.ladder.prompts import long_text, prompts
from nanoqwen.ladder.report import Check, none_wrong
from nanoqwen.model import flops_per_token
from nanoqwen.packfile import PackFile
from nanoqwen.sampling import GREEDY, Sampler
from nanoqwen.synthetic import splitmix64
from nanoqwen.tokenizer import Tokenizer

#: Above this many floating-point operations the float64 oracle would take minutes on a laptop, and PyTorch in FP32 steps in.
FLOAT64_BUDGET = 4e11
#: Lines of mismatches that are listed; the count is always complete.
LISTED = 20
#: Decode steps of the prompt that is run twice.
REPEATED = 3

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Case:
    """One prompt and what the engine made of it, as token ids."""

    label: str
    prompt: list[int]
    reply: list[int]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.prompt), tuple(self.reply)


# [plan]
def plan(tokenizer: Tokenizer, count: int, tokens: int, context: int, settings: Settings, texts: Sequence[str] | None = None) -> list[tuple[str, list[int]]]:
    """`count` labelled prompts as ids, from `texts` (by default our own). Each leaves room for `tokens` new ones in the context.

    One in three is cut from a long text to a length at which pages, chunks and graph variants have an edge, so that a short
    request also follows a long one; the others have their natural length.
    """
    room = context - tokens
    source = tokenizer.encode(long_text())
    edges = [n for n in settings.ladder.edge_lengths if n <= min(room, len(source))]
    planned = []
    for k, text in enumerate((texts or prompts(count))[:count]):
        ids = tokenizer.encode(text)
        if edges and (k % 3 == 2 or len(ids) > room):
            n = edges[k // 3 % len(edges)]
            planned.append((f"{n} tokens of Python", source[:n]))
        elif len(ids) <= room:
            planned.append((repr(text.splitlines()[-1][:40]), ids))
    return planned
# [/plan]


def varied(planned: Sequence[tuple[str, list[int]]], vocab: int) -> list[tuple[str, list[int]]]:
    """The same lengths with seeded ids from the whole vocabulary: prompts for random weights, to which no tokenizer belongs."""
    longest = max(len(ids) for _, ids in planned)
    source = _hashed(0, longest, vocab)
    out = []
    for k, (label, ids) in enumerate(planned):
        edge = label.endswith("tokens of Python")
        out.append((f"prompt {k}, {len(ids)} varied ids", source[: len(ids)] if edge else _hashed(k + 1, len(ids), vocab)))
    return out


def _hashed(seed: int, count: int, vocab: int) -> list[int]:
    return (splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) % np.uint64(vocab)).astype(int).tolist()


@dataclass
class Outcome:
    """What `run` found: name of the oracle, checks, lines about mismatches, and counts for a receipt."""

    oracle: str
    checks: list[Check]
    lines: list[str]
    facts: dict


def run(
    pack: PackFile, engine: Engine, tokenizer: Tokenizer | None, planned: list[tuple[str, list[int]]], tokens: int, settings: Settings,
    oracle_device: str, progress: Progress | None,
) -> Outcome:
    """Generate, then compare. `progress` counts prompts and then oracle passes.

    Without a tokenizer every id of the vocabulary may be chosen.
    """
    total = 2 * len(planned)
    cases = []
    for k, (label, prompt) in enumerate(planned):
        cases.append(Case(label, prompt, _reply(engine, tokenizer, prompt, tokens)))
        if progress:
            progress(k + 1, total, label)
    repeat = _repeat(engine, cases[0])
    # Prompts cut from one text to the same edge length come more than once. The oracle sees each sequence once.
    unique = {case.key: case for case in cases}
    name, scores = _oracle(pack, list(unique.values()), oracle_device)
    valid = np.ones(pack.dims.vocab, bool)
    if tokenizer is not None:
        valid[tokenizer.id_limit :] = False
        valid[list(tokenizer.banned_ids)] = False

    found: dict[tuple, list[str]] = {}
    margins, gaps, spreads = [], [], []
    # [compare]
    for k, (case, logits) in enumerate(zip(unique.values(), scores)):
        logits = np.where(valid, logits, -np.inf)
        steps = np.arange(len(case.reply))
        expected, chosen = logits.argmax(axis=1), np.array(case.reply, int)
        best, gap = logits[steps, expected], logits[steps, expected] - logits[steps, chosen]
        spreads.append(float(logits[0, valid].std()))
        logits[steps, expected] = -np.inf
        margin = best - logits.max(axis=1)
        wrong = np.flatnonzero(chosen != expected)
        found[case.key] = [_mismatch(case, int(i), int(expected[i]), float(margin[i]), float(gap[i]), tokenizer) for i in wrong]
        margins += margin.tolist()
        gaps += gap[wrong].tolist()
    # [/compare]
        if progress:
            progress(len(cases) + (k + 1) * len(cases) // len(unique), total, case.label)
    compared = sum(len(case.reply) for case in cases)
    lines = [line for case in cases for line in found[case.key]]
    mismatches, share = len(lines), (compared - len(lines)) / compared if compared else 0.0
    facts = {"prompts": len(cases), "tokens": compared, "mismatches": mismatches, "match": share, "median_margin": float(np.median(margins or [0.0]))}
    lines = list(dict.fromkeys(lines))[:LISTED]
    if mismatches:
        facts["largest_gap"] = max(gaps)
        lines.append(
            f"the engine's choices are at most {max(gaps):.3g} below the oracle's best; the oracle's two best are {facts['median_margin']:.3g} apart "
            f"in the median, its logits have a standard deviation of {np.mean(spreads):.3g}"
        )
    detail = f"{compared - mismatches} of {compared} tokens, {len(cases)} prompts of {_span(cases)} tokens"
    limit = settings.ladder.graph_min_token_match
    return Outcome(name, [Check("token match", share >= limit, share, limit, "share, at least", detail), repeat], lines, facts)


def _reply(engine: Engine, tokenizer: Tokenizer | None, prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids of the engine, end ids among them."""
    if tokenizer is not None:
        return generate(engine, tokenizer, prompt, max_tokens=tokens, ignore_eos=True).run().ids
    chooser = Sampler(GREEDY, engine.dims.vocab)
    engine.reset()
    first = engine.prefill_next(prompt, chooser)
    return [first, *engine.stream(first, tokens - 1, chooser)]


def _repeat(engine: Engine, case: Case) -> Check:
    """The same prompt and tokens twice: the logits must have the same bits."""
    runs = []
    for _ in range(2):
        engine.reset()
        runs.append(np.stack([engine.prefill(case.prompt), *(engine.decode(token) for token in case.reply[:REPEATED])]))
    different = int(np.count_nonzero(runs[0].view(np.uint32) != runs[1].view(np.uint32)))
    return none_wrong("repeat is bit-equal", different, "logits with other bits", f"{case.label} and {len(runs[0]) - 1} steps, twice")


def _oracle(pack: PackFile, cases: list[Case], device: str) -> tuple[str, Iterator[np.ndarray]]:
    """Logits [len(reply), vocab] for each case: at the last prompt token, and at every reply token but the last."""
    sequences = [case.prompt + case.reply[:-1] for case in cases]
    starts = [len(case.prompt) - 1 for case in cases]
    cost = flops_per_token(pack.dims, 0) * sum(map(len, sequences))
    if cost <= FLOAT64_BUDGET:
        return "numpy float64, written apart, whole sequence at once, no cache", _float64(pack, sequences, starts)
    from nanoqwen.ladder.subject import TorchOracle

    oracle = TorchOracle(pack, device)
    return oracle.name, oracle.all(sequences, starts)


def _float64(pack: PackFile, sequences: list[list[int]], starts: list[int]) -> Iterator[np.ndarray]:
    lengths = [len(ids) for ids in sequences]
    x = twins.embed(pack, [token for ids in sequences for token in ids])
    for layer in range(pack.dims.num_layers):
        x = twins.block(pack, layer, x, lengths)
    for end, n, start in zip(np.cumsum(lengths), lengths, starts):
        yield twins.head(pack, x[end - n + start : end])


def _mismatch(case: Case, step: int, expected: int, margin: float, gap: float, tokenizer: Tokenizer | None) -> str:
    def spelled(token: int) -> str:
        return str(token) if tokenizer is None else f"{token} {tokenizer.token_text(token)!r}"

    return (
        f"{case.label}, step {step} (position {len(case.prompt) + step}): engine {spelled(case.reply[step])}, oracle {spelled(expected)}; "
        f"oracle's margin between its two best {margin:.4g}, to the engine's choice {gap:.4g}"
    )


def _span(cases: list[Case]) -> str:
    lengths = [len(case.prompt) for case in cases]
    return f"{min(lengths)} to {max(lengths)}" if lengths else "no"
