"""How a token is chosen on the card: what the kernels of ``kernels/decode`` that choose are told.

Which ids may be chosen is a bitmap, since ids without a token lie between others; the rule of a draw is three numbers.
Only numpy here: the tests of the algorithm need no card.
"""

from __future__ import annotations

import numpy as np

from nanoqwen.cuda.constants import padded_rows
from nanoqwen.sampling import Sampler

#: The cluster of kernels/decode/sample.cu: CTAs, and threads of each.
SAMPLE_CTAS, SAMPLE_THREADS = 8, 512


def allowed_words(vocab: int, valid_ids: int, banned_ids: np.ndarray | None = None) -> np.ndarray:
    """uint32 [rows / 32, rounded up]: bit ``id % 32`` of word ``id // 32`` is set for an id that may be chosen (kernels/common/allowed.cuh)."""
    flags = np.zeros(-(-padded_rows(vocab) // 32) * 32, dtype=bool)
    flags[: min(valid_ids, vocab)] = True
    if banned_ids is not None:
        flags[banned_ids[banned_ids < vocab]] = False
    return np.packbits(flags, bitorder="little").view("<u4")


def rule(chooser: Sampler) -> np.ndarray:
    """float64 [3]: 1 / temperature, top-p, top-k, as ``Rule`` in kernels/decode/sample.cu. Not used by a greedy choice."""
    p = chooser.params
    return np.array([1 / p.temperature if p.temperature else 0.0, p.top_p, p.top_k], dtype=np.float64)


def sample_shared_bytes(vocab: int) -> int:
    """Dynamic shared memory of ``sample``: an 8-byte weight for each id of a CTA."""
    return -(-padded_rows(vocab) // (SAMPLE_CTAS * SAMPLE_THREADS)) * SAMPLE_THREADS * 8
