"""The validation ladder: file, unit, layer, graph, in this order, and a rung is not stepped on when the one below broke.

    file    every checksum of the .nanoqwen file
    unit    single operations of the engine against float64 numpy
    layer   whole decoder blocks of this file against float64 numpy
    graph   generated text, token by token, against an uncached simulation of the same INT4 weights

A failed lower tier makes the upper ones meaningless: a wrong unpack also shows as wrong text, but the text does not say why.
Thresholds come from config/nanoqwen.yaml, section `ladder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanoqwen.config import Settings, load_settings
from nanoqwen.engines.base import Engine
from nanoqwen.errors import InputError
from nanoqwen.ladder.report import PASSED, Check, Report, Tier
from nanoqwen.model import flops_per_token
from nanoqwen.packfile import PackFile

Progress = Callable[[int, int, str], None]

#: Prompts and new tokens of the graph tier on a CPU; the protocol of the settings is made for a GPU. A model above the size
#: gets the second pair: there a token takes seconds.
CPU_GRAPH = ((24, 16), (2, 8))
LARGE_MODEL_FLOPS = 2e9
FLOAT64 = "numpy float64, written apart"


def run_ladder(
    pack: PackFile, tier: str, *, engine: str | None = None, device: str | None = None, prompts: int | None = None,
    tokens: int | None = None, progress: Progress | None = None,
) -> Report:
    """Run the tiers up to and including `tier` ("unit", "layer" or "graph") on an open pack file.

    `engine` and `device` choose what is under test, as in `engines.open_engine`. `prompts` and `tokens` size the graph tier.
    `progress` is called as (done, total, label), in bytes while checksums are read and in prompts later. Raises InputError for
    a file whose tensors do not fit its dimensions and for an unknown engine, DeviceError for a device that is not there.
    """
    settings = load_settings()
    wanted = settings.ladder.tiers[: settings.ladder.tiers.index(tier) + 1]
    report = Report(str(pack.path), [Tier("file"), *(Tier(name) for name in wanted)])
    with _timed(report.tiers[0]) as rung:
        _file(rung, pack, progress)
    if rung.status == PASSED:
        from nanoqwen.engines import HOPPER, open_engine

        if engine in HOPPER:  # its kernels have no twins here yet, and a ladder that tests something else would mislead
            raise InputError(f"validate does not climb with engine {engine} yet; use --engine cpu, or --engine reference on a GPU")

        # The engine comes first: a device that is not there is said before anything is measured on it. Single operations
        # need no weights in memory.
        with open_engine(pack, engine, device, weights="streamed" if wanted == ("unit",) else "auto") as opened:
            for rung in report.tiers[1:]:
                with _timed(rung):
                    _TIERS[rung.name](rung, pack, opened, _torch_device(opened, device), settings, prompts, tokens, progress)
                if rung.status != PASSED:
                    break
    return report


@contextmanager
def _timed(tier: Tier) -> Iterator[Tier]:
    started = time.perf_counter()
    tier.ran = True
    yield tier
    tier.seconds = time.perf_counter() - started


def _torch_device(opened: Engine, device: str | None) -> str:
    """The PyTorch device of the engine under test, on which its operations and the large oracle run as well."""
    return "cpu" if opened.name == "cpu" else device or "cuda"


def _file(tier: Tier, pack: PackFile, progress: Progress | None) -> None:
    tier.subject, tier.oracle = "every payload of the file", "the checksums in its table"
    tier.lines = pack.verify(progress)
    tier.checks = [Check("checksums", not tier.lines, len(tier.lines), 0, "damaged sections", f"{len(pack.tensors)} tensors")]


def _unit(tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, *_) -> None:
    from nanoqwen.ladder import unit
    from nanoqwen.ladder.subject import TorchOperations

    operations = TorchOperations(pack, device)
    tier.subject, tier.oracle = operations.name, FLOAT64
    tier.checks = list(unit.checks(pack, operations, settings))


def _layer(tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, *_) -> None:
    from nanoqwen.ladder import layer
    from nanoqwen.ladder.prompts import long_text
    from nanoqwen.ladder.subject import TorchBlocks
    from nanoqwen.tokenizer import Tokenizer

    blocks = TorchBlocks(pack, device)
    tier.subject, tier.oracle = blocks.name, FLOAT64
    tier.checks = list(layer.checks(pack, blocks, Tokenizer.from_pack(pack).encode(long_text()), settings))


def _graph(
    tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, prompts: int | None, tokens: int | None, progress: Progress | None
) -> None:
    from nanoqwen.ladder import graph
    from nanoqwen.tokenizer import Tokenizer

    tokenizer, protocol = Tokenizer.from_pack(pack), settings.ladder
    usual = _usual_size(pack, opened.name == "cpu", settings)
    count, new = prompts or usual[0], tokens or usual[1]
    planned = graph.plan(tokenizer, count, new, opened.context_limit, settings)
    if not planned:
        raise InputError(f"{pack.path}: a context of {opened.context_limit} tokens has no room for a prompt and {new} new tokens; ask for fewer (--tokens)")
    tier.subject = f"engine {opened.name} on {opened.device}: {opened.description}"
    tier.oracle, tier.checks, tier.lines = graph.run(pack, opened, tokenizer, planned, new, settings, device, progress)
    if (count, new) != (protocol.graph_prompts, protocol.graph_tokens):
        tier.lines.append(
            f"a short run, {count} prompts x {new} tokens: the full protocol is --prompts {protocol.graph_prompts} --tokens {protocol.graph_tokens}"
        )


_TIERS = {"unit": _unit, "layer": _layer, "graph": _graph}


def _usual_size(pack: PackFile, on_cpu: bool, settings: Settings) -> tuple[int, int]:
    if not on_cpu:
        return settings.ladder.graph_prompts, settings.ladder.graph_tokens
    return CPU_GRAPH[flops_per_token(pack.dims, 0) > LARGE_MODEL_FLOPS]
