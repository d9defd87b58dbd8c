"""Every command that the README and the how-to page print is run, in order, as it is printed.

A command that needs the network or a card says so at the end of its line (``# needs: network``); those are
listed by the test that checks the markers, so that none hides by accident.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "book/how_to_run.md")
NEEDS = {"network", "hopper"}
# This file runs inside it.
OURSELVES = "make test"


def fenced(page: str) -> list[tuple[str, str]]:
    """(language, text) of the page's fenced blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", text, re.M | re.S)


def commands(page: str) -> list[str]:
    """The ``$`` lines of the page's console blocks, continuation lines joined."""
    blocks = [text for language, text in fenced(page) if language == "console"]
    return [line[2:] for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


def needs(command: str) -> str | None:
    found = re.search(r"#\s*needs:\s*(\w+)", command)
    return found.group(1) if found else None


def runnable(page: str) -> list[str]:
    return [c for c in commands(page) if not needs(c) and c.split("#")[0].strip() != OURSELVES]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_prints_commands_and_its_markers_are_known(page):
    found = commands(page)
    assert any(c.startswith("make run") for c in found) and any(c.startswith("nanoqwen") for c in found)
    assert {needs(c) for c in found} - {None} <= NEEDS
    stray = [text for language, text in fenced(page) if language != "console" and re.search(r"^\$? ?(make|nanoqwen|pip) ", text, re.M)]
    assert stray == [], "commands outside console blocks would go untested"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_work(page, tmp_path):
    """One shell for the page, since later lines build on earlier ones. A second ``make run`` takes less than 60 s."""
    log = tmp_path / "log.txt"
    script = ["set -e", f"log={shquote(str(log))}"]
    for command in runnable(page):
        script += ["begun=$SECONDS", f"printf '%s' {shquote(command)} >> $log", command, "printf '\\t%s\\n' $((SECONDS - begun)) >> $log"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("MAKEFLAGS", None)  # these are a reader's calls of make, not children of the one that runs the tests
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", timeout=280
    )
    ran = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
    assert done.returncode == 0, f"{page}: `{ran[-1][0]}` failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert len(ran) == len(runnable(page))
    seconds = {command: int(took) for command, took in ran}
    assert all(took < 60 for command, took in seconds.items() if command.startswith("make run")), seconds


def shquote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_the_readme_lists_every_command():
    from nanoqwen.cli import GROUPS
    from nanoqwen.cli.parser import build_parser

    _, known = build_parser([group.add_parser for group in GROUPS])
    listed = re.findall(r"^\| `nanoqwen (\w+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(known)
