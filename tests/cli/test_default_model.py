"""The shipped checkpoint: packed once, into a folder that can be written, and found again."""

from __future__ import annotations

import threading

import pytest
import tiny

from nanoqwen import cache, default_model
from nanoqwen.errors import InputError
from nanoqwen.packfile import open_pack


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A tiny checkpoint in the place of the shipped one, and a home folder of its own."""
    folder = tiny.make(tmp_path / "checkpoint", tiny.SCRIPTED, tensors=tiny.scripted({10: 65, 65: 66, 66: 67, 67: tiny.IM_END}))
    monkeypatch.setattr(default_model, "CHECKPOINT", folder)
    for variable in ("NANOQWEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    return folder


def test_packed_once_and_found_again(checkpoint, tmp_path):
    notes: list[str] = []
    path = default_model.ensure_default_pack(notes=notes)
    assert path.parent == tmp_path / "home" / ".cache" / "nanoqwen"
    assert len(notes) == 1 and str(path) in notes[0]
    before = path.stat().st_mtime_ns
    notes.clear()
    assert default_model.ensure_default_pack(notes=notes) == path
    assert notes == [] and path.stat().st_mtime_ns == before


def test_another_checkpoint_is_another_file(checkpoint):
    first = default_model.ensure_default_pack()
    tiny.make(checkpoint, tiny.SCRIPTED, seed=1)
    second = default_model.ensure_default_pack()
    assert first != second and first.exists()


def test_a_damaged_copy_is_packed_again(checkpoint):
    path = default_model.ensure_default_pack()
    good = path.read_bytes()
    path.write_bytes(good[:1000])
    assert default_model.ensure_default_pack() == path
    assert path.read_bytes() == good


def test_variables_choose_the_folder(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.ensure_default_pack().parent == tmp_path / "xdg" / "nanoqwen"
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "mine ü"))
    assert default_model.ensure_default_pack().parent == tmp_path / "mine ü"


def test_a_home_that_cannot_be_written(checkpoint, tmp_path, monkeypatch):  # H11
    """A file in the place of the home folder: nobody can write below it, not even root."""
    (tmp_path / "home").write_text("not a folder", encoding="utf-8")
    notes: list[str] = []
    path = default_model.ensure_default_pack(notes=notes)
    assert path.parent.parent == tmp_path and path.parent.name.startswith("nanoqwen-")
    assert path.parent.stat().st_mode & 0o077 == 0, "a folder under a shared one is for this user alone"
    assert any("NANOQWEN_CACHE" in note and ".cache" in note for note in notes)
    assert default_model.ensure_default_pack() == path


def test_a_chosen_folder_that_cannot_be_written_is_an_error(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("not a folder", encoding="utf-8")
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "blocked" / "cache"))
    with pytest.raises(InputError, match="NANOQWEN_CACHE"):
        default_model.ensure_default_pack()


def test_no_folder_at_all(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "why_not_writable", lambda folder, private=False: "Read-only file system")
    with pytest.raises(InputError, match="NANOQWEN_CACHE"):
        default_model.ensure_default_pack()


def test_a_cache_filled_before_needs_no_writing(checkpoint, monkeypatch):
    path = default_model.ensure_default_pack()
    monkeypatch.setattr(cache, "why_not_writable", lambda folder, private=False: "Read-only file system")
    assert default_model.ensure_default_pack() == path


def test_two_at_once_both_get_a_whole_file(checkpoint):
    paths, threads = [], []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: paths.append(default_model.ensure_default_pack())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0] == paths[1]
    with open_pack(paths[0]) as pack:
        assert pack.verify() == []
    assert [p.name for p in paths[0].parent.iterdir()] == [paths[0].name]


def test_an_installation_without_the_checkpoint(checkpoint, tmp_path, run, monkeypatch):
    monkeypatch.setattr(default_model, "CHECKPOINT", tmp_path / "nowhere")
    line = run("generate", "--prompt", "x").error_line()
    assert "embedded checkpoint" in line and "nanoqwen pack" in line


# ---------------------------------------------------------------------------------------- the commands that use it


def test_run_writes_code_and_says_where_and_how_fast(checkpoint, run):
    outcome = run("run")
    assert outcome.status == 0
    assert outcome.out == "def fibonacci(n):\nABC\n"
    for words in ("packed the embedded checkpoint", "engine cpu on CPU", "tok/s", "of packed model a token"):
        assert words in outcome.err
    assert "packed the embedded" not in run("run").err


def test_run_with_a_prompt_of_ones_own(checkpoint, run):
    assert run("run", "--prompt", "x\n", "--max-tokens", "2").out == "x\nAB\n"


def test_commands_without_a_file_use_it(checkpoint, run):
    assert run("generate", "--prompt", "\n").out == "ABC"
    assert run("chat", stdin=b"hi\n").out == "ABC\n"
    assert run("validate", "--tier", "unit").status == 0
    assert "1,874," in run("inspect").out


def test_the_cli_says_that_it_fell_back(checkpoint, run, tmp_path):
    (tmp_path / "home").write_text("not a folder", encoding="utf-8")
    outcome = run("generate", "--prompt", "\n")
    assert outcome.out == "ABC" and "NANOQWEN_CACHE" in outcome.err
