"""What a model needs on the card, known before anything is copied there.

Weights, workspace and pages follow from the dimensions. When they do not fit, the answer is one line that says what is
needed, what is free, and the largest context that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoqwen import model
from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.constants import LaunchShape, padded_rows, streams
from nanoqwen.cuda.persistent_plan import persistent_bytes
from nanoqwen.cuda.prefill_plan import prefill_bytes
from nanoqwen.errors import DeviceError
from nanoqwen.kv import kv_bytes

#: Left free for the driver's own needs: contexts, modules, fragmentation.
RESERVE = 512 << 20


@dataclass(frozen=True)
class Plan:
    """Bytes on the card: weights, workspace (activations, partial sums, prefill), KV pages of ``context`` tokens."""

    weights: int
    workspace: int
    kv: int
    context: int

    @property
    def total(self) -> int:
        """All of it, with the reserve."""
        return self.weights + self.workspace + self.kv + RESERVE


def weight_bytes(dims: Dims, group: int) -> int:
    """Codes, scales, FP16 tensors and both vocabularies (one, when the head is tied)."""
    vocabularies = 1 if dims.tied else 2
    int4 = sum(s.rows * s.cols // 2 + s.rows * (s.cols // group) * 2 for s in model.block_schema(dims, 0) if s.int4)
    small = sum(s.cols * 2 for s in model.block_schema(dims, 0) if not s.int4)
    return dims.num_layers * (int4 + small) + dims.hidden * 2 + vocabularies * padded_rows(dims.vocab) * dims.hidden * 2


def workspace_bytes(dims: Dims, group: int, shape: LaunchShape, context: int, chunk: int) -> int:
    """Activations and partial sums of a decode step, RoPE table, the persistent kernel's buffers, and the prefill of ``chunk`` tokens at a time."""
    parts = {name: stream.parts for name, stream in streams(dims, group, shape).items()}
    rows = {"qkv": dims.q_size + 2 * dims.kv_size, "o": dims.hidden, "gate_up": 2 * dims.intermediate, "down": dims.hidden, "head": dims.vocab}
    decode = 4 * (sum(parts[name] * padded_rows(n) for name, n in rows.items()) + padded_rows(dims.vocab))
    attention = 4 * shape.attention_splits(dims.num_kv_heads) * dims.num_heads * (dims.head_dim + 2)
    rope = 8 * dims.max_position * (dims.head_dim // 2)
    return decode + attention + rope + persistent_bytes(dims, group, shape.sms) + prefill_bytes(dims, chunk)


def plan(dims: Dims, group: int, shape: LaunchShape, context: int, chunk: int) -> Plan:
    """What ``context`` tokens need."""
    return Plan(weight_bytes(dims, group), workspace_bytes(dims, group, shape, context, chunk), kv_bytes(dims, load_settings().kv, context), context)


def check_fits(dims: Dims, group: int, shape: LaunchShape, context: int, chunk: int, free: int, device: str) -> Plan:
    """The plan, or DeviceError: weights, workspace, pages and ``free`` bytes, and the largest context that fits (in whole pages), or what does not."""
    needed = plan(dims, group, shape, context, chunk)
    if needed.total <= free:
        return needed
    page = load_settings().kv.page_tokens
    per_page = kv_bytes(dims, load_settings().kv, page)
    fits = (free - (needed.total - needed.kv)) // per_page * page
    story = (
        f"{device} has {_gb(free)} free; the weights need {_gb(needed.weights)}, workspace {_gb(needed.workspace + RESERVE)}, "
        f"and the KV pages of {context:,} tokens {_gb(needed.kv)}"
    )
    if fits >= page:
        raise DeviceError(f"{story}; the largest context that fits is {fits:,} tokens: use --context {fits}")
    if needed.weights > free:
        missing = "not even the weights fit"
    elif needed.total - needed.kv > free:
        missing = "the weights alone would fit, the workspace does not fit beside them"
    else:
        missing = f"beside weights and workspace no page of {page} tokens fits"
    raise DeviceError(f"{story}; {missing}: free some memory, or use --engine cpu")


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
