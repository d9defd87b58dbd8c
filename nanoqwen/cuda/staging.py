"""Copies to the card at the speed of its bus: through pinned memory, with several copies under way at once.

A copy from ordinary memory is made by the driver in two steps, one after the other and by one thread: into a small pinned buffer of
its own, then over the bus. Here several threads fill pinned buffers (numpy copies outside Python's lock, and a mapped file is
read as it is copied), and the bus empties the ones that are full while the next are filled.

An array belongs to the stream that is current in the thread that calls ``send``: what was queued there before is done
before, what is queued there afterwards finds the data. So the rest of a program does not change.
"""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

#: Bytes of one buffer: long enough for the bus, short enough that all threads finish an array at about the same time.
CHUNK_BYTES = 2 << 20
BUFFERS_A_THREAD = 2
MOST_THREADS = 8


class Card:
    """What a ``Stager`` asks of CuPy; tests hand it another."""

    def __init__(self) -> None:
        import cupy

        self._cupy, self._device = cupy, cupy.cuda.Device()

    def pinned(self, nbytes: int) -> np.ndarray:
        """A page-locked buffer, uint8 [nbytes]."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), dtype=np.uint8, count=nbytes)

    def stream(self) -> Any:
        """The caller's current stream."""
        return self._cupy.cuda.get_current_stream()

    def event(self) -> Any:
        """Something to record behind a copy and to wait for; a wait before the first record returns at once."""
        return self._cupy.cuda.Event(block=True, disable_timing=True)

    def copy(self, out: Any, offset: int, source: np.ndarray, stream: Any, event: Any) -> None:
        """Queue ``source`` to byte ``offset`` of ``out`` on ``stream``, and ``event`` behind it. Any thread may call."""
        with self._device:
            self._cupy.cuda.runtime.memcpyAsync(out.data.ptr + offset, source.ctypes.data, source.nbytes, 1, stream.ptr)  # 1: host to device
            event.record(stream)

    def wait(self, event: Any) -> None:
        """Return when what was queued before the event is done."""
        with self._device:
            event.synchronize()

    def release(self) -> None:
        """Give pinned memory that nobody holds back to the system."""
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()


class Stager:
    """Copies arrays to the card. Use it in one thread, as a context manager or with ``finish`` at the end."""

    def __init__(self, card: Any = None, threads: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._card, self._chunk = card or Card(), chunk_bytes
        threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
        self._buffers = [(self._card.pinned(chunk_bytes), self._card.event()) for _ in range(threads * BUFFERS_A_THREAD)]
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="staging")

    def send(self, array: np.ndarray, out: Any) -> None:
        """Copy ``array`` to the device array ``out`` of the same size and type, both contiguous.

        On return the source has been read and the copies are queued on the current stream. Raises ValueError when the arrays do not
        match, and whatever went wrong in a thread.
        """
        if array.nbytes != out.nbytes or array.dtype != out.dtype or not out.flags.c_contiguous:
            raise ValueError(f"{array.dtype} {array.shape} cannot be copied to {out.dtype} {out.shape} in one piece")
        source, stream = np.ascontiguousarray(array).reshape(-1).view(np.uint8), self._card.stream()
        parts = [self._pool.submit(self._send, source[at : at + self._chunk], out, at, stream) for at in range(0, source.nbytes, self._chunk)]
        errors = [error for part in parts if (error := part.exception())]  # waits for all: none may still be at work when we raise
        if errors:
            raise errors[0]

    def _send(self, source: np.ndarray, out: Any, offset: int, stream: Any) -> None:
        buffer, event = self._free.get()
        try:
            self._card.wait(event)  # the copy that used this buffer before has left it
            np.copyto(buffer[: source.nbytes], source)
            self._card.copy(out, offset, buffer[: source.nbytes], stream, event)
        finally:
            self._free.put((buffer, event))

    def finish(self) -> None:
        """Wait until everything is on the card, then let the buffers go. The stager cannot be used afterwards."""
        self._pool.shutdown()
        try:
            for _, event in self._buffers:
                self._card.wait(event)
        finally:
            self._buffers, self._free = [], queue.SimpleQueue()
            self._card.release()

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()
