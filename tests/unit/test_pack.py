"""Packing: the values that arrive, bytes that do not depend on circumstance, and memory that does not grow.

Expected values are computed here from the fixture's own numbers, by the definition of the format, not by the packer's path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny import ABSENT, Sizes, Stored

import nanoqwen.pack as packing
from nanoqwen.bench.pack import make_checkpoint, sample_dims
from nanoqwen.errors import InputError
from nanoqwen.int4 import dequantize
from nanoqwen.pack import pack
from nanoqwen.packfile import SOURCE_DTYPES, open_pack

ROOT = Path(__file__).resolve().parents[2]


def packed_bytes(source, out: Path, **options) -> bytes:
    pack(source, out, **options)
    return out.read_bytes()


def decoded(file, name: str) -> np.ndarray:
    """An INT4 tensor as float32, by the format's definition: nibble i of a word sits at its ValueShuffle bit."""
    words, scales = file.int4(name)
    nibbles = np.stack([words >> shift & 0xF for shift in (0, 16, 4, 20, 8, 24, 12, 28)], axis=-1).astype(np.int32)
    codes = np.where(nibbles > 7, nibbles - 16, nibbles).reshape(len(words), -1)
    return codes * np.repeat(scales.astype(np.float32), file.group_size, axis=1)


# -------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("sizes", [tiny.PLAIN, tiny.TIED, tiny.GQA7, Sizes(explicit_head_dim=128)], ids=["plain", "tied", "gqa7", "wide-heads"])
def test_every_tensor_arrives(tmp_path, sizes):
    tensors = tiny.weights(sizes, seed=3)
    report = pack(tiny.make(tmp_path / "S", sizes, tensors=tensors), tmp_path / "out.nanoqwen")
    assert report.bytes == (tmp_path / "out.nanoqwen").stat().st_size and report.group == 128
    with open_pack(tmp_path / "out.nanoqwen") as file:
        assert set(file.tensors) == set(tensors) and file.verify() == []
        for name, tensor in tensors.items():
            wanted = tiny.stored_values(tensor)
            if name.endswith("_proj.weight"):
                groups = wanted.reshape(len(wanted), -1, 128)
                step = np.abs(groups).max(axis=2, keepdims=True) / 7
                error = np.abs(decoded(file, name).reshape(groups.shape) - groups)
                # Half a step, and what rounding the scale to FP16 can add: 7 codes times 2**-11 of a step.
                assert (error <= step * (0.5 + 7 * 2.0**-11)).all(), name
            else:
                assert np.array_equal(file.fp16(name), wanted.astype(np.float16)), name
        assert SOURCE_DTYPES[file.tensors["model.norm.weight"].source_dtype] == "BF16"


def test_source_types_are_recorded_and_do_not_change_the_values(tmp_path):
    """A10: mixed types; the result equals packing an all-F32 copy of the same values."""
    mixed = tiny.weights()
    mixed["model.norm.weight"].dtype, mixed["lm_head.weight"].dtype = "F32", "F16"
    plain = {name: Stored("F32", tiny.stored_values(tensor)) for name, tensor in mixed.items()}
    a, b = (tmp_path / f"{k}.nanoqwen" for k in "ab")
    pack(tiny.make(tmp_path / "mixed", tensors=mixed), a)
    pack(tiny.make(tmp_path / "plain", tensors=plain), b)
    with open_pack(a) as one, open_pack(b) as other:
        for name, tensor in mixed.items():
            assert SOURCE_DTYPES[one.tensors[name].source_dtype] == tensor.dtype
            assert SOURCE_DTYPES[other.tensors[name].source_dtype] == "F32"
            assert (one.tensors[name].crc, one.tensors[name].scale_crc) == (other.tensors[name].crc, other.tensors[name].scale_crc)


