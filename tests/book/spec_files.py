"""Small `.nanoqwen` files for the tests of the format: the one that the specification prints, tiny models, and resealed lies."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import tiny

from nanoqwen import int4
from nanoqwen.config import Dims
from nanoqwen.model import TensorSpec, pick_group, schema
from nanoqwen.packwriter import PackWriter


def example_file(path: Path) -> Path:
    """The file of the page's section "A whole file"."""
    dims = Dims(1, 32, 32, 1, 1, 32, 16, 64, rope_theta=1e6, rms_eps=1e-6)
    w = np.zeros((2, 32), np.float32)
    w[0, :8] = [0.7, -0.35, 0.12, -0.05, 0.0, 0.21, -0.7, 0.49]
    w[1, 31] = -0.3
    specs = [TensorSpec("v", (4,), False), TensorSpec("w", (2, 32), True)]
    with PackWriter(path, dims, 32, specs, {"example": "format_spec"}, b"{}", {"v": "F16", "w": "F32"}) as out:
        out.write_fp16("v", np.array([1, -2, 0.5, 65504], np.float32))
        out.write_int4("w", *int4.quantize_pack(w, 32))
    return path


def pack_tiny(path: Path, sizes: tiny.Sizes, group: int | None = None) -> Path:
    dims = Dims(sizes.layers, sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.vocab, sizes.context, tied=sizes.tied)
    group = pick_group(dims, group)
    tensors = tiny.weights(sizes)
    meta = {"tokenizer_entries": tiny.TOKENIZER_ENTRIES, "chat_template": "für {{ messages }}", "stop_ids": [{"id": 260}]}
    with PackWriter(path, dims, group, schema(dims), meta, b'{"model": "\xc3\xa9"}', {name: "BF16" for name in tensors}) as out:
        for spec in schema(dims):
            values = tiny.stored_values(tensors[spec.name])
            if spec.int4:
                out.write_int4(spec.name, *int4.quantize_pack(values, group))
            else:
                out.write_fp16(spec.name, values)
    return path


def reseal(raw: bytearray) -> bytes:
    """Recompute every checksum but those of payloads: the file is undamaged, what it says is wrong."""
    for k in range(3):
        start, size = struct.unpack_from("<2Q", raw, 88 + 16 * k)
        struct.pack_into("<I", raw, 160 + 4 * k, zlib.crc32(raw[start : start + size]))
    struct.pack_into("<I", raw, 252, zlib.crc32(raw[:252]))
    return bytes(raw)
