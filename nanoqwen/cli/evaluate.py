"""`nanoqwen eval`: scores. Each subcommand is a file of its own, `eval_NAME.py`, shaped like any command's."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable

from nanoqwen.cli.console import UsageError
from nanoqwen.cli.parser import Parser

MODULES = ("eval_humaneval", "eval_perplexity")


def add_parser(add) -> None:
    parser = add("eval", "score a model", run, description="Score a model on a public measure. See `nanoqwen eval MEASURE --help`.")
    measures = parser.add_subparsers(dest="measure", metavar="MEASURE", title="measures", parser_class=_MeasureParser)
    names: list[str] = []

    def add_measure(name: str, help: str, run: Callable, **kwargs) -> Parser:
        measure = measures.add_parser(name, help=help, **kwargs)
        measure.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
        measure.set_defaults(run=run)
        names.append(name)
        return measure

    for module in MODULES:
        if importlib.util.find_spec(f"nanoqwen.cli.{module}") is not None:
            importlib.import_module(f"nanoqwen.cli.{module}").add_parser(add_measure)
    parser.set_defaults(measures=names)


def run(args: argparse.Namespace) -> int:
    """Without a measure there is nothing to run."""
    raise UsageError(f"no measure given; the measures are {', '.join(args.measures)}; see `nanoqwen eval --help`")


class _MeasureParser(Parser):
    """Refuses unknown options itself: the command above would answer with its own options instead of the measure's."""

    def parse_known_args(self, args=None, namespace=None):
        namespace, extra = super().parse_known_args(args, namespace)
        if extra:
            word = extra[0].split("=", 1)[0]
            if word.startswith("-"):
                self.error(f"unknown option {word!r}; {self.prog} takes {', '.join(self.option_names())}")
            self.error(f"unexpected argument {extra[0]!r}")
        return namespace, extra
