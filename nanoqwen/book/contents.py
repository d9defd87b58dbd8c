"""The list of chapters: titles and questions from ``book/chapters.yml``, links from the notebooks that exist."""

from __future__ import annotations

from nanoqwen.book.source import book_root


def pages() -> list[str]:
    """Every page that ``_toc.yml`` lists, in order, without file name endings."""
    import yaml

    toc = yaml.safe_load((book_root() / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(chapter["file"] for part in toc.get("parts", []) for chapter in part["chapters"])]


def chapters_markdown() -> str:
    """A table of all chapters; those that are pages of this build are links, the others say that they are to come."""
    import yaml

    entries = yaml.safe_load((book_root() / "book" / "chapters.yml").read_text(encoding="utf-8"))
    built = {page.split("/")[-1][:2]: page for page in pages() if page.startswith("notebooks/")}
    lines = ["| | Chapter | Question |", "|---:|:---|:---|"]
    for entry in entries:
        number = f"{entry['number']:02d}"
        title = f"[{entry['title']}](../{built[number]}.ipynb)" if number in built else f"{entry['title']} *(to come)*"
        lines.append(f"| {number} | {title} | {entry['question']} |")
    return "\n".join(lines)
