"""The constants header: every dimension a kernel uses is known when it is compiled.

``constants_header`` writes ``constants.cuh`` from the dimensions of one file, ``config/nanoqwen.yaml`` and the
launch shape of one card. NVRTC compiles the kernels once for each such header; the disk cache keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError

#: Rows of a tile of the streaming GEMV (kernels/common/stream_gemv.cuh); matrices are padded to whole tiles.
TILE_ROWS = 16


@dataclass(frozen=True)
class LaunchShape:
    """How the kernels are spread over a card.

    ``sms`` streaming multiprocessors; the GEMV runs ``gemv_ctas_per_sm`` CTAs of ``gemv_warps`` warps on each
    and keeps ``gemv_prefetch`` blocks of 1 KiB a warp in flight; attention is split ``attention_splits`` ways a KV head.
    """

    sms: int
    gemv_warps: int = 8
    gemv_ctas_per_sm: int = 4
    gemv_prefetch: int = 2
    attention_splits: int = 32

    @property
    def gemv_ctas(self) -> int:
        """CTAs of a full grid."""
        return self.sms * self.gemv_ctas_per_sm

    def stream(self, rows: int, slices: int) -> tuple[int, int]:
        """(grid, parts) of a streaming GEMV over ``rows`` rows cut into ``slices``: StreamShape in kernels/common/stream_gemv.cuh."""
        total = padded_rows(rows) // TILE_ROWS * slices
        grid = max(1, min(self.gemv_ctas, total // self.gemv_warps))
        return grid, -(-(slices - 1) // (total // grid)) + 1


#: Columns of one slice of the FP16 head (kernels/decode/lm_head.cu).
HEAD_SLICE = 32


def streams(dims: Dims, group: int, shape: LaunchShape) -> dict[str, tuple[int, int]]:
    """(grid, parts) of every streamed matrix: qkv, o, gate_up, down, head."""
    return {
        "qkv": shape.stream(dims.q_size + 2 * dims.kv_size, dims.hidden // group),
        "o": shape.stream(dims.hidden, dims.q_size // group),
        "gate_up": shape.stream(2 * dims.intermediate, dims.hidden // group),
        "down": shape.stream(dims.hidden, dims.intermediate // group),
        "head": shape.stream(dims.vocab, dims.hidden // HEAD_SLICE),
    }


def padded_rows(rows: int) -> int:
    """Rows rounded up to whole tiles of the streaming GEMV."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def row_threads(dims: Dims) -> int:
    """Threads of the one-CTA kernels over the hidden vector: four values each, whole warps, at most 1024."""
    return min(1024, -(-dims.hidden // 128) * 32)


def check_supported(dims: Dims, group: int) -> None:
    """Raise InputError, in one line, for dimensions that the kernels are not written for."""
    ratio = dims.gqa_ratio
    problems = [
        (dims.head_dim not in (64, 128), f"head_dim {dims.head_dim}, they take 64 or 128"),
        (ratio > 8, f"{ratio} query heads a KV head, they take up to 8"),
        (group not in load_settings().quant.allowed_groups, f"group size {group}"),
        (dims.hidden % 32 != 0, f"hidden {dims.hidden}, they take multiples of 32"),
    ]
    for wrong, what in problems:
        if wrong:
            raise InputError(f"the Hopper kernels do not support this model: {what}; use --engine cpu")


def constants_header(dims: Dims, group: int, shape: LaunchShape) -> str:
    """The text of ``constants.cuh``."""
    kv = load_settings().kv
    values = {
        "kLayers": dims.num_layers,
        "kHidden": dims.hidden,
        "kIntermediate": dims.intermediate,
        "kNumHeads": dims.num_heads,
        "kNumKvHeads": dims.num_kv_heads,
        "kHeadDim": dims.head_dim,
        "kQSize": dims.q_size,
        "kKvSize": dims.kv_size,
        "kVocabRows": padded_rows(dims.vocab),
        "kGroup": group,
        "kPageTokens": kv.page_tokens,
        "kPageAlignBytes": kv.page_align_bytes,
        "kRowThreads": row_threads(dims),
        "kTiedHead": int(dims.tied),
        "kGemvWarps": shape.gemv_warps,
        "kGemvCtasPerSm": shape.gemv_ctas_per_sm,
        "kGemvCtas": shape.gemv_ctas,
        "kGemvPrefetch": shape.gemv_prefetch,
    }
    names = {"qkv": "kQkvParts", "o": "kOParts", "gate_up": "kGateUpParts", "down": "kDownParts", "head": "kHeadParts"}
    values |= {names[name]: parts for name, (_, parts) in streams(dims, group, shape).items()}
    lines = [f"constexpr int {name} = {value};" for name, value in values.items()]
    lines.append(f"constexpr float kRmsEps = {dims.rms_eps!r}f;" if "e" in repr(dims.rms_eps) or "." in repr(dims.rms_eps) else f"constexpr float kRmsEps = {dims.rms_eps}.0f;")
    body = "\n".join(lines)
    return f"// Written by nanoqwen/cuda/constants.py for one model and one card. Not a file: the compiler is handed this text.\n#pragma once\n\nnamespace nanoqwen {{\n\n{body}\n\n}}  // namespace nanoqwen\n"
