"""The paged KV cache: fixed-size pages, a block table, an allocator.

A decoder keeps the keys and values of every token it has seen. Stored as one array as long as the
context, that is 1.75 GiB for the 7B before the first token arrives. Stored in *pages* of 16 tokens it
grows with the sequence, and a page given up by one sequence serves the next::

    token position   0 ... 15 | 16 ... 31 | 32 ... 47 | 48
    block table         page 7     page 2      page 9    page 4     (any page, in any order)
    slot in page     0 ... 15 | 0  ... 15 | 0  ... 15 | 0           (the last page holds one token)

One page number is valid in every layer and for K and V alike, so one block table serves the whole model.
Inside a page the tokens of one KV head lie together, [kv_heads, page_tokens, head_dim]: for the 7B that
is 4 slices of 4 KiB, and a kernel that works on one KV head fetches its slice with one bulk copy.

The arithmetic, the allocator and the block table are plain Python. ``PagedKV``, the storage, holds
PyTorch tensors and imports torch only when one is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanoqwen import model
from nanoqwen.config import Dims, KVSpec
from nanoqwen.errors import ContextError, InputError

if TYPE_CHECKING:
    import torch

#: Tokens by which the physical pool grows at least (pages = this / page_tokens). Growing copies the pool,
#: so it is done rarely; 1024 tokens are 56 MiB for the 7B.
GROW_TOKENS = 1024


# [arithmetic]
def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that ``tokens`` tokens occupy: 0 for none, 1 for 1 to 16, 2 for 17 (with 16 tokens a page)."""
    return -(-tokens // page_tokens)


def tokens_in_last_page(tokens: int, page_tokens: int) -> int:
    """Tokens in the last occupied page, 1 to ``page_tokens``; 0 when there is no page.

    ``tokens % page_tokens`` is the trap: it calls a full last page empty.
    """
    return (tokens - 1) % page_tokens + 1 if tokens else 0


def starts_page(position: int, page_tokens: int) -> bool:
    """Whether the token at ``position`` is the first of its page, so that a page must be allocated for it."""
    return position % page_tokens == 0


def head_slice_bytes(dims: Dims, spec: KVSpec) -> int:
    """Bytes of one KV head in one page of K (or V): 4 KiB for the 7B in FP16."""
    return spec.page_tokens * dims.head_dim * spec.value_bytes


def page_bytes(dims: Dims, spec: KVSpec) -> int:
    """Bytes of one page of K (or of V) in one layer: 16 KiB for the 7B in FP16.

    Raises InputError when that is not a multiple of ``spec.page_align_bytes``, which bulk copies need.
    """
    size = dims.num_kv_heads * head_slice_bytes(dims, spec)
    if size % spec.page_align_bytes:
        raise InputError(
            f"a KV page of {spec.page_tokens} tokens x {dims.num_kv_heads} heads x {dims.head_dim} x {spec.value_bytes} B "
            f"is {size} bytes, not a multiple of {spec.page_align_bytes}; choose another kv.page_tokens"
        )
    return size


def kv_bytes_per_token(dims: Dims, spec: KVSpec) -> int:
    """Bytes that one token adds: K and V in every layer. 2 x 28 x 1 KiB = 56 KiB for the 7B in FP16."""
    return model.kv_bytes_per_token(dims, spec.value_bytes)


def kv_bytes(dims: Dims, spec: KVSpec, tokens: int) -> int:
    """Bytes of all pages that ``tokens`` tokens occupy; the last page counts whole."""
    return 2 * dims.num_layers * pages_for(tokens, spec.page_tokens) * page_bytes(dims, spec)
# [/arithmetic]


# [allocator]
class PageAllocator:
    """Hands out page numbers 0 to ``num_pages - 1`` and takes them back.

    The free list is a stack: the page freed last is given out first, while its bytes may still be in a
    cache. A fresh allocator hands out 0, 1, 2, ...
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = 0
        self._free: list[int] = []
        self._used: set[int] = set()
        self.grow(num_pages)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages handed out and not yet freed."""
        return len(self._used)

    def grow(self, extra: int) -> None:
        """Add ``extra`` new pages. Pages that were freed before are still handed out first."""
        new = range(self.num_pages, self.num_pages + extra)
        self._free = [*reversed(new), *self._free]
        self.num_pages += extra

    def alloc(self) -> int:
        """One page number. Raises ContextError when all are in use."""
        if not self._free:
            raise ContextError(f"no KV page is free: all {self.num_pages} are in use")
        page = self._free.pop()
        self._used.add(page)
        return page

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back, in this order: the last one named is handed out next.

        Raises ValueError for a page that is not in use (freed twice, or never handed out): two sequences
        would come to share it.
        """
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use, so it cannot be freed")
            self._used.remove(page)
            self._free.append(page)
# [/allocator]


# [block_table]
class BlockTable:
    """Which physical page holds which tokens of one sequence: ``pages[i]`` has tokens 16 i to 16 i + 15."""

    def __init__(self, page_tokens: int, pages: Iterable[int] = ()) -> None:
        self.page_tokens = page_tokens
        self.pages = list(pages)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages held now."""
        return len(self.pages) * self.page_tokens

    def locate(self, position: int) -> tuple[int, int]:
        """(page, slot) of the token at ``position``. Raises IndexError when no page holds it."""
        if not 0 <= position < self.capacity:
            raise IndexError(f"position {position} is outside the {self.capacity} tokens of {len(self.pages)} pages")
        return self.pages[position // self.page_tokens], position % self.page_tokens
# [/block_table]


class PagedKV:
    """Keys and values of one sequence in all layers, in pages allocated on demand.

    ``append`` writes rows, ``gather`` reads them back in order, ``truncate`` forgets the end. Storage is
    one pool a layer for K and one for V, each [pages, kv_heads, page_tokens, head_dim] of ``dtype``
    (FP16 unless told otherwise); pools grow by at least GROW_TOKENS tokens, never to the whole context
    at once, up to ``max_tokens`` (the model's context unless told otherwise).

    ``poison`` is for tests: every slot that holds no token is filled with NaN, so that reading one shows.
    """

    def __init__(
        self,
        dims: Dims,
        spec: KVSpec,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_tokens: int | None = None,
        *,
        poison: bool = False,
    ) -> None:
        import torch

        self.dims, self.spec = dims, spec
        self.dtype = dtype or torch.float16
        self.device = torch.device(device)
        self.max_tokens = max_tokens or dims.max_position
        self.poison = poison
        self.length = 0
        self.table = BlockTable(spec.page_tokens)
        self.allocator = PageAllocator(0)
        empty = (0, dims.num_kv_heads, spec.page_tokens, dims.head_dim)
        self.k = [torch.empty(empty, dtype=self.dtype, device=self.device) for _ in range(dims.num_layers)]
        self.v = [torch.empty(empty, dtype=self.dtype, device=self.device) for _ in range(dims.num_layers)]
        self._pages: torch.Tensor | None = None  # the block table as an index tensor; None after a change
        self._slots: tuple | None = None  # (position, count, pages, slots) of the last append of several rows

    @property
    def storage_bytes(self) -> int:
        """Bytes that the pools take now, free pages included."""
        return sum(pool.numel() * pool.element_size() for pool in (*self.k, *self.v))

    # [append]
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        """Store keys and values [n, kv_heads, head_dim] of the tokens from ``position`` on, rounded to ``dtype``.

        The first layer that reaches a new page allocates it for all layers. ``position`` may lie inside
        what is stored (rows are overwritten) or at its end, not beyond. Raises ContextError past
        ``max_tokens``, ValueError for a gap.
        """
        if not 0 <= position <= self.length:
            raise ValueError(f"append at {position} would leave a gap: {self.length} tokens are stored")
        n = k.shape[0]
        self._reserve(position + n)
        if n == 1:  # a decode step: plain integers are cheaper than index tensors
            page, slot = self.table.locate(position)
            self.k[layer][page, :, slot] = k[0]
            self.v[layer][page, :, slot] = v[0]
        else:
            pages, slots = self._locate_many(position, n)
            self.k[layer][pages, :, slots] = k.to(self.dtype)
            self.v[layer][pages, :, slots] = v.to(self.dtype)
        self.length = max(self.length, position + n)
    # [/append]

    # [gather]
    def gather(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``length`` tokens, each [length, kv_heads, head_dim] of ``dtype``.

        Only pages that hold one of these tokens are read: pages_for(length), not one more. The result is
        a copy, laid out head after head in memory, as attention wants it.
        """
        if not 0 < length <= self.length:
            raise ValueError(f"cannot gather {length} tokens: {self.length} are stored")
        index = self._page_index()[: pages_for(length, self.spec.page_tokens)]
        return self._in_order(self.k[layer], index, length), self._in_order(self.v[layer], index, length)

    @staticmethod
    def _in_order(pool: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        pages = pool.index_select(0, index)  # [n, kv_heads, page_tokens, head_dim]
        rows = pages.transpose(0, 1).flatten(1, 2)  # [kv_heads, n * page_tokens, head_dim]
        return rows[:, :length].transpose(0, 1)  # the tail of the last page is cut off here
    # [/gather]

    # [truncate]
    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens and give back every page that no longer holds one.

        The last page of the sequence is freed last-in, first-out: the page that held token ``length`` is
        the next one handed out. Raises ValueError when fewer tokens are stored.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} tokens: {self.length} are stored")
        keep = pages_for(length, self.spec.page_tokens)
        given_back = self.table.pages[keep:][::-1]
        if given_back:
            del self.table.pages[keep:]
            self.allocator.free(given_back)
            self._pages = self._slots = None
        self.length = length
        if self.poison:
            self._poison(given_back)
    # [/truncate]

    def _reserve(self, tokens: int) -> None:
        """Make the block table cover ``tokens`` tokens, growing the pools when no page is free."""
        if tokens > self.max_tokens:
            raise ContextError(f"{tokens} tokens do not fit a KV cache of {self.max_tokens} tokens")
        missing = pages_for(tokens, self.spec.page_tokens) - len(self.table.pages)
        if missing <= 0:
            return
        if missing > self.allocator.free_pages:
            self._grow(missing - self.allocator.free_pages)
        self.table.pages += [self.allocator.alloc() for _ in range(missing)]
        self._pages = self._slots = None

    # [grow]
    def _grow(self, pages: int) -> None:
        """Enlarge every pool by ``pages`` or more: at least GROW_TOKENS and half of what there is, at most to max_tokens.

        Growing by a share keeps the total copied proportional to the final size. Layer after layer, so that
        only one pool exists twice at a time.
        """
        import torch

        old = self.allocator.num_pages
        limit = pages_for(self.max_tokens, self.spec.page_tokens)
        new = min(limit, old + max(pages, GROW_TOKENS // self.spec.page_tokens, old // 2))
        with torch.inference_mode(False):  # pools must stay writable outside inference mode too
            for pools in (self.k, self.v):
                for layer, pool in enumerate(pools):
                    larger = torch.full((new, *pool.shape[1:]), float("nan") if self.poison else 0.0, dtype=self.dtype, device=self.device)
                    larger[:old] = pool
                    pools[layer] = larger
        self.allocator.grow(new - old)
    # [/grow]

    def _poison(self, pages: list[int]) -> None:
        """Fill ``pages`` and the unused tail of the last page with NaN, in all layers."""
        for pool in (*self.k, *self.v):
            pool[pages] = float("nan")
            if used := self.length % self.spec.page_tokens:
                pool[self.table.pages[-1], :, used:] = float("nan")

    def _page_index(self) -> torch.Tensor:
        """The block table as int64 [pages] on the device, remade only when pages came or went."""
        import torch

        if self._pages is None:
            self._pages = torch.tensor(self.table.pages, dtype=torch.int64, device=self.device)
        return self._pages

    def _locate_many(self, position: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, slots), int64 [n] each, of the tokens from ``position`` on; every layer asks for the same."""
        import torch

        if self._slots is None or self._slots[:2] != (position, n):
            positions = torch.arange(position, position + n, device=self.device)
            pages = self._page_index()[positions // self.spec.page_tokens]
            self._slots = (position, n, pages, positions % self.spec.page_tokens)
        return self._slots[2:]
