"""The dimensions for which kernels are compiled and planned in tests: what the kernels distinguish, one model for each of it; and the compiler for one of them."""

import dataclasses

import pytest

from nanoqwen.config import Dims, data_path
from nanoqwen.cuda.constants import LaunchShape, constants_header
from nanoqwen.synthetic import synthetic_dims

SEVEN, DEMO = Dims.qwen2_5_coder_7b(), synthetic_dims("demo")
#: {name: (dimensions, group)}
MODELS = {
    "7b": (SEVEN, 128),
    "embedded": (DEMO, 128),
    "heads of 64, group 64, tied": (dataclasses.replace(DEMO, hidden=448, num_heads=7, head_dim=64, tied=True), 64),
    "group 32": (dataclasses.replace(DEMO, hidden=384, intermediate=1056, num_heads=6, num_kv_heads=2, head_dim=64), 32),
    "32b": (synthetic_dims("32b"), 128),
}


def prefill_log(model: str, name: str, text: str) -> str:
    """What ptxas says of ``text``, compiled for one of MODELS as the source ``name`` of kernels/prefill is. Skips the test where NVRTC is not installed."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    from nanoqwen.cuda import compile as compiling

    headers = {p.name: p.read_text(encoding="utf-8") for folder in ("common", "prefill") for p in (data_path("kernels") / folder).glob("*.cuh")}
    headers["constants.cuh"] = constants_header(*MODELS[model], LaunchShape(132))
    return compiling._compile(nvrtc, name, text, headers)[1]
