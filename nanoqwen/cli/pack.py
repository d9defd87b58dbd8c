"""`nanoqwen pack`: a Hugging Face checkpoint becomes one .nanoqwen file."""

from __future__ import annotations

import argparse

from nanoqwen.cli.console import EXIT_OK, Progress, human_bytes, note, out, out_json
from nanoqwen.cli.parser import whole_number
from nanoqwen.cli.session import add_progress_option


METHODS = ("absmax", "mse")


def add_parser(add) -> None:
    parser = add("pack", "quantise a checkpoint to INT4 and write a .nanoqwen file", run, description=(
        "Quantise the seven projections of every layer to INT4 and write one memory-mappable .nanoqwen file. The checkpoint is "
        "checked before heavy work starts; OUT appears whole at the end or not at all, and the same checkpoint gives the same "
        "bytes. Memory follows the largest tensor, not the checkpoint."))
    parser.add_argument("source", metavar="SRC",
                        help="a checkpoint folder, its index .json, or a hub name such as Qwen/Qwen2.5-Coder-7B-Instruct")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the .nanoqwen file to write")
    parser.add_argument("--group-size", metavar="N", type=whole_number(1), default=None,
                        help="weights that share one scale: 128, 64 or 32 (default: the largest that divides every input dimension)")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0],
                        help="how the scale of a group is found: absmax, its largest weight / 7; mse, the best of a few smaller ones, a search that takes "
                             "longer and looks at nothing but the weights (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the closing line")
    add_progress_option(parser)


def run(args: argparse.Namespace) -> int:
    from nanoqwen.pack import pack

    with Progress(args.progress, "pack") as progress:
        report = pack(args.source, args.output, group=args.group_size, method=args.method, progress=progress)
    rate = report.source_bytes / max(report.seconds, 1e-9) / 1e6
    if args.json:
        out_json({"path": str(report.path), "bytes": report.bytes, "source_bytes": report.source_bytes, "seconds": report.seconds, "mb_per_s": rate,
                  "group": report.group, "method": args.method, "notes": report.notes})
        return EXIT_OK
    for line in report.notes:
        note(line)
    out(f"{report.path}: {report.bytes:,} bytes ({human_bytes(report.bytes)}), group {report.group}, {args.method}, "
        f"{report.seconds:.1f} s, {rate:,.0f} MB/s of weights")
    return EXIT_OK
