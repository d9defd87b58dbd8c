"""Chapter 07's kernels without a GPU: they compile without a spill, fit their launch, and are made of the instructions that they claim."""

from __future__ import annotations

import re

import pytest

from nanoqwen.bench import unpack_paths
from nanoqwen.config import Dims, data_path
from nanoqwen.cuda import sass
from nanoqwen.cuda.compile import compile_source
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.errors import DeviceError
from nanoqwen.lessons import gemv

SEVEN = Dims.qwen2_5_coder_7b()
CARD = LaunchShape(132)
REGISTERS_A_SM, SHARED_A_CTA = 65536, 227 * 1024
#: Instructions a weight that a lane's arithmetic may take.
MOST_A_WEIGHT = {"sign_extend": 4.4, "prmt": 2.6, "bias": 2.3, "tensor": 1.3, "dp4a": 1.05, "dp4a_fused": 1.05, "digits": 0.9}


# ------------------------------------------------------------------------------------------------------------------- the plan


def test_every_projection_of_the_seven_billion_has_a_launch():
    every = gemv.shapes(SEVEN)
    assert list(every) == ["q", "k", "v", "o", "gate", "up", "down"] == list(gemv.SHAPE_OF)
    for name, (rows, cols) in every.items():
        assert every[gemv.SHAPE_OF[name]] == (rows, cols)  # the kernel is made for that shape
        assert rows % 16 == cols % gemv.GROUP == 0 and rows // 16 * (cols // gemv.GROUP) % 4 == 0  # whole bundles: bytes are those of the file
        found = [gemv.stream(path, SEVEN, CARD, name) for path in gemv.PATHS]
        assert {(s.grid, s.parts) for s in found} == {(min(132, rows * cols // (4 * 16 * gemv.GROUP)), found[0].parts)}
        assert all(s.stages >= (2 if name in ("gate", "up", "down") else 1) and SHARED_A_CTA // 2 < s.shared <= SHARED_A_CTA for s in found)


def test_python_and_the_sources_agree():
    for path in gemv.PATHS:
        record = re.search(r"kRecord = ([^,;]+)[,;]", data_path("kernels", *path.source.split("/")).read_text(encoding="utf-8")).group(1)
        assert eval(record, {"kGroup": gemv.GROUP}) == path.record, path.source


# --------------------------------------------------------------------------------------------------------------- the compiled


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    header, cache = gemv.header(SEVEN, CARD), tmp_path_factory.mktemp("cubins")
    return {source: compile_source(source, header, cache) for source in (*gemv.SOURCES, gemv.PIPES_SOURCE)}


def test_they_compile_without_a_spill_and_fit_an_sm(binaries):
    for binary in binaries.values():
        for name, use in binary.kernels.items():
            assert (use.spill_bytes, use.stack_bytes) == (0, 0), f"{name} spills"
            threads = 1024 if name.startswith("pipe_") else 32 * CARD.gemv_warps
            assert -(-use.registers // 8) * 8 * threads <= REGISTERS_A_SM, name
    for path in gemv.PATHS:
        assert {f"{path.kernel}_{which}" for which in (*gemv.SHAPES, "resident")} <= binaries[path.source].kernels.keys()
    assert gemv.QUANTISE in binaries["lessons/gemv_dp4a.cu"].kernels


@pytest.fixture(scope="module")
def bodies(binaries):
    if sass.disassembler() is None:
        pytest.skip("no nvdisasm here, so the instructions are not counted")
    return {name: body for binary in binaries.values() for name, body in sass.disassemble(binary.cubin).items()}


def test_a_pipe_is_measured_with_the_instruction_it_is_named_for(bodies):
    for name, (opcode, steps) in gemv.PIPES.items():
        body = bodies[f"pipe_{name}"]
        loop = sass.main_loop(body, opcode)
        counts = sass.count(body, loop)
        others = sum(counts.values()) - counts[opcode]
        assert counts[opcode] == steps and others <= (3 if steps == 64 else 14), (name, counts)


def test_the_main_loops(bodies):
    """What a bundle must cost, by the arithmetic: 32 words and 256 weights a lane."""
    alone = {path.name: bodies[f"{path.kernel}_resident"] for path in gemv.PATHS}
    loop = {path.name: sass.count(alone[path.name], sass.main_loop(alone[path.name], path.marker)) for path in gemv.PATHS}
    assert loop["sign_extend"]["I2FP"] == 256 and loop["sign_extend"]["FFMA"] >= 256
    assert loop["prmt"]["PRMT"] == 128 and loop["prmt"]["HFMA2"] >= 128 and loop["bias"]["HFMA2"] >= 192 and loop["bias"]["PRMT"] == 0
    assert loop["tensor"]["HMMA"] == 32 and loop["tensor"]["LOP3"] == 128
    assert loop["dp4a"]["IDP"] == loop["dp4a_fused"]["IDP"] == 64 and loop["digits"]["IMMA"] == 16
    for path in gemv.PATHS:
        counts = loop[path.name]
        assert sum(counts.values()) / gemv.LANE_WEIGHTS <= MOST_A_WEIGHT[path.name], counts
        assert not {"LDL", "STL", "BAR", "SYNCS", "SHFL"} & counts.keys() and (path.name == "sign_extend" or counts["I2FP"] <= 8)


def test_every_shape_has_the_same_arithmetic(bodies):
    for path in gemv.PATHS:
        alone = bodies[f"{path.kernel}_resident"]
        least = sass.count(alone, sass.main_loop(alone, path.marker))[path.marker]
        for name in gemv.SHAPES:
            real = bodies[f"{path.kernel}_{name}"]
            counts = sass.count(real, sass.smallest_loop(real, path.marker, least))
            assert least <= counts[path.marker] <= least + 4 and counts["SYNCS"] and not {"LDL", "STL"} & counts.keys(), (path.name, name, counts)


def test_the_command_counts_them(bodies):
    results, samples = unpack_paths.count_instructions(SEVEN)
    assert results.keys() == samples.keys() == {path.name for path in gemv.PATHS}
    for name, row in results.items():
        assert row["bundle"] == sum(samples[name].values()) and row["per_weight"] == round(row["bundle"] / gemv.LANE_WEIGHTS, 3)
        assert 0 < row["frame"] < 200 and row["per_weight"] < row["per_weight_with_frame"]


# --------------------------------------------------------------------------------------------------------------- the counter


LISTING = """
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R4 ;
.L_x_1:
        /*0020*/                   LDS.128 R8, [R24] ;
        /*0030*/                   IDP.4A.S8.S8 R3, R4, R5, R3 ;
        /*0040*/                   NOP ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/              @!P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   FFMA R1, R2, R3, R1 ;
        /*0080*/               @P0 BRA `(.L_x_3) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_4);
.text.two:
        /*0000*/                   EXIT ;
"""


def test_loops_of_a_listing():
    bodies = sass.parse(LISTING)
    assert list(bodies) == ["one", "two"] and len(bodies["one"]) == 11
    body = bodies["one"]
    assert [(loop.first, loop.last) for loop in sass.loops(body)] == [(1, 6), (2, 5), (7, 8), (10, 10)]
    inner = sass.main_loop(body, "IDP")
    assert (inner.first, inner.last) == (2, 5) and sass.count(body, inner) == {"LDS": 1, "IDP": 1, "BRA": 1}
    outer = sass.smallest_loop(body, "SYNCS", 1)
    assert (outer.first, outer.last) == (1, 6) and sass.smallest_loop(body, "IDP", 1) == inner
    assert (sass.main_loop(body, "FFMA").first, sass.loops(bodies["two"])) == (7, [])
    with pytest.raises(DeviceError, match="no loop of this kernel holds a HMMA"):
        sass.main_loop(body, "HMMA")
    with pytest.raises(DeviceError, match="no loop of this kernel holds 2 times IDP"):
        sass.smallest_loop(body, "IDP", 2)


def test_a_missing_disassembler_is_one_line(monkeypatch):
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    with pytest.raises(DeviceError, match="nvdisasm is missing"):
        sass.disassemble(b"")