def packed_with(tmp_path, change) -> tuple:
    """(open pack file, stored values by name) of the plain fixture after ``change(tensors)``."""
    tensors = tiny.weights()
    change(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy must have nothing to say
        pack(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "out.nanoqwen")
    return open_pack(tmp_path / "out.nanoqwen"), {name: tiny.stored_values(t) for name, t in tensors.items()}


def test_one_weight_above_fp16_keeps_its_value(tmp_path):
    """B03: nothing but the scale passes through FP16."""
    name = "model.layers.0.mlp.gate_proj.weight"
    file, values = packed_with(tmp_path, lambda t: t[name].values.__setitem__((0, 0), 1e5))
    with file:
        scale = np.float32(file.int4(name)[1][0, 0])
        assert np.isfinite(file.int4(name)[1]).all() and values[name][0, 0] == 99840
        assert abs(decoded(file, name)[0, 0] - 99840) <= scale / 2


def test_groups_of_zeros_decode_to_zero(tmp_path):
    """B05: one group, and a whole row; and the bytes repeat."""
    name = "model.layers.0.mlp.up_proj.weight"

    def zero(tensors):
        tensors[name].values[0, :128] = 0
        tensors[name].values[5] = -0.0

    file, _ = packed_with(tmp_path, zero)
    with file:
        values = decoded(file, name)
        assert (values[0, :128] == 0).all() and (values[5] == 0).all() and (values[0, 128:] != 0).any()
        assert not np.signbit(values[5]).any()
    assert packed_bytes(tmp_path / "S", tmp_path / "again.nanoqwen") == (tmp_path / "out.nanoqwen").read_bytes()


def test_a_group_of_one_sign(tmp_path):
    """B07: 0.5 and 0.7 stay apart, each within half a step."""
    name = "model.layers.0.mlp.up_proj.weight"
    file, values = packed_with(tmp_path, lambda t: t[name].values[2, :128].__setitem__(slice(None), np.tile([0.5, 0.7], 64)))
    with file:
        out = decoded(file, name)[2, :128]
        step = values[name][2, :128].max() / 7
        assert (np.abs(out - values[name][2, :128]) <= step * 0.51).all() and out[0] != out[1]


def test_a_tied_head_is_not_stored_and_a_redundant_copy_is_dropped(tmp_path):
    """A06, A07."""
    tensors = tiny.weights(tiny.TIED)
    tied = pack(tiny.make(tmp_path / "tied", tiny.TIED, tensors=tensors), tmp_path / "tied.nanoqwen")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    copy = pack(tiny.make(tmp_path / "copy", tiny.TIED, tensors=tensors), tmp_path / "copy.nanoqwen")
    assert tied.notes == [] and len(copy.notes) == 1 and "dropped the stored lm_head.weight" in copy.notes[0]
    assert copy.bytes - tied.bytes < 1024  # a note, not a matrix of 256 KiB
    for name in ("tied", "copy"):
        with open_pack(tmp_path / f"{name}.nanoqwen") as file:
            assert file.dims.tied and "lm_head.weight" not in file.tensors


# -------------------------------------------------------------------------------------------------------- groups


def test_a_smaller_group_where_128_does_not_divide(tmp_path):
    """A30: 64 divides 192."""
    sizes = Sizes(hidden=192, heads=3, kv_heads=1)
    report = pack(tiny.make(tmp_path / "S", sizes), tmp_path / "out.nanoqwen")
    assert report.group == 64 and any("group size 64" in n and "q_proj" in n and "192" in n for n in report.notes)
    with open_pack(tmp_path / "out.nanoqwen") as file:
        assert file.group_size == 64 and file.meta["quantise"] == {"method": "absmax", "group": 64} and file.meta["notes"] == report.notes


def test_a_size_that_no_group_divides_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight.*136"):
        pack(tiny.make(tmp_path / "S", Sizes(hidden=136, heads=1, kv_heads=1)), tmp_path / "out.nanoqwen")
    assert not (tmp_path / "out.nanoqwen").exists()


def test_a_group_on_request(tmp_path):
    source = tiny.make(tmp_path / "S")
    for group in (32, 64, 128):
        assert pack(source, tmp_path / "out.nanoqwen", group=group).group == group
        with open_pack(tmp_path / "out.nanoqwen") as file:
            words, scales = file.int4("model.layers.1.mlp.down_proj.weight")
            assert scales.shape == (256, 512 // group)
            assert np.array_equal(dequantize(words, scales, group), decoded(file, "model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(InputError, match="group size 100 is not supported"):
        pack(source, tmp_path / "out.nanoqwen", group=100)


# --------------------------------------------------------------------------------------------------- same bytes


def test_bytes_do_not_depend_on_circumstance(tmp_path, monkeypatch):
    """Same checkpoint, same bytes: twice, in shards, in a hub cache, behind a link, elsewhere, in other blocks and threads."""
    out = tmp_path / "out.nanoqwen"
    plain = tiny.make(tmp_path / "S")
    wanted = packed_bytes(plain, out)
    assert packed_bytes(plain, out) == wanted
    assert packed_bytes(plain, tmp_path / "other name.bin") == wanted
    assert packed_bytes(tiny.make(tmp_path / "three", shards=3), out) == wanted
    assert packed_bytes(tmp_path / "three" / "model.safetensors.index.json", out) == wanted
    assert packed_bytes(tiny.as_hub_cache(tiny.make(tmp_path / "T", shards=3), tmp_path / "cache"), out) == wanted
    (tmp_path / "link").symlink_to(plain)
    assert packed_bytes(tmp_path / "link", out) == wanted
    assert packed_bytes(str(tiny.make(tmp_path / "my models" / "模型 ü")), out) == wanted
    reordered = dict(reversed(tiny.weights().items()))
    assert packed_bytes(tiny.make(tmp_path / "reordered", tensors=reordered), out) == wanted
    for block_values, threads in ((1, 1), (1000, 3), (1 << 30, 2)):
        monkeypatch.setattr(packing, "BLOCK_VALUES", block_values)
        assert packed_bytes(plain, out, threads=threads) == wanted


def test_spelling_of_the_config_does_not_change_the_bytes(tmp_path):
    """A22, A26."""
    wanted = packed_bytes(tiny.make(tmp_path / "old"), tmp_path / "old.nanoqwen")
    new = tiny.config(rope_theta=ABSENT, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, torch_dtype=ABSENT, dtype="bfloat16")
    assert packed_bytes(tiny.make(tmp_path / "new", config=new), tmp_path / "new.nanoqwen") == wanted
    window = tiny.config(use_sliding_window=False, sliding_window=64, max_window_layers=1)
    assert packed_bytes(tiny.make(tmp_path / "window", config=window), tmp_path / "window.nanoqwen") == wanted


def test_other_weights_give_other_bytes(tmp_path):
    a = packed_bytes(tiny.make(tmp_path / "a", seed=0), tmp_path / "a.nanoqwen")
    assert a != packed_bytes(tiny.make(tmp_path / "b", seed=1), tmp_path / "b.nanoqwen")


def test_paths_with_spaces_and_letters(tmp_path):
    """C11."""
    (tmp_path / "out dir").mkdir()
    report = pack(str(tiny.make(tmp_path / "my models" / "模型 ü")), str(tmp_path / "out dir" / "é.nanoqwen"))
    assert report.path == tmp_path / "out dir" / "é.nanoqwen" and report.path.is_file()
    with pytest.raises(InputError) as caught:
        pack(tmp_path / "my models" / "模型 ö", tmp_path / "x")
    assert str(tmp_path / "my models" / "模型 ö") in str(caught.value)


# ------------------------------------------------------------------------------------------------------ metadata


def test_metadata_says_where_things_came_from(tmp_path):
    tokenizer = tiny.tokenizer(merges="spaces")
    source = tiny.make(tmp_path / "secret folder", tokenizer=tokenizer, chat_template_file="{{ x }}", config=tiny.config(rms_norm_eps=ABSENT))
    pack(source, tmp_path / "out.nanoqwen")
    with open_pack(tmp_path / "out.nanoqwen") as file:
        meta = file.meta
        assert file.tokenizer_bytes == (source / "tokenizer.json").read_bytes() and file.header.tokenizer_entries == 261
    assert meta["producer"].startswith("nanoqwen ")
    assert meta["source"] == {"name": None, "revision": None, "architecture": "Qwen2ForCausalLM", "torch_dtype": "bfloat16"}
    assert meta["quantise"] == {"method": "absmax", "group": 128} and meta["tokenizer_entries"] == 261
    assert meta["generation"] == {"eos_token_id": [260, 258]}
    assert [s["id"] for s in meta["stop_ids"]] == [260, 258]
    assert (meta["chat_template"], meta["chat_template_from"]) == ("{{ x }}", "chat_template.jinja")
    assert (meta["bos_token"], meta["eos_token"], meta["pad_token"]) == (None, "<|im_end|>", "<|endoftext|>")
    assert meta["added_tokens"][2] == {"id": 260, "content": "<|im_end|>", "special": True}
    assert meta["defaults"] == {"rms_norm_eps": 1e-6} and any("rms_norm_eps" in note for note in meta["notes"])
    assert "secret folder" not in json.dumps(meta) and str(tmp_path) not in json.dumps(meta)


def test_a_hub_name_is_recorded_with_its_revision(tmp_path):
    snapshot = tiny.as_hub_cache(tiny.make(tmp_path / "S"), tmp_path / "hub", "someone/tiny")
    code = "import sys\nfrom nanoqwen.pack import pack\npack(sys.argv[1], sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", code, "someone/tiny", str(tmp_path / "out.nanoqwen")], cwd=ROOT, check=True,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    with open_pack(tmp_path / "out.nanoqwen") as file:
        assert (file.meta["source"]["name"], file.meta["source"]["revision"]) == ("someone/tiny", snapshot.name)


def test_progress_counts_the_bytes_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_VALUES", 1 << 14)
    calls: list[tuple[int, int, str]] = []
    report = pack(tiny.make(tmp_path / "S"), tmp_path / "out.nanoqwen", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    total = sum(len(tiny.encode(t)) for t in tiny.weights().values())
    assert done == sorted(done) and done[-1] == total == report.source_bytes and {call[1] for call in calls} == {total}
    assert len(calls) > 27 and {call[2] for call in calls} == set(tiny.weights())


# -------------------------------------------------------------------------------------------------------- memory


def test_peak_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """C18: three times the layers, the same peak; and the peak is a small constant above the bare interpreter."""
    code = (
        "import sys, json\nfrom pathlib import Path\nfrom nanoqwen.bench.pack import pack_once\n"
        "print(json.dumps(pack_once(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    peaks = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        make_checkpoint(folder, replace(sample_dims(layers), hidden=2048, num_heads=16, num_kv_heads=2, intermediate=5632))
        done = subprocess.run([sys.executable, "-c", code, str(folder), str(folder / "out")], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
        peaks.append(json.loads(done.stdout)["peak_bytes"])
    # Of each thread: one block read and a few copies of it while it is converted, and one that waits.
    blocks = 64 * packing.BLOCK_VALUES * packing.default_threads()
    assert peaks[1] < peaks[0] + 16e6, peaks
    assert peaks[1] < 100e6 + blocks, peaks
