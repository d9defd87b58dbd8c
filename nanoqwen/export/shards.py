"""Safetensors files, written as a stream: a header of JSON, then the tensors back to back.

The safetensors library takes whole tensors and keeps a file's worth of them in memory. Here every offset follows from the shapes, so the header
is known at once and the payloads pass through in blocks. Tensors of wide numbers come first, which aligns every tensor to its own size.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np

#: Types of the safetensors format that an export uses: numpy's name for each.
DTYPES = {"I64": "<i8", "I32": "<i4", "F16": "<f2"}


@dataclass(frozen=True)
class Piece:
    """One tensor to write: ``blocks()`` yields its values in order, as arrays of consecutive rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its name, and its tensors in the order in which they lie in it."""

    name: str
    pieces: list[Piece]

    def header(self) -> bytes:
        """Length of the JSON as 8 bytes, then the JSON, padded with spaces to a multiple of 8."""
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not name its framework
        end = 0
        for piece in self.pieces:
            start, end = end, end + piece.nbytes
            entries[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def file_bytes(self) -> int:
        return len(self.header()) + sum(piece.nbytes for piece in self.pieces)


def plan_shards(pieces: list[Piece], limit: int) -> list[Shard]:
    """Fill files in order, at most ``limit`` bytes of tensors each (one tensor at least), and name them as Hugging Face does."""
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + piece.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    names = [f"model-{k:05d}-of-{len(groups):05d}.safetensors" for k in range(1, len(groups) + 1)] if len(groups) > 1 else ["model.safetensors"]
    return [Shard(name, sorted(group, key=_width, reverse=True)) for name, group in zip(names, groups)]  # sorted() keeps equal ones in order


def _width(piece: Piece) -> int:
    return np.dtype(DTYPES[piece.dtype]).itemsize


def index_json(shards: list[Shard]) -> bytes:
    """``model.safetensors.index.json``: which file holds which tensor."""
    where = {piece.name: shard.name for shard in shards for piece in shard.pieces}
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces)
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n").encode("utf-8")


def write_shard(file: BinaryIO, shard: Shard, count: Callable[[int, str], None]) -> None:
    """Write one file; ``count(bytes, tensor name)`` is called after each block. Raises OSError, and what ``blocks()`` raises."""
    header = shard.header()
    file.write(header)
    count(len(header), shard.name)
    for piece in shard.pieces:
        for block in piece.blocks():
            file.write(np.ascontiguousarray(block, DTYPES[piece.dtype]))
            count(block.nbytes, piece.name)
