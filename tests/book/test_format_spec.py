"""`book/format_spec.md` against the code: its tables, its worked examples, its hex dump."""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import second_reader
import tiny
from spec_files import example_file

from nanoqwen import int4, packfile
from nanoqwen.config import Dims, load_settings, repo_root
from nanoqwen.model import TensorSpec, schema
from nanoqwen.pack import pack
from nanoqwen.packfile import ENTRY, HEADER, HEADER_CRC_AT, Header
from nanoqwen.packwriter import plan

FORMAT = load_settings().format
CODES = {"u32": "I", "u64": "Q", "f64": "d"}


@pytest.fixture(scope="module")
def page() -> str:
    return (repo_root() / "book" / "format_spec.md").read_text(encoding="utf-8")


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table under `heading`, header row included, backticks removed."""
    section = page.split(f"\n{heading}\n", 1)[1]
    lines = iter(section.splitlines())
    table = [next(line for line in lines if line.startswith("|"))]
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line)
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for k, line in enumerate(table) if k != 1]


def layout(rows: list[list[str]], size: int) -> tuple[str, list[str]]:
    """(struct format, field names) of a table of fields; checks that they lie end to end and fill `size` bytes."""
    form, names, at = "<", [], 0
    for offset, width, kind, name, *_ in rows[1:]:
        code = f"{width}s" if kind == "bytes" else CODES[kind]
        assert int(offset) == at and struct.calcsize("<" + code) == int(width), f"{name}: offset {offset}, expected {at}"
        form, at = form + code, at + int(width)
        names.append(name)
    assert at == size
    return form, names


def expanded(form: str) -> str:
    """'<2I8s' -> '<II8s'"""
    return re.sub(r"(\d+)([IQd])", lambda m: m.group(2) * int(m.group(1)), form)


# ------------------------------------------------------------------------------------------------------------- tables


def test_header_table(page):
    form, names = layout(rows_of(page, "## The header: 256 bytes"), FORMAT.header_bytes)
    assert form == expanded(HEADER.format) + f"{HEADER_CRC_AT - HEADER.size}s" + "I"
    assert names[5:15] == list(Dims.__dataclass_fields__)[:10]

    # Every field gets a value of its own, so two swapped names show.
    dims = Dims(28, 3584, 18944, 30, 5, 128, 152064, 32768, rope_theta=5e5, rms_eps=1e-5, tied=True)
    header = Header(FORMAT.version, packfile.LAYOUT_ID, dims, 64, 151665, 339, (1, 2), (3, 4), (5, 6), (7, 8), 9, (10, 11, 12))
    raw = header.encode()
    found = dict(zip(names, struct.unpack(form, raw)))
    assert found == {
        "magic": b"NANOQWEN", "version": 1, "layout_id": 1, "header_bytes": 256, "entry_bytes": 128,
        **{name: getattr(dims, name) for name in names[5:15]},
        "flags": 1, "group_size": 64, "tokenizer_entries": 151665, "tensor_count": 339,
        "table_offset": 1, "table_bytes": 2, "meta_offset": 3, "meta_bytes": 4, "tokenizer_offset": 5, "tokenizer_bytes": 6,
        "payload_offset": 7, "payload_bytes": 8, "file_bytes": 9, "table_crc": 10, "meta_crc": 11, "tokenizer_crc": 12,
        "reserved": bytes(80), "header_crc": zlib.crc32(raw[:252]),
    }  # fmt: skip


def test_required_values_of_the_header(page):
    must = {row[3]: row[5] for row in rows_of(page, "## The header: 256 bytes")[1:]}
    settings = load_settings()
    assert must["version"] == str(FORMAT.version)
    assert must["layout_id"] == str(settings.quant.layout_id)
    assert must["header_bytes"] == str(FORMAT.header_bytes)
    assert must["entry_bytes"] == str(FORMAT.entry_bytes)
    assert [int(n) for n in re.findall(r"\d+", must["group_size"])] == list(settings.quant.allowed_groups)


def test_entry_table(page):
    form, names = layout(rows_of(page, "## An entry of the tensor table: 128 bytes"), FORMAT.entry_bytes)
    assert form == expanded(ENTRY.format)
    assert names == list(packfile.Entry.__dataclass_fields__)


def test_tags(page):
    assert {int(r[0]): r[1] for r in rows_of(page, "### Storage tags")[1:]} == packfile.STORAGE_NAMES
    assert {int(r[0]): r[1] for r in rows_of(page, "### Source dtypes")[1:]} == packfile.SOURCE_DTYPES


def test_value_shuffle_table(page):
    weight, bit = rows_of(page, "## Payloads")
    assert [int(n) for n in weight[1:]] == list(range(8))
    assert tuple(int(n) for n in bit[1:]) == load_settings().quant.shuffle_bits == int4.SHIFTS == second_reader.LOWEST_BIT


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_list(page, tied):
    dims = Dims(3, 96, 160, 6, 2, 32, 500, 64, tied=tied)
    size = {"1": 1, "H": dims.hidden, "I": dims.intermediate, "V": dims.vocab, "Q": dims.q_size, "K": dims.kv_size}
    listed = [TensorSpec(n, (size[c],) if r == "1" else (size[r], size[c]), s == "INT4") for n, r, c, s in rows_of(page, "## The tensors of a model")[1:]]
    before, block, after = listed[:1], [s for s in listed if ".N." in s.name], listed[-2:-1] if tied else listed[-2:]
    layers = [replace(s, name=s.name.replace(".N.", f".{n}.")) for n in range(dims.num_layers) for s in block]
    assert before + layers + after == schema(dims)


# ----------------------------------------------------------------------------------------------------------- examples


def test_eight_weights_by_hand(page):
    heading = "### Eight weights by hand"
    weight, value, code, nibble, bit = (row[1:] for row in rows_of(page, heading))
    group = np.zeros((1, 32), np.float32)
    group[0, :8] = [float(v) for v in value]
    codes, scales = int4.quantize(group, 32)
    (word, *_), = int4.pack_codes(codes)
    assert [int(c) for c in code] == codes[0, :8].tolist()
    assert [int(n, 16) for n in nibble] == [c & 15 for c in codes[0, :8].tolist()]
    assert tuple(int(b) for b in bit) == int4.SHIFTS
    text = page.split(heading, 1)[1].split("\n### ", 1)[0]
    assert f"0x{scales.view(np.uint16)[0, 0]:04X}" in text and f"{float(scales[0, 0])!r}" in text
    assert f"`0x{word:08X}`" in text and f"`0x{word & 0xFFFF:04X}`" in text and f"`0x{word >> 16:04X}`" in text
    assert f"`{word.astype('<u4').tobytes().hex(' ').upper()}`" in text


def test_checksum_definition(page):
    def crc32(data: bytes, polynomial: int, start: int, final: int) -> int:
        crc = start
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
        return crc ^ final

    text = page.split("## Checksums", 1)[1]
    normal, reflected, start, final, check = (int(n, 16) for n in re.findall(r"`(0x[0-9A-F]{8})`", text)[:5])
    assert int(f"{normal:032b}"[::-1], 2) == reflected
    assert crc32(b"123456789", reflected, start, final) == check == zlib.crc32(b"123456789")
    data = bytes(range(256)) * 3
    assert crc32(data, reflected, start, final) == zlib.crc32(data)


def dumped(page: str) -> bytes:
    """The bytes of the page's hex dump."""
    raw = bytearray()
    for line in page.split("## A whole file", 1)[1].split("```text\n", 1)[1].split("\n```", 1)[0].splitlines():
        if line == "*":
            continue
        at, *pairs = line.split()
        assert int(at, 16) >= len(raw)
        raw += bytes(int(at, 16) - len(raw)) + bytes.fromhex("".join(pairs))
    return bytes(raw)


