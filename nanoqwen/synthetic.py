"""Models without a download: seeded random weights that every machine makes alike.

``synthetic:7b`` has the dimensions of Qwen2.5-Coder-7B, so every speed number of the book can be reproduced without
15 GB of checkpoint. The text it writes means nothing; the bytes it reads are the real model's.

Each weight is a function of (seed, tensor, index) alone, in integer arithmetic: ``splitmix64`` gives 64 bits, and counting
set bits turns them into numbers with a bell-shaped, symmetric distribution. So numpy here and a kernel on the card
(kernels/setup/synthetic.cu) make the same bits, and no random-number library's version matters.

* INT4 codes are popcount of 14 bits - 7: mean 0, standard deviation 1.87, from -7 to 7. (Uniform nibbles would have mean -0.5, and a
  deep model of them drifts in one direction, which hides errors.)
* FP16 values are (popcount of 64 bits - 32) / 4, standard deviation 1, times a tensor's own size.
* Sizes keep the residual of a deep model finite and its logits a few units wide, as in a trained one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.int4 import SHIFTS
from nanoqwen.model import TensorSpec

CODE_STD = 14**0.5 / 2  # of a binomial of 14 fair bits


# [splitmix]
def splitmix64(x: np.ndarray) -> np.ndarray:
    """uint64 -> well-mixed uint64; Steele, Lea and Flood 2014, the constants of Java's SplittableRandom."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)
# [/splitmix]


def stream_key(seed: int, name: str) -> int:
    """The 64-bit start of a tensor's stream: seed in the high half, CRC-32 of the name in the low half, mixed."""
    return int(splitmix64(np.array([(seed & 0xFFFFFFFF) << 32 | zlib.crc32(name.encode("utf-8"))], dtype=np.uint64))[0])


def popcount(x: np.ndarray) -> np.ndarray:
    """Set bits of each uint64, as int64."""
    bytes_ = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, 8)
    return _BITS[bytes_].sum(-1, dtype=np.int64)


_BITS = np.array([bin(i).count("1") for i in range(256)], dtype=np.uint8)


def words(key: int, first: int, count: int) -> np.ndarray:
    """ValueShuffle words ``first`` .. of a tensor's stream, uint32 [count]. Word i takes the hashes 2 i and 2 i + 1, four weights each."""
    out = np.zeros(count, dtype=np.uint32)
    for half in (0, 1):
        index = np.arange(first, first + count, dtype=np.uint64) * np.uint64(2) + np.uint64(half)
        with np.errstate(over="ignore"):
            bits = splitmix64(index + np.uint64(key))
        for j in range(4):
            code = popcount(bits >> np.uint64(14 * j) & np.uint64(0x3FFF)) - 7
            out |= (code & 0xF).astype(np.uint32) << np.uint32(SHIFTS[4 * half + j])
    return out


def values(key: int, first: int, count: int, size: float, centre: float = 0.0) -> np.ndarray:
    """Elements ``first`` .. of an FP16 tensor's stream: centre + size * bell, float16 [count]."""
    with np.errstate(over="ignore"):
        bits = splitmix64(np.arange(first, first + count, dtype=np.uint64) + np.uint64(key))
    bell = ((popcount(bits) - 32).astype(np.float32)) * np.float32(0.25)
    return (np.float32(centre) + np.float32(size) * bell).astype(np.float16)


@dataclass(frozen=True)
class Recipe:
    """How one tensor is filled: ``size`` and ``centre`` of its values, or of its INT4 scales."""

    size: float
    centre: float = 0.0


def recipe(spec: TensorSpec, dims: Dims) -> Recipe:
    """Magnitudes by kind of tensor.

    A projection of fan-in n has weights of standard deviation gain / sqrt(n). The scales of INT4 groups vary by 1/8 around that.
    """
    if spec.int4:
        gain = 0.5 / (2 * dims.num_layers) ** 0.5 if spec.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        scale = gain / spec.cols**0.5 / CODE_STD
        return Recipe(scale / 8, scale)
    if spec.name.endswith("norm.weight"):
        return Recipe(0.1, 1.0)
    if spec.name.endswith(".bias"):
        return Recipe(0.5)
    return Recipe(3.0 / dims.hidden**0.5 if spec.name.startswith("lm_head") or dims.tied else 0.5)


#: What may stand behind ``synthetic:``.
NAMED = ("7b", "demo", "0.5b", "1.5b", "3b", "14b", "32b")


def synthetic_dims(name: str) -> Dims:
    """Dimensions of ``synthetic:<name>``. Raises InputError listing the names. Sizes other than the 7B are those of the Qwen2.5-Coder family."""
    seven = Dims.qwen2_5_coder_7b()
    family = {
        "7b": seven,
        "0.5b": replace(seven, num_layers=24, hidden=896, intermediate=4864, num_heads=14, num_kv_heads=2, head_dim=64, vocab=151936, tied=True),
        "1.5b": replace(seven, hidden=1536, intermediate=8960, num_heads=12, num_kv_heads=2, vocab=151936, tied=True),
        "3b": replace(seven, num_layers=36, hidden=2048, intermediate=11008, num_heads=16, num_kv_heads=2, vocab=151936, tied=True),
        "14b": replace(seven, num_layers=48, hidden=5120, intermediate=13824, num_heads=40, num_kv_heads=8),
        "32b": replace(seven, num_layers=64, hidden=5120, intermediate=27648, num_heads=40, num_kv_heads=8),
        "demo": replace(seven, num_layers=6, hidden=384, intermediate=1024, num_heads=3, num_kv_heads=1, vocab=2048, max_position=4096),
    }
    if name not in family:
        raise InputError(f"there is no synthetic model {name!r}, use one of {', '.join('synthetic:' + n for n in NAMED)}")
    return family[name]
