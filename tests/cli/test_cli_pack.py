"""`nanoqwen pack`: the closing line, the bar, the notes, and refusals that leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import pytest
import tiny

from nanoqwen.packfile import open_pack


def test_the_closing_line(run, tmp_path):
    out = tmp_path / "m.nanoqwen"
    outcome = run("pack", tiny.make(tmp_path / "src"), "-o", out)
    assert outcome.status == 0
    assert outcome.err == "", "no bar and no notes when stderr is not a terminal and nothing is to be told"
    assert outcome.out.startswith(f"{out}: {out.stat().st_size:,} bytes (")
    assert "group 128" in outcome.out and "MB/s" in outcome.out


def test_json(run, tmp_path):
    out = tmp_path / "m.nanoqwen"
    answer = json.loads(run("pack", tiny.make(tmp_path / "src"), "-o", out, "--json").out)
    assert answer["path"] == str(out) and answer["bytes"] == out.stat().st_size and answer["group"] == 128


def test_progress_on_request(run, tmp_path):
    outcome = run("pack", tiny.make(tmp_path / "src"), "-o", tmp_path / "m.nanoqwen", "--progress")
    assert "pack: 100%" in outcome.err and "pack:" not in outcome.out


def test_notes_are_told(run, tmp_path):  # A07, A13
    tensors = tiny.weights(tiny.TIED)
    tensors["lm_head.weight"] = tiny.Stored("BF16", tensors["model.embed_tokens.weight"].values)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tiny.Stored("F32", tiny.np.ones(32, "float32"))
    outcome = run("pack", tiny.make(tmp_path / "src", tiny.TIED, tensors=tensors), "-o", tmp_path / "m.nanoqwen")
    assert outcome.status == 0
    assert "lm_head.weight" in outcome.err and "inv_freq" in outcome.err
    assert all(line.startswith("nanoqwen: ") for line in outcome.err.splitlines())


def test_group_size(run, tmp_path):
    source, out = tiny.make(tmp_path / "src"), tmp_path / "m.nanoqwen"
    assert run("pack", source, "-o", out, "--group-size", "64").status == 0
    with open_pack(out) as pack:
        assert pack.group_size == 64
    assert "48" in run("pack", source, "-o", out, "--group-size", "48").error_line()


def missing_shard(folder):
    tiny.make(folder, shards=3)
    (folder / tiny.shard_name(1, 3)).unlink()


def nan_weight(folder):
    tensors = tiny.weights()
    tensors["model.layers.1.mlp.up_proj.weight"].values[3, 7] = float("nan")
    tiny.make(folder, tensors=tensors)


def no_config(folder):
    tiny.make(folder)
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (missing_shard, [tiny.shard_name(1, 3)]),
        (nan_weight, ["model.layers.1.mlp.up_proj.weight", "[3, 7]"]),
        (no_config, ["config.json"]),
        (lambda folder: tiny.make(folder, config=tiny.config(architectures=["LlamaForCausalLM"])), ["LlamaForCausalLM", "Qwen2ForCausalLM"]),
        (lambda folder: None, ["src"]),
    ],
)
def test_a_refusal_names_the_cause_and_changes_nothing(run, tmp_path, spoil, words):
    spoil(tmp_path / "src")
    out = tmp_path / "out" / "m.nanoqwen"
    out.parent.mkdir()
    out.write_bytes(b"what was there before")
    line = run("pack", tmp_path / "src", "-o", out).error_line()
    for word in words:
        assert word in line
    assert out.read_bytes() == b"what was there before"
    assert [path.name for path in out.parent.iterdir()] == ["m.nanoqwen"]


def test_a_full_disk_is_seen_before_the_first_byte(run, tmp_path, monkeypatch):  # C04
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20, 1 << 20, 1000))
    line = run("pack", tiny.make(tmp_path / "src"), "-o", tmp_path / "m.nanoqwen").error_line()
    assert "no space" in line and "1,000" in line
    assert not list(tmp_path.glob("*m.nanoqwen*"))


def test_ctrl_c_leaves_nothing_behind(run, tmp_path, monkeypatch):
    from nanoqwen.packwriter import PackWriter

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(PackWriter, "write_int4", interrupt)
    outcome = run("pack", tiny.make(tmp_path / "src"), "-o", tmp_path / "m.nanoqwen")
    assert (outcome.status, outcome.err) == (130, "nanoqwen: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
