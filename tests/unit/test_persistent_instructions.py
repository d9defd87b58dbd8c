"""Counting the machine instructions of the persistent kernel: which loops are counted, without a compiler; and what the receipt says."""

from __future__ import annotations

import pytest

from nanoqwen.bench import persistent_instructions as counting
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.config import Dims
from nanoqwen.cuda import sass
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.cuda.persistent_plan import compile_persistent
from nanoqwen.errors import DeviceError

#: Loops in the order of the code: what each holds, beside a wait that is moved to the end and jumps back into it.
LOOPS = {"qkv": {"IMMA": 8, "LDS": 2}, "o": {"IMMA": 8, "LDS": 2}, "gate_up": {"IMMA": 16, "REDUX": 1}, "down": {"IMMA": 8, "LDS": 9}, "head": {"HMMA": 4}}


def listing(**changes: dict[str, int]) -> str:
    lines, waits = [".text.persistent:"], []
    for name, kinds in {**LOOPS, **changes}.items():
        lines.append(f".L_x_{name}:")
        lines += [f"/*0000*/ {kind}.X R1, R2 ;" for kind, count in kinds.items() for _ in range(count)]
        lines += [f".L_y_{name}:", "/*0000*/ SYNCS.PHASECHK R1 ;", f"/*0000*/ @P0 BRA `(.L_x_{name}) ;"]
        waits += ["/*0000*/ YIELD ;", f"/*0000*/ BRA `(.L_y_{name}) ;"]
    return "\n".join(line if line[0] == "." else f"        {line}" for line in (*lines, *waits))


def test_each_matrix_has_its_own_loop_whatever_jumps_back_into_it():
    body = sass.parse(listing())["persistent"]
    found = counting.loops_of(body, 128)
    assert list(found) == list(LOOPS)
    for name, loop in found.items():
        assert sass.count(body, loop) == {**LOOPS[name], "SYNCS": 1, "BRA": 1}, name


def test_other_loops_than_expected_are_refused():
    for changes, what in (({"o": {"IMMA": 4}}, "3 loops over units"), ({"o": {"IMMA": 16, "REDUX": 1}}, "2 of which quantise"), ({"head": {"HMMA": 12}}, "0 over the head")):
        with pytest.raises(DeviceError, match=what):
            counting.loops_of(sass.parse(listing(**changes))["persistent"], 128)


def test_every_copy_into_the_ring_is_behind_a_fence():
    """Seen in the machine code: units are given back over their loads, so each copy needs its fence. A build without it has none; one that waits for loads, no such arrival."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    cubins = [compile_persistent(Dims.qwen2_5_coder_7b(), 128, LaunchShape(132), None, settings).cubin for settings in ({}, {"kFence": False}, {"kRelease": 1})]
    copies = [counting.copies_behind_fences(sass.disassemble(cubin)["persistent"]) for cubin in cubins]
    assert copies[0][0] == copies[0][1] == copies[1][0] > 4 and copies[1][1] == 0, copies
    arrivals = [counting.arrivals_over_loads(cubin) for cubin in cubins]
    assert arrivals[0][0] == arrivals[2][0] > 20 and arrivals[0][1] > 0 == arrivals[2][1], arrivals


@pytest.mark.parametrize("settings", [{}, {"kStamps": True}, {"kTogether": 1}], ids=str)
def test_a_look_at_exchanged_words_is_one_trip(settings):
    """No load of a look waits for another: a compiler that put tests between them once made three trips to L2 out of one."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    loads, behind = counting.loads_one_by_one(compile_persistent(Dims.qwen2_5_coder_7b(), 128, LaunchShape(132), None, settings).cubin)
    assert loads > 16 and behind == 0


def test_the_receipt_has_every_matrix_and_no_spill():
    results = read_receipt(receipts_folder() / f"{counting.NAME}.json")["results"]
    assert list(results["loops"]) == list(LOOPS) and results["spill_bytes"] == 0 and results["copies"] == results["copies_fenced"]
    assert results["looks_one_by_one"] == 0 < results["looks"], "seen here too where no nvdisasm is at hand"
    for matrix, found in results["loops"].items():
        # Of a unit a warp has two of its four blocks: 16 x 128 codes, or 16 x 32 columns of the head.
        assert found["weights"] == counting.units_a_pass(matrix) * (32 if matrix == "head" else 128)
        assert found["per_weight"] == round(found["instructions"] / found["weights"], 3)
