"""`pack --method mse`: the search against a plain loop in float64, its promises, and the file it makes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tiny

from nanoqwen import int4, int4_search
from nanoqwen.errors import InputError
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book"))
import second_reader  # noqa: E402

KINDS = ["normal", "heavy", "one-sided", "outlier", "tiny", "large"]


def weights(kind: str, rows: int = 48, cols: int = 512) -> np.ndarray:
    rng = np.random.default_rng(7)
    w = rng.normal(0, 0.02, (rows, cols))
    if kind == "heavy":
        w = rng.standard_t(3, (rows, cols)) * 0.02
    elif kind == "one-sided":
        w = np.abs(w)
    elif kind == "outlier":
        w[:, ::128] *= 40
    elif kind == "tiny":  # scales among FP16's subnormal numbers
        w *= 1e-5
    elif kind == "large":
        w *= 1e6
    return w.astype(np.float32)


def squared_errors(w: np.ndarray, codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """float64 [rows, groups], from the definition: a weight is its code times its scale."""
    back = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), group, axis=1)
    return ((back - w.astype(np.float64)) ** 2).reshape(len(w), -1, group).sum(axis=2)


def searched_plainly(values: np.ndarray) -> float:
    """The least squared error of one group over the documented candidates, one by one in float64."""
    least, extreme = np.inf, values[np.argmax(np.abs(values))]
    for k in range(13):
        ideal = np.float32(abs(extreme)) * np.float32(1 - k / 32) / np.float32(7)
        if ideal < 2.0**-14:
            ideal = np.ceil(ideal / 2.0**-24) * 2.0**-24
        step = -np.sign(extreme) * float(np.float16(ideal))
        codes = np.clip(np.rint(values.astype(np.float64) / step), -8, 7) if step else np.zeros(len(values))
        least = min(least, ((codes * step - values) ** 2).sum())
    return least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_best_candidate_is_found(kind, group):
    w = weights(kind, rows=8)
    found = squared_errors(w, *int4_search.quantize(w, group), group)
    wanted = np.array([[searched_plainly(part) for part in row.reshape(-1, group)] for row in w])
    assert np.allclose(found, wanted, rtol=1e-4, atol=0)  # FP32 quotients: a weight on the edge of two codes may fall to either side


@pytest.mark.parametrize("kind", KINDS)
def test_no_group_is_worse_than_with_absmax_and_most_are_better(kind):
    w = weights(kind)
    codes, scales = int4_search.quantize(w, 128)
    usual, found = squared_errors(w, *int4.quantize(w, 128), 128), squared_errors(w, codes, scales, 128)
    assert (found <= usual * (1 + 1e-5)).all()
    assert found.sum() < 0.99 * usual.sum()
    assert codes.dtype == np.int8 and codes.min() >= -8 and codes.max() <= 7 and scales.dtype == np.float16


def test_the_gain_on_normal_weights():
    """Chapter 03's two exercises together: about a sixth of the error of normal weights goes."""
    w = weights("normal", 64, 2048)
    usual, found = (squared_errors(w, *method(w, 128), 128).sum() ** 0.5 for method in (int4.quantize, int4_search.quantize))
    assert 0.79 < found / usual < 0.86


def test_the_sixteenth_code_lies_on_the_side_of_the_extreme():
    w = np.linspace(-6.9, 8, 128, dtype=np.float32)[None]
    for values, sign in ((w, -1), (-w, 1)):
        codes, scales = int4_search.quantize(values, 128)
        assert np.sign(scales[0, 0]) == sign and codes.min() == -8


