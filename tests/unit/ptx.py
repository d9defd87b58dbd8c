"""A numpy interpreter for the little PTX that straight-line integer and half2 code compiles to.

It runs a kernel without a GPU, for all threads at once: a register is an array with one element a thread. Enough for kernels that
load from one array, compute, and store to another; anything else raises ``Unsupported`` and names the instruction, so that a newer
compiler cannot make a test pass by accident. It knows nothing of the code under test: semantics are those of the PTX ISA.
"""

from __future__ import annotations

import re

import numpy as np


class Unsupported(Exception):
    """An instruction this interpreter does not know."""


class _Pointer:
    """A kernel parameter and a byte offset for each thread."""

    def __init__(self, name: str, offset: np.ndarray | int = 0) -> None:
        self.name, self.offset = name, offset


def run(ptx: str, kernel: str, words: np.ndarray, results: int) -> np.ndarray:
    """The uint32 [threads, results] that ``kernel(const uint32* in, uint32* out)`` stores for ``words`` uint32 [threads].

    Thread t stores ``results`` words from ``out + t * results`` on. Raises Unsupported, and KeyError for a kernel that is not there.
    """
    body = re.search(rf"\.entry {kernel}\((.*?)\)\s*(?:\.\w+[^\n{{]*\s*)*\{{(.*?)\n\}}", ptx, re.DOTALL)
    if not body:
        raise KeyError(kernel)
    names = re.findall(r"\.param\s+\.u64\s+(?:\.ptr[^%\n]*?\s)?(\w+)\s*,?\s*$", body.group(1), re.MULTILINE)
    machine = _Machine(words.astype(np.uint32), results, dict(zip(names, ("in", "out"))))
    text = re.sub(r"//[^\n]*", "", body.group(2))
    # Blocks in braces come from inline assembly; operands in braces are vectors and stay.
    for statement in re.split(r";", re.sub(r"(?m)^\s*\{(?=[a-z ])|^\s*\}\s*$", "", text)):
        statement = " ".join(statement.split())
        if statement and not statement.startswith("."):
            machine.step(statement)
    if not machine.stored.all():
        raise Unsupported(f"{kernel} left {int((~machine.stored).sum())} of its results unwritten")
    return machine.out


