"""Packing what cannot be packed, and being stopped: refused by name, nothing at OUT, and an old OUT untouched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

import nanoqwen.pack as packing
from nanoqwen import packwriter
from nanoqwen.errors import InputError
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack

ROOT = Path(__file__).resolve().parents[2]
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
UP, GATE, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.k_proj.bias"


def refused(source, out: Path, *fragments: str, **options) -> str:
    """Packing fails in one line with every fragment, leaves the old OUT (or none) and no temporary. Returns the line."""
    before = out.read_bytes() if out.is_file() else None
    with pytest.raises(InputError) as caught:
        pack(source, out, **options)
    line = str(caught.value)
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line, line
    assert (out.read_bytes() if out.is_file() else None) == before
    if out.parent.is_dir():
        assert temporaries(out) == []
    return line


def temporaries(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir() if p.name.endswith(".tmp"))


# ----------------------------------------------------------------------------------------------- B: the numbers


@pytest.mark.parametrize(
    "name, index, value, dtype, fragments",
    [
        (UP, (3, 7), np.nan, "BF16", ["[3, 7]", "nan", "damaged"]),
        (UP, (511, 255), np.inf, "BF16", ["[511, 255]", "inf"]),
        (UP, (300, 0), -np.inf, "F16", ["[300, 0]", "-inf"]),
        (UP, (0, 0), np.nan, "F32", ["[0, 0]", "nan"]),
        (HEAD, (400, 9), np.nan, "BF16", ["[400, 9]", "nan"]),
        (NORM, (255,), np.nan, "BF16", ["[255]", "nan"]),
        (BIAS, (17,), np.inf, "F32", ["[17]", "inf"]),
        (EMBED, (511, 255), 1e5, "BF16", ["[511, 255]", "99840", "65504", "FP16"]),
        (HEAD, (300, 1), -7e4, "F32", ["[300, 1]", "-70000", "65504"]),
        (NORM, (0,), 3e38, "BF16", ["[0]", "e+38", "65504"]),
        (BIAS, (127,), 65536.0, "BF16", ["[127]", "65536", "65504"]),
        (GATE, (100, 200), 1e6, "BF16", ["999424", "scale", "65504"]),
        (GATE, (0, 0), 3e38, "F32", ["3e+38", "scale"]),
    ],
)
def test_a_weight_that_cannot_be_packed_is_named(tmp_path, monkeypatch, name, index, value, dtype, fragments):
    """B01, B03 and their kin: tensor, index and value, also when the fault is not in the first block of rows."""
    monkeypatch.setattr(packing, "BLOCK_VALUES", 64 * 256)
    tensors = tiny.weights()
    tensors[name].dtype = dtype
    tensors[name].values[index] = value
    out = tmp_path / "out.nanoqwen"
    source = tiny.make(tmp_path / "S", tensors=tensors)
    refused(source, out, name, *fragments)
    out.write_bytes(b"an older file")
    refused(source, out, name)


def test_the_first_fault_in_file_order_is_the_one_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_VALUES", 256)
    tensors = tiny.weights()
    tensors[UP].values[[3, 400], [7, 1]] = np.nan
    tensors[HEAD].values[0, 0] = np.nan
    for _ in range(3):
        refused(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "out", UP, "[3, 7]", threads=4)


def test_the_largest_numbers_that_fit_do_fit(tmp_path):
    tensors = tiny.weights()
    tensors[NORM].dtype = tensors[GATE].dtype = "F32"
    tensors[NORM].values[:2] = 65504.0, -65504.0
    tensors[GATE].values[0, 0] = 65504.0 * 7
    pack(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "out")
    with open_pack(tmp_path / "out") as file:
        assert file.fp16(NORM)[:2].tolist() == [65504.0, -65504.0]
        assert file.int4(GATE)[1][0, 0] == 65504.0


# ------------------------------------------------------------------------------------------------ C: the target


def test_targets_that_cannot_be(tmp_path):
    source = tiny.make(tmp_path / "S")
    (tmp_path / "folder").mkdir()
    refused(source, tmp_path / "folder", f"{tmp_path / 'folder'}: a folder", "file name")
    refused(source, tmp_path / "missing" / "out", f"the folder {tmp_path / 'missing'} does not exist")
    os.mkfifo(tmp_path / "pipe")
    refused(source, tmp_path / "pipe", "not a regular file")
    (tmp_path / "file").write_bytes(b"")
    refused(source, tmp_path / "file" / "out", "does not exist")


def test_a_target_is_checked_before_the_source_is_fetched(tmp_path):
    refused("someone/name-that-would-be-downloaded", tmp_path / "missing" / "out", "does not exist; make it first")


def test_a_file_of_the_checkpoint_is_never_the_target(tmp_path):
    source = tiny.make(tmp_path / "S", shards=2)
    for name in ("config.json", tiny.shard_name(0, 2), "tokenizer.json"):
        refused(source, source / name, name, "is a file of the checkpoint")
    pack(source, source / "out.nanoqwen")  # beside the weights is fine, twice too
    pack(source, source / "out.nanoqwen")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o555)
    refused(tiny.make(tmp_path / "S"), tmp_path / "shut" / "out", "cannot be written")


def test_nothing_is_written_beside_the_source(tmp_path):
    """C07's half that concerns packing."""
    source = tiny.make(tmp_path / "S")
    before = {p.name: p.stat().st_mtime_ns for p in source.iterdir()}
    source.chmod(0o555)
    try:
        pack(source, tmp_path / "out")
    finally:
        source.chmod(0o755)
    assert {p.name: p.stat().st_mtime_ns for p in source.iterdir()} == before


