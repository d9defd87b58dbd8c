"""Two decoders that are not ours: transformers' Qwen2, and the same arithmetic in FP64 without any cache.

`qwen2(folder)` is transformers' own model on a checkpoint folder; `int4=True` gives it the weights that a pack file holds.
`fp64_logits(folder, ids)` is the plain definition of the model in numpy, every position computed from scratch.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers

from nanoqwen import int4, model
from nanoqwen.checkpoint import open_checkpoint
from tiny import TOKENIZER_ENTRIES


def rounded(name: str, values: np.ndarray, group: int) -> np.ndarray:
    """float32 values as a pack file holds them: INT4 for the seven projections, FP16 for the rest."""
    if not (name.endswith(".weight") and name.split(".")[-2] in model.PROJECTIONS):
        return values.astype(np.float16).astype(np.float32)
    codes, scales = int4.quantize(values, group, name)
    return codes.astype(np.float32) * np.repeat(scales.astype(np.float32), group, axis=1)


def read_all(folder, *, packed: bool = False) -> tuple[dict[str, np.ndarray], object]:
    """({name: float32 array}, dims) of a checkpoint folder; `packed` rounds as packing does."""
    with open_checkpoint(folder, notes=[]) as checkpoint:
        group = model.pick_group(checkpoint.dims) if packed else 0
        tensors = {spec.name: checkpoint.read(spec.name) for spec in checkpoint.specs}
        if packed:
            tensors = {name: rounded(name, values, group) for name, values in tensors.items()}
        return tensors, checkpoint.dims


def qwen2(folder, *, int4: bool = False) -> transformers.Qwen2ForCausalLM:
    """transformers' Qwen2 in FP32 on the CPU, read by transformers; `int4` replaces its weights by what a pack file holds."""
    found = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if int4:
        tensors, _ = read_all(folder, packed=True)
        missing, unexpected = found.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # absent when tied
    return found


@torch.inference_mode()
def qwen2_logits(oracle: transformers.Qwen2ForCausalLM, ids: list[int], last: int | None = None) -> np.ndarray:
    """float32 [n, vocab] of one pass over `ids` without a cache; `last` keeps the last so many rows."""
    keep = {"logits_to_keep": last} if last else {}
    return oracle(torch.tensor([ids]), use_cache=False, **keep).logits[0].numpy()


def greedy(logits: np.ndarray) -> int:
    """The most likely id that the tokenizer knows: rows beyond its entries are padding."""
    return int(np.argmax(logits[..., :TOKENIZER_ENTRIES]))


def same_greedy_ids(oracle: transformers.Qwen2ForCausalLM, prompt: list[int], new_ids: list[int]) -> bool:
    """Whether greedy decoding of `prompt` by the oracle, without a cache, gives `new_ids`.

    One pass over both is enough: position by position it says what follows, so the first difference would show.
    """
    rows = qwen2_logits(oracle, prompt + new_ids[:-1], last=len(new_ids))
    return [greedy(row) for row in rows] == new_ids


def fp64_logits(folder, ids: list[int], *, packed: bool = False) -> tuple[np.ndarray, float]:
    """(float64 logits [n, vocab], largest magnitude in the residual stream), from the definition of the model."""
    tensors, d = read_all(folder, packed=packed)
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    n, half = len(ids), d.head_dim // 2

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + d.rms_eps) * weight

    angle = np.outer(np.arange(n), d.rope_theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angle), np.sin(angle)

    def rope(x):  # [n, head_dim]
        a, b = x[:, :half], x[:, half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)

    x, largest = w[model.EMBED][ids], 0.0
    for layer in range(d.num_layers):
        p = f"model.layers.{layer}."

        def project(name, y, p=p):
            return y @ w[p + name + ".weight"].T + w.get(p + name + ".bias", 0.0)

        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (project(f"self_attn.{name}_proj", y) for name in "qkv")
        heads = []
        for h in range(d.num_heads):
            mine, shared = slice(h * d.head_dim, (h + 1) * d.head_dim), h // d.gqa_ratio
            its = slice(shared * d.head_dim, (shared + 1) * d.head_dim)
            scores = rope(q[:, mine]) @ rope(k[:, its]).T / np.sqrt(d.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, its])
        x = x + project("self_attn.o_proj", np.concatenate(heads, axis=1))
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = project("mlp.gate_proj", y)
        x = x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", y))
        largest = max(largest, float(np.abs(x).max()))
    head = w[model.EMBED] if d.tied else w[model.LM_HEAD]
    return norm(x, w[model.FINAL_NORM]) @ head.T, largest
