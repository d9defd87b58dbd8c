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


#: Blocks that one bulk copy of the streaming GEMV brings.
BUNDLE = 4
#: Dynamic shared memory of a streaming GEMV's CTA, in bytes: at least this much, more than half of an SM's 228 KiB, so that there is
#: never more than one of them on an SM ...
STREAM_LEAST = 116 * 1024
#: ... at most this much where a CTA of paged_attention (72 KiB for heads of 128) shall fit beside it, and else this much.
STREAM_BESIDE, STREAM_MOST = 148 * 1024, 220 * 1024
#: Columns of one slice of the FP16 head, and bytes of one of its blocks and of its part of x (kernels/decode/lm_head.cu).
HEAD_SLICE, HEAD_BLOCK, HEAD_RECORD = 32, 1024, 128
#: Tokens of a prompt that run through the layers together: enough for tensor cores to be the limit, few enough for the workspace.
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Stream:
    """A streaming GEMV as launched: ``grid`` CTAs, ``parts`` that the reader adds, ``stages`` of each warp's ring, ``shared`` bytes."""

    grid: int
    parts: int
    stages: int
    shared: int


@dataclass(frozen=True)
class LaunchShape:
    """How the kernels are spread over a card.

    ``sms`` streaming multiprocessors; the GEMV runs one CTA of ``gemv_warps`` warps on each, whose rings take as many bundles as its
    share of shared memory allows. Attention is split ``attention_splits`` ways a KV head. ``readers_fence``: for racecheck (kernels/common/mbarrier.cuh).
    """

    sms: int
    gemv_warps: int = 16
    readers_fence: bool = False

    def attention_splits(self, kv_heads: int) -> int:
        """Splits of the sequence for each of ``kv_heads``: as many as give every SM one CTA."""
        return max(1, self.sms // kv_heads)

    def stream(self, rows: int, slices: int, block_bytes: int, record: int, most_shared: int) -> Stream:
        """A GEMV over ``rows`` rows cut into ``slices`` blocks of ``block_bytes``, with ``record`` bytes of x a slice, in ``most_shared`` bytes.

        The same arithmetic as StreamShape in kernels/common/stream_gemv.cuh, which compares.
        """
        warps = self.gemv_warps
        bundles = -(-(padded_rows(rows) // TILE_ROWS * slices) // BUNDLE)
        grid = min(self.sms, bundles)
        fewest, most = bundles // grid * BUNDLE, -(-bundles // grid) * BUNDLE
        warp_fewest = bundles // grid // warps * BUNDLE
        slots = min(warps, -(-(slices - 1) // warp_fewest) + 1) if warp_fewest else warps
        fixed = slices * record + ((most // slices + 2) * slots * TILE_ROWS + 32) * 4 + 8
        stage = warps * (BUNDLE * block_bytes + 8)
        stages = max(1, min((most_shared - fixed) // stage, -(-(most // BUNDLE) // warps)))
        return Stream(grid, -(-(slices - 1) // fewest) + 1, stages, max(STREAM_LEAST, fixed + stages * stage))


def int4_block_bytes(group: int) -> int:
    """Bytes of 16 rows x one group: codes and scales (kernels/decode/gemv_int4.cu)."""
    return TILE_ROWS * (group // 2 + 2)


def record_bytes(group: int) -> int:
    """Bytes of one group of activations as fixed-point digits (kernels/common/activations.cuh)."""
    return 2 * group + 16


def streams(dims: Dims, group: int, shape: LaunchShape) -> dict[str, Stream]:
    """Every streamed matrix: qkv, o, gate_up, down, head."""
    block, record = int4_block_bytes(group), record_bytes(group)
    return {
        "qkv": shape.stream(dims.q_size + 2 * dims.kv_size, dims.hidden // group, block, record, STREAM_BESIDE),
        "o": shape.stream(dims.hidden, dims.q_size // group, block, record, STREAM_BESIDE),
        "gate_up": shape.stream(2 * dims.intermediate, dims.hidden // group, block, record, STREAM_MOST),
        "down": shape.stream(dims.hidden, dims.intermediate // group, block, record, STREAM_MOST),
        "head": shape.stream(dims.vocab, dims.hidden // HEAD_SLICE, HEAD_BLOCK, HEAD_RECORD, STREAM_MOST),
    }


def padded_rows(rows: int) -> int:
    """Rows rounded up to whole tiles of the streaming GEMV."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def row_threads(dims: Dims) -> int:
    """Threads of the one-CTA kernels over the hidden vector: whole warps, at most 512, four values at a time and as even as can be."""
    pieces = -(-dims.hidden // (4 * 512))
    return -(-dims.hidden // (4 * pieces * 32)) * 32


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
        "kGemvCtas": shape.sms,
    }
    names = {"qkv": "kQkv", "o": "kO", "gate_up": "kGateUp", "down": "kDown", "head": "kHead"}
    for name, stream in streams(dims, group, shape).items():
        values |= {f"{names[name]}Parts": stream.parts, f"{names[name]}Stages": stream.stages, f"{names[name]}Shared": stream.shared}
    lines = [f"constexpr int {name} = {value};" for name, value in values.items()]
    lines.append(f"constexpr float kRmsEps = {dims.rms_eps!r}f;" if "e" in repr(dims.rms_eps) or "." in repr(dims.rms_eps) else f"constexpr float kRmsEps = {dims.rms_eps}.0f;")
    lines.append(f"constexpr bool kReadersFence = {str(shape.readers_fence).lower()};")
    body = "\n".join(lines)
    return f"// Written by nanoqwen/cuda/constants.py for one model and one card. Not a file: the compiler is handed this text.\n#pragma once\n\nnamespace nanoqwen {{\n\n{body}\n\n}}  // namespace nanoqwen\n"
