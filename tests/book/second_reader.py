"""A second reader of `.nanoqwen` files, written from `book/format_spec.md` and nothing else.

It shares no line and no constant with the package: only `struct`, `zlib`, `json` and numpy.  If it decodes what the package
packs, the page says enough.  It is also the shortest answer to "how do I read this file in my own program?".
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np

MAGIC = b"NANOQWEN"
DIMS = ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab", "max_position")
SECTIONS = ("table", "meta", "tokenizer", "payload")
FP16, INT4 = 1, 2
LOWEST_BIT = (0, 16, 4, 20, 8, 24, 12, 28)


class Refused(Exception):
    """`step` is the number of the check that failed, as the page counts them."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"check {step}: {why}")
        self.step = step


def need(condition: bool, step: int, why: str) -> None:
    if not condition:
        raise Refused(step, why)


class File:
    """`header` and `meta` as dicts, `tensors` as a dict of entries, `tokenizer` as bytes; `weight(name)` as float32."""

    def __init__(self, path: str | Path) -> None:
        self.raw = raw = Path(path).read_bytes()
        self.header = header = read_header(raw)
        check_sections(header)
        parts = {}
        for name, crc in (("table", "table_crc"), ("meta", "meta_crc"), ("tokenizer", "tokenizer_crc")):
            start, size = header[f"{name}_offset"], header[f"{name}_bytes"]
            parts[name] = raw[start : start + size]
            need(zlib.crc32(parts[name]) == header[crc], 8, f"checksum of the {name}")
        self.tensors = read_table(parts["table"], header)
        try:
            self.meta = json.loads(parts["meta"].decode("utf-8"))
        except (ValueError, RecursionError):
            raise Refused(10, "the metadata is not JSON") from None
        need(isinstance(self.meta, dict), 10, "the metadata is not an object")
        self.tokenizer = parts["tokenizer"]

    def weight(self, name: str) -> np.ndarray:
        """float32 [rows, cols], whatever the storage."""
        t, group = self.tensors[name], self.header["group_size"]
        rows, cols = t["rows"], t["cols"]
        if t["storage"] == FP16:
            return np.frombuffer(self.raw, "<f2", rows * cols, t["offset"]).astype(np.float32).reshape(rows, cols)
        words = np.frombuffer(self.raw, "<u4", rows * cols // 8, t["offset"])
        scales = np.frombuffer(self.raw, "<f2", rows * cols // group, t["scale_offset"])
        nibbles = np.stack([(words >> np.uint32(bit)) & np.uint32(15) for bit in LOWEST_BIT], axis=1).astype(np.int32)
        codes = np.where(nibbles >= 8, nibbles - 16, nibbles).astype(np.float32).reshape(-1, group)
        return (codes * scales.astype(np.float32)[:, None]).reshape(rows, cols)

    def damaged(self) -> list[str]:
        """Names of tensors whose payload does not match its checksum."""
        bad = []
        for name, t in self.tensors.items():
            values = self.raw[t["offset"] : t["offset"] + t["nbytes"]]
            scales = self.raw[t["scale_offset"] : t["scale_offset"] + t["scale_nbytes"]]
            if zlib.crc32(values) != t["crc"] or (t["storage"] == INT4 and zlib.crc32(scales) != t["scale_crc"]):
                bad.append(name)
        return bad


def read_header(raw: bytes) -> dict:
    need(raw[:8] == MAGIC, 1, "not a .nanoqwen file")
    need(len(raw) >= 256, 1, "truncated")
    h: dict = {}
    h["version"], h["layout_id"], h["header_bytes"], h["entry_bytes"] = struct.unpack_from("<4I", raw, 8)
    h.update(zip(DIMS, struct.unpack_from("<8I", raw, 24)))
    h["rope_theta"], h["rms_eps"] = struct.unpack_from("<2d", raw, 56)
    h["flags"], h["group_size"], h["tokenizer_entries"], h["tensor_count"] = struct.unpack_from("<4I", raw, 72)
    for k, name in enumerate(SECTIONS):
        h[f"{name}_offset"], h[f"{name}_bytes"] = struct.unpack_from("<2Q", raw, 88 + 16 * k)
    (h["file_bytes"],) = struct.unpack_from("<Q", raw, 152)
    h["table_crc"], h["meta_crc"], h["tokenizer_crc"] = struct.unpack_from("<3I", raw, 160)
    (h["header_crc"],) = struct.unpack_from("<I", raw, 252)

    need(h["version"] == 1 and h["layout_id"] == 1, 2, "version or layout id")
    need(h["header_crc"] == zlib.crc32(raw[:252]), 3, "checksum of the header")
    need((h["header_bytes"], h["entry_bytes"]) == (256, 128), 4, "sizes of header and entry")
    need(h["flags"] in (0, 1) and not any(raw[172:252]), 4, "flags or reserved bytes")
    need(min(h[name] for name in DIMS) >= 1, 5, "a dimension is 0")
    need(h["num_heads"] % h["num_kv_heads"] == 0 and h["head_dim"] % 2 == 0, 5, "heads")
    need(0 < h["rope_theta"] < math.inf and 0 <= h["rms_eps"] < 1, 5, "rope_theta or rms_eps")
    need(h["group_size"] in (128, 64, 32), 5, "group size")
    need(h["file_bytes"] == len(raw), 6, "size of the file")
    return h


def check_sections(h: dict) -> None:
    need(h["table_bytes"] == 128 * h["tensor_count"], 7, "size of the table")
    end = 256
    for name in SECTIONS:
        start, size = h[f"{name}_offset"], h[f"{name}_bytes"]
        need(start % 128 == 0 and start >= end and start + size <= h["file_bytes"], 7, f"place of the {name}")
        end = start + size


def read_table(raw: bytes, h: dict) -> dict[str, dict]:
    tensors: dict[str, dict] = {}
    spans = []
    for at in range(0, len(raw), 128):
        name_bytes, storage, source_dtype, rows, cols = struct.unpack_from("<72s4I", raw, at)
        offset, nbytes, scale_offset, scale_nbytes, crc, scale_crc = struct.unpack_from("<4Q2I", raw, at + 88)
        try:
            name = name_bytes.rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(9, "a name is not UTF-8") from None
        need(name != "" and "\0" not in name and name not in tensors, 9, "a name")
        need(storage in (FP16, INT4) and source_dtype in range(4), 9, f"{name}: tag")
        need(rows >= 1 and cols >= 1 and not (storage == INT4 and cols % h["group_size"]), 9, f"{name}: shape")
        if storage == FP16:
            sizes = (rows * cols * 2, 0)
            need(scale_offset == 0, 9, f"{name}: scales of an FP16 tensor")
        else:
            sizes = (rows * cols // 2, rows * (cols // h["group_size"]) * 2)
            spans.append((scale_offset, scale_nbytes))
        need((nbytes, scale_nbytes) == sizes, 9, f"{name}: sizes")
        spans.append((offset, nbytes))
        tensors[name] = dict(storage=storage, source_dtype=source_dtype, rows=rows, cols=cols, offset=offset, nbytes=nbytes,
                             scale_offset=scale_offset, scale_nbytes=scale_nbytes, crc=crc, scale_crc=scale_crc)
    end = h["payload_offset"]
    for start, size in sorted(spans):
        need(start % 128 == 0 and start >= end, 9, "payloads misaligned, overlapping or outside")
        end = start + size
    need(end <= h["payload_offset"] + h["payload_bytes"], 9, "payloads leave their region")
    return tensors
