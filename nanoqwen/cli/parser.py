"""Arguments: a parser whose every complaint is one line, and argument types that say what they wanted.

Options may be written before or after the FILE; `--debug` also before the command. Options are never abbreviated: a script
that says `--temp 1` would change its meaning on the day a second option begins with those letters.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from nanoqwen import __version__
from nanoqwen.cli.console import UsageError

DESCRIPTION = "Pack Qwen2-family checkpoints into INT4 .nanoqwen files, and generate, chat with and validate them."

EPILOG = """\
FILE is a .nanoqwen file made by `nanoqwen pack`. Where it is left out, the checkpoint that the package ships is used;
it is packed into the cache folder once (NANOQWEN_CACHE names another folder).

exit status: 0 done, 1 `validate` ran and something did not pass, 2 wrong argument, file or device (one line on stderr says
which), 3 `bench` measured everything but a peer program, 130 stopped by Ctrl-C, 141 the reader of the output went away, 70 a fault
of nanoqwen itself.
"""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError, a single line, where argparse prints a usage block and exits."""

    def __init__(self, **kwargs):
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110))
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument") and message.endswith("expected one argument") and "--" in message:
            message += " (a value that begins with a dash is written --option=VALUE)"
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def option_names(self) -> list[str]:
        """The long options of this command, in the order of the help page."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def build_parser(groups: Sequence[Callable]) -> tuple[Parser, dict[str, Parser]]:
    """The parser and its commands. Each of `groups` is an `add_parser(add)` of one file of this package."""
    root = Parser(prog="nanoqwen", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--version", action="version", version=f"nanoqwen {__version__}")
    root.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    commands: dict[str, Parser] = {}

    def add(name: str, help: str, run: Callable, **kwargs) -> Parser:
        parser = subparsers.add_parser(name, help=help, **kwargs)
        # SUPPRESS: the command's copy of the option must not reset what stood before the command.
        parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
        parser.set_defaults(run=run)
        commands[name] = parser
        return parser

    for group in groups:
        group(add)
    return root, commands


def parse(root: Parser, commands: dict[str, Parser], argv: Sequence[str]) -> argparse.Namespace:
    """argv -> Namespace with `run`, the function of the command. Raises UsageError; `--help` and `--version` exit."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in commands:
        raise UsageError(f"unknown command {command!r}; the commands are {', '.join(commands)}{_nearest(command, commands)}; "
                         "see `nanoqwen --help`")
    args, extra = root.parse_known_args(argv)
    if extra:
        parser = commands.get(args.command, root)
        word = extra[0].split("=", 1)[0]
        if word.startswith("-"):
            options = parser.option_names()
            raise UsageError(f"unknown option {word!r}; {parser.prog} takes {', '.join(options)}{_nearest(word, options)}; "
                             f"see `{parser.prog} --help`")
        raise UsageError(f"unexpected argument {extra[0]!r}; see `{parser.prog} --help`")
    if args.command is None:
        raise UsageError(f"no command given; the commands are {', '.join(commands)}; see `nanoqwen --help`")
    return args


def _nearest(word: str, known: Sequence[str] | dict) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# -------------------------------------------------------------------------------------------------- argument types
# argparse prints "argument --name: " before what these raise, so they only say what was found and what was wanted.


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Type of an integer argument in [minimum, maximum]; without `maximum` there is no upper end."""
    wanted = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse_value(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, got {text!r}") from None
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, got {value}")
        return value

    return parse_value


def real_number(low: float, high: float = math.inf, *, open_low: bool = False) -> Callable[[str], float]:
    """Type of a finite number in [low, high], or in (low, high] with `open_low`."""
    if high == math.inf:
        wanted = f"greater than {low:g}" if open_low else f"at least {low:g}"
    else:
        wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}]"

    def parse_value(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number {wanted}, got {text!r}") from None
        if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return parse_value


def text(value: str) -> str:
    """Type of text that goes to a tokenizer: valid Unicode even where the locale is not UTF-8.

    Under such a locale Python hands over undecodable bytes as lone surrogates; the bytes are taken back and read as UTF-8.
    """
    try:
        value.encode("utf-8")
        return value
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not valid UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"holds a lone surrogate at character {error.start}") from None


def non_empty_text(value: str) -> str:
    """Type of text of at least one character."""
    value = text(value)
    if not value:
        raise argparse.ArgumentTypeError("must not be empty")
    return value
