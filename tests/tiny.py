"""Tiny Qwen2-shaped checkpoints, written from scratch: the fixtures of every test.

A checkpoint is a folder as Hugging Face writes it: `config.json`, weights in the safetensors format, `tokenizer.json`,
`tokenizer_config.json`, `generation_config.json`.  `make(folder)` writes a sound one in a few milliseconds.  A test that needs
a fault takes the parts apart, spoils one, and hands them back:

    make(folder)                                                   # 27 tensors, 2 layers, 512 embedding rows
    make(folder, Sizes(tied=True), shards=3)                       # tied head, three shards and their index
    tensors = weights();  tensors["model.norm.weight"].values[3] = np.nan
    make(folder, tensors=tensors)                                  # one NaN
    make(folder, config=config(rope_theta=ABSENT))                 # a key is missing
    make(folder, tensors=scripted({49: 65, 65: 66, 66: 260}), sizes=SCRIPTED)   # greedy text follows a chain of ids

Only numpy and the standard library are used.  The safetensors bytes are written here by hand on purpose: the tests of our
reader must not depend on another reader's idea of the format.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ABSENT = object()  # a value for `config(...)` and its kin: leave this key out

ENDOFTEXT, IM_START, IM_END = 258, 259, 260  # ids of the three markers in `tokenizer()`
TOKENIZER_ENTRIES = 261  # 256 bytes, two merged pairs, three markers


# ---------------------------------------------------------------------------------------------------------------- sizes

@dataclass(frozen=True)
class Sizes:
    """Dimensions of a fixture.  The defaults are the plain one: 27 tensors, 2:1 GQA, heads of 64, untied."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 512
    context: int = 8192
    tied: bool = False
    explicit_head_dim: int | None = None  # written to config.json when given; otherwise hidden / heads

    @property
    def head_dim(self) -> int:
        return self.explicit_head_dim or self.hidden // self.heads


PLAIN = Sizes()
TIED = Sizes(tied=True)
GQA7 = Sizes(hidden=896, intermediate=1024, layers=2, heads=7, kv_heads=1)  # the 7B's 7:1 grouping, heads of 128
SCRIPTED = Sizes(hidden=512, intermediate=512, layers=1)  # the shape `scripted` writes


# -------------------------------------------------------------------------------------------------------------- tensors

@dataclass
class Stored:
    """A tensor and the type it is stored in: `values` is float32 and may be edited in place before it is written."""

    dtype: str
    values: np.ndarray


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 [...] -> the bfloat16 bit patterns as uint16 [...], rounded to nearest (ties to even).  NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bit patterns [...] -> float32 [...], exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def stored_values(tensor: Stored) -> np.ndarray:
    """The float32 values that a reader gets back: `values` after one rounding to the stored type."""
    if tensor.dtype == "BF16":
        return from_bf16(to_bf16(tensor.values))
    if tensor.dtype == "F16":
        with np.errstate(over="ignore"):
            return tensor.values.astype(np.float16).astype(np.float32)
    return tensor.values.astype(np.float32)


def encode(tensor: Stored) -> bytes:
    """The payload bytes of one tensor.  BF16, F16 and F32 convert from `values`; any other type takes `values` as they are."""
    if tensor.dtype == "BF16":
        return to_bf16(tensor.values).tobytes()
    if tensor.dtype == "F16":
        with np.errstate(over="ignore"):
            return tensor.values.astype(np.float16).tobytes()
    if tensor.dtype == "F32":
        return tensor.values.astype(np.float32).tobytes()
    return np.ascontiguousarray(tensor.values).tobytes()


