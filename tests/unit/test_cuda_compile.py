"""Every kernel compiles for every kind of model, without a GPU, and stays within its budget of registers and memory."""

import dataclasses

import pytest
from kernelmodels import DEMO, MODELS, SEVEN

from nanoqwen.cuda.compile import ARCH, OPTIONS, compile_all, compile_source, kernel_sources, parse_resources
from nanoqwen.cuda.constants import LaunchShape, check_supported, constants_header, padded_rows, row_threads, streams
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.synthetic import synthetic_dims

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")

REGISTERS_A_SM, SHARED_A_SM, RESERVED_A_CTA = 65536, 228 * 1024, 1024


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize("source", kernel_sources())
@pytest.mark.parametrize("model", MODELS)
def test_it_compiles_without_a_spill(model, source, cache):
    binary = compile_source(source, constants_header(*MODELS[model], LaunchShape(132)), cache)
    assert binary.cubin[:4] == b"\x7fELF" and binary.kernels
    for name, use in binary.kernels.items():
        assert (use.spill_bytes, use.stack_bytes) == (0, 0), f"{name} spills: with 220 KB of shared memory L1 is 28 KB, and each spill a trip to L2"


def taken(use, threads: int) -> int:
    """Registers that a CTA takes: they are handed out in eights a thread."""
    return -(-use.registers // 8) * 8 * threads


@pytest.mark.parametrize("model", MODELS)
def test_one_streaming_gemv_on_an_sm_and_attention_beside_it(model, cache):
    dims, group = MODELS[model]
    shape, header = LaunchShape(132), constants_header(dims, group, LaunchShape(132))
    layout = streams(dims, group, shape)
    uses = {name: use for source in ("gemv_int4", "lm_head", "paged_attention") for name, use in compile_source(f"decode/{source}.cu", header, cache).kernels.items()}
    for name, stream in layout.items():
        assert SHARED_A_SM < 2 * (stream.shared + RESERVED_A_CTA) and stream.shared <= SHARED_A_SM - RESERVED_A_CTA, name
        assert taken(uses["lm_head" if name == "head" else f"gemv_{name}"], 32 * shape.gemv_warps) <= REGISTERS_A_SM, name
    attention = 73776 * dims.head_dim // 128  # nanoqwen.cuda.decode.attention_shared_bytes, which needs CuPy
    for name in ("qkv", "o"):
        assert layout[name].shared + attention + 2 * RESERVED_A_CTA <= SHARED_A_SM, name
        if model == "7b":  # where they do not fit, attention starts later, and that is all
            assert taken(uses[f"gemv_{name}"], 32 * shape.gemv_warps) + taken(uses["paged_attention"], 224) <= REGISTERS_A_SM, name


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize("model", MODELS)
def test_the_bundles_of_a_matrix_are_spread_evenly(model, sms):
    for name, stream in streams(*MODELS[model], LaunchShape(sms)).items():
        assert 1 <= stream.grid <= sms and stream.parts >= 1 and stream.stages >= 1, name
    assert all(stream.grid == sms for stream in streams(SEVEN, 128, LaunchShape(sms)).values())


def test_exactly_one_target_that_has_hoppers_own_instructions():
    assert ARCH == "sm_90a" and [o for o in OPTIONS if "arch" in o or "gencode" in o] == ["--gpu-architecture=sm_90a"]


def test_a_cached_binary_is_the_same_and_a_changed_constant_is_another(cache, tmp_path):
    header = constants_header(DEMO, 128, LaunchShape(132))
    first = compile_source("decode/embed.cu", header, tmp_path)
    assert compile_source("decode/embed.cu", header, tmp_path) == first and len(list(tmp_path.glob("*.cubin"))) == 1
    compile_source("decode/embed.cu", header.replace("kHidden = 384", "kHidden = 512"), tmp_path)
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_all_at_once_gives_what_one_after_the_other_gives(tmp_path):
    header = constants_header(DEMO, 128, LaunchShape(132))
    together = compile_all(header, tmp_path / "together")
    assert [b.name for b in together] == kernel_sources() and len(list((tmp_path / "together").glob("*.cubin"))) == len(together)
    assert together[3] == compile_source(kernel_sources()[3], header, None)
    assert [b.name for b in compile_all(header, tmp_path / "together", ["decode/swiglu.cu", "decode/embed.cu"])] == ["decode/swiglu.cu", "decode/embed.cu"]


def test_all_at_once_the_first_error_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken = constants_header(DEMO, 128, LaunchShape(132)).replace("kHidden", "kOther").replace("kIntermediate", "kOther2")
    with pytest.raises(DeviceError, match="kernels/decode/embed.cu does not compile"):
        compile_all(broken, None, ["decode/embed.cu", "decode/swiglu.cu"])


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert compile_source("decode/embed.cu", constants_header(DEMO, 128, LaunchShape(132)), tmp_path / "file" / "below").kernels


@pytest.mark.parametrize("folder", ["plain", "тест é"])
def test_temporary_folders_with_odd_letters(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    monkeypatch.setenv("HOME", str(tmp_path / folder))
    assert compile_source("decode/embed.cu", constants_header(DEMO, 128, LaunchShape(132)), tmp_path / folder / "cache").kernels


def test_a_source_that_does_not_compile_is_one_line_and_a_log(tmp_path):
    broken = constants_header(DEMO, 128, LaunchShape(132)).replace("kHidden", "kOther")
    with pytest.raises(DeviceError, match=r"kernels/decode/embed.cu does not compile: .*kHidden.*whole log is in ") as caught:
        compile_source("decode/embed.cu", broken)
    assert "\n" not in str(caught.value)


def test_resources_are_read_from_ptxas():
    log = "Compiling entry function 'a' for 'sm_90a'\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed 40 registers, used 1 barriers, 96 bytes smem"
    use = parse_resources(log)["a"]
    assert (use.registers, use.shared_bytes, use.stack_bytes, use.spill_bytes) == (40, 96, 8, 16)


def test_what_the_kernels_cannot_do_is_refused_by_name():
    check_supported(SEVEN, 128)
    for change, word in (({"head_dim": 96}, "head_dim 96"), ({"num_heads": 64, "num_kv_heads": 4}, "16 query heads"), ({"hidden": 3600}, "hidden 3600")):
        with pytest.raises(InputError, match=word):
            check_supported(dataclasses.replace(SEVEN, **change), 128)


def test_small_arithmetic():
    assert (padded_rows(1), padded_rows(16), padded_rows(17)) == (16, 16, 32)
    assert row_threads(SEVEN) == 448 and row_threads(DEMO) == 96 and row_threads(synthetic_dims("32b")) == 448
