"""A folder of files that appears whole or not at all.

Files are written into a hidden folder beside the target, synced to disk, and the folder is renamed at the end: a rename replaces a target
that is absent or an empty folder, and fails on any other, so nothing that exists is ever overwritten.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from nanoqwen.errors import InputError


class NewFolder:
    """Context manager: ``write`` files, and on a clean exit the folder ``path`` is there. ``bytes`` counts what was written.

    Raises InputError for a target that exists and is not an empty folder, one that cannot be written, and too little disk space.
    """

    def __init__(self, path: Path, expected_bytes: int) -> None:
        self.path = path
        self.bytes = 0
        self._expected = expected_bytes
        self._target = Path(os.path.realpath(path))  # a symlink keeps pointing at what it pointed at
        self._temporary = self._target.with_name(f".{self._target.name}.{secrets.token_hex(6)}.tmp")
        self._lock: int | None = None

    def __enter__(self) -> NewFolder:
        self._check_target()
        parent = self._target.parent
        self._remove_stale()
        free = shutil.disk_usage(parent).free
        if free < self._expected:
            raise InputError(f"{self.path}: no space: the folder needs {self._expected:,} bytes, {free:,} are free in {parent}")
        try:
            self._temporary.mkdir()
        except OSError as e:
            raise InputError(f"{self.path}: cannot write in {parent}: {e.strerror}") from None
        self._lock = _lock(self._temporary)
        return self

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Make the file ``name``, let ``fill`` write it, and sync it to disk."""
        try:
            with open(self._temporary / name, "xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                self.bytes += file.tell()
        except OSError as e:
            raise self._disk_error(e) from None

    def _check_target(self) -> None:
        """Refuse before anything is written."""
        if self._target.is_dir():
            try:
                first = next(iter(sorted(p.name for p in self._target.iterdir())), None)
            except OSError as e:
                raise InputError(f"{self.path}: cannot be read: {e.strerror}") from None
            if first is not None:
                raise InputError(f"{self.path}: the folder exists and is not empty (it holds {first}); name a new folder, or remove that one")
        elif os.path.lexists(self._target):
            raise InputError(f"{self.path}: exists and is not a folder; name a new folder for the output")
        parent = self._target.parent
        if not parent.is_dir():
            raise InputError(f"{self.path}: the folder {parent} does not exist; make it first")
        if not os.access(parent, os.W_OK):
            raise InputError(f"{self.path}: the folder {parent} cannot be written to; choose another place for the output")

    def _remove_stale(self) -> None:
        """Delete what a killed export of the same target left behind. A live one holds a lock on its own."""
        prefix = f".{self._target.name}."
        for old in self._target.parent.iterdir():
            if old.name.startswith(prefix) and old.name.endswith(".tmp") and len(old.name) == len(self._temporary.name) and old.is_dir():
                lock = _lock(old)
                if lock is not None:
                    shutil.rmtree(old, ignore_errors=True)
                    os.close(lock)

    def _disk_error(self, e: OSError) -> InputError:
        if e.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            free = shutil.disk_usage(self._target.parent).free
            return InputError(f"{self.path}: no space left while writing: the folder needs {self._expected:,} bytes, {free:,} are free")
        return InputError(f"{self.path}: cannot be written: {e.strerror}")

    def _finish(self) -> None:
        try:
            _sync(self._temporary)
            os.rename(self._temporary, self._target)
            _sync(self._target.parent)
        except OSError as e:
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise InputError(f"{self.path}: was made by something else in the meantime; name a new folder for the output") from None
            raise self._disk_error(e) from None

    def __exit__(self, kind: type | None, *exc: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._temporary.exists():
                shutil.rmtree(self._temporary, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """A descriptor of ``folder`` with an exclusive lock on it; None when another process holds it or locks are not supported."""
    descriptor = None
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except (ImportError, OSError):
        if descriptor is not None:
            os.close(descriptor)
        return None


def _sync(folder: Path) -> None:
    """Make the names in a folder durable, where the platform lets a folder be synced."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
