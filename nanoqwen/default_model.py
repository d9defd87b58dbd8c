"""The checkpoint that the package ships, packed into the user's cache folder on first use.

The packed file is named after its content: the hash covers the checkpoint's files and the code that packs them, so an
upgrade of either makes a new file and never serves an old one. Packing is atomic (`packfile.PackWriter` writes beside the
target and renames), so two processes that start at once both end up with a whole file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nanoqwen import cache, demo
from nanoqwen.config import data_path
from nanoqwen.errors import InputError

CHECKPOINT = demo.checkpoint_dir()

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
    path = cache.cache_folder(os.environ, notes) / name

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
    for folder in cache.candidates(environ):
        path = folder / name
        try:
            ours = folder != cache.temporary_cache() or cache.owned(folder)
            if ours and path.is_file() and _opens(path):
                return path
        except OSError:  # a folder that may not even be looked into
            continue
    return None


def _opens(path: Path) -> bool:
    """Whether a cached file is sound at the level of its header, table and tokenizer; a damaged one is packed again."""
    from nanoqwen.packfile import open_pack

    try:
        open_pack(path).close()
        return True
    except InputError:
        return False
