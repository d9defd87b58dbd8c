"""The `nanoqwen` command. Each file here is a group of commands; this one turns every failure into one line.

A command is an `add_parser(add)` that declares its arguments and a `run(args) -> int` that imports what it needs: `nanoqwen
inspect` must answer before PyTorch has finished importing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nanoqwen.cli import bench, chat, console, doctor, evaluate, export, generate, inspect, pack, run, validate
from nanoqwen.cli.parser import build_parser, parse
from nanoqwen.errors import NanoqwenError

GROUPS = (run, pack, export, inspect, generate, chat, validate, evaluate, bench, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (listed in `nanoqwen --help`). Prints; never raises for a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console.make_output_safe()
    debug = "--debug" in argv
    try:
        root, commands = build_parser([group.add_parser for group in GROUPS])
        args = parse(root, commands, argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse: --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        if debug:
            raise
        return _interrupted()
    except BrokenPipeError:
        console.close_stdout_quietly()
        return console.EXIT_PIPE_CLOSED
    except NanoqwenError as error:
        return _fail(error, str(error), console.EXIT_BAD_INPUT, debug)
    except OSError as error:
        return _fail(error, _os_error(error), console.EXIT_BAD_INPUT, debug)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "nanoqwen"):
            return _fail(error, _internal(error), console.EXIT_INTERNAL, debug)
        message = f"{args.command} needs the package {missing}, which is not installed (`nanoqwen doctor` lists all that is missing)"
        return _fail(error, message, console.EXIT_BAD_INPUT, debug)
    except Exception as error:
        if _out_of_memory(error):
            message = f"out of memory ({error})" if str(error) else "out of memory"
            return _fail(error, f"{message}; free some, or shorten the prompt or --max-tokens", console.EXIT_BAD_INPUT, debug)
        return _fail(error, _internal(error), console.EXIT_INTERNAL, debug)


def _fail(error: BaseException, message: str, status: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    _finish_line()
    sys.stderr.write(f"nanoqwen: error: {console.one_line(message)}\n")
    sys.stderr.flush()
    return status


def _interrupted() -> int:
    """Ctrl-C: what was printed stays, the terminal's line is ended, no traceback."""
    try:
        _finish_line()
    except OSError:
        console.close_stdout_quietly()
    sys.stderr.write("\nnanoqwen: interrupted\n" if sys.stderr.isatty() else "nanoqwen: interrupted\n")
    sys.stderr.flush()
    return console.EXIT_INTERRUPTED


def _finish_line() -> None:
    """Flush the answer before the message about it, so that the two appear in the order in which they happened."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        console.close_stdout_quietly()


def _out_of_memory(error: Exception) -> bool:
    """Python's own, and PyTorch's, which are RuntimeErrors with these words."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def _internal(error: Exception) -> str:
    return f"internal fault, {type(error).__name__}: {error} (please report it, with what --debug prints)"


def _os_error(error: OSError) -> str:
    """`model.nanoqwen: No such file or directory`: the file first, then the reason."""
    names = [os.fspath(name) for name in (error.filename, error.filename2) if name is not None]
    where = " -> ".join(name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name) for name in names)
    return f"{where}: {error.strerror or error}" if where else str(error.strerror or error)
