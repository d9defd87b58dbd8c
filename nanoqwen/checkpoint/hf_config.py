"""``config.json`` -> the dimensions of a Qwen2 decoder, or one line that says why not.

Spellings drift between writers, and a reader that shrugs at a key it does not know builds another model. So every key that
can change the result is either understood, or refused by name; a key that is absent is refused, or replaced by a default
that is recorded (``ModelConfig.defaults``) and told to the user (a note). The defaults are those of ``Qwen2Config`` in
transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from nanoqwen.config import Dims
from nanoqwen.errors import InputError

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"

#: What stands in for an absent key. A rotary base is not among them: readers disagree on its default (10,000 or 1,000,000),
#: and the wrong one gives a model that talks, badly.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}

#: Head sizes that the CUDA kernels are compiled for.
KERNEL_HEAD_DIMS = (64, 128)

#: No dimension comes near it, and the header of a pack file stores dimensions in 32 bits.
LARGEST_NUMBER = 2**31 - 1

#: Keys that do not change what a Qwen2 decoder computes at inference. Any other key is named in a note.
HARMLESS = frozenset(
    "_name_or_path attention_dropout bos_token_id eos_token_id initializer_range max_window_layers model_type pad_token_id "
    "sliding_window transformers_version use_cache _attn_implementation_autoset attn_implementation".split()
)


@dataclass
class ModelConfig:
    """What ``config.json`` says: dimensions, the declared type of the weights, and the defaults that stood in for keys."""

    dims: Dims
    architecture: str
    torch_dtype: str | None
    defaults: dict[str, object] = field(default_factory=dict)


class _Keys:
    """A config with its file's name: takes keys out one by one, checks their types, and remembers which were used."""

    def __init__(self, raw: dict, path: Path) -> None:
        self.raw, self.path, self.used = raw, path, set(HARMLESS)
        self.defaults: dict[str, object] = {}

    def get(self, key: str) -> object:
        self.used.add(key)
        return self.raw.get(key)

    def fail(self, line: str) -> InputError:
        return InputError(f"{self.path}: {line}")

    def number(self, key: str, kind: type = int) -> int | float:
        """A required number. ``kind`` float accepts whole numbers too. An absent or null key falls back to DEFAULTS."""
        value = self.get(key)
        if value is None and key in DEFAULTS:
            value = self.defaults[key] = DEFAULTS[key]
        if value is None:
            raise self.fail(f"the key {key} is missing, and no default is safe; take the original config.json")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise self.fail(f"{key} is {value!r}, a {'number' if kind is float else 'whole number'} was expected")
        if abs(value) > LARGEST_NUMBER:
            raise self.fail(f"{key} is out of range: {str(value)[:20]}")
        return kind(value)

    def boolean(self, key: str, absent: bool) -> bool:
        value = self.get(key)
        if value is None:
            if key in DEFAULTS:
                self.defaults[key] = absent
            return absent
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}, true or false was expected")
        return value


def parse_config(raw: dict, path: Path, notes: list[str]) -> ModelConfig:
    """Read ``config.json`` (already parsed, from ``path``). Appends to ``notes`` what a user must be told.

    Raises InputError naming the key, the value found and the value supported: for a quantised source, another
    architecture, a rotary scaling, a sliding window that is on, another activation, or dimensions that do not fit together.
    """
    keys = _Keys(raw, path)
    _refuse_quantised(keys)
    _check_architecture(keys)
    _refuse_sliding_window(keys)
    rope_theta = _rope_theta(keys)
    heads, hidden = keys.number("num_attention_heads"), keys.number("hidden_size")
    activation = keys.get("hidden_act")
    if activation is None:
        activation = keys.defaults["hidden_act"] = DEFAULTS["hidden_act"]
    if activation != "silu":
        raise keys.fail(f"hidden_act is {activation!r}, nanoqwen supports 'silu' (SwiGLU)")
    dims = Dims(
        num_layers=keys.number("num_hidden_layers"),
        hidden=hidden,
        intermediate=keys.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.number("num_key_value_heads"),
        head_dim=_head_dim(keys, heads, hidden),
        vocab=keys.number("vocab_size"),
        max_position=keys.number("max_position_embeddings"),
        rope_theta=rope_theta,
        rms_eps=keys.number("rms_norm_eps", float),
        tied=keys.boolean("tie_word_embeddings", absent=False),
    )
    if problems := dims.problems():
        raise keys.fail(problems[0])
    if dims.head_dim not in KERNEL_HEAD_DIMS:
        notes.append(f"head_dim is {dims.head_dim}: the CPU engine runs it, the CUDA kernels take 64 or 128")
    torch_dtype = keys.get("dtype") or keys.get("torch_dtype")
    for key, value in keys.defaults.items():
        notes.append(f"config.json has no {key}: took the default {json.dumps(value)}")
    if unused := sorted(set(raw) - keys.used):
        notes.append(f"config.json: keys that nanoqwen does not use: {', '.join(unused)}")
    return ModelConfig(dims, ARCHITECTURE, torch_dtype if isinstance(torch_dtype, str) else None, keys.defaults)


