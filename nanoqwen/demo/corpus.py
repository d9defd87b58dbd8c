"""The training corpus: Python source that is already installed and that its licence lets us learn from.

Nothing is downloaded. A package is read only if its own metadata names permissive licences and no other; what is skipped
is recorded with the reason. Of its files, tests, vendored copies of other projects, generated tables and near-duplicates
are left out. One file in a hundred is held out, chosen by a hash of its content, and so are a few well-known modules of
the standard library, chosen by name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# SPDX identifiers accepted. The last three lines never stand alone in the packages met so far: they name small parts
# inside a BSD or Apache project (NumPy lists five) and ask for no more than the licences above them.
PERMISSIVE = {
    "MIT", "MIT-0", "MIT-CMU", "HPND", "ISC", "Apache-2.0",
    "0BSD", "BSD-2-Clause", "BSD-3-Clause", "BSD-3-CLAUSE", "BSD",
    "PSF-2.0", "Python-2.0", "Python-2.0.1", "CNRI-Python",
    "Zlib", "CC0-1.0", "BSL-1.0", "Unlicense", "LLVM-exception",
}
PERMISSIVE_CLASSIFIERS = {
    "MIT License": "MIT", "MIT No Attribution License (MIT-0)": "MIT-0", "BSD License": "BSD", "ISC License (ISCL)": "ISC",
    "Apache Software License": "Apache-2.0", "Python Software Foundation License": "PSF-2.0",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
}
_FREE_TEXT = re.compile(  # the short forms people type into the old License field
    r"(the )?(new |modified |revised )?(MIT|(?:[023][- ]clause )?BSD|Apache|ISC|PSF)"
    r"(l| software)?([- ,]*(version )?[0-9.]+)?([- ](clause|license|licence))*(,? (version )?[0-9.]+)?", re.IGNORECASE)
_COPYLEFT = re.compile(r"\b[AL]?GPL|GNU (Affero|General|Lesser|Library)|Mozilla Public|\bMPL\b|proprietary|Creative Commons|CC[- ]BY",
                       re.IGNORECASE)

HELD_OUT_MODULES = ("bisect", "colorsys", "fractions", "heapq", "shlex", "textwrap")
HELD_OUT_ONE_IN = 100

_SKIPPED_FOLDERS = {
    "test", "tests", "testing", "_testing", "conftest", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages",
    "_vendor", "vendor", "vendored", "_vendored", "_vendored_packages", "third_party", "thirdparty", "externals", "extern",
    "_extern", "_external", "external", "generated", "encodings", "pydoc_data", "ensurepip", "__pycache__",
}
_SKIPPED_NAMES = re.compile(r"(^test_|_test\.py$|_tests\.py$|^conftest\.py$|_pb2(_grpc)?\.py$|^_?version\.py$)")
_MAX_BYTES, _MIN_BYTES = 200_000, 300
PACKAGE_CAP = 14_000_000  # bytes of one package, so that no single code base gives the model its accent


@dataclass(frozen=True)
class SourceFile:
    """One cleaned source file: `text` is NFC-neutral UTF-8 with LF line ends and without its licence header."""

    package: str
    path: str
    text: str
    digest: str


@dataclass
class Package:
    """An installed distribution: its licence by its own metadata, and the .py files it owns."""

    name: str
    version: str
    licence: str
    paths: list[tuple[str, Path]] = field(default_factory=list)


@dataclass
class Corpus:
    """Training and held-out files, and the account of how they were chosen."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    named: list[SourceFile]  # HELD_OUT_MODULES, as they are installed, cleaned
    account: dict


def permissive_licence(metadata) -> str | None:
    """The licence label of a distribution if every licence that its metadata names is permissive, else None.

    The SPDX expression decides when there is one: every identifier in it must be in PERMISSIVE, except that one side of
    an OR is enough. Then the trove classifiers; then a short free-text field.
    """
    expression = metadata.get("License-Expression")
    if not expression and re.search(r" (AND|OR) ", metadata.get("License") or ""):
        expression = metadata["License"] if len(metadata["License"]) < 200 else None
    if expression:
        sides = [re.findall(r"[A-Za-z0-9.+-]+", side) for side in re.split(r"\bOR\b", expression)]
        fits = [all(word in PERMISSIVE for word in side if word not in ("AND", "WITH")) for side in sides]
        # A bracketed OR cannot be split like this; then all identifiers must be permissive.
        return expression if (all(fits) if "(" in expression else any(fits)) else None
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    classifiers = [c for c in classifiers if c not in ("OSI Approved", "DFSG approved")]
    if classifiers:
        known = [PERMISSIVE_CLASSIFIERS.get(c) for c in classifiers]
        return " AND ".join(known) if all(known) else None
    text = (metadata.get("License") or "").strip()
    return text if _FREE_TEXT.fullmatch(text) else None


def installed_packages() -> tuple[list[Package], list[dict]]:
    """(packages that may be read, packages that may not), the standard library first, the rest by name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    library = Package("CPython standard library", platform.python_version(), "PSF-2.0",
                      [(str(p.relative_to(stdlib)), p) for p in sorted(stdlib.rglob("*.py"))])
    accepted, refused, seen = [], [], set()
    for dist in importlib.metadata.distributions():
        name = ((dist.metadata and dist.metadata.get("Name")) or "").lower().replace("_", "-")
        if not name or name in seen:
            continue
        seen.add(name)
        licence = permissive_licence(dist.metadata)
        if licence is None:
            named = dist.metadata.get("License-Expression") or dist.metadata.get("License") or "none named"
            refused.append({"name": name, "version": dist.version, "licence": " ".join(named.split())[:80]})
            continue
        files = [f for f in dist.files or [] if f.suffix == ".py" and ".." not in f.parts]
        paths = sorted((str(f), Path(dist.locate_file(f))) for f in files)
        accepted.append(Package(name, dist.version, licence, paths))
    return [library, *sorted(accepted, key=lambda p: p.name)], sorted(refused, key=lambda r: r["name"])


def worth_reading(relative: str) -> bool:
    """Whether a file's path alone speaks for it: no tests, vendored copies, generated modules."""
    parts = Path(relative).parts
    return not (_SKIPPED_FOLDERS & set(parts[:-1])) and not _SKIPPED_NAMES.search(parts[-1])


