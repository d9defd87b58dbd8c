"""A Qwen2 decoder in plain PyTorch: the peer that ``nanoqwen.bench.peer_torch`` measures.

This is the decoder one writes with what PyTorch brings: its INT4 weight-only matrix product (the "tinygemm" kernel, ``_weight_int4pack_mm``),
``scaled_dot_product_attention``, BF16 activations, a static KV cache, and a step that ``torch.compile`` turns into one CUDA graph.

INT4 is asymmetric here: a group of weights between lo and hi is stored as codes 0 to 15 with two BF16 numbers, scale and zero, and a weight
is (code - 8) * scale + zero. Weights are random. They are drawn layer by layer from a seed, so that a second pass over the same seed gives
the same weights to a dense FP32 evaluation, which knows nothing of packing: see ``peer_torch.disagreement``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanoqwen.config import Dims
from nanoqwen.weights import DecoderWeights, DenseLinear, LayerWeights

#: Columns that one tile of the CUDA kernel spans, and how many of them lie together in the packed array; the most that divide the row.
TILE_COLS, INNER_TILES = 16, (8, 4, 2)
TILE_ROWS = 8
GROUPS = (32, 64, 128, 256)


def refused(dims: Dims, group: int) -> str | None:
    """Why PyTorch's kernel cannot hold the matrices of these dimensions; None when it can."""
    if group not in GROUPS:
        return f"its INT4 kernel takes groups of {', '.join(map(str, GROUPS))}, not {group}"
    for rows, cols in shapes(dims).values():
        if rows % TILE_ROWS or cols % (TILE_COLS * INNER_TILES[-1]) or cols % group:
            return f"its INT4 kernel takes no matrix of {rows} x {cols} in groups of {group}"
    return None


def shapes(dims: Dims) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the four INT4 matrices of a layer; q, k, v are one, and so are gate and up."""
    return {
        "qkv": (dims.q_size + 2 * dims.kv_size, dims.hidden), "o": (dims.hidden, dims.q_size),
        "gate_up": (2 * dims.intermediate, dims.hidden), "down": (dims.hidden, dims.intermediate),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Quantised:
    """One matrix: ``codes`` int32 [rows, cols] from 0 to 15, ``scales_and_zeros`` bfloat16 [cols / group, rows, 2]."""

    codes: torch.Tensor
    scales_and_zeros: torch.Tensor
    group: int

    @classmethod
    def of(cls, weight: torch.Tensor, group: int) -> Quantised:
        """Round ``weight`` [rows, cols] to the 16 levels between the smallest and the largest weight of each group."""
        rows, cols = weight.shape
        groups = weight.float().view(rows, cols // group, group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()  # the weight of code 8
        codes = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15).int()
        return cls(codes.view(rows, cols), torch.cat((scale, zero), dim=-1).transpose(0, 1).contiguous(), group)

    def dense(self) -> torch.Tensor:
        """The weights that the codes stand for, float32 [rows, cols]."""
        rows, cols = self.codes.shape
        scale, zero = self.scales_and_zeros.float().transpose(0, 1).unsqueeze(-1).unbind(2)  # [rows, cols / group, 1] each
        return ((self.codes.view(rows, cols // self.group, self.group) - 8) * scale + zero).view(rows, cols)

    def packed(self) -> torch.Tensor:
        """The codes in the order in which this device's kernel reads them."""
        if self.codes.device.type == "cpu":
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.codes, 1)
        pairs = (self.codes[:, 0::2] << 4 | self.codes[:, 1::2]).to(torch.uint8)
        tiles = next(n for n in INNER_TILES if self.codes.shape[1] % (TILE_COLS * n) == 0)
        return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)