def _refuse_quantised(keys: _Keys) -> None:
    block = keys.get("quantization_config")
    if block:
        method = block.get("quant_method") if isinstance(block, dict) else None
        if method is None and isinstance(block, dict):
            method = "bitsandbytes" if block.get("load_in_4bit") or block.get("load_in_8bit") else None
        raise keys.fail(
            f"this checkpoint is already quantised ({method or 'quantization_config without a quant_method'}); its packed "
            "integers cannot be packed again, take the original BF16 checkpoint"
        )


def _check_architecture(keys: _Keys) -> None:
    found, model_type = keys.get("architectures"), keys.raw.get("model_type")
    if not found:
        raise keys.fail(f"names no architecture (the key architectures is missing); nanoqwen supports {ARCHITECTURE}")
    if found != [ARCHITECTURE]:
        names = ", ".join(map(str, found)) if isinstance(found, list) else str(found)
        raise keys.fail(f"the architecture is {names}; nanoqwen supports {ARCHITECTURE}")
    if model_type is not None and model_type != MODEL_TYPE:
        raise keys.fail(f"model_type is {model_type!r} beside the architecture {ARCHITECTURE}; nanoqwen supports {MODEL_TYPE!r}")


def _refuse_sliding_window(keys: _Keys) -> None:
    """A window is applied only when it is switched on, whatever number stands beside the switch."""
    if keys.boolean("use_sliding_window", absent=False):
        raise keys.fail("use_sliding_window is true; nanoqwen supports full attention only")
    layer_types = keys.get("layer_types") or []
    other = [kind for kind in layer_types if kind != "full_attention"] if isinstance(layer_types, list) else [layer_types]
    if other:
        raise keys.fail(f"layer_types names {other[0]!r}; nanoqwen supports full attention only")
    if keys.boolean("use_mrope", absent=False):
        raise keys.fail("use_mrope is true; nanoqwen supports plain rotary positions only")


def _rope_theta(keys: _Keys) -> float:
    """The rotary base, from the top level or from ``rope_parameters`` (newer writers) or ``rope_scaling``; no scaling."""
    found = {}
    if keys.get("rope_theta") is not None:
        found["rope_theta"] = keys.number("rope_theta", float)
    for block_name in ("rope_parameters", "rope_scaling"):
        block = keys.get(block_name)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise keys.fail(f"{block_name} is {block!r}, an object was expected")
        for kind in (block.get("rope_type"), block.get("type")):
            if kind not in (None, "default"):
                raise keys.fail(f"{block_name} {kind} is not supported; nanoqwen supports the default rotary embedding")
        leftover = {k: v for k, v in block.items() if k not in ("rope_type", "type", "rope_theta") and v not in (None, 1)}
        if leftover:
            name, value = next(iter(leftover.items()))
            raise keys.fail(f"{block_name} has {name} = {value!r}, which is not supported; nanoqwen supports the default rotary embedding")
        if block.get("rope_theta") is not None:
            inner = _Keys(block, keys.path)
            found[f"{block_name}.rope_theta"] = inner.number("rope_theta", float)
    if keys.get("partial_rotary_factor") not in (None, 1):
        raise keys.fail(f"partial_rotary_factor is {keys.raw['partial_rotary_factor']!r}; nanoqwen rotates whole heads")
    if not found:
        raise keys.fail(
            "no rotary base: rope_theta is missing, at the top level and in rope_parameters, and no default is safe "
            "(Qwen2.5 uses 1000000); take the original config.json"
        )
    if len(set(found.values())) > 1:
        raise keys.fail("two rotary bases: " + ", ".join(f"{name} is {value:g}" for name, value in found.items()) + "; keep the right one")
    return next(iter(found.values()))


def _head_dim(keys: _Keys, heads: int, hidden: int) -> int:
    """``head_dim`` when the config has it, else hidden / heads as Qwen2 defines it."""
    if keys.get("head_dim") is not None:
        return keys.number("head_dim")
    if heads < 1 or hidden % heads:
        raise keys.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim is given")
    return hidden // heads
