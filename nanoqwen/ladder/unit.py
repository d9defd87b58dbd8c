"""Unit tier: single operations against their float64 twins, on tensors of the file where it has some.

Inputs are drawn from a fixed seed. Lengths are those at which pages have an edge, from config/nanoqwen.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nanoqwen import model
from nanoqwen.config import Settings
from nanoqwen.ladder import twins
from nanoqwen.ladder.report import Check, compare, none_wrong
from nanoqwen.packfile import INT4, PackFile
from nanoqwen.sampling import GREEDY, Sampler

#: Rows of a matrix that a unit check looks at: the first and the last, so that both ends of a payload are read.
ROWS = 64
#: Edge lengths beyond this belong to the layer and graph tiers.
LONGEST = 64


def checks(pack: PackFile, operations, settings: Settings) -> Iterator[Check]:
    """Every unit check, one after the other. `operations` has the methods of `subject.TorchOperations`."""
    rng = np.random.default_rng(0)
    limit = settings.ladder.unit_max_rel_error
    lengths = [n for n in settings.ladder.edge_lengths if n <= min(LONGEST, pack.dims.max_position)]
    yield from _weights(pack, operations, rng, limit)
    yield from _pointwise(pack, operations, rng, limit)
    yield from _attention(pack, operations, rng, limit, lengths)
    yield from _cache(pack, operations, rng, lengths, settings.kv.page_tokens)
    yield _argmax(rng)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# [weights]
def _weights(pack: PackFile, operations, rng, limit: float) -> Iterator[Check]:
    yield scales_finite(pack)
    for layer in sorted({0, pack.dims.num_layers - 1}):
        for spec in model.block_schema(pack.dims, layer):
            if not spec.int4:
                continue
            words, scales = _two_ends(pack, spec.name)
            expected = twins.dequantize(words, scales)
            yield compare(f"unpack {spec.name}", operations.dequantize(words, scales), expected, 0.0, "bit for bit")
            x = _normal(rng, 3, spec.cols)
            out = operations.int4_linear(words, scales, x)
            yield compare(f"multiply {spec.name}", out, x.astype(np.float64) @ expected.T, limit)
# [/weights]


def scales_finite(pack: PackFile) -> Check:
    """No scale of the file is NaN or infinite."""
    bad = [e.name for e in pack.tensors.values() if e.storage == INT4 and not np.isfinite(pack.int4(e.name)[1]).all()]
    return none_wrong("scales are finite", len(bad), "tensors", ", ".join(bad[:3]))


def _two_ends(pack: PackFile, name: str) -> tuple[np.ndarray, np.ndarray]:
    words, scales = pack.int4(name)
    rows = np.unique(np.r_[: min(ROWS, len(words)), max(0, len(words) - ROWS) : len(words)])
    return words[rows], scales[rows]


def _pointwise(pack: PackFile, operations, rng, limit: float) -> Iterator[Check]:
    d = pack.dims
    x = _normal(rng, 5, d.hidden)
    x[1, 0] = 1e5  # a single channel past FP16's range, as Qwen2's residual has them
    x[2] *= 1e-4  # so small that eps counts
    gain = pack.fp16(model.FINAL_NORM).astype(np.float32)
    out = operations.rms_norm(x, gain, d.rms_eps)
    yield compare("rms_norm", out, twins.rms_norm(x.astype(np.float64), gain.astype(np.float64), d.rms_eps), limit)

    gate, up = _normal(rng, 5, d.intermediate), _normal(rng, 5, d.intermediate)
    gate[:, :4] = [-200, -100, 100, 200]  # where a careless exponential overflows
    out = operations.swiglu(gate, up)
    yield compare("swiglu", out, twins.swiglu(gate.astype(np.float64), up.astype(np.float64)), limit)

    positions = np.array([0, 1, 15, 16, 17, 48])
    q = _normal(rng, len(positions), d.num_heads, d.head_dim)
    out = operations.rope(q, positions, d.rope_theta)
    yield compare("rope", out, twins.rope(q.astype(np.float64), positions, d.rope_theta), limit, f"positions {_list(positions)}")


def _attention(pack: PackFile, operations, rng, limit: float, lengths: list[int]) -> Iterator[Check]:
    d = pack.dims
    for n in lengths:
        q, k, v = _normal(rng, n, d.num_heads, d.head_dim), _normal(rng, n, d.num_kv_heads, d.head_dim), _normal(rng, n, d.num_kv_heads, d.head_dim)
        expected = twins.attention(*(a.astype(np.float64) for a in (q, k, v)), 0)
        yield compare(f"attention, prompt of {n}", operations.attention(q, k, v, 0), expected, limit)
        yield compare(f"attention, token {n}", operations.attention(q[-1:], k, v, n - 1), expected[-1:], limit)


def _cache(pack: PackFile, operations, rng, lengths: list[int], page: int) -> Iterator[Check]:
    """What goes into the paged cache comes back, rounded once to FP16, however it was cut into chunks."""
    d = pack.dims
    for n in lengths:
        k, v = _normal(rng, n, d.num_kv_heads, d.head_dim), _normal(rng, n, d.num_kv_heads, d.head_dim)
        expected = np.stack([a.astype(np.float16).astype(np.float64) for a in (k, v)])
        for chunks in _cuts(n, page):
            out = np.stack(operations.through_cache(k, v, chunks))
            yield compare(f"KV cache, {n} tokens", out, expected, 0.0, f"appended as {_list(chunks)}, bit for bit")


def _cuts(n: int, page: int) -> list[list[int]]:
    """At once; and up to one token before a page edge, then one by one across it, then the rest."""
    before = page - 1
    if n <= before:
        return [[n]]
    single = min(2, n - before)
    rest = n - before - single
    return [[n], [before, *[1] * single, *([rest] if rest else [])]]


def _argmax(rng) -> Check:
    """Greedy sampling takes the largest logit, the lowest id on a tie, and never a padding id."""
    wrong, rounds = 0, 200
    for _ in range(rounds):
        logits = rng.integers(0, 8, 96).astype(np.float32)  # few values, so ties are common
        logits[64:] = 100  # padding ids look best
        expected = next(i for i in range(64) if logits[i] == max(logits[:64]))
        wrong += Sampler(GREEDY, 64).pick(logits) != expected
    return Check("argmax", wrong == 0, wrong, 0, "wrong picks", f"{rounds} draws with ties and padding")


def _list(numbers) -> str:
    return ", ".join(str(int(n)) for n in numbers)
