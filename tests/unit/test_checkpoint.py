"""Opening a checkpoint: files, containers, values. What is accepted, what is refused, and in which words.

Each fault test states what one line must name (file, tensor, the number found and the number needed). The model that the
files describe is the subject of test_checkpoint_model.py, the text side of test_checkpoint_text.py, names of test_hub.py.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from opening import opened, refused

from nanoqwen.checkpoint.safetensors_io import to_float32
from nanoqwen.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_a_plain_checkpoint_opens_without_a_note(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path))
    with checkpoint:
        assert notes == []
        d = checkpoint.dims
        assert (d.num_layers, d.hidden, d.intermediate, d.num_heads, d.num_kv_heads, d.head_dim) == (2, 256, 512, 4, 2, 64)
        assert (d.vocab, d.max_position, d.rope_theta, d.rms_eps, d.tied) == (512, 8192, 1e6, 1e-6, False)
        assert len(checkpoint.specs) == 27 and checkpoint.torch_dtype == "bfloat16" and checkpoint.hub_name is None
        assert checkpoint.tokenizer_bytes == (tmp_path / "tokenizer.json").read_bytes()


def test_values_come_back_exactly_in_all_three_types(tmp_path):
    """A10: bf16, fp16 and fp32 tensors in one checkpoint; each value is the stored one, widened without a detour."""
    tensors = tiny.weights()
    tensors["model.norm.weight"].dtype = "F32"
    tensors["lm_head.weight"].dtype = "F16"
    tensors["model.layers.0.mlp.up_proj.weight"].values[0, :2] = 1e5, -3e38  # no FP16 could hold these
    checkpoint, _ = opened(tiny.make(tmp_path, tensors=tensors))
    with checkpoint:
        for name, tensor in tensors.items():
            assert np.array_equal(checkpoint.read(name), tiny.stored_values(tensor)), name
            assert checkpoint.source_dtype(name) == tensor.dtype and checkpoint.shape(name) == tensor.values.shape
        name = "model.layers.1.mlp.down_proj.weight"
        assert np.array_equal(checkpoint.read_rows(name, 3, 10), checkpoint.read(name)[3:10])
        with pytest.raises(InputError, match="rows 0 to 257"):
            checkpoint.read_rows(name, 0, 257)
        with pytest.raises(InputError, match="no tensor nobody"):
            checkpoint.read("nobody")


def test_every_bfloat16_pattern_widens_to_its_float32():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = to_float32(patterns, "BF16")
    assert np.array_equal(wide.view(np.uint32), patterns.astype(np.uint32) << 16)
    assert np.isnan(wide[0x7FC0]) and wide[0x7F80] == np.inf and wide[0x3F80] == 1.0 and wide[0x0001] > 0


# ------------------------------------------------------------------------------------------- A01-A05, C01: files


def test_a_missing_shard_is_named(tmp_path):
    tiny.make(tmp_path, shards=3)
    (tmp_path / tiny.shard_name(1, 3)).unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors", "is missing", "1 of 3", "incomplete")


def test_a_shard_that_is_a_dangling_link_is_missing(tmp_path):
    snapshot = tiny.as_hub_cache(tiny.make(tmp_path / "S", shards=3), tmp_path / "cache")
    (snapshot / tiny.shard_name(2, 3)).resolve().unlink()
    refused(snapshot, "model-00003-of-00003.safetensors", "missing", "incomplete")


def test_a_stale_index_is_told_from_a_lost_shard(tmp_path):
    tiny.make(tmp_path / "four", shards=4)
    tiny.make(tmp_path / "S", shards=2)
    index = tmp_path / "S" / "model.safetensors.index.json"
    index.write_bytes((tmp_path / "four" / index.name).read_bytes())
    refused(tmp_path / "S", "names files that are not here: model-00001-of-00004.safetensors",
            "present: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors", "stale")  # fmt: skip
    index.unlink()  # the advice that the message gives works
    opened(tmp_path / "S")[0].close()


def test_an_index_that_contradicts_the_headers_is_refused(tmp_path):
    tiny.make(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.weight"] = tiny.shard_name(0, 2)
    tiny.write_json(path, index)
    refused(tmp_path, "model.norm.weight", "is in model-00001-of-00002", "it is in model-00002-of-00002", "stale")
    index["weight_map"]["model.extra.weight"] = tiny.shard_name(0, 2)
    index["weight_map"]["model.norm.weight"] = tiny.shard_name(1, 2)
    tiny.write_json(path, index)
    refused(tmp_path, "model.extra.weight", "no file holds it")
    tiny.write_json(path, {"metadata": {}})
    refused(tmp_path, "model.safetensors.index.json", "weight_map")
    tiny.write_json(path, {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}})
    refused(tmp_path, "'../elsewhere.safetensors'")


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    tiny.make(tmp_path, shards=2)
    path, tensors = tmp_path / tiny.shard_name(1, 2), tiny.weights()
    second = {n: t for n, t in tensors.items() if n >= "model.layers.1.mlp"} | {"model.norm.weight": tensors["model.norm.weight"]}
    tiny.write_safetensors(path, {**second, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]})
    for _ in range(2):
        refused(tmp_path, "model.embed_tokens.weight is stored here and in model-00001-of-00002.safetensors", f"{tiny.shard_name(1, 2)}: ")
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)  # and without an index


def test_index_config_and_single_file_stand_for_their_folder(tmp_path):
    three = tiny.make(tmp_path / "three", shards=3)
    one = tiny.make(tmp_path / "one")
    for source in (three / "model.safetensors.index.json", three / "config.json", one / "config.json", one / "model.safetensors"):
        checkpoint, notes = opened(source)
        assert checkpoint.folder == source.parent and notes == []
        checkpoint.close()


def test_one_shard_is_refused_with_the_others_named(tmp_path):
    tiny.make(tmp_path, shards=3)
    others = "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"
    refused(tmp_path / tiny.shard_name(0, 3), "one of 3 shards", others, f"pass the folder {tmp_path}")


@pytest.mark.parametrize(
    "name, content, fragments",
    [
        ("pytorch_model.bin", b"\x80\x02junk", [".bin files are not read", "safetensors"]),
        ("model.gguf", b"GGUF\x03\0\0\0", ["a GGUF file"]),
        ("old.nanoqwen", b"NANOQWEN\x01\0", ["already a .nanoqwen file"]),
        ("notes.txt", b"hello", ["pass the checkpoint folder"]),
        ("other.safetensors", b"\0" * 16, ["pass the checkpoint folder"]),
    ],
)
def test_other_files_as_source(tmp_path, name, content, fragments):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, name, *fragments)


@pytest.mark.parametrize("typed", ["nowhere", "./no/where", "/no/where", "a/b/c", "weights.safetensors", "Qwen/model.gguf", "a b/c"])
def test_a_path_that_does_not_exist(typed):
    refused(typed, f"{typed}: no such file or directory")


def test_an_empty_source_and_a_dangling_link(tmp_path):
    refused("", "the source is empty")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link", "gone", "does not exist")


def test_a_truncated_file_names_both_sizes(tmp_path):
    tiny.make(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.stat().st_size
    tiny.write_safetensors(path, tiny.weights(), cut=1000)
    refused(tmp_path, "model.safetensors", "truncated", f"{whole - 1000:,} bytes found", f"{whole:,} needed")
    tiny.write_safetensors(path, tiny.weights(), tail=b"x" * 7)
    refused(tmp_path, "does not account for", f"{whole + 7:,} bytes found", f"{whole:,} needed")
    path.write_bytes(tiny.safetensors_bytes(tiny.weights())[:500])
    refused(tmp_path, "truncated", "500 bytes found", "its header alone needs")


@pytest.mark.parametrize(
    "content, fragments",
    [
        (b"", ["empty"]),
        (b"\x05\0\0", ["not a safetensors file", "3 bytes"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", ["Git LFS pointer", "git lfs pull"]),
        (b"GGUF" + bytes(60), ["GGUF"]),
        (b"<!DOCTYPE html><html>not found</html>", ["not a safetensors file"]),
        (struct.pack("<Q", 2) + b"{]", ["header is not valid JSON"]),
        (struct.pack("<Q", 2) + b"[]", ["not a safetensors file"]),
        (struct.pack("<Q", 8) + b'{"a": 1}', ["entry for a is malformed"]),
    ],
)
def test_a_file_that_is_no_safetensors_file(tmp_path, content, fragments):
    tiny.make(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors", *fragments)


def damaged_header(change) -> bytes:
    """A sound file whose header entry for the final norm was changed by ``change``."""
    content = tiny.safetensors_bytes(tiny.weights())
    n = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + n])
    change(header["model.norm.weight"], header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + n :]


@pytest.mark.parametrize(
    "change, fragments",
    [
        (lambda e, h: e.update(shape=[257]), ["model.norm.weight", "BF16 [257] needs 514 bytes", "gives it 512"]),
        (lambda e, h: e.update(shape=[-256]), ["model.norm.weight is malformed"]),
        (lambda e, h: e.update(dtype="F3"), ["model.norm.weight", "type F3"]),
        (lambda e, h: e.pop("dtype"), ["model.norm.weight is malformed"]),
        (lambda e, h: e.update(data_offsets=[0, 512]), ["starts at byte"]),
        (lambda e, h: e.update(data_offsets=[2**62, 2**62 + 512]), ["starts at byte"]),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path, change, fragments):
    tiny.make(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damaged_header(change))
    refused(tmp_path, "model.safetensors", *fragments)


def test_folders_that_hold_something_else(tmp_path):
    """C17 and its kin: what is there instead is named, and nothing is unpickled."""
    folder = tiny.make(tmp_path / "bin")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(os.urandom(10))
    refused(folder, "no .safetensors file here", "pytorch_model.bin", ".bin is not read")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "no model.safetensors and no model.safetensors.index.json", "incomplete")
    (folder / "odd.safetensors").write_bytes(b"")
    refused(folder, "odd.safetensors has another name")
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    refused(folder, "LoRA adapter", "merge")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    snapshot = tiny.as_hub_cache(tiny.make(tmp_path / "S"), tmp_path / "cache")
    refused(snapshot.parent.parent, "hub cache entry", str(snapshot))


def test_part_of_a_set_of_shards_without_an_index(tmp_path):
    tiny.make(tmp_path, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    opened(tmp_path)[0].close()
    (tmp_path / tiny.shard_name(0, 3)).unlink()
    refused(tmp_path, "no model.safetensors.index.json", "not one complete set")


def test_two_sets_of_weights_are_refused(tmp_path):
    """A model saved again into the folder of an older one: which of the two is meant cannot be told."""
    tiny.make(tmp_path)
    tiny.make(tmp_path, shards=2)
    refused(tmp_path, "two sets of weights, model.safetensors and model-00001-of-00002.safetensors", "remove")
    for k in range(2):  # an index left behind by shards that were merged is no second set
        (tmp_path / tiny.shard_name(k, 2)).unlink()
    checkpoint, notes = opened(tmp_path)
    checkpoint.close()
    assert notes == ["ignored model.safetensors.index.json: its files are not here, model.safetensors is"]
    tiny.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": dict.fromkeys(tiny.weights(), "model.safetensors")})
    checkpoint, notes = opened(tmp_path)  # an index of one file is a whole index
    checkpoint.close()
    assert notes == []


def test_weight_files_that_are_not_used_are_told(tmp_path):
    tiny.make(tmp_path)
    tiny.write_safetensors(tmp_path / "consolidated.safetensors", {})
    checkpoint, notes = opened(tmp_path)
    checkpoint.close()
    assert notes == ["ignored consolidated.safetensors: not part of the model's weight files"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_transformers_writes_today_opens_without_a_note(tmp_path, tied):
    """The real writer, with its own spelling of the config, in shards when tied; values equal those of its own model."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = transformers.Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        tie_word_embeddings=tied, rope_theta=1e6, bos_token_id=258, eos_token_id=260)  # fmt: skip
    model = transformers.Qwen2ForCausalLM(sizes).to(torch.bfloat16)
    tiny.make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="1MB" if tied else "1GB")
    checkpoint, notes = opened(tmp_path)
    with checkpoint:
        assert notes == [] and checkpoint.dims.rope_theta == 1e6 and checkpoint.dims.tied is tied
        assert checkpoint.torch_dtype == "bfloat16" and (len(checkpoint.weight_files) > 1) is tied
        for spec in checkpoint.specs:
            assert np.array_equal(checkpoint.read(spec.name), model.state_dict()[spec.name].float().numpy())


def test_opening_imports_neither_torch_nor_the_hub_library(tmp_path):
    tiny.make(tmp_path)
    code = (
        "import sys\nfrom nanoqwen.checkpoint import open_checkpoint\nimport nanoqwen.pack\nopen_checkpoint(sys.argv[1]).close()\n"
        "print([m for m in ('torch', 'huggingface_hub', 'safetensors', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"
