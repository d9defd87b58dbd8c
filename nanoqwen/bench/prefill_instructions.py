"""Machine instructions of prefill's products (chapter 08): ``python -m nanoqwen.bench.prefill_instructions``. Needs nvdisasm and no card.

The kernels are compiled for the 7B by NVRTC, as the engine compiles them. For every tile width the main loop is counted: one pass is a unit
of 128 columns, in which a lane unpacks 128 weights, those of two row tiles of 16. Loops that a wait spins in are part of it. Products of digits, of up to 16 tokens
(gemm_digits.cu), are other instructions and not among them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import nvrtc_version, source_files, write_receipt
from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda import sass
from nanoqwen.cuda.compile import compile_source
from nanoqwen.cuda.constants import LaunchShape, constants_header
from nanoqwen.cuda.prefill_plan import UNIT
from nanoqwen.errors import DeviceError

NAME, COMMAND = "prefill_instructions", "python -m nanoqwen.bench.prefill_instructions"
KERNELS = ("gemm_parts", "gemm_swiglu")  # the sources; each has a kernel of every shape
PATTERNS = (
    "kernels/prefill/gemm_*", "kernels/prefill/wgmma.cuh", "kernels/prefill/tiled_x.cuh", "kernels/common/*.cuh", "nanoqwen/cuda/constants.py",
    "nanoqwen/cuda/prefill_cut.py", "nanoqwen/cuda/prefill_plan.py", "nanoqwen/cuda/sass.py", "nanoqwen/bench/prefill_instructions.py", "config/nanoqwen.yaml",
)  # fmt: skip
ROW_TILES, LANES = 2, 32
WEIGHTS_A_LANE = ROW_TILES * 16 * UNIT // LANES

_PRODUCT = re.compile(r"\bHGMMA\.64x(\d+)x16\S*\s+R\d+, (R\d+|gdesc)")


def products(text: str) -> list[tuple[int, bool]]:
    """(tokens, whether its weights come from registers) of every HGMMA of a listing, in order."""
    return [(int(match.group(1)), match.group(2) != "gdesc") for match in _PRODUCT.finditer(text)]


def main_loops(body: list[sass.Instruction], widths: list[int]) -> dict[int, sass.Loop]:
    """{tokens: the loop of that width}. ``widths`` are those of the body's HGMMA, in order. Raises DeviceError for a width that no loop multiplies
    with, or that shares its loop with another."""
    places = [at for at, instruction in enumerate(body) if instruction.opcode.split(".")[0] == "HGMMA"]
    if len(places) != len(widths):
        raise DeviceError("the listing and its HGMMA do not agree")
    found = {}
    for width in sorted(set(widths)):
        of_width = {at for at, w in zip(places, widths) if w == width}
        # All products of a width stand in one loop: the shortest that holds them.
        around = [loop for loop in sass.loops(body) if all(loop.first <= at <= loop.last for at in of_width)]
        if not around:
            raise DeviceError(f"no loop holds the products of {width} tokens")
        found[width] = min(around, key=lambda loop: loop.last - loop.first)
        if any(found[width].first <= at <= found[width].last for at in set(places) - of_width):
            raise DeviceError(f"the loop of {width} tokens has products of another width")
    return found


def count_instructions(dims: Dims, group: int) -> tuple[dict, dict]:
    """({kernel: {registers, spill_bytes, from_registers, widths: {tokens: counts}}}, {kernel: {tokens: instructions by kind}})."""
    constants = constants_header(dims, group, LaunchShape(132))
    results: dict = {}
    samples: dict = {}
    for source in KERNELS:
        binary = compile_source(f"prefill/{source}.cu", constants)
        text = sass.listing(binary.cubin)
        sections = dict(re.findall(r"^\.text\.(\w+):(.*?)(?=^\.text\.|\Z)", text, re.MULTILINE | re.DOTALL))
        for kernel, body in sass.parse(text).items():
            every, use = products(sections[kernel]), binary.kernels[kernel]
            results[kernel] = {"registers": use.registers, "spill_bytes": use.spill_bytes + use.stack_bytes, "from_registers": all(ours for _, ours in every), "widths": {}}
            samples[kernel] = {}
            for width, loop in main_loops(body, [w for w, _ in every]).items():
                kinds = sass.count(body, loop)
                total = sum(kinds.values())
                results[kernel]["widths"][str(width)] = {"instructions": total, "hgmma": kinds["HGMMA"], "per_weight": round(total / WEIGHTS_A_LANE, 3)}
                samples[kernel][str(width)] = dict(kinds.most_common())
    return results, samples


def main(arguments: list[str] | None = None) -> int:
    """Count, print, write the receipt. Returns the exit status: 2 when it was refused, in one line."""

    def counted(args: argparse.Namespace) -> Callable[[], Path]:
        results, samples = count_instructions(Dims.qwen2_5_coder_7b(), load_settings().quant.group)
        for kernel, found in results.items():
            for width, counts in found["widths"].items():
                print(f"{kernel:<20}{width:>4} tokens{counts['instructions']:>6} instructions, {counts['hgmma']} HGMMA, {counts['per_weight']:.2f} a weight")
        protocol = {"target": "sm_90a", "compiler": "NVRTC", "weights_a_unit_and_lane": WEIGHTS_A_LANE, "columns_a_unit": UNIT, "nop": "not counted"}
        return lambda: write_receipt(NAME, COMMAND, results, samples, source_files(PATTERNS), protocol, versions=nvrtc_version())

    return run_program(COMMAND, "Machine instructions of prefill's products, for chapter 08.", arguments, counted)


if __name__ == "__main__":
    raise SystemExit(main())
