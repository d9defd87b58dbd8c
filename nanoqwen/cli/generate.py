"""`nanoqwen generate`: continue a text. The continuation goes to stdout as it is made, everything else to stderr."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from nanoqwen.cli.console import EXIT_INTERRUPTED, EXIT_OK, note, out, out_json, plural
from nanoqwen.cli.parser import whole_number
from nanoqwen.cli.prompt import add_prompt_options, read_prompt
from nanoqwen.cli.session import add_engine_options, add_file, add_sampling_options, open_session, sampling_params

DEFAULT_MAX_TOKENS = 128


def add_parser(add) -> None:
    parser = add("generate", "continue a text", run, description=(
        "Continue a text. Only the continuation is written to stdout, as it is made; which engine runs, and the speed, go to "
        "stderr. Without --prompt and --prompt-file the prompt is read from standard input. The text is tokenized as it is: "
        "no start token, no added space, no translated line ends (the tokenizer's own NFC step composes accents)."))
    add_file(parser)
    add_prompt_options(parser)
    parser.add_argument("--max-tokens", metavar="N", type=whole_number(0), default=DEFAULT_MAX_TOKENS,
                        help=f"most tokens to generate; 0 generates none, and a number beyond the context ends there (default: {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--special", action="store_true",
                        help="let marker text in the prompt, such as <|fim_prefix|>, become the marker; without it, it is plain text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end id (for measurements)")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object at the end instead of the stream: ids, text, finish_reason, engine, device, timings")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)  # before a model is loaded: a wrong prompt costs no wait
    params = sampling_params(args)
    with open_session(args) as (_, tokenizer, engine):
        from nanoqwen.generate import generate

        prompt_ids = tokenizer.encode(prompt, special=args.special)
        generation = generate(engine, tokenizer, prompt_ids, max_tokens=args.max_tokens, params=params, stop=args.stop, ignore_eos=args.ignore_eos)
        interrupted = False
        try:
            for piece in generation:
                if not args.json:
                    out(piece.text, end="")
        except KeyboardInterrupt:  # what there is, is kept and reported
            generation.close()
            interrupted = True
    result = generation.result
    if args.json:
        out_json(as_dict(result))
    elif sys.stdout.isatty() and not result.text.endswith("\n"):
        out()  # for the eye only: a pipe gets the text and not a byte more
    note(summary(result))
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def as_dict(result) -> dict:
    """A GenerationResult as the JSON answer."""
    return {
        "prompt_ids": result.prompt_ids,
        "ids": result.ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "engine": result.engine,
        "device": result.device,
        "sampling": asdict(result.params),
        "timings": asdict(result.timings),
    }


def summary(result) -> str:
    """`12 prompt tokens, 64 generated (length), greedy; first token 35 ms, then 18.2 ms a token (55 tok/s)`."""
    timings = result.timings
    words = f"{plural(len(result.prompt_ids), 'prompt token')}, {len(result.ids):,} generated ({result.finish_reason}), {result.params}"
    if timings.ttft_ms is not None:
        words += f"; first token after {timings.ttft_ms:,.0f} ms"
    if timings.itl_mean_ms is not None:
        words += f", then {timings.itl_mean_ms:,.1f} ms a token ({timings.tokens_per_s:,.1f} tok/s)"
    return words
