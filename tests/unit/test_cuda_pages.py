"""The host's half of the KV pages on the card, with numpy in CuPy's place, and the memory plan."""

import dataclasses

import numpy as np
import pytest

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.cuda.memory import RESERVE, check_fits, plan, weight_bytes
from nanoqwen.cuda.pages import DevicePages
from nanoqwen.errors import DeviceError
from nanoqwen.model import bytes_per_token, kv_bytes_per_token
from nanoqwen.synthetic import synthetic_dims

SEVEN, DEMO, SPEC = Dims.qwen2_5_coder_7b(), synthetic_dims("demo"), load_settings().kv


def pages(limit=4096, first=64):
    return DevicePages(DEMO, SPEC, limit, np, first_tokens=first)


def test_pages_are_taken_at_the_edges_and_nowhere_else():
    held = pages()
    taken = {tokens: held.ensure(tokens)[0] for tokens in (1, 15, 16, 17, 32, 33, 49)}
    assert {tokens for tokens, fresh in taken.items() if fresh} == {1, 17, 33, 49}
    assert held.table.pages == [0, 1, 2, 3]


def test_growing_doubles_keeps_what_is_stored_and_says_that_the_pool_moved():
    held = pages()
    held.ensure(64)
    held.pool[...] = np.arange(4, dtype=np.float16)[None, None, :, None]
    fresh, moved = held.ensure(65)
    assert fresh == [4] and moved and held.pool.shape[2] == 8
    assert np.array_equal(held.pool[3, 1, :4, 7], np.arange(4))
    assert held.ensure(66) == ([], False)


def test_the_pool_never_outgrows_the_limit():
    held = pages(limit=100)
    held.ensure(100)
    assert held.pool.shape[2] == 7 and held.allocator.free_pages == 0


def test_truncate_gives_back_whole_pages_and_reuses_the_last_first():
    held = pages()
    held.ensure(60)
    held.truncate(33)
    assert held.table.pages == [0, 1, 2]
    held.truncate(32)
    assert held.table.pages == [0, 1]
    assert held.ensure(48)[0] == [2]
    held.truncate(0)
    assert held.table.pages == [] and held.allocator.used_pages == 0


def test_rows_behind_the_last_token_are_cleared_and_no_others():
    held = pages()
    held.ensure(40)
    held.pool[...] = np.nan
    held.clear_tail(32)  # the last page is full
    assert np.isnan(held.pool).all()
    held.clear_tail(35)
    rows = held.pool.reshape(DEMO.num_layers, 2, -1, DEMO.num_kv_heads, 16, DEMO.head_dim)
    assert np.all(rows[:, :, held.table.pages[2], :, 3:] == 0) and np.isnan(rows[:, :, held.table.pages[2], :, :3]).all()
    assert np.isnan(rows[:, :, held.table.pages[1]]).all()


def test_a_pool_that_cannot_grow_hands_out_nothing(monkeypatch):
    held = pages()
    held.ensure(30)

    def full(shape, dtype):
        raise MemoryError

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(MemoryError):
        held.ensure(100)
    assert held.table.pages == [0, 1] and held.allocator.free_pages == 2 and held.pool.shape[2] == 4
    assert held.ensure(64)[0] == [2, 3]


def test_the_plan_of_the_7b_has_the_bytes_of_the_book():
    needed = plan(SEVEN, 128, LaunchShape(132), 32768, 512)
    moved = bytes_per_token(SEVEN, 128, 0)
    # The embedding is stored whole and read by the row; everything else is read once a token.
    assert needed.weights == moved["total"] - moved["embed_row"] + SEVEN.vocab * SEVEN.hidden * 2
    assert needed.kv == 32768 * kv_bytes_per_token(SEVEN)
    assert needed.workspace < 700 << 20
    tied = dataclasses.replace(SEVEN, tied=True)
    assert weight_bytes(SEVEN, 128) - weight_bytes(tied, 128) == SEVEN.vocab * SEVEN.hidden * 2


def test_a_card_that_is_too_small_for_the_context_is_told_the_largest_that_fits():
    shape = LaunchShape(132)
    needed = plan(SEVEN, 128, shape, 32768, 512)
    free = needed.total - (1 << 30)
    with pytest.raises(DeviceError, match=r"cuda has .* GB free; the weights need 5.55 GB.*largest context that fits is .* use --context (\d+)") as caught:
        check_fits(SEVEN, 128, shape, 32768, 512, free, "cuda")
    fits = int(str(caught.value).rsplit(" ", 1)[1])
    assert fits % 16 == 0
    check_fits(SEVEN, 128, shape, fits, 512, free, "cuda")
    with pytest.raises(DeviceError):
        check_fits(SEVEN, 128, shape, fits + 16, 512, free, "cuda")


def test_a_card_that_is_too_small_for_any_context_is_told_what_does_not_fit():
    needed = plan(SEVEN, 128, LaunchShape(132), 4096, 512)
    fixed = needed.total - needed.kv  # with the reserve, which is shown as workspace
    for free, words in (
        (1 << 30, "not even the weights fit"),
        (needed.weights - 1, "not even the weights fit"),
        (needed.weights, "the weights alone would fit, the workspace does not fit beside them"),
        (fixed - 1, "the weights alone would fit, the workspace does not fit beside them"),
        (fixed, "beside weights and workspace no page of 16 tokens fits"),
    ):
        with pytest.raises(DeviceError, match=f"; {words}: free some memory, or use --engine cpu$"):
            check_fits(SEVEN, 128, LaunchShape(132), 4096, 512, free, "cuda")
    assert check_fits(SEVEN, 128, LaunchShape(132), 32768, 512, 80 << 30, "cuda").total > RESERVE