def weights(sizes: Sizes = PLAIN, *, seed: int = 0, dtype: str = "BF16", std: float = 0.05) -> dict[str, Stored]:
    """Random weights of every tensor that `sizes` asks for, by Hugging Face name.  Norms are ones, biases are random too."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Stored] = {}

    def normal(name: str, *shape: int) -> None:
        tensors[name] = Stored(dtype, rng.normal(0, std, shape).astype(np.float32))

    def ones(name: str) -> None:
        tensors[name] = Stored(dtype, np.ones(sizes.hidden, np.float32))

    q_rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    normal("model.embed_tokens.weight", sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        ones(prefix + "input_layernorm.weight")
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            normal(f"{prefix}self_attn.{name}.weight", rows, sizes.hidden)
            normal(f"{prefix}self_attn.{name}.bias", rows)
        normal(prefix + "self_attn.o_proj.weight", sizes.hidden, q_rows)
        ones(prefix + "post_attention_layernorm.weight")
        normal(prefix + "mlp.gate_proj.weight", sizes.intermediate, sizes.hidden)
        normal(prefix + "mlp.up_proj.weight", sizes.intermediate, sizes.hidden)
        normal(prefix + "mlp.down_proj.weight", sizes.hidden, sizes.intermediate)
    ones("model.norm.weight")
    if not sizes.tied:
        normal("lm_head.weight", sizes.vocab, sizes.hidden)
    return tensors


def scripted(chain: dict[int, int], sizes: Sizes = SCRIPTED) -> dict[str, Stored]:
    """A model whose greedy text follows `chain` (id -> next id), whatever came before.  Use it with `sizes=SCRIPTED`.

    The layers add nothing (all projections are zero), so the residual stays the embedding, one-hot in the token id, and row
    `next` of the head is one-hot in `id`.  Every number is exact in FP16 and in INT4 groups.  Ids must be below `hidden`.
    """
    tensors = weights(sizes)
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor.values[...] = 0
    tensors["model.embed_tokens.weight"].values[...] = np.eye(sizes.vocab, sizes.hidden)
    head = tensors["lm_head.weight"].values
    head[...] = 0
    for token, following in chain.items():
        head[following, token] = 1
    return tensors


def spelled_chain(prompt_end: str, reply: str, end_id: int = IM_END) -> dict[int, int]:
    """The chain that answers a prompt ending in the ASCII letter `prompt_end` with `reply` (no letter twice), then `end_id`."""
    ids = [ord(letter) for letter in prompt_end + reply] + [end_id]
    if len(set(ids)) != len(ids):
        raise ValueError("a chain knows one successor per token: no character may appear twice")
    return dict(zip(ids, ids[1:]))


# ---------------------------------------------------------------------------------------------------------- json pieces

def _with_changes(base: dict, changes: dict) -> dict:
    return {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}


def config(sizes: Sizes = PLAIN, **changes) -> dict:
    """`config.json` as Qwen2.5 writes it.  Keyword arguments replace or add keys; `ABSENT` removes one."""
    base = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": sizes.tied,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": sizes.layers,
        "bos_token_id": ENDOFTEXT,
        "eos_token_id": IM_END,
        "torch_dtype": "bfloat16",
    }
    if sizes.explicit_head_dim is not None:
        base["head_dim"] = sizes.explicit_head_dim
    return _with_changes(base, changes)


def generation_config(**changes) -> dict:
    """`generation_config.json` with Qwen's two end ids."""
    return _with_changes({"eos_token_id": [IM_END, ENDOFTEXT]}, changes)


# The shape of Qwen2.5's template without its tool section: a default system prompt, and the three roles.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer_config(**changes) -> dict:
    """`tokenizer_config.json`: the special tokens by name, and the chat template."""
    base = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    return _with_changes(base, changes)


