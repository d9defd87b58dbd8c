"""The sanitizers' command: what it reads from their output, and what it refuses. The texts have the tools' own form."""

from __future__ import annotations

import json
import re
import sys

import pytest

from nanoqwen.bench import sanitize
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.bench.sanitize_run import CASES, CEILING_BYTES, MORE
from nanoqwen.config import data_path, load_settings
from nanoqwen.cuda import prefill_digits as digits
from nanoqwen.cuda.attention_plan import ATTENTIONS, attention_kernel
from nanoqwen.cuda.constants import PREFILL_CHUNK, check_supported
from nanoqwen.cuda.persistent_plan import SETTINGS
from nanoqwen.cuda.prefill_plan import SHAPES, STAGED, products
from nanoqwen.errors import DeviceError

CLEAN = "========= COMPUTE-SANITIZER\nprinted by the program\n========= ERROR SUMMARY: 0 errors\n"
PROBE = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: __cuPythonInit() [0x1a2b3] in driver.so
=========
========= ERROR SUMMARY: 1 error
"""
OVERRUN = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at swiglu+0x370
=========     by thread (255,0,0) in block (18,0,0)
=========     Access to 0x7f93 is out of bounds
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuStreamSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
========= ERROR SUMMARY: 1 error was not printed. Use --print-limit option to adjust the number of printed errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at rmsnorm+0x90
=========     and Read access at rmsnorm+0x100 [508 hazards]
=========
========= Warning: Race reported between Write access at argmax+0x90
=========     and Read access at argmax+0xa0 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_a_clean_run():
    for text in (CLEAN, NO_RACE):
        found = sanitize.parse(text)
        assert (found.errors, found.warnings, found.probes, found.reports) == (0, 0, 0, [])
    assert found.summary == "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


def test_a_question_for_a_missing_driver_function_is_told_and_not_counted():
    found = sanitize.parse(PROBE)
    assert (found.errors, found.probes, len(found.reports)) == (0, 1, 1)
    assert "__cuPythonInit" in found.reports[0]
    # As an H200 with driver 580 answered: the bindings ask for versions of functions that are newer than it.
    asked = PROBE.replace('CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found"', 'CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument"')
    assert sanitize.parse(asked).errors == 0 and sanitize.parse(asked).probes == 1
    other = sanitize.parse(PROBE.replace("cuGetProcAddress_v2", "cuModuleLoadData"))
    assert (other.errors, other.probes) == (1, 0)


def test_errors_and_their_reports():
    found = sanitize.parse(OVERRUN)
    assert found.errors == 2 and [r.splitlines()[0][:12] for r in found.reports] == ["Invalid __gl", "Program hit "]
    assert "thread (255,0,0) in block (18,0,0)" in found.reports[0]


def test_races():
    found = sanitize.parse(RACE)
    assert (found.errors, found.warnings) == (1, 1)
    assert found.reports[0].endswith("[508 hazards]") and "argmax" in found.reports[1]


def test_no_kernel_has_more_barriers_than_the_tools_are_told():
    plan = data_path("kernels", "persistent", "plan.cuh").read_text(encoding="utf-8")
    assert plan.count("Barrier full, empty;") == 1 and "Barrier tile_full[kTileRing], tile_empty[kTileRing], go, begun;" in plan
    assert 2 * SETTINGS["kMostUnits"] + 2 * 2 + 2 <= int(sanitize.BARRIERS[1]) and "kTileRing = 2" in plan
    assert all(2 * (shape.stages + shape.slots) + STAGED <= int(sanitize.BARRIERS[1]) for shape in SHAPES.values())
    assert all(digits.x_stages(width, 128) + digits.WARPS <= int(sanitize.BARRIERS[1]) for width in digits.WIDTHS)


def test_racecheck_is_shared_among_processes():
    names = [f"k{i}" for i in range(20)] + ["sample", "persistent"]
    found = sanitize.portions("racecheck", names)
    assert sorted(name for portion in found for name in portion) == sorted(names) and len(found) == sanitize.PORTIONS and ["sample"] in found and ["persistent"] in found
    assert sanitize.portions("memcheck", names) == [names] and sanitize.portions("racecheck", ["a"]) == [["a"]]
    assert "--launch-count" in sanitize.command_of("racecheck", "s", ["sample"], []) and "--launch-count" not in sanitize.command_of("racecheck", "s", ["a"], [])
    assert "--launch-count" not in sanitize.command_of("memcheck", "s", ["sample"], [])


def test_a_tool_that_broke_down():
    with pytest.raises(DeviceError, match="without a summary.*Killed"):
        sanitize.parse("========= COMPUTE-SANITIZER\nKilled\n")


def test_where_the_sanitizer_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.sys, "path", [str(tmp_path / "site")])
    places = [tmp_path / "path", tmp_path / "cuda" / "bin", tmp_path / "site" / "nvidia" / "cu13" / "bin"]
    for place in places:
        place.mkdir(parents=True)
        (place / "compute-sanitizer").write_text("#!/bin/sh\n", encoding="utf-8")
        (place / "compute-sanitizer").chmod(0o755)
    assert sanitize.find_sanitizer({"PATH": str(places[0]), "CUDA_HOME": str(tmp_path / "cuda")}).parent == places[0]
    assert sanitize.find_sanitizer({"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}).parent == places[1]


def test_no_sanitizer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sanitize, "TOOLKIT", tmp_path)
    with pytest.raises(DeviceError, match="comes with the CUDA toolkit, or as the wheel") as caught:
        sanitize.find_sanitizer({"PATH": ""})
    assert "\n" not in str(caught.value)


def fake_sanitizer(folder, body: str):
    """A program in the sanitizer's place: the last words of its command line are the file that the program under test writes and the tool."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys, time\nif '--version' in sys.argv: print('NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1)'); sys.exit()\n"
        "def answer(kernels, launched): json.dump({'kernels': kernels, 'launched': launched, 'cases': []}, open(sys.argv[-2], 'w', encoding='utf-8'))\n" + body,
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def test_a_tool_is_run_with_its_options(tmp_path):
    fake = fake_sanitizer(tmp_path, f"answer(['a'], ['a', 'b'])\nprint('========= ' + ' '.join(sys.argv[1:-2]))\nprint({CLEAN!r})")
    assert sanitize.version_of(fake) == "2025.3.1.0"
    outcome, launched, seconds = sanitize.run_tool("racecheck", fake, ["a", "b"])
    assert launched["launched"] == ["a", "b"] and seconds > 0
    assert outcome.reports == [f"--tool racecheck --print-limit 20 --num-cuda-barriers 128 --kernel-name kernel_name=a --kernel-name kernel_name=b {sys.executable} -m nanoqwen.bench.sanitize_run"]
    assert "kernel_name" not in sanitize.run_tool("memcheck", fake, ["a"])[0].reports[0]


