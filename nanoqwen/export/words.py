"""The order of eight 4-bit codes in a word, ours and that of the ``pack-quantized`` form.

Both hold eight neighbours of a row in 32 bits, four bits each; they differ in two things:

===============  ==========================  ==================================
weight i = 0..7  ValueShuffle (layout id 1)  pack-quantized
===============  ==========================  ==================================
lowest bit       0 16 4 20 8 24 12 28        0 4 8 12 16 20 24 28
code c           two's complement            c + 8, an unsigned number 0 to 15
===============  ==========================  ==================================

In four bits, adding 8 to a two's complement number is flipping its top bit: -8 is 1000 and becomes 0000, 0 becomes 1000,
7 is 0111 and becomes 1111.
"""

from __future__ import annotations

import numpy as np

from nanoqwen.int4 import SHIFTS

_TOP_BITS = np.uint32(0x88888888)


# [plain_order]
def plain_order(words: np.ndarray) -> np.ndarray:
    """ValueShuffle words uint32 [rows, n] -> ``pack-quantized`` words int32 [rows, n], the same codes in the same places of a row."""
    plain = np.zeros_like(words)
    for i, shift in enumerate(SHIFTS):
        plain |= (words >> np.uint32(shift) & np.uint32(0xF)) << np.uint32(4 * i)
    return (plain ^ _TOP_BITS).view(np.int32)
# [/plain_order]
