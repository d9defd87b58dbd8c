"""`nanoqwen doctor`: what this machine has and lacks, to read and to paste into a bug report."""

from __future__ import annotations

import argparse

from nanoqwen import __version__
from nanoqwen.cli.console import EXIT_BAD_INPUT, EXIT_OK, columns, out, out_json


def add_parser(add) -> None:
    parser = add("doctor", "check this machine: packages, driver, GPU, folders", run, description=(
        "Look at Python, packages, NVIDIA driver, CuPy, GPU and folders, print what is missing with the one line that mends it, and "
        "say which engines work here. Exit status 0 unless something keeps even the CPU engine from working."))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the list")
    parser.add_argument("--cupy-extra", action="store_true",
                        help="only print the extra to install for this machine's NVIDIA driver (cuda12, cuda13), nothing when there is none to")


def run(args: argparse.Namespace) -> int:
    from nanoqwen.doctor import diagnose, missing_extra

    if args.cupy_extra:
        if extra := missing_extra():
            out(extra)
        return EXIT_OK
    report = diagnose()
    if args.json:
        out_json({"nanoqwen": __version__, **report.as_dict()})
        return EXIT_OK if report.cpu_works else EXIT_BAD_INPUT
    out(f"nanoqwen {__version__}")
    width = max(len(f.name) for f in report.findings)
    for finding in report.findings:
        for line in columns([(finding.status.ljust(7), finding.name.ljust(width), finding.detail)]):
            out(line)
        if finding.remedy:
            out(" " * (width + 13) + f"-> {finding.remedy}")
    if not report.cpu_works:
        out("Not usable yet: mend the problems above, the CPU engine needs them.")
        return EXIT_BAD_INPUT
    if len(report.engines) > 1:
        out(f"Engines that work here: {', '.join(report.engines)}. The default is {report.default_engine}.")
    else:
        out("The CPU engine works, and is the default.")
    if any(f.status == "problem" for f in report.findings):
        out("The problems above concern the GPU or the folders named there.")
    return EXIT_OK
