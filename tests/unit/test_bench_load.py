"""The loading benchmark: the file it writes, the processes it starts, what it makes of their seconds."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from nanoqwen.bench import load
from nanoqwen.errors import DeviceError
from nanoqwen.packfile import open_pack
from nanoqwen.synthetic_pack import planned


def test_the_file_has_the_models_shapes_and_is_whole(tmp_path):
    nbytes = load.write_file(tmp_path / "model.nanoqwen", "demo")
    plan = planned("synthetic:demo")
    with open_pack(tmp_path / "model.nanoqwen") as pack:
        assert pack.verify() == [] and pack.dims == plan.dims and pack.header.file_bytes == plan.header.file_bytes
        assert nbytes == load.tensor_bytes(pack) > 0.9 * pack.header.file_bytes
        words, _ = pack.int4("model.layers.0.mlp.gate_proj.weight")
        assert np.array_equal(words[: load.BLOCK_ROWS], words[load.BLOCK_ROWS : 2 * load.BLOCK_ROWS])
        assert np.isfinite(pack.fp16("lm_head.weight")).all()


def child(tmp_path, body: str) -> list[str]:
    (tmp_path / "child.py").write_text("import json, os, sys\n" + body, encoding="utf-8")
    return [sys.executable, str(tmp_path / "child.py")]


def test_cold_starts_have_caches_of_their_own_and_warm_ones_share_the_last(tmp_path):
    body = "print('a note')\nprint(json.dumps([sys.argv[1]] + [os.environ[n] for n in ('NANOQWEN_CACHE', 'CUPY_CACHE_DIR', 'CUDA_CACHE_PATH')]))\n"
    found = list(load.starts(tmp_path / "m", tmp_path, 2, 3, child(tmp_path, body)))
    assert [kind for kind, _ in found] == ["cold", "cold", "warm", "warm", "warm"]
    caches = [tuple(answer[1:]) for _, answer in found]
    assert len(set(caches)) == 2 and caches[1:] == [caches[1]] * 4 and all(len(set(c)) == 3 for c in caches)
    assert {answer[0] for _, answer in found} == {str(tmp_path / "m")}


def test_a_start_that_fails_is_one_line(tmp_path):
    with pytest.raises(DeviceError, match="a start failed: .*out of memory") as caught:
        next(load.starts(tmp_path, tmp_path, 1, 0, child(tmp_path, "raise SystemExit('out of memory')")))
    assert "\n" not in str(caught.value)


def test_the_summary():
    run = dict.fromkeys(load.STEPS, 1.0)
    samples = {"cold": [{**run, "compile_s": 9.0}], "warm": [run, {**run, "upload_s": 0.5}, {**run, "upload_s": 0.25}]}
    found = load.summarise(samples, 5_000_000_000)
    assert found["cold"]["compile_s"] == 9 and found["warm"]["upload_s"] == 0.5 and found["upload_gb_s"] == 10
    assert found["all_s"] == {"cold": 14, "warm": 5.5} and found["tensor_gb"] == 5


def test_without_a_card_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: "no NVIDIA GPU is visible")
    assert load.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no NVIDIA GPU is visible" in said