class _Machine:
    def __init__(self, words: np.ndarray, results: int, parameters: dict[str, str]) -> None:
        self.words, self.parameters, self.threads = words, parameters, len(words)
        self.out = np.zeros((self.threads, results), np.uint32)
        self.stored = np.zeros(results, bool)
        self.registers: dict[str, object] = {}

    def step(self, statement: str) -> None:
        opcode, _, rest = statement.partition(" ")
        if opcode == "ret":
            return
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
        base = opcode.split(".")[0]
        method = getattr(self, f"op_{base}", None)
        if method is None:
            raise Unsupported(statement)
        if base == "st":
            method(opcode, operands)
        else:
            self.registers[operands[0]] = method(opcode, operands[1:])

    def value(self, operand: str) -> np.ndarray:
        """uint32 [threads]: a register, a special register or an immediate."""
        if operand.startswith("%tid.x"):
            return np.arange(self.threads, dtype=np.uint32)
        if operand.startswith("%"):
            return self.registers[operand]
        return np.full(self.threads, int(operand, 0) & 0xFFFFFFFF, np.uint32)

    @staticmethod
    def halves(bits: np.ndarray) -> np.ndarray:
        return bits.view(np.float16).reshape(-1, 2).astype(np.float64)

    # ---- memory ---------------------------------------------------------------------------------------------------
    def op_ld(self, opcode, operands):
        name, offset = re.fullmatch(r"\[(%?\w+)(?:\+(\d+))?\]", operands[0]).groups()
        if opcode.startswith("ld.param"):
            return _Pointer(self.parameters[name])
        pointer = self.registers[name]
        if not opcode.startswith("ld.global") or not opcode.endswith(("32",)) or pointer.name != "in":
            raise Unsupported(f"{opcode} {operands}")
        return self.words[(pointer.offset + int(offset or 0)) // 4]

    def op_st(self, opcode, operands):
        name, offset = re.fullmatch(r"\[(%\w+)(?:\+(\d+))?\]", operands[0]).groups()
        pointer, values = self.registers[name], operands[1].strip("{}").split(",")
        if not opcode.startswith("st.global") or not opcode.endswith("32") or pointer.name != "out":
            raise Unsupported(f"{opcode} {operands}")
        row = 4 * self.out.shape[1]
        first = pointer.offset + int(offset or 0) - np.arange(self.threads, dtype=np.uint64) * row
        if not (first == first[0]).all():
            raise Unsupported(f"{opcode}: threads do not store to their own row")
        for k, value in enumerate(values):
            column = int(first[0]) // 4 + k
            self.out[:, column] = self.value(value.strip()).view(np.uint32)
            self.stored[column] = True

    def op_cvta(self, opcode, operands):
        return self.registers[operands[0]]

    # ---- integers -------------------------------------------------------------------------------------------------
    def op_mov(self, opcode, operands):
        if not opcode.endswith(("32",)) or operands[0].startswith("{"):
            raise Unsupported(f"{opcode} {operands}")
        return self.value(operands[0])

    def op_mul(self, opcode, operands):
        if opcode == "mul.wide.u32":
            return self.value(operands[0]).astype(np.uint64) * self.value(operands[1]).astype(np.uint64)
        if opcode.startswith("mul.lo"):
            return self.value(operands[0]) * self.value(operands[1])
        raise Unsupported(f"{opcode} {operands}")

    def op_add(self, opcode, operands):
        a = self.registers.get(operands[0])
        if opcode in ("add.s64", "add.u64") and isinstance(a, _Pointer):
            return _Pointer(a.name, a.offset + self.value(operands[1]).astype(np.uint64))
        raise Unsupported(f"{opcode} {operands}")

    def op_and(self, opcode, operands):
        return self.value(operands[0]) & self.value(operands[1])

    def op_or(self, opcode, operands):
        return self.value(operands[0]) | self.value(operands[1])

    def op_xor(self, opcode, operands):
        return self.value(operands[0]) ^ self.value(operands[1])

    def op_shl(self, opcode, operands):
        return self.value(operands[0]) << self.value(operands[1])

    def op_shr(self, opcode, operands):
        a, by = self.value(operands[0]), self.value(operands[1])
        return (a.view(np.int32) >> by.view(np.int32)).view(np.uint32) if opcode == "shr.s32" else a >> by

    def op_bfe(self, opcode, operands):
        """Bit field extract, signed or unsigned; position and length as immediates."""
        a, position, length = self.value(operands[0]), self.value(operands[1]), self.value(operands[2])
        top = a << (np.uint32(32) - position - length)
        shift = np.uint32(32) - length
        return (top.view(np.int32) >> shift.view(np.int32)).view(np.uint32) if opcode == "bfe.s32" else top >> shift

    def op_lop3(self, opcode, operands):
        a, b, c = (self.value(operand) for operand in operands[:3])
        table, out = int(operands[3], 0), np.zeros(self.threads, np.uint32)
        for index in range(8):  # bit `index` of the table is the result where a, b, c are the bits of `index`
            if table >> index & 1:
                out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        return out

    def op_prmt(self, opcode, operands):
        if opcode != "prmt.b32":
            raise Unsupported(f"{opcode} {operands}")
        a, b, selector = (self.value(operand) for operand in operands)
        source = np.stack([a, b], axis=1).astype("<u4").view(np.uint8)
        out = np.zeros((self.threads, 4), np.uint8)
        for k in range(4):
            digit = selector >> np.uint32(4 * k) & np.uint32(0xF)
            byte = source[np.arange(self.threads), digit & np.uint32(7)]
            out[:, k] = np.where(digit & np.uint32(8), np.where(byte & 0x80, 0xFF, 0), byte)  # mode 8: replicate the sign
        return out.view("<u4").ravel().astype(np.uint32)

    # ---- floats ---------------------------------------------------------------------------------------------------
    def op_sub(self, opcode, operands):
        if opcode not in ("sub.f16x2", "sub.rn.f16x2"):  # no .ftz: subnormals count
            raise Unsupported(f"{opcode} {operands}")
        a, b = (self.halves(self.value(operand)) for operand in operands)
        return (a - b).astype(np.float16).view(np.uint32).ravel()

    def op_fma(self, opcode, operands):
        if opcode != "fma.rn.f16x2":
            raise Unsupported(f"{opcode} {operands}")
        a, b, c = (self.halves(self.value(operand)) for operand in operands)
        return (a * b + c).astype(np.float16).view(np.uint32).ravel()

    def op_cvt(self, opcode, operands):
        if opcode != "cvt.rn.f32.s32":
            raise Unsupported(f"{opcode} {operands}")
        return self.value(operands[0]).view(np.int32).astype(np.float32).view(np.uint32)