class Weights:
    """Random weights of a Qwen2 decoder, the same ones at each pass: BF16 vectors, embedding and head, and INT4 layers drawn on demand.

    Matrices keep the size of what passes through them, so the logits of a deep model stay a few units wide.
    """

    def __init__(self, dims: Dims, group: int, device: str | torch.device, seed: int = 0) -> None:
        self.dims, self.group, self.device, self.seed = dims, group, torch.device(device), seed
        draw = self._generator(0)
        self.embedding = self._normal(draw, dims.vocab, dims.hidden)
        self.head = self.embedding if dims.tied else self._normal(draw, dims.vocab, dims.hidden) * dims.hidden**-0.5
        self.final_norm = self._near_one(draw)

    def layers(self) -> Iterator[LayerWeights]:
        """One layer after the other, its linears as ``Quantised``."""
        for i in range(self.dims.num_layers):
            draw = self._generator(1 + i)
            matrices = {
                name: Quantised.of(self._normal(draw, rows, cols) * cols**-0.5, self.group) for name, (rows, cols) in shapes(self.dims).items()
            }  # fmt: skip
            bias = self._normal(draw, self.dims.q_size + 2 * self.dims.kv_size) * 0.25
            yield LayerWeights(input_norm=self._near_one(draw), post_norm=self._near_one(draw), qkv_bias=bias, **matrices)

    def dense(self) -> DecoderWeights:
        """The same model with every weight in FP32, for ``ReferenceModel``."""
        layers = [
            LayerWeights(
                w.input_norm.float(), DenseLinear(w.qkv.dense()), w.qkv_bias.float(), DenseLinear(w.o.dense()),
                w.post_norm.float(), DenseLinear(w.gate_up.dense()), DenseLinear(w.down.dense()),
            )
            for w in self.layers()
        ]  # fmt: skip
        head = DenseLinear(self.head.float())
        return DecoderWeights(self.dims, self.embedding.float(), layers, self.final_norm.float(), head, self.device, "dequantised, FP32")

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + stream)

    def _normal(self, draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=self.device, dtype=torch.bfloat16)

    def _near_one(self, draw: torch.Generator) -> torch.Tensor:
        return 1 + 0.125 * self._normal(draw, self.dims.hidden)


# ----------------------------------------------------------------------------------------------------------- decoder
# Everything a step reads or writes is a registered buffer: torch.compile knows that a buffer stays where it is, and records its address in the
# CUDA graph. Any other tensor would be copied to a fixed place before each replay.


class Int4Linear(nn.Module):
    """x bfloat16 [n, cols] -> [n, rows], through the kernel of the device that ``matrix`` is on."""

    def __init__(self, matrix: Quantised) -> None:
        super().__init__()
        self.group, self.on_cpu = matrix.group, matrix.codes.device.type == "cpu"
        self.register_buffer("packed", matrix.packed())
        self.register_buffer("scales_and_zeros", matrix.scales_and_zeros)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu if self.on_cpu else torch.ops.aten._weight_int4pack_mm
        return product(x, self.packed, self.group, self.scales_and_zeros)


