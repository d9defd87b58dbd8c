"""Receipts are current: every source that a measurement rests on still has the bytes it had when it was measured."""

from __future__ import annotations

import json

import pytest

from nanoqwen.bench.receipts import KEYS, check_receipt, hash_source, read_receipt, receipts_folder, write_receipt
from nanoqwen.errors import InputError

RECEIPTS = sorted(receipts_folder().glob("*.json"))
SOURCE = "nanoqwen/int4.py"


def test_there_are_receipts():
    assert RECEIPTS, "book/receipts is empty: the book has no measured number"


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_receipt_is_complete_and_current(path):
    receipt = read_receipt(path)
    assert receipt["name"] == path.stem
    assert receipt["device"]["name"] and receipt["sources"] and receipt["samples"] and receipt["results"] and receipt["protocol"]
    assert check_receipt(path) == [], f"measured with other sources; run again: {receipt['command']}"


def sample(folder, **changes):
    given = dict(name="sample", command="true", results={"x": 1}, samples=[1, 2], sources=[SOURCE], protocol={"runs": 2})
    return write_receipt(**{**given, **changes}, folder=folder)


def test_a_receipt_goes_stale_with_its_sources(tmp_path):
    path = sample(tmp_path)
    receipt = read_receipt(path)
    assert tuple(receipt) == KEYS and receipt["sources"] == {SOURCE: hash_source(SOURCE)}
    assert "cores" in receipt["device"]["name"] and receipt["versions"]["numpy"]
    assert check_receipt(path) == []
    receipt["sources"] = {SOURCE: "0" * 64, "nanoqwen/gone.py": "0" * 64}
    path.write_text(json.dumps(receipt), encoding="utf-8")
    assert check_receipt(path) == [f"{SOURCE} changed", "nanoqwen/gone.py is gone"]


def test_a_gpu_protocol_names_its_own_device(tmp_path):
    path = sample(tmp_path, device={"name": "NVIDIA H200", "sm_count": 132}, versions={"cuda": "12.9"})
    receipt = read_receipt(path)
    assert receipt["device"] == {"name": "NVIDIA H200", "sm_count": 132}
    assert receipt["versions"]["cuda"] == "12.9" and receipt["versions"]["python"]


def test_broken_receipts_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file in the repository"):
        sample(tmp_path, sources=["nanoqwen/none.py"])
    with pytest.raises(InputError, match="no such receipt"):
        read_receipt(tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        read_receipt(tmp_path / "half.json")
    (tmp_path / "thin.json").write_text('{"name": "thin"}', encoding="utf-8")
    with pytest.raises(InputError, match="lacks command"):
        read_receipt(tmp_path / "thin.json")
