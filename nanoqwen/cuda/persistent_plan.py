"""The persistent kernel (kernels/persistent/) for one model and one card: its settings, its binary, what it takes. Needs no card.

Beside ``constants.cuh`` it gets a second header: how many CTAs share the work, how the ring is tuned, and the switches with which chapter 10
takes the kernel apart. ``SETTINGS`` holds all of them but the first; anyone who wants others hands over a few as overrides.
"""

from __future__ import annotations

from pathlib import Path

from nanoqwen.config import Dims
from nanoqwen.cuda.compile import Binary, compile_source
from nanoqwen.cuda.constants import BUNDLE, TILE_ROWS, LaunchShape, constants_header, padded_rows
from nanoqwen.errors import DeviceError, InputError

SOURCE = "persistent/persistent.cu"
#: Tokens of a launch, at most: see ``nanoqwen/engines/persistent.py``.
CHUNK = 8
#: Fewest pages of a split of attention, and most splits a KV head.
SPLIT_PAGES, SPLITS = 2, 32
#: A consumer warp keeps its share of the residual in registers: at most so many chunks of CHUNK_DIMS numbers, for CONSUMERS warps (plan.cuh).
MOST_PIECES, CHUNK_DIMS, CONSUMERS = 3, 128, 14
#: Pointers of a layer: four matrices, two norms, three biases (``LayerPointers`` in plan.cuh).
POINTERS = 9

#: What the kernel is compiled with; bool stands for a switch.
SETTINGS: dict[str, int | bool] = {
    "kMostUnits": 44,  # buffers of the ring, if they fit
    "kAheadEarly": 12,  # units in flight: q/k/v, o
    "kAheadPages": 14,  # K, V
    "kAheadMiddle": 12,  # gate
    "kAheadLate": 18,  # up, down, head
    "kAsk": 8,  # lanes of the producer; between ahead - kAsk and ahead units are in flight
    "kHold": 1,  # units of a stage that a warp takes into registers before its x is there; for two the widest models have too few (32B: a build with 2 spills)
    "kHoldGate": 1,  # the same of gate and up by turns, whose x lies in registers too and takes few; 1 or 2
    "kRelease": 0,  # when a warp gives a unit back: enum Release in plan.cuh
    "kFence": True,  # a proxy fence before a place is filled again; without it, and with kRelease 0, sums differ from run to run
    "kEarly": 2,  # gate and up by turns, and the inner vector quantised so many steps behind; 0: after them
    "kTogether": 2,  # row tiles of a stage that go to the publisher in one buffer of parts: 1 or 2
    "kInnerBatch": 2,  # chunks of the inner vector that a warp has on their way
    "kPatienceSeconds": 2,  # of the watchdog, at 2 GHz
    "kValidate": True,  # values that validate themselves; else counters with release and acquire
    "kHint": False,  # a counter says when to look
    "kOwnSlices": True,  # a warp keeps its x in registers where the shapes allow it
    "kStamps": False,  # clock readings of every stage
    "kJitter": False,  # random sleeps before what the protocols order
    "kIdleLoads": True,  # a warp without a further unit loads all the same, from where the ring's next one will lie, and drops it
    # Ablations: the results are wrong, the traffic of the rest is right.
    "kNoExchange": False,
    "kNoAttention": False,
    "kNoWeights": False,
}


