"""`nanoqwen chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import sys

from nanoqwen.cli.console import EXIT_OK, note, one_line, out
from nanoqwen.cli.generate import summary
from nanoqwen.cli.parser import text, whole_number
from nanoqwen.cli.prompt import decode
from nanoqwen.cli.session import add_engine_options, add_file, add_sampling_options, open_session, sampling_params
from nanoqwen.errors import NanoqwenError

HELP = "/reset starts over, /system TEXT sets the system prompt and starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(add) -> None:
    parser = add("chat", "talk to the model", run, description=(
        "Talk to the model, one line a message. Answers go to stdout, everything else to stderr, so a pipe of messages gives a "
        "file of answers. Marker text such as <|im_end|> in a message is plain text. Commands: " + HELP + "."))
    add_file(parser)
    parser.add_argument("--system", metavar="TEXT", type=text, default=None, help="system prompt, in place of the chat template's own")
    parser.add_argument("--max-tokens", metavar="N", type=whole_number(0), default=None, help="most tokens an answer (default: what the context holds)")
    parser.add_argument("--show-prompt", action="store_true", help="print each rendered prompt and its token count on stderr")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    with open_session(args) as (_, tokenizer, engine):
        from nanoqwen.chat import ChatSession

        def start(system: str | None) -> ChatSession:
            return ChatSession(engine, tokenizer, system=system)

        session = start(args.system)
        for line in tokenizer.chat_template.notes:
            note(line)
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if terminal:
            _line_editing()
            note(HELP)
        messages = _typed_lines() if terminal else _piped_lines()
        while (line := next(messages, None)) is not None:
            if not line.strip():
                continue
            command, _, rest = line.strip().partition(" ")
            if command == "/exit":
                break
            if command == "/reset":
                session.reset()
                note("conversation forgotten")
            elif command == "/system":
                session = start(rest.strip() or None)
                note("new system prompt, conversation forgotten" if rest.strip() else "the template's own system prompt, conversation forgotten")
            elif command.startswith("/") and command[1:].isalpha():
                note(f"unknown command {command}; {HELP}")
            else:
                _answer(session, line, args, params, terminal)
    return EXIT_OK


def _answer(session, line: str, args: argparse.Namespace, params, terminal: bool) -> None:
    """Stream one answer. What goes wrong with this message is one line, and the conversation goes on."""
    try:
        if args.show_prompt:
            rendered, ids = session.preview(line)
            sys.stderr.write(rendered + "\n")
            note(f"{len(ids):,} prompt tokens")
        generation = session.say(line, max_tokens=args.max_tokens, params=params, stop=args.stop)
    except NanoqwenError as error:
        note(f"error: {one_line(error)}")
        return
    try:
        for piece in generation:
            out(piece.text, end="")
        out()
    except KeyboardInterrupt:
        generation.close()
        out()
        note("answer stopped; what was said so far stays in the conversation")
        if not terminal:  # a pipe has nobody who would type the next message
            raise
    except NanoqwenError as error:
        out()
        note(f"error: {one_line(error)}")
        return
    if terminal:
        note(summary(generation.result))


# ------------------------------------------------------------------------------------------------------------- input


def _line_editing() -> None:
    """Arrow keys and history while this chat lasts, where Python has them."""
    try:
        import readline
    except ImportError:
        pass


def _typed_lines():
    """Lines typed at a terminal. Ctrl-C drops the line that is being typed, Ctrl-D ends."""
    while True:
        prompt = "> "
        if not sys.stdout.isatty():  # answers go to a file: keep the prompt out of it
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            yield input(prompt)
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")


def _piped_lines():
    """Lines of a pipe, decoded strictly; a line that is not UTF-8 is refused by number."""
    for number, raw in enumerate(sys.stdin.buffer if sys.stdin is not None else (), 1):
        yield decode(raw.removesuffix(b"\n").removesuffix(b"\r"), f"standard input, line {number}")
