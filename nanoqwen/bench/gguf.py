"""The two things a benchmark wants to know of a GGUF file: how large its embedding table is, because a decode step does not read it, and
what a token of context adds, because it does read that.

GGUF: magic, version (uint32), numbers of tensors and of keys (uint64); then keys (name, type, value), then a table of tensors (name,
dimensions, type, offset). Only the offsets are used, so no quantisation type has to be known. Little-endian, versions 2 and 3.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_FP16_BYTES = 2
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value types of fixed size, in bytes
_INTEGERS = {4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 1 << 16


def embedding_bytes(path: str) -> int | None:
    """Bytes of the token embedding that a decode step leaves alone; 0 for a tied head, which reads all of it; None when the file
    is not GGUF, or damaged."""
    offsets = (_read(path) or ({}, {}))[1]
    if EMBEDDING not in offsets:
        return None
    if HEAD not in offsets:
        return 0
    behind = [offset for offset in offsets.values() if offset > offsets[EMBEDDING]]
    return min(behind) - offsets[EMBEDDING] if behind else None


def cache_bytes_per_token(path: str) -> int | None:
    """Bytes of FP16 keys and values that a token of context takes in all layers; None when the file does not say, or not one number for all."""
    keys = (_read(path) or ({}, {}))[0]
    model = keys.get("general.architecture")
    of = {name: keys.get(f"{model}.{name}") for name in (
        "block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")}  # fmt: skip
    layers, heads = of["block_count"], of["attention.head_count"]
    if not layers or not heads or not of["embedding_length"]:
        return None
    if any(value is None and f"{model}.{name}" in keys for name, value in of.items()):
        return None  # a list, one number a layer
    usual = of["embedding_length"] // heads
    widths = (of["attention.key_length"] or usual) + (of["attention.value_length"] or usual)
    return layers * (of["attention.head_count_kv"] or heads) * widths * _FP16_BYTES


def _read(path: str) -> tuple[dict[str, int | str | None], dict[str, int]] | None:
    """(keys, offsets of the tensors) as ``contents`` gives them; None when the file is not GGUF, or damaged."""
    try:
        with open(path, "rb") as file:
            return contents(file)
    except (OSError, ValueError, struct.error, UnicodeDecodeError, RecursionError):
        return None


def contents(file: BinaryIO) -> tuple[dict[str, int | str | None], dict[str, int]]:
    """(keys, tensor name -> offset in bytes in the data section). The values are integers, the architecture's name, and None for the rest.

    Raises ValueError or struct.error for what is not GGUF.
    """
    magic, version, tensors, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("not GGUF 2 or 3")
    keys: dict[str, int | str | None] = {}
    for _ in range(count):
        name, kind = _text(file), _number(file, "<I")
        if kind in _INTEGERS:
            keys[name] = _number(file, _INTEGERS[kind])
        elif kind == _STRING and name == "general.architecture":
            keys[name] = _text(file)
        else:
            _skip(file, kind)
            keys[name] = None
    offsets: dict[str, int] = {}
    for _ in range(tensors):
        name, count = _text(file), _number(file, "<I")
        file.seek(8 * count + 4, 1)  # dimensions and type
        offsets[name] = _number(file, "<Q")
    return keys, offsets


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "<Q"), 1)
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES:
            file.seek(count * _SIZES[inner], 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    elif kind in _SIZES:
        file.seek(_SIZES[kind], 1)
    else:
        raise ValueError(f"unknown value type {kind}")


def _number(file: BinaryIO, form: str) -> int:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > _LONGEST_NAME:
        raise ValueError("a name of impossible length")
    return file.read(length).decode("utf-8")
