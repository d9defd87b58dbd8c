"""The reader trusts nothing, and the writer leaves all or nothing."""

import dataclasses
import errno
import hashlib
import os
import shutil
import struct
import zlib
from collections import namedtuple

import numpy as np
import pytest

from nanoqwen import int4, packfile, packwriter
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError
from nanoqwen.model import EMBED, FINAL_NORM, LM_HEAD, schema
from nanoqwen.packfile import ENTRY, FORMAT, HEADER, HEADER_CRC_AT, open_pack
from nanoqwen.packwriter import PackWriter

DIMS = Dims(num_layers=1, hidden=256, intermediate=384, num_heads=4, num_kv_heads=2, head_dim=64, vocab=96, max_position=64)
META = {"tokenizer_entries": 90, "stop_ids": [], "note": "é"}
GATE = "model.layers.0.mlp.gate_proj.weight"


def write(path, dims=DIMS, group=128, seed=0, block=64):
    """A file of random weights; returns what a reader must get back."""
    rng, kept = np.random.default_rng(seed), {}
    with PackWriter(path, dims, group, schema(dims), META, b'{"model": {}}', {EMBED: "BF16", FINAL_NORM: "F32"}) as out:
        for spec in schema(dims):
            w = rng.normal(0, 0.05, spec.shape).astype(np.float32)
            if spec.int4:
                words, scales = kept[spec.name] = int4.quantize_pack(w, group)
                for r in range(0, spec.rows, block):
                    out.write_int4(spec.name, words[r : r + block], scales[r : r + block])
            else:
                kept[spec.name] = w.astype(np.float16)
                out.write_fp16(spec.name, w)
    return kept


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("pack") / "sound.nanoqwen"
    write(path)
    return path


def reseal(raw: bytearray) -> bytearray:
    """Give the header a checksum that matches its bytes again: damage on purpose, not by accident."""
    struct.pack_into("<I", raw, HEADER_CRC_AT, zlib.crc32(bytes(raw[:HEADER_CRC_AT])))
    return raw


def reseal_table(raw: bytearray) -> bytearray:
    offset, nbytes = HEADER.unpack_from(raw)[19:21]
    struct.pack_into("<I", raw, HEADER.size - 12, zlib.crc32(bytes(raw[offset : offset + nbytes])))
    return reseal(raw)


@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_written_comes_back(tmp_path, group, tied):
    dims = dataclasses.replace(DIMS, tied=tied)
    kept = write(tmp_path / "a.nanoqwen", dims, group)
    with open_pack(tmp_path / "a.nanoqwen") as pack:
        assert (pack.dims, pack.group_size, pack.meta, pack.tokenizer_bytes) == (dims, group, META, b'{"model": {}}')
        assert list(pack.tensors) == [s.name for s in schema(dims)] and (LM_HEAD in pack.tensors) is not tied
        for spec in schema(dims):
            if spec.int4:
                words, scales = pack.int4(spec.name)
                assert np.array_equal(words, kept[spec.name][0]) and np.array_equal(scales, kept[spec.name][1])
                assert not words.flags.writeable
            else:
                assert np.array_equal(pack.fp16(spec.name), kept[spec.name])
        assert packfile.SOURCE_DTYPES[pack.tensors[EMBED].source_dtype] == "BF16"
        assert packfile.SOURCE_DTYPES[pack.tensors[GATE].source_dtype] == "unknown"
        assert pack.verify() == []


def test_same_input_same_bytes_however_it_is_cut_into_blocks(tmp_path):
    write(tmp_path / "a.nanoqwen", block=64)
    write(tmp_path / "b.nanoqwen", block=7)
    assert (tmp_path / "a.nanoqwen").read_bytes() == (tmp_path / "b.nanoqwen").read_bytes()


