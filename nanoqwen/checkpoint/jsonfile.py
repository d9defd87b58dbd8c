"""Reading the small JSON files of a checkpoint, with one plain line for each way in which they can be broken."""

from __future__ import annotations

import json
from pathlib import Path

from nanoqwen.checkpoint.safetensors_io import is_lfs_pointer
from nanoqwen.errors import InputError


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file. Raises InputError when it cannot be read or is the stand-in of Git LFS."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}") from None
    if is_lfs_pointer(raw):
        raise InputError(f"{path}: this is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    return raw


def parse_object(raw: bytes, path: Path) -> dict:
    """``raw`` as a JSON object. Raises InputError naming the line where the text breaks off or is not UTF-8 JSON."""
    if not raw.strip():
        raise InputError(f"{path}: the file is empty; download it again")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 (byte {e.start}); download it again") from None
    except json.JSONDecodeError as e:
        raise InputError(f"{path}: not valid JSON at line {e.lineno}, column {e.colno}: {e.msg}; download it again") from None
    except RecursionError:
        raise InputError(f"{path}: not valid JSON: nested too deeply; download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}, an object was expected; download it again")
    return value


def read_object(path: Path) -> dict:
    """The JSON object in ``path``. Raises InputError like ``read_bytes`` and ``parse_object``."""
    return parse_object(read_bytes(path), path)
