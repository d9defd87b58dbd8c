"""The checkpoint that the package ships, packed into the user's cache folder on first use.

The packed file is named after its content: the hash covers the checkpoint's files and the code that packs them, so an
upgrade of either makes a new file and never serves an old one. Packing is atomic (`packfile.PackWriter` writes beside the
target and renames), so two processes that start at once both end up with a whole file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from nanoqwen.config import data_path
from nanoqwen.errors import InputError

CHECKPOINT = Path(__file__).resolve().parent / "demo" / "checkpoint"
CACHE_VARIABLE = "NANOQWEN_CACHE"

# What decides the packed bytes besides the checkpoint: a change in any of these makes another file.
_PACKER_SOURCES = ("checkpoint/*.py", "int4.py", "model.py", "pack.py", "packfile.py", "packwriter.py")
# What the packer reads of a checkpoint; a receipt of the training beside them changes nothing.
_CHECKPOINT_SUFFIXES = (".json", ".jinja", ".safetensors")


def ensure_default_pack(
    *, checkpoint: Path | None = None, notes: list[str] | None = None, progress: Callable[[int, int, str], None] | None = None
) -> Path:
    """Path of the shipped model as a `.nanoqwen` file, packing it first when the cache lacks it.

    `notes` collects lines a user should see (where it was packed to, a cache folder that could not be written). `progress`
    is called as (done_bytes, total_bytes, label) while packing. Raises InputError when the checkpoint is missing or no cache
    folder can be written.
    """
    checkpoint = checkpoint or CHECKPOINT
    notes = [] if notes is None else notes
    name = pack_name(checkpoint)  # first: a missing checkpoint is the clearer message
    if cached := cached_pack(name, os.environ):
        return cached
    path = cache_folder(os.environ, notes) / name

    from nanoqwen.pack import pack

    report = pack(checkpoint, path, progress=progress)
    notes.append(f"packed the embedded checkpoint into {path} ({report.bytes:,} bytes, {report.seconds:.1f} s); later runs reuse it")
    return path


def pack_name(checkpoint: Path) -> str:
    """File name of the packed `checkpoint`, `nanoqwen-demo-<16 hex digits>.nanoqwen`.

    The digits are a SHA-256 over the checkpoint's files and the packer's sources. Raises InputError when the checkpoint is
    missing.
    """
    files = sorted(p for p in checkpoint.glob("*") if p.suffix in _CHECKPOINT_SUFFIXES and p.is_file())
    if not any(p.suffix == ".safetensors" for p in files):
        raise InputError(f"the embedded checkpoint is not in this installation ({checkpoint}); name a FILE made by `nanoqwen pack`")
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    sources = [path for pattern in _PACKER_SOURCES for path in sorted(package.glob(pattern))]
    for path in [*files, *sources, data_path("config", "nanoqwen.yaml")]:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}\n".encode())
        digest.update(content)
    return f"nanoqwen-demo-{digest.hexdigest()[:16]}.nanoqwen"


def cached_pack(name: str, environ: Mapping[str, str]) -> Path | None:
    """The packed file where it already lies, sound and ours; a read-only cache that was filled before is as good as any."""
    for folder in _candidates(environ):
        path = folder / name
        try:
            ours = folder != _temporary_cache() or _owned(folder)
            if ours and path.is_file() and _opens(path):
                return path
        except OSError:  # a folder that may not even be looked into
            continue
    return None


def cache_folder(environ: Mapping[str, str], notes: list[str]) -> Path:
    """The folder to pack into, made if needed and checked to be writable.

    In order: NANOQWEN_CACHE (an explicit choice, so a failure there is an error), XDG_CACHE_HOME/nanoqwen or
    ~/.cache/nanoqwen, and when that one cannot be written a private folder in the temporary directory, with a note.
    Raises InputError naming the variable when none can be written.
    """
    folders = _candidates(environ)
    problems = []
    for folder in folders:
        problem = why_not_writable(folder, private=folder == _temporary_cache())
        if problem is None:
            if problems:
                notes.append(f"{'; '.join(problems)}: using {folder}; set {CACHE_VARIABLE} to keep the packed model elsewhere")
            return folder
        problems.append(f"{folder} cannot be written ({problem})")
    if len(folders) == 1:
        raise InputError(f"{CACHE_VARIABLE}: {problems[0]}; set it to a folder that can be written")
    raise InputError(f"no folder to pack the embedded checkpoint into: {'; '.join(problems)}; set {CACHE_VARIABLE} to one that can")


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    if chosen := environ.get(CACHE_VARIABLE):
        return [Path(chosen).expanduser()]
    return [user_cache(environ), _temporary_cache()]


def _temporary_cache() -> Path:
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"nanoqwen-{user}"


def user_cache(environ: Mapping[str, str]) -> Path:
    """XDG_CACHE_HOME/nanoqwen or ~/.cache/nanoqwen; not created, not checked. A relative XDG path is ignored, as XDG asks."""
    xdg = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "nanoqwen"
    return Path(environ.get("HOME") or os.path.expanduser("~")) / ".cache" / "nanoqwen"


def why_not_writable(folder: Path, private: bool = False) -> str | None:
    """None when a file can be created in `folder` (made if needed), else the reason.

    A trial file is the only honest test: permission bits say nothing about read-only mounts, quotas, or a user who is root.
    `private` is for a folder under a shared one: it is made for this user alone, and must not belong to another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private and not _owned(folder):
            return "belongs to another user"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _owned(folder: Path) -> bool:
    return not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()


def _opens(path: Path) -> bool:
    """Whether a cached file is sound at the level of its header, table and tokenizer; a damaged one is packed again."""
    from nanoqwen.packfile import open_pack

    try:
        open_pack(path).close()
        return True
    except InputError:
        return False
