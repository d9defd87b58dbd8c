"""`nanoqwen export`: a .nanoqwen file becomes a folder that other engines load."""

from __future__ import annotations

import argparse

from nanoqwen.cli.console import EXIT_OK, Progress, human_bytes, note, out, out_json, plural
from nanoqwen.cli.session import add_file, add_progress_option, open_file

#: Spelled out here, not imported: the parser must not import the exporter. A test compares the two.
FORMATS = ("compressed-tensors",)


def add_parser(add) -> None:
    parser = add("export", "write a .nanoqwen file as a checkpoint that vLLM and transformers load", run, description=(
        "Write the same quantised weights as a Hugging Face folder, for an engine that serves many requests or spreads a model over "
        "several GPUs. compressed-tensors is the pack-quantized INT4 form that vLLM and transformers read. Codes and scales are "
        "copied bit for bit, and every checksum is compared on the way. DIR appears whole at the end or not at all, and the same file "
        "gives the same bytes."))
    add_file(parser)
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="the form to write (default: compressed-tensors)")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="the folder to make; one that exists must be empty")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the closing line")
    add_progress_option(parser)


def run(args: argparse.Namespace) -> int:
    from nanoqwen.export import export

    with open_file(args.file) as pack, Progress(args.progress, "export") as progress:
        report = export(pack, args.output, progress=progress)
    if args.json:
        out_json({"path": str(report.path), "format": args.format, "files": report.files, "bytes": report.bytes, "seconds": report.seconds,
                  "group": report.group, "notes": report.notes})
        return EXIT_OK
    for line in report.notes:
        note(line)
    out(f"{report.path}: {plural(len(report.files), 'file')}, {report.bytes:,} bytes ({human_bytes(report.bytes)}), group {report.group}, "
        f"{report.seconds:.1f} s")
    return EXIT_OK
