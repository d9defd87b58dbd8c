"""A decoder block and its parts against transformers' modules, and attention against its definition in FP64."""

import math

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as hf

from nanoqwen import int4, reference, weights
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import NonFiniteError
from nanoqwen.kv import PagedKV
from nanoqwen.weights import DenseLinear, HalfLinear, Int4Linear, LayerWeights, StackedLinear

# heads, KV heads, head_dim, rotary base: GQA 1, 2 and the 7B's 7
SHAPES = [(4, 4, 64, 1e4), (4, 2, 64, 1e6), (2, 1, 128, 1e6), (7, 1, 128, 1e6), (7, 1, 64, 1e4)]


def random(*shape, std=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def close(got, want, largest=2e-6):
    """Same shape, finite, and the worst element off by at most `largest` times the largest element (or times 1)."""
    assert got.shape == want.shape and bool(got.isfinite().all())
    worst = (got.double() - want.double()).abs().max().item()
    assert worst <= largest * max(1.0, want.abs().max().item())


def config(heads, kv_heads, head_dim, theta):
    return Qwen2Config(
        hidden_size=heads * head_dim,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=64,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attn_implementation="eager",
    )


# ----------------------------------------------------------------------------------------------------------------- parts


@torch.inference_mode()
def test_rms_norm():
    theirs = hf.Qwen2RMSNorm(256, eps=1e-6)
    theirs.weight.data = random(256, seed=1)
    x = random(5, 256, std=30)
    x[3] = 0  # eps is all that is left
    close(reference.rms_norm(x, theirs.weight, 1e-6), theirs(x))


@pytest.mark.parametrize("heads, kv_heads, head_dim, theta", SHAPES)
def test_rope(heads, kv_heads, head_dim, theta):
    positions = torch.tensor([0, 1, 15, 16, 511, 4095, 32767])
    cos, sin = hf.Qwen2RotaryEmbedding(config(heads, kv_heads, head_dim, theta))(random(1, 7, 8), positions[None])
    ours = reference.rope_tables(positions, head_dim, theta)
    close(ours[0], cos[0], 0)
    close(ours[1], sin[0], 0)
    x = random(7, heads, head_dim)
    rotated, _ = hf.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    close(reference.apply_rope(x, *ours), rotated[0].transpose(0, 1))


def test_swiglu():
    gate_up = random(3, 64, std=4)
    close(reference.swiglu(gate_up), torch.nn.functional.silu(gate_up[:, :32]) * gate_up[:, 32:])


def attention_fp64(q, k, v, position):
    """The definition, one query and one head at a time."""
    n, heads, head_dim = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(n, heads, head_dim, dtype=torch.float64)
    for i in range(n):
        seen = position + i + 1
        for h in range(heads):
            g = h // (heads // k.shape[1])
            p = torch.softmax(k[:seen, g] @ q[i, h] / math.sqrt(head_dim), dim=0)
            out[i, h] = p @ v[:seen, g]
    return out.flatten(1)


@pytest.mark.parametrize("heads, kv_heads, head_dim, theta", SHAPES)
@pytest.mark.parametrize("position, n", [(0, 1), (0, 17), (15, 1), (16, 1), (48, 1), (30, 19)])
def test_attention(monkeypatch, heads, kv_heads, head_dim, theta, position, n):
    q = random(n, heads, head_dim, std=3)
    k, v = random(position + n, kv_heads, head_dim, seed=1), random(position + n, kv_heads, head_dim, seed=2)
    whole = reference.attention(q, k, v, position)
    close(whole, attention_fp64(q, k, v, position))
    monkeypatch.setattr(reference, "SCORE_BUDGET", 3 * heads * (position + n))  # slices of three queries
    close(reference.attention(q, k, v, position), whole)


def test_check_finite_finds_nan_infinity_and_a_norm_that_overflows():
    good = random(3, 8)
    reference.check_finite(good * 1e15, 4, 6)
    # Each row is fine although the sum over all of them overflows FP32.
    reference.check_finite(torch.full((3, 1), 1.5e19), 4, 6)
    for bad in (math.nan, math.inf, -math.inf, 1e20):
        x = good.clone()
        x[1, 5] = bad
        with pytest.raises(NonFiniteError, match="after layer 4 of 6") as caught:
            reference.check_finite(x, 4, 6)
        assert caught.value.layer == 4


# ----------------------------------------------------------------------------------------------------------------- block


def theirs_and_ours(shape, seed=0):
    """transformers' decoder layer with random weights and nonzero biases, and the same weights for our block."""
    cfg = config(*shape)
    layer = hf.Qwen2DecoderLayer(cfg, layer_idx=0).eval()
    with torch.no_grad():
        for i, (name, values) in enumerate(sorted(layer.named_parameters())):
            values.copy_(random(*values.shape, std=0.05, seed=seed + i) + ("norm" in name))
    attn, mlp = layer.self_attn, layer.mlp
    ours = LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=DenseLinear(torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])),
        qkv_bias=torch.cat([attn.q_proj.bias, attn.k_proj.bias, attn.v_proj.bias]),
        o=DenseLinear(attn.o_proj.weight),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=DenseLinear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        down=DenseLinear(mlp.down_proj.weight),
    )
    heads, kv_heads, head_dim, theta = shape
    dims = Dims(1, heads * head_dim, 320, heads, kv_heads, head_dim, 64, 4096, rope_theta=theta)
    return layer, ours, dims, hf.Qwen2RotaryEmbedding(cfg)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 49])
