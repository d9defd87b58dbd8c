"""Export: the same weights in another order of bits, a folder that other programs load, all or nothing.

The layout is checked three times over: against its description with plain numpy, against the functions of the library that defined it
(compressed-tensors, where it is installed), and by the logits of transformers on the exported folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tiny

import nanoqwen.export as exporting
from nanoqwen import int4
from nanoqwen.errors import InputError
from nanoqwen.export import export, folder, pieces_of
from nanoqwen.export.shards import index_json, plan_shards
from nanoqwen.export.words import plain_order
from nanoqwen.model import schema
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack

ROOT = Path(__file__).resolve().parents[2]
UP = "model.layers.1.mlp.up_proj.weight"

MODELS = {
    "plain": (tiny.PLAIN, {}),
    "tied": (tiny.TIED, {"group": 64}),
    "gqa7": (tiny.GQA7, {}),
    "group 64": (tiny.Sizes(hidden=192, intermediate=320, heads=3, kv_heads=1, tied=True), {}),
    "group 32": (tiny.Sizes(vocab=263), {"group": 32}),
    "wide heads": (tiny.Sizes(heads=7, kv_heads=1, tied=True, explicit_head_dim=64), {}),
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory) -> dict[str, Path]:
    """Packed models by name, norms not all one; tests only read them."""
    root = tmp_path_factory.mktemp("packs")
    for k, (name, (sizes, options)) in enumerate(MODELS.items()):
        tensors = tiny.weights(sizes, seed=k)
        for key in tensors:
            if key.endswith("norm.weight"):
                tensors[key].values[...] = np.random.default_rng(k).uniform(0.5, 1.5, sizes.hidden)
        source = tiny.make(root / f"{name}-source", sizes, tensors=tensors, config=tiny.config(sizes, rope_theta=10000.0 + k))
        pack(source, root / f"{name}.nanoqwen", **options)
    return {name: root / f"{name}.nanoqwen" for name in MODELS}


@pytest.fixture(scope="module")
def folders(packs, tmp_path_factory) -> dict[str, Path]:
    """The same models exported; "plain" in several files."""
    root = tmp_path_factory.mktemp("exports")
    for name, path in packs.items():
        export(path, root / name, shard_bytes=300_000 if name == "plain" else exporting.SHARD_BYTES)
    return {name: root / name for name in packs}


def stored(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, by the safetensors library."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    return found


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def temporaries(parent: Path) -> list[str]:
    return sorted(p.name for p in parent.iterdir() if p.name.endswith(".tmp"))


def refused(source, out: Path, *fragments: str) -> str:
    """The export fails in one line with every fragment, and leaves no temporary. Returns the line."""
    with pytest.raises(InputError) as caught:
        export(source, out)
    line = str(caught.value)
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line, line
    assert temporaries(out.parent) == []
    return line


# ------------------------------------------------------------------------------------------------------ the weights


def unpacked(words: np.ndarray) -> np.ndarray:
    """Codes of pack-quantized words as the form is documented: weight i of a word in bits 4 i to 4 i + 3, as code + 8."""
    rows, n = words.shape
    bits = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return (bits.astype(np.int8) - 8).reshape(rows, n * 8)


def test_every_code_in_every_place():
    codes = np.stack([np.roll(np.arange(-8, 8, dtype=np.int8), k) for k in range(16)])
    assert np.array_equal(unpacked(plain_order(int4.pack_codes(codes))), codes)
    ones = np.eye(8, dtype=np.int8)  # by hand: 8 is an empty place, 9 is the code 1
    assert [f"{int(word):08x}" for word in plain_order(int4.pack_codes(ones)).view(np.uint32)[:, 0]] == [
        "88888889", "88888898", "88888988", "88889888", "88898888", "88988888", "89888888", "98888888",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_codes_scales_and_the_rest_are_the_pack_files(packs, folders, name):
    tensors = stored(folders[name])
    with open_pack(packs[name]) as source:
        for spec in schema(source.dims):
            if not spec.int4:
                values = tensors.pop(spec.name)
                assert values.dtype == np.float16 and np.array_equal(values.view(np.uint16), source.fp16(spec.name).view(np.uint16))
                continue
            words, scales = source.int4(spec.name)
            theirs = tensors.pop(spec.name + "_packed")
            assert theirs.dtype == np.int32 and theirs.shape == (spec.rows, spec.cols // 8)
            assert np.array_equal(unpacked(theirs), int4.unpack_codes(words))
            steps = tensors.pop(spec.name + "_scale")
            assert steps.dtype == np.float16 and np.array_equal(steps.view(np.uint16), scales.view(np.uint16))
            shape = tensors.pop(spec.name + "_shape")
            assert shape.dtype == np.int64 and shape.tolist() == [spec.rows, spec.cols]
    assert tensors == {}, "a tied head has no tensor of its own"


# -------------------------------------------------------------------------------------------------------- the files


def test_one_file_or_shards_with_an_index(packs, folders):
    assert sorted(p.name for p in folders["tied"].iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    files = sorted(p.name for p in folders["plain"].glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = read(folders["plain"] / "model.safetensors.index.json")
    tensors = stored(folders["plain"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors) and set(index["weight_map"].values()) == set(files)
    for file in files:
        assert all(index["weight_map"][name] == file for name in safetensors.numpy.load_file(folders["plain"] / file))
    with open_pack(packs["plain"]) as source:
        shards = plan_shards(pieces_of(source), 300_000)
    for shard in shards:
        assert sum(p.nbytes for p in shard.pieces) <= 300_000 or len(shard.pieces) == 1
        assert shard.file_bytes == (folders["plain"] / shard.name).stat().st_size
        end = 8 + len(shard.header()[8:])
        for piece in shard.pieces:  # each number lies at a multiple of its size
            assert end % {"I64": 8, "I32": 4, "F16": 2}[piece.dtype] == 0
            end += piece.nbytes
    assert json.loads(index_json(shards)) == index


def test_the_config_says_what_the_source_said(packs, folders):
    for k, (name, (sizes, _)) in enumerate(MODELS.items()):
        config, source = read(folders[name] / "config.json"), tiny.config(sizes, rope_theta=10000.0 + k)
        for key in set(source) - {"torch_dtype", "sliding_window", "bos_token_id", "eos_token_id"}:
            assert config[key] == source[key], key
        assert config["torch_dtype"] == "float16" and config["eos_token_id"] == [tiny.IM_END, tiny.ENDOFTEXT]
        scheme = config["quantization_config"]
        with open_pack(packs[name]) as source:
            assert scheme["config_groups"]["group_0"]["weights"]["group_size"] == source.group_size
        assert (scheme["quant_method"], scheme["format"], scheme["ignore"]) == ("compressed-tensors", "pack-quantized", ["lm_head"])


def test_head_dim_is_written_where_it_does_not_follow(packs, folders, tmp_path):
    assert read(folders["wide heads"] / "config.json")["head_dim"] == 64
    assert "head_dim" not in read(folders["plain"] / "config.json")
    assert any("head_dim" in note for note in export(packs["wide heads"], tmp_path / "out").notes)


def test_tokenizer_and_template(packs, folders):
    source = packs["plain"].parent / "plain-source"
    assert (folders["plain"] / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = read(folders["plain"] / "tokenizer_config.json")
    for key, value in tiny.tokenizer_config().items():
        assert config[key] == value, key
    assert {int(i): t["content"] for i, t in config["added_tokens_decoder"].items()} == {
        tiny.ENDOFTEXT: "<|endoftext|>", tiny.IM_START: "<|im_start|>", tiny.IM_END: "<|im_end|>",
    }  # fmt: skip
    assert read(folders["plain"] / "generation_config.json") == tiny.generation_config()


def test_generation_defaults_are_kept_and_every_end_id_is_named(tmp_path):
    """The checkpoint names one end id, nanoqwen stops at two (llama.cpp#9606): the engine must too, and the user is told."""
    generation = tiny.generation_config(eos_token_id=tiny.ENDOFTEXT, repetition_penalty=1.05, bos_token_id=tiny.ENDOFTEXT, pad_token_id=tiny.ENDOFTEXT)
    config = tiny.config(eos_token_id=tiny.ENDOFTEXT)
    pack(tiny.make(tmp_path / "src", generation_config=generation, config=config), tmp_path / "m.nanoqwen")
    report = export(tmp_path / "m.nanoqwen", tmp_path / "out")
    assert read(tmp_path / "out" / "generation_config.json") == generation | {"eos_token_id": [tiny.ENDOFTEXT, tiny.IM_END]}
    exported = read(tmp_path / "out" / "config.json")
    assert (exported["bos_token_id"], exported["pad_token_id"]) == (tiny.ENDOFTEXT, tiny.ENDOFTEXT)
    assert [note for note in report.notes if str(tiny.IM_END) in note]


def test_without_template_and_generation_config(tmp_path):
    parts = {"generation_config": tiny.ABSENT, "tokenizer_config": tiny.tokenizer_config(chat_template=tiny.ABSENT)}
    pack(tiny.make(tmp_path / "src", **parts), tmp_path / "m.nanoqwen")
    report = export(tmp_path / "m.nanoqwen", tmp_path / "out")
    assert "chat_template" not in read(tmp_path / "out" / "tokenizer_config.json")
    assert any("no chat template" in note for note in report.notes)
    assert set(read(tmp_path / "out" / "generation_config.json")["eos_token_id"]) == {tiny.IM_END, tiny.ENDOFTEXT}


def test_same_file_same_bytes(packs, folders, tmp_path):
    report = export(packs["plain"], tmp_path / "elsewhere", shard_bytes=300_000)
    digests = [{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in where.iterdir()} for where in (folders["plain"], tmp_path / "elsewhere")]
    assert digests[0] == digests[1] and sorted(digests[0]) == report.files
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "elsewhere").iterdir())


