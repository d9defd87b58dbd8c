"""Pages, block table, allocator: arithmetic at page edges, nothing read that is not owned, nothing allocated early."""

import dataclasses
import random

import pytest
import torch

from nanoqwen import kv
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import ContextError, InputError
from nanoqwen.kv import BlockTable, PageAllocator, PagedKV

SPEC = load_settings().kv
SEVEN_B = Dims.qwen2_5_coder_7b()
DIMS = Dims(num_layers=2, hidden=256, intermediate=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab=512, max_position=8192)
EDGES = [1, 15, 16, 17, 31, 32, 33, 49]


# ------------------------------------------------------------------------------------------------------------ arithmetic


def test_sizes_of_the_7b():
    assert kv.head_slice_bytes(SEVEN_B, SPEC) == 4 * 1024
    assert kv.page_bytes(SEVEN_B, SPEC) == 16 * 1024
    assert kv.kv_bytes_per_token(SEVEN_B, SPEC) == 56 * 1024
    assert kv.kv_bytes(SEVEN_B, SPEC, 1) == kv.kv_bytes(SEVEN_B, SPEC, 16) == 16 * 56 * 1024
    assert kv.kv_bytes(SEVEN_B, SPEC, 32768) == 1792 * 2**20


@pytest.mark.parametrize(
    "tokens, pages, last",
    [(0, 0, 0), (1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16), (49, 4, 1), (511, 32, 15), (512, 32, 16), (513, 33, 1), (4096, 256, 16)],
)
def test_page_arithmetic(tokens, pages, last):
    assert kv.pages_for(tokens, 16) == pages
    assert kv.tokens_in_last_page(tokens, 16) == last
    assert kv.starts_page(tokens, 16) == (kv.pages_for(tokens + 1, 16) > pages)


def test_a_page_that_bulk_copies_cannot_move_is_refused():
    odd = dataclasses.replace(DIMS, num_kv_heads=1, num_heads=1, head_dim=2)
    with pytest.raises(InputError, match=r"is 64 bytes, not a multiple of 128"):
        kv.page_bytes(odd, SPEC)


# ------------------------------------------------------------------------------------------------- allocator, block table


def test_allocator_hands_out_in_order_then_what_was_freed_last():
    pages = PageAllocator(4)
    assert [pages.alloc() for _ in range(3)] == [0, 1, 2]
    pages.free([2, 0])
    assert (pages.free_pages, pages.used_pages) == (3, 1)
    assert [pages.alloc() for _ in range(3)] == [0, 2, 3]
    with pytest.raises(ContextError, match="all 4 are in use"):
        pages.alloc()
    pages.free([1])
    pages.grow(2)
    assert [pages.alloc() for _ in range(3)] == [1, 4, 5]


@pytest.mark.parametrize("bad", [[0, 0], [3], [7]])
def test_allocator_refuses_to_free_what_is_not_in_use(bad):
    pages = PageAllocator(4)
    pages.alloc()
    with pytest.raises(ValueError, match="is not in use"):
        pages.free(bad)


def test_block_table_locates_tokens():
    table = BlockTable(16, [7, 2, 9, 4])
    assert [table.locate(p) for p in (0, 15, 16, 47, 48)] == [(7, 0), (7, 15), (2, 0), (9, 15), (4, 0)]
    for outside in (-1, 64):
        with pytest.raises(IndexError, match="64 tokens of 4 pages"):
            table.locate(outside)


# --------------------------------------------------------------------------------------------------------------- storage


