"""What a checkpoint says about text: tokenizer, added tokens, chat template, generation defaults, and the ids that stop.

The same fact may stand in several files, and writers disagree on which. ``tokenizer.json`` is kept byte for byte. Added
tokens are merged from it and from ``tokenizer_config.json``. A ``chat_template.jinja`` wins over the template inside
``tokenizer_config.json``. End ids are collected from every file that names one: a model stops at any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoqwen.checkpoint.jsonfile import parse_object, read_bytes, read_object
from nanoqwen.errors import InputError

#: Markers with which Qwen2 models end a document and a turn. They stop generation wherever the tokenizer has them as
#: special tokens, even when no config names them: chat models are known to emit the other one (llama.cpp #9606).
QWEN2_END_MARKERS = ("<|endoftext|>", "<|im_end|>")


@dataclass
class TextFiles:
    """The text side of a checkpoint. ``entries`` is one more than the largest token id; rows beyond it are padding."""

    tokenizer_bytes: bytes
    entries: int
    added_tokens: list[dict]
    named_tokens: dict[str, str | None]
    chat_template: str | None
    chat_template_from: str | None
    generation: dict
    stop_ids: list[dict]


def read_text_files(folder: Path, config: dict, vocab_rows: int, notes: list[str]) -> TextFiles:
    """Read and check the tokenizer side of the checkpoint in ``folder``; ``config`` is its parsed ``config.json``.

    Raises InputError when ``tokenizer.json`` is absent or unusable, when it has more entries than the embedding has rows,
    when two files contradict each other, or when an end id is out of range. Appends to ``notes`` what a user must be told.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        hint = ""
        if (folder / "vocab.json").exists():
            hint = "; vocab.json and merges.txt are not read, let transformers write one (AutoTokenizer.from_pretrained(F).save_pretrained(F))"
        raise InputError(f"{folder}: no tokenizer.json{hint or '; take the complete checkpoint'}")
    raw = read_bytes(path)
    tokenizer = parse_object(raw, path)
    side = _optional(folder / "tokenizer_config.json", notes)
    generation = _optional(folder / "generation_config.json", notes)

    vocab = _vocabulary(tokenizer, path)
    added = _added_tokens(tokenizer, side, folder)
    entries = max(max(vocab.values(), default=-1), max((t["id"] for t in added), default=-1)) + 1
    if entries > vocab_rows:
        raise InputError(
            f"{path}: the largest token id is {entries - 1}, but the embedding has only {vocab_rows} rows (vocab_size); "
            "tokenizer and weights are not of the same model"
        )
    text_of = {i: text for text, i in vocab.items()} | {t["id"]: t["content"] for t in added}
    if len(text_of) < entries:
        notes.append(f"tokenizer.json: {entries - len(text_of)} of {entries} token ids have no text")
    _check_loads(raw, path)
    template, template_from = _chat_template(folder, side, notes)
    named = {key: _token_text(side.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    stop_ids = _stop_ids(generation, config, named["eos_token"], added, text_of, vocab_rows, folder)
    for stop in stop_ids:
        if stop["text"] is None:
            notes.append(f"end id {stop['id']} (from {stop['from']}) has no token text in tokenizer.json or tokenizer_config.json")
    if not stop_ids:
        notes.append("no file names an end id: generation stops only at its token limit")
    return TextFiles(raw, entries, added, named, template, template_from, generation, stop_ids)


def _optional(path: Path, notes: list[str]) -> dict:
    """The JSON object in ``path``, or an empty one with a note when there is no such file."""
    if path.exists() or path.is_symlink():
        return read_object(path)
    notes.append(f"the checkpoint has no {path.name}")
    return {}


def _vocabulary(tokenizer: dict, path: Path) -> dict[str, int]:
    model = tokenizer.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if kind != "BPE" or not isinstance(vocab, dict):
        raise InputError(f"{path}: holds no BPE vocabulary (model type {kind}); a Qwen2 tokenizer.json was expected")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):  # not Qwen2's, and the tokenizers library can crash on them
        if model.get(key):
            raise InputError(f"{path}: {key} is {model[key]!r}, a byte-level BPE has none; a Qwen2 tokenizer.json was expected")
    if not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise InputError(f"{path}: its vocabulary has ids that are not whole numbers; download it again")
    return vocab


def _added_tokens(tokenizer: dict, side: dict, folder: Path) -> list[dict]:
    """Added tokens of both files by id: [{"id", "content", "special"}]. Two texts for one id are refused."""
    found: dict[int, dict] = {}
    decoder = side.get("added_tokens_decoder") or {}
    try:
        listed = [("tokenizer.json", t) for t in tokenizer.get("added_tokens") or []]
        listed += [("tokenizer_config.json", {"id": int(i), **t}) for i, t in decoder.items()]
        tokens = [(file, int(t["id"]), t["content"], bool(t.get("special", False))) for file, t in listed]
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError):
        raise InputError(f"{folder}: an added token in tokenizer.json or tokenizer_config.json lacks its id or content; download both again") from None
    for file, token, content, special in tokens:
        if token < 0 or not isinstance(content, str):
            raise InputError(f"{folder / file}: added token {token} has the content {content!r}; download the file again")
        before = found.setdefault(token, {"id": token, "content": content, "special": special})
        if before["content"] != content:
            raise InputError(
                f"{folder}: token {token} is {before['content']!r} in tokenizer.json and {content!r} in {file}; take both "
                "files from one download"
            )
    return [found[token] for token in sorted(found)]


