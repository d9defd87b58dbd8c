"""``book/receipts/validate.json``: what the ladder found on a named Hopper card, model by model, engine by engine.

A run adds its model and engine to the receipt, as long as what is there was measured with the same sources on the same kind of
card; otherwise the receipt begins anew with this run. So a few commands fill one receipt, and it never mixes two states of the code.
"""

from __future__ import annotations

import math
from pathlib import Path

from nanoqwen.bench.receipts import HOPPER_SOURCES, PERSISTENT_SOURCES, check_receipt, read_receipt, receipts_folder, source_files, write_receipt
from nanoqwen.config import load_settings, repo_root
from nanoqwen.engines import HOPPER, hopper_problem
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.ladder.report import Check, Report, Tier

NAME = "validate"
#: What a change of makes a result worthless: everything that computes, and everything that compares.
SOURCES = (
    *HOPPER_SOURCES, *PERSISTENT_SOURCES, "nanoqwen/ladder/*.py", "nanoqwen/engines/base.py", "nanoqwen/engines/synthetic.py", "nanoqwen/reference.py", "nanoqwen/weights.py",
    "nanoqwen/kv.py", "nanoqwen/int4.py", "nanoqwen/model.py", "nanoqwen/synthetic.py", "nanoqwen/synthetic_pack.py",
)  # fmt: skip


def check_request(engine: str | None, *, whole: bool) -> None:
    """Raise InputError or DeviceError, before anything runs, for a run that no receipt is written of."""
    if engine not in HOPPER:
        raise InputError(f"the receipt of validate is about the Hopper engines: name one with --engine, {' or '.join(HOPPER)}")
    if not whole:
        raise InputError("the receipt of validate is about the whole ladder: leave --tier, --prompts and --tokens at their defaults")
    if repo_root() is None:
        raise InputError("a receipt names the hashes of its sources, so it is written in a clone of the repository; this nanoqwen is an installed package")
    if problem := hopper_problem():
        raise DeviceError(f"engine {engine}: {problem}; a receipt needs the card that it names")


def sources() -> list[str]:
    """The files that a receipt rests on, relative to the root of the clone."""
    return source_files(SOURCES)


def write(report: Report, model: str, engine: str, command: str) -> Path:
    """Put ``report`` into the receipt and return its path."""
    import torch

    from nanoqwen.bench.card import device_facts

    device, versions = device_facts(None)
    return merge(report, model, engine, command, device, {"torch": torch.__version__, **versions}, receipts_folder())


def merge(report: Report, model: str, engine: str, command: str, device: dict, versions: dict[str, str], folder: Path) -> Path:
    """``write``, with the card and the folder given."""
    path, old = folder / f"{NAME}.json", {}
    if path.is_file() and not check_receipt(path):
        found = read_receipt(path)
        if found["device"] == device and set(found["sources"]) == set(sources()):
            old = found
    models = old.get("results", {}).get("models", {})
    models = {**models, model: {**models.get(model, {}), engine: summary(report)}}
    samples = {**old.get("samples", {}), f"{model}, {engine}": {tier.name: [_row(check) for check in tier.checks] for tier in report.tiers}}
    commands = [*(c for c in old.get("command", "").split(" && ") if c and c != command), command]
    ladder = load_settings().ladder
    protocol = {
        "prompts": ladder.graph_prompts, "new_tokens": ladder.graph_tokens, "edge_lengths": list(ladder.edge_lengths), "limits": {
            "unit": ladder.unit_max_rel_error, "layer": ladder.layer_max_rel_error, "token_match": ladder.graph_min_token_match,
        },
    }  # fmt: skip
    return write_receipt(NAME, " && ".join(commands), {"models": models}, samples, sources(), protocol, device=device, versions=versions, folder=folder)


def summary(report: Report) -> dict:
    """A report in the numbers that the book quotes."""
    return {"passed": report.passed, "tiers": {tier.name: _tier(tier) for tier in report.tiers}}


def _tier(tier: Tier) -> dict:
    out = {
        "status": tier.status, "checks": len(tier.checks), "failed": sum(not check.passed for check in tier.checks), "seconds": round(tier.seconds, 1),
        "subject": tier.subject, "oracle": tier.oracle,
    }  # fmt: skip
    # A share that must be at least its limit is not an error that must stay below one.
    errors = [check for check in tier.checks if check.limit > 0 and "at least" not in check.unit]
    if errors:
        worst = max(errors, key=lambda check: check.value / check.limit)
        out["worst"] = dict(zip(("check", "value", "limit", "unit"), (worst.name, *_row(worst)[1:3], worst.unit)))
    if tier.facts:
        out |= tier.facts
        out["lines"] = tier.lines
    return out


def _row(check: Check) -> list:
    """[name, value, limit, unit]; JSON has no infinity."""
    return [check.name, float(f"{check.value:.4g}") if math.isfinite(check.value) else None, check.limit, check.unit]
