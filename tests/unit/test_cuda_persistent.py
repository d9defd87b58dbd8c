"""The persistent kernel compiles for every kind of model and both Hopper cards, without a GPU, within its budget; its settings and its plan."""

import dataclasses
import re

import kernelmodels
import pytest
from kernelmodels import SEVEN

from nanoqwen.bench.sanitize_run import CASES, UNDER_RACECHECK
from nanoqwen.config import data_path
from nanoqwen.cuda import persistent_plan as plan
from nanoqwen.cuda.compile import Binary, KernelUse
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.cuda.persistent_plan import SETTINGS, compile_persistent, persistent_bytes, persistent_ctas, persistent_takes, settings_header
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.synthetic import synthetic_dims

MODELS = {**kernelmodels.MODELS, "3b": (synthetic_dims("3b"), 128)}
H100_PCIE, H200 = 114, 132
REGISTERS_A_SM, THREADS = 65536, 512
FOLDER = data_path("kernels") / "persistent"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize("sms", [H100_PCIE, H200])
@pytest.mark.parametrize("model", MODELS)
def test_it_compiles_without_a_spill(model, sms, cache):
    use = compile_persistent(*MODELS[model], LaunchShape(sms), cache).kernels["persistent"]
    assert (use.spill_bytes, use.stack_bytes) == (0, 0)
    assert use.registers * THREADS <= REGISTERS_A_SM, "one CTA takes all of an SM's registers, by intent"


@pytest.mark.parametrize("case", CASES)
def test_builds_for_racecheck(case, cache):
    """Every lane arrives for itself there, and one lane asks; with a ring of half the length, too, where every place is filled again more often."""
    dims, group, shape = CASES[case].dims, CASES[case].group, LaunchShape(H200, readers_fence=True)
    for settings in (UNDER_RACECHECK, {**UNDER_RACECHECK, "kMostUnits": 21}):
        use = compile_persistent(dims, group, shape, cache, settings).kernels["persistent"]
        assert (use.spill_bytes, use.stack_bytes) == (0, 0)
    with pytest.raises(DeviceError, match="the arrival behind the loads is lane 0's"):
        compile_persistent(dims, group, shape, cache, {**UNDER_RACECHECK, "kRelease": 1})


@pytest.mark.parametrize("spilled, stack", [(20, 8), (0, 16)])
def test_a_build_that_spills_is_refused_unless_a_diagnosis_asks_for_it(spilled, stack, monkeypatch):
    monkeypatch.setattr(plan, "compile_source", lambda source, constants, cache, written: Binary(source, b"", {"persistent": KernelUse(128, 0, stack, spilled)}))
    with pytest.raises(DeviceError, match=rf"more registers for this model than a thread has \({spilled} bytes spilled\); use --engine graph$"):
        compile_persistent(SEVEN, 128, LaunchShape(H200))
    assert compile_persistent(SEVEN, 128, LaunchShape(H200), allow_spill=True).kernels["persistent"].spill_bytes == spilled


def test_as_many_units_are_held_as_registers_allow(cache):
    """SETTINGS says why one: this is the reason, and it must go when a compiler no longer agrees."""
    use = compile_persistent(*MODELS["32b"], LaunchShape(H200), cache, {"kHold": SETTINGS["kHold"] + 1}, allow_spill=True).kernels["persistent"]
    assert use.spill_bytes > 0


def test_a_hidden_vector_too_wide_for_the_registers_goes_to_the_graph_engine():
    """The 72B's: five chunks a warp."""
    wide = dataclasses.replace(SEVEN, hidden=8192, intermediate=29568, num_heads=64, num_kv_heads=8)
    assert not persistent_takes(wide, 128) and persistent_takes(synthetic_dims("14b"), 128)
    text = (FOLDER / "plan.cuh").read_text(encoding="utf-8")
    assert f"kPairs = {plan.CONSUMERS // 2}, kConsumers = 2 * kPairs" in text and f"divided_up(elements, {plan.CHUNK_DIMS})" in text


@pytest.mark.parametrize("switch", [name for name, value in SETTINGS.items() if isinstance(value, bool)])
def test_every_switch_compiles(switch, cache):
    assert compile_persistent(*MODELS["embedded"], LaunchShape(H200), cache, {switch: not SETTINGS[switch]}, allow_spill=True).kernels["persistent"].registers


@pytest.mark.parametrize("sms", [H100_PCIE, H200])
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_gives_every_cta_a_share(model, sms):
    dims, group = MODELS[model]
    ctas = persistent_ctas(dims, group, sms)
    assert dims.num_kv_heads <= ctas <= sms and persistent_takes(dims, group)
    assert model not in ("7b", "3b", "32b") or ctas == sms
    assert 4 * (dims.q_size + 2 * dims.kv_size + 2 * dims.hidden + dims.intermediate) < persistent_bytes(dims, group, sms) < 2 << 20


def test_a_setting_is_written_with_its_type_and_an_unknown_one_is_refused():
    text = settings_header(SEVEN, 128, H200, {"kHold": 3, "kStamps": True})
    assert "constexpr int kHold = 3;" in text and "constexpr bool kStamps = 1;" in text and "constexpr bool kValidate = 1;" in text and "constexpr int kCtas = 132;" in text
    with pytest.raises(InputError, match="no setting kFaster"):
        settings_header(SEVEN, 128, H200, {"kFaster": 1})


def test_every_setting_is_used_by_the_kernel():
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.cu*"))
    assert all(re.search(rf"\b{name}\b", text) for name in SETTINGS)


def test_what_the_kernel_asserts_and_does_not_find_is_one_line_that_names_the_graph_engine(cache):
    with pytest.raises(DeviceError, match=r"does not take this model on 3 SMs \(it needs: a CTA for each KV head\); use --engine graph") as caught:
        compile_persistent(*MODELS["7b"], LaunchShape(3), cache)
    assert "\n" not in str(caught.value)


def test_names_of_the_kernel_that_python_repeats():
    """The order of the sizes and of the arguments: nanoqwen/cuda/persistent.py, which needs CuPy, is read as text."""
    ours = (data_path("kernels").parent / "nanoqwen" / "cuda" / "persistent.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+)"', ours.split("_fields_ = [")[1].split("]\n")[0])
    struct = (FOLDER / "exchange.cuh").read_text(encoding="utf-8").split("struct Args {")[1].split("};")[0]
    declared = [name for line in re.sub("//.*", "", struct).split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert names == declared
