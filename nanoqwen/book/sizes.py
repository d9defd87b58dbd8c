"""What the 7B takes on a disk, in memory and on a wire, computed from its dimensions: facts for the pages that say what to rent."""

from __future__ import annotations

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape
from nanoqwen.cuda.memory import Plan, plan
from nanoqwen.model import EMBED, schema

#: Streaming multiprocessors of an H100 SXM and an H200, from NVIDIA's data sheets. They decide a few MB of partial sums.
HOPPER_SMS = 132


def stored_bytes(dims: Dims, group: int) -> tuple[int, int]:
    """(bytes of a BF16 checkpoint, bytes of the tensors in a pack file)."""
    weights = sum(s.rows * s.cols for s in schema(dims))
    int4 = sum(s.rows * s.cols for s in schema(dims) if s.int4)
    return 2 * weights, 2 * (weights - int4) + int4 // 2 + int4 // group * 2


def card_plan(dims: Dims, group: int, context: int) -> Plan:
    """What the Hopper engines take on the card for ``context`` tokens."""
    return plan(dims, group, LaunchShape(HOPPER_SMS), context, PREFILL_CHUNK)


def download_minutes(nbytes: int, gigabits_per_s: float) -> float:
    """Minutes on a line that delivers ``gigabits_per_s`` (10**9 bits a second) all the time."""
    return 8 * nbytes / (gigabits_per_s * 1e9) / 60


def sizes() -> dict[str, str]:
    """Facts by name; GB are 10**9 bytes."""
    dims, group = Dims.qwen2_5_coder_7b(), load_settings().quant.group
    source, packed = stored_bytes(dims, group)
    widened = 4 * sum(s.rows * s.cols for s in schema(dims) if s.name != EMBED)
    return {
        "gb-checkpoint": f"{source / 1e9:.1f}",
        "gb-pack-file": f"{packed / 1e9:.1f}",
        "gb-fp32": f"{widened / 1e9:.0f}",
        "gb-card": f"{card_plan(dims, group, dims.max_position).total / 1e9:.1f}",
        "context": f"{dims.max_position:,}",
        "minutes-checkpoint": f"{download_minutes(source, 1):.0f}",
    }