def test_payloads_are_aligned_and_qkv_lie_as_one_run(sound):
    with open_pack(sound) as pack:
        for e in pack.tensors.values():
            assert all(offset % FORMAT.align_bytes == 0 for offset, _, _ in e.spans)
        q, k, v = (pack.tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv")
        assert (k.offset, v.offset) == (q.offset + q.nbytes, k.offset + k.nbytes)
        assert q.scale_offset == packfile.align(v.offset + v.nbytes)
        assert (k.scale_offset, v.scale_offset) == (q.scale_offset + q.scale_nbytes, k.scale_offset + k.scale_nbytes)


def test_wrong_names_and_storages_are_named(sound):
    with open_pack(sound) as pack:
        with pytest.raises(InputError, match="no tensor model.layers.9"):
            pack.fp16("model.layers.9.input_layernorm.weight")
        with pytest.raises(InputError, match="stored as FP16, not as INT4"):
            pack.int4(EMBED)
        with pytest.raises(InputError, match="stored as INT4, not as FP16"):
            pack.fp16(GATE)


@pytest.mark.parametrize("keep", [0, 1, 7, 64, 255, 256, 300, "half", "all but one"])
def test_a_truncated_file_is_refused_at_open(sound, tmp_path, keep):
    raw = sound.read_bytes()
    keep = {"half": len(raw) // 2, "all but one": len(raw) - 1}.get(keep, keep)
    (tmp_path / "cut.nanoqwen").write_bytes(raw[:keep])
    with pytest.raises(InputError, match="cut.nanoqwen: (truncated|the file is empty)") as caught:
        open_pack(tmp_path / "cut.nanoqwen")
    if keep >= FORMAT.header_bytes:
        assert f"{keep:,}" in str(caught.value) and f"{len(raw):,}" in str(caught.value)


def test_a_longer_file_is_refused(sound, tmp_path):
    (tmp_path / "long.nanoqwen").write_bytes(sound.read_bytes() + b"\0")
    with pytest.raises(InputError, match="too long"):
        open_pack(tmp_path / "long.nanoqwen")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"GGUF\x03\0\0\0" + bytes(300), "GGUF"),
        (b"PK\x03\x04" + bytes(300), "zip"),
        (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"}}' + bytes(300), "safetensors"),
        (b'{"architectures": []}', "JSON"),
        (b"random bytes, nothing known" * 20, "not a .nanoqwen file"),
    ],
)
def test_another_format_is_recognised(tmp_path, raw, word):
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(InputError, match=word):
        open_pack(tmp_path / "x")


def test_a_folder_and_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="a folder"):
        open_pack(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        open_pack(tmp_path / "missing.nanoqwen")


def test_every_single_byte_of_the_header_is_guarded(sound, tmp_path):
    raw, path = sound.read_bytes(), tmp_path / "flip.nanoqwen"
    for at in range(FORMAT.header_bytes):
        spoiled = bytearray(raw)
        spoiled[at] ^= 0x10
        path.write_bytes(spoiled)
        with pytest.raises(InputError):
            open_pack(path)


@pytest.mark.parametrize(("section", "index", "label"), [("table", 19, "tensor table"), ("meta", 21, "metadata"), ("tokenizer", 23, "tokenizer")])
def test_damage_in_a_section_is_refused_at_open_by_name(sound, tmp_path, section, index, label):
    raw = bytearray(sound.read_bytes())
    offset, nbytes = HEADER.unpack_from(raw)[index : index + 2]
    raw[offset + nbytes // 2] ^= 1
    (tmp_path / "flip.nanoqwen").write_bytes(raw)
    with pytest.raises(InputError, match=f"checksum of its {label}"):
        open_pack(tmp_path / "flip.nanoqwen")


@pytest.mark.parametrize(("name", "part"), [(GATE, "packed codes"), (GATE, "scales"), (EMBED, "values")])
def test_verify_names_the_damaged_part(sound, tmp_path, name, part):
    raw = bytearray(sound.read_bytes())
    with open_pack(sound) as pack:
        offset, nbytes, _ = next(s for s in pack.tensors[name].spans if s[2] == part)
    raw[offset + nbytes - 1] ^= 0x80
    (tmp_path / "flip.nanoqwen").write_bytes(raw)
    with open_pack(tmp_path / "flip.nanoqwen") as pack:
        assert pack.verify() == [f"{name}: {part}"]


# Fields spoiled on purpose, with checksums that match: (index in HEADER, value, word of the message).
@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        (1, 2, "format version 2"), (2, 7, "layout id 7"), (3, 512, "does not define"), (4, 64, "does not define"),
        (5, 0, "num_layers"), (9, 3, "evenly"), (13, float("nan"), "rope_theta"), (15, 2, "does not define"),
        (16, 48, "group size 48"), (18, 5, "5 tensors need a table"), (19, 384, "misaligned|checksum"), (21, 3, "metadata at byte 3"),
        (23, 0, "tokenizer at byte 0"), (25, 1 << 60, "leaves the file"), (26, 1 << 63, "leaves the file"), (27, 9, "too long"),
    ],
)  # fmt: skip
def test_a_sealed_header_with_an_impossible_field_is_refused(sound, tmp_path, field, value, word):
    raw = bytearray(sound.read_bytes())
    fields = list(HEADER.unpack_from(raw))
    fields[field] = value
    HEADER.pack_into(raw, 0, *fields)
    (tmp_path / "bad.nanoqwen").write_bytes(reseal(raw))
    with pytest.raises(InputError, match=word):
        open_pack(tmp_path / "bad.nanoqwen")


