"""kernels/common/int4_unpack.cuh without a GPU: the twins that chapter 03 shows, the compiled header, and its instruction counts.

Three things must agree for every content of a word's halves: ``nanoqwen.int4``, the numpy twins in the chapter's own cells (those
tagged "emulation"), and the PTX that the CUDA compiler makes of the header, interpreted by ``ptx.py``. A compiler is nvcc, or NVRTC
through the optional package cuda-core; neither needs a GPU or a driver.
"""

import json
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ptx
from nanoqwen import int4
from nanoqwen.config import load_settings

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernels" / "common" / "int4_unpack.cuh"
CHAPTER = ROOT / "notebooks" / "03_int4.ipynb"

#: Kernel, its results a word, and the machine instructions that the header's comments promise for it.
WAYS = {
    "bias": (4, {"SHF": 1, "LOP3": 4, "HADD2": 2, "HFMA2": 2}),
    "subnormal": (4, {"SHF": 1, "LOP3": 4}),
    "prmt": (4, {"SHF": 1, "LOP3": 2, "PRMT": 4, "HADD2": 4}),
    "sign_extend": (8, {"SHF": 15, "I2FP": 8}),
    "bytes": (2, {"SHF": 1, "LOP3": 2}),
}
HARNESS = """
using namespace nanoqwen::int4;
template <class T, int N> struct Row { T value[N]; };
#define KERNEL(name, T, N)                                                                            \\
    extern "C" __global__ void name(const unsigned int* __restrict__ words, Row<T, N>* __restrict__ out) { \\
        Row<T, N> row;                                                                                \\
        unpack_##name(words[threadIdx.x], row.value);                                                 \\
        out[threadIdx.x] = row;                                                                       \\
    }
KERNEL(bias, unsigned int, 4)
KERNEL(subnormal, unsigned int, 4)
KERNEL(prmt, unsigned int, 4)
KERNEL(sign_extend, float, 8)
KERNEL(bytes, unsigned int, 2)
"""


def every_half():
    """65,536 words that run through every content of the low half and, in another order, of the high one."""
    low = np.arange(2**16, dtype=np.uint32)
    return np.random.default_rng(7).permutation(low) << np.uint32(16) | low


def halves(bits):
    """uint32 [n] -> float16 [n, 2] of the same bits, low half first."""
    return np.ascontiguousarray(bits).view(np.float16).reshape(-1, 2)


def check(name, words, results):
    """``results`` uint32 [n, k] against nanoqwen.int4, to the bit."""
    codes = int4.unpack_codes(words[None]).reshape(-1, 8)
    if name == "sign_extend":
        assert np.array_equal(np.ascontiguousarray(results).view(np.float32), codes.astype(np.float32))
    elif name == "bytes":
        for k, columns in enumerate(([0, 4, 1, 5], [2, 6, 3, 7])):
            assert np.array_equal(np.ascontiguousarray(results[:, k]).view(np.int8).reshape(-1, 4), 16 * codes[:, columns])
    else:
        for j in range(4):
            expected = codes[:, 2 * j : 2 * j + 2].astype(np.float64)
            if name == "subnormal":
                expected = (expected + 8) * 2.0 ** (-24 if j % 2 == 0 else -20)
            assert np.array_equal(halves(results[:, j]).astype(np.float64), expected)


# --------------------------------------------------------------------------------------------------------- the chapter's twins


@pytest.fixture(scope="module")
def chapter():
    """The chapter's namespace after its emulation cells."""
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if "emulation" in cell["metadata"].get("tags", [])]
    assert len(sources) == 6, "the chapter's emulation cells have lost their tag"
    space = {"np": np, "int4": int4}
    for source in sources:
        exec(compile(source, str(CHAPTER), "exec"), space)
    return space


def emulate(chapter, name, words):
    columns = chapter[f"unpack_{name}"](words)
    return np.stack([np.ascontiguousarray(column).view(np.uint32).ravel() for column in columns], axis=1)


@pytest.mark.parametrize("name", WAYS)
def test_the_chapters_twin_is_exact(chapter, name):
    words = every_half()
    check(name, words, emulate(chapter, name, words))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("position", range(8))
def test_every_code_alone_at_every_position(chapter, name, position):
    codes = np.zeros((16, 8), np.int8)
    codes[:, position] = np.arange(-8, 8)
    words = int4.pack_codes(codes).ravel()
    check(name, words, emulate(chapter, name, words))


