"""A ``.nanoqwen`` file out, as a Hugging Face folder that other engines load: the same quantised weights in another order of bits.

    export("qwen7b.nanoqwen", "qwen7b-int4")  ->  a folder in the ``pack-quantized`` form of compressed-tensors

Nothing is quantised again. Codes and scales are copied bit for bit, FP16 tensors byte for byte, ``tokenizer.json`` byte for
byte; config, generation defaults and chat template are written from what the pack file remembers of its checkpoint.

    words        ValueShuffle words -> the words of pack-quantized            shards   safetensors files, streamed
    hf_files     dims and metadata -> config.json and its companions          folder   a folder that appears whole or not at all

Memory is a few blocks of rows, whatever the model's size; a GPU is not needed.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanoqwen.errors import InputError
from nanoqwen.export.folder import NewFolder
from nanoqwen.export.hf_files import hf_files
from nanoqwen.export.shards import Piece, Shard, index_json, plan_shards, write_shard
from nanoqwen.export.words import plain_order
from nanoqwen.model import TensorSpec, schema
from nanoqwen.packfile import INT4, PackFile, open_pack

Progress = Callable[[int, int, str], None]

#: The forms that ``export`` can write.
FORMATS = ("compressed-tensors",)

#: Bytes of weights after which the next file begins; a single larger tensor gets a file of its own.
SHARD_BYTES = 2_000_000_000

#: Bytes read, converted and written at a time.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ExportReport:
    """What ``export`` did: the folder, its files in order of name, their bytes, seconds, group size, and the notes."""

    path: Path
    files: list[str]
    bytes: int
    seconds: float
    group: int
    notes: list[str]


# [export]
def export(
    source: str | os.PathLike | PackFile, out: str | os.PathLike, *, progress: Progress | None = None, shard_bytes: int = SHARD_BYTES
) -> ExportReport:
    """Write the pack file ``source`` as the folder ``out``, in the ``pack-quantized`` form of compressed-tensors.

    ``out`` must not exist, or be an empty folder. It appears at the very end, so a failure or a kill leaves none. The checksum of
    every tensor is compared while it is read. ``progress`` is called as (bytes written, bytes in all, tensor name).

    Raises InputError, one line, for a damaged or incomplete file, a folder that cannot be written, and a full disk.
    """
    if not isinstance(source, PackFile):
        with open_pack(source) as opened:
            return export(opened, out, progress=progress, shard_bytes=shard_bytes)
    from nanoqwen.weights import check_tensors  # here, not above: it brings PyTorch

    started = time.perf_counter()
    notes: list[str] = []
    check_tensors(source)
    files = hf_files(source, notes)
    shards = plan_shards(pieces_of(source), shard_bytes)
    if len(shards) > 1:
        files["model.safetensors.index.json"] = index_json(shards)
    total = sum(shard.file_bytes for shard in shards)
    done = 0

    def count(written: int, name: str) -> None:
        nonlocal done
        done += written
        if progress:
            progress(done, total, name)

    with NewFolder(Path(out).expanduser(), total + sum(map(len, files.values()))) as folder:
        for name, content in files.items():
            folder.write(name, lambda file, content=content: file.write(content))
        for shard in shards:
            folder.write(shard.name, lambda file, shard=shard: write_shard(file, shard, count))
    names = sorted([*files, *(shard.name for shard in shards)])
    return ExportReport(folder.path, names, folder.bytes, time.perf_counter() - started, source.group_size, notes)
# [/export]


# [pieces]
def pieces_of(pack: PackFile) -> list[Piece]:
    """Every tensor of the exported checkpoint, in the order of the schema.

    A projection ``X.weight`` becomes three: ``X.weight_packed`` int32 [rows, cols / 8], ``X.weight_scale`` float16
    [rows, cols / group] and ``X.weight_shape`` int64 [2]. Everything else keeps its name, shape and FP16 values.
    """
    pieces: list[Piece] = []
    for spec in schema(pack.dims):
        if not spec.int4:
            pieces.append(Piece(spec.name, "F16", spec.shape, lambda spec=spec: _checked(pack, spec, 0)))
            continue
        shape = np.array([spec.rows, spec.cols], "<i8")
        pieces += [
            Piece(f"{spec.name}_packed", "I32", (spec.rows, spec.cols // 8), lambda spec=spec: map(plain_order, _checked(pack, spec, 0))),
            Piece(f"{spec.name}_scale", "F16", (spec.rows, spec.cols // pack.group_size), lambda spec=spec: _checked(pack, spec, 1)),
            Piece(f"{spec.name}_shape", "I64", (2,), lambda shape=shape: iter([shape])),
        ]
    return pieces
# [/pieces]


def _checked(pack: PackFile, spec: TensorSpec, part: int) -> Iterator[np.ndarray]:
    """Blocks of rows of a tensor's values or words (part 0) or scales (part 1); InputError at the end if the checksum differs."""
    entry = pack.tensors[spec.name]
    values = pack.int4(spec.name)[part] if entry.storage == INT4 else pack.fp16(spec.name)
    rows = max(1, BLOCK_BYTES // max(1, values.nbytes // len(values)))
    crc = 0
    for first in range(0, len(values), rows):
        block = values[first : first + rows]
        crc = zlib.crc32(block, crc)
        yield block
    if crc != (entry.crc, entry.scale_crc)[part]:
        label = entry.spans[part][2]
        raise InputError(f"{pack.path}: {spec.name}: the checksum of its {label} does not match, the file is damaged; pack it again or download it again")
