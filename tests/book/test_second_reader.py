"""A reader written from `book/format_spec.md` alone against the package's: same weights, same refusals."""

from __future__ import annotations

import ast
import struct
from pathlib import Path

import numpy as np
import pytest
import second_reader
import tiny
from spec_files import example_file, pack_tiny, reseal

from nanoqwen import int4, packfile
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError
from nanoqwen.model import TensorSpec, schema
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.packwriter import PackWriter

FORMAT = load_settings().format


def test_second_reader_stands_alone():
    tree = ast.parse(Path(second_reader.__file__).read_text(encoding="utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {"__future__", "json", "math", "struct", "zlib", "pathlib", "numpy"}


@pytest.mark.parametrize(
    "sizes, group",
    [(tiny.PLAIN, None), (tiny.TIED, 64), (tiny.GQA7, None), (tiny.Sizes(hidden=192, intermediate=320, heads=3, kv_heads=1), None)],
    ids=["plain", "tied-group64", "gqa7", "group64-by-size"],
)
def test_second_reader_decodes_the_same_weights(tmp_path, sizes, group):
    path = pack_tiny(tmp_path / "tiny.nanoqwen", sizes, group)
    theirs = second_reader.File(path)
    with open_pack(path) as ours:
        assert list(theirs.tensors) == list(ours.tensors) and len(theirs.tensors) == len(schema(ours.dims))
        for name, entry in ours.tensors.items():
            assert theirs.tensors[name] == {k: v for k, v in vars(entry).items() if k != "name"}
            if entry.storage == packfile.INT4:
                want = int4.dequantize(*ours.int4(name), ours.group_size)
            else:
                want = ours.fp16(name).astype(np.float32).reshape(entry.rows, entry.cols)
            np.testing.assert_array_equal(theirs.weight(name).view(np.uint32), np.ascontiguousarray(want).view(np.uint32), err_msg=name)
        for name in Dims.__dataclass_fields__:
            if name != "tied":
                assert theirs.header[name] == getattr(ours.dims, name)
        assert bool(theirs.header["flags"]) == ours.dims.tied == ("lm_head.weight" not in theirs.tensors)
        assert theirs.meta == ours.meta and theirs.tokenizer == ours.tokenizer_bytes
        assert theirs.header["tokenizer_entries"] == tiny.TOKENIZER_ENTRIES


def test_every_nibble_in_every_place_and_the_longest_name(tmp_path):
    """Codes that the quantiser makes rarely (-8) or in few places, under a name that fills all 72 bytes."""
    name = "é" * (FORMAT.name_bytes // 2)
    codes = np.array([[(place + value) % 16 - 8 for value in range(16) for place in range(8)]], np.int8)  # [1, 128]
    scales = np.array([[0.5]], np.float16)
    path = tmp_path / "nibbles.nanoqwen"
    dims = Dims(1, 128, 128, 1, 1, 128, 16, 64)
    with PackWriter(path, dims, 128, [TensorSpec(name, (1, 128), True)], {}, b"", {}) as out:
        out.write_int4(name, int4.pack_codes(codes), scales)
    assert second_reader.File(path).weight(name).tolist() == (codes * 0.5).tolist()
    with open_pack(path) as ours:
        assert int4.dequantize(*ours.int4(name), 128).tolist() == (codes * 0.5).tolist()


def test_second_reader_follows_the_packer_back_to_the_checkpoint(tmp_path):
    """From a checkpoint's BF16 through `nanoqwen.pack` and out of the second reader: within half a step, and FP16 exactly."""
    pack(tiny.make(tmp_path / "checkpoint"), tmp_path / "tiny.nanoqwen")
    f = second_reader.File(tmp_path / "tiny.nanoqwen")
    for name, tensor in tiny.weights().items():
        source, found = np.atleast_2d(tiny.stored_values(tensor)), f.weight(name)
        if f.tensors[name]["storage"] == second_reader.FP16:
            np.testing.assert_array_equal(found, source.astype(np.float16).astype(np.float32), err_msg=name)
        else:
            groups = source.reshape(-1, f.header["group_size"])
            step = np.abs(groups).max(axis=1, keepdims=True) / 7
            # Half a step, and what the rounding of the scale to FP16 adds at the edge (at most 7 * 2**-11 of a step).
            assert (np.abs(found.reshape(groups.shape) - groups) <= step * (0.5 + 7 * 2**-11) * (1 + 2**-11)).all(), name
    assert f.tokenizer == (tmp_path / "checkpoint" / "tokenizer.json").read_bytes()


def outcome(path: Path) -> str:
    """What both readers say of a file; they must agree on whether to open it and on which tensors are damaged."""
    try:
        theirs = second_reader.File(path)
    except second_reader.Refused as refused:
        with pytest.raises(InputError) as e:
            open_pack(path)
        assert "\n" not in str(e.value)
        return f"refused at check {refused.step}"
    with open_pack(path) as ours:
        damaged = {line.split(": ")[0] for line in ours.verify()}
    assert damaged == set(theirs.damaged())
    return "damaged" if damaged else "sound"


def test_both_readers_agree_on_every_flipped_bit(tmp_path):
    good = example_file(tmp_path / "good.nanoqwen").read_bytes()
    f = second_reader.File(tmp_path / "good.nanoqwen")
    owned = set(range(256)) | {
        at for name in ("table", "meta", "tokenizer") for at in range(f.header[f"{name}_offset"], f.header[f"{name}_offset"] + f.header[f"{name}_bytes"])
    }
    payload = {at for t in f.tensors.values() for o, n in ((t["offset"], t["nbytes"]), (t["scale_offset"], t["scale_nbytes"])) for at in range(o, o + n)}
    path = tmp_path / "flipped.nanoqwen"
    for at in range(len(good)):
        # All eight bits where there is something to find, one in padding.
        for bit in range(8) if at in owned | payload else (at % 8,):
            path.unlink(missing_ok=True)  # a new file each time: some file systems flush a truncated one to disk
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            found = outcome(path)
            expected = "refused" if at in owned else "damaged" if at in payload else "sound"
            assert found.startswith(expected), f"byte {at}, bit {bit}: {found}"


def test_both_readers_agree_on_every_length(tmp_path):
    good = example_file(tmp_path / "good.nanoqwen").read_bytes()
    path = tmp_path / "cut.nanoqwen"
    for length in range(len(good)):
        path.unlink(missing_ok=True)
        path.write_bytes(good[:length])
        assert outcome(path).startswith("refused at check 1" if length < 256 else "refused at check 6"), length
    path.write_bytes(good + b"\0")
    assert outcome(path) == "refused at check 6"


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def f64(x: float) -> bytes:
    return struct.pack("<d", x)


V, W = 256, 384  # where the entries of the example's two tensors start
LIES = [  # field, offset, what it is made to say, the check that must find it
    ("magic", 0, b"GGUF", 1), ("version", 8, u32(2), 2), ("layout_id", 12, u32(2), 2), ("header_bytes", 16, u32(512), 4),
    ("entry_bytes", 20, u32(64), 4), ("unknown flag", 72, u32(2), 4), ("reserved byte", 200, b"\1", 4), ("no layers", 24, u32(0), 5),
    ("odd head_dim", 44, u32(31), 5), ("heads do not share", 40, u32(2), 5), ("theta nan", 56, f64(float("nan")), 5),
    ("theta 0", 56, f64(0.0), 5), ("theta inf", 56, f64(float("inf")), 5), ("eps 1", 64, f64(1.0), 5), ("eps negative", 64, f64(-1e-6), 5),
    ("group 16", 76, u32(16), 5), ("file_bytes", 152, u64(1153), 6), ("tensor_count", 84, u32(3), 7), ("table in the header", 88, u64(0), 7),
    ("meta over tokenizer", 104, u64(640), 7), ("tokenizer misaligned", 120, u64(641), 7), ("payload beyond the file", 136, u64(1280), 7),
    ("payload too large", 144, u64(1 << 40), 7), ("payload size wraps", 144, u64((1 << 64) - 128), 7), ("name empty", V, b"\0", 9),
    ("name not UTF-8", V, b"\xff", 9), ("name twice", V, b"w", 9), ("name with a zero inside", V, b"v\0v", 9), ("storage", V + 72, u32(3), 9),
    ("source dtype", V + 76, u32(4), 9), ("no rows", V + 80, u32(0), 9), ("too many columns", V + 84, u32(5), 9),
    ("scales of FP16", V + 104, u64(768), 9), ("columns not a multiple of the group", W + 84, u32(33), 9), ("over another tensor", W + 88, u64(768), 9),
    ("misaligned", W + 88, u64(897), 9), ("in the tokenizer", W + 88, u64(640), 9), ("beyond the region", W + 104, u64(1152), 9),
    ("far beyond", W + 104, u64((1 << 64) - 128), 9), ("scales nowhere", W + 104, u64(0), 9), ("meta not JSON", 512, b"[", 10),
    ("meta not UTF-8", 512, b"\xff", 10),
]  # fmt: skip


@pytest.mark.parametrize("at, says, check", [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_both_readers_agree_on_lies_with_correct_checksums(tmp_path, at, says, check):
    raw = bytearray(example_file(tmp_path / "good.nanoqwen").read_bytes())
    raw[at : at + len(says)] = says
    path = tmp_path / "lie.nanoqwen"
    path.write_bytes(reseal(raw))
    assert outcome(path) == f"refused at check {check}"
