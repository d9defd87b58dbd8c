"""`nanoqwen eval perplexity`: how well a model predicts texts, over strided windows."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoqwen.cli.console import EXIT_OK, Progress, UsageError, columns, note, out, out_json
from nanoqwen.cli.parser import whole_number
from nanoqwen.cli.prompt import decode
from nanoqwen.cli.session import ENGINE_NAMES, add_progress_option, choose_device, open_file
from nanoqwen.errors import DeviceError, InputError

WINDOW, STRIDE = 1024, 512
WEIGHTS = ("fp32", "fp16", "int4")


def add_parser(add) -> None:
    parser = add("perplexity", "perplexity of texts, over strided windows", run, usage="%(prog)s [FILE] --text PATH [PATH ...] [options]", description=(
        "Perplexity and bits per byte of UTF-8 texts, with the reference decoder (PyTorch). Windows of --window tokens begin every "
        "--stride tokens, and each scores the tokens that no earlier one scored; all tokens of all texts weigh the same. A .nanoqwen file "
        "is computed as engines do, with an FP16 cache; a checkpoint folder with the weights that --weights names and an FP32 cache. With "
        "--engine the engine itself predicts, token by token as when it writes."))
    parser.add_argument("file", metavar="FILE", nargs="?",
                        help="a .nanoqwen file, or a Hugging Face checkpoint folder (default: the checkpoint that the package ships, packed)")
    parser.add_argument("--text", metavar="PATH", nargs="+", action="extend", default=None, required=True,
                        help="UTF-8 files, taken byte for byte; - reads standard input. Files of fewer than two tokens are left out")
    parser.add_argument("--window", metavar="N", type=whole_number(2), default=None,
                        help=f"tokens of a window, at most the model's context (default: {WINDOW}, or the context where that is less)")
    parser.add_argument("--stride", metavar="N", type=whole_number(1), default=None,
                        help="tokens from one window to the next, less than --window (default: half the window)")
    parser.add_argument("--weights", choices=WEIGHTS, default=None,
                        help="weights of a checkpoint folder: as they are, rounded to FP16, or to INT4 as `nanoqwen pack` does by default (default: fp32)")
    parser.add_argument("--engine", metavar="NAME", default=None,
                        help=f"predict with this engine, one token at a time: {ENGINE_NAMES} (default: the reference decoder, windows at once)")
    parser.add_argument("--device", metavar="DEVICE", default=None, help="cpu, cuda or cuda:N (default: cuda where PyTorch sees a GPU, else cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    add_progress_option(parser)


def run(args: argparse.Namespace) -> int:
    texts = read_texts(args.text)  # before a model is loaded
    with open_model(args) as (model, tokenizer, facts):
        from nanoqwen.evals import perplexity

        window = args.window if args.window is not None else min(WINDOW, model.context_limit)
        stride = args.stride if args.stride is not None else window // 2
        perplexity.check_protocol(window, stride, model.context_limit)
        encoded = []
        for name, text in texts:
            ids = tokenizer.encode(text)
            if len(ids) < 2:
                note(f"{name}: {len(ids)} tokens, left out (the first token of a text is predicted by nothing)")
            else:
                encoded.append(perplexity.Text(name, ids, len(text.encode("utf-8"))))
        if not encoded:
            raise InputError("none of the texts has two tokens or more, so there is nothing to predict")
        started = time.perf_counter()
        with Progress(args.progress, "perplexity", " tokens") as progress:
            scores = perplexity.score_texts(model, encoded, window=window, stride=stride, progress=progress)
        seconds = time.perf_counter() - started
    whole = perplexity.together(scores)
    if args.json:
        out_json({**facts, "window": window, "stride": stride, "seconds": seconds, **_without_name(whole), "texts": [s.as_dict() for s in scores]})
        return EXIT_OK
    where = f"engine {facts['engine']} on {facts['device']}" if "engine" in facts else facts["device"]
    note(f"{facts['weights']} weights, {facts['kv']} cache, {where}; windows of {window:,} tokens every {stride:,}; {seconds:.1f} s")
    for line in table([*scores, whole] if len(scores) > 1 else scores):
        out(line)
    return EXIT_OK


def _without_name(score) -> dict:
    return {key: value for key, value in score.as_dict().items() if key != "name"}


def table(scores) -> list[str]:
    """A heading, and a line a text."""
    rows = [("tokens", "loss", "perplexity", "bits/byte", "text")]
    rows += [(f"{s.tokens:,}", f"{s.mean_loss:.4f}", f"{s.perplexity:.4f}", f"{s.bits_per_byte:.4f}", s.name) for s in scores]
    return columns(rows, indent="", right=range(4))


def read_texts(paths: list[str]) -> list[tuple[str, str]]:
    """(name, text) of each path, in the order given. Raises InputError for what is not UTF-8, OSError for what cannot be read."""
    if paths.count("-") > 1:
        raise UsageError("argument --text: standard input can be read once")
    texts = []
    for path in paths:
        if path == "-":
            raw, name = sys.stdin.buffer.read(), "standard input"
        else:
            name = path
            if os.path.isdir(path):
                raise InputError(f"{path}: is a folder; name its files, as in --text {os.path.join(path, '*.py')}")
            if path.endswith(".nanoqwen"):
                raise UsageError(f"argument --text: {path} is a model, not a text; FILE stands before --text")
            with open(path, "rb") as file:
                raw = file.read()
        texts.append((name, decode(raw, name)))
    return texts


@contextmanager
def open_model(args: argparse.Namespace) -> Iterator[tuple]:
    """(model or engine, tokenizer, facts for the report) of a pack file or of a checkpoint folder."""
    folder = args.file is not None and Path(args.file).expanduser().is_dir()
    if args.engine is not None and folder:
        raise UsageError(f"argument --engine: engines run .nanoqwen files and {args.file} is a checkpoint folder; pack it, or leave the option out")
    if args.weights is not None and not folder:
        raise UsageError("argument --weights: is for checkpoint folders; the weights of a .nanoqwen file are what they are, INT4")
    with _open_folder(args) if folder else _open_engine(args) if args.engine is not None else _open_pack(args) as opened:
        yield opened


@contextmanager
def _open_pack(args: argparse.Namespace) -> Iterator[tuple]:
    with open_file(args.file) as pack:
        from nanoqwen.reference import ReferenceModel
        from nanoqwen.tokenizer import Tokenizer

        tokenizer, device = Tokenizer.from_pack(pack), _device(args.device)
        with Progress(None, "load", " layers") as progress:
            model = ReferenceModel.from_pack(pack, device=device, progress=progress)
        yield model, tokenizer, {**_facts(pack), "device": device}
        del model  # it borrows from the mapped file


@contextmanager
def _open_engine(args: argparse.Namespace) -> Iterator[tuple]:
    with open_file(args.file) as pack:
        from nanoqwen.engines import open_engine
        from nanoqwen.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_pack(pack)
        with Progress(None, "load", " layers") as progress, open_engine(pack, args.engine, args.device, progress=progress) as engine:
            yield engine, tokenizer, {**_facts(pack), "engine": engine.name, "device": engine.device}


def _facts(pack) -> dict:
    method = (pack.meta.get("quantise") or {}).get("method", "absmax")
    return {"model": str(pack.path), "weights": "int4", "method": method, "group": pack.group_size, "kv": "fp16"}


@contextmanager
def _open_folder(args: argparse.Namespace) -> Iterator[tuple]:
    from nanoqwen.checkpoint import open_checkpoint
    from nanoqwen.tokenizer import Tokenizer

    folder, weights = Path(args.file).expanduser(), args.weights or WEIGHTS[0]
    notes: list[str] = []
    with open_checkpoint(folder, notes=notes) as checkpoint:
        tokenizer = Tokenizer.from_parts(checkpoint.tokenizer_bytes, source=str(folder / "tokenizer.json"))
    for line in notes:
        note(line)
    from nanoqwen.reference import ReferenceModel

    device = _device(args.device)
    model = ReferenceModel.from_checkpoint(folder, weights, device=device)
    yield model, tokenizer, {"model": str(folder), "weights": weights, "kv": "fp32", "device": device}


def _device(asked: str | None) -> str:
    """The PyTorch device to compute on. Raises DeviceError for one that is not there, InputError for one that has no such name."""
    from nanoqwen.engines.cpu import cuda_problem

    device = choose_device(None, asked)
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and ":" in device) or device.endswith(":"):
        raise InputError(f"device {device!r} is not known, use cpu, cuda or cuda:N")
    if kind == "cuda":
        import torch

        if problem := cuda_problem():
            raise DeviceError(f"{problem}; use --device cpu, or see `nanoqwen doctor`")
        if int(index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"there is no device {device}: PyTorch sees {torch.cuda.device_count()} NVIDIA GPU(s), counted from cuda:0")
    return device
