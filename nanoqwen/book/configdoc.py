"""The configuration page, rendered from the comments of ``config/nanoqwen.yaml`` itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoqwen.config import Settings, data_path
from nanoqwen.errors import InputError

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_.-]+):(?P<value>.*)$")


@dataclass(frozen=True)
class Key:
    """A key of the file: its dotted path, its value, and the comment that documents it ("" when a parent's comment does)."""

    path: tuple[str, ...]
    value: Any
    doc: str


def documented_keys(text: str) -> list[Key]:
    """Every key of the YAML ``text`` that holds a value, in order, with its comment.

    A comment stands directly above its key. A key without one is refused (InputError), unless it sits in a table that has
    one for the whole, as the dimensions of a model do. So is a key whose comment could not be found because of its form.
    """
    import yaml

    comments = _comments(text)
    keys: list[Key] = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                walk(value, (*path, str(name)))
            return
        doc = comments.get(path, "")
        if not doc and not (len(path) > 2 and comments.get(path[:-1])):
            raise InputError(f"config/nanoqwen.yaml: {'.'.join(path)} has no comment above it; say there what it means")
        keys.append(Key(path, node, doc))

    walk(yaml.safe_load(text), ())
    return keys


def _comments(text: str) -> dict[tuple[str, ...], str]:
    """Path of a key -> the comment lines directly above it, joined."""
    found: dict[tuple[str, ...], str] = {}
    stack: list[tuple[int, str]] = []
    pending: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            pending.append(stripped.lstrip("# ").rstrip())
            continue
        if match := _KEY.match(line):
            indent = len(match["indent"])
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, match["key"]))
            if pending:
                found[tuple(name for _, name in stack)] = " ".join(pending)
        pending = []
    return found


def readers(section: str) -> list[str]:
    """Modules of the package that take ``section`` from the settings, as dotted names without the package's."""
    package = Path(__file__).resolve().parents[1]
    spec = Settings.__annotations__.get(section, "").removeprefix("dict[str, ").removesuffix("]")
    pattern = re.compile(rf"\bload_settings\(\)\.{section}\b|\bsettings\.{section}\b" + (rf"|\b{spec}\b" if spec else ""))
    names = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        if module != "config" and not module.startswith("book") and pattern.search(path.read_text(encoding="utf-8")):
            names.append(module)
    return names


def config_markdown() -> str:
    """The page's body: for each section its keys, values and meanings, and who reads them."""
    keys = documented_keys(data_path("config", "nanoqwen.yaml").read_text(encoding="utf-8"))
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.path[0], []).append(key)
    out: list[str] = []
    for section, members in sections.items():
        out += [f"## `{section}`", ""]
        parts: dict[tuple[str, ...], list[Key]] = {}
        for key in members:
            parts.setdefault(key.path[1:-1], []).append(key)
        for inner, rows in parts.items():
            out += _table(inner, rows)
        if modules := readers(section):
            out += [f"Read by: {', '.join(f'`{m}`' for m in modules)}.", ""]
    return "\n".join(out)


def _table(inner: tuple[str, ...], rows: list[Key]) -> list[str]:
    documented = any(row.doc for row in rows)
    lines = []
    if inner:
        comment = _comments(data_path("config", "nanoqwen.yaml").read_text(encoding="utf-8")).get((rows[0].path[0], *inner), "")
        lines += [f"**`{'.'.join(inner)}`**: {_escape(comment)}", ""]
    lines += ["| Key | Value | Meaning |", "|:---|:---|:---|"] if documented else ["| Key | Value |", "|:---|:---|"]
    for row in rows:
        cells = [f"`{row.path[-1]}`", f"`{_value(row.value)}`"] + ([_escape(row.doc)] if documented else [])
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    """Markdown signs that a comment means literally; backticks keep their meaning."""
    return re.sub(r"([*_|<\[])", r"\\\1", text)
