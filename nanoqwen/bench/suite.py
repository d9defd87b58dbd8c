"""One benchmark from beginning to end: check, measure the ceiling, measure every engine, run the peer, write the receipt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanoqwen.bench import context, e2e, gemv, itl, peer_torch, peers, prefill
from nanoqwen.bench.ceiling import Ceiling, measure_ceiling
from nanoqwen.bench.protocol import Protocol, model_facts, sources
from nanoqwen.bench.receipts import cpu_device, write_receipt
from nanoqwen.bench.prepare import default_engine, kind_of, need_hopper, opened
from nanoqwen.config import repo_root
from nanoqwen.engines import ENGINES, HOPPER, available_engines
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import is_planned, too_large

MODES = ("e2e", "gemv", "itl", "context", "prefill", "ceiling")


@dataclass
class Report:
    """What was measured, in the parts of a receipt. ``skipped`` says what a missing peer lacks; ``notes`` what must be told."""

    mode: str
    engines: list[str]
    protocol: dict
    results: dict
    samples: dict
    device: dict
    versions: dict[str, str]
    ceilings: dict[str, Ceiling]
    skipped: str | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, command: str, folder: Path | None) -> Path:
        """The receipt ``<mode>.json`` in ``folder``, or in ``book/receipts``. Raises InputError outside a clone."""
        rests_on = sources(self.mode, self.engines)
        if peer_torch.NAME in self.results.get("peers", {}):
            rests_on = sorted({*rests_on, *peer_torch.SOURCES})
        return write_receipt(
            self.mode, command, self.results, self.samples, rests_on, self.protocol, device=self.device, versions=self.versions, folder=folder
        )

    def as_dict(self) -> dict:
        """The report as one JSON object."""
        return {
            "bench": self.mode, "device": self.device, "versions": self.versions, "protocol": self.protocol, "results": self.results,
            "samples": self.samples, "skipped": self.skipped, "notes": self.notes,
        }  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is asked for: ``mode`` of ``MODES``, ``engines`` by name (None: the fastest here), and the options of the command."""

    mode: str
    protocol: Protocol
    engines: Sequence[str] | None = None
    device: str | None = None
    depths: Sequence[int] | None = None
    ceiling_bytes: int | None = None
    llama_bench: str | None = None
    gguf: str | None = None
    torch_peer: bool = False
    writes: bool = False


def engines_of(request: Request) -> list[str]:
    """The engines to measure. Raises InputError for a name that is none, DeviceError for one that cannot run here."""
    if request.mode == "gemv":
        need_hopper("bench gemv measures the INT4 kernels of the Hopper engines")
    names = list(dict.fromkeys(request.engines or [gemv.ENGINES[-1] if request.mode == "gemv" else default_engine(request.device)]))
    if request.mode == "gemv" and not set(names) <= set(gemv.ENGINES):
        raise InputError(f"bench gemv measures the kernels of {' and '.join(gemv.ENGINES)}; engine {names[0]} has none")
    state = {name: (works, why) for name, works, why in available_engines()}
    for name in names:
        if name not in state:
            raise InputError(f"there is no engine {name!r}, use one of {', '.join(ENGINES)}")
        works, why = state[name]
        if not works:
            raise DeviceError(f"engine {name}: {why}; use --engine cpu, or see `nanoqwen doctor`")
    return names


