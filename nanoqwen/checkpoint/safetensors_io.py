"""The safetensors container: eight bytes of length, a JSON header, then raw little-endian payloads.

The format is small enough to read directly, and we have to: numpy has no bfloat16, so the safetensors package cannot hand
bfloat16 tensors to numpy. Reading it here also lets every damage be named with file, size found and size needed, before
a single payload byte is used::

    0        uint64   n, the length of the header
    8        n bytes  JSON: {"tensor": {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}, ...}
    8 + n    payloads; offsets count from here, and the last one ends where the file ends

Payloads are read, not mapped: a mapped file that shrinks under us would kill the process, and a read costs little beside
the conversion. numpy only.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from nanoqwen.errors import InputError

#: Bytes a value, of every type the format defines (huggingface/safetensors, `Dtype`).
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
#: The types that hold weights we can read, and how their bits lie in a file.
READABLE = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}

#: The reference implementation refuses longer headers; a longer one means that these are not header bytes at all.
MAX_HEADER_BYTES = 100_000_000

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: its file, its stored type and shape, and its payload in bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


# [read_header]
def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name, with every size checked against the length of the file.

    Raises InputError, naming the file, the size found and the size needed, when the file is shorter or longer than its
    header says, is not a safetensors file, or has a header that contradicts itself.
    """
    try:
        found = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            if len(start) == 8 and header_bytes <= min(MAX_HEADER_BYTES, found - 8):
                text = file.read(header_bytes)
            else:
                text = b""
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}") from None
    if not text.startswith(b"{"):
        raise InputError(_not_safetensors(path, start, found, header_bytes))
    tensors = _parse_header(path, text, payload_start=8 + header_bytes)
    needed = max((t.offset + t.nbytes for t in tensors.values()), default=8 + header_bytes)
    if found != needed:
        fault = "truncated" if found < needed else "bytes that its header does not account for"
        raise InputError(
            f"{path}: {fault}: {found:,} bytes found, {needed:,} needed by its header; the download is incomplete or "
            "damaged, download this file again"
        )
    return tensors
# [/read_header]


def _parse_header(path: Path, text: bytes, payload_start: int) -> dict[str, StoredTensor]:
    """The header's entries, checked one by one: type known, length = shape x type, and no two share a byte."""
    try:
        entries = json.loads(text)
    except ValueError:
        raise InputError(f"{path}: its header is not valid JSON, the file is damaged; download it again") from None
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise InputError(f"{path}: the header's entry for {name} is malformed, the file is damaged; download it again")
        if dtype not in ITEM_BYTES:
            raise InputError(f"{path}: {name} has the type {dtype}, which this version of nanoqwen does not know")
        if end - begin != prod(shape) * ITEM_BYTES[dtype]:
            raise InputError(
                f"{path}: {name}: {dtype} {list(shape)} needs {prod(shape) * ITEM_BYTES[dtype]:,} bytes, the header gives "
                f"it {end - begin:,}; the file is damaged, download it again"
            )
        tensors[name] = StoredTensor(path, dtype, shape, payload_start + begin, end - begin)
    expected = payload_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != expected:
            raise InputError(
                f"{path}: {name} starts at byte {tensor.offset:,}, the tensor before it ends at {expected:,}; the file is "
                "damaged, download it again"
            )
        expected = tensor.offset + tensor.nbytes
    return tensors


def _not_safetensors(path: Path, start: bytes, found: int, header_bytes: int) -> str:
    """One line for a file whose first bytes are not those of a safetensors file."""
    if found == 0:
        return f"{path}: the file is empty; the download is incomplete, download this file again"
    with open(path, "rb") as file:
        head = file.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        return f"{path}: this is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
    if start[:4] == b"GGUF":
        return f"{path}: this is a GGUF file; pack the original checkpoint in safetensors format"
    if 0 < header_bytes <= MAX_HEADER_BYTES and len(start) == 8 and header_bytes > found - 8:
        return (
            f"{path}: truncated: {found:,} bytes found, its header alone needs {header_bytes + 8:,}; the download is "
            "incomplete, download this file again"
        )
    return f"{path}: not a safetensors file ({found:,} bytes, no header at its start); download this file again"


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is what Git leaves in place of a large file that was not fetched."""
    return head.startswith(_LFS_POINTER)


# [to_float32]
def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw values as stored (uint16 bit patterns for BF16, float16 or float32 otherwise) -> float32 of the same shape.

    A bfloat16 is the upper half of a float32, so widening it is a shift: exact, and no float16 is ever in between.
    """
    if dtype == "BF16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return raw.astype(np.float32)
# [/to_float32]


class ShardReader:
    """Reads payload bytes of one file. Safe to share between threads; keeps its file open, so that a file which is replaced
    while it is being packed cannot mix old and new weights."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = open(path, "rb", buffering=0)

    def read(self, offset: int, count: int, dtype: str) -> np.ndarray:
        """``count`` values of a readable ``dtype`` from byte ``offset`` on, as stored. Raises InputError on a short read."""
        values = np.empty(count, READABLE[dtype])
        wanted, got = memoryview(values).cast("B"), 0
        try:
            with self._lock:  # one position per file; conversions, which cost far more, run in parallel
                self._file.seek(offset)
                while got < len(wanted) and (n := self._file.readinto(wanted[got:])):
                    got += n
        except OSError as e:
            raise InputError(f"{self._path}: cannot be read at byte {offset:,}: {e.strerror or os.strerror(e.errno)}") from None
        if got < len(wanted):
            raise InputError(f"{self._path}: ended at byte {offset + got:,} while it was being read; it was changed meanwhile")
        return values

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_tensor_rows(reader: ShardReader, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
    """Rows ``first`` to ``last`` of ``tensor`` as stored, [rows, ...]: rows are contiguous, so this is one read."""
    row_values = prod(tensor.shape[1:])
    at = tensor.offset + first * row_values * ITEM_BYTES[tensor.dtype]
    return reader.read(at, (last - first) * row_values, tensor.dtype).reshape(last - first, *tensor.shape[1:])