def test_too_little_space_is_seen_before_the_first_byte(tmp_path, monkeypatch):
    """C04: needed and free, both named."""
    source = tiny.make(tmp_path / "S")
    needed = pack(source, tmp_path / "once").bytes
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    calls: list = []
    refused(source, tmp_path / "out", "no space", f"{needed:,}", f"{free:,}", progress=lambda *call: calls.append(call))
    assert calls == []


def test_a_disk_that_fills_up_meanwhile(tmp_path, monkeypatch):
    source = tiny.make(tmp_path / "S")

    def full(self, offset, data):
        if offset > 500_000:
            raise self._disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        original(self, offset, data)

    original = packwriter.PackWriter._put
    monkeypatch.setattr(packwriter.PackWriter, "_put", full)
    (tmp_path / "out").write_bytes(b"an older file")
    refused(source, tmp_path / "out", "no space left", str(tmp_path / "out"))


def test_a_real_limit_on_the_file_size(tmp_path):
    """The kernel refuses the write (EFBIG) in the middle of the file: one line, nothing left."""
    source, out = tiny.make(tmp_path / "S"), tmp_path / "target" / "out"
    out.parent.mkdir()
    code = (
        "import resource, sys\nfrom nanoqwen.pack import pack\nfrom nanoqwen.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try:\n    pack(sys.argv[1], sys.argv[2])\nexcept InputError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source), str(out)], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    assert f"{out}: cannot be written: File too large" in done.stdout
    assert list(out.parent.iterdir()) == []


def test_a_small_tmpfs(tmp_path):
    """C04 as reported: OUT on a file system of 200 KiB, in a mount namespace of its own."""
    source, mount = tiny.make(tmp_path / "S"), tmp_path / "small"
    mount.mkdir()
    script = (
        'mount -t tmpfs -o size=200k none "$1" && "$2" -c "import sys; from nanoqwen.pack import pack; pack(sys.argv[1], sys.argv[2])" '
        '"$3" "$1/out" 2>&1 | tail -n 1; ls -A "$1"'
    )
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(mount), sys.executable, str(source)]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if "permitted" in done.stderr or "denied" in done.stderr or "cannot" in done.stderr:
        pytest.skip("this system lets no user mount a tmpfs")
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and "no space: the file needs 1,148," in lines[0] and " are free in " in lines[0], done


# ------------------------------------------------------------------------------------------- C05: being stopped

