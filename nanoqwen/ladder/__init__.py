"""The validation ladder: file, unit, layer, graph, in this order, and a rung is not stepped on when the one below broke.

    file    every checksum of the .nanoqwen file
    unit    single operations of the engine, on a Hopper card each kernel, against float64 numpy
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
from nanoqwen.engines import HOPPER
from nanoqwen.engines.base import Engine
from nanoqwen.engines.synthetic import open_file_or_plan
from nanoqwen.errors import InputError
from nanoqwen.ladder.report import PASSED, Check, Report, Tier
from nanoqwen.model import flops_per_token
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import is_planned

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
    """Run the tiers up to and including `tier` ("unit", "layer" or "graph") on an open pack file or a planned one.

    `engine` and `device` choose what is under test, as in `engines.open_engine`; a planned file (`synthetic_pack`) needs a Hopper
    engine, which makes the weights. `prompts` and `tokens` size the graph tier. `progress` is called as (done, total, label), in bytes
    while checksums are read and in prompts later. Raises InputError for a file whose tensors do not fit its dimensions and for an
    unknown engine, DeviceError for a device that is not there.
    """
    settings = load_settings()
    wanted = settings.ladder.tiers[: settings.ladder.tiers.index(tier) + 1]
    file, *rungs = tiers = [Tier("file"), *(Tier(name) for name in wanted)]
    report = Report(str(pack.path), tiers)
    planned = is_planned(pack)
    if not planned:
        with _timed(file):
            _file(file, pack, progress)
        if file.status != PASSED:
            return report
    # The engine comes first: a device that is not there is said before anything is measured on it. Single operations need no
    # weights in memory, unless they run on the weights of the engine itself.
    options = {} if engine in HOPPER or planned or wanted != ("unit",) else {"weights": "streamed"}
    with open_file_or_plan(pack, engine, device, **options) as opened:
        if opened.name in HOPPER:
            from nanoqwen.ladder.card_pack import CardPack, weight_checks

            if planned:
                with _timed(file):
                    file.subject, file.oracle = "no file: weights made on the card from the seed", "their recipe in numpy"
                    file.checks = list(weight_checks(pack, opened._weights))
                pack = CardPack(pack, opened._weights)
        # [climb]
        for before, rung in zip(tiers, rungs):
            if before.status != PASSED:
                break
            with _timed(rung):
                _TIERS[rung.name](rung, pack, opened, _torch_device(opened, device), settings, prompts, tokens, progress)
        # [/climb]
    return report


@contextmanager
def _timed(tier: Tier) -> Iterator[Tier]:
    started = time.perf_counter()
    tier.ran = True
    yield tier
    tier.seconds = time.perf_counter() - started


def _torch_device(opened: Engine, device: str | None) -> str:
    """The PyTorch device of the engine under test, on which its operations and the large oracle run as well.

    A Hopper engine does not need PyTorch to see the card; where it does not, the oracle computes on the CPU.
    """
    if opened.name in HOPPER:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if opened.name == "cpu" else device or "cuda"


def _file(tier: Tier, pack: PackFile, progress: Progress | None) -> None:
    tier.subject, tier.oracle = "every payload of the file", "the checksums in its table"
    tier.lines = pack.verify(progress)
    tier.checks = [Check("checksums", not tier.lines, len(tier.lines), 0, "damaged sections", f"{len(pack.tensors)} tensors")]


def _unit(tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, *_) -> None:
    tier.oracle = FLOAT64
    if opened.name in HOPPER:
        from nanoqwen.ladder import card_unit
        from nanoqwen.ladder.card import Card

        card = Card(opened)
        tier.subject = f"every kernel of {card.name}"
        tier.checks = list(card_unit.checks(pack, card, settings))
        return
    from nanoqwen.ladder import unit
    from nanoqwen.ladder.subject import TorchOperations

    operations = TorchOperations(pack, device)
    tier.subject = operations.name
    tier.checks = list(unit.checks(pack, operations, settings))


def _layer(tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, *_) -> None:
    from nanoqwen.ladder import layer
    from nanoqwen.ladder.prompts import long_text
    from nanoqwen.tokenizer import Tokenizer

    if opened.name in HOPPER:
        from nanoqwen.ladder.card import Card, CardBlocks

        blocks = CardBlocks(Card(opened))
    else:
        from nanoqwen.ladder.subject import TorchBlocks

        blocks = TorchBlocks(pack, device)
    tier.subject, tier.oracle = blocks.name, FLOAT64
    tier.checks = list(layer.checks(pack, blocks, Tokenizer.from_pack(pack).encode(long_text()), settings))


def _graph(
    tier: Tier, pack: PackFile, opened: Engine, device: str, settings: Settings, prompts: int | None, tokens: int | None, progress: Progress | None
) -> None:
    from nanoqwen.ladder import graph
    from nanoqwen.ladder.prompts import humaneval_prompts
    from nanoqwen.tokenizer import Tokenizer

    tokenizer, protocol = Tokenizer.from_pack(pack), settings.ladder
    usual = _usual_size(pack, opened.name == "cpu", settings)
    count, new = prompts or usual[0], tokens or usual[1]
    texts = None if opened.name == "cpu" else humaneval_prompts(count)  # longer than ours, and the protocol's own
    planned = graph.plan(tokenizer, count, new, opened.context_limit, settings, texts)
    if not planned:
        raise InputError(f"{pack.path}: a context of {opened.context_limit} tokens has no room for a prompt and {new} new tokens; ask for fewer (--tokens)")
    source = "HumanEval" if texts else "the ladder's own prompts"
    if is_planned(pack):
        planned, tokenizer, source = graph.varied(planned, pack.dims.vocab), None, f"varied ids of the whole vocabulary, in the lengths of {source}"
    outcome = graph.run(pack, opened, tokenizer, planned, new, settings, device, progress)
    tier.subject = f"engine {opened.name} on {opened.device}: {opened.description}; prompts: {source}, one in three cut to an edge length"
    tier.oracle, tier.checks, tier.lines = outcome.oracle, outcome.checks, outcome.lines
    tier.facts = {**outcome.facts, "new_tokens": new, "source": source}
    if (count, new) != (protocol.graph_prompts, protocol.graph_tokens):
        tier.lines.append(
            f"a short run, {count} prompts x {new} tokens: the full protocol is --prompts {protocol.graph_prompts} --tokens {protocol.graph_tokens}"
        )


_TIERS = {"unit": _unit, "layer": _layer, "graph": _graph}


def _usual_size(pack: PackFile, on_cpu: bool, settings: Settings) -> tuple[int, int]:
    if not on_cpu:
        return settings.ladder.graph_prompts, settings.ladder.graph_tokens
    return CPU_GRAPH[flops_per_token(pack.dims, 0) > LARGE_MODEL_FLOPS]
