"""What pages take from the repository while the book is built.

    ```{token-path} kv            the chapter drawing with a part lit
    ```{scoreboard}               milliseconds a token, from quoted numbers and receipts
    ```{widget} nibble-map        an interactive piece with its still figure
    ```{source} path region       shipped source between its markers
    ```{chapters}                 all chapters, linked as far as they exist
    ```{measured}                 what was measured on a Hopper card, from receipts
    ```{config-tables}            config/nanoqwen.yaml, from its comments
    ```{demo-checkpoint} loss     how the embedded checkpoint was made and how well, from its training record
    ```{errata} cache             a table of the errata appendix
    ```{rented} symptoms          a table of the page about rented cards
    ```{shown-in} 1: The 7B; 5    links to chapters and their headings, as far as they exist
    {fact}`gb-per-token`          one computed number in a sentence

Anything that is missing is an error that names page and line, so ``jupyter-book build -W`` fails instead of printing a gap.
"""

from __future__ import annotations

from typing import Any, Callable

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.util import logging

from nanoqwen.book import display, facts, source, tokenpath
from nanoqwen.book.build import problems
from nanoqwen.book.configdoc import config_markdown
from nanoqwen.book.contents import chapters_markdown
from nanoqwen.book.demodoc import demo_part
from nanoqwen.book.errata import errata_part
from nanoqwen.book.links import chapter_links
from nanoqwen.book.rented import rented_part
from nanoqwen.book.measured import measured_markdown
from nanoqwen.book.scoreboard import scoreboard_html
from nanoqwen.book.widgets import widget
from nanoqwen.errors import NanoqwenError


class _Generated(Directive):
    """Calls a function of this package with the words after the directive's name, and puts what it returns into the page."""

    has_content = False
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        words = self.arguments[0].split() if self.arguments else []
        try:
            made = self.make(words)
        except (NanoqwenError, ValueError, TypeError) as error:
            raise self.error(f"{self.name}: {error}") from error
        if isinstance(made, display.Html):
            return [nodes.raw("", made.markup, format="html")]
        node = nodes.Element()
        self.state.nested_parse(StringList(made.splitlines(), source=self.name), self.content_offset, node, match_titles=True)
        return node.children

    def make(self, words: list[str]) -> display.Html | str:
        raise NotImplementedError


def _directive(function: Callable[..., display.Html | str]) -> type[Directive]:
    return type(function.__name__, (_Generated,), {"make": lambda self, words: function(*words)})


def _source(path: str, region: str | None = None) -> str:
    return source.show(path, region)._repr_markdown_()


def _fact_role(name: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content: Any = None) -> tuple[list, list]:
    try:
        return [nodes.Text(facts.fact(text))], []
    except NanoqwenError as error:
        message = inliner.reporter.error(str(error), line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]


def _without_thebe(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Drop the scripts of a live-kernel service that Jupyter Book always adds: they name another server and nothing here uses them."""
    context["script_files"] = [
        script for script in context.get("script_files", [])
        if "thebe" not in f"{getattr(script, 'filename', script)} {getattr(script, 'attributes', {}).get('body', '')}".lower()
    ]  # fmt: skip


def _check(app: Any) -> None:
    for line in problems():
        logging.getLogger(__name__).warning(line)


def _every_page(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages take facts from files that Sphinx does not watch, so each build reads all of them: none can be stale."""
    return sorted(env.found_docs)


def setup(app: Any) -> dict[str, Any]:
    """Register the directives and the role with Sphinx."""
    app.add_directive("token-path", _directive(lambda *parts: tokenpath.token_path(parts)))
    app.add_directive("scoreboard", _directive(lambda: display.Html(scoreboard_html(), "<scoreboard>")))
    app.add_directive("widget", _directive(widget))
    app.add_directive("source", _directive(_source))
    app.add_directive("chapters", _directive(chapters_markdown))
    app.add_directive("measured", _directive(measured_markdown))
    app.add_directive("config-tables", _directive(config_markdown))
    app.add_directive("demo-checkpoint", _directive(demo_part))
    app.add_directive("errata", _directive(errata_part))
    app.add_directive("rented", _directive(rented_part))
    app.add_directive("shown-in", _directive(lambda *words: f"Shown in {chapter_links(' '.join(words))}."))
    app.add_role("fact", _fact_role)
    app.connect("builder-inited", _check)
    app.connect("env-get-outdated", _every_page)
    app.connect("html-page-context", _without_thebe, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