def test_edges():
    w = np.zeros((3, 64), np.float32)
    w[1] = 0.5  # 0.5 / 7 is no FP16 number, 0.5 / 8 is one: exact with code -8
    w[2, 5] = 1e-45
    codes, scales = int4_search.quantize(w, 32)
    assert not codes[0].any() and not np.signbit(scales[0]).any() and not scales[0].any()
    assert (codes[1] == -8).all() and (scales[1] == np.float16(-0.0625)).all()
    assert not np.signbit(scales[scales == 0]).any()
    for bad, words in ((np.nan, "nan"), (np.inf, "inf"), (1e6, "FP16")):
        w[2, 40] = bad
        with pytest.raises(InputError, match=words) as caught:
            int4_search.quantize(w, 32, "model.layers.3.mlp.up_proj.weight", 100)
        assert "model.layers.3.mlp.up_proj.weight" in str(caught.value)
    with pytest.raises(InputError, match="multiple of the group size"):
        int4_search.quantize(w, 48)


def test_blocks_and_chunks_do_not_matter(monkeypatch):
    w = weights("heavy", 40, 1024)
    whole = int4_search.quantize(w, 128)
    parts = [int4_search.quantize(w[i : i + 7], 128, row_offset=i) for i in range(0, 40, 7)]
    monkeypatch.setattr(int4_search, "CHUNK", 3 * 128)
    small = int4_search.quantize(w, 128)
    for k in (0, 1):
        assert np.array_equal(whole[k], np.concatenate([part[k] for part in parts]))
        assert np.array_equal(whole[k], small[k])


@pytest.mark.parametrize("rows", [1, 5, 8, 24, 128])
def test_the_fixed_order_of_addition_adds_everything(rows):
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    assert np.array_equal(int4_search._sum_columns(values.copy()), values.sum(axis=0))


# ---------------------------------------------------------------------------------------------------------- files


def test_the_file(tmp_path):
    """Same format and size; another reader, written from the specification alone, gets the weights; absmax stays the default."""
    tensors = tiny.weights(seed=3)
    source = tiny.make(tmp_path / "S", tensors=tensors)
    pack(source, tmp_path / "default.nanoqwen")
    pack(source, tmp_path / "absmax.nanoqwen", method="absmax")
    pack(source, tmp_path / "mse.nanoqwen", method="mse")
    pack(source, tmp_path / "again.nanoqwen", method="mse", threads=3)
    assert (tmp_path / "default.nanoqwen").read_bytes() == (tmp_path / "absmax.nanoqwen").read_bytes()
    assert (tmp_path / "mse.nanoqwen").read_bytes() == (tmp_path / "again.nanoqwen").read_bytes()

    usual, foreign = (second_reader.File(tmp_path / f"{name}.nanoqwen") for name in ("absmax", "mse"))
    assert usual.meta["quantise"] == {"method": "absmax", "group": 128} and foreign.meta["quantise"] == {"method": "mse", "group": 128}
    assert foreign.damaged() == []
    with open_pack(tmp_path / "mse.nanoqwen") as file:
        assert file.verify() == []
        negative = 0
        for name, tensor in tensors.items():
            if not name.endswith("_proj.weight"):
                continue
            wanted = tiny.stored_values(tensor)
            words, scales = file.int4(name)
            back = int4.dequantize(words, scales, 128)
            assert np.array_equal(foreign.weight(name), back), name
            assert ((back - wanted) ** 2).sum() < ((usual.weight(name) - wanted) ** 2).sum(), name
            negative += int((scales < 0).sum())
        assert negative, "signed scales are part of the method, so the readers above have met them"


def test_every_reader_of_the_package_multiplies_by_the_sign(tmp_path):
    """The reference decoder's unpacking, in whole matrices and in blocks, with negative scales and code -8."""
    torch = pytest.importorskip("torch")
    from nanoqwen.weights import dequantize

    w = weights("heavy")
    words, scales = int4_search.quantize_pack(w, 128)
    assert (scales < 0).any() and int4.unpack_codes(words).min() == -8
    mine = dequantize(torch.from_numpy(words.view(np.int32)), torch.from_numpy(scales), 128).numpy()
    assert np.array_equal(mine, int4.dequantize(words, scales, 128))


def test_an_unknown_method(tmp_path):
    with pytest.raises(InputError, match="'gptq' is not known, use one of absmax, mse"):
        pack(tiny.make(tmp_path / "S"), tmp_path / "out.nanoqwen", method="gptq")
    assert not (tmp_path / "out.nanoqwen").exists()
