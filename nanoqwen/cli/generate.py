"""`nanoqwen generate`: continue a text, or fill a gap in one. The continuation goes to stdout as it is made, everything else to stderr."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from nanoqwen.cli.console import EXIT_INTERRUPTED, EXIT_OK, UsageError, note, out, out_json, plural
from nanoqwen.cli.parser import non_empty_text, text, whole_number
from nanoqwen.cli.prompt import add_prompt_options, decode, read_prompt
from nanoqwen.cli.session import add_engine_options, add_file, add_sampling_options, open_session, sampling_params

DEFAULT_MAX_TOKENS = 128


def add_parser(add) -> None:
    parser = add("generate", "continue a text", run, description=(
        "Continue a text. Only the continuation is written to stdout, as it is made; which engine runs, and the speed, go to "
        "stderr. Without --prompt and --prompt-file the prompt is read from standard input. The text is tokenized as it is: "
        "no start token, no added space, no translated line ends (the tokenizer's own NFC step composes accents). With --prefix and --suffix, or with --cursor, the "
        "model fills the gap between two texts and only the middle is written."))
    add_file(parser)
    add_prompt_options(parser)
    parser.add_argument("--max-tokens", metavar="N", type=whole_number(0), default=DEFAULT_MAX_TOKENS,
                        help=f"most tokens to generate; 0 generates none, and a number beyond the context ends there (default: {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--special", action="store_true",
                        help="let marker text in the prompt, such as <|fim_prefix|>, become the marker; without it, it is plain text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end id (for measurements)")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object at the end instead of the stream: ids, text, finish_reason, engine, device, timings")
    _add_gap_options(parser)
    add_sampling_options(parser)
    add_engine_options(parser)


def _add_gap_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fill in the middle", (
        "For checkpoints whose tokenizer has the markers <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>. The texts are plain text: "
        "marker letters in them stay letters."))
    before, after = group.add_mutually_exclusive_group(), group.add_mutually_exclusive_group()
    before.add_argument("--prefix", metavar="TEXT", type=text, help="the text before the gap; may be empty")
    before.add_argument("--prefix-file", metavar="F", help="a UTF-8 file with the text before the gap; - reads standard input")
    after.add_argument("--suffix", metavar="TEXT", type=text, help="the text after the gap; may be empty")
    after.add_argument("--suffix-file", metavar="F", help="a UTF-8 file with the text after the gap; - reads standard input")
    group.add_argument("--cursor", metavar="MARK", type=non_empty_text,
                       help="the prompt is the whole text, and the gap is where MARK stands in it, once; MARK is removed")


def read_gap(args: argparse.Namespace) -> tuple[str, str] | None:
    """(before, after) when the arguments ask to fill a gap, None when they ask to continue a text. Raises InputError."""
    from nanoqwen.fim import split_at

    before, after = args.prefix is not None or args.prefix_file is not None, args.suffix is not None or args.suffix_file is not None
    if not (before or after or args.cursor is not None):
        return None
    if args.special:
        raise UsageError("argument --special: not with a gap to fill, where the texts are plain text and the markers are put by the command")
    if args.cursor is not None:
        if before or after:
            raise UsageError("argument --cursor: the text with the mark is the prompt; leave out --prefix and --suffix")
        return split_at(read_prompt(args), args.cursor)
    if args.prompt is not None or args.prompt_file is not None:
        raise UsageError("a prompt is continued, a gap lies between --prefix and --suffix: give one or the other")
    if not (before and after):
        raise UsageError(f"a gap has two sides: give {'--suffix' if before else '--prefix'} too (it may be empty)")
    if args.prefix_file == args.suffix_file == "-":
        raise UsageError("standard input can be read once: only one of --prefix-file and --suffix-file may be -")
    return _side(args.prefix, args.prefix_file), _side(args.suffix, args.suffix_file)


def _side(typed: str | None, file: str | None) -> str:
    if typed is not None:
        return typed
    if file == "-":
        return decode(sys.stdin.buffer.read(), "standard input")
    with open(file, "rb") as opened:
        return decode(opened.read(), file)


def run(args: argparse.Namespace) -> int:
    gap = read_gap(args)  # before a model is loaded: a wrong prompt costs no wait
    prompt = read_prompt(args) if gap is None else ""
    params = sampling_params(args)
    with open_session(args) as (_, tokenizer, engine):
        from nanoqwen.fim import fim_ids
        from nanoqwen.generate import generate

        prompt_ids = tokenizer.encode(prompt, special=args.special) if gap is None else fim_ids(tokenizer, *gap)
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
        out_json({"form": "continue" if gap is None else "fill-in-the-middle", **as_dict(result)})
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
