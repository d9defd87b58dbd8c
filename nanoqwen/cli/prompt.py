"""Where a prompt comes from: an argument, a file, or standard input. Bytes are read as they are and must be UTF-8.

Line ends are not translated, a byte order mark stays text, NUL is a character like any other. A model sees every one of
these bytes, so a prompt that was quietly repaired would be another prompt.
"""

from __future__ import annotations

import argparse
import sys

from nanoqwen.cli.console import UsageError
from nanoqwen.cli.parser import text
from nanoqwen.errors import InputError

#: UTF-32's first mark begins with UTF-16's, so it comes first.
_BYTE_ORDER_MARKS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", type=text, help="the text to continue; - reads standard input")
    source.add_argument("--prompt-file", metavar="F", help="a UTF-8 file to continue, taken byte for byte (a byte order mark stays text); - reads standard input")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt of `args`. Raises InputError: none given, file not readable, not UTF-8 (with the byte's offset), empty."""
    if args.prompt is not None and args.prompt != "-":
        prompt, source = args.prompt, "--prompt"
    elif args.prompt_file is not None and args.prompt_file != "-":
        with open(args.prompt_file, "rb") as file:
            prompt, source = decode(file.read(), args.prompt_file), args.prompt_file
    else:
        asked = "-" in (args.prompt, args.prompt_file)
        if sys.stdin is None or (not asked and sys.stdin.isatty()):
            raise UsageError("no prompt: give --prompt TEXT or --prompt-file F, or pipe a text in")
        prompt, source = decode(sys.stdin.buffer.read(), "standard input"), "standard input"
    if not prompt:
        raise InputError(f"the prompt is empty ({source}): the model has no start token, so there is nothing to continue; give some text")
    return prompt


def decode(raw: bytes, source: str) -> str:
    """UTF-8 bytes -> text, nothing added, removed or translated. Raises InputError with `source` and the first bad byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = next((name for mark, name in _BYTE_ORDER_MARKS if raw.startswith(mark)), None)
        hint = f"it looks like {encoding}, save it as UTF-8" if encoding else "prompts must be UTF-8"
        raise InputError(f"{source}: byte 0x{raw[error.start]:02X} at offset {error.start} is not valid UTF-8; {hint}") from None
