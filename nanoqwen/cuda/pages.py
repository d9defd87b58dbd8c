"""The KV pages of one sequence on the card: the pool, and the bookkeeping that the host does.

``kv.py`` has the arithmetic, the allocator and the block table; here they meet a pool in device memory. The pool
begins small and doubles, since most sequences are short and a 7B's whole context is 1.75 GiB. Growing moves the pool, so
launches that point into it must be made again: ``ensure`` says when.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from nanoqwen.config import Dims, KVSpec
from nanoqwen.kv import BlockTable, PageAllocator, pages_for

#: Tokens the pool holds at first.
FIRST_TOKENS = 4096


class DevicePages:
    """Pool float16 [layers, 2, pages, page_tokens * kv_size] (index 1: keys, values), block table and allocator.

    ``arrays`` is CuPy; anything with numpy's interface serves in tests. ``limit`` is the most tokens ever held.
    """

    def __init__(self, dims: Dims, spec: KVSpec, limit: int, arrays: ModuleType, first_tokens: int = FIRST_TOKENS) -> None:
        self.dims, self.spec, self.limit = dims, spec, limit
        self._arrays = arrays
        self.table = BlockTable(spec.page_tokens)
        self.allocator = PageAllocator(0)
        self.pool: Any = None
        self._grow(min(first_tokens, limit))

    def _grow(self, tokens: int) -> None:
        pages = pages_for(tokens, self.spec.page_tokens)
        shape = (self.dims.num_layers, 2, pages, self.spec.page_tokens * self.dims.kv_size)
        pool = self._arrays.empty(shape, dtype=np.float16)
        if self.pool is not None:
            pool[:, :, : self.pool.shape[2]] = self.pool
        self.pool = pool  # first: an interruption here must not leave page numbers that the pool does not have
        self.allocator.grow(pages - self.allocator.num_pages)

    def ensure(self, tokens: int) -> tuple[list[int], bool]:
        """Hold pages for ``tokens`` tokens. Returns (pages newly taken, in order; whether the pool moved).

        A page that was taken may hold anything: whoever takes it writes or clears all of it before attention reads it. When the pool
        cannot grow, the error comes before a page is taken.
        """
        missing = pages_for(tokens, self.spec.page_tokens) - len(self.table.pages)
        short = missing - self.allocator.free_pages
        if moved := short > 0:
            pages = max(2 * self.allocator.num_pages, self.allocator.num_pages + short)
            self._grow(min(pages * self.spec.page_tokens, self.limit))
        held = len(self.table.pages)
        for _ in range(missing):
            self.table.pages.append(self.allocator.alloc())
        return self.table.pages[held:], moved

    def truncate(self, tokens: int) -> None:
        """Give back the pages behind the first ``tokens`` tokens; the last one is handed out next."""
        keep = pages_for(tokens, self.spec.page_tokens)
        self.allocator.free(self.table.pages[keep:])
        del self.table.pages[keep:]

    def clear_tail(self, tokens: int) -> None:
        """Zeros behind the first ``tokens`` tokens in the page that holds the last of them: what was dropped there, or left by another
        sequence, may be NaN, and 0 * NaN is NaN."""
        page_tokens = self.spec.page_tokens
        if used := tokens % page_tokens:
            rows = self.pool.reshape(*self.pool.shape[:3], self.dims.num_kv_heads, page_tokens, self.dims.head_dim)
            rows[:, :, self.table.pages[tokens // page_tokens], :, used:] = 0