SLOW_PACK = (
    "import sys, time\nimport nanoqwen.pack as packing\npacking.BLOCK_VALUES = 4096\n"
    "def progress(done, total, name):\n"
    "    if done > total // 2:\n        print('halfway', flush=True)\n        time.sleep(120)\n"
    "packing.pack(sys.argv[1], sys.argv[2], progress=progress)"
)


def stop_halfway(source: Path, out: Path, how: signal.Signals) -> None:
    """Start packing in a process of its own and send it ``how`` when half of the weights are written."""
    child = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(source), str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout.readline() == b"halfway\n"
    assert len(temporaries(out)) >= 1 and not out.exists()
    child.send_signal(how)
    child.wait(timeout=60)
    child.stdout.close()
    assert child.returncode != 0


def test_a_kill_leaves_nothing_at_out_and_the_next_pack_succeeds(tmp_path):
    source, out = tiny.make(tmp_path / "S"), tmp_path / "model [1].nanoqwen"
    wanted = pack(source, tmp_path / "reference").path.read_bytes()
    stop_halfway(source, out, signal.SIGKILL)
    stop_halfway(source, out, signal.SIGKILL)
    assert not out.exists() and len(temporaries(out)) == 1  # the second run swept up after the first
    stale = tmp_path / temporaries(out)[0]
    with pytest.raises(InputError):  # what is left is no model: its header was never written
        open_pack(stale)
    pack(source, out)
    assert out.read_bytes() == wanted and temporaries(out) == []


def test_ctrl_c_cleans_up(tmp_path):
    source, out = tiny.make(tmp_path / "S"), tmp_path / "out"
    stop_halfway(source, out, signal.SIGINT)
    assert not out.exists() and temporaries(out) == []


def test_an_interrupt_keeps_the_old_file(tmp_path):
    source, out = tiny.make(tmp_path / "S"), tmp_path / "out"
    out.write_bytes(b"an older file")

    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, out, progress=interrupt)
    assert out.read_bytes() == b"an older file" and temporaries(out) == []


def test_two_packs_of_the_same_target_at_once(tmp_path):
    """The second neither trips over the first's temporary nor sweeps it away; the last rename wins, with a whole file."""
    source, out = tiny.make(tmp_path / "S"), tmp_path / "out"
    wanted = pack(source, tmp_path / "reference").path.read_bytes()
    inner: list = []

    def progress(done, total, name):
        if done > total // 2 and not inner:
            inner.append(pack(source, out))

    pack(source, out, progress=progress)
    assert len(inner) == 1 and out.read_bytes() == wanted and temporaries(out) == []


def test_a_source_that_shrinks_while_it_is_packed(tmp_path, monkeypatch):
    """A read past the end is an error with a name, not a killed process."""
    monkeypatch.setattr(packing, "BLOCK_VALUES", 4096)
    source, out = tiny.make(tmp_path / "S"), tmp_path / "out"

    def truncate(done, total, name):
        os.truncate(source / "model.safetensors", 1_000_000)

    refused(source, out, "model.safetensors", "ended at byte 1,000,000", progress=truncate)


def test_a_source_that_is_replaced_while_it_is_packed(tmp_path, monkeypatch):
    """The open file is read to its end: old weights, or new ones, never a mixture."""
    monkeypatch.setattr(packing, "BLOCK_VALUES", 4096)
    source, out = tiny.make(tmp_path / "S", seed=0), tmp_path / "out"
    wanted = pack(source, tmp_path / "reference").path.read_bytes()
    other = tiny.make(tmp_path / "other", seed=1) / "model.safetensors"

    def replace(done, total, name):
        if other.exists():
            other.replace(source / "model.safetensors")

    pack(source, out, progress=replace)
    assert out.read_bytes() == wanted


def test_threads_end_with_the_pack(tmp_path):
    import threading

    tensors = tiny.weights()
    tensors[UP].values[0, 0] = np.nan
    with pytest.raises(InputError):
        pack(tiny.make(tmp_path / "S", tensors=tensors), tmp_path / "out", threads=3)
    deadline = time.monotonic() + 5
    while any(t.name.startswith("pack") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name.startswith("pack") for t in threading.enumerate())