# Fields of the first table entry (the embedding): (index in ENTRY, value, word of the message).
@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        (0, b"\xff\xfe", "not UTF-8"), (0, b"", "empty"), (0, FINAL_NORM.encode(), "twice"), (0, b"a\0b", "malformed"),
        (1, 9, "storage tag 9"), (2, 9, "source dtype 9"), (3, 0, "shape 0 x 256"), (4, 255, "do not fit its shape"),
        (5, 4096 + 64, "misaligned"), (5, 0, "outside the payload"), (6, 1 << 40, "do not fit"), (7, 128, "has no scales"), (8, 2, "do not fit"),
    ],
)  # fmt: skip
def test_a_sealed_table_with_an_impossible_entry_is_refused(sound, tmp_path, field, value, word):
    raw = bytearray(sound.read_bytes())
    fields = list(ENTRY.unpack_from(raw, FORMAT.header_bytes))
    fields[field] = value
    ENTRY.pack_into(raw, FORMAT.header_bytes, *fields)
    (tmp_path / "bad.nanoqwen").write_bytes(reseal_table(raw))
    with pytest.raises(InputError, match=word):
        open_pack(tmp_path / "bad.nanoqwen")


@pytest.mark.parametrize("meta", [b"[" * 100_000, '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"\xff", b"{", b"[]"])
def test_metadata_that_is_not_a_json_object_in_utf8_is_refused(sound, tmp_path, meta):
    with open_pack(sound) as pack:
        head, start = pack.header, pack.header.meta[0]
    room = head.tokenizer[0] - start
    raw = bytearray(sound.read_bytes())
    if len(meta) > room:  # push everything behind the metadata back by whole lines
        more = packfile.align(len(meta)) - room
        raw[start + room : start + room] = bytes(more)
        shift = lambda span: (span[0] + more, span[1])  # noqa: E731
        head = dataclasses.replace(head, tokenizer=shift(head.tokenizer), payload=shift(head.payload), file_bytes=head.file_bytes + more)
        for i in range(head.tensor_count):
            at = FORMAT.header_bytes + i * FORMAT.entry_bytes
            fields = list(ENTRY.unpack_from(raw, at))
            fields[5] += more
            fields[7] += more if fields[8] else 0
            ENTRY.pack_into(raw, at, *fields)
    raw[start : start + len(meta)] = meta
    table = zlib.crc32(bytes(raw[head.table[0] : sum(head.table)]))
    head = dataclasses.replace(head, meta=(start, len(meta)), crcs=(table, zlib.crc32(meta), head.crcs[2]))
    raw[: FORMAT.header_bytes] = head.encode()
    (tmp_path / "bad.nanoqwen").write_bytes(raw)
    with pytest.raises(InputError, match="its metadata is not"):
        open_pack(tmp_path / "bad.nanoqwen")


def test_two_tensors_may_not_share_bytes(sound, tmp_path):
    raw = bytearray(sound.read_bytes())
    at = FORMAT.header_bytes + FORMAT.entry_bytes  # the second entry: the first norm
    fields = list(ENTRY.unpack_from(raw, at))
    fields[5] = ENTRY.unpack_from(raw, FORMAT.header_bytes)[5]
    ENTRY.pack_into(raw, at, *fields)
    (tmp_path / "bad.nanoqwen").write_bytes(reseal_table(raw))
    with pytest.raises(InputError, match="overlap"):
        open_pack(tmp_path / "bad.nanoqwen")


def test_replacing_the_file_leaves_an_open_reader_alone(tmp_path):
    kept = write(tmp_path / "a.nanoqwen", seed=1)
    with open_pack(tmp_path / "a.nanoqwen") as old:
        write(tmp_path / "a.nanoqwen", seed=2)
        assert np.array_equal(old.fp16(EMBED), kept[EMBED]) and old.verify() == []
        with open_pack(tmp_path / "a.nanoqwen") as new:
            assert not np.array_equal(new.fp16(EMBED), kept[EMBED])


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("stop"), OSError(errno.ENOSPC, "full")])
def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, error):
    write(tmp_path / "a.nanoqwen")
    before = digest(tmp_path / "a.nanoqwen")
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as out:
            out.write_fp16(FINAL_NORM, np.ones(256))
            raise error
    assert digest(tmp_path / "a.nanoqwen") == before and [p.name for p in tmp_path.iterdir()] == ["a.nanoqwen"]


