"""The one thing a benchmark wants to know of a GGUF file: how large its embedding table is, because a decode step does not read it.

GGUF: magic, version (uint32), numbers of tensors and of keys (uint64); then keys (name, type, value), then a table of tensors (name,
dimensions, type, offset). Only the offsets are used, so no quantisation type has to be known. Little-endian, versions 2 and 3.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value types of fixed size, in bytes
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 1 << 16


def embedding_bytes(path: str) -> int | None:
    """Bytes of the token embedding that a decode step leaves alone; 0 for a tied head, which reads all of it; None when the file
    is not GGUF, or damaged."""
    try:
        with open(path, "rb") as file:
            offsets = tensor_offsets(file)
    except (OSError, ValueError, struct.error, UnicodeDecodeError, RecursionError):
        return None
    if EMBEDDING not in offsets:
        return None
    if HEAD not in offsets:
        return 0
    behind = [offset for offset in offsets.values() if offset > offsets[EMBEDDING]]
    return min(behind) - offsets[EMBEDDING] if behind else None


def tensor_offsets(file: BinaryIO) -> dict[str, int]:
    """Tensor name -> offset in bytes in the data section. Raises ValueError or struct.error for what is not GGUF."""
    magic, version, tensors, keys = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("not GGUF 2 or 3")
    for _ in range(keys):
        _text(file)
        _skip(file, _number(file, "<I"))
    offsets = {}
    for _ in range(tensors):
        name, count = _text(file), _number(file, "<I")
        file.seek(8 * count + 4, 1)  # dimensions and type
        offsets[name] = _number(file, "<Q")
    return offsets


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
