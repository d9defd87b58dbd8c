"""Which model a checkpoint describes: tensor names, shapes, the tied head, and every key of config.json that matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from opening import opened, refused
from tiny import ABSENT, Sizes, Stored

# ------------------------------------------------------------------------------------------- A13-A16: names and shapes


def test_old_rotary_buffers_are_ignored_and_told(tmp_path):
    tensors = tiny.weights()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = Stored("F32", np.ones(32, np.float32))
    checkpoint, notes = opened(tiny.make(tmp_path, tensors=tensors))
    checkpoint.close()
    assert len(notes) == 1 and "ignored model.layers.0.self_attn.rotary_emb.inv_freq" in notes[0]


@pytest.mark.parametrize("name, fragments", [
    ("model.layers.0.self_attn.q_proj.lora_A.default.weight", ["looks like an unmerged adapter"]),
    ("model.layers.0.self_attn.q_proj.qweight", ["already quantised", "BF16"]),
    ("model.layers.0.self_attn.q_norm.weight", ["1 unexpected", "not a plain Qwen2 model"]),
    ("model.layers.2.input_layernorm.weight", ["1 unexpected"]),
])  # fmt: skip
def test_unexpected_tensors_are_named(tmp_path, name, fragments):
    tensors = {**tiny.weights(), name: Stored("F32", np.ones(4, np.float32))}
    refused(tiny.make(tmp_path, tensors=tensors), name, *fragments)


def test_missing_and_unexpected_names_come_in_one_line(tmp_path):
    tensors = tiny.weights()
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            del tensors[f"model.layers.{i}.self_attn.{name}.bias"]
    tensors["model.surprise.weight"] = Stored("BF16", np.ones(4, np.float32))
    line = refused(tiny.make(tmp_path, tensors=tensors), "6 of 27 tensors are missing", "model.layers.0.self_attn.q_proj.bias",
                   "and 1 more", "1 unexpected: model.surprise.weight")  # fmt: skip
    assert line.count("bias") == 5


@pytest.mark.parametrize("prefix", ["language_model.", "module.", "_orig_mod."])
def test_one_known_prefix_is_dropped_and_told(tmp_path, prefix):
    tensors = {prefix + name: tensor for name, tensor in tiny.weights().items()}
    checkpoint, notes = opened(tiny.make(tmp_path, tensors=tensors))
    with checkpoint:
        assert np.array_equal(checkpoint.read("model.norm.weight"), np.ones(256, np.float32))
    assert notes == [f"dropped the prefix {prefix} from every tensor name"]


def test_an_unknown_or_partial_prefix_is_refused(tmp_path):
    tensors = {"wrapped." + name: tensor for name, tensor in tiny.weights().items()}
    refused(tiny.make(tmp_path / "a", tensors=tensors), "0 of 27", "expected names like model.embed_tokens.weight", "found names like wrapped.lm_head.weight")
    tensors = {"language_model." + name: tensor for name, tensor in tiny.weights().items()}
    del tensors["language_model.model.norm.weight"]
    refused(tiny.make(tmp_path / "b", tensors=tensors), "0 of 27")
    tensors = {"language_model." + name: tensor for name, tensor in tiny.weights().items()}
    tensors["vision.patch.weight"] = Stored("F32", np.ones(4, np.float32))
    refused(tiny.make(tmp_path / "c", tensors=tensors), "1 unexpected: vision.patch.weight")


def test_shapes_are_checked_against_the_config(tmp_path):
    tiny.make(tmp_path, config=tiny.config(intermediate_size=1024, vocab_size=500))
    refused(tmp_path, "model.embed_tokens.weight is [512, 256], config.json asks for [500, 256]",
            "gate_proj.weight is [512, 256], config.json asks for [1024, 256]", "and 3 more")  # fmt: skip
    tiny.make(tmp_path, config=tiny.config(num_hidden_layers=3))
    refused(tmp_path, "12 of 39 tensors are missing", "model.layers.2.")
    tiny.make(tmp_path, config=tiny.config(num_hidden_layers=1))
    refused(tmp_path, "12 unexpected")
    tiny.make(tmp_path, config=tiny.config(num_hidden_layers=10**9))
    refused(tmp_path, "num_hidden_layers is 1000000000", "27 tensors")
    tiny.make(tmp_path, config=tiny.config(vocab_size=10**12))
    refused(tmp_path, "vocab_size is out of range")


def test_types_that_are_not_read_are_named(tmp_path):
    tensors = tiny.weights()
    tensors["model.layers.1.mlp.up_proj.weight"] = Stored("F8_E4M3", np.zeros((512, 256), np.uint8))
    refused(tiny.make(tmp_path, tensors=tensors), "model.layers.1.mlp.up_proj.weight is F8_E4M3", "BF16, F16, F32")
    tensors["model.layers.1.mlp.up_proj.weight"] = Stored("F64", np.zeros((512, 256), np.float64))
    refused(tiny.make(tmp_path, tensors=tensors), "is F64")


# ------------------------------------------------------------------------------------------------- A06, A07: the head


def test_a_tied_head_needs_no_matrix(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path, Sizes(tied=True)))
    checkpoint.close()
    assert checkpoint.dims.tied and notes == [] and "lm_head.weight" not in [s.name for s in checkpoint.specs]


def tied_with_head(folder: Path, spoil=lambda head: None, dtype: str = "BF16") -> Path:
    tensors = tiny.weights(Sizes(tied=True))
    embed = tiny.stored_values(tensors["model.embed_tokens.weight"]).copy()
    tensors["lm_head.weight"] = Stored(dtype, embed)
    spoil(embed)
    return tiny.make(folder, Sizes(tied=True), tensors=tensors)


def test_an_equal_copy_of_a_tied_head_is_dropped_and_told(tmp_path):
    for dtype in ("BF16", "F32"):
        checkpoint, notes = opened(tied_with_head(tmp_path / dtype, dtype=dtype))
        checkpoint.close()
        assert len(notes) == 1 and notes[0].startswith("dropped the stored lm_head.weight") and checkpoint.dims.tied


def test_a_tied_head_that_differs_is_refused(tmp_path):
    def spoil(head):
        head[511, 255] += 1

    refused(tied_with_head(tmp_path, spoil), "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings")


def test_without_the_tie_key_a_stored_head_decides(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path / "a", config=tiny.config(tie_word_embeddings=ABSENT)))
    checkpoint.close()
    assert not checkpoint.dims.tied and checkpoint.defaults == {"tie_word_embeddings": False}
    assert notes == ["config.json has no tie_word_embeddings: took the default false"]
    tied = Sizes(tied=True)
    refused(tiny.make(tmp_path / "b", tied, config=tiny.config(tied, tie_word_embeddings=ABSENT)), "lm_head.weight is missing", "tie_word_embeddings")


# ------------------------------------------------------------------------------------- A12, A22-A32: config.json


@pytest.mark.parametrize("block, named", [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"), ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"), ({"load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"), ({"quant_method": "fp8"}, "fp8"),
    ({"bits": 4}, "without a quant_method"),
])  # fmt: skip
def test_a_quantised_source_is_refused_at_the_config(tmp_path, block, named):
    tensors = tiny.weights()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.qweight"] = Stored("I32", np.zeros((32, 512), np.int32))
    refused(tiny.make(tmp_path, tensors=tensors, config=tiny.config(quantization_config=block)), "config.json", named, "original BF16 checkpoint")


@pytest.mark.parametrize("changes, found", [
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "Qwen3ForCausalLM"), ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"), ({"architectures": ["Qwen2ForRewardModel"]}, "Qwen2ForRewardModel"),
    ({"architectures": ABSENT}, "names no architecture"), ({"architectures": []}, "names no architecture"),
    ({"architectures": "Qwen3ForCausalLM"}, "Qwen3ForCausalLM"), ({"model_type": "qwen3"}, "'qwen3'"),
])  # fmt: skip
def test_another_architecture_is_refused(tmp_path, changes, found):
    refused(tiny.make(tmp_path, config=tiny.config(**changes)), "config.json", found, "Qwen2ForCausalLM")


@pytest.mark.parametrize("changes", [
    {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": 500000, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}}, {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_theta": 500000.0, "torch_dtype": ABSENT, "dtype": "bfloat16"},
])  # fmt: skip
def test_every_spelling_of_the_rotary_base_and_the_type(tmp_path, changes):
    checkpoint, notes = opened(tiny.make(tmp_path, config=tiny.config(**changes)))
    checkpoint.close()
    assert checkpoint.dims.rope_theta == 500000.0 and checkpoint.torch_dtype == "bfloat16" and notes == []


@pytest.mark.parametrize("changes, fragments", [
    ({"rope_theta": ABSENT}, ["rope_theta is missing", "rope_parameters"]),
    ({"rope_theta": None}, ["rope_theta is missing"]),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, ["two rotary bases", "1e+06", "10000"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, ["rope_scaling yarn is not supported"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling linear"]),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}, ["rope_parameters dynamic"]),
    ({"rope_scaling": {"factor": 4.0}}, ["factor = 4.0"]),
    ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, ["mrope_section"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"use_sliding_window": True}, ["use_sliding_window is true", "full attention"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
    ({"use_sliding_window": "no"}, ["use_sliding_window is 'no'", "true or false"]),
    ({"use_mrope": True}, ["use_mrope"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    ({"hidden_size": "256"}, ["hidden_size is '256'", "whole number"]),
    ({"num_attention_heads": 4.5}, ["num_attention_heads is 4.5"]),
    ({"num_attention_heads": True}, ["num_attention_heads is True"]),
    ({"num_attention_heads": 0}, ["num_attention_heads 0"]),
    ({"num_attention_heads": 3, "num_key_value_heads": 1}, ["hidden_size 256", "num_attention_heads 3"]),
    ({"num_key_value_heads": 3}, ["4 query heads cannot share 3 KV heads"]),
    ({"num_hidden_layers": 0}, ["num_layers is 0"]),
    ({"num_hidden_layers": -1}, ["num_layers is -1"]),
    ({"rope_theta": float("nan")}, ["rope_theta is nan"]),
    ({"rope_theta": -1.0}, ["rope_theta"]),
    ({"rms_norm_eps": 2.0}, ["rms_eps is 2.0"]),
    ({"eos_token_id": "<|im_end|>"}, ["eos_token_id", "'<|im_end|>'"]),
    ({"eos_token_id": 512}, ["eos_token_id has 512", "0 to 511"]),
])  # fmt: skip
def test_what_would_change_the_model_is_refused_by_name(tmp_path, changes, fragments):
    refused(tiny.make(tmp_path, config=tiny.config(**changes)), "config.json", *fragments)


def test_a_sliding_window_that_is_off_changes_nothing(tmp_path):
    plain = opened(tiny.make(tmp_path / "a", config=tiny.config(use_sliding_window=ABSENT, sliding_window=ABSENT, max_window_layers=ABSENT)))
    switched_off = opened(tiny.make(tmp_path / "b", config=tiny.config(
        use_sliding_window=False, sliding_window=64, max_window_layers=1, layer_types=["full_attention"] * 2)))  # fmt: skip
    for checkpoint, _ in (plain, switched_off):
        checkpoint.close()
    assert plain[0].dims == switched_off[0].dims and plain[1] == switched_off[1] == []


@pytest.mark.parametrize("key", ["num_key_value_heads", "intermediate_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_an_absent_size_is_refused_by_name(tmp_path, key):
    refused(tiny.make(tmp_path, config=tiny.config(**{key: ABSENT})), "config.json", f"the key {key} is missing")


@pytest.mark.parametrize("key, default, shown", [("rms_norm_eps", 1e-6, "1e-06"), ("hidden_act", "silu", '"silu"'), ("max_position_embeddings", 32768, "32768")])
def test_an_absent_key_with_a_default_is_recorded_and_told(tmp_path, key, default, shown):
    checkpoint, notes = opened(tiny.make(tmp_path, config=tiny.config(**{key: ABSENT})))
    checkpoint.close()
    assert checkpoint.defaults == {key: default} and notes == [f"config.json has no {key}: took the default {shown}"]


def test_keys_that_are_not_used_are_told(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path, config=tiny.config(auto_map={"x": "y"}, attention_bias=True, bos_token_id=ABSENT)))
    checkpoint.close()
    assert notes == ["config.json: keys that nanoqwen does not use: attention_bias, auto_map"]


def test_head_dim_explicit_or_derived(tmp_path):
    sizes = Sizes(hidden=256, heads=2, kv_heads=1, explicit_head_dim=64)  # hidden / heads would be 128
    checkpoint, notes = opened(tiny.make(tmp_path / "a", sizes))
    checkpoint.close()
    assert checkpoint.dims.head_dim == 64 and notes == []
    checkpoint, notes = opened(tiny.make(tmp_path / "b", Sizes(heads=8), config=tiny.config(Sizes(heads=8), head_dim=None)))
    checkpoint.close()
    assert checkpoint.dims.head_dim == 32 and len(notes) == 1 and "head_dim is 32" in notes[0]


def test_broken_json_is_one_line(tmp_path):
    path = tiny.make(tmp_path) / "config.json"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, "config.json", "not valid JSON at line")
    path.write_bytes(b"{}")
    refused(tmp_path, "config.json", "names no architecture")
    path.write_bytes(b"[]")
    refused(tmp_path, "config.json", "an object was expected")
    path.write_bytes(b"")
    refused(tmp_path, "config.json", "empty")
    path.write_bytes(b'{"a": "\xff"}')
    refused(tmp_path, "config.json", "not UTF-8")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(tmp_path, "config.json", "Git LFS pointer")
    path.write_bytes(b"\xef\xbb\xbf" + whole)  # a byte order mark is harmless
    opened(tmp_path)[0].close()
