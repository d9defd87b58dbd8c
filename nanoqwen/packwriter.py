"""Writes ``.nanoqwen`` files: all or nothing, and the same bytes for the same input.

Every offset follows from the shapes, so the whole map is known before the first byte. Payloads stream into
a temporary file beside the target; the header and the table, which hold the checksums, are written last;
then fsync and rename. A crash, a full disk or Ctrl-C leaves the old target or none, never half a file.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.model import TensorSpec
from nanoqwen.packfile import FORMAT, FP16, INT4, LAYOUT_ID, SOURCE_DTYPES, Entry, Header, align, payload_bytes


# [plan]
def plan(
    dims: Dims, group: int, specs: Sequence[TensorSpec], meta: Mapping, tokenizer: bytes, source_dtypes: Mapping[str, str]
) -> tuple[Header, list[Entry], bytes]:
    """Where everything goes: (header without checksums, entries in ``specs`` order, metadata bytes).

    Neighbouring INT4 tensors with the same input dimension (q, k, v; gate, up) lie as one run: the words of
    all of them, then the scales of all of them. A kernel that fuses them reads one contiguous stream.
    """
    codes = {name: code for code, name in SOURCE_DTYPES.items()}
    meta_bytes = json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")
    table = (FORMAT.header_bytes, len(specs) * FORMAT.entry_bytes)
    meta_at = align(sum(table))
    tokenizer_at = align(meta_at + len(meta_bytes))
    first = position = align(tokenizer_at + len(tokenizer))

    entries: list[Entry] = []
    for run in _runs(specs):
        storage = INT4 if run[0].int4 else FP16
        sizes = [payload_bytes(storage, s.rows, s.cols, group) for s in run]
        offsets, scale_offsets = [], []
        for nbytes, _ in sizes:
            offsets.append(position)
            position = align(position + nbytes)
        for _, scale_nbytes in sizes:
            scale_offsets.append(position if storage == INT4 else 0)
            position = align(position + scale_nbytes)
        for spec, (nbytes, scale_nbytes), offset, scale_offset in zip(run, sizes, offsets, scale_offsets):
            if len(spec.name.encode("utf-8")) > FORMAT.name_bytes:
                raise InputError(f"tensor name {spec.name} is longer than {FORMAT.name_bytes} bytes")
            dtype = codes[source_dtypes.get(spec.name, "unknown")]
            entries.append(Entry(spec.name, storage, dtype, spec.rows, spec.cols, offset, nbytes, scale_offset, scale_nbytes, 0, 0))

    header = Header(
        FORMAT.version, LAYOUT_ID, dims, group, int(meta.get("tokenizer_entries", 0)), len(entries),
        table, (meta_at, len(meta_bytes)), (tokenizer_at, len(tokenizer)), (first, position - first), position, (0, 0, 0),
    )  # fmt: skip
    return header, entries, meta_bytes
# [/plan]


def _runs(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    runs: list[list[TensorSpec]] = []
    for spec in specs:
        joins = bool(runs) and spec.int4 and runs[-1][-1].int4 and runs[-1][-1].cols == spec.cols
        runs[-1].append(spec) if joins else runs.append([spec])
    return runs


class PackWriter:
    """Context manager that writes one ``.nanoqwen`` file.

    Write every tensor once, whole or in blocks of consecutive rows::

        with PackWriter(path, dims, group, schema(dims), meta, tokenizer_bytes, source_dtypes) as out:
            out.write_fp16("model.norm.weight", values)               # float16 [n] or [rows, cols]
            out.write_int4("model.layers.0...", words, scales)        # uint32, float16; a block of rows or all

    Raises InputError for a target that cannot be written, for too little disk space (before the first byte),
    for a value that FP16 cannot hold, and for tensors that are missing at the end.
    """

    def __init__(
        self, path: str | os.PathLike, dims: Dims, group: int, specs: Sequence[TensorSpec], meta: Mapping, tokenizer: bytes, source_dtypes: Mapping[str, str]
    ) -> None:
        self.header, entries, self._meta = plan(dims, group, specs, meta, tokenizer, source_dtypes)
        self.path = Path(path)
        self._target = Path(os.path.realpath(path))  # a symlink keeps pointing at what it pointed at
        self._tokenizer = tokenizer
        self._entries = {e.name: e for e in entries}
        self._rows_done = dict.fromkeys(self._entries, 0)
        self._file = None
        self._temporary = self._target.with_name(f".{self._target.name}.{secrets.token_hex(6)}.tmp")

    def __enter__(self) -> PackWriter:
        check_target(self.path)
        parent = self._target.parent
        remove_stale_temporaries(self._target)
        free = shutil.disk_usage(parent).free
        if free < self.header.file_bytes:
            raise InputError(f"{self.path}: no space: the file needs {self.header.file_bytes:,} bytes, {free:,} are free in {parent}")
        try:
            self._file = open(self._temporary, "xb")
        except OSError as e:
            raise InputError(f"{self.path}: cannot write in {parent}: {e.strerror}") from None
        _lock(self._file)
        return self

    def write_fp16(self, name: str, values: np.ndarray) -> None:
        """Append a block of rows ([cols] for a vector) in any float dtype. Refuses what FP16 cannot hold, by index."""
        e = self._entry(name, FP16)
        block = values.reshape(-1, e.cols)
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(block, dtype="<f2")
        if not np.isfinite(half).all():
            r, c = (int(v) for v in np.argwhere(~np.isfinite(half))[0])
            at = f"[{c}]" if e.rows == 1 else f"[{r + self._rows_done[name]}, {c}]"
            raise InputError(f"{name}: value at {at} is {float(block[r, c]):.6g}, which FP16 (largest 65504) cannot hold; this tensor is stored as FP16")
        self._write(e, half, None)

    def write_int4(self, name: str, words: np.ndarray, scales: np.ndarray) -> None:
        """Append a block of rows: words uint32 [rows, cols // 8] and scales float16 [rows, cols // group]."""
        e = self._entry(name, INT4)
        if words.shape != (len(words), e.cols // 8) or scales.shape != (len(words), e.cols // self.header.group_size):
            raise InputError(f"{name}: words {words.shape} and scales {scales.shape} do not fit rows of {e.cols} weights")
        self._write(e, np.ascontiguousarray(words, dtype="<u4"), np.ascontiguousarray(scales, dtype="<f2"))

    def _entry(self, name: str, storage: int) -> Entry:
        e = self._entries.get(name)
        if e is None or e.storage != storage:
            raise InputError(f"{name}: not a tensor of this file in that storage")
        return e

    def _write(self, e: Entry, block: np.ndarray, scales: np.ndarray | None) -> None:
        done = self._rows_done[e.name]
        if done + len(block) > e.rows:
            raise InputError(f"{e.name}: {done + len(block)} rows written, its shape has {e.rows}")
        crc, scale_crc = zlib.crc32(block, e.crc), e.scale_crc
        self._put(e.offset + done * e.nbytes // e.rows, block)
        if scales is not None:
            scale_crc = zlib.crc32(scales, e.scale_crc)
            self._put(e.scale_offset + done * e.scale_nbytes // e.rows, scales)
        self._entries[e.name] = replace(e, crc=crc, scale_crc=scale_crc)
        self._rows_done[e.name] = done + len(block)

    def _put(self, offset: int, data: bytes | np.ndarray) -> None:
        try:
            self._file.seek(offset)
            self._file.write(data)
        except OSError as e:
            raise self._disk_error(e) from None

    def _disk_error(self, e: OSError) -> InputError:
        if e.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            free = shutil.disk_usage(self._target.parent).free
            return InputError(f"{self.path}: no space left while writing: the file needs {self.header.file_bytes:,} bytes, {free:,} are free")
        return InputError(f"{self.path}: cannot be written: {e.strerror}")

    def _finish(self) -> None:
        missing = [n for n, done in self._rows_done.items() if done != self._entries[n].rows]
        if missing:
            raise InputError(f"{self.path}: {len(missing)} tensors were not written in full, the first is {missing[0]}")
        table = b"".join(e.encode() for e in self._entries.values())
        crcs = tuple(zlib.crc32(part) for part in (table, self._meta, self._tokenizer))
        header = replace(self.header, crcs=crcs)
        for (offset, _), part in zip((header.table, header.meta, header.tokenizer), (table, self._meta, self._tokenizer)):
            self._put(offset, part)
        self._put(0, header.encode())
        try:
            self._file.truncate(header.file_bytes)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._target)
            _fsync_folder(self._target.parent)
        except OSError as e:
            raise self._disk_error(e) from None
        self.header = header

    def __exit__(self, kind: type | None, *exc: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            try:
                self._file.close()
            except OSError:  # the disk is full and the buffer cannot be flushed: the file goes anyway
                pass
            self._temporary.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """Refuse, before anything is read or downloaded, an output that can be seen to fail. Raises InputError."""
    if path.is_dir():
        raise InputError(f"{path}: a folder; give a file name for the output, for example {path / 'model.nanoqwen'}")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: exists and is not a regular file; give a file name for the output")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the folder {folder} cannot be written to; choose another place for the output")


def remove_stale_temporaries(target: Path) -> None:
    """Delete temporaries of ``target`` that a killed writer left behind. A live writer holds a lock on its own."""
    for old in target.parent.glob(f".{_glob_escape(target.name)}.*.tmp"):
        try:
            with open(old, "rb") as file:
                if _lock(file):
                    old.unlink(missing_ok=True)
        except OSError:
            continue


def _glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _lock(file: object) -> bool:
    """Take an exclusive lock without waiting; False when another process holds it or locks are not supported."""
    try:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (ImportError, OSError):
        return False


def _fsync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the platform lets a folder be synced."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
