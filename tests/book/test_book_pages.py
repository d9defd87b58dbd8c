"""The book's files before they are built: contents, settings, notebooks as they are stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from nanoqwen.book.contents import pages

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROSE = sorted([*(ROOT / "book").glob("*.md"), *NOTEBOOKS, ROOT / "README.md"])


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def text_of(value) -> str:
    return value if isinstance(value, str) else "".join(value)


def test_the_contents_list_every_page_once():
    listed = pages()
    assert len(set(listed)) == len(listed)
    for page in listed:
        assert (ROOT / f"{page}.md").is_file() or (ROOT / f"{page}.ipynb").is_file(), page
    unlisted = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (*(ROOT / "book").glob("*.md"), *NOTEBOOKS)} - set(listed)
    assert unlisted == set(), "pages that no reader can reach"


def test_chapters_stand_in_order():
    chapters = [page for page in pages() if page.startswith("notebooks/")]
    assert chapters == sorted(chapters)
    planned = [f"{chapter['number']:02d}" for chapter in yaml.safe_load((ROOT / "book" / "chapters.yml").read_text(encoding="utf-8"))]
    found = [page.split("/")[1][:2] for page in chapters]
    assert found == [number for number in planned if number in found] and found[:7] == planned[:7]


def test_settings_show_stored_outputs_and_say_why():
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert config["execute"]["execute_notebooks"] == "off" and config["execute"]["timeout"] > 30
    assert "dollarmath" not in config["parse"]["myst_enable_extensions"], "a dollar sign is a shell prompt here"


def test_jupyter_book_is_held_below_2():
    assert re.search(r'"jupyter-book>=1[^"]*<2"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_runs_in_anyones_kernel(self, path):
        meta = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        assert meta["kernelspec"]["name"] == "python3"

    def test_was_run_from_top_to_bottom_without_an_error(self, path):
        code = cells(path, "code")
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        outputs = [output for cell in code for output in cell["outputs"]]
        assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]

    def test_opens_with_the_drawing_and_asks_for_a_prediction(self, path):
        assert "token_path(" in text_of(cells(path, "code")[0]["source"])
        prose = "\n".join(text_of(cell["source"]) for cell in cells(path, "markdown"))
        assert prose.startswith("# ") and ":class: predict" in prose and ":class: takeaway" in prose

    def test_stored_outputs_hold_nothing_of_the_machine(self, path):
        stored = "\n".join(json.dumps(output) for cell in cells(path, "code") for output in cell["outputs"])
        assert not re.search(r" at 0x[0-9a-f]{6,}|/home/|/root/|/tmp/|/Users/|site-packages", stored)

    def test_compares_every_output(self, path):
        for cell in cells(path, "code"):
            assert "NBVAL" not in text_of(cell["source"]) and not {t for t in cell["metadata"].get("tags", []) if t.startswith("nbval")}

    def test_figures_are_text_that_follows_the_theme(self, path):
        kinds = {kind for cell in cells(path, "code") for output in cell["outputs"] for kind in output.get("data", {})}
        assert not kinds & {"image/png", "image/jpeg", "image/svg+xml"}, "show figures with book.figure or book.svg"


@pytest.mark.parametrize("path", [p for p in PROSE if p.exists()], ids=lambda path: path.name)
def test_links_between_files_work_outside_the_built_book(path):
    """The same links are followed in Jupyter and on a code host: a path with its ending, relative to the file."""
    texts = [path.read_text(encoding="utf-8")] if path.suffix == ".md" else [text_of(c["source"]) for c in cells(path, "markdown")]
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(texts)):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        assert (path.parent / target.split("#")[0]).is_file(), target