@pytest.mark.parametrize(
    "body, said",
    [
        (f"answer(['a', 'b'], ['a'])\nprint({CLEAN!r})", "did not launch b"),
        (f"print('nanoqwen.errors.DeviceError: the logits are not finite')\nprint({CLEAN!r})", "the logits are not finite"),
        ("print('half', flush=True)\ntime.sleep(30)", "did not finish within 1 s.*half"),
        ("print('no such option')\nsys.exit(1)", "no such option"),
        (f"answer(['a'], ['a'])\nprint('========= {sanitize.BROKEN}: a hardware exception')\nprint({RACE!r})", "broke down.*newer"),
    ],
)
def test_a_run_that_proves_nothing_is_an_error(tmp_path, body, said):
    with pytest.raises(DeviceError, match=said) as caught:
        sanitize.run_tool("memcheck", fake_sanitizer(tmp_path, body), [], timeout=1 if "sleep" in body else 60)
    assert "\n" not in str(caught.value)


def test_a_program_that_an_error_ended_is_an_outcome(tmp_path):
    outcome, launched, _ = sanitize.run_tool("memcheck", fake_sanitizer(tmp_path, f"print({OVERRUN!r})\nsys.exit(1)"), [])
    assert outcome.errors == 2 and launched["launched"] == []