def clean(raw: bytes) -> str | None:
    """The text that the model reads, or None when the file is not plain, parseable, human-written code.

    The leading comment block is dropped where it is a licence header: thousands of equal headers would teach the model
    to recite them. A header that names a copyleft or proprietary licence rejects the file, whatever its package says.
    """
    if not _MIN_BYTES <= len(raw) <= _MAX_BYTES:
        return None
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        return None  # lists of imports, tables of constants
    if _COPYLEFT.search(text[:3000]) or "\t" in text or "\r" in text or "\0" in text or "\f" in text:
        return None
    lines = text.split("\n")
    longest, mean = max(map(len, lines)), len(text) / len(lines)
    ascii_share = sum(map(str.isascii, text)) / len(text)
    digit_share = sum(map(str.isdigit, text)) / len(text)
    if longest > 400 or mean > 70 or ascii_share < 0.97 or digit_share > 0.12:
        return None
    header = re.match(r"(?:#[^\n]*\n|\s*\n)+", text)
    if header and re.search(r"copyright|licen[sc]e", header.group(), re.IGNORECASE):
        text = text[header.end():]
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n") + "\n"
    return text if len(text) >= _MIN_BYTES else None


def read_source(path: Path) -> str | None:
    """`clean` of a file on disk; None also when it cannot be read."""
    try:
        return clean(path.read_bytes())
    except OSError:
        return None


def telling_lines(text: str) -> set[int]:
    """Hashes of the lines that identify a text: 30 characters or more, no comments, no imports."""
    stripped = (line.strip() for line in text.split("\n"))
    return {hash(s) for s in stripped if len(s) >= 30 and not s.startswith(("#", "import ", "from "))}


def drop_near_duplicates(files: Iterable[SourceFile], limit: float = 0.6) -> list[SourceFile]:
    """Files in order, without exact copies and without those that repeat more than `limit` of their telling lines."""
    kept, digests, seen = [], set(), set()
    for file in files:
        lines = telling_lines(file.text)
        if file.digest in digests or (lines and len(lines & seen) / len(lines) > limit):
            continue
        digests.add(file.digest)
        seen |= lines
        kept.append(file)
    return kept


def split_held_out(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """(train, held_out): by content hash and by name; training files too close to a held-out one are dropped."""
    def held(file: SourceFile) -> bool:
        return Path(file.path).stem in HELD_OUT_MODULES or int(file.digest[:8], 16) % HELD_OUT_ONE_IN == 0

    held_out = [f for f in files if held(f)]
    secret = set().union(*(telling_lines(f.text) for f in held_out)) if held_out else set()
    train = []
    for file in files:
        lines = telling_lines(file.text)
        if not held(file) and not (lines and len(lines & secret) / len(lines) > 0.2):
            train.append(file)
    return train, held_out


def _capped(files: list[SourceFile]) -> list[SourceFile]:
    """At most PACKAGE_CAP bytes of each package, chosen by digest, that is, at random but always the same."""
    kept, used = [], {}
    for file in sorted(files, key=lambda f: f.digest):
        used[file.package] = used.get(file.package, 0) + len(file.text)
        if used[file.package] <= PACKAGE_CAP:
            kept.append(file)
    return kept


def build_corpus(pool, max_files: int | None = None) -> Corpus:
    """Read, clean, deduplicate and split everything installed. `pool` is a multiprocessing pool; `max_files` a cap for trials."""
    packages, refused = installed_packages()
    jobs = [(package, relative, path) for package in packages for relative, path in package.paths if worth_reading(relative)]
    if max_files:
        named = [j for j in jobs if j[0] is packages[0] and Path(j[1]).stem in HELD_OUT_MODULES]
        jobs = named + jobs[:: max(1, len(jobs) // max_files)]
    texts = pool.map(read_source, [path for _, _, path in jobs], chunksize=64)
    files = []
    for (package, relative, _), text in zip(jobs, texts):
        if text is not None:
            files.append(SourceFile(package.name, relative, text, hashlib.sha256(text.encode()).hexdigest()))
    files = _capped(files)
    files.sort(key=lambda f: (f.package != packages[0].name, f.package, f.path))
    distinct = drop_near_duplicates(files)
    train, held_out = split_held_out(distinct)
    named = [f for f in held_out if f.package == packages[0].name and f.path[:-3] in HELD_OUT_MODULES]
    table = []
    for package in packages:
        mine = [f for f in train if f.package == package.name]
        if mine:
            table.append({"name": package.name, "version": package.version, "licence": package.licence,
                          "files": len(mine), "bytes": sum(len(f.text.encode()) for f in mine)})
    account = {
        "files_considered": len(jobs), "files_clean": len(files), "files_distinct": len(distinct),
        "train_files": len(train), "train_bytes": sum(row["bytes"] for row in table),
        "held_out_files": len(held_out), "held_out_bytes": sum(len(f.text.encode()) for f in held_out),
        "held_out_modules": [f"{f.package}/{f.path}" for f in named],
        "dropped_as_close_to_held_out": len(distinct) - len(train) - len(held_out),
        "packages": table, "packages_refused": refused,
    }
    return Corpus(train, held_out, named, account)