def rows(n, seed=0):
    """Random k, v of both layers, each [n, kv_heads, head_dim]; the first index says which layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, n, DIMS.num_kv_heads, DIMS.head_dim, generator=generator)


def append_all(cache, values, position=0):
    for layer in range(DIMS.num_layers):
        cache.append(layer, *values[layer], position)


def assert_holds(cache, values):
    """The cache returns exactly `values` [layer, k or v, n, kv_heads, head_dim], and so does every prefix at a page edge."""
    n = values.shape[2]
    for length in {n, *(e for e in EDGES if e < n)}:
        for layer in range(DIMS.num_layers):
            got = torch.stack(cache.gather(layer, length)).float()
            assert torch.equal(got, values[layer, :, :length])


def scrambled(**options):
    """A cache whose next pages are handed out in no particular order."""
    cache = PagedKV(DIMS, SPEC, torch.float32, poison=True, **options)
    cache._grow(1)
    taken = [cache.allocator.alloc() for _ in range(cache.allocator.num_pages)]
    cache.allocator.free(random.Random(1).sample(taken, len(taken)))
    return cache


@pytest.mark.parametrize("n", EDGES)
@pytest.mark.parametrize("step", [1, 7, 16, 64])
def test_what_goes_in_comes_out_in_order(n, step):
    cache, values = scrambled(), rows(n)
    for start in range(0, n, step):
        append_all(cache, values[:, :, start : start + step], start)
    assert_holds(cache, values)
    assert len(cache.table.pages) == cache.allocator.used_pages == kv.pages_for(n, 16)
    assert cache.table.pages != list(range(len(cache.table.pages)))


def test_fp16_is_the_default_and_rounds_once():
    cache, values = PagedKV(DIMS, SPEC), rows(20)
    append_all(cache, values)
    assert cache.gather(0, 20)[0].dtype == torch.float16
    assert_holds(cache, values.half().float())


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 17, 32, 48, 49])
def test_truncate_frees_pages_and_new_rows_replace_old_ones(keep):
    cache, values = scrambled(), rows(49)
    append_all(cache, values)
    pages = list(cache.table.pages)
    cache.truncate(keep)
    assert cache.length == keep
    assert cache.table.pages == pages[: kv.pages_for(keep, 16)]
    assert cache.allocator.used_pages == kv.pages_for(keep, 16)
    fresh = rows(30, seed=1)
    append_all(cache, fresh, keep)
    assert cache.table.pages[: len(pages)] == pages[: len(cache.table.pages)]  # last freed, first reused
    assert_holds(cache, torch.cat((values[:, :, :keep], fresh), dim=2))


def test_poison_marks_every_slot_without_a_token():
    cache = scrambled()
    append_all(cache, rows(49))
    cache.truncate(33)
    for pool in (*cache.k, *cache.v):
        finite = pool.isfinite().all(dim=-1).all(dim=1)  # [pages, slots]
        assert int(finite.sum()) == 33
        assert all(bool(finite[page, slot]) for page, slot in map(cache.table.locate, range(33)))


def test_memory_grows_with_the_sequence_and_keeps_its_content():
    cache = PagedKV(DIMS, SPEC, torch.float32, max_tokens=4096)
    assert cache.storage_bytes == 0
    values = rows(4096)
    sizes = set()
    for start in range(0, 4096, 200):
        append_all(cache, values[:, :, start : start + 200], start)
        per_token = 2 * kv.kv_bytes_per_token(DIMS, SPEC)  # FP32
        sizes.add(cache.storage_bytes)
        # Never more than a growth step, or half as much again, beyond what is in use.
        assert cache.storage_bytes <= per_token * max(start + 200 + kv.GROW_TOKENS, 1.5 * (start + 200) + 16)
    assert len(sizes) > 2
    assert cache.storage_bytes == per_token * 4096  # and never beyond the context
    assert_holds(cache, values)
    cache.truncate(0)
    append_all(cache, values[:, :, :100])
    assert cache.storage_bytes == per_token * 4096  # recycled, not allocated again


def test_a_cache_refuses_gaps_overflow_and_reading_ahead():
    cache = PagedKV(DIMS, SPEC, max_tokens=20)
    values = rows(21)
    with pytest.raises(ContextError, match="21 tokens do not fit a KV cache of 20"):
        append_all(cache, values)
    assert (cache.length, cache.table.pages) == (0, [])
    append_all(cache, values[:, :, :20])
    with pytest.raises(ValueError, match="20 are stored"):
        cache.gather(0, 21)
    cache.truncate(5)
    with pytest.raises(ValueError, match="gap"):
        cache.append(0, *values[0, :, :1], 6)
    with pytest.raises(ValueError, match="5 are stored"):
        cache.truncate(6)


def test_a_cache_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        cache = PagedKV(DIMS, SPEC, torch.float32, poison=True)
        append_all(cache, rows(20))
    cache.truncate(3)
    append_all(cache, rows(20)[:, :, 3:], 3)
    assert_holds(cache, rows(20))
