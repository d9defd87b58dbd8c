"""The GGUF file of random weights: its tensors, its size, its bytes as llama.cpp reads them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from nanoqwen.bench import gguf as reader
from nanoqwen.bench import synthetic_gguf
from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.model import schema

SEVEN = Dims.qwen2_5_coder_7b()
BYTES = {"Q4_K": 144 / 256, "Q6_K": 210 / 256, "F32": 4}
SMALL = dataclasses.replace(SEVEN, num_layers=3, hidden=512, intermediate=1024, num_heads=4, num_kv_heads=2, vocab=600, max_position=256)


def test_the_mixture_of_the_7b_has_the_size_that_its_name_stands_for():
    tensors = list(synthetic_gguf.tensors(SEVEN))
    weights = sum(math.prod(shape) for _, shape, _ in tensors)
    stored = sum(math.prod(shape) * BYTES[kind] for _, shape, kind in tensors)
    assert weights == sum(spec.rows * spec.cols for spec in schema(SEVEN))
    assert 4.8 < 8 * stored / weights < 5.0  # llama-quantize prints about 4.9 bits a weight for Q4_K_M
    more = [synthetic_gguf.use_more_bits(i, SEVEN.num_layers) for i in range(SEVEN.num_layers)]
    assert sum(more) == 14 and all(more[:3]) and all(more[-4:])
    assert dict((name, kind) for name, _, kind in tensors)["output.weight"] == "Q6_K"


def test_a_model_that_k_quants_do_not_fit_is_refused():
    with pytest.raises(InputError, match="448 input columns"):
        list(synthetic_gguf.tensors(dataclasses.replace(SMALL, hidden=448)))


def test_every_scale_is_finite():
    for kind, at in (("Q4_K", (0, 2)), ("Q6_K", (208,))):
        drawn = synthetic_gguf.blocks(kind, 0)
        for start in at:
            assert np.isfinite(np.ascontiguousarray(drawn[:, start : start + 2]).view(np.float16)).all()


def test_without_the_package_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert synthetic_gguf.main([str(tmp_path / "model.gguf"), "--model", "demo"]) == 2
    assert "pip install gguf" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_what_its_reader_expects(tmp_path, tied):
    pytest.importorskip("gguf", reason="gguf is not installed: the test extra brings it")
    path, dims = tmp_path / "model.gguf", dataclasses.replace(SMALL, tied=tied)
    size = synthetic_gguf.write(path, dims, "small")
    assert path.stat().st_size == size and list(tmp_path.iterdir()) == [path]
    assert reader.embedding_bytes(str(path)) == (0 if tied else dims.vocab * dims.hidden * 144 // 256)
    assert reader.cache_bytes_per_token(str(path)) == 2 * dims.num_layers * dims.kv_size * 2
    from gguf import GGUFReader

    found = {tensor.name: (tuple(int(n) for n in tensor.shape[::-1]), tensor.tensor_type.name) for tensor in GGUFReader(path).tensors}
    assert found == {name: (shape, kind) for name, shape, kind in synthetic_gguf.tensors(dims)}