def run(request: Request, pack: PackFile | None, model_name: str, *, tell: Callable[[str], None], progress=None) -> Report:
    """Measure. ``pack`` may be None for mode "ceiling" alone; ``tell`` gets a line as soon as there is something to say.

    Everything that can be refused is refused before anything is timed: InputError, ContextError, DeviceError, in one line.
    """
    names, protocol = engines_of(request), request.protocol
    if pack is not None and request.mode != "ceiling":
        if is_planned(pack) and not set(names) <= set(HOPPER):
            raise InputError(too_large(str(pack.path)))
        limit = pack.dims.max_position
        if request.mode == "context":
            context.usable_depths(limit, protocol, request.depths)
        elif request.mode not in ("gemv", "prefill"):
            protocol.check_fits(limit)
    if request.writes and repo_root() is None:
        raise InputError("a receipt names the hashes of its sources, so it is written in a clone of the repository; this nanoqwen is an installed package")
    missing: list[str] = []
    tool = _or_skipped(missing, tell, lambda: peers.find(request.llama_bench, request.gguf))
    card = _or_skipped(missing, tell, lambda: peer_torch.find(request.torch_peer, names, request.device, pack.dims, pack.group_size)) if pack is not None else None

    ceilings = {}
    for kind in dict.fromkeys(kind_of(name) for name in names):
        where = "cpu" if kind == "pytorch" and "reference" not in names else request.device or "cuda"
        ceilings[kind] = measure_ceiling(kind, where, request.ceiling_bytes)
    main = ceilings.get("hopper") or ceilings["pytorch"]
    device, versions = _machine(names, request.device)
    report = Report(request.mode, names, _protocol(request), {"ceiling_gb_s": main.gb_s}, {"ceiling": main.as_dict()}, device, versions, ceilings)
    if main.datasheet_gb_s:
        report.results["datasheet_gb_s"] = main.datasheet_gb_s
    if request.mode == "ceiling":
        return report
    stored = sum(nbytes for entry in pack.tensors.values() for _, nbytes, _ in entry.spans)
    weights = sum(entry.rows * entry.cols for entry in pack.tensors.values())
    report.results["model"] = model_facts(model_name, pack.dims, pack.group_size, stored, weights)
    for name in names:
        _measure(report, request, pack, name, ceilings[kind_of(name)], progress)
    beside = {
        peers.NAME: tool and (lambda: peers.run(tool, protocol, on_gpu=set(names) != {"cpu"}, ceiling_gb_s=main.gb_s)),
        peer_torch.NAME: card and (lambda: peer_torch.run(pack.dims, pack.group_size, protocol, card, main.gb_s)),
    }
    for name, measure in beside.items():
        if measure and (measured := _or_skipped(missing, tell, measure)):
            report.results.setdefault("peers", {})[name], report.samples.setdefault("peers", {})[name] = measured
    report.skipped = "; ".join(missing) or None
    return report


def _or_skipped(missing: list[str], tell: Callable[[str], None], work: Callable):
    """What ``work`` gives; None, said at once and added to ``missing``, when it answers that a peer cannot be measured."""
    try:
        return work()
    except peers.Skipped as reason:
        missing.append(str(reason))
        tell(f"peer skipped: {reason}")
        return None


def _measure(report: Report, request: Request, pack: PackFile, name: str, ceiling: Ceiling, progress) -> None:
    results, samples = report.results, report.samples
    with opened(pack, name, request.device) as (engine, setup):
        if request.mode == "gemv":
            found, raw, notes = gemv.measure(engine, request.protocol, ceiling, int(report.device["l2_mb"] * 1e6))
            results["shapes"], samples["shapes"] = found, raw
            report.notes += notes
            return
        if request.mode == "prefill":
            found, raw = prefill.measure(engine, request.protocol.seed, progress)
            results.setdefault("setup", {})[name] = setup.as_dict()
        elif request.mode == "context":
            found, raw = context.measure(engine, request.protocol, ceiling, progress, request.depths)
            results.setdefault("setup", {})[name] = setup.as_dict()
        else:
            found, raw = {"e2e": e2e, "itl": itl}[request.mode].measure(engine, setup, request.protocol, ceiling, progress)
        results.setdefault("engines", {})[name] = found
        samples.setdefault("engines", {})[name] = raw


def _protocol(request: Request) -> dict:
    out = request.protocol.as_dict() if request.mode != "prefill" else prefill.protocol(request.protocol.seed)
    if hasattr(os, "getloadavg"):
        out["load_at_start"] = round(os.getloadavg()[0], 2)
    return out


def _machine(names: Sequence[str], device: str | None) -> tuple[dict, dict[str, str]]:
    """(device, versions) of the receipt: the card's where one is measured, else the processor's."""
    import torch

    versions = {"torch": torch.__version__}
    if set(names) & set(HOPPER):
        from nanoqwen.bench.card import device_facts

        facts, more = device_facts(device)
        return facts, {**versions, **more}
    if "reference" in names:
        return {"name": torch.cuda.get_device_name(device or "cuda")}, versions
    return {**cpu_device(), "threads": torch.get_num_threads()}, versions
