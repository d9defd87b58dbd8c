"""Links from appendices to sections of chapters, which turn into words where a chapter is not a page yet."""

from __future__ import annotations

import json
import re

from nanoqwen.book.contents import pages
from nanoqwen.book.source import book_root
from nanoqwen.errors import InputError


def chapter_links(places: str) -> str:
    """Markdown for ``"1: The 7B; 5: What Hopper does; 7"``: chapters by number, each with one of its headings or alone.

    Raises InputError for a heading that its chapter does not have: sections are renamed, and then this says so while the book is built.
    """
    return "; ".join(_link(*(part.strip() for part in place.partition(":")[::2])) for place in places.split(";"))


def _link(number: str, heading: str) -> str:
    chapter = f"chapter {int(number):02d}"
    page = next((p for p in pages() if re.fullmatch(rf"notebooks/{int(number):02d}_\w+", p)), None)
    if page is None:
        return f"{chapter} (to come)"
    if not heading:
        return f"[{chapter}](../{page}.ipynb)"
    if heading not in headings(page):
        raise InputError(f"{page}.ipynb has no heading {heading!r}; it has: {', '.join(headings(page))}")
    return f"[{chapter}, {heading}](../{page}.ipynb#{anchor(heading)})"


def headings(page: str) -> list[str]:
    """The headings of a notebook's markdown, below its title."""
    cells = json.loads((book_root() / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"^##+ (.+?)\s*$", text, re.M)


def anchor(heading: str) -> str:
    """The anchor that MyST makes of a heading: as code hosts do it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