def _byte_letters() -> dict[int, str]:
    """GPT-2's table: every byte as one visible letter.  Printable bytes stand for themselves, the rest start at U+0100."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + k) for k, byte in enumerate(hidden)}}


# Qwen2's splitter: contractions, words with one leading non-letter, single digits, punctuation, line ends, spaces.
QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")


def tokenizer(*, merges: str = "pairs", markers: bool = True) -> dict:
    """`tokenizer.json` of a byte-level BPE with 261 entries and Qwen2's splitter: one token a byte, one token a digit.

    Ids: 0..255 the bytes, 256 "in", 257 "er", 258 <|endoftext|>, 259 <|im_start|>, 260 <|im_end|>.
    `merges` is "pairs" (`["i", "n"]`, what newer writers emit) or "spaces" (`"i n"`, the older spelling); the meaning is the
    same.  `markers=False` leaves `added_tokens` empty.
    """
    letters = _byte_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    vocab.update({"in": 256, "er": 257})
    pairs = [["i", "n"], ["e", "r"]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ENDOFTEXT + k, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for k, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        ] if markers else [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
            byte_level,
        ]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
            "merges": pairs if merges == "pairs" else [" ".join(pair) for pair in pairs],
        },
    }


# -------------------------------------------------------------------------------------------------------------- writing

def safetensors_bytes(tensors: dict[str, Stored]) -> bytes:
    """A whole safetensors file: 8 bytes of header length, the JSON header padded with spaces to 8 bytes, the payloads."""
    header, payloads, offset = {}, [], 0
    for name, tensor in tensors.items():
        payload = encode(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.values.shape),
                        "data_offsets": [offset, offset + len(payload)]}
        payloads.append(payload)
        offset += len(payload)
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(payloads)


def write_safetensors(path: str | os.PathLike, tensors: dict[str, Stored], *, cut: int = 0, tail: bytes = b"") -> None:
    """Write `tensors` to `path`; drop the last `cut` bytes or append `tail`, to play a broken download."""
    content = safetensors_bytes(tensors) + tail
    Path(path).write_bytes(content[: len(content) - cut])


def write_json(path: str | os.PathLike, value) -> None:
    """Write `value` as UTF-8 JSON, letters as they are."""
    Path(path).write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")


def shard_name(index: int, count: int) -> str:
    """The file name of shard `index` (0-based) of `count`, as `save_pretrained` spells it."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_shards(folder: str | os.PathLike, tensors: dict[str, Stored], shards: int) -> None:
    """Spread `tensors` over `shards` files in order, and write `model.safetensors.index.json`."""
    folder, names = Path(folder), list(tensors)
    where = {name: shard_name(k * shards // len(names), shards) for k, name in enumerate(names)}
    for file in sorted(set(where.values())):
        write_safetensors(folder / file, {name: tensors[name] for name in names if where[name] == file})
    total = sum(len(encode(tensor)) for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def make(
    folder: str | os.PathLike,
    sizes: Sizes = PLAIN,
    *,
    tensors: dict[str, Stored] | None = None,
    config: dict | None = None,
    tokenizer: dict | None = None,
    tokenizer_config: dict | None = None,
    generation_config: dict | None = None,
    chat_template_file: str | None = None,
    shards: int = 1,
    seed: int = 0,
    dtype: str = "BF16",
) -> Path:
    """Write a whole checkpoint to `folder` (made if needed) and return it.

    Every piece that is not given is the sound one for `sizes`; `seed` and `dtype` go to `weights`.  `shards > 1` writes that
    many files and an index.  `chat_template_file` is the text of a `chat_template.jinja`.  A json piece given as `ABSENT` is
    not written at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(sizes, seed=seed, dtype=dtype) if tensors is None else tensors
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        write_shards(folder, tensors, shards)
    pieces = {
        "config.json": config_of(sizes) if config is None else config,
        "tokenizer.json": tokenizer_of() if tokenizer is None else tokenizer,
        "tokenizer_config.json": tokenizer_config_of() if tokenizer_config is None else tokenizer_config,
        "generation_config.json": generation_config_of() if generation_config is None else generation_config,
    }
    for name, piece in pieces.items():
        if piece is not ABSENT:
            write_json(folder / name, piece)
    if chat_template_file is not None:
        (folder / "chat_template.jinja").write_text(chat_template_file, encoding="utf-8")
    return folder


# `make` names its arguments after the files, which hides the builders of the same names inside it.
config_of, tokenizer_of, tokenizer_config_of, generation_config_of = config, tokenizer, tokenizer_config, generation_config


def as_hub_cache(folder: str | os.PathLike, cache: str | os.PathLike, repo: str = "someone/tiny") -> Path:
    """Move the files of `folder` into a Hugging Face cache under `cache` and return the snapshot folder of symlinks.

    The layout is the hub's: `models--someone--tiny/blobs/<content name>` holds the bytes,
    `models--someone--tiny/snapshots/<revision>/<file>` are relative links to them, `refs/main` names the revision.
    """
    base = Path(cache) / ("models--" + repo.replace("/", "--"))
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = base / "snapshots" / revision, base / "blobs"
    for path in (snapshot, blobs, base / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(revision, encoding="utf-8")
    for k, file in enumerate(sorted(Path(folder).iterdir())):
        blob = blobs / f"{k:040x}"
        file.replace(blob)
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    return snapshot


def digits(n: int) -> str:
    """`n` varied digits: exactly `n` tokens, with this tokenizer and with Qwen's.

    One repeated digit would make all values equal, and errors of attention, rotary angles and pages would cancel out.
    """
    return "".join(str(pow(7, i, 9973) % 10) for i in range(n))


def digit_ids(n: int) -> list[int]:
    """The token ids of `digits(n)` in `tokenizer()`: one a digit."""
    return [ord(digit) for digit in digits(n)]
