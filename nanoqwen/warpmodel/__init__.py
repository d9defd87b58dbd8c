"""An executable model of warps, barriers and asynchronous copies: what may happen in one CTA, found by trying everything.

``explore(ring(pages=7))`` visits every state of the shipped paged-attention ring in small and reports that no schedule has a fault;
``explore(in_branch("join"))`` finds the schedule in which a consumer reads a page that is not there yet; ``nanoqwen.book.timeline``
draws it. ``lessons`` has the kernels that chapter 05 runs on the card, under the same names. Needs no GPU. See machine.py for the rules,
and for what they assume about the hardware.
"""

from nanoqwen.warpmodel.explore import FAULTS, Report, Step, explore
from nanoqwen.warpmodel.kernels import ARRANGEMENTS, fences_only, in_branch, ring, tail_branch
from nanoqwen.warpmodel.machine import (
    COPY_ENGINE, Arrive, ArriveExpect, Copy, Exit, Kernel, Machine, Read, Sync, SyncArrive, SyncWarp, Wait, Write,
)  # fmt: skip

__all__ = [
    "ARRANGEMENTS", "COPY_ENGINE", "FAULTS", "Arrive", "ArriveExpect", "Copy", "Exit", "Kernel", "Machine", "Read", "Report", "Step",
    "Sync", "SyncArrive", "SyncWarp", "Wait", "Write", "explore", "fences_only", "in_branch", "ring", "tail_branch",
]  # fmt: skip
