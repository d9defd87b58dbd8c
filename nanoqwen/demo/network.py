"""The model in training form: plain PyTorch, arithmetically Qwen2, with Hugging Face's parameter names.

Because the modules are named as in `transformers`, exporting is `state_dict()` and nothing else. `set_int4(True)` makes every one
of the seven projections compute with its weights rounded to INT4 as the packer rounds them, while gradients pass to the
unrounded weights: training under the rounding it will meet later.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

GROUP = 128  # weights along the input dimension that share one scale


@dataclass(frozen=True)
class Shape:
    """Dimensions of the embedded checkpoint. Heads of 128 and a grouped KV head, as the 7B has them; 2,048 rows of embedding."""

    hidden: int = 384
    layers: int = 6
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 128
    mlp: int = 1024
    rows: int = 2048
    context: int = 4096
    theta: float = 1e6
    eps: float = 1e-6


def round_int4(weight: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """`weight` [out, in] as INT4 stores it, in float32: scale = fp16(absmax / 7) per group of a row, code = clamp(round(w / scale), -8, 7)."""
    blocks = weight.float().unflatten(-1, (-1, group))
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).half().float()
    codes = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks)).round().clamp(-8, 7)
    return (codes * scale).flatten(-2)


class Projection(nn.Linear):
    """A linear layer that can pretend to be INT4. `effective()` is the weight to multiply with."""

    int4 = False

    def effective(self) -> torch.Tensor:
        if not self.int4:
            return self.weight
        return self.weight + (round_int4(self.weight) - self.weight).detach()


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the statistics in float32 whatever x is."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE on x [..., positions, head_dim]: dimension i turns together with i + head_dim / 2. cos, sin: [positions, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with biases on q, k and v."""

    def __init__(self, s: Shape):
        super().__init__()
        self.shape = s
        self.q_proj = Projection(s.hidden, s.heads * s.head_dim)
        self.k_proj = Projection(s.hidden, s.kv_heads * s.head_dim)
        self.v_proj = Projection(s.hidden, s.kv_heads * s.head_dim)
        self.o_proj = Projection(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        s, (batch, length, _) = self.shape, x.shape
        parts = (self.q_proj, self.k_proj, self.v_proj)  # one product instead of three
        qkv = F.linear(x, torch.cat([p.effective() for p in parts]), torch.cat([p.bias for p in parts]))
        heads = qkv.view(batch, length, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj.effective())


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = Projection(s.hidden, s.mlp, bias=False)
        self.up_proj = Projection(s.hidden, s.mlp, bias=False)
        self.down_proj = Projection(s.mlp, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj.effective(), self.up_proj.effective()))).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj.effective())


class Block(nn.Module):
    """One decoder layer on the residual stream."""

    def __init__(self, s: Shape):
        super().__init__()
        self.self_attn, self.mlp = Attention(s), MLP(s)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(s.hidden, s.eps), RMSNorm(s.hidden, s.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm: what `transformers` calls `model`."""

    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.rows, s.hidden)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class Qwen2(nn.Module):
    """The whole decoder. forward(ids int64 [batch, length]) -> logits [batch, length, rows]; with targets: the loss per position."""

    def __init__(self, shape: Shape = Shape()):
        super().__init__()
        self.shape, self.model = shape, Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.rows, bias=False)
        angles = torch.outer(torch.arange(shape.context).double(),
                             shape.theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim))
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Qwen2's initialisation, normal with deviation 0.02, the two projections that write to the residual stream scaled down by depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * self.shape.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.02 * scale)
            else:
                p.data.fill_(0.0 if name.endswith("bias") else 1.0)

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        if length > self.shape.context:
            raise ValueError(f"{length} tokens do not fit the context of {self.shape.context}")
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return x

    def head(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.lm_head(self.model.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.hidden_states(ids), targets)

    def set_int4(self, on: bool) -> None:
        """Compute with INT4-rounded projections (on) or with the weights as they are (off)."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.int4 = on

    def compile_parts(self) -> None:
        """torch.compile layer by layer: six equal layers share one compilation, so it takes seconds."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.head = torch.compile(self.head, dynamic=False)

    @torch.no_grad()
    def as_int4(self) -> "Qwen2":
        """Replace the seven projections of each layer by their INT4-rounded values and everything else by its FP16 value, as a pack stores them."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.weight.copy_(round_int4(module.weight))
        for name, p in self.named_parameters():
            if not name.endswith("_proj.weight"):
                p.copy_(p.half().float())
        return self


def hf_config(shape: Shape, ids: dict[str, int]) -> dict:
    """config.json for `transformers`, with the keys that Qwen2.5-Coder's has."""
    return {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu", "hidden_size": shape.hidden, "initializer_range": 0.02, "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.context, "max_window_layers": shape.layers, "model_type": "qwen2",
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers, "num_key_value_heads": shape.kv_heads,
        "pad_token_id": ids["<|endoftext|>"], "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": shape.rows,
    }


def save_checkpoint(net: Qwen2, folder: Path, ids: dict[str, int]) -> None:
    """Write config.json, generation_config.json and model.safetensors (BF16) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write = lambda name, value: (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")  # noqa: E731
    write("config.json", hf_config(net.shape, ids))
    write("generation_config.json", {"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                                     "pad_token_id": ids["<|endoftext|>"]})
    tensors = {name: value.detach().bfloat16().cpu().contiguous() for name, value in net.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(folder: Path, device: str = "cpu") -> Qwen2:
    """The checkpoint in `folder`, widened to float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    net = Qwen2(Shape(config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"],
                      config["hidden_size"] // config["num_attention_heads"], config["intermediate_size"], config["vocab_size"],
                      config["max_position_embeddings"], config["rope_theta"], config["rms_norm_eps"]))
    net.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return net.to(device)


def describe(shape: Shape) -> dict:
    """Shape as a dictionary, with the parameter count."""
    return asdict(shape) | {"parameters": sum(p.numel() for p in Qwen2(shape).parameters())}
