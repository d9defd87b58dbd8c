"""What a Qwen2 decoder is made of: names, shapes, storage, order, and the bytes a token must read.

``packfile.py`` knows bytes and no models, ``reference.py`` and the engines compute. This file holds the
facts that both ends share: which tensors exist for given dimensions, which of them are INT4, and in what
order a pack file stores them (the order in which a decode step reads them).
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError

#: The seven projections of a block that are stored as INT4; everything else stays FP16.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its Hugging Face name, shape ([n] or [out, in]) and whether it is INT4 in a pack file."""

    name: str
    shape: tuple[int, ...]
    int4: bool

    @property
    def rows(self) -> int:
        """Output rows; 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Input columns; the length of a vector."""
        return self.shape[-1]


def block_schema(dims: Dims, layer: int) -> list[TensorSpec]:
    """The twelve tensors of decoder block ``layer``, in the order in which a decode step reads them."""
    p = f"model.layers.{layer}."
    h, i, q, kv = dims.hidden, dims.intermediate, dims.q_size, dims.kv_size
    return [
        TensorSpec(p + "input_layernorm.weight", (h,), False),
        TensorSpec(p + "self_attn.q_proj.weight", (q, h), True),
        TensorSpec(p + "self_attn.k_proj.weight", (kv, h), True),
        TensorSpec(p + "self_attn.v_proj.weight", (kv, h), True),
        TensorSpec(p + "self_attn.q_proj.bias", (q,), False),
        TensorSpec(p + "self_attn.k_proj.bias", (kv,), False),
        TensorSpec(p + "self_attn.v_proj.bias", (kv,), False),
        TensorSpec(p + "self_attn.o_proj.weight", (h, q), True),
        TensorSpec(p + "post_attention_layernorm.weight", (h,), False),
        TensorSpec(p + "mlp.gate_proj.weight", (i, h), True),
        TensorSpec(p + "mlp.up_proj.weight", (i, h), True),
        TensorSpec(p + "mlp.down_proj.weight", (h, i), True),
    ]


def schema(dims: Dims) -> list[TensorSpec]:
    """Every tensor of the model, in file order. A tied head has no ``lm_head.weight`` of its own."""
    specs = [TensorSpec(EMBED, (dims.vocab, dims.hidden), False)]
    for layer in range(dims.num_layers):
        specs += block_schema(dims, layer)
    specs.append(TensorSpec(FINAL_NORM, (dims.hidden,), False))
    if not dims.tied:
        specs.append(TensorSpec(LM_HEAD, (dims.vocab, dims.hidden), False))
    return specs


def pick_group(dims: Dims, requested: int | None = None) -> int:
    """The group size to quantise with: ``requested``, else the first allowed one that divides every input dimension.

    Raises InputError naming the tensor, its input dimension and the group when none fits, or when
    ``requested`` is not an allowed size.
    """
    allowed = load_settings().quant.allowed_groups
    if requested is not None:
        if requested not in allowed:
            raise InputError(f"group size {requested} is not supported, use one of {', '.join(map(str, allowed))}")
        if bad := _misfit(dims, requested):
            raise InputError(f"{bad.name}: its input dimension {bad.cols} is not a multiple of the group size {requested}")
        return requested
    for group in allowed:
        if _misfit(dims, group) is None:
            return group
    bad = _misfit(dims, allowed[-1])
    raise InputError(
        f"{bad.name}: its input dimension {bad.cols} is not a multiple of any group size ({', '.join(map(str, allowed))}), so this model cannot be packed"
    )


def _misfit(dims: Dims, group: int) -> TensorSpec | None:
    return next((s for s in block_schema(dims, 0) if s.int4 and s.cols % group), None)


# [bytes_per_token]
def bytes_per_token(dims: Dims, group: int, context: int) -> dict[str, int]:
    """Bytes that one decode step at batch 1 must read from memory, by kind, with ``context`` tokens cached.

    Keys: ``int4`` (packed codes), ``scales`` (FP16, one a group and row), ``lm_head`` (FP16, every row),
    ``norms_biases`` (FP16), ``embed_row`` (one row of the embedding), ``kv`` (FP16 keys and values of every
    cached token) and ``total``. Weights are read once each; the activations are kilobytes and stay on chip.
    """
    kv = load_settings().kv
    int4_weights = sum(s.rows * s.cols for s in block_schema(dims, 0) if s.int4) * dims.num_layers
    small = sum(s.cols for s in block_schema(dims, 0) if not s.int4) * dims.num_layers + dims.hidden
    out = {
        "int4": int4_weights // 2,
        "scales": int4_weights // group * 2,
        "lm_head": dims.vocab * dims.hidden * 2,
        "norms_biases": small * 2,
        "embed_row": dims.hidden * 2,
        "kv": context * kv_bytes_per_token(dims, kv.value_bytes),
    }
    out["total"] = sum(out.values())
    return out
# [/bytes_per_token]


def kv_bytes_per_token(dims: Dims, value_bytes: int = 2) -> int:
    """Bytes of cache one token occupies: keys and values of every layer (57,344 = 56 KiB for the 7B in FP16)."""
    return 2 * dims.num_layers * dims.kv_size * value_bytes


def flops_per_token(dims: Dims, context: int) -> int:
    """Floating-point operations of one decode step: a multiply and an add per weight, and attention over ``context`` tokens."""
    weights = sum(s.rows * s.cols for s in block_schema(dims, 0) if s.int4) * dims.num_layers + dims.vocab * dims.hidden
    attention = 2 * dims.num_layers * dims.q_size * context  # q.k and p.v
    return 2 * (weights + attention)
