"""Checkpoints by hub name: what reads as a name, no network, and downloads by the real hub library from a hub that runs here."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest
import tiny
from opening import refused

from nanoqwen.checkpoint.hub import is_hub_name

ROOT = Path(__file__).resolve().parents[2]
REVISION = "f" * 40
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: refuses at once


@pytest.mark.parametrize("text, hub", [
    ("Qwen/Qwen2.5-Coder-7B-Instruct", True), ("a/b", True), ("a/b/c", False), ("/a/b", False), ("./a", False), ("../a", False),
    ("a", False), ("a/", False), ("a/b.safetensors", False), ("a/b.json", False), ("a b/c", False), ("a--b/c", False), ("é/b", False),
])  # fmt: skip
def test_what_reads_as_a_hub_name(text, hub):
    assert is_hub_name(text) is hub


def test_a_name_under_a_local_folder_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("models/qwen")
    (tmp_path / "models").mkdir()
    refused("models/qwen", "models/qwen: no such file or directory")


def open_in_a_process(name: str, **environment: str) -> str:
    """What opening ``name`` says in a fresh process (the hub library reads its settings when it is imported)."""
    code = (
        "import sys\nfrom nanoqwen.checkpoint import open_checkpoint\nfrom nanoqwen.errors import InputError\n"
        "try:\n    c = open_checkpoint(sys.argv[1])\n    print('opened', c.hub_name, c.revision, len(c.weight_files))\n"
        "except InputError as e:\n    print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], cwd=ROOT, env={**os.environ, "HF_HUB_DISABLE_XET": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_network_is_one_line(tmp_path):
    said = open_in_a_process("someone/tiny", HF_HOME=str(tmp_path), HF_ENDPOINT=UNREACHABLE, HF_HUB_OFFLINE="0")
    assert said.startswith("someone/tiny: ") and "the hub cannot be reached" in said and "\n" not in said
    said = open_in_a_process("someone/tiny", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert said.startswith("someone/tiny: ") and "HF_HUB_OFFLINE" in said and "\n" not in said


def test_a_cached_snapshot_opens_by_name_without_a_network(tmp_path):
    snapshot = tiny.as_hub_cache(tiny.make(tmp_path / "S", shards=2), tmp_path / "hub", "someone/tiny")
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": UNREACHABLE}):
        said = open_in_a_process("someone/tiny", HF_HOME=str(tmp_path), **settings)
        assert said == f"opened someone/tiny {snapshot.name} 2"
    (snapshot / tiny.shard_name(1, 2)).unlink()  # an interrupted download leaves such a snapshot
    said = open_in_a_process("someone/tiny", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert "model-00002-of-00002.safetensors is missing" in said and "incomplete" in said


# -------------------------------------------------------------------------------------------------- a hub that runs here


class Hub(http.server.ThreadingHTTPServer):
    """Serves one repository, someone/tiny, with the parts of the hub's protocol that a snapshot download uses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.broken: set[str] = set()  # these break off halfway
        self.fetched: list[str] = []  # names of the files whose bytes were asked for
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def open_in_a_process(self, name: str, home: Path) -> str:
        """What opening ``name`` says in a process that knows this hub only."""
        return open_in_a_process(name, HF_ENDPOINT=f"http://127.0.0.1:{self.server_port}", HF_HOME=str(home), HF_HUB_OFFLINE="0")


class Answer(http.server.BaseHTTPRequestHandler):
    """HEAD and GET of the model's description, its list of files, and the files."""

    server: Hub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.reply()

    def do_GET(self) -> None:
        self.reply()

    def reply(self) -> None:
        path, files = urllib.parse.urlsplit(self.path).path, self.server.files
        listing = [{"type": "file", "path": f, "rfilename": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for f, b in files.items()]
        if "/gated" in path:
            self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/someone/tiny/tree/"):
            self.send(200, json.dumps(listing).encode())
        elif path.startswith("/api/models/someone/tiny"):
            self.send(200, json.dumps({"id": "someone/tiny", "sha": REVISION, "siblings": listing, "private": False, "tags": []}).encode())
        elif path.startswith("/someone/tiny/resolve/") and (name := path.split("/", 5)[5]) in files:
            headers = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": REVISION}
            if self.command == "GET":
                self.server.fetched.append(name)
            self.send(200, files[name], headers, cut=name in self.server.broken)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)


@pytest.fixture
def hub(tmp_path):
    folder = tiny.make(tmp_path / "served", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}", encoding="utf-8")
    server = Hub(folder)
    yield server
    server.shutdown()
    server.server_close()


def test_a_download_fetches_what_is_needed_and_only_once(hub, tmp_path):
    for _ in range(2):
        assert hub.open_in_a_process("someone/tiny", tmp_path / "home") == f"opened someone/tiny {REVISION} 2"
    assert sorted(hub.fetched) == sorted(name for name in hub.files if name not in ("pytorch_model.bin", "onnx/config.json"))


def test_an_interrupted_download_is_one_line_and_goes_on_later(hub, tmp_path):
    second = tiny.shard_name(1, 2)
    hub.broken.add(second)
    said = hub.open_in_a_process("someone/tiny", tmp_path / "home")
    assert said.startswith("someone/tiny: ") and "\n" not in said and "opened" not in said
    hub.broken.clear()
    hub.fetched.clear()
    assert hub.open_in_a_process("someone/tiny", tmp_path / "home") == f"opened someone/tiny {REVISION} 2"
    assert second in hub.fetched and tiny.shard_name(0, 2) not in hub.fetched


def test_unknown_and_gated_names(hub, tmp_path):
    said = hub.open_in_a_process("someone/nothing", tmp_path / "home")
    assert said.startswith("someone/nothing: ") and "no such repository on the hub" in said and "\n" not in said
    said = hub.open_in_a_process("someone/gated", tmp_path / "home")
    assert said.startswith("someone/gated: ") and "access" in said and "\n" not in said
