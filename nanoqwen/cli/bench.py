"""`nanoqwen bench`: measure an engine by the book's protocol, against the read ceiling of this machine, and beside llama.cpp and PyTorch."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

from nanoqwen.cli.console import EXIT_OK, Progress, UsageError, columns, human_bytes, note, out, out_json
from nanoqwen.cli.parser import Parser, whole_number
from nanoqwen.cli.session import ENGINE_NAMES, add_file, add_progress_option, open_file

MODES = {
    "e2e": "prefill, time to first token and decode",
    "itl": "single decode steps: distribution, and on a Hopper card the time of eleven regions",
    "context": "decode at several context depths",
    "prefill": "time to first token of prompts of many lengths",
    "gemv": "the INT4 kernels alone (Hopper card)",
    "ceiling": "how fast this memory can be read",
}
EXIT_PEER_SKIPPED = 3  # everything else was measured


def add_parser(add) -> None:
    parser = add("bench", "measure speed against the memory's own", run, description=(
        "Measure an engine by one of the modes below; `nanoqwen bench MODE --help` lists the options. Every run measures the read "
        "ceiling of the same memory first. Batch 1, greedy, a prompt of varied seeded ids; end ids are ignored, so every run makes all "
        "its tokens. Loading, compiling and capturing are reported apart. Exit status: 0 measured, 2 refused before anything was "
        "timed, 3 measured, but a peer was asked for and skipped (stderr says what is missing)."))
    modes = parser.add_subparsers(dest="mode", metavar="MODE", title="modes", parser_class=Parser)
    made = [_mode(modes, name, what) for name, what in MODES.items()]
    # An unknown option is answered with the known ones, and those belong to the modes.
    parser.option_names = lambda: list(dict.fromkeys(option for mode in made for option in mode.option_names()))


def _mode(modes, name: str, what: str) -> Parser:
    """The parser of `nanoqwen bench <name>`: a parser of its own, so that options may stand on either side of the FILE."""
    parser = modes.add_parser(name, help=what, description=f"Measure {what}.")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser.set_defaults(file=None, depths=None, llama_bench=None, gguf=None, torch_peer=False, prompt_tokens=None, gen_tokens=None, warmup=None, seed=None, runs=None)
    if name != "ceiling":
        add_file(parser)
    if name not in ("ceiling", "prefill"):
        parser.add_argument("--runs", metavar="N", type=whole_number(1), help="timed runs (default: 5)")
    if name in ("e2e", "itl"):
        parser.add_argument("--prompt-tokens", metavar="N", type=whole_number(1), help="prompt length (default: the protocol's 512)")
    if name == "prefill":
        parser.add_argument("--seed", metavar="N", type=whole_number(0, 2**32 - 1), help="of the prompt's ids (default: 0)")
    if name in ("e2e", "itl", "context"):
        parser.add_argument("--gen-tokens", metavar="N", type=whole_number(2), help="tokens to generate (default: the protocol's 128)")
        parser.add_argument("--warmup", metavar="N", type=whole_number(0), help="untimed runs first (default: the protocol's 3)")
        parser.add_argument("--seed", metavar="N", type=whole_number(0, 2**32 - 1), help="of the prompt's ids (default: 0)")
    if name == "context":
        parser.add_argument("--depth", metavar="N", type=whole_number(1), action="append", dest="depths",
                            help="tokens in the cache before the timed ones; may be given several times (default: steps from 128 to the context)")
    parser.add_argument("--ceiling-mb", metavar="N", type=whole_number(1),
                        help="MB that one pass of the ceiling reads (default: 6000 on a Hopper card, else 512)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", metavar="NAME", action="append", dest="engines",
                        help=f"{ENGINE_NAMES}; may be given several times (default: the fastest that runs here)")
    engine.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; never replaced by another")
    if name == "e2e":
        peer = parser.add_argument_group("peers beside it")
        peer.add_argument("--llama-bench", metavar="PATH", help="the program llama-bench of llama.cpp; it runs the same two lengths")
        peer.add_argument("--gguf", metavar="FILE", help="the model for it")
        peer.add_argument("--torch-peer", action="store_true",
                          help="a decoder of the same dimensions in plain PyTorch: its own INT4 kernel, torch.compile, random weights (needs an NVIDIA GPU)")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--json", action="store_true", help="one JSON object instead of the table, raw samples included")
    where = answer.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help=f"write the receipt {name}.json into this folder")
    where.add_argument("--receipt", action="store_true", help="write the receipt into book/receipts of the clone")
    add_progress_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.mode is None:
        raise UsageError(f"no mode given; the modes are {', '.join(MODES)}; see `nanoqwen bench --help`")
    from nanoqwen.bench import suite
    from nanoqwen.bench.protocol import Protocol

    protocol = Protocol.standard(
        prompt_tokens=args.prompt_tokens, gen_tokens=args.gen_tokens, warmup=args.warmup, runs=args.runs, seed=args.seed
    )
    request = suite.Request(
        args.mode, protocol, args.engines, args.device, args.depths, args.ceiling_mb and args.ceiling_mb * 1_000_000, args.llama_bench, args.gguf,
        args.torch_peer, writes=bool(args.out or args.receipt),
    )  # fmt: skip
    if args.mode == "gemv":
        suite.engines_of(request)  # a missing card is a shorter answer than a packed model
    with (nullcontext() if args.mode == "ceiling" else open_file(args.file, payload=False)) as pack:
        with Progress(args.progress, f"bench {args.mode}", "") as progress:
            report = suite.run(request, pack, model_name(args.file), tell=note, progress=progress)
    path = report.write(command(args), Path(args.out) if args.out else None) if request.writes else None
    if args.json:
        out_json({**report.as_dict(), "receipt": str(path) if path else None})
    else:
        for line in table(report):
            out(line)
    for line in report.notes:
        note(line)
    if path:
        note(f"receipt written to {path}")
    return EXIT_PEER_SKIPPED if report.skipped else EXIT_OK


def model_name(file: str | None) -> str:
    """What a receipt calls the model: no folder of this machine."""
    if file is None:
        return "embedded checkpoint"
    return file if file.startswith("synthetic:") else os.path.basename(file)


def command(args: argparse.Namespace) -> str:
    """The command line to get the receipt again, with names of files in place of paths."""
    words = ["nanoqwen bench", args.mode, *([model_name(args.file)] if args.file and args.mode != "ceiling" else [])]
    words += [f"--engine {name}" for name in args.engines or ()]
    words += [f"--depth {depth}" for depth in args.depths or ()]
    for option in ("device", "prompt_tokens", "gen_tokens", "warmup", "runs", "seed", "ceiling_mb"):
        if getattr(args, option) is not None:
            words.append(f"--{option.replace('_', '-')} {getattr(args, option)}")
    for option in ("llama_bench", "gguf"):
        if getattr(args, option) is not None:
            words.append(f"--{option.replace('_', '-')} {os.path.basename(getattr(args, option))}")
    if args.torch_peer:
        words.append("--torch-peer")
    return " ".join([*words, "--receipt"])


# ------------------------------------------------------------------------------------------------------------- table


def table(report):
    """The lines of a report for people."""
    for kind, ceiling in report.ceilings.items():
        sheet = f", {ceiling.gb_s / ceiling.datasheet_gb_s:.0%} of the data sheet's {ceiling.datasheet_gb_s:,} GB/s" if ceiling.datasheet_gb_s else ""
        yield (f"ceiling: {ceiling.gb_s:,.1f} GB/s ({min(ceiling.samples):,.1f} to {max(ceiling.samples):,.1f} in {len(ceiling.samples)} passes over "
               f"{human_bytes(ceiling.nbytes)}{sheet}), {ceiling.device}, {ceiling.how}")
    if report.mode == "ceiling":
        return
    p, model = report.protocol, report.results["model"]
    yield f"model: {model['name']}, {model['bits_per_weight']:.2f} bits a weight, KV cache {model['kv_type']}"
    if report.mode == "gemv":
        yield f"protocol: {p['runs']} runs of a graph over all layers, after 1 warm-up"
    elif report.mode == "prefill":
        yield f"protocol: {p['cold']}; {p['sustained']}"
    else:
        prompt = "" if report.mode == "context" else f"{p['prompt_tokens']:,} prompt tokens (varied ids, seed {p['seed']}), "
        yield (f"protocol: {p['name']}: batch 1, {prompt}{p['gen_tokens']:,} generated, greedy, end ids ignored, "
               f"{p['warmup']} warm-up and {p['runs']} timed runs; medians (smallest to largest)")
    if report.mode == "gemv":
        yield ""
        yield from columns([("kernel", "rows x cols", "us", "GB/s", "of the ceiling"), *(
            (name, f"{s['rows']} x {s['cols']}", f"{s['us']:,.1f}", f"{s['gb_s']:,.0f}", f"{s['mbu']:.1%}") for name, s in report.results["shapes"].items()
        )], right=(2, 3, 4))
    for name, found in report.results.get("engines", {}).items():
        yield ""
        if report.mode == "prefill":
            yield from _prefill(name, found)
        elif report.mode == "context":
            yield from _context(name, found, report.results["setup"][name])
        else:
            yield from {"e2e": _e2e, "itl": _itl}[report.mode](name, found, p)
    for name, peer in report.results.get("peers", {}).items():
        yield ""
        yield f"{name} {peer['build']}, {peer['model']}, {peer['bits_per_weight']:.2f} bits a weight, KV cache {peer['kv_type']}, {peer['backend']}"
        if "description" in peer:
            yield f"  {peer['description']}"
        yield from columns([
            *((what, f"{peer['setup'][f'{what}_s']:,.2f} s") for what in ("build", "compile") if "setup" in peer),
            ("prompt", f"{peer['ttft_ms']:,.2f} ms {_range(peer['spread']['ttft_ms'], 2)}"),
            ("decode", f"{peer['itl_ms']:,.3f} ms a token {_range(peer['spread']['itl_ms'], 3)}, {peer['tokens_per_s']:,.1f} tok/s, behind {peer['depth']:,} tokens"),
            *([("one by one", f"{peer['itl_unchained_ms']:,.3f} ms a token when the host waits for each id")] if "itl_unchained_ms" in peer else []),
            ("read", f"{human_bytes(peer['bytes_per_token'])} a token = {peer['mbu']:.1%} of the ceiling" if peer["mbu"] else peer.get("mbu_note", "no share: there is no ceiling")),
            *(("differs", text) for text in peer["deviations"]),
        ])


def _range(spread: dict, digits: int) -> str:
    return f"({spread['min']:,.{digits}f} to {spread['max']:,.{digits}f})"


def _setup(setup: dict):
    yield "load", f"{setup['load_s']:,.2f} s"
    if "compile_s" in setup:
        yield "compile", f"{setup['compile_s']:,.2f} s, {setup['compiled']}"
    if "capture_s" in setup:
        yield "capture", f"{setup['capture_s']:,.3f} s for both graphs (done while loading)"


def _e2e(name: str, r: dict, p: dict):
    yield f"{name} on {r['device']}; {r['description']}"
    share = "" if r["mbu"] is None else f" = {r['mbu']:.1%} of the ceiling"
    share += f", {r['datasheet_share']:.1%} of the data sheet" if "datasheet_share" in r else ""
    rows = [
        *_setup(r["setup"]),
        ("prefill", f"{r['prefill_ms']:,.2f} ms for {p['prompt_tokens']:,} tokens, {r['prefill_tokens_per_s']:,.0f} tok/s"),
        ("first token", f"{r['ttft_ms']:,.2f} ms {_range(r['spread']['ttft_ms'], 2)}"),
        ("decode", f"{r['itl_ms']:,.3f} ms a token {_range(r['spread']['itl_ms'], 3)}, {r['tokens_per_s']:,.1f} tok/s, "
                   f"at a context of {p['prompt_tokens']:,} to {p['prompt_tokens'] + p['gen_tokens']:,} tokens"),
        ("read", f"{human_bytes(r['bytes_per_token'])} of packed model and cache a token{share}"),
    ]
    if "itl_unchained_ms" in r:
        rows.append(("one by one", f"{r['itl_unchained_ms']:,.3f} ms a token when the host writes each step's scalars and waits for its id"))
    if "itl_with_logits_ms" in r:
        rows.append(("with logits", f"{r['itl_with_logits_ms']:,.3f} ms a token when all logits are copied to the host"))
    if "device_chained_ms" in r:
        rows.append(("device alone", f"{r['device_chained_ms']:,.3f} ms a token, graph replays back to back without the host, {r['device_chained_mbu']:.1%} of the ceiling"))
    yield from columns(rows)
    if not r["same_ids_in_every_run"]:
        yield "  the runs did not give the same ids: something is wrong, `nanoqwen validate` tells more"


def _itl(name: str, r: dict, p: dict):
    yield f"{name} on {r['device']}, {r['steps']:,} steps at a context of {p['prompt_tokens']:,} to {p['prompt_tokens'] + p['gen_tokens']:,} tokens"
    rows = [*_setup(r["setup"]), ("median", f"{r['itl_ms']:,.3f} ms" + ("" if r["mbu"] is None else f", {r['mbu']:.1%} of the ceiling"))]
    rows += [(label, f"{r[key]:,.3f} ms") for label, key in (("mean", "mean_ms"), ("fastest", "min_ms"), ("90%", "p90_ms"), ("99%", "p99_ms"), ("slowest", "max_ms"))]
    rows += [(region, f"{ms:,.4f} ms") for region, ms in r.get("regions_ms", {}).items()]
    yield from columns(rows)


def _context(name: str, r: dict, setup: dict):
    yield name
    yield from columns(_setup(setup))
    yield from columns([("depth", "ms a token", "tok/s", "of the ceiling", "spread"), *(
        (f"{int(depth):,}", f"{row['itl_ms']:,.3f}", f"{row['tokens_per_s']:,.1f}", "" if row["mbu"] is None else f"{row['mbu']:.1%}", _range(row["spread"], 3))
        for depth, row in r.items()
    )], right=(0, 1, 2, 3))


def _prefill(name: str, r: dict):
    workspace = f", workspace {human_bytes(r['workspace_bytes'])}" if "workspace_bytes" in r else ""
    yield f"{name}{workspace}"
    yield from columns([("tokens", "cold, ms", "sustained, ms", "tok/s", "TFLOP/s"), *(
        (f"{int(n):,}", f"{row['cold_ms']:,.3f}", f"{row['ttft_ms']:,.3f}", f"{row['tokens_per_s']:,.0f}", f"{row['products_tflop_s']:,.2f}")
        for n, row in r["lengths"].items()
    )], right=(0, 1, 2, 3, 4))
    if "products" in r:
        yield "  the four products of all layers alone"
        yield from columns([("tokens", "cold, ms", "sustained, ms", "TFLOP/s", "cuBLAS cold", "sustained"), *(
            (f"{int(n):,}", f"{row['cold_ms']:,.3f}", f"{row['ms']:,.3f}", f"{row['tflop_s']:,.1f}", *(f"{row[kind]:,.3f}" if kind in row else "" for kind in ("cublas_cold_ms", "cublas_ms")))
            for n, row in r["products"].items()
        )], right=(0, 1, 2, 3, 4, 5))
    if parted := {n: row for n, row in r["lengths"].items() if "without" in row}:
        kinds = list(next(iter(parted.values()))["without"])
        yield "  ms less when one kind of launch is left out of the chain"
        yield from columns([("tokens", "chain, ms", *kinds), *(
            (f"{int(n):,}", f"{row['chain_ms']:,.3f}", *(f"{row['without'][kind]:,.3f}" for kind in kinds)) for n, row in parted.items()
        )], right=tuple(range(len(kinds) + 2)))
    if not all(row["same_id_in_every_run"] for row in r["lengths"].values()):
        yield "  the runs did not give the same id: something is wrong, `nanoqwen validate` tells more"