class Layer(nn.Module):
    """One decoder block with its part of the cache: keys and values bfloat16 [kv_heads, slots, head_dim]."""

    def __init__(self, dims: Dims, weights: LayerWeights, slots: int) -> None:
        super().__init__()
        self.dims = dims
        self.qkv, self.o, self.gate_up, self.down = (Int4Linear(m) for m in (weights.qkv, weights.o, weights.gate_up, weights.down))
        self.register_buffer("qkv_bias", weights.qkv_bias)
        self.register_buffer("input_norm", weights.input_norm)
        self.register_buffer("post_norm", weights.post_norm)
        for name in ("keys", "values"):
            self.register_buffer(name, weights.qkv_bias.new_zeros(dims.num_kv_heads, slots, dims.head_dim))

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], at: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """x bfloat16 [n, hidden] of the tokens at positions ``at`` [n] -> the same shape.

        ``seen`` bool [slots] tells which slots of the cache one token may see; None: these tokens are all there are, and causal.
        """
        n, dims = x.shape[0], self.dims
        heads = (self.qkv(F.rms_norm(x, (dims.hidden,), self.input_norm, dims.rms_eps)) + self.qkv_bias).view(n, -1, dims.head_dim)
        turned = rotate(heads[:, : -dims.num_kv_heads], *rope).transpose(0, 1)
        q, k = turned[: dims.num_heads], turned[dims.num_heads :]  # [heads, n, head_dim], [kv_heads, n, head_dim]
        v = heads[:, -dims.num_kv_heads :].transpose(0, 1)
        self.keys[:, at] = k
        self.values[:, at] = v
        if seen is None:
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        else:
            mixed = attend(q, self.keys, self.values, seen)
        x = x + self.o(mixed.transpose(0, 1).reshape(n, dims.q_size))
        gate, up = self.gate_up(F.rms_norm(x, (dims.hidden,), self.post_norm, dims.rms_eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE, half-split: heads bfloat16 [n, heads, head_dim] by the angles of cos and sin, float32 [n, head_dim / 2]."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q [heads, 1, head_dim] over the whole static cache [kv_heads, slots, head_dim], slots not ``seen`` [slots] masked."""
    return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=seen[None, None, None], enable_gqa=True)[0]


class Decoder(nn.Module):
    """The model, and the one sequence it holds: ``ids`` [slots], of which ``position`` [1] are in the cache.

    Use it under ``torch.no_grad()``. ``slots`` tokens fit.
    """

    def __init__(self, weights: Weights, slots: int) -> None:
        super().__init__()
        dims, device = weights.dims, weights.device
        self.dims = dims
        self.layers = nn.ModuleList(Layer(dims, layer, slots) for layer in weights.layers())
        self.register_buffer("embedding", weights.embedding)
        self.register_buffer("head", weights.head)
        self.register_buffer("final_norm", weights.final_norm)
        self.register_buffer("slots", torch.arange(slots, device=device))
        turns = dims.rope_theta ** (-torch.arange(0, dims.head_dim, 2, device=device) / dims.head_dim)
        angles = self.slots[:, None] * turns  # float32 [slots, head_dim / 2]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("ids", torch.zeros(slots, dtype=torch.int64, device=device))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64, device=device))

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Begin anew with ``prompt`` int64 [n], choose the token behind it greedily; its logits [1, vocab]."""
        n = prompt.shape[0]
        self.ids[:n] = prompt
        self.position.fill_(n - 1)
        return self._choose(self._blocks(prompt, self.slots[:n], None)[-1:])

    def step(self) -> torch.Tensor:
        """Decode the last chosen token and choose the next one greedily; its logits [1, vocab]. Nothing of it needs the host."""
        return self._choose(self._blocks(self.ids[self.position], self.position, self.slots <= self.position))

    def _blocks(self, tokens: torch.Tensor, at: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        x, rope = F.embedding(tokens, self.embedding), (self.cos[at], self.sin[at])
        for layer in self.layers:
            x = layer(x, rope, at, seen)
        return x

    def _choose(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(F.rms_norm(x, (self.dims.hidden,), self.final_norm, self.dims.rms_eps), self.head)
        self.position.add_(1)
        self.ids.index_copy_(0, self.position, logits.argmax(-1))
        return logits

    def bytes_of_weights(self) -> int:
        """Bytes of weights a step reads: everything but the embedding, of which it reads one row (a tied head reads all of it)."""
        return self.stored_bytes() + self.embedding[0].nbytes - (0 if self.dims.tied else self.embedding.nbytes)

    def stored_bytes(self) -> int:
        """Bytes of the whole model; a tied head counts once."""
        layers = sum(b.nbytes for layer in self.layers for name, b in layer.named_buffers() if name not in ("keys", "values"))
        return layers + self.final_norm.nbytes + self.embedding.nbytes + (0 if self.dims.tied else self.head.nbytes)
