"""The ``.nanoqwen`` file: a header of 256 bytes, a table, and payloads that can be memory-mapped.

This module knows bytes and no models; ``book/format_spec.md`` is its specification. Little-endian
throughout, CRC-32 (the one of zlib) throughout, every section and payload at a multiple of 128 bytes::

    0         header, 256 bytes: magic, version, layout id, dims, where everything is, its own checksum
    256       tensor table: one 128-byte entry a tensor
    ...       metadata: UTF-8 JSON (stop ids, chat template, generation defaults, provenance)
    ...       tokenizer: the checkpoint's tokenizer.json, byte for byte
    ...       payloads: FP16 rows; or INT4 words of all rows, then the scales of all rows

A reader trusts nothing: every field is checked against the others and against the length of the file
before a payload byte is touched, because a mapped read past the end of a file kills the process.
Damage inside a payload is found by ``verify`` (it reads the whole file, so opening does not).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError

FORMAT = load_settings().format
LAYOUT_ID = load_settings().quant.layout_id

# [header]
#: magic, version, layout id, header bytes, entry bytes | eight dims | theta, eps |
#: flags, group, tokenizer entries, tensor count | offset and length of table, metadata,
#: tokenizer, payloads; file length | CRC-32 of table, metadata, tokenizer.
#: Zeros follow up to byte 252, where the CRC-32 of bytes 0..251 stands.
HEADER = struct.Struct("<8s4I8I2d4I9Q3I")
HEADER_CRC = struct.Struct("<I")
HEADER_CRC_AT = FORMAT.header_bytes - HEADER_CRC.size
FLAG_TIED_HEAD = 1
# [/header]

# [entry]
#: name (NUL-padded), storage, source dtype, rows, cols | offset and length of the payload,
#: then of the scales (both 0 for FP16) | CRC-32 of the payload, of the scales
ENTRY = struct.Struct(f"<{FORMAT.name_bytes}s4I4Q2I")
# [/entry]

FP16, INT4 = FORMAT.storage_fp16, FORMAT.storage_int4
STORAGE_NAMES = {FP16: "FP16", INT4: "INT4"}
#: What the tensor was in the checkpoint; recorded so that ``inspect`` can tell.
SOURCE_DTYPES = {0: "unknown", 1: "BF16", 2: "F16", 3: "F32"}

Progress = Callable[[int, int, str], None]


def align(n: int) -> int:
    """``n`` rounded up to the file's alignment (128 bytes)."""
    return -(-n // FORMAT.align_bytes) * FORMAT.align_bytes


@dataclass(frozen=True)
class Header:
    """The fields of the header, offsets and lengths in bytes."""

    version: int
    layout_id: int
    dims: Dims
    group_size: int
    tokenizer_entries: int
    tensor_count: int
    table: tuple[int, int]
    meta: tuple[int, int]
    tokenizer: tuple[int, int]
    payload: tuple[int, int]
    file_bytes: int
    crcs: tuple[int, int, int]

    def encode(self) -> bytes:
        """The 256 bytes of the header, checksum included."""
        d = self.dims
        body = HEADER.pack(
            FORMAT.magic, self.version, self.layout_id, FORMAT.header_bytes, FORMAT.entry_bytes,
            d.num_layers, d.hidden, d.intermediate, d.num_heads, d.num_kv_heads, d.head_dim, d.vocab, d.max_position,
            d.rope_theta, d.rms_eps,
            FLAG_TIED_HEAD if d.tied else 0, self.group_size, self.tokenizer_entries, self.tensor_count,
            *self.table, *self.meta, *self.tokenizer, *self.payload, self.file_bytes,
            *self.crcs,
        )  # fmt: skip
        body = body.ljust(HEADER_CRC_AT, b"\0")
        return body + HEADER_CRC.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Header:
        """Parse and check 256 bytes. Raises InputError naming the field at fault."""
        check_magic(raw, path)
        if len(raw) < FORMAT.header_bytes:
            raise InputError(f"{path}: truncated: {len(raw)} bytes, the header alone has {FORMAT.header_bytes}; pack it again or download it again")
        f = HEADER.unpack_from(raw)
        version, layout_id, header_bytes, entry_bytes = f[1:5]
        # Version and layout come before the checksum: a newer format may keep its checksum elsewhere.
        if version != FORMAT.version:
            raise InputError(f"{path}: format version {version}, this nanoqwen reads version {FORMAT.version}; pack the checkpoint again with this release")
        if layout_id != LAYOUT_ID:
            raise InputError(
                f"{path}: weight layout id {layout_id}, this nanoqwen is compiled for layout id {LAYOUT_ID} (ValueShuffle); pack the checkpoint again"
            )
        if HEADER_CRC.unpack_from(raw, HEADER_CRC_AT)[0] != zlib.crc32(raw[:HEADER_CRC_AT]):
            raise InputError(f"{path}: the header's checksum does not match, the file is damaged; pack it again or download it again")
        flags = f[15]
        if (header_bytes, entry_bytes) != (FORMAT.header_bytes, FORMAT.entry_bytes) or flags & ~FLAG_TIED_HEAD or any(raw[HEADER.size : HEADER_CRC_AT]):
            raise InputError(f"{path}: the header has fields that version {FORMAT.version} does not define; pack the checkpoint again")
        dims = Dims(*f[5:13], rope_theta=f[13], rms_eps=f[14], tied=bool(flags & FLAG_TIED_HEAD))
        if problems := dims.problems():
            raise InputError(f"{path}: the header's dimensions are impossible: {problems[0]}")
        if f[16] not in load_settings().quant.allowed_groups:
            raise InputError(f"{path}: group size {f[16]} is not one of {load_settings().quant.allowed_groups}")
        spans = f[19:27]
        return cls(version, layout_id, dims, f[16], f[17], f[18], spans[0:2], spans[2:4], spans[4:6], spans[6:8], f[27], f[28:31])


@dataclass(frozen=True)
class Entry:
    """One row of the tensor table. ``rows`` is 1 for a vector; offsets and lengths are bytes from the start of the file."""

    name: str
    storage: int
    source_dtype: int
    rows: int
    cols: int
    offset: int
    nbytes: int
    scale_offset: int
    scale_nbytes: int
    crc: int
    scale_crc: int

    def encode(self) -> bytes:
        """The 128 bytes of the entry."""
        return ENTRY.pack(
            self.name.encode("utf-8"), self.storage, self.source_dtype, self.rows, self.cols,
            self.offset, self.nbytes, self.scale_offset, self.scale_nbytes, self.crc, self.scale_crc,
        )  # fmt: skip

    @property
    def spans(self) -> list[tuple[int, int, str]]:
        """(offset, bytes, label) of what the entry owns in the payload region."""
        owned = [(self.offset, self.nbytes, "packed codes" if self.storage == INT4 else "values")]
        return owned + ([(self.scale_offset, self.scale_nbytes, "scales")] if self.storage == INT4 else [])


def payload_bytes(storage: int, rows: int, cols: int, group: int) -> tuple[int, int]:
    """(bytes of codes or values, bytes of scales) of a rows x cols tensor."""
    if storage == FP16:
        return rows * cols * 2, 0
    return rows * cols // 2, rows * (cols // group) * 2


_LOOKS_LIKE = ((b"GGUF", "a GGUF file (llama.cpp)"), (b"PK\x03\x04", "a zip archive (a PyTorch .bin or .pt file, perhaps)"), (b"\x1f\x8b", "a gzip archive"))


def check_magic(raw: bytes, path: Path) -> None:
    """Raise InputError saying what the file seems to be unless it starts with the magic."""
    if raw[: len(FORMAT.magic)] == FORMAT.magic:
        return
    advice = "give a .nanoqwen file; `nanoqwen pack` makes one from a Hugging Face checkpoint directory"
    if not raw:
        raise InputError(f"{path}: the file is empty; {advice}")
    if FORMAT.magic.startswith(raw):
        raise InputError(f"{path}: truncated: {len(raw)} bytes, the header alone has {FORMAT.header_bytes}; pack it again or download it again")
    seems = next((what for magic, what in _LOOKS_LIKE if raw.startswith(magic)), None)
    if seems is None and len(raw) > 9 and raw[8:9] == b"{" and int.from_bytes(raw[:8], "little") < 1 << 32:
        seems = "a safetensors file"
    if seems is None and raw.lstrip()[:1] in (b"{", b"["):
        seems = "JSON text"
    raise InputError(f"{path}: not a .nanoqwen file" + (f", this looks like {seems}" if seems else "") + f"; {advice}")


class PackFile:
    """An open ``.nanoqwen`` file, memory-mapped read-only. Make one with ``open_pack``; it is a context manager.

    The mapping keeps the file's inode, so replacing the file under a running process changes nothing for it.
    """

    def __init__(self, path: Path, mapping: mmap.mmap | None, header: Header, tensors: dict[str, Entry], meta: dict, tokenizer_bytes: bytes) -> None:
        self.path = path
        self.header = header
        self.tensors = tensors
        self.meta = meta
        self.tokenizer_bytes = tokenizer_bytes
        self._map = mapping

    @property
    def dims(self) -> Dims:
        """Dimensions from the header."""
        return self.header.dims

    @property
    def group_size(self) -> int:
        """Weights a scale, along the input dimension."""
        return self.header.group_size

    def _entry(self, name: str, storage: int) -> Entry:
        entry = self.tensors.get(name)
        if entry is None:
            raise InputError(f"{self.path}: no tensor {name}; the file holds {len(self.tensors)} tensors")
        if entry.storage != storage:
            raise InputError(f"{self.path}: {name} is stored as {STORAGE_NAMES[entry.storage]}, not as {STORAGE_NAMES[storage]}")
        return entry

    def _view(self, offset: int, nbytes: int, dtype: str) -> np.ndarray:
        return np.frombuffer(self._map, dtype=dtype, count=nbytes // np.dtype(dtype).itemsize, offset=offset)

    def int4(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(words uint32 [rows, cols // 8], scales float16 [rows, cols // group]): read-only views into the mapping.

        Raises InputError when there is no such tensor or it is not INT4.
        """
        e = self._entry(name, INT4)
        words = self._view(e.offset, e.nbytes, "<u4").reshape(e.rows, e.cols // 8)
        scales = self._view(e.scale_offset, e.scale_nbytes, "<f2").reshape(e.rows, e.cols // self.group_size)
        return words, scales

    def fp16(self, name: str) -> np.ndarray:
        """float16 view [rows, cols], or [cols] for a vector. Raises InputError like ``int4``."""
        e = self._entry(name, FP16)
        flat = self._view(e.offset, e.nbytes, "<f2")
        return flat if e.rows == 1 else flat.reshape(e.rows, e.cols)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read every payload and compare checksums. Returns the damaged sections, as ``tensor name: part``; empty is good."""
        spans = [(e.name, *span, crc) for e in self.tensors.values() for span, crc in zip(e.spans, (e.crc, e.scale_crc))]
        total, done, damaged = sum(s[2] for s in spans), 0, []
        view = memoryview(self._map) if self._map is not None else memoryview(b"")
        for name, offset, nbytes, label, want in spans:
            crc = 0
            for chunk in _chunks(offset, nbytes):
                crc = zlib.crc32(view[chunk], crc)
                done += chunk.stop - chunk.start
                if progress:
                    progress(done, total, name)
            if crc != want:
                damaged.append(f"{name}: {label}")
        view.release()
        return damaged

    def close(self) -> None:
        """Drop the mapping. Views handed out keep it alive until they are gone."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # a view is still in use: the mapping goes with the last one
                pass
            self._map = None

    def __enter__(self) -> PackFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _chunks(offset: int, nbytes: int, size: int = 1 << 24) -> Iterator[slice]:
    for start in range(offset, offset + nbytes, size):
        yield slice(start, min(start + size, offset + nbytes))


# [open_pack]
def open_pack(path: str | os.PathLike) -> PackFile:
    """Open and check a ``.nanoqwen`` file; its payloads are mapped, not read.

    Raises InputError, in one line, for a missing file, another format, another version or layout id, a
    truncated file, and any header, table, metadata or tokenizer damage.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: a folder, not a .nanoqwen file; `nanoqwen pack {path} -o OUT.nanoqwen` packs a checkpoint folder")
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}") from None
    with file:
        header = Header.decode(file.read(FORMAT.header_bytes), path)
        found = os.fstat(file.fileno()).st_size
        if found != header.file_bytes:
            word = "truncated" if found < header.file_bytes else "too long"
            raise InputError(f"{path}: {word}: {found:,} bytes, the header says {header.file_bytes:,}; pack it again or download it again")
        _check_sections(header, path)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table, meta, tokenizer = (bytes(mapping[o : o + n]) for o, n in (header.table, header.meta, header.tokenizer))
    for label, raw, want in zip(("tensor table", "metadata", "tokenizer"), (table, meta, tokenizer), header.crcs):
        if zlib.crc32(raw) != want:
            raise InputError(f"{path}: the checksum of its {label} does not match, the file is damaged; pack it again or download it again")
    tensors = _check_table(table, header, path)
    try:
        parsed = json.loads(meta.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        raise InputError(f"{path}: its metadata is not JSON in UTF-8; pack the checkpoint again") from None
    if not isinstance(parsed, dict):
        raise InputError(f"{path}: its metadata is not a JSON object; pack the checkpoint again")
    return PackFile(path, mapping, header, tensors, parsed, tokenizer)
# [/open_pack]


def _check_sections(h: Header, path: Path) -> None:
    """Sections are aligned, inside the file, in order and apart. Raises InputError."""
    if h.table[1] != h.tensor_count * FORMAT.entry_bytes:
        raise InputError(f"{path}: {h.tensor_count} tensors need a table of {h.tensor_count * FORMAT.entry_bytes} bytes, the header says {h.table[1]}")
    end = FORMAT.header_bytes
    for label, (offset, nbytes) in (("tensor table", h.table), ("metadata", h.meta), ("tokenizer", h.tokenizer), ("payload region", h.payload)):
        if offset % FORMAT.align_bytes or offset < end or offset + nbytes > h.file_bytes:
            raise InputError(f"{path}: the {label} at byte {offset} with {nbytes} bytes is misaligned, overlaps another section or leaves the file")
        end = offset + nbytes


def _check_table(raw: bytes, h: Header, path: Path) -> dict[str, Entry]:
    """Every entry is well-formed and owns bytes of its own inside the payload region. Raises InputError."""
    tensors: dict[str, Entry] = {}
    for i in range(h.tensor_count):
        fields = ENTRY.unpack_from(raw, i * FORMAT.entry_bytes)
        try:
            name = fields[0].rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{path}: the name of tensor {i} is not UTF-8") from None
        e = Entry(name, *fields[1:])
        where = f"{path}: tensor {name or i}"
        if not name or "\0" in name or name in tensors:
            raise InputError(f"{where}: its name is empty, malformed or given twice")
        if e.storage not in STORAGE_NAMES or e.source_dtype not in SOURCE_DTYPES:
            raise InputError(f"{where}: unknown storage tag {e.storage} or source dtype {e.source_dtype}")
        if e.rows < 1 or e.cols < 1 or (e.storage == INT4 and e.cols % h.group_size):
            raise InputError(f"{where}: impossible shape {e.rows} x {e.cols} for {STORAGE_NAMES[e.storage]} with group {h.group_size}")
        if (e.nbytes, e.scale_nbytes) != payload_bytes(e.storage, e.rows, e.cols, h.group_size):
            raise InputError(f"{where}: {e.nbytes} + {e.scale_nbytes} bytes do not fit its shape {e.rows} x {e.cols}")
        if e.storage == FP16 and e.scale_offset:
            raise InputError(f"{where}: an FP16 tensor has no scales, but the table gives them an offset")
        tensors[name] = e
    first, last = h.payload[0], h.payload[0] + h.payload[1]
    owned = sorted((offset, offset + nbytes, e.name) for e in tensors.values() for offset, nbytes, _ in e.spans)
    for (start, end, name), following in zip(owned, [*owned[1:], (last, last, "the end of the file")]):
        if start % FORMAT.align_bytes or start < first or end > last:
            raise InputError(f"{path}: tensor {name}: its bytes {start} to {end} are misaligned or outside the payload region {first} to {last}")
        if end > following[0]:
            raise InputError(f"{path}: tensor {name}: its bytes {start} to {end} overlap those of {following[2]}")
    return tensors
