"""Layer tier: whole decoder blocks of the file, engine against float64 numpy, on the activations of a real prompt.

Both sides get the same input. The engine runs it twice: at once, and cut so that a page edge falls between two single
tokens. An engine that decodes with kernels of its own also runs it token by token. Its cache rounds keys and values to FP16, the
twin rounds nothing: that difference is what the limit allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nanoqwen.config import Dims, Settings
from nanoqwen.ladder import twins
from nanoqwen.ladder.report import Check, compare
from nanoqwen.packfile import PackFile

#: Tokens of the prompt: three full pages and one token, the length at which the original story found its bug.
TOKENS = 49
#: Models with more layers are checked at the first, the middle and the last one.
ALL_LAYERS_UP_TO = 8
#: Two roundings of half a unit in the last place: a block adds to the residual twice.
FP32_ROUNDING = 2.0**-23


# [checks]
def checks(pack: PackFile, blocks, ids: list[int], settings: Settings) -> Iterator[Check]:
    """`blocks` has the methods of `subject.TorchBlocks`; `ids` are the tokens of a prompt, of which TOKENS are used."""
    limit, page, dims = settings.ladder.layer_max_rel_error, settings.kv.page_tokens, pack.dims
    ids = ids[: min(TOKENS, dims.max_position)]
    n = len(ids)
    cut = [n] if n <= page + 2 else [page - 1, 1, 1, n - page - 1]
    x = twins.embed(pack, ids).astype(np.float32)
    for layer in range(dims.num_layers):
        out = blocks.run(layer, x, [n])
        if layer in chosen_layers(dims):
            expected = twins.block(pack, layer, x.astype(np.float64), [n])
            # The residual carries x along unchanged. Without x, an error of what the block adds cannot hide behind its input;
            # but FP32 rounds the sum, which counts where x is much larger than what is added to it.
            added = expected - x
            size = float(np.linalg.norm(added))
            allowed = limit + (FP32_ROUNDING * float(np.linalg.norm(expected)) / size if size else 0.0)
            yield compare(f"layer {layer}, {n} tokens at once", out - x.astype(np.float64), added, allowed)
            if cut != [n]:
                pieces = blocks.run(layer, x, cut) - x.astype(np.float64)
                yield compare(f"layer {layer}, {n} tokens in pieces", pieces, added, allowed, f"pieces of {', '.join(map(str, cut))}")
            if blocks.decodes:
                single = blocks.run(layer, x, [1] * n) - x.astype(np.float64)
                yield compare(f"layer {layer}, {n} tokens one by one", single, added, allowed)
        x = out
    last = x[-3:]
    yield compare("final norm and output head", blocks.head(last), twins.head(pack, last.astype(np.float64)), settings.ladder.unit_max_rel_error)
# [/checks]


def chosen_layers(dims: Dims) -> set[int]:
    """Every layer of a small model; first, middle and last of a large one."""
    last = dims.num_layers - 1
    return set(range(last + 1)) if dims.num_layers <= ALL_LAYERS_UP_TO else {0, last // 2, last}
