"""The text of a wrapper of wgmma, whose operands are spelled out register by register: what the headers of kernels/prefill must say."""

from __future__ import annotations


def wrapper(template: str, name: str, n: int, *, clear: str, transposed: str, more: tuple[str, ...] = ()) -> str:
    """m64 x ``n`` x k16, A in registers, FP32 sums ``d``, B by descriptor; white space is not kept apart from single blanks.

    ``template`` stands in front. ``clear`` is the condition under which ``d`` is added to, ``transposed`` whether B is; both may name the operands
    ``more`` behind the descriptor.
    """
    registers = n // 2
    names = [f"%{i}" for i in range(registers)]
    lines = "".join(f'"{", ".join(names[i : i + 16])}{", " if i + 16 < registers else ""}" ' for i in range(0, registers, 16))
    outs = ", ".join(f'"+f"(d[{k}])' for k in range(registers))
    inputs = ", ".join([*(f'"r"(a[{k}])' for k in range(4)), '"l"(b)', *more])
    return (
        f"{template}__device__ __forceinline__ void {name}(float (&d)[{registers}], const u32 (&a)[4], u64 b) {{ asm volatile( "
        f'"{{.reg .pred add; {clear};\\n" "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{" {lines}'
        f'"}}, {{%{registers}, %{registers + 1}, %{registers + 2}, %{registers + 3}}}, %{registers + 4}, add, 1, 1, {transposed};}}\\n" '
        f": {outs} : {inputs}); }}"
    )
