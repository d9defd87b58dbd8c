"""The user's cache folder: packed models and compiled kernels, which cost time to make again and nothing else.

NANOQWEN_CACHE names it; otherwise XDG_CACHE_HOME/nanoqwen or ~/.cache/nanoqwen; and where none of these can be written (a
read-only home on a cluster), a private folder in the temporary directory, with a note that says so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from nanoqwen.errors import InputError

CACHE_VARIABLE = "NANOQWEN_CACHE"


def cache_folder(environ: Mapping[str, str], notes: list[str]) -> Path:
    """The folder to keep things in, made if needed and checked to be writable.

    In order: NANOQWEN_CACHE (an explicit choice, so a failure there is an error), XDG_CACHE_HOME/nanoqwen or
    ~/.cache/nanoqwen, and when that one cannot be written a private folder in the temporary directory, with a note.
    Raises InputError naming the variable when none can be written.
    """
    folders = candidates(environ)
    problems = []
    for folder in folders:
        problem = why_not_writable(folder, private=folder == temporary_cache())
        if problem is None:
            if problems:
                notes.append(f"{'; '.join(problems)}: using {folder}; set {CACHE_VARIABLE} to keep what is cached elsewhere")
            return folder
        problems.append(f"{folder} cannot be written ({problem})")
    if len(folders) == 1:
        raise InputError(f"{CACHE_VARIABLE}: {problems[0]}; set it to a folder that can be written")
    raise InputError(f"no folder to cache in: {'; '.join(problems)}; set {CACHE_VARIABLE} to one that can")


def use_for_cupy(environ: MutableMapping[str, str]) -> None:
    """Let CuPy keep what it compiles below our cache folder, unless CUPY_CACHE_DIR names another one.

    To be called before CuPy is imported: it makes its own folder then, in the home directory, and where that cannot be written
    even the import fails.
    """
    if not environ.get("CUPY_CACHE_DIR"):
        try:
            environ["CUPY_CACHE_DIR"] = str(cache_folder(environ, []) / "cupy")
        except InputError:  # no folder at all: CuPy will say so
            environ.pop("CUPY_CACHE_DIR", None)  # CuPy would take an empty one for a name


def cupy_trouble(error: Exception, environ: Mapping[str, str]) -> str | None:
    """What to say when CuPy's import raised ``error`` because its cache folder cannot be made; None when it is not about that folder.

    CuPy makes it, parents first: the error names the folder or one above it.
    """
    chosen = environ.get("CUPY_CACHE_DIR")
    folder = Path(chosen or os.path.expanduser("~/.cupy/kernel_cache"))
    if not isinstance(error, OSError) or error.filename is None or Path(error.filename) not in (folder, *folder.parents):
        return None
    if chosen:
        return f"CUPY_CACHE_DIR: {folder} cannot be written ({error.strerror}); set it to a folder that can, or unset it"
    return f"CuPy's folder {folder} cannot be written ({error.strerror}); set CUPY_CACHE_DIR to one that can"


def candidates(environ: Mapping[str, str]) -> list[Path]:
    """The folders to try, in order; an explicit choice is the only one."""
    if chosen := environ.get(CACHE_VARIABLE):
        return [Path(chosen).expanduser()]
    return [user_cache(environ), temporary_cache()]


def temporary_cache() -> Path:
    """This user's folder in the temporary directory; not created, not checked."""
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
        if private and not owned(folder):
            return "belongs to another user"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def owned(folder: Path) -> bool:
    """Whether the folder belongs to this user: one under a shared directory may be somebody's trap."""
    return not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()
