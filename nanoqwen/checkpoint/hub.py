"""Downloading a checkpoint by its hub name. ``huggingface_hub`` is imported only when a name is given."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nanoqwen.errors import InputError

#: What a checkpoint needs; weights in other formats stay on the server.
ALLOW = ("*.safetensors", "*.json", "*.jinja", "*.txt")
IGNORE = ("*/*",)  # nothing from subfolders: other variants of the same model live there

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HUB_NAME = re.compile(f"{_PART}/{_PART}")
_FILE_ENDINGS = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".nanoqwen", ".zip", ".tar", ".gz")


def is_hub_name(text: str) -> bool:
    """Whether ``text`` reads as ``org/name`` rather than as a path. A first part that is a folder here makes it a path."""
    if not _HUB_NAME.fullmatch(text) or "--" in text or ".." in text or text.lower().endswith(_FILE_ENDINGS):
        return False
    return not Path(text.split("/")[0]).exists()


def download(name: str) -> Path:
    """The local snapshot of the hub repository ``name``, downloaded or completed first.

    An interrupted download resumes; what is in the cache is not fetched again. Without a network a complete cached
    snapshot is used. Raises InputError, one line, when the name is unknown, access is refused, or nothing can be reached.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"{name}: downloading needs the package huggingface_hub; `pip install huggingface_hub`, or pass a local folder") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(ALLOW), ignore_patterns=list(IGNORE)))
    except Exception as e:  # its errors share no base class across versions and HTTP libraries
        raise InputError(f"{name}: {_reason(e)}") from None


def _reason(error: Exception) -> str:
    """Why a download failed, in words, by the names of the error's classes (they moved between versions, the names did not)."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "access to this hub repository must be granted first; accept its terms on its page and log in (`hf auth login`)"
    if "RepositoryNotFoundError" in kinds:
        return "no such folder here and no such repository on the hub; check the name (a private one needs `hf auth login`)"
    if isinstance(error, OSError) and error.errno is not None and "ConnectionError" not in kinds:
        return f"the download failed: {error.strerror or error} ({error.filename or 'hub cache'})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return "no such folder here, it is not in the hub's cache, and HF_HUB_OFFLINE forbids a download; pass a local folder"
    if kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "TimeoutException", "Timeout", "OfflineModeIsEnabled"}:
        return "no such folder here, it is not in the hub's cache, and the hub cannot be reached; connect, or pass a local folder"
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"the download failed: {line}"