def _check_loads(raw: bytes, path: Path) -> None:
    """Let the tokenizers library build it now: a file it cannot build should not be found out at the first prompt."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(raw.decode("utf-8-sig"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises plain Exception, and a BaseException of its own when it panics
        raise InputError(f"{path}: the tokenizers library cannot load it: {str(e).splitlines()[0]}") from None


def _chat_template(folder: Path, side: dict, notes: list[str]) -> tuple[str | None, str | None]:
    """(template, the file it came from); (None, None) when there is none."""
    own, inside = folder / "chat_template.jinja", side.get("chat_template")
    if isinstance(inside, list):  # several named templates: [{"name": "default", "template": "..."}, ...]
        named = {str(t.get("name")): t.get("template") for t in inside if isinstance(t, dict)}
        inside = named.get("default")
        others = sorted(name for name in named if name != "default")
        if others:
            notes.append(f"tokenizer_config.json has several chat templates: took default, left out {', '.join(others)}")
    if own.exists():
        try:
            text = read_bytes(own).decode("utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{own}: not UTF-8 (byte {e.start}); download it again") from None
        if isinstance(inside, str) and inside != text:
            notes.append("the chat template of chat_template.jinja was taken, the different one in tokenizer_config.json was not")
        return text, own.name
    if isinstance(inside, str):
        return inside, "tokenizer_config.json"
    if inside is not None:
        raise InputError(f"{folder / 'tokenizer_config.json'}: chat_template is a {type(inside).__name__}, text was expected")
    notes.append("the checkpoint has no chat template: chat uses the built-in ChatML form of Qwen2.5 where the tokenizer has its markers")
    return None, None


def _token_text(value: object) -> str | None:
    """The text of a token that ``tokenizer_config.json`` names, as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _stop_ids(
    generation: dict, config: dict, eos_token: str | None, added: list[dict], text_of: dict[int, str], vocab_rows: int, folder: Path
) -> list[dict]:
    """Every id that ends a reply, with its text and the files that name it: [{"id", "text", "from"}]."""
    sources: dict[int, list[str]] = {}
    for file, value in (("generation_config.json", generation.get("eos_token_id")), ("config.json", config.get("eos_token_id"))):
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token < vocab_rows:
                raise InputError(f"{folder / file}: eos_token_id has {token!r}, a token id from 0 to {vocab_rows - 1} was expected")
            sources.setdefault(token, []).append(file)
    id_of = {text: token for token, text in text_of.items()}
    if eos_token in id_of:
        sources.setdefault(id_of[eos_token], []).append("tokenizer_config.json")
    for token in added:
        if token["special"] and token["content"] in QWEN2_END_MARKERS and token["id"] not in sources:
            sources[token["id"]] = ["tokenizer.json, Qwen2's end marker"]
    return [{"id": i, "text": text_of.get(i), "from": ", ".join(dict.fromkeys(files))} for i, files in sources.items()]
