"""Machine instructions of a cubin: what a kernel's main loop is made of, counted from its disassembly.

``nvdisasm`` comes with the CUDA toolkit and as a wheel. It needs no GPU. Nothing at run time needs it: a benchmark counts once and
keeps the counts in a receipt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.errors import DeviceError

_SECTION = re.compile(r"^\.text\.(\w+):")
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: ``opcode`` with its suffixes, and the index that it may jump to (None: it falls through)."""

    opcode: str
    target: int | None = None


@dataclass(frozen=True)
class Loop:
    """Instructions ``first`` .. ``last`` of a kernel, the last of them a jump back to the first."""

    first: int
    last: int

    def __contains__(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def disassembler() -> str | None:
    """nvdisasm from the path, from CUDA_HOME or from this environment's wheels; None when there is none."""
    home = os.environ.get("CUDA_HOME")
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    places = [shutil.which("nvdisasm"), home and os.path.join(home, "bin", "nvdisasm"), *map(str, wheels)]
    return next((place for place in places if place and os.path.isfile(place)), None)


def listing(cubin: bytes) -> str:
    """What ``nvdisasm -c`` prints. Raises DeviceError when it is missing or refuses the cubin."""
    tool = disassembler()
    if tool is None:
        raise DeviceError("nvdisasm is missing: it comes with the CUDA toolkit, or with the wheel nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory(prefix="nanoqwen-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, encoding="utf-8", timeout=120)
    if done.returncode:
        raise DeviceError(f"nvdisasm: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'failed'}")
    return done.stdout


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """{kernel: its instructions in order}. Raises like ``listing``."""
    return parse(listing(cubin))


def parse(text: str) -> dict[str, list[Instruction]]:
    """The same from a ``listing``."""
    raw: dict[str, list[tuple[str, str]]] = {}
    labels: dict[str, int] = {}
    body: list[tuple[str, str]] = []
    for line in text.splitlines():
        if match := _SECTION.match(line):
            body = raw.setdefault(match.group(1), [])
        elif match := _LABEL.match(line):
            labels[match.group(1)] = len(body)
        elif match := _INSTRUCTION.match(line):
            body.append((match.group(3), match.group(4)))
    out = {}
    for kernel, instructions in raw.items():
        jumps = [re.search(r"`\((\.L_\w+)\)", rest) if opcode.startswith("BRA") else None for opcode, rest in instructions]
        out[kernel] = [Instruction(opcode, labels.get(jump.group(1)) if jump else None) for (opcode, _), jump in zip(instructions, jumps)]
    return out


def loops(body: list[Instruction]) -> list[Loop]:
    """Every jump backwards, as a range; ranges that share their first instruction count once, the longest."""
    found: dict[int, int] = {}
    for at, instruction in enumerate(body):
        if instruction.target is not None and instruction.target <= at:
            found[instruction.target] = max(at, found.get(instruction.target, 0))
    return [Loop(first, last) for first, last in sorted(found.items())]


def main_loop(body: list[Instruction], marker: str) -> Loop:
    """The innermost loop that holds the most instructions of kind ``marker`` (an opcode without its suffixes).

    Raises DeviceError when no loop holds one.
    """
    every = loops(body)
    inner = [loop for loop in every if not any(other in loop for other in every)]
    best = max(inner, key=lambda loop: count(body, loop)[marker], default=None)
    if best is None or not count(body, best)[marker]:
        raise DeviceError(f"no loop of this kernel holds a {marker}")
    return best


def smallest_loop(body: list[Instruction], marker: str, least: int) -> Loop:
    """The shortest loop that holds ``least`` instructions of kind ``marker`` or more, whatever other loops it holds or lies in.

    Raises DeviceError when there is none.
    """
    found = [loop for loop in loops(body) if count(body, loop)[marker] >= least]
    if not found:
        raise DeviceError(f"no loop of this kernel holds {least} times {marker}")
    return min(found, key=lambda loop: loop.last - loop.first)


def smallest_loops(body: list[Instruction], marker: str, least: int) -> list[Loop]:
    """The shortest loops that hold ``least`` instructions of kind ``marker`` or more and do not overlap, in order.

    A long kernel has many jumps backwards that are no loops of its source: waits that go on are moved to its end and jump back from there.
    """
    found: list[Loop] = []
    for loop in sorted(loops(body), key=lambda loop: loop.last - loop.first):
        if all(loop.last < other.first or other.last < loop.first for other in found) and count(body, loop)[marker] >= least:
            found.append(loop)
    return sorted(found, key=lambda loop: loop.first)


def count(body: list[Instruction], loop: Loop | None = None) -> Counter[str]:
    """Instructions by opcode without suffixes, of the whole kernel or of a loop. NOP is left out: it fills, and stands for nothing."""
    part = body if loop is None else body[loop.first : loop.last + 1]
    return Counter(kind for i in part if (kind := i.opcode.split(".")[0]) != "NOP")