def test_the_models_take_what_the_kernels_distinguish():
    page, gemms = load_settings().kv.page_tokens, set()
    for case in CASES.values():
        check_supported(case.dims, case.group)
        assert max(case.prompts) + case.steps + MORE <= case.dims.max_position
        for length in case.prompts:
            gemms |= {p.kernel for p in products(case.dims, case.group, length, min(PREFILL_CHUNK, case.dims.max_position), 132).values()}
    lengths = {length for case in CASES.values() for length in case.prompts}
    assert {1, page - 1, page, page + 1} <= lengths
    sources = "".join(path.read_text(encoding="utf-8") for path in (data_path("kernels") / "prefill").glob("gemm_*.cu"))
    assert gemms == set(re.findall(r"^NANOQWEN_(?:GEMM\(\w+\)|DIGITS) (\w+)\(", sources, re.M)), "every product of prefill is met"
    assert all(any(length < page < length + case.steps for length in case.prompts) for case in CASES.values()), "each model's steps cross a page"
    attentions = {(attention_kernel(case.dims, MORE, n + case.steps, 132), case.dims.head_dim) for case in CASES.values() for n in case.prompts}
    assert attentions == {(kernel, head_dim) for kernel in ATTENTIONS for head_dim in (64, 128)}, "both of its attentions, for heads of either size"
    assert {case.dims.tied for case in CASES.values()} == {True, False} and {case.dims.head_dim for case in CASES.values()} == {64, 128}
    assert CEILING_BYTES % 16 == 0 and CEILING_BYTES % 4096, "a broken chunk at the end"


def test_the_receipt_is_clean_and_covers_every_kernel_there_is():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    results = read_receipt(receipts_folder() / "sanitize.json")["results"]
    assert results["kernels"] == sanitize.kernel_names()
    assert set(results["tools"]) == set(sanitize.USUAL) and results["cases"] == list(CASES)
    assert {tool: found["errors"] for tool, found in results["tools"].items()} == dict.fromkeys(sanitize.USUAL, 0)


def test_main_writes_no_receipt_when_something_was_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: None)
    monkeypatch.setattr(sanitize, "kernel_names", lambda: ["a"])
    monkeypatch.setattr(sanitize, "write_receipt", lambda *a, **k: pytest.fail("written"))
    fake = fake_sanitizer(tmp_path, f"answer(['a'], ['a'])\nprint({RACE!r})")
    assert sanitize.main(["--sanitizer", str(fake), "--tool", "racecheck"]) == 1
    said = capsys.readouterr()
    assert "1 errors, 1 warnings" in said.out and "[508 hazards]" in said.out and "no receipt" in said.err


def test_what_one_tool_found_is_told_when_another_breaks_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: None)
    monkeypatch.setattr(sanitize, "kernel_names", lambda: ["a"])
    monkeypatch.setattr(sanitize, "write_receipt", lambda *a, **k: pytest.fail("written"))
    fake = fake_sanitizer(tmp_path, f"if 'memcheck' in sys.argv: sys.exit('broken')\nanswer(['a'], ['a'])\nprint({RACE!r} if 'racecheck' in sys.argv else {PROBE!r})")
    assert sanitize.main(["--sanitizer", str(fake)]) == 2
    said = capsys.readouterr()
    assert "racecheck: 1 errors" in said.out and "synccheck: 0 errors" in said.out and "memcheck:" not in said.out
    assert said.err.count("\n") == 1 and "ended without a summary" in said.err


def test_main_writes_a_receipt_of_a_clean_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: None)
    monkeypatch.setattr(sanitize, "kernel_names", lambda: ["a"])
    monkeypatch.setattr("nanoqwen.bench.card.device_facts", lambda device: ({"name": "a card"}, {"driver": "1"}))
    write = sanitize.write_receipt
    monkeypatch.setattr(sanitize, "write_receipt", lambda *a, **k: write(*a, **k, folder=tmp_path))
    fake = fake_sanitizer(tmp_path, f"answer(['a'], ['a'])\nprint({NO_RACE!r} if 'racecheck' in sys.argv else {PROBE!r})")
    assert sanitize.main(["--sanitizer", str(fake)]) == 0
    receipt = json.loads((tmp_path / "sanitize.json").read_text(encoding="utf-8"))
    assert receipt["results"]["sanitizer"] == "2025.3.1.0" and receipt["results"]["kernels"] == ["a"]
    tools = receipt["results"]["tools"]
    assert {(t["errors"], t["warnings"]) for t in tools.values()} == {(0, 0)} and tools["memcheck"]["driver_probes"] == 1
    assert "kernels/decode/paged_attention.cu" in receipt["sources"] and "sanitize.json" in capsys.readouterr().out


def test_without_a_card_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.prepare.hopper_problem", lambda: "no NVIDIA GPU is visible")
    assert sanitize.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no NVIDIA GPU is visible" in said