def test_metadata_keys(page, tmp_path):
    """The packer writes the keys that the page lists, no more and no fewer, in the spelling that the page promises."""
    pack(tiny.make(tmp_path / "checkpoint"), tmp_path / "tiny.nanoqwen")
    f = second_reader.File(tmp_path / "tiny.nanoqwen")
    table = rows_of(page, "## Metadata")[1:]
    listed = {key: value for keys, value in table for key in keys.split(", ")}
    assert set(listed) == set(f.meta)
    for key in ("source", "quantise"):
        assert all(inner in listed[key] for inner in f.meta[key]), key
    for key in ("stop_ids", "added_tokens"):
        assert f.meta[key] and all(inner in listed[key] for item in f.meta[key] for inner in item), key
    start, size = f.header["meta_offset"], f.header["meta_bytes"]
    assert f.raw[start : start + size] == json.dumps(f.meta, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")


def test_whole_file(page, tmp_path):
    raw = dumped(page)
    assert raw == example_file(tmp_path / "example.nanoqwen").read_bytes()
    (tmp_path / "typed.nanoqwen").write_bytes(raw)
    f = second_reader.File(tmp_path / "typed.nanoqwen")
    assert f.weight("v").tolist() == [[1, -2, 0.5, 65504]]
    assert f.weight("w")[0, :8].tolist() == [c * 0.0999755859375 for c in (7, -4, 1, -1, 0, 2, -7, 5)]
    assert f.meta == {"example": "format_spec"} and f.damaged() == []


def test_placement_rule(page):
    """The rule of "Where payloads lie", applied by hand to the 7B, gives the offsets of the packer."""
    assert "## Where payloads lie" in page
    dims = Dims.qwen2_5_coder_7b()
    specs = schema(dims)
    header, entries, _ = plan(dims, 128, specs, {}, b"", {})

    def align(n: int) -> int:
        return (n + 127) // 128 * 128

    at, expected, k = header.payload[0], [], 0
    while k < len(specs):
        run = [specs[k]]
        while specs[k].int4 and k + len(run) < len(specs) and specs[k + len(run)].int4 and specs[k + len(run)].cols == specs[k].cols:
            run.append(specs[k + len(run)])
        codes, scales = [], []
        for s in run:
            codes.append(at)
            at = align(at + (s.rows * s.cols // 2 if s.int4 else s.rows * s.cols * 2))
        for s in run:
            scales.append(at if s.int4 else 0)
            at = align(at + (s.rows * s.cols // 128 * 2 if s.int4 else 0))
        expected += zip(codes, scales)
        k += len(run)
    assert expected == [(e.offset, e.scale_offset) for e in entries]
    assert at == header.file_bytes