@torch.inference_mode()
def test_block(shape, n):
    layer, ours, dims, rotary = theirs_and_ours(shape)
    x = random(n, dims.hidden, seed=9)
    positions = torch.arange(n)
    future = torch.full((n, n), -math.inf).triu(1)[None, None]
    want = layer(x[None], attention_mask=future, position_embeddings=rotary(x[None], positions[None]))
    want = (want[0] if isinstance(want, tuple) else want).view(n, dims.hidden)

    rope = reference.rope_tables(positions, dims.head_dim, dims.rope_theta)
    exact = PagedKV(dims, load_settings().kv, torch.float32, poison=True)
    close(reference.block(x, ours, exact, 0, 0, rope, dims), want)

    # The same tokens one by one, and with a cache that rounds to FP16: the ladder's tolerance.
    half = PagedKV(dims, load_settings().kv, torch.float16, poison=True)
    step = [reference.block(x[i : i + 1], ours, half, 0, i, (rope[0][i : i + 1], rope[1][i : i + 1]), dims) for i in range(n)]
    error = float((torch.cat(step) - want).norm() / want.norm())
    assert error <= load_settings().ladder.layer_max_rel_error


# --------------------------------------------------------------------------------------------------------------- linears


@pytest.mark.parametrize("group", [32, 64, 128])
def test_torch_dequantize_equals_int4_dequantize_bit_for_bit(group):
    w = random(96, 512, std=0.1).numpy()
    w[5, :group] = 0  # a group of zeros
    w[6, :group] *= 1e6  # scales near FP16's end
    w[7, :group] *= 1e-7  # and among its subnormals
    words, scales = int4.quantize_pack(w, group)
    want = torch.from_numpy(int4.dequantize(words, scales, group))
    got = weights.dequantize(torch.from_numpy(words.view("int32")), torch.from_numpy(scales), group)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))  # bits: -0.0 is not 0.0
    every = torch.arange(-8, 8).repeat(1, group // 8).to(torch.int8)
    words = int4.pack_codes(every.numpy())
    ones = torch.ones(1, every.shape[1] // group, dtype=torch.float16)
    assert torch.equal(weights.dequantize(torch.from_numpy(words.view("int32")), ones, group).to(torch.int8), every)


def test_streaming_linears_equal_dense_ones(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_WEIGHTS", 10 * 512)  # ten rows a block, the last one shorter
    words, scales = int4.quantize_pack(random(96, 512, std=0.1).numpy(), 128)
    packed = Int4Linear(torch.from_numpy(words.view("int32")), torch.from_numpy(scales), 128)
    dense = torch.from_numpy(int4.dequantize(words, scales, 128))
    half = random(33, 512, std=0.1).half()
    for n in (1, 5):
        x = random(n, 512)
        close(packed(x), DenseLinear(dense)(x))
        close(HalfLinear(half)(x), DenseLinear(half.float())(x))
        stacked = StackedLinear([packed, HalfLinear(half)])
        close(stacked(x), DenseLinear(torch.cat([dense, half.float()]))(x))
