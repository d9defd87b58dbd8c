"""`nanoqwen run`: the shortest way to see the runtime work. Packs the shipped checkpoint and writes one Python function."""

from __future__ import annotations

import argparse

from nanoqwen.cli.console import EXIT_OK, human_bytes, note, out, plural
from nanoqwen.cli.parser import text, whole_number
from nanoqwen.cli.session import add_engine_options, open_session

PROMPT = "def fibonacci(n):\n"


def add_parser(add) -> None:
    parser = add("run", "pack the shipped checkpoint and generate a Python function with it", run, description=(
        "Pack the checkpoint that the package ships (on first use), open the best engine of this machine, and let it write a "
        "Python function, with the speed at the end. Nothing is downloaded."))
    parser.add_argument("--prompt", metavar="TEXT", type=text, default=PROMPT, help="how the function begins (default: def fibonacci(n):)")
    parser.add_argument("--max-tokens", metavar="N", type=whole_number(1), default=96, help="most tokens to generate (default: 96)")
    add_engine_options(parser)
    parser.set_defaults(file=None)


def run(args: argparse.Namespace) -> int:
    with open_session(args) as (pack, tokenizer, engine):
        from nanoqwen.generate import generate

        note(f"model {pack.path}, {human_bytes(pack.header.file_bytes)}, context {plural(pack.dims.max_position, 'token')}")
        generation = generate(engine, tokenizer, tokenizer.encode(args.prompt), max_tokens=args.max_tokens, stop=["\ndef ", "\nclass "])
        out(args.prompt, end="")
        for piece in generation:
            out(piece.text, end="")
        result = generation.result
        if not result.text.endswith("\n"):
            out()
        note(speed(result, engine))
    return EXIT_OK


def speed(result, engine) -> str:
    """One line: latency of the first token and of the others, and the rate at which the step's bytes were read."""
    timings = result.timings
    words = f"{plural(len(result.ids), 'token')} on {engine.device}: first after {timings.ttft_ms:,.0f} ms"
    if timings.itl_mean_ms is None:
        return words
    read = engine.bytes_per_token(len(result.prompt_ids) + len(result.ids) // 2)
    rate = read / (timings.itl_mean_ms / 1000)
    return words + (f", then {timings.itl_mean_ms:,.1f} ms a token = {timings.tokens_per_s:,.1f} tok/s "
                    f"({human_bytes(read)} of packed model a token, {human_bytes(round(rate))}/s)")
