"""`nanoqwen export`: the closing line, the bar, the notes, and refusals that leave nothing behind."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
import tiny
from clikit import REPO, make_pack, nanoqwen, subprocess_env

from nanoqwen.cli import export as command
from nanoqwen.config import Dims, load_settings
from nanoqwen.export import FORMATS


def test_the_formats_of_the_command_are_those_of_the_exporter():
    assert command.FORMATS == FORMATS


def test_the_closing_line(run, plain, tmp_path):
    out = tmp_path / "out"
    outcome = run("export", plain, "--format", "compressed-tensors", "-o", out)
    assert (outcome.status, outcome.err) == (0, "")
    size = sum(p.stat().st_size for p in out.iterdir())
    assert outcome.out.startswith(f"{out}: 5 files, {size:,} bytes (") and "group 128" in outcome.out


def test_json(run, plain, tmp_path):
    answer = json.loads(run("export", plain, "-o", tmp_path / "out", "--json").out)
    assert answer["path"] == str(tmp_path / "out") and answer["format"] == "compressed-tensors" and answer["group"] == 128
    assert answer["files"] == sorted(p.name for p in (tmp_path / "out").iterdir())
    assert answer["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


def test_progress_on_request(run, plain, tmp_path):
    outcome = run("export", plain, "-o", tmp_path / "out", "--progress")
    assert "export: 100%" in outcome.err and "export:" not in outcome.out


def test_notes_are_told(run, tmp_path):
    path = make_pack(tmp_path, "silent", tokenizer_config=tiny.tokenizer_config(chat_template=tiny.ABSENT))
    outcome = run("export", path, "-o", tmp_path / "out")
    assert outcome.status == 0 and "no chat template" in outcome.err
    assert all(line.startswith("nanoqwen: ") for line in outcome.err.splitlines())


def test_the_shipped_checkpoint_is_the_default(tmp_path):
    done = nanoqwen("export", "-o", tmp_path / "büro 1")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "büro 1" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.parametrize(
    "words, fragments",
    [
        (["-o", "full"], ["full", "not empty"]),
        (["-o", "absent/out"], ["absent", "does not exist"]),
        ([], ["-o"]),
        (["-o", "out", "--format", "gguf"], ["gguf", "compressed-tensors"]),
    ],
)
def test_a_refusal_is_one_line_and_changes_nothing(run, plain, tmp_path, monkeypatch, words, fragments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    line = run("export", plain, *words).error_line()
    for fragment in fragments:
        assert fragment in line
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == ["full", "full/mine"]


def test_a_file_that_is_no_pack(run, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(300))
    assert "GGUF" in run("export", tmp_path / "m.gguf", "-o", tmp_path / "out").error_line()
    assert not (tmp_path / "out").exists()


def test_ctrl_c_leaves_nothing_behind(run, plain, tmp_path, monkeypatch):
    import nanoqwen.export

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(nanoqwen.export, "write_shard", interrupt)
    outcome = run("export", plain, "-o", tmp_path / "out")
    assert (outcome.status, outcome.err) == (130, "nanoqwen: interrupted\n")
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- the how-to page


PAGE = (REPO / "book" / "serve_elsewhere.md").read_text(encoding="utf-8")


def test_the_page_works_as_it_is_printed(tmp_path):
    """Its commands that need nothing more, in order, and then its Python: the greedy text is nanoqwen's own."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    commands = [command for block in blocks for command in re.split(r"^\$ ", block, flags=re.M) if command]
    own = [shlex.split(command) for command in commands if "# needs:" not in command]
    assert own and all(words[:2] == ["nanoqwen", "export"] for words in own)
    for words in own:
        done = nanoqwen(*words[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    code = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S).group(1)
    theirs = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=subprocess_env(), capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert theirs.returncode == 0, theirs.stderr
    words = shlex.split(re.search(r"`(nanoqwen generate [^`]*)`", PAGE).group(1))
    ours = nanoqwen(*words[1:], cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    text = ours.stdout.decode("utf-8").strip()
    assert theirs.stdout.startswith("def fibonacci(n):") and len(text) > 40 and text in theirs.stdout, (text, theirs.stdout)


def test_the_page_counts_cards_right():
    dims, group = Dims.qwen2_5_coder_7b(), load_settings().quant.group
    fits = [n for n in range(2, 9) if not (dims.num_heads % n or dims.num_kv_heads % n or dims.q_size // group % n or dims.intermediate // group % n)]
    assert fits == [2, 4] and "over 2 or 4 cards, not over 8" in PAGE
