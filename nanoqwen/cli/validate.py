"""`nanoqwen validate`: the ladder, from the checksums of the file up to generated text."""

from __future__ import annotations

import argparse

from nanoqwen.cli.bench import model_name
from nanoqwen.cli.console import EXIT_FAILED, EXIT_OK, Progress, columns, note, out, out_json
from nanoqwen.cli.parser import whole_number
from nanoqwen.cli.session import add_engine_options, add_file, add_progress_option, choose_engine, open_file

TIERS = ("unit", "layer", "graph")
#: Tiers of at most so many checks list all of them.
FEW = 2


def add_parser(add) -> None:
    parser = add("validate", "check a file and an engine on the validation ladder", run, description=(
        "Climb the ladder on a .nanoqwen file: file (every checksum), unit (single operations against float64), layer (whole "
        "decoder blocks against float64), graph (generated tokens against an uncached simulation of the same INT4 weights). A "
        "tier does not run when the one before it failed. With a Hopper engine the unit tier is every kernel by itself. Exit "
        "status: 0 all passed, 1 something did not pass, 2 the file or an argument cannot be used."))
    add_file(parser)
    parser.add_argument("--tier", choices=TIERS, default=TIERS[-1], help="the highest tier to climb to (default: %(default)s)")
    parser.add_argument("--prompts", metavar="N", type=whole_number(1, 100), default=None,
                        help="prompts of the graph tier, at most 100 (default: 100 on a GPU, fewer on a CPU)")
    parser.add_argument("--tokens", metavar="N", type=whole_number(1), default=None,
                        help="new tokens for each prompt (default: 64 on a GPU, fewer on a CPU)")
    parser.add_argument("--all", action="store_true", help="list every check, not only tiers and failures")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--receipt", action="store_true",
                        help="put the result of a Hopper engine into book/receipts/validate.json of the clone, beside other models' of the same sources")
    add_progress_option(parser)
    add_engine_options(parser, context=False)


def run(args: argparse.Namespace) -> int:
    if args.receipt:
        from nanoqwen.ladder import receipt

        receipt.check_request(args.engine, whole=args.tier == TIERS[-1] and args.prompts is None and args.tokens is None)
    with open_file(args.file, payload=False) as pack, Progress(args.progress, "validate", "") as progress:
        from nanoqwen.ladder import run_ladder

        engine, device = choose_engine(args.engine, args.device, pack)
        report = run_ladder(pack, args.tier, engine=engine, device=device, prompts=args.prompts, tokens=args.tokens, progress=progress)
    if args.json:
        out_json(report.as_dict())
    else:
        for line in table(report, every=args.all):
            out(line)
    if args.receipt:
        name = model_name(args.file)
        command = " ".join(["nanoqwen validate", *([name] if args.file else []), f"--engine {args.engine} --receipt"])
        note(f"receipt written to {receipt.write(report, name, args.engine, command)}")
    return EXIT_OK if report.passed else EXIT_FAILED


def table(report, *, every: bool):
    """The lines of a Report for people: a heading a tier, its checks (all, or the failed ones), and what it has to tell."""
    yield report.path
    for tier in report.tiers:
        yield ""
        passed = sum(check.passed for check in tier.checks)
        count = f", {passed} of {len(tier.checks)} checks in {tier.seconds:.1f} s" if tier.ran else ""
        yield f"{tier.name}: {tier.status}{count}"
        if not tier.ran:
            continue
        yield from columns([("tested", tier.subject), ("against", tier.oracle)])
        few = len(tier.checks) <= FEW
        shown = [check for check in tier.checks if every or few or not check.passed]
        yield from columns([
            ("ok" if check.passed else "FAIL", check.name, f"{check.value:.3g}", f"limit {check.limit:g} ({check.unit})", check.detail) for check in shown
        ])
        if not every and not few and passed:
            yield from (f"  largest error {line}" for line in _largest(tier.checks))
        yield from (f"  {line}" for line in tier.lines)
    yield ""
    yield "passed" if report.passed else "did not pass"


def _largest(checks):
    """The passed check that came closest to its limit: how much room there is."""
    near = [check for check in checks if check.passed and check.limit > 0]
    if near:
        worst = max(near, key=lambda check: check.value / check.limit)
        yield f"{worst.value:.3g} of {worst.limit:g} allowed, in {worst.name}"
