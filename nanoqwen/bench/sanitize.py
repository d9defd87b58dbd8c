"""Every kernel under NVIDIA's sanitizers: ``python -m nanoqwen.bench.sanitize``.

memcheck looks for accesses outside an array and for API calls that fail, racecheck for two threads that use the same shared memory without
a barrier between them, synccheck for wrong use of barriers. The receipt is about these three; initcheck, which looks for reads of memory that
nobody wrote, can be asked for. Each runs ``nanoqwen.bench.sanitize_run``, in a process of its own with a time limit, racecheck in several. The receipt says
what was found, and it is only written when nothing was and when every kernel of the runtime was launched.

Reports are printed in full. One kind is not counted as an error: a failed question to the driver where a function is
(``cuGetProcAddress``), which is how bindings newer than the driver find out what it can do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import HOPPER_SOURCES, PERSISTENT_SOURCES, source_files, write_receipt
from nanoqwen.errors import DeviceError

NAME = "sanitize"
COMMAND = "python -m nanoqwen.bench.sanitize"
#: Files whose change can make a kernel wrong; ``sources`` lists them.
ROOMS = ("nanoqwen/bench/sanitize.py", "nanoqwen/bench/sanitize_run.py", *HOPPER_SOURCES, *PERSISTENT_SOURCES)
TIMEOUT_S = 180
#: mbarriers of a CTA, at most. Left to themselves the tools count the places in the code that initialise one, and a place in a loop initialises many.
BARRIERS = ("--num-cuda-barriers", "128")
#: Options of each tool. Padding keeps allocations apart, so that an overrun of one does not end in the next.
TOOLS = {
    "memcheck": ("--padding", "256", "--report-api-errors", "explicit"),
    "racecheck": ("--print-limit", "20", *BARRIERS),
    "synccheck": BARRIERS,
    "initcheck": ("--print-limit", "20"),
}
#: The tools of the receipt.
USUAL = ("memcheck", "racecheck", "synccheck")
#: These look at our kernels only: what CuPy launches is not ours to mend, and racecheck multiplies its time.
OURS_ONLY = ("racecheck", "synccheck", "initcheck")
#: racecheck looks at some of the kernels in each of so many processes, which run side by side; the slowest ones have a process of their own.
PORTIONS = 8
ALONE = ("sample", "persistent")
#: Of a kernel with many barriers of a cluster, each of which racecheck takes a second for, it looks at so many launches.
LAUNCHES = {"sample": 2}
TOOLKIT = Path("/usr/local/cuda/bin")
PREFIX = "========= "
#: What it prints when it has failed itself, with a summary behind it that counts one error. Seen of 2025.3.1 with the kernels that run in clusters; 2026.4 takes them.
BROKEN = "Internal Sanitizer Error"
_PROBE = re.compile(r" on CUDA API call to cuGetProcAddress(_v2)?\b")


@dataclass(frozen=True)
class Outcome:
    """What one tool said. ``errors`` are counted without ``probes``, questions for functions that this driver lacks."""

    errors: int
    warnings: int
    probes: int
    reports: list[str]
    summary: str


def parse(text: str) -> Outcome:
    """Read a sanitizer's output. Raises DeviceError, with the last lines, when it holds no summary: then the tool broke down."""
    lines = [line for line in text.splitlines() if line.startswith(PREFIX.rstrip())]
    bare = [line[len(PREFIX) :] for line in lines]
    reports = _reports(bare)
    probes = sum(1 for report in reports if _PROBE.search(report))
    for line in bare:
        if found := re.match(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", line):
            return Outcome(int(found[1]), int(found[2]), probes, reports, line)
        if found := re.match(r"ERROR SUMMARY: (\d+) errors?$", line):
            warnings = sum(1 for report in reports if report.lower().startswith("warning"))
            return Outcome(max(0, int(found[1]) - probes), warnings, probes, reports, line)
    raise DeviceError("the sanitizer ended without a summary; its last lines: " + " | ".join(text.strip().splitlines()[-5:]))


def _reports(lines: Sequence[str]) -> list[str]:
    """The reports among the tool's own lines, each as one text: a line that is not indented, and the indented ones that follow."""
    found: list[str] = []
    for line in lines:
        if not line.strip() or "SUMMARY" in line or line.startswith("COMPUTE-SANITIZER"):
            continue
        if line.startswith(" ") and found:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


def find_sanitizer(environ: dict[str, str] | None = None) -> Path:
    """compute-sanitizer on PATH, in CUDA_HOME or CUDA_PATH, in the usual toolkit folder, or in pip's wheel. Raises DeviceError when there is none."""
    environ = dict(os.environ) if environ is None else environ
    if found := shutil.which("compute-sanitizer", path=environ.get("PATH", "")):
        return Path(found)
    folders = [Path(environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    folders += [TOOLKIT, *(p for entry in sys.path for p in sorted(Path(entry or ".").glob("nvidia/cu[0-9]*/bin")))]
    for folder in folders:
        if (folder / "compute-sanitizer").is_file():
            return folder / "compute-sanitizer"
    raise DeviceError(
        "compute-sanitizer is not on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin; it comes with the CUDA toolkit, or as the wheel nvidia-cuda-sanitizer-api"
    )


def version_of(sanitizer: Path) -> str:
    """The sanitizer's version ("2025.3.1.0"). Raises DeviceError when it cannot be run."""
    try:
        done = subprocess.run([str(sanitizer), "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"{sanitizer} cannot be run: {error}") from None
    found = re.search(r"Version (\S+)", done.stdout)
    if done.returncode or not found:
        raise DeviceError(f"{sanitizer} does not tell its version: {done.stdout.strip()[:200]}")
    return found[1]


def portions(tool: str, kernels: Sequence[str]) -> list[list[str]]:
    """The kernels that each process of ``tool`` looks at. Every process launches all of them."""
    if tool != "racecheck":
        return [list(kernels)]
    alone = [[name] for name in kernels if name in ALONE]
    rest = [name for name in kernels if name not in ALONE]
    many = max(1, min(PORTIONS - len(alone), len(rest)))
    return [portion for portion in (rest[k::many] for k in range(many)) if portion] + alone


def command_of(tool: str, sanitizer: Path, kernels: Sequence[str], program: Sequence[str]) -> list[str]:
    """The command line that runs ``program`` under ``tool``."""
    only = [word for name in kernels for word in ("--kernel-name", f"kernel_name={name}")] if tool in OURS_ONLY else []
    few = ["--launch-count", str(LAUNCHES[kernels[0]])] if tool == "racecheck" and len(kernels) == 1 and kernels[0] in LAUNCHES else []
    return [str(sanitizer), "--tool", tool, *TOOLS[tool], *only, *few, *program]


def run_tool(tool: str, sanitizer: Path, kernels: Sequence[str], timeout: float = TIMEOUT_S, program: Sequence[str] | None = None) -> tuple[Outcome, dict, float]:
    """(what ``tool`` found, what the program says it launched, seconds).

    Raises DeviceError when the time limit passes, when the program fails without the tool having found why, and when it did not launch
    every kernel.
    """
    program = program or [sys.executable, "-m", "nanoqwen.bench.sanitize_run"]
    with tempfile.TemporaryDirectory(prefix="nanoqwen-sanitize-") as folder:
        answer, started = Path(folder) / "launched.json", time.perf_counter()
        try:
            done = subprocess.run(
                command_of(tool, sanitizer, kernels, [*program, str(answer), tool]),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            shown = expired.stdout or b""
            last = (shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown).strip().splitlines()[-3:]
            raise DeviceError(f"{tool} did not finish within {timeout:.0f} s; its last lines: {' | '.join(last) or 'none'}") from None
        seconds = time.perf_counter() - started
        if BROKEN in done.stdout:
            raise DeviceError(f"{tool}: {sanitizer} broke down ({BROKEN}); a newer one may not: pip install nvidia-cuda-sanitizer-api, and name its compute-sanitizer with --sanitizer")
        outcome = parse(done.stdout)
        if not answer.is_file():
            if outcome.errors:
                return outcome, {"kernels": [], "launched": [], "cases": []}, seconds
            own = [line for line in done.stdout.strip().splitlines() if not line.startswith("===")]
            raise DeviceError(f"{tool}: the program failed: {' | '.join(own[-5:])}")
        launched = json.loads(answer.read_text(encoding="utf-8"))
    if missing := sorted(set(launched["kernels"]) - set(launched["launched"])):
        raise DeviceError(f"{tool}: the program did not launch {', '.join(missing)}: nanoqwen/bench/sanitize_run.py has to")
    return outcome, launched, seconds


def kernel_names() -> list[str]:
    """Every kernel of the runtime, as the compiler names them. Needs NVRTC, but no card."""
    from nanoqwen.bench.sanitize_run import CASES
    from nanoqwen.cuda.compile import compile_all
    from nanoqwen.cuda.constants import LaunchShape, constants_header
    from nanoqwen.cuda.persistent_plan import compile_persistent

    case, shape = CASES["embedded"], LaunchShape(132)  # names depend on no model and on no card; 132 SMs has an H100
    binaries = [*compile_all(constants_header(case.dims, case.group, shape)), compile_persistent(case.dims, case.group, shape)]
    return sorted({name for binary in binaries for name in binary.kernels})


def sources() -> list[str]:
    """The files the receipt rests on, relative to the root of the clone."""
    return source_files(ROOMS)


def run(tools: Sequence[str], sanitizer: Path, tell: Callable[[str], None], timeout: float = TIMEOUT_S) -> tuple[dict, dict]:
    """(results, samples) of all ``tools``. What each reports is told in full as soon as it has ended, whatever becomes of the others.

    Raises DeviceError when one of them could not be run to its end: the reasons of all those, in one line.
    """
    from nanoqwen.bench.sanitize_run import CASES

    version, names, found, kernels, broken = version_of(sanitizer), kernel_names(), {}, [], []
    work = [(tool, portion) for tool in tools for portion in portions(tool, names)]
    with ThreadPoolExecutor(len(work)) as pool:  # each is a process of its own, and most of its time is the tool's own work on the host
        running = {pool.submit(run_tool, tool, sanitizer, portion, timeout): (tool, portion) for tool, portion in work}
        for done in as_completed(running):
            tool, portion = running[done]
            try:
                outcome, launched, seconds = done.result()
            except DeviceError as error:
                broken.append(f"{error} ({', '.join(portion)})" if portion != names else str(error))
                continue
            kernels = launched["launched"] or kernels
            found.setdefault(tool, []).append((outcome, seconds))
            looked_at = "" if portion == names else f" [{', '.join(portion)}]"
            tell(f"{tool}{looked_at}: {outcome.errors} errors, {outcome.warnings} warnings, {outcome.probes} driver probes, {seconds:.1f} s ({outcome.summary})")
            for report in outcome.reports:
                tell(report)
    if broken:
        raise DeviceError("; ".join(broken))
    results = {
        tool: {
            **{count: sum(getattr(outcome, count) for outcome, _ in found[tool]) for count in ("errors", "warnings")},
            "driver_probes": sum(outcome.probes for outcome, _ in found[tool]), "processes": len(found[tool]), "seconds": round(max(seconds for _, seconds in found[tool]), 1),
        }
        for tool in tools
    }  # fmt: skip
    samples = {tool: {"summaries": [outcome.summary for outcome, _ in found[tool]], "reports": [report for outcome, _ in found[tool] for report in outcome.reports]} for tool in tools}
    return {"sanitizer": version, "tools": results, "kernels": kernels, "cases": list(CASES)}, samples


def main(arguments: list[str] | None = None) -> int:
    """Run the tools, print what they report, write the receipt when it is clean. The exit status is 1 when it is not, 2 when nothing could be run."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tool", action="append", choices=list(TOOLS), help="only this tool, and no receipt; may be given several times")
        parser.add_argument("--sanitizer", metavar="PATH", type=Path, help="the program compute-sanitizer (default: found)")
        parser.add_argument("--timeout", metavar="S", type=float, default=TIMEOUT_S, help="seconds that one tool may take (default: %(default)s)")

    def checked(args: argparse.Namespace) -> Callable[[], Path] | int:
        from nanoqwen.bench.card import device_facts
        from nanoqwen.bench.prepare import need_hopper

        need_hopper("the sanitizers run the Hopper kernels")
        results, samples = run(args.tool or USUAL, args.sanitizer or find_sanitizer(), tell=lambda line: print(line, flush=True), timeout=args.timeout)
        if any(tool["errors"] for tool in results["tools"].values()):
            print("errors were found: no receipt", file=sys.stderr)
            return 1
        if args.tool:
            return 0
        device, versions = device_facts(None)
        protocol = {
            "tools": {tool: " ".join(TOOLS[tool]) for tool in USUAL}, "own_kernels_only": list(OURS_ONLY), "memory": "an allocation an array",
            "racecheck_launches": LAUNCHES, "racecheck_builds": "readers of a place that is filled again have a proxy fence of their own; in the persistent kernel each lane arrives for itself and one lane asks",
        }  # fmt: skip
        return lambda: write_receipt(NAME, COMMAND, results, samples, sources(), protocol, device=device, versions=versions)

    return run_program(COMMAND, "Run every kernel under compute-sanitizer's tools and write the receipt.", arguments, checked, options)


if __name__ == "__main__":
    sys.exit(main())