def persistent_ctas(dims: Dims, group: int, sms: int) -> int:
    """CTAs of a launch: one on each of ``sms`` SMs, or as many as get a share of every matrix (kernels/persistent/plan.cuh)."""

    def bundles(rows: int, slices: int) -> int:
        return -(-(padded_rows(rows) // TILE_ROWS * slices) // BUNDLE)

    hidden, q, inner = dims.hidden // group, dims.q_size // group, dims.intermediate // group
    return min(
        sms, bundles(dims.q_size + 2 * dims.kv_size, hidden), bundles(dims.hidden, q), bundles(dims.hidden, inner),
        dims.intermediate // TILE_ROWS, padded_rows(dims.vocab) // TILE_ROWS,
    )  # fmt: skip


def persistent_takes(dims: Dims, group: int) -> bool:
    """Whether the kernel can decode this model on a whole card: a CTA for each KV head, a share of every matrix for each CTA, registers for the
    residual. (Its own assertions and the compiler's report have the last word when it is compiled.)"""
    return persistent_ctas(dims, group, 1 << 30) >= dims.num_kv_heads and dims.hidden <= MOST_PIECES * CHUNK_DIMS * CONSUMERS


def settings_for(overrides: dict[str, int | bool] | None = None) -> dict[str, int | bool]:
    """``SETTINGS`` with ``overrides``. Raises InputError for a name that is none of them."""
    overrides = overrides or {}
    if unknown := set(overrides) - set(SETTINGS):
        raise InputError(f"the persistent kernel has no setting {', '.join(sorted(unknown))}")
    return SETTINGS | overrides


def settings_header(dims: Dims, group: int, sms: int, overrides: dict[str, int | bool] | None = None) -> str:
    """The text of ``persistent_constants.cuh``."""
    lines = [f"constexpr int kCtas = {persistent_ctas(dims, group, sms)};"]
    for name, value in settings_for(overrides).items():
        kind = "bool" if isinstance(SETTINGS[name], bool) else "int"
        lines.append(f"constexpr {kind} {name} = {int(value)};")
    body = "\n".join(lines)
    return f"// Written by nanoqwen/cuda/persistent_plan.py for one model and one card. Not a file: the compiler is handed this text.\n#pragma once\n\nnamespace nanoqwen {{\n\n{body}\n\n}}  // namespace nanoqwen\n"


def compile_persistent(
    dims: Dims, group: int, shape: LaunchShape, cache: Path | None = None, overrides: dict[str, int | bool] | None = None, *, allow_spill: bool = False
) -> Binary:
    """The kernel's binary, from ``cache`` or compiled (seconds).

    A binary that keeps anything in local memory is refused, unless a diagnosis asks for it with ``allow_spill``: one CTA takes all registers of an SM,
    and a build that spills waits for what it has put away where it should multiply. Raises DeviceError, in one line that names the graph engine,
    for that and when the kernel's own assertions do not hold for this model or card.
    """
    binary = _compile(dims, group, shape, cache, overrides or {})
    use = binary.kernels["persistent"]
    if (use.spill_bytes or use.stack_bytes) and not allow_spill:
        raise DeviceError(f"the persistent kernel needs more registers for this model than a thread has ({use.spill_bytes} bytes spilled); use --engine graph")
    return binary


def _compile(dims: Dims, group: int, shape: LaunchShape, cache: Path | None, overrides: dict[str, int | bool]) -> Binary:
    header = settings_header(dims, group, shape.sms, overrides)
    try:
        return compile_source(SOURCE, constants_header(dims, group, shape), cache, {"persistent_constants.cuh": header})
    except DeviceError as e:
        _, asserted, why = str(e).partition("static assertion failed with ")
        if asserted:
            why = why.partition('"')[2].partition('"')[0]
            raise DeviceError(f"the persistent kernel does not take this model on {shape.sms} SMs (it needs: {why}); use --engine graph") from None
        raise


def persistent_bytes(dims: Dims, group: int, sms: int) -> int:
    """Device memory of the kernel's own buffers, in bytes: the exchanged words and the counters, as plan.cuh lays them out, and small change."""
    ctas = persistent_ctas(dims, group, sms)

    def words(rows: int, columns: int) -> int:
        """[part][row] of a matrix that is cut by bundles."""
        slices = columns // group
        fewest = -(-(rows // TILE_ROWS * slices) // BUNDLE) // ctas * BUNDLE  # blocks of a CTA
        return (-(-(slices - 1) // fewest) + 1) * rows

    qkv, splits = dims.q_size + 2 * dims.kv_size, min(ctas // dims.num_kv_heads, SPLITS)
    exchanged = words(qkv, dims.hidden) + dims.q_size + words(dims.hidden, dims.q_size) + dims.intermediate + words(dims.hidden, dims.intermediate)
    exchanged += splits * (dims.q_size + 2 * dims.num_heads)
    lines = 2 * dims.num_layers * (4 + 2 * dims.num_kv_heads) + 1
    return 4 * exchanged + 128 * lines + POINTERS * 8 * dims.num_layers + 8 * ctas + 64