@pytest.mark.parametrize("name", WAYS)
def test_the_chapters_bill_is_the_headers(chapter, name):
    chapter["tally"].clear()
    emulate(chapter, name, every_half()[:8])
    spent = Counter(chapter["tally"])
    spent["SHF"] += spent.pop("IMAD", 0)  # a left shift may be either
    assert dict(spent) == WAYS[name][1]
    promised = re.search(rf"^//\s+unpack_{name}\s+(\d+) ", HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    assert int(promised.group(1)) == sum(WAYS[name][1].values())


def test_the_header_names_the_configured_layout():
    text, quant = HEADER.read_text(encoding="utf-8"), load_settings().quant
    assert int(re.search(r"constexpr int kLayoutId = (\d+);", text).group(1)) == quant.layout_id
    assert tuple(map(int, re.search(r"shift\[8\] = \{([^}]*)\}", text).group(1).split(","))) == quant.shuffle_bits
    assert "bit {" + ", ".join(map(str, quant.shuffle_bits)) + "}[i]" in text


# ---------------------------------------------------------------------------------------------------------- the compiled header


def with_nvcc(folder):
    """(PTX, path of the cubin)"""
    source, out = folder / "harness.cu", {}
    source.write_text(f'#include "{HEADER.name}"\n{HARNESS}', encoding="utf-8")
    for kind, target in {"ptx": ["-arch=compute_90a"], "cubin": ["-gencode=arch=compute_90a,code=sm_90a"]}.items():
        out[kind] = folder / f"harness.{kind}"
        done = subprocess.run(
            ["nvcc", *target, f"-{kind}", "-Werror", "all-warnings", "-I", str(HEADER.parent), "-o", str(out[kind]), str(source)],
            capture_output=True, text=True, encoding="utf-8", timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return out["ptx"].read_text(encoding="utf-8"), out["cubin"]


def with_nvrtc(folder):
    """The same through NVRTC: the header includes nothing, so it needs no toolkit beside the compiler."""
    from cuda.bindings import nvrtc

    def call(function, *arguments):
        code, *values = function(*arguments)
        assert int(code) == 0, f"{function.__name__}: {code}"
        return values[0] if values else None

    def read(size, get):
        buffer = b" " * call(size, program)
        call(get, program, buffer)
        return buffer

    source = HEADER.read_text(encoding="utf-8").replace("#pragma once", "") + HARNESS
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"harness.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(code) == 0, read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode()
    (folder / "harness.cubin").write_bytes(read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN))
    return read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0"), folder / "harness.cubin"


def nvrtc_is_here():
    try:
        from cuda.bindings import nvrtc

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except Exception:  # no package, or the package without its library
        return False


@pytest.fixture(scope="module", params=["nvcc", "nvrtc"])
def compiled(request, tmp_path_factory):
    if request.param == "nvcc":
        if not shutil.which("nvcc"):
            pytest.skip("no nvcc here")
        return with_nvcc(tmp_path_factory.mktemp("nvcc"))
    if not nvrtc_is_here():
        pytest.skip("no NVRTC here (it comes with the optional package cuda-core)")
    return with_nvrtc(tmp_path_factory.mktemp("nvrtc"))


@pytest.mark.parametrize("name", WAYS)
def test_the_compiled_header_is_exact(compiled, chapter, name):
    """The PTX of the shipped code, run for every content of a half: equal to the package and to the chapter's twin."""
    words = every_half()
    try:
        results = ptx.run(compiled[0], name, words, WAYS[name][0])
    except ptx.Unsupported as unknown:
        pytest.skip(f"this compiler writes PTX that the interpreter does not know: {unknown}")
    check(name, words, results)
    assert np.array_equal(results, emulate(chapter, name, words))


def disassembler():
    """nvdisasm, from the path or from the wheels of a Python environment."""
    found = shutil.which("nvdisasm")
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    return found or (str(wheels[0]) if wheels else None)


@pytest.fixture(scope="module")
def machine_code(compiled):
    """Counter of SASS opcodes for each kernel."""
    tool = disassembler()
    if not tool:
        pytest.skip("no nvdisasm here, so the instructions are not counted")
    listing = subprocess.run([tool, "-c", str(compiled[1])], capture_output=True, text=True, timeout=60)
    assert listing.returncode == 0, listing.stderr
    counts, kernel = {}, None
    for line in listing.stdout.splitlines():
        if section := re.match(r"\s*\.text\.(\w+):", line):
            kernel = counts.setdefault(section.group(1), Counter())
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line):
            kernel[instruction.group(1)] += 1
    return counts


@pytest.mark.parametrize("name", WAYS)
def test_the_instruction_counts_are_as_promised(machine_code, name):
    """The sequence around them (addresses, constants, load and store) uses none of these opcodes."""
    opcodes = machine_code[name]
    spent = Counter()
    for opcode, n in opcodes.items():
        if opcode.startswith(("IMAD.SHL", "IMAD.U32")):
            spent["SHF"] += n if name == "sign_extend" else 0  # elsewhere it only moves a constant
        elif (kind := opcode.split(".")[0]) in ("SHF", "LOP3", "PRMT", "HADD2", "HFMA2", "I2FP", "I2F") and opcode != "HFMA2.MMA":
            spent[kind] += n
    assert dict(spent) == WAYS[name][1]


def test_only_the_baseline_converts_integers(machine_code):
    for name, opcodes in machine_code.items():
        conversions = sum(n for opcode, n in opcodes.items() if opcode.startswith(("I2F", "F2F", "I2I")))
        assert conversions == (8 if name == "sign_extend" else 0), name
        assert not any(opcode.startswith(("LDL", "STL")) for opcode in opcodes), "an array went to local memory"