def test_tensors_that_were_never_written_are_named(tmp_path):
    with pytest.raises(InputError, match=f"14 tensors were not written in full, the first is {EMBED}"):
        with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as out:
            out.write_fp16(FINAL_NORM, np.ones(256))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(InputError, match="no space: the file needs .* bytes, 1,000 are free"):
        with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}):
            raise AssertionError("the writer started")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_while_writing_says_so(tmp_path):
    writer = PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {})
    with pytest.raises(InputError, match="no space left while writing"):
        with writer as out:
            real, out._file = out._file, open("/dev/full", "wb", buffering=0)
            real.close()
            out.write_fp16(EMBED, np.ones((96, 256)))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_writer_go_and_those_of_a_live_one_stay(tmp_path):
    dead = tmp_path / ".a.nanoqwen.0123456789ab.tmp"
    dead.write_bytes(b"half a file")
    with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as first:
        assert not dead.exists()
        write(tmp_path / "a.nanoqwen")
        assert first._temporary.exists()
        for spec in schema(DIMS):
            zeros = np.zeros(spec.shape, np.float32)
            first.write_int4(spec.name, *int4.quantize_pack(zeros, 128)) if spec.int4 else first.write_fp16(spec.name, zeros)
    assert [p.name for p in tmp_path.iterdir()] == ["a.nanoqwen"]


def test_targets_that_cannot_be_written(tmp_path):
    def start(path):
        with PackWriter(path, DIMS, 128, schema(DIMS), META, b"{}", {}):
            raise AssertionError("the writer started")

    with pytest.raises(InputError, match="does not exist"):
        start(tmp_path / "no" / "a.nanoqwen")
    with pytest.raises(InputError, match="a folder"):
        start(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        start(tmp_path / "pipe")


def test_a_symlink_as_target_keeps_pointing(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.nanoqwen").symlink_to(tmp_path / "real" / "a.nanoqwen")
    write(tmp_path / "link.nanoqwen")
    assert (tmp_path / "link.nanoqwen").is_symlink() and (tmp_path / "real" / "a.nanoqwen").is_file()


@pytest.mark.parametrize(("value", "shown"), [(1e5, "100000"), (-np.inf, "-inf"), (np.nan, "nan")])
def test_fp16_tensors_refuse_what_fp16_cannot_hold(tmp_path, value, shown):
    w = np.zeros((96, 256), np.float32)
    w[70, 3] = value
    with pytest.raises(InputError, match=rf"{EMBED}: value at \[70, 3\] is {shown}"):
        with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as out:
            out.write_fp16(EMBED, w[:64])
            out.write_fp16(EMBED, w[64:])


def test_blocks_that_do_not_fit_are_refused(tmp_path):
    words, scales = int4.quantize_pack(np.zeros((4, 128), np.float32), 128)
    for block in ((words, scales), (np.zeros((4, 32), np.uint32), np.zeros((4, 1), np.float16))):
        with pytest.raises(InputError, match="do not fit"):
            with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as out:
                out.write_int4(GATE, *block)
    with pytest.raises(InputError, match="257 rows|97 rows"):
        with PackWriter(tmp_path / "a.nanoqwen", DIMS, 128, schema(DIMS), META, b"{}", {}) as out:
            out.write_fp16(EMBED, np.zeros((97, 256)))


def test_the_7b_file_is_planned_without_writing_it():
    dims = Dims.qwen2_5_coder_7b()
    header, entries, _ = packwriter.plan(dims, 128, schema(dims), {}, b"", {})
    payload = sum(e.nbytes + e.scale_nbytes for e in entries)
    assert payload <= header.file_bytes < payload + 128 * 3 * len(entries)
    assert max(len(e.name) for e in entries) <= FORMAT.name_bytes
    assert load_settings().quant.layout_id == header.layout_id
