"""The dimensions for which kernels are compiled and planned in tests: what the kernels distinguish, one model for each of it."""

import dataclasses

from nanoqwen.config import Dims
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
