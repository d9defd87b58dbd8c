"""Machine instructions of the persistent kernel (chapter 10): ``python -m nanoqwen.bench.persistent_instructions``. Needs nvdisasm and no card.

The kernel is compiled for the 7B by NVRTC, as the engine compiles it. For each matrix the loop over units is counted. One pass is the units that
a warp holds in registers, of each of which it has two blocks of four; in gate and up at least one of each. All that the loop may do counts: waiting for a unit and giving it
back, the end of a row tile, in gate and up the inner vector's early pieces. So a pass takes no more than that, but for a wait that
goes on: its repeats lie out of line.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable
from pathlib import Path

from nanoqwen.bench.program import run_program
from nanoqwen.bench.receipts import PERSISTENT_SOURCES, nvrtc_version, source_files, write_receipt
from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda import sass
from nanoqwen.cuda.compile import Binary
from nanoqwen.cuda.constants import HEAD_SLICE, TILE_ROWS, LaunchShape
from nanoqwen.cuda.persistent_plan import SETTINGS, compile_persistent
from nanoqwen.errors import DeviceError

NAME, COMMAND = "persistent_instructions", "python -m nanoqwen.bench.persistent_instructions"
SMS, LANES, BLOCKS = 132, 32, 2
#: Columns that one tensor-core instruction multiplies.
COLUMNS = {"IMMA": 32, "HMMA": 16}
_SOURCES = (
    "kernels/common/*.cuh", *(source for source in PERSISTENT_SOURCES if source.startswith("kernels/")), "nanoqwen/cuda/constants.py", "nanoqwen/cuda/persistent_plan.py",
    "nanoqwen/cuda/sass.py", "nanoqwen/bench/persistent_instructions.py", "config/nanoqwen.yaml",
)  # fmt: skip


def units_a_pass(matrix: str) -> int:
    """Units of a warp in one pass of the loop over ``matrix``: gate and up are a pass together, and of the head a warp never holds more than one."""
    return 1 if matrix == "head" else max(SETTINGS["kHold"], 2 if matrix == "gate_up" else 1)


def weights_a_lane(matrix: str, columns: int) -> int:
    """Weights of a lane in one pass over blocks of ``matrix``, which are ``columns`` wide."""
    return units_a_pass(matrix) * BLOCKS * TILE_ROWS * columns // LANES


def loops_of(body: list[sass.Instruction], group: int) -> dict[str, sass.Loop]:
    """{matrix: its loop over units}. Raises DeviceError when they are not the five that are expected."""

    def products(matrix: str, marker: str, columns: int) -> int:
        return units_a_pass(matrix) * BLOCKS * columns // COLUMNS[marker]

    one, both, of_head = products("down", "IMMA", group), products("gate_up", "IMMA", group), products("head", "HMMA", HEAD_SLICE)
    int4 = [loop for loop in sass.smallest_loops(body, "IMMA", one) if sass.count(body, loop)["IMMA"] in (one, both)]
    head = [loop for loop in sass.smallest_loops(body, "HMMA", of_head) if sass.count(body, loop)["HMMA"] == of_head]
    quantises = [loop for loop in int4 if sass.count(body, loop)["REDUX"] and sass.count(body, loop)["IMMA"] == both]  # gate and up: the inner vector's early pieces
    if len(int4) != 4 or len(head) != 1 or len(quantises) != 1:
        raise DeviceError(f"the kernel has {len(int4)} loops over units of INT4, {len(quantises)} of which quantise, and {len(head)} over the head; 4, 1 and 1 are expected")
    gate_up = quantises[0]
    down = max((loop for loop in int4 if loop != gate_up), key=lambda loop: sass.count(body, loop)["LDS"])  # its x comes from shared memory
    qkv, o = (loop for loop in int4 if loop not in (gate_up, down))
    return {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down, "head": head[0]}


def _code(cubin: bytes, kernel: str) -> bytes:
    """The machine code of ``kernel``: a section of an ELF file, 16 bytes an instruction."""
    table, size, count, names_at = *struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, at, nbytes in headers:
        if cubin[names + name :].split(b"\0", 1)[0] == f".text.{kernel}".encode("ascii"):
            return cubin[at : at + nbytes]
    raise DeviceError(f"the cubin has no kernel {kernel}")


def _with_scoreboards(cubin: bytes, kernel: str) -> tuple[list[sass.Instruction], list[int]]:
    """(instructions, their control bits). A load counts up a scoreboard until its value is there, and an instruction can wait for scoreboards: of its 128 bits, 110 to 112
    name the one that it counts (7: none) and 116 to 121 those that it waits for; here bits 5 to 7 and 11 to 16."""
    body, code = sass.disassemble(cubin)[kernel], _code(cubin, kernel)
    if 16 * len(body) != len(code):
        raise DeviceError(f"{len(code)} bytes of machine code are not {len(body)} instructions")
    return body, [upper >> 41 for _, upper in struct.iter_unpack("<QQ", code)]


def loads_one_by_one(cubin: bytes, kernel: str = "persistent") -> tuple[int, int]:
    """(loads of four exchanged words, those of them that are issued behind a wait for the load in front of them).

    The source asks for all words of a look before it tests the first (exchange.cuh); the second number is of those that the compiler has put behind a test all the same. Looked
    at backwards in the order of the code, as far as the last vote, which ends a look, or wait for a barrier.
    """
    body, control = _with_scoreboards(cubin, kernel)
    loads, behind = [i for i, instruction in enumerate(body) if instruction.opcode.startswith("LDG.E.128.STRONG")], 0
    for at in loads:
        waited = control[at] >> 11 & 63
        for i in range(at - 1, -1, -1):
            if body[i].opcode.startswith(("VOTE", "SYNCS")):
                break
            if i in loads:
                behind += control[i] >> 5 & 7 < 6 and bool(waited >> (control[i] >> 5 & 7) & 1)
                break
            waited |= control[i] >> 11 & 63
    return len(loads), behind


def arrivals_over_loads(cubin: bytes, kernel: str = "persistent") -> tuple[int, int]:
    """(arrivals at mbarriers, those of them that are issued while loads from shared memory in front of them are still under way).

    Looked at backwards in the order of the code, as far as the last wait for a barrier.
    """
    body, control = _with_scoreboards(cubin, kernel)
    arrivals = [i for i, instruction in enumerate(body) if instruction.opcode.startswith("SYNCS.ARRIVE") and "A1T0" in instruction.opcode]  # with expect_tx it is another
    over = 0
    for at in arrivals:
        waited, early = control[at] >> 11 & 63, False
        for i in range(at - 1, -1, -1):
            if body[i].opcode.startswith("SYNCS.PHASECHK"):
                break
            counts = control[i] >> 5 & 7
            early |= body[i].opcode.startswith("LDS") and counts < 6 and not waited >> counts & 1
            waited |= control[i] >> 11 & 63
        over += early
    return len(arrivals), over


def copies_behind_fences(body: list[sass.Instruction]) -> tuple[int, int]:
    """(bulk copies into shared memory, those of them with a proxy fence between the last wait for a barrier in front of them and themselves)."""
    copies, fenced = 0, 0
    for at, instruction in enumerate(body):
        if instruction.opcode.startswith("UBLKCP.S"):
            copies += 1
            for before in reversed(body[:at]):
                if before.opcode.startswith(("SYNCS.PHASECHK", "FENCE.VIEW.ASYNC")):
                    fenced += before.opcode.startswith("FENCE")
                    break
    return copies, fenced


def count_instructions(binary: Binary, group: int) -> tuple[dict, dict]:
    """({instructions, registers, spill_bytes, arrivals, arrivals_over_loads, copies, copies_fenced, looks, looks_one_by_one, loops: {matrix: {instructions, weights, per_weight}}}, {matrix: instructions by kind})."""
    body, use = sass.disassemble(binary.cubin)["persistent"], binary.kernels["persistent"]
    results: dict = {"instructions": sum(sass.count(body).values()), "registers": use.registers, "spill_bytes": use.spill_bytes + use.stack_bytes}
    results["arrivals"], results["arrivals_over_loads"] = arrivals_over_loads(binary.cubin)
    results["copies"], results["copies_fenced"] = copies_behind_fences(body)
    results["looks"], results["looks_one_by_one"] = loads_one_by_one(binary.cubin)
    results["loops"], samples = {}, {}
    for matrix, loop in loops_of(body, group).items():
        kinds, weights = sass.count(body, loop), weights_a_lane(matrix, HEAD_SLICE if matrix == "head" else group)
        total = sum(kinds.values())
        results["loops"][matrix] = {"instructions": total, "weights": weights, "per_weight": round(total / weights, 3)}
        samples[matrix] = dict(kinds.most_common())
    return results, samples


def main(arguments: list[str] | None = None) -> int:
    """Count, print, write the receipt. Returns the exit status: 2 when it was refused, in one line."""

    def counted(args: argparse.Namespace) -> Callable[[], Path]:
        group = load_settings().quant.group
        results, samples = count_instructions(compile_persistent(Dims.qwen2_5_coder_7b(), group, LaunchShape(SMS)), group)
        print(
            f"{results['instructions']} instructions, {results['registers']} registers, {results['spill_bytes']} bytes spilled; "
            f"{results['arrivals_over_loads']} of {results['arrivals']} arrivals with loads under way, {results['copies_fenced']} of {results['copies']} copies behind a fence"
        )
        for matrix, found in results["loops"].items():
            print(f"{matrix:<8}{found['instructions']:>5} a pass of {found['weights']} weights a lane, {found['per_weight']:.2f} a weight  {samples[matrix]}")
        protocol = {"target": "sm_90a", "compiler": "NVRTC", "model": "the 7B", "sms": SMS, "units_a_pass": {matrix: units_a_pass(matrix) for matrix in results["loops"]}, "nop": "not counted"}
        return lambda: write_receipt(NAME, COMMAND, results, samples, source_files(_SOURCES), protocol, versions=nvrtc_version())

    return run_program(COMMAND, "Machine instructions a weight of the persistent kernel, for chapter 10.", arguments, counted)


if __name__ == "__main__":
    raise SystemExit(main())
