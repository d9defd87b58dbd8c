"""The decoder, written to be read: Qwen2 in FP32 PyTorch, with a paged KV cache.

Every CUDA kernel of this project computes one of the functions below, and every engine is compared with
``ReferenceModel.forward``. On a machine without a GPU it is also the engine that generates text.

Shapes use these names: ``n`` new tokens, ``length`` tokens in the cache including the new ones, ``heads``
query heads and ``kv_heads`` key/value heads of ``head_dim``. Everything is FP32 except what the cache
stores (FP16 on request). The residual stream of Qwen2 needs it: single channels pass 65,504, FP16's
largest number, and an FP16 residual turns them into infinities and the text into "!!!!".
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F

from nanoqwen import model
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import ContextError, InputError, NonFiniteError
from nanoqwen.kv import PagedKV
from nanoqwen.packfile import PackFile
from nanoqwen.weights import CheckpointSource, DecoderWeights, LayerWeights, Progress, assemble, load_pack

#: Attention scores computed at once: 64 MiB of FP32. More queries than that are taken in slices.
SCORE_BUDGET = 1 << 24


# [rms_norm]
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x [n, hidden] to a root mean square of 1, then by ``weight`` [hidden]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
# [/rms_norm]


# [rope]
def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float32 [n, head_dim] each, of the rotary angles at integer ``positions`` [n].

    Pair i turns by position * theta ** (-2 i / head_dim). Pairs are (i, i + head_dim / 2), so each table
    is its first half twice. Angles are rounded to FP32 as in training: at position 4096 that moves them by
    up to 2e-4, so a table in higher precision would be a different model.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)  # [n, head_dim / 2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, heads, head_dim] by the tables [n, head_dim]; half-split, as Qwen2 does it.

    Element i pairs with i + head_dim / 2 (GPT-J style would pair 2i with 2i + 1).
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
# [/rope]


# [attention]
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int) -> torch.Tensor:
    """Causal grouped-query attention in FP32.

    q [n, heads, head_dim] are the queries of positions ``position`` to ``position + n - 1``; k and v
    [length, kv_heads, head_dim] the cache in order, length = position + n, in any float type. Returns
    [n, heads * head_dim]. Query head h reads KV head h // (heads / kv_heads).

    Queries are taken in slices, so that at most about SCORE_BUDGET scores exist at a time; a slice reads
    only the keys that its last query may see.
    """
    n, heads, head_dim = q.shape
    k = k.transpose(0, 1).float()  # [kv_heads, length, head_dim]
    v = v.transpose(0, 1).float()
    step = max(1, SCORE_BUDGET // (heads * k.shape[1]))
    slices = [_attend(q[i : i + step], k, v, position + i) for i in range(0, n, step)]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int) -> torch.Tensor:
    """One slice: q [n, heads, head_dim], k and v [kv_heads, >= position + n, head_dim] -> [n, heads * head_dim]."""
    n, heads, head_dim = q.shape
    kv_heads, length = k.shape[0], position + n
    ratio = heads // kv_heads
    # The query heads of one group, of all tokens, are the rows of one matrix product with their KV head.
    grouped = q.view(n, kv_heads, ratio, head_dim).transpose(0, 1).reshape(kv_heads, n * ratio, head_dim)
    scores = (grouped * head_dim**-0.5) @ k[:, :length].transpose(1, 2)  # [kv_heads, n * ratio, length]
    if n > 1:  # a single token sees everything
        query_at = torch.arange(position, length, device=q.device)
        hidden = torch.arange(length, device=q.device) > query_at[:, None]  # [n, length], True: in the future
        scores = scores.view(kv_heads, n, ratio, length).masked_fill(hidden[:, None], -math.inf).flatten(1, 2)
    mixed = scores.softmax(-1) @ v[:, :length]  # [kv_heads, n * ratio, head_dim]
    return mixed.view(kv_heads, n, ratio * head_dim).transpose(0, 1).reshape(n, heads * head_dim)
# [/attention]


# [swiglu]
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [n, 2 * intermediate] (gate first) -> [n, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
# [/swiglu]


# [block]
def block(
    x: torch.Tensor,
    weights: LayerWeights,
    kv: PagedKV,
    layer: int,
    position: int,
    rope: tuple[torch.Tensor, torch.Tensor],
    dims: Dims,
) -> torch.Tensor:
    """One decoder block: x [n, hidden] in, [n, hidden] out; appends the new keys and values to ``kv``.

    ``rope`` are the tables of the n new positions, which begin at ``position``.
    """
    n = x.shape[0]

    qkv = weights.qkv(rms_norm(x, weights.input_norm, dims.rms_eps)) + weights.qkv_bias
    heads = qkv.view(n, dims.num_heads + 2 * dims.num_kv_heads, dims.head_dim)  # q heads, then k heads, then v heads
    turned = apply_rope(heads[:, : -dims.num_kv_heads], *rope)  # q and k, not v
    q, k, v = turned[:, : dims.num_heads], turned[:, dims.num_heads :], heads[:, -dims.num_kv_heads :]

    kv.append(layer, k, v, position)
    k, v = kv.gather(layer, position + n)  # [position + n, kv_heads, head_dim], rounded to the cache's type
    x = x + weights.o(attention(q, k, v, position))

    return x + weights.down(swiglu(weights.gate_up(rms_norm(x, weights.post_norm, dims.rms_eps))))
# [/block]


# [check_finite]
def check_finite(x: torch.Tensor, layer: int, num_layers: int) -> None:
    """Raise NonFiniteError when a row of x [n, hidden] holds NaN or infinity, or its sum of squares overflows.

    The last would pass unseen: RMSNorm would divide by infinity and return zeros. ``layer`` is the block
    that made x, -1 for the embedding. One dot product settles the normal case.
    """
    flat = x.flatten()
    if math.isfinite(float(torch.dot(flat, flat))) or bool(x.square().sum(-1).isfinite().all()):
        return
    where = f"after layer {layer} of {num_layers} (counted from 0)" if layer >= 0 else "in the embedding"
    raise NonFiniteError(
        f"the hidden state is not finite {where}; the weights there are damaged or out of range: check the file with `nanoqwen validate`", layer
    )
# [/check_finite]


class ReferenceModel:
    """A decoder with its weights and the KV cache of one sequence. Make one with ``from_pack`` or ``from_checkpoint``.

    ``kv_dtype`` is torch.float16 (as on the GPU) or torch.float32 (to compare with code that never rounds);
    ``context_limit`` may be less than the model's. ``poison`` fills unowned cache slots with NaN (tests).
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        kv_dtype: torch.dtype = torch.float16,
        context_limit: int | None = None,
        poison: bool = False,
    ) -> None:
        self.dims, self.weights, self.device = weights.dims, weights, weights.device
        self.context_limit = context_limit or self.dims.max_position
        if self.context_limit > self.dims.max_position:
            raise InputError(f"a context of {context_limit} tokens is more than the model's {self.dims.max_position}; ask for that or less")
        self.kv = PagedKV(self.dims, load_settings().kv, kv_dtype, self.device, self.context_limit, poison=poison)
        positions = torch.arange(self.context_limit, device=self.device)
        self._cos, self._sin = rope_tables(positions, self.dims.head_dim, self.dims.rope_theta)

    @classmethod
    def from_pack(
        cls,
        pack: PackFile,
        *,
        device: str | torch.device = "cpu",
        kv_dtype: torch.dtype = torch.float16,
        weights: str = "auto",
        context_limit: int | None = None,
        poison: bool = False,
        progress: Progress | None = None,
    ) -> ReferenceModel:
        """The model of an open pack file: INT4 dequantised, FP16 widened.

        ``weights``: "resident" widens once (4 bytes a weight), "streamed" keeps the packed bytes mapped and
        dequantises at each use, "auto" takes the first when it fits into half of the free memory. The pack
        must stay open. Raises InputError when its tensors do not fit its dimensions.
        """
        loaded = load_pack(pack, device=device, policy=weights, progress=progress)
        return cls(loaded, kv_dtype=kv_dtype, context_limit=context_limit, poison=poison)

    @classmethod
    def from_checkpoint(
        cls,
        source: str | os.PathLike,
        weights: str = "fp32",
        *,
        group: int | None = None,
        device: str | torch.device = "cpu",
        kv_dtype: torch.dtype = torch.float32,
        context_limit: int | None = None,
        poison: bool = False,
    ) -> ReferenceModel:
        """The model of a Hugging Face checkpoint, with weights "fp32" (as they are), "fp16" or "int4" (as a pack file holds them).

        ``group`` is the INT4 group size (128, or smaller where 128 does not divide). All weights are held
        as FP32. Raises InputError for an unknown ``weights`` and for a checkpoint that cannot be read.
        """
        from nanoqwen.checkpoint import open_checkpoint  # running a pack file needs none of it

        if weights not in ("fp32", "fp16", "int4"):
            raise InputError(f"weights={weights!r} is not known, use one of fp32, fp16, int4")
        with open_checkpoint(source, notes=[]) as checkpoint:
            size = model.pick_group(checkpoint.dims, group) if weights == "int4" else 0
            reader = CheckpointSource(checkpoint, weights, size, torch.device(device))
            loaded = assemble(reader, f"FP32 weights in memory, from a checkpoint ({weights})")
        return cls(loaded, kv_dtype=kv_dtype, context_limit=context_limit, poison=poison)

    @property
    def position(self) -> int:
        """Tokens in the cache: the position of the next one."""
        return self.kv.length

    def truncate(self, position: int) -> None:
        """Forget all tokens from ``position`` on. Raises ValueError when fewer are cached."""
        self.kv.truncate(position)

    # [forward]
    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, position: int, last_only: bool = False) -> torch.Tensor:
        """Logits float32 [n, vocab] of the tokens ``ids`` int64 [n], which stand at ``position`` and after.

        With ``last_only`` the head, the largest matrix, runs on the last token alone: [1, vocab]. Tokens
        cached at ``position`` and after are forgotten first, so a smaller ``position`` rewinds. Raises
        ContextError before anything changes when the tokens do not fit, NonFiniteError naming the first
        layer with a NaN or infinity; whatever goes wrong, the cache keeps exactly ``position`` tokens.
        """
        n = ids.shape[0]
        if position + n > self.context_limit:
            raise ContextError(f"{position + n} tokens do not fit a context of {self.context_limit}")
        self.kv.truncate(position)
        rope = self._cos[position : position + n], self._sin[position : position + n]
        try:
            x = F.embedding(ids.to(self.device), self.weights.embedding).float()  # [n, hidden]
            check_finite(x, -1, self.dims.num_layers)
            for layer, weights in enumerate(self.weights.layers):
                x = block(x, weights, self.kv, layer, position, rope, self.dims)
                check_finite(x, layer, self.dims.num_layers)
            if last_only:
                x = x[-1:]
            logits = self.weights.head(rms_norm(x, self.weights.final_norm, self.dims.rms_eps))
            if not bool(logits.isfinite().all()):
                raise NonFiniteError("the logits are not finite although every layer is: the final norm or lm_head is damaged or out of range")
            return logits
        except BaseException:  # Ctrl-C too
            self.kv.truncate(position)
            raise
    # [/forward]
