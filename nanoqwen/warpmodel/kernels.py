"""Paged attention as programs for the model: the shipped ring, the ring with one part taken out, and the kernels with the barrier bug.

``ring`` follows ``kernels/decode/paged_attention.cu`` line by line, with fewer warps and pages. (Its lone deviation: the shipped kernel has two
consumers to a page, the model as many as ``warps_a_page`` says, one where nothing else is asked for.)
The others are what the original story tells of, in several arrangements, because the story was told in two ways that contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanoqwen import kv
from nanoqwen.config import Dims, load_settings
from nanoqwen.warpmodel.machine import Arrive, ArriveExpect, Copy, Kernel, Operation, Read, Sync, SyncWarp, Wait, Write

#: Bytes of one bulk copy: K or V of one page and KV head of the 7B.
SLICE_BYTES = kv.head_slice_bytes(Dims.qwen2_5_coder_7b(), load_settings().kv)

PRODUCER = "producer"


def _consumer(number: int) -> str:
    return f"consumer {number}"


def _buffer(kind: str, stage: int, warp: int) -> str:
    return f"{kind}[{stage}][{warp}]"


# [ring]
def ring(
    pages: int, stages: int = 3, consumers: int = 2, *, warps_a_page: int = 1,
    empty_barrier: bool = True, parity_slip: int = 0, byte_slip: int = 0, join_barrier: bool = True, wait_full: bool = True,
) -> Kernel:  # fmt: skip
    """The shipped paged-attention kernel for ``pages`` pages: a stage holds one, K and V, for each ``warps_a_page`` consumers.

    When a stage's pages do not divide ``pages``, the last round is partial. Raises ValueError when consumers are left over. The other
    keyword arguments break it: without the empty barriers; with another parity in the consumers' wait; with ``byte_slip`` bytes more (or
    fewer) announced than copied; without the ``__syncthreads`` between the loop and the reuse of the pages' memory; or with consumers that do
    not wait for the bytes.
    """
    together, left_over = divmod(consumers, warps_a_page)  # pages of a stage
    if left_over:
        raise ValueError(f"{consumers} consumers do not divide into groups of {warps_a_page}")
    rounds = -(-pages // together)

    def count(turn: int) -> int:
        return min(together, pages - turn * together)

    def producer() -> Iterator[Operation]:
        yield Sync()  # the barriers are initialised
        for turn in range(rounds):
            stage, parity = turn % stages, turn // stages % 2
            if empty_barrier:
                yield Wait(f"empty[{stage}]", parity ^ 1)
            yield ArriveExpect(f"full[{stage}]", count(turn) * 2 * SLICE_BYTES + byte_slip)
            for place in range(count(turn)):
                for kind in "KV":
                    yield Copy(_buffer(kind, stage, place), f"{kind} of page {turn * together + place}", SLICE_BYTES, f"full[{stage}]")
        yield from _join(None, consumers, join_barrier)

    def consumer(warp: int) -> Iterator[Operation]:
        yield Sync()
        for turn in range(rounds):
            stage, parity = turn % stages, turn // stages % 2
            if wait_full:
                yield Wait(f"full[{stage}]", parity ^ parity_slip)
            place = warp // warps_a_page
            if place < count(turn):
                for kind in "KV":
                    yield Read(_buffer(kind, stage, place), f"{kind} of page {turn * together + place}")
            yield SyncWarp()
            if empty_barrier:
                yield Arrive(f"empty[{stage}]")
        yield from _join(warp, consumers, join_barrier)

    barriers = {f"full[{i}]": 1 for i in range(stages)} | {f"empty[{i}]": consumers for i in range(stages)}
    warps = {PRODUCER: producer()} | {_consumer(i): consumer(i) for i in range(consumers)}
    shared = f", {warps_a_page} to a page" if warps_a_page > 1 else ""
    return Kernel(f"ring of {stages}, {pages} pages, {consumers} consumers{shared}", warps, barriers)
# [/ring]


# [join]
def _join(warp: int | None, consumers: int, barrier: bool = True) -> Iterator[Operation]:
    """The end of the kernel for one warp (None: the producer): every warp reads the consumers' sums.

    The sums lie over the pages, one slice a warp, from the first slice of stage 0 on: as in the shipped kernel's union.
    """
    places = [_buffer("KV"[i % 2], 0, i // 2) for i in range(consumers)]
    if barrier:
        yield Sync()
    if warp is not None:
        yield Write(places[warp], f"sum of {_consumer(warp)}")
    yield Sync()
    for i, place in enumerate(places):
        yield Read(place, f"sum of {_consumer(i)}")
# [/join]


# [in_branch]
#: What the other warps do while the producer stands at a ``__syncthreads()`` inside its own branch.
ARRANGEMENTS = {
    "none": "the consumers have no barrier of their own",
    "join": "the consumers meet at a __syncthreads() later, before they join their sums; the producer comes there too",
    "named": "the consumers meet at a named barrier of their own (bar.sync 1)",
    "signal": "the consumers wait for a signal that the producer gives after its __syncthreads()",
}


def in_branch(arrangement: str = "join", consumers: int = 2) -> Kernel:
    """The bug: ``__syncthreads()`` inside ``if (warp_id == 0)``, meant to tell the consumers that the page is there. One page.

    The producer does wait for the bytes, so a barrier that everybody reached would have made it right. See ARRANGEMENTS for what else the
    kernel does; an unknown one raises ValueError.
    """
    if arrangement not in ARRANGEMENTS:
        raise ValueError(f"no arrangement is called {arrangement!r}; there are: {', '.join(ARRANGEMENTS)}")

    def producer() -> Iterator[Operation]:
        yield Sync()  # the mbarriers are initialised: all warps come here
        yield from _fetch("landed")
        yield Wait("landed", 0)
        yield Sync()  # inside the branch: the consumers do not come here
        if arrangement == "signal":
            yield Arrive("ready")
        if arrangement == "join":
            yield Sync()

    def consumer() -> Iterator[Operation]:
        yield Sync()
        if arrangement == "signal":
            yield Wait("ready", 0)
        yield from _use()
        if arrangement == "join":
            yield Sync()
        if arrangement == "named":
            yield Sync(1, consumers)

    warps = {PRODUCER: producer()} | {_consumer(i): consumer() for i in range(consumers)}
    return Kernel(f"__syncthreads in a branch ({arrangement})", warps, {"landed": 1, "ready": 1})
# [/in_branch]


# [tail_branch]
def tail_branch(tokens: int, page_tokens: int = 2) -> Kernel:
    """A barrier in a branch that every warp takes until the last page is partial: then some do not.

    Each token of a page has its own consumer. Once a page, all warps meet before it is used, and again before it is replaced; but the second
    ``__syncthreads()`` stands inside ``if (token < length)``. With ``tokens`` a multiple of ``page_tokens`` everybody takes the branch. This
    is one way in which 48 tokens are right and 49 are wrong; whether it was the original's way, the story does not tell.
    """
    consumers = page_tokens
    pages = kv.pages_for(tokens, page_tokens)

    def producer() -> Iterator[Operation]:
        yield Sync()
        for page in range(pages):
            yield ArriveExpect("landed", 2 * SLICE_BYTES)
            for kind in "KV":
                yield Copy(_buffer(kind, 0, 0), f"{kind} of page {page}", SLICE_BYTES, "landed")
            yield Wait("landed", page % 2)
            yield Sync()
            yield Sync()
        yield from _join(None, consumers)

    def consumer(warp: int) -> Iterator[Operation]:
        yield Sync()
        for page in range(pages):
            yield Sync()
            if page * page_tokens + warp < tokens:
                for kind in "KV":
                    yield Read(_buffer(kind, 0, 0), f"{kind} of page {page}")
                yield Sync()  # inside the branch
        yield from _join(warp, consumers)

    warps = {PRODUCER: producer()} | {_consumer(i): consumer(i) for i in range(consumers)}
    return Kernel(f"__syncthreads in the tail's branch, {tokens} tokens in pages of {page_tokens}", warps, {"landed": 1})
# [/tail_branch]


# [fences]
def fences_only(wait: str = "nobody", consumers: int = 2) -> Kernel:
    """The first repair that the story gives: ``__syncwarp()`` after each copy, ``__syncthreads()`` at top level. One page.

    ``wait`` says who also waits for the bytes: "nobody", as told; "producer", before the barrier; or "everybody", after it.
    """
    if wait not in ("nobody", "producer", "everybody"):
        raise ValueError(f"wait is {wait!r}; it may be nobody, producer or everybody")

    def warp(body: Iterator[Operation] | None) -> Iterator[Operation]:
        yield Sync()  # the mbarrier is initialised
        if body is not None:
            yield from body
        yield Sync()
        if wait == "everybody":
            yield Wait("landed", 0)
        if body is None:
            yield from _use()

    def issue() -> Iterator[Operation]:
        yield from _fetch("landed")
        if wait == "producer":
            yield Wait("landed", 0)

    warps = {PRODUCER: warp(issue())} | {_consumer(i): warp(None) for i in range(consumers)}
    return Kernel(f"__syncwarp and __syncthreads, {wait} waits for the bytes", warps, {"landed": 1})
# [/fences]


def _fetch(mbarrier: str) -> Iterator[Operation]:
    """Issue the copies of K and V of page 0."""
    yield ArriveExpect(mbarrier, 2 * SLICE_BYTES)
    for kind in "KV":
        yield Copy(kind, f"{kind} of page 0", SLICE_BYTES, mbarrier)
        yield SyncWarp()


def _use() -> Iterator[Operation]:
    """Read K and V of page 0."""
    for kind in "KV":
        yield Read(kind, f"{kind} of page 0")
