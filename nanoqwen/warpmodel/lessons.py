"""The kernels of ``kernels/lessons/barriers.cu`` as programs for the model, under the same names and line by line.

Smaller, with the same barriers: two consumers, pages of four tokens, token t of a page for consumer t % 2, one cell for K and V of a page.
``branch_lane`` is missing: a warp is one thing here, and that kernel splits one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoqwen import kv
from nanoqwen.warpmodel.explore import Report
from nanoqwen.warpmodel.kernels import PRODUCER, SLICE_BYTES
from nanoqwen.warpmodel.machine import Arrive, ArriveExpect, Copy, Kernel, Operation, Read, Sync, SyncWarp, Wait, Write

CONSUMERS, PAGE_TOKENS = 2, 4


# [warp]
@dataclass(frozen=True)
class Warp:
    """One warp of a lesson, and the pieces of which they are made. ``consumer`` is -1 for the producer."""

    consumer: int
    tokens: int

    @property
    def producer(self) -> bool:
        return self.consumer < 0

    @property
    def pages(self) -> int:
        return kv.pages_for(self.tokens, PAGE_TOKENS)

    @property
    def full_pages(self) -> int:
        return self.tokens // PAGE_TOKENS

    def has_token(self, page: int) -> bool:
        return page * PAGE_TOKENS + self.consumer < self.tokens

    def fetch(self, page: int) -> Iterator[Operation]:
        yield ArriveExpect(f"landed {page}", 2 * SLICE_BYTES)
        yield Copy(f"page {page}", f"page {page}", 2 * SLICE_BYTES, f"landed {page}")
        yield SyncWarp()

    def wait_for_bytes(self, page: int) -> Iterator[Operation]:
        yield Wait(f"landed {page}", 0)

    def use(self, page: int) -> Iterator[Operation]:
        if self.has_token(page):
            yield Read(f"page {page}", f"page {page}")

    def publish(self) -> Iterator[Operation]:
        yield Write(f"sum {self.consumer}", "sum")

    def combine(self) -> Iterator[Operation]:
        for other in range(CONSUMERS):
            yield Read(f"sum {other}", "sum")

    def join(self) -> Iterator[Operation]:
        yield Sync()
        if not self.producer:
            yield from self.publish()
        yield Sync()
        yield from self.combine()

    def take_full_pages(self) -> Iterator[Operation]:
        for page in range(self.full_pages):
            if self.producer:
                yield from self.fetch(page)
                yield from self.wait_for_bytes(page)
            yield Sync()
            if not self.producer:
                yield from self.use(page)
# [/warp]


def right(w: Warp) -> Iterator[Operation]:
    for page in range(w.pages):
        yield from w.fetch(page) if w.producer else w.wait_for_bytes(page)
        if not w.producer:
            yield from w.use(page)
    yield from w.join()


def _fetch_and_sync(w: Warp, page: int) -> Iterator[Operation]:
    """The producer's branch of the story: fetch, wait for the bytes, and the barrier where the others do not come."""
    yield from w.fetch(page)
    yield from w.wait_for_bytes(page)
    yield Sync()


# [branch_join]
def branch_join(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        if w.producer:
            yield from w.fetch(tail)
            yield from w.wait_for_bytes(tail)
            yield Sync()  # the bug
        else:
            yield from w.use(tail)
    yield from w.join()
# [/branch_join]


def branch_exit(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        yield from _fetch_and_sync(w, tail) if w.producer else w.use(tail)


def branch_named(w: Warp) -> Iterator[Operation]:
    yield from branch_exit(w)
    if not w.producer:
        yield from w.publish()
        yield Sync(1, CONSUMERS)
        yield from w.combine()


def branch_signal(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        if w.producer:
            yield from _fetch_and_sync(w, tail)
            yield Arrive("ready")
        else:
            yield Wait("ready", 0)
            yield from w.use(tail)
    yield from w.join()


def branch_two(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        if w.producer:
            yield from _fetch_and_sync(w, tail)
        yield Sync(1, 1 + CONSUMERS)
        if not w.producer:
            yield from w.use(tail)
    yield from w.join()


def branch_each(w: Warp) -> Iterator[Operation]:
    for page in range(w.pages):
        if w.producer:
            yield from w.fetch(page)
            yield Sync()
        else:
            yield from w.wait_for_bytes(page)
            yield from w.use(page)
    yield from w.join()


def paired(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        if w.producer:
            yield from _fetch_and_sync(w, tail)
        else:
            yield Sync()
            yield from w.use(tail)
    yield from w.join()


def uneven(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages:
        if w.producer:
            yield from _fetch_and_sync(w, tail)
        else:
            yield Sync()
            yield from w.use(tail)
            yield Sync()
    yield from w.join()


def token_branch(w: Warp) -> Iterator[Operation]:
    for page in range(w.pages):
        if w.producer:
            yield from w.fetch(page)
            yield from w.wait_for_bytes(page)
        yield Sync()
        if w.producer or w.has_token(page):
            if not w.producer:
                yield from w.use(page)
            yield Sync()
    yield from w.join()


def leavers(w: Warp) -> Iterator[Operation]:
    yield from w.take_full_pages()
    tail = w.full_pages
    if tail < w.pages and (w.producer or w.has_token(tail)):
        if w.producer:
            yield from w.fetch(tail)
            yield from w.wait_for_bytes(tail)
        yield Sync()
        if not w.producer:
            yield from w.use(tail)


def fences(w: Warp, wait: bool = False) -> Iterator[Operation]:
    for page in range(w.pages):
        if w.producer:
            yield from w.fetch(page)
            if wait:
                yield from w.wait_for_bytes(page)
        yield Sync()
        if not w.producer:
            yield from w.use(page)
    yield from w.join()


def fences_wait(w: Warp) -> Iterator[Operation]:
    yield from fences(w, wait=True)


#: By the name that the kernel has in barriers.cu.
LESSONS = {
    lesson.__name__: lesson
    for lesson in (
        right, branch_join, branch_exit, branch_named, branch_signal, branch_two, branch_each, paired, uneven, token_branch, leavers,
        fences, fences_wait,
    )
}  # fmt: skip


def lesson(name: str, tokens: int) -> Kernel:
    """The lesson ``name`` for ``tokens`` tokens in pages of four. Raises ValueError for a name that is not in LESSONS."""
    if name not in LESSONS:
        raise ValueError(f"no lesson is called {name!r}; there are: {', '.join(LESSONS)}")

    def program(consumer: int) -> Iterator[Operation]:
        yield Sync()  # the mbarriers are initialised
        yield from LESSONS[name](Warp(consumer, tokens))

    warps = {PRODUCER: program(-1)} | {f"consumer {i}": program(i) for i in range(CONSUMERS)}
    return Kernel(f"{name}, {tokens} tokens", warps, {f"landed {page}": 1 for page in range(kv.pages_for(tokens, PAGE_TOKENS))} | {"ready": 1})


def verdict(report: Report) -> str:
    """What a search says of a kernel: "right", "hangs" (in every schedule), "reads too early" (in some) or "fails" in another way."""
    if report.proved:
        return "right"
    found = set(report.schedules)
    if found == {"deadlock"} and report.clean is None:
        return "hangs"
    return "reads too early" if found <= {"early", "in flight", "overwritten"} and report.clean is not None else "fails"
