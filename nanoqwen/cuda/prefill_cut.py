"""A cut of a matrix product of prefill into work for CTAs, as the kernels get it. Needs no card; who chooses between cuts are ``prefill_plan`` and ``prefill_digits``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

#: Columns of a unit of K.
UNIT = 128
#: Bytes a microsecond of L2 when parts are read.
L2 = 3.0e6


class Work(ctypes.Structure):
    """``Work`` of kernels/prefill/gemm_work.cuh."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "tiles", "n", "main_rows", "main_width", "tail_width", "main_tokens", "tail_tokens", "main_items", "items", "groups",
            "whole", "quantum", "quanta", "total", "sharers",
        )
    ]  # fmt: skip

    def owner(self, quantum: int) -> int:
        """The CTA that has a shared quantum: ``share_owner``."""
        return ((quantum + 1) * self.sharers - 1) // self.total

    def parts(self, item: int) -> int:
        """How many parts the sums of an item come in: ``part_count``."""
        if item < self.whole:
            return 1
        first = (item - self.whole) * self.quanta
        return self.owner(first + self.quanta - 1) - self.owner(first) + 1

    @property
    def slots(self) -> int:
        """The most parts of an item: slots of the buffer that the product may write."""
        return max(self.parts(item) for item in range(self.whole, self.items)) if self.sharers else 1

    def grid(self, sms: int) -> int:
        """CTAs of a launch on a card of ``sms`` SMs."""
        return max(min(sms, self.whole), self.sharers)


@dataclass(frozen=True)
class Cut:
    """A choice: ``rows`` rows of items of ``tiles`` row tiles each; the first ``main_rows`` of them have ``main_width`` tokens an item, the others
    ``tail_width``. Items from ``whole`` on are shared by ``sharers`` CTAs in quanta of ``quantum`` units; none are if ``sharers`` is 0."""

    tiles: int
    rows: int
    main_rows: int
    main_width: int
    tail_width: int
    whole: int = 0
    quantum: int = 1
    sharers: int = 0

    def work(self, n: int, groups: int, group: int) -> Work:
        """The structure that the kernel gets, for ``n`` tokens and ``groups`` groups of K. ``n`` may be less than was planned for, if the number of token
        tiles stays."""
        main_tokens, tail_tokens = -(-n // self.main_width), -(-n // self.tail_width)
        main_items = self.main_rows * main_tokens
        items = main_items + (self.rows - self.main_rows) * tail_tokens
        common = self.tiles, n, self.main_rows, self.main_width, self.tail_width, main_tokens, tail_tokens, main_items, items, groups
        if not self.sharers or self.whole >= items:
            return Work(*common, items, 1, 1, 0, 0)
        quanta = -(-units_of(groups, group) // self.quantum)
        total = (items - self.whole) * quanta
        return Work(*common, self.whole, self.quantum, quanta, total, min(self.sharers, total))


def units_of(groups: int, group: int) -> int:
    """Units of K, the last of which may be padded."""
    return -(-groups * group // UNIT)
