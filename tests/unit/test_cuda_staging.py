"""Staged copies to the card, with a card made of numpy: every byte arrives, no buffer is filled too early, errors come out."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from nanoqwen.cuda.staging import Stager


class SlowCard:
    """Copies late: only when an event is waited for, or at the end. A buffer that is filled again too early shows as wrong bytes."""

    def __init__(self) -> None:
        self.lock, self.streams, self.released, self.most = threading.Lock(), [], 0, 0

    def pinned(self, nbytes):
        return np.zeros(nbytes, dtype=np.uint8)

    def stream(self):
        return "the current stream"

    def event(self):
        return SimpleNamespace(copies=[])

    def copy(self, out, offset, source, stream, event):
        with self.lock:
            self.streams.append(stream)
            self.most = max(self.most, source.nbytes)
        event.copies.append((out, offset, source))

    def wait(self, event):
        time.sleep(1e-4)
        while event.copies:
            out, offset, source = event.copies.pop()
            out.reshape(-1).view(np.uint8)[offset : offset + source.nbytes] = source

    def release(self):
        self.released += 1


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (1000, 3), (1,), (4096,), (0, 4), (333, 5)]
    return [rng.integers(0, 2**16, shape, dtype=np.uint16) for shape in shapes] + [rng.random((50, 60)).astype(np.float32)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_every_byte_arrives(threads, chunk_bytes):
    card, sent = SlowCard(), arrays()
    received = [np.empty_like(a) for a in sent]
    with Stager(card, threads, chunk_bytes) as stager:
        for a, out in zip(sent, received):
            stager.send(a, out)
    assert all(np.array_equal(a, out) for a, out in zip(sent, received))
    assert card.released == 1 and set(card.streams) == {"the current stream"} and card.most <= chunk_bytes


def test_rows_of_a_larger_array_and_a_source_that_is_not_contiguous():
    source, out = np.arange(60, dtype=np.uint32).reshape(6, 10), np.zeros((9, 5), dtype=np.uint32)
    with Stager(SlowCard(), 2, 16) as stager:
        stager.send(source[:, ::2], out[2:8])
    assert np.array_equal(out[2:8], source[:, ::2]) and not out[:2].any() and not out[8:].any()


def test_when_send_returns_the_source_may_go():
    source, out = np.arange(1000, dtype=np.uint32), np.zeros(1000, dtype=np.uint32)
    with Stager(SlowCard(), 2, 64) as stager:
        stager.send(source, out)
        source[:] = 0
    assert np.array_equal(out, np.arange(1000, dtype=np.uint32))


def test_arrays_that_do_not_match_are_refused():
    with Stager(SlowCard(), 1, 64) as stager:
        for out in (np.zeros(3, np.uint32), np.zeros(4, np.float32), np.zeros((4, 2), np.uint32)[:, 0]):
            with pytest.raises(ValueError, match="cannot be copied"):
                stager.send(np.zeros(4, np.uint32), out)


def test_an_error_in_a_thread_comes_out_and_the_stager_goes_on():
    card = SlowCard()
    copy, calls = card.copy, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("an illegal memory access was encountered")
        copy(*arguments)

    card.copy = failing
    source, out = np.arange(100, dtype=np.uint32), np.zeros(100, dtype=np.uint32)
    with Stager(card, 2, 64) as stager:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            stager.send(source, out)
        assert len(calls) == 7, "the other parts were let finish"
        stager.send(source, out)
    assert np.array_equal(out, source) and card.released == 1
