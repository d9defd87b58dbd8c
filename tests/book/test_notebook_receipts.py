"""Chapters with cells for a Hopper card: their stored outputs were made by today's cells and today's sources, on the card that they name."""

from __future__ import annotations

import json

import pytest

from nanoqwen.bench.receipts import hash_source
from nanoqwen.book import stamp
from nanoqwen.config import repo_root
from nanoqwen.errors import InputError

NOTEBOOKS = sorted((repo_root() / "notebooks").glob("*.ipynb"))
SOURCE = "kernels/lessons/barriers.cu"


def cell(code: str, *tags: str, outputs=()) -> dict:
    return {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": code, "outputs": list(outputs)}


def made(*cells: dict, **own) -> dict:
    return {"metadata": {"nanoqwen": own}, "cells": [{"cell_type": "markdown", "metadata": {}, "source": "# T"}, *cells]}


def stored(tmp_path, notebook):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_hopper_outputs_are_current(path):
    assert stamp.stale(path) == [], f"run on a Hopper card: python -m nanoqwen.book.execute notebooks/{path.name}"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    on_card = list(filter(stamp.needs_card, notebook["cells"]))
    if on_card:
        assert "H100" in notebook["metadata"]["nanoqwen"]["device"] or "H200" in notebook["metadata"]["nanoqwen"]["device"]
        assert any(c["outputs"] for c in on_card)


def test_sources_are_what_cells_import_and_show_and_what_the_author_adds():
    notebook = made(
        cell("%matplotlib inline\nfrom nanoqwen import book, kv\nfrom nanoqwen.config import Dims\nimport numpy as np"),
        cell("import nanoqwen.warpmodel\nfrom nanoqwen.lessons.barriers import run\nbook.show('config/nanoqwen.yaml')", "gpu"),
        cell(f"book.show('{SOURCE}', 'right')"),
        rests_on=["nanoqwen/lessons/barriers_*.py"],
    )
    found = stamp.sources(notebook)
    assert found == sorted(found) and not any("constants" in path or path.startswith("nanoqwen/book") for path in found)
    own = {"nanoqwen/kv.py", "nanoqwen/config.py", "nanoqwen/warpmodel/__init__.py", "nanoqwen/lessons/barriers.py", "nanoqwen/lessons/barriers_child.py"}
    headers = {f"kernels/common/{name}.cuh" for name in ("kv_page", "mbarrier", "ptx")}  # ptx.cuh is included by the other two
    assert set(found) == own | headers | {SOURCE, "config/nanoqwen.yaml"}
    with pytest.raises(InputError, match="rests on kernels/none.cu"):
        stamp.sources(made(rests_on=["kernels/none.cu"]))


def test_a_stamp_goes_stale_with_its_cells_and_sources(tmp_path):
    notebook = made(cell("1 + 1"), cell("print(2)", "gpu"), rests_on=[SOURCE])
    assert "never run on a card: the stamp lacks device" in stamp.stale(stored(tmp_path, notebook))[0]
    notebook["metadata"]["nanoqwen"] = stamp.stamp(notebook, "NVIDIA H200")
    assert notebook["metadata"]["nanoqwen"]["device"] == "NVIDIA H200" and notebook["metadata"]["nanoqwen"]["rests_on"] == [SOURCE]
    assert notebook["metadata"]["nanoqwen"]["sources"][SOURCE] == hash_source(SOURCE)
    assert stamp.stale(stored(tmp_path, notebook)) == []
    notebook["cells"][1]["source"] = "1 + 2"  # no card needed: nbval looks after it
    assert stamp.stale(stored(tmp_path, notebook)) == []
    notebook["cells"][2]["source"] = ["print(2)\n", "print(3)"]
    assert stamp.stale(stored(tmp_path, notebook)) == ["cells tagged gpu changed"]
    notebook["cells"][2]["source"] = "print(2)"
    kept = notebook["metadata"]["nanoqwen"]["sources"]
    kept[SOURCE], kept["nanoqwen/gone.py"] = "0" * 64, "0" * 64
    del kept["kernels/common/ptx.cuh"]
    assert stamp.stale(stored(tmp_path, notebook)) == ["kernels/common/ptx.cuh was not there", f"{SOURCE} changed", "nanoqwen/gone.py is no longer used"]


def test_a_chapter_without_such_cells_needs_no_stamp(tmp_path):
    assert stamp.stale(stored(tmp_path, made(cell("1 + 1")))) == []


@pytest.mark.parametrize("card", [None, "NVIDIA H200"])
def test_execution_keeps_what_it_cannot_run_and_stamps_what_it_can(tmp_path, card):
    nbformat = pytest.importorskip("nbformat", reason="the book extra is not installed")
    pytest.importorskip("nbclient", reason="the book extra is not installed")
    from nanoqwen.book.execute import execute

    old = {"rests_on": [SOURCE], "device": "an older card"}
    plain = nbformat.v4.new_code_cell("x = 2\nprint(x)")
    special = nbformat.v4.new_code_cell("print(x + 1)", metadata={"tags": ["gpu"], "other": 1}, outputs=[nbformat.v4.new_output("stream", text="stored\n")])
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[plain, special], metadata={"nanoqwen": old, "author": "me"}), path)
    execute(path, card=card)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    texts = ["".join(c["outputs"][0]["text"]) for c in notebook["cells"]]
    assert texts == ["2\n", "3\n" if card else "stored\n"]
    assert [c["execution_count"] for c in notebook["cells"]] == [1, 2] and notebook["cells"][1]["metadata"] == {"tags": ["gpu"]}
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "nanoqwen"}
    if card:
        assert stamp.stale(path) == [] and notebook["metadata"]["nanoqwen"]["device"] == card
    else:
        assert notebook["metadata"]["nanoqwen"] == old


@pytest.mark.parametrize("card", [None, "NVIDIA H200"])
def test_nbval_skips_them_without_a_card_and_compares_none_of_their_outputs_with_one(card, monkeypatch):
    import importlib.util
    import types

    spec = importlib.util.spec_from_file_location("notebooks_conftest", repo_root() / "notebooks" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    monkeypatch.setattr(conftest, "hopper_card", lambda: card)
    items = [types.SimpleNamespace(cell=cell("1", *tags), options={"check": True, "skip": False}) for tags in ((), ("gpu",))]
    conftest.pytest_collection_modifyitems([*items, types.SimpleNamespace()])
    assert items[0].options == {"check": True, "skip": False}
    assert items[1].options == {"check": False, "skip": card is None}
