"""The small files of a Hugging Face folder, written from the header and the metadata of a pack file.

A pack file does not keep ``config.json`` itself: it keeps what the config meant (dims), the generation defaults as they were, the ids that
end a reply, the named tokens, the added tokens and the chat template. These files say the same again, in the spellings that old
and new readers share: ``rope_theta`` and ``torch_dtype`` at the top level, the chat template inside ``tokenizer_config.json``.
"""

from __future__ import annotations

import json

from nanoqwen.packfile import PackFile

#: What a folder says of its weights: see the documentation of compressed-tensors.
QUANT_METHOD, QUANT_FORMAT = "compressed-tensors", "pack-quantized"


# [hf_files]
def hf_files(pack: PackFile, notes: list[str]) -> dict[str, bytes]:
    """{file name: content} of everything but the weights; ``notes`` collects what a user must be told. Same pack file, same bytes."""
    generation = generation_config(pack.meta, notes)
    return {
        "config.json": _json(config(pack, generation, notes)),
        "generation_config.json": _json(generation),
        "tokenizer.json": pack.tokenizer_bytes,
        "tokenizer_config.json": _json(tokenizer_config(pack, notes)),
    }
# [/hf_files]


def _json(value: dict) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


# [config]
def config(pack: PackFile, generation: dict, notes: list[str]) -> dict:
    """``config.json``: the dimensions of the header, FP16 as the type of what is not INT4, and how the projections are quantised."""
    d, source = pack.dims, pack.meta.get("source") or {}
    named = {key: generation[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in generation}
    shape = {
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "vocab_size": d.vocab,
        "max_position_embeddings": d.max_position,
        "rope_theta": d.rope_theta,
        "rms_norm_eps": d.rms_eps,
        "tie_word_embeddings": d.tied,
    }
    if d.q_size != d.hidden:  # Qwen2 itself has no such key, and readers divide where it is absent
        shape["head_dim"] = d.head_dim
        notes.append(f"heads of {d.head_dim} in a model {d.hidden} wide: config.json says head_dim, which not every engine reads for Qwen2")
    return {
        "architectures": [source.get("architecture") or "Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **shape,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": d.num_layers,
        **named,
        "torch_dtype": "float16",
        "quantization_config": quantization_config(pack.group_size),
    }


def quantization_config(group: int) -> dict:
    """Every linear layer but the head: symmetric INT4 weights, a scale for each ``group`` along the input, activations as they are."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False, "actorder": None}
    return {
        "quant_method": QUANT_METHOD,
        "format": QUANT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
# [/config]


def generation_config(meta: dict, notes: list[str]) -> dict:
    """``generation_config.json`` as the checkpoint had it, with every id at which nanoqwen stops among its end ids."""
    generation = dict(meta.get("generation") or {})
    stops = [int(stop["id"]) for stop in meta.get("stop_ids") or []]
    said = generation.get("eos_token_id")
    said = said if isinstance(said, list) else [] if said is None else [said]
    if added := [i for i in stops if i not in said]:
        ends = [*said, *added]
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        if said:
            notes.append(f"generation_config.json: eos_token_id also names {', '.join(map(str, added))}, at which nanoqwen stops too")
    return generation


def tokenizer_config(pack: PackFile, notes: list[str]) -> dict:
    """``tokenizer_config.json``: the named and the added tokens, and the chat template if there is one."""
    meta = pack.meta
    listed = {t["id"]: t for t in json.loads(pack.tokenizer_bytes.decode("utf-8-sig")).get("added_tokens") or []}
    flags = ("lstrip", "normalized", "rstrip", "single_word")
    decoder = {}
    for token in meta.get("added_tokens") or []:
        own = listed.get(token["id"], {})  # its whitespace rules, where tokenizer.json has them
        decoder[str(token["id"])] = {"content": token["content"], **{flag: bool(own.get(flag, False)) for flag in flags}, "special": bool(token["special"])}
    found = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": decoder,
        "bos_token": meta.get("bos_token"),
        "eos_token": meta.get("eos_token"),
        "pad_token": meta.get("pad_token"),
        "model_max_length": pack.dims.max_position,
        "clean_up_tokenization_spaces": False,
    }
    if meta.get("chat_template") is not None:
        found["chat_template"] = meta["chat_template"]
    else:
        notes.append("the checkpoint had no chat template: an engine's chat endpoint needs one given to it")
    return found
