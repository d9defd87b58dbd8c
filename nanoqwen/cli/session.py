"""Opening a model for the commands that run one: which file, which engine, which sampling, and the line that says so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoqwen.cli.console import Progress, note
from nanoqwen.cli.parser import non_empty_text, real_number, whole_number
from nanoqwen.errors import InputError

if TYPE_CHECKING:
    from nanoqwen.engines import Engine
    from nanoqwen.packfile import PackFile
    from nanoqwen.sampling import SamplingParams
    from nanoqwen.tokenizer import Tokenizer

#: A model below this many operations a token (100 million weights) runs on one thread.
SMALL_MODEL_FLOPS = 2e8
ENGINE_NAMES = "cpu, reference (PyTorch on an NVIDIA GPU), eager, graph or persistent (hand-written kernels on a Hopper GPU)"


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?",
                        help="a .nanoqwen file, or synthetic:demo, synthetic:7b ... for seeded random weights (default: the shipped checkpoint)")


def add_progress_option(parser: argparse.ArgumentParser) -> None:
    """`--progress` and `--no-progress`, for the commands that read or write gigabytes."""
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=None,
                        help="draw a progress bar on stderr (default: only when stderr is a terminal)")


def add_engine_options(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """`--engine`, `--device` and, for commands that generate, `--context`."""
    group = parser.add_argument_group("engine")
    group.add_argument("--engine", metavar="NAME", help=f"{ENGINE_NAMES} (default: the one of the device; graph where neither is named and it runs)")
    group.add_argument("--device", metavar="DEVICE",
                       help="cpu, cuda or cuda:N; never replaced by another (default: cuda where an engine can use a GPU, else cpu)")
    if context:
        group.add_argument("--context", metavar="N", type=whole_number(1), default=None,
                           help="most tokens to hold, prompt and reply together (default: the model's context)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Nothing is taken from the checkpoint's own defaults; `nanoqwen inspect` shows them.")
    group.add_argument("--temperature", metavar="X", type=real_number(0), default=0.0,
                       help="0 takes the most likely token, whatever the options below say (default: 0)")
    group.add_argument("--top-k", metavar="N", type=whole_number(0), default=0, help="draw from the N most likely tokens; 0 keeps all (default: 0)")
    group.add_argument("--top-p", metavar="X", type=real_number(0, 1, open_low=True), default=1.0,
                       help="draw from the fewest tokens whose probabilities reach X, in (0, 1]; 1 keeps all (default: 1)")
    group.add_argument("--repetition-penalty", metavar="X", type=real_number(0, open_low=True), default=1.0,
                       help="above 1 makes tokens of the prompt and reply less likely; 1 is off (default: 1)")
    group.add_argument("--seed", metavar="N", type=whole_number(0), default=None,
                       help="same seed, same text; left out, a fresh one is drawn and reported")
    group.add_argument("--stop", metavar="TEXT", type=non_empty_text, action="append", default=[],
                       help="end the reply before this text; may be given several times")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from nanoqwen.sampling import SamplingParams

    return SamplingParams(args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)


def choose_device(engine: str | None, device: str | None) -> str | None:
    """The device to ask for: what was named, else a GPU that PyTorch sees, else the CPU. The command prints where it runs.

    None where an engine was named without a device: the engine knows its own.
    """
    if engine is not None or device is not None:
        return device
    from nanoqwen.engines import available_engines

    usable = {name for name, works, _ in available_engines() if works}
    return "cuda" if "reference" in usable else "cpu"


def choose_engine(engine: str | None, device: str | None, pack: PackFile) -> tuple[str | None, str | None]:
    """(engine, device) to open ``pack`` with: what was named; where nothing was, the fastest that is correct here: on a Hopper GPU that of
    the engines whose kernels take this model's dimensions, and what ``choose_device`` says elsewhere."""
    if engine is None and device is None:
        from nanoqwen.cuda.constants import check_supported
        from nanoqwen.engines import fastest_hopper, hopper_problem

        try:
            check_supported(pack.dims, pack.group_size)
            if hopper_problem() is None:
                return fastest_hopper(pack.dims, pack.group_size), None
        except InputError:
            pass
    return engine, choose_device(engine, device)


@contextmanager
def open_file(file: str | None, *, payload: bool = True) -> Iterator[PackFile]:
    """The named .nanoqwen file, or the shipped model, packed first when that has not happened yet, or a synthetic model.

    A synthetic model that is too large for a file is refused, unless the caller says that it reads no ``payload``.
    """
    from nanoqwen import synthetic_pack
    from nanoqwen.packfile import open_pack

    if synthetic_pack.is_synthetic(file) and not synthetic_pack.is_small(file):
        if payload:
            raise InputError(synthetic_pack.too_large(file))
        yield synthetic_pack.planned(file)
        return
    if file is None or synthetic_pack.is_synthetic(file):
        from nanoqwen.default_model import ensure_default_pack

        notes: list[str] = []
        with Progress(None, "pack") as progress:
            if file is None:
                file = ensure_default_pack(notes=notes, progress=progress)
            else:
                file = synthetic_pack.ensure_synthetic_pack(file, notes=notes, progress=progress)
        for line in notes:
            note(line)
    with open_pack(file) as pack:
        _spare_threads(pack)
        yield pack


def _spare_threads(pack: PackFile) -> None:
    """Tell PyTorch, before it is imported, to use one thread for a small model, unless the user has chosen.

    Matrices of a few hundred rows are done before a second thread has woken up, and on a busy machine the threads of a step
    wait for each other by spinning, which makes them many times slower; alone on the machine one thread
    is no slower than two.
    """
    from nanoqwen.model import flops_per_token

    if flops_per_token(pack.dims, 0) < SMALL_MODEL_FLOPS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def open_session(args: argparse.Namespace) -> Iterator[tuple[PackFile, Tokenizer, Engine]]:
    """File, tokenizer and engine of a command; says on stderr which engine runs where."""
    with open_file(args.file, payload=False) as pack:
        from nanoqwen.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_pack(pack)
        from nanoqwen.engines.synthetic import open_file_or_plan

        name, device = choose_engine(args.engine, args.device, pack)
        with Progress(None, "load", " layers") as progress, open_file_or_plan(
            pack, name, device, progress=progress, context_limit=args.context
        ) as engine:
            note(f"engine {engine.name} on {engine.device}; {engine.description}")
            yield pack, tokenizer, engine
