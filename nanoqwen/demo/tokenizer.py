"""Trains a byte-level BPE in Qwen2's exact form and writes the tokenizer's files.

Same normaliser (NFC), same split pattern (one digit a token, spaces glued to the word that follows), same byte alphabet, same
control tokens in the same order as Qwen2.5-Coder; only the merges are our own and there are far fewer of them. So code
written for the 7B's tokenizer meets every habit of it here: ids beyond the BPE that are control tokens, control tokens that
are "special" and others that are not, and more embedding rows than tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .snippets import DEFAULT_SYSTEM

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# (text, special) in the order of their ids, as in Qwen2.5-Coder: what `skip_special_tokens` hides are the first three.
CONTROL = (("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|fim_prefix|>", False),
           ("<|fim_middle|>", False), ("<|fim_suffix|>", False), ("<|fim_pad|>", False), ("<|repo_name|>", False), ("<|file_sep|>", False))
BPE_SIZE = 2030  # with the nine control tokens 2039 of 2048 embedding rows; the 7B leaves rows unused as well

CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (loop.first and message['role'] == 'system') %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_bpe(texts, size: int = BPE_SIZE) -> Tokenizer:
    """A BPE of `size` entries, the 256 byte symbols first. It has no control tokens: "<|im_end|>" in a text is plain text to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} BPE entries, {size} are needed: train on more text")
    return tokenizer


def bpe_of(checkpoint: Path) -> Tokenizer:
    """The BPE inside a checkpoint's tokenizer.json, without the control tokens."""
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    return Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))


def control_ids(size: int = BPE_SIZE) -> dict[str, int]:
    """Control token -> id, for a BPE of `size` entries."""
    return {text: size + i for i, (text, _) in enumerate(CONTROL)}


def with_control(bpe: Tokenizer) -> Tokenizer:
    """A copy of `bpe` that also knows the control tokens."""
    tokenizer = Tokenizer.from_str(bpe.to_str())
    tokenizer.post_processor = None
    for text, special in CONTROL:
        token = AddedToken(text, special=special, normalized=False, lstrip=False, rstrip=False, single_word=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def write_tokenizer(bpe: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, in the form that Qwen2.5 ships them."""
    tokenizer = with_control(bpe)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    ids = control_ids(bpe.get_vocab_size())
    if any(tokenizer.token_to_id(text) != i for text, i in ids.items()):
        raise ValueError("control tokens did not get the ids after the BPE's")
    config = {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[text]): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": special}
            for text, special in CONTROL},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None, "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": context, "pad_token": "<|endoftext|>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