def test_progress_reaches_the_total(packs, tmp_path):
    calls: list[tuple[int, int, str]] = []
    export(packs["plain"], tmp_path / "out", progress=lambda *call: calls.append(call))
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert done == sorted(done) and totals == {done[-1]} == {(tmp_path / "out" / "model.safetensors").stat().st_size}


def test_memory_is_a_few_blocks(tmp_path):
    sizes = tiny.Sizes(hidden=1024, intermediate=4096, layers=1, heads=8, kv_heads=2, vocab=40_000, tied=True)
    pack(tiny.make(tmp_path / "src", sizes), tmp_path / "m.nanoqwen")
    with open_pack(tmp_path / "m.nanoqwen") as source:
        from nanoqwen import weights  # noqa: F401  its import is not what is measured

        tracemalloc.start()
        export(source, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 80e6
    assert peak < 8 * exporting.BLOCK_BYTES, peak


# --------------------------------------------------------------------------------------------------- all or nothing


def test_a_folder_that_holds_something_is_refused_and_untouched(packs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    refused(packs["plain"], tmp_path / "out", "not empty", "mine.txt")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_filled_also_through_a_link(packs, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(packs["plain"], tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()


def test_targets_that_cannot_be(packs, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    refused(packs["plain"], tmp_path / "file", "not a folder")
    with pytest.raises(InputError, match="does not exist"):
        export(packs["plain"], tmp_path / "absent" / "out")
    with pytest.raises(InputError, match="no such file"):
        export(tmp_path / "absent.nanoqwen", tmp_path / "out")


def test_a_flipped_bit_is_found_and_nothing_is_left(packs, tmp_path):
    raw = bytearray(packs["plain"].read_bytes())
    with open_pack(packs["plain"]) as source:
        entry = source.tensors[UP]
    for offset, label in ((entry.offset + 100, "packed codes"), (entry.scale_offset + 3, "scales")):
        spoilt = bytearray(raw)
        spoilt[offset] ^= 1
        (tmp_path / "m.nanoqwen").write_bytes(spoilt)
        refused(tmp_path / "m.nanoqwen", tmp_path / "out", UP, label, "damaged")
        assert not (tmp_path / "out").exists()


def test_a_full_disk_is_seen_first_and_told_when_it_fills_up(packs, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20, 1 << 20, 1000))
        refused(packs["plain"], tmp_path / "out", "no space", "1,000")

    def full(file, shard, count):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "write_shard", full)
    refused(packs["plain"], tmp_path / "out", "no space left")


def test_a_folder_that_appears_meanwhile_is_not_replaced(packs, tmp_path):
    def make_it(done, total, name):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(InputError, match="meantime"):
        export(packs["plain"], tmp_path / "out", progress=make_it)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["theirs"] and temporaries(tmp_path) == []


def test_a_kill_leaves_nothing_and_the_next_export_tidies_up(packs, tmp_path):
    code = (
        "import sys, time\nfrom nanoqwen.export import export\n"
        "def slow(done, total, name):\n    print(done, flush=True)\n    time.sleep(60)\n"
        "export(sys.argv[1], sys.argv[2], progress=slow)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(packs["plain"]), str(tmp_path / "out")], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout.readline()
    assert len(temporaries(tmp_path)) == 1 and not (tmp_path / "out").exists()
    export(packs["plain"], tmp_path / "other")
    with folder.NewFolder(tmp_path / "out", 0):  # a second export of the same name leaves the live one alone
        assert len(temporaries(tmp_path)) == 2
    shutil.rmtree(tmp_path / "out")
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 10
    while len(temporaries(tmp_path)) != 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    export(packs["plain"], tmp_path / "out")
    assert temporaries(tmp_path) == [] and (tmp_path / "out" / "config.json").is_file()


# ------------------------------------------------------------------------------------------- loaded by other programs


def exported_demo(tmp_path: Path) -> tuple[Path, Path]:
    from nanoqwen.demo import checkpoint_dir

    pack(checkpoint_dir(), tmp_path / "demo.nanoqwen")
    export(tmp_path / "demo.nanoqwen", tmp_path / "demo")
    return tmp_path / "demo.nanoqwen", tmp_path / "demo"


@pytest.mark.parametrize("name", ["plain", "demo"])
def test_the_tokenizer_loads_in_transformers(packs, folders, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    from nanoqwen.tokenizer import Tokenizer

    source, out = (packs[name], folders[name]) if name in packs else exported_demo(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    with open_pack(source) as opened:
        ours = Tokenizer.from_pack(opened)
        end = next(t for t in opened.meta["added_tokens"] if t["content"] == "<|im_end|>")["id"]
    for text in ("def f(x):\n    return 1234 -> (x):\n", "e\u0301 hello ", "a\r\nb  c"):
        assert theirs(text)["input_ids"] == ours.encode(text)
    messages = [{"role": "user", "content": "Sort a list."}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.render_chat(messages) and theirs(rendered)["input_ids"] == ours.encode_chat(messages)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (end, None)


def library():
    """(compressed_tensors, transformers, torch), or the test is skipped."""
    found = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return found, pytest.importorskip("transformers"), pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["plain", "group 64"])
def test_the_library_packs_the_same_words(packs, folders, name):
    _, _, torch = library()
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized", reason="an older compressed-tensors keeps them elsewhere")
    tensors = stored(folders[name])
    with open_pack(packs[name]) as source:
        for spec in (s for s in schema(source.dims) if s.int4):
            codes = torch.from_numpy(int4.unpack_codes(source.int4(spec.name)[0]))
            words = torch.from_numpy(tensors[spec.name + "_packed"])
            assert torch.equal(packing.pack_to_int32(codes, 4), words)
            assert torch.equal(packing.unpack_from_int32(words, 4, torch.Size(tensors[spec.name + "_shape"].tolist())), codes)


def loaded(transformers, path: Path, dtype):
    """The exported folder in transformers, weights decompressed by one step; nothing missing, nothing left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    assert not [key for key, value in info.items() if value], info
    assert model.config.quantization_config.quantization_config.format == "pack-quantized"
    return model.eval()


@pytest.mark.parametrize("name", [*MODELS, "demo"])
def test_transformers_computes_the_same_model(packs, folders, tmp_path, name):
    """In FP32 the weights are equal to the bit and the logits to FP32's rounding.

    In FP16 a weight is code x scale rounded once to FP16, 11 significant bits; the logits then differ by what FP16
    arithmetic costs, measured at up to 0.31% of the largest (of these models).
    """
    _, transformers, torch = library()
    from nanoqwen.reference import ReferenceModel

    path, out = (packs[name], folders[name]) if name in packs else exported_demo(tmp_path)
    with open_pack(path) as source:
        ids = [pow(7, i, 9973) % min(2000, source.dims.vocab - 2) for i in range(49)]
        want = ReferenceModel.from_pack(source, kv_dtype=torch.float32).forward(torch.tensor(ids), 0)
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 5e-3)):
            model = loaded(transformers, out, dtype)
            with torch.inference_mode():
                got = model(torch.tensor([ids]), use_cache=False).logits[0].float()
            assert torch.isfinite(got).all()
            assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            for spec in schema(source.dims):
                ours = int4.dequantize(*source.int4(spec.name), source.group_size) if spec.int4 else source.fp16(spec.name)
                theirs = tensors[spec.name].detach()
                assert theirs.dtype == dtype and torch.equal(theirs, torch.from_numpy(ours.copy()).to(dtype)), spec.name
