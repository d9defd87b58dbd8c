"""`nanoqwen inspect`: at once, without PyTorch, for files of any size; and never fooled by a damaged or foreign file."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import tiny
from clikit import make_pack, nanoqwen, subprocess_env

from nanoqwen.config import Dims
from nanoqwen.model import schema
from nanoqwen.packfile import open_pack
from nanoqwen.packwriter import plan

HEAVY = ("torch", "transformers", "tokenizers", "jinja2", "tqdm", "cupy", "huggingface_hub")


# ------------------------------------------------------------------------------------------------------------ content


def test_page_says_what_a_reader_asks(run, plain):
    page = run("inspect", plain)
    assert page.status == 0 and page.err == ""
    for words in (
        str(plain), "version 1, layout 1 (ValueShuffle)", "4 query heads on 2 KV heads of 64 (2:1)", "theta 1,000,000", "eps 1e-06", "8,192 tokens",
        "INT4, group 128", "untied (lm_head.weight)", "512 embedding rows, 261 tokenizer entries, 251 rows of padding",
        "260 <|im_end|>", "258 <|endoftext|>", "from tokenizer_config.json", "Tensors (27)", "2 x  [512, 256]  INT4  from BF16",
    ):
        assert words in page.out
    assert "model.layers.0." not in page.out
    everything = run("inspect", plain, "--tensors").out
    assert everything.count("model.layers.") == 24


def test_json_is_the_same_as_data(run, plain):
    facts = json.loads(run("inspect", plain, "--json").out)
    assert facts["vocabulary"] == {"rows": 512, "tokenizer_entries": 261, "padding": 251}
    assert [stop["id"] for stop in facts["stop_ids"]] == [260, 258]
    assert "generation_config.json" in facts["stop_ids"][0]["from"]
    assert facts["dims"]["hidden"] == 256 and facts["quantise"]["group"] == 128
    assert len(facts["tensors"]) == 27
    stored = facts["storage_bytes"]
    assert stored["int4_codes"] == sum(t["bytes"] for t in facts["tensors"] if t["storage"] == "INT4")
    with open_pack(plain) as pack:
        assert facts["bytes"] == pack.header.file_bytes == plain.stat().st_size


def test_tied_head_smaller_group_and_defaults_are_shown(run, tmp_path):
    sizes = tiny.Sizes(hidden=192, heads=3, kv_heads=1, tied=True)
    generation = tiny.generation_config(repetition_penalty=1.1, top_k=20, temperature=0.7)
    path = make_pack(tmp_path, "tied", sizes, config=tiny.config(sizes, rms_norm_eps=tiny.ABSENT), generation_config=generation)
    page = run("inspect", path).out
    assert "tied to embeddings" in page
    assert "INT4, group 64" in page and "Notes from packing" in page
    assert "repetition_penalty 1.1" in page and "not applied" in page
    assert "rms_norm_eps: 1e-06" in page


def test_source_types_are_kept(run, tmp_path):
    tensors = tiny.weights()
    tensors["model.norm.weight"].dtype, tensors["lm_head.weight"].dtype = "F32", "F16"
    facts = json.loads(run("inspect", make_pack(tmp_path, "mixed", tensors=tensors), "--json").out)
    types = {t["name"]: t["source_dtype"] for t in facts["tensors"]}
    assert (types["model.norm.weight"], types["lm_head.weight"], types["model.embed_tokens.weight"]) == ("F32", "F16", "BF16")


# -------------------------------------------------------------------------------------------------------------- speed


def test_imports_nothing_heavy(plain):
    script = (
        "import sys; from nanoqwen.cli import main; status = main(['inspect', sys.argv[1], '--json']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(plain)], capture_output=True, encoding="utf-8", env=subprocess_env(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.fixture
def seven_b(tmp_path):
    """A file with the header, table and length of the 7B (5.5 GB), and a payload that is one hole."""
    dims = Dims.qwen2_5_coder_7b()
    specs = schema(dims)
    header, entries, meta = plan(dims, 128, specs, {"tokenizer_entries": 151665}, b"{}", {spec.name: "BF16" for spec in specs})
    table = b"".join(entry.encode() for entry in entries)
    path = tmp_path / "7b.nanoqwen"
    with open(path, "wb") as file:
        file.write(replace(header, crcs=(zlib.crc32(table), zlib.crc32(meta), zlib.crc32(b"{}"))).encode())
        for (offset, _), part in zip((header.table, header.meta, header.tokenizer), (table, meta, b"{}")):
            file.seek(offset)
            file.write(part)
        file.truncate(header.file_bytes)
    return path


def inspected(*argv, runs: int = 3) -> tuple[subprocess.CompletedProcess, float]:
    """(the last run, processor seconds of the shortest). Not wall time: other processes on the machine must not decide a test."""
    seconds = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = nanoqwen("inspect", *argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return done, min(seconds)


def test_a_7b_file_is_inspected_at_once(seven_b, plain):
    """In the time of a file a thousandth of its size, whatever that is on this machine; to read the payload takes more than that leaves room for."""
    assert seven_b.stat().st_size > 4.5e9 > 1000 * plain.stat().st_size
    (done, seconds), (small, little) = inspected(seven_b), inspected(plain)
    assert (done.returncode, small.returncode) == (0, 0), done.stderr + small.stderr
    page = " ".join(done.stdout.decode().split())
    assert "28 query heads on 4 KV heads of 128 (7:1)" in page and "152,064 embedding rows, 151,665 tokenizer entries" in page
    assert "mlp.up_proj.weight 28 x [18944, 3584] INT4" in page
    assert seconds < 2 * little
    read, reading = inspected(seven_b, "--verify", runs=1)
    assert read.returncode == 2 and reading > 2 * little, "the payload, a hole, is not what the checksums say"


# ------------------------------------------------------------------------------------------------- damaged and foreign


@pytest.mark.parametrize("keep", [0, 7, 64, 0.5, -1])
@pytest.mark.parametrize("command", [["inspect"], ["validate"], ["generate", "--prompt", "1"]])
def test_a_truncated_file_is_refused_at_open(run, plain, tmp_path, command, keep):  # C08
    raw = plain.read_bytes()
    size = int(len(raw) * keep) if isinstance(keep, float) else keep % len(raw)
    cut = tmp_path / "cut.nanoqwen"
    cut.write_bytes(raw[:size])
    line = run(command[0], cut, *command[1:]).error_line()
    assert "cut.nanoqwen" in line
    assert "empty" in line if size == 0 else f"{size:,} bytes" in line or f"{size} bytes" in line


@pytest.mark.parametrize(
    "content, words",
    [
        (b"GGUF" + struct.pack("<I", 3) + bytes(100), "GGUF"),
        (tiny.safetensors_bytes({"x": tiny.Stored("F32", tiny.np.zeros(4, "float32"))}), "safetensors"),
        (b"PK\x03\x04" + bytes(300), "zip"),
        (b'{"architectures": []}', "JSON"),
        (b"hello", "not a .nanoqwen file"),
    ],
)
@pytest.mark.parametrize("command", [["inspect"], ["generate", "--prompt", "1"]])
def test_another_format_is_recognised(run, tmp_path, command, content, words):  # C15
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    line = run(command[0], path, *command[1:]).error_line()
    assert words in line and "nanoqwen pack" in line


def test_a_folder_is_refused_with_the_next_step(run, tmp_path):  # C15
    assert "nanoqwen pack" in run("inspect", tmp_path).error_line()


def flipped(source, target, offset: int):
    raw = bytearray(source.read_bytes())
    raw[offset] ^= 0x10
    target.write_bytes(raw)
    return target


def sections(path) -> dict[str, int]:
    """A byte inside each section of a pack file."""
    with open_pack(path) as pack:
        entry = pack.tensors["model.layers.1.mlp.up_proj.weight"]
        head = pack.header
        return {
            "header": 40, "tensor table": head.table[0] + 200, "metadata": head.meta[0] + 5, "tokenizer": head.tokenizer[0] + 1000,
            "packed codes": entry.offset + 77, "scales": entry.scale_offset + 9,
        }


@pytest.mark.parametrize("section", ["header", "tensor table", "metadata", "tokenizer"])
@pytest.mark.parametrize("command", [["inspect"], ["validate"], ["generate", "--prompt", "1"]])
def test_damage_before_the_payload_is_refused_at_open(run, plain, tmp_path, command, section):  # C10
    path = flipped(plain, tmp_path / "bad.nanoqwen", sections(plain)[section])
    assert section in run(command[0], path, *command[1:]).error_line()


@pytest.mark.parametrize("section", ["packed codes", "scales"])
def test_damage_in_a_payload_is_found_and_named(run, plain, tmp_path, section):  # C10
    path = flipped(plain, tmp_path / "bad.nanoqwen", sections(plain)[section])
    named = f"model.layers.1.mlp.up_proj.weight: {section}"
    page = run("inspect", path, "--verify")
    assert page.status == 2
    assert named in page.out and "1 damaged section" in page.out
    facts = run("inspect", path, "--verify", "--json")
    assert facts.status == 2 and json.loads(facts.out)["damaged"] == [named]
    assert run("inspect", path).status == 0  # without --verify the payload is not read

    validated = run("validate", path)
    assert validated.status == 1
    assert named in validated.out and "unit: not run" in validated.out and "graph: not run" in validated.out


def test_verify_says_that_all_is_good(run, plain):
    page = run("inspect", plain, "--verify", "--no-progress")
    assert page.status == 0 and page.err == ""
    assert "Checksums: all good" in page.out
    assert "verify" in run("inspect", plain, "--verify", "--progress").err


# -------------------------------------------------------------------------------------------------------------- paths


def test_spaces_and_letters_in_paths(run, tmp_path):  # C11
    folder = tmp_path / "my models"
    source = tiny.make(folder / "模型 ü")
    out = tmp_path / "out dir" / "é.nanoqwen"
    out.parent.mkdir()
    packed = run("pack", source, "-o", out)
    assert packed.status == 0 and packed.out.startswith(f"{out}: ")
    assert run("inspect", out).out.splitlines()[0] == str(out)
    assert json.loads(run("inspect", out, "--json").out)["path"] == str(out)
    missing = folder / "模型 ü.nanoqwen"
    assert str(missing) in run("inspect", missing).error_line()


def test_a_read_only_folder_is_enough(run, plain, tmp_path):  # C07
    folder = tmp_path / "read only"
    folder.mkdir()
    path = shutil.copy(plain, folder / "m.nanoqwen")
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        for argv in (["inspect", path, "--verify"], ["generate", path, "--prompt", "1", "--max-tokens", "1"], ["validate", path, "--tier", "unit"]):
            assert run(*argv).status == 0
        assert [p.name for p in folder.iterdir()] == ["m.nanoqwen"]
    finally:
        folder.chmod(0o755)
