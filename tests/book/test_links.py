"""The built pages: every link and anchor leads somewhere, nothing is fetched from elsewhere, every stored output is shown."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, build_book, complaints

from nanoqwen.book.contents import pages


class Page(HTMLParser):
    """Links, anchors and loaded resources of a page."""

    RESOURCES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
    VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.outputs = 0
        self.inline: list[str] = []
        self.in_script = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in self.RESOURCES and given.get(self.RESOURCES[tag]):
            self.resources.append(given[self.RESOURCES[tag]])
        self.outputs += "cell_output" in (given.get("class") or "").split()
        self.in_script = tag == "script" and not given.get("src")

    def handle_data(self, data):
        if self.in_script:
            self.inline.append(data)


@pytest.fixture(scope="module")
def site(built):
    return {path.relative_to(built).as_posix(): Page(path) for path in sorted(built.rglob("*.html")) if "_static" not in path.parts}


def test_the_book_builds_without_a_warning(build):
    _, done = build
    assert done.returncode == 0, complaints(done)


def test_the_first_page_is_the_one_that_make_names(built):
    redirect = (built / "index.html").read_text(encoding="utf-8")
    target = re.search(r"url=([^\"']+)", redirect).group(1)
    assert (built / target).is_file() and target == f"{pages()[0]}.html"


def test_every_page_of_the_contents_is_built(site):
    assert {f"{page}.html" for page in pages()} <= set(site)


def test_links_and_anchors_lead_somewhere(built, site):
    broken = []
    for name, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or not link or link == "#":
                continue
            target = (built / name).parent.joinpath(unquote(parts.path)).resolve() if parts.path else built / name
            key = target.relative_to(built.resolve()).as_posix() if target.is_relative_to(built.resolve()) else None
            if not target.is_file():
                broken.append(f"{name}: {link}")
            elif parts.fragment and key in site and unquote(parts.fragment) not in site[key].anchors:
                broken.append(f"{name}: {link} has no such anchor")
    assert broken == []
    assert sum(len(page.links) for page in site.values()) > 100, "the parser found hardly any links"


def test_nothing_is_loaded_from_another_server(built, site):
    loaded = [f"{name}: {r}" for name, page in site.items() for r in page.resources if urlsplit(r).scheme in ("http", "https") or r.startswith("//")]
    loaded += [f"{name}: {s[:80]}" for name, page in site.items() for s in page.inline if re.search(r"https?://(?!www\.w3\.org)", s)]
    for sheet in (built / "_static").glob("*.css"):
        loaded += [f"{sheet.name}: {url}" for url in re.findall(r"url\([\"']?(https?:[^\"')]+)", sheet.read_text(encoding="utf-8"))]
    assert loaded == []


def test_resources_exist(built, site):
    missing = [
        f"{name}: {r}" for name, page in site.items() for r in page.resources
        if r != "#" and not urlsplit(r).scheme and not (built / name).parent.joinpath(unquote(urlsplit(r).path)).resolve().is_file()
    ]  # fmt: skip
    assert missing == []


def test_every_stored_output_is_shown(site):
    for page in pages():
        notebook = ROOT / f"{page}.ipynb"
        if notebook.is_file():
            cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
            stored = sum(bool(cell.get("outputs")) for cell in cells if cell["cell_type"] == "code")
            assert site[f"{page}.html"].outputs == stored, page


@pytest.fixture
def small_book(tmp_path):
    """A copy of the repository whose contents list one page, so that it builds in seconds."""
    pytest.importorskip("jupyter_book", reason="the book extra is not installed")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("_config.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("book", "config", "nanoqwen"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (copy / "_toc.yml").write_text("format: jb-book\nroot: book/glossary\n", encoding="utf-8")
    return copy


def test_a_broken_reference_fails_the_build_and_is_named(small_book, tmp_path):
    page = small_book / "book" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\nSee {term}`a word that nobody explained` and {fact}`nothing`.\n", encoding="utf-8")
    for attempt in range(2):  # the second build must not hide what the first one found
        done = build_book(small_book, tmp_path / "out")
        said = done.stdout + done.stderr
        assert done.returncode != 0, attempt
        assert "glossary.md" in said and "a word that nobody explained" in said and "no fact is called 'nothing'" in said
