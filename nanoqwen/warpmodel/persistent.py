"""The persistent decoder's ring as programs for the model: a producer that never stops, pairs of consumer warps, a publisher.

They follow ``kernels/persistent/`` (stream.cuh, products.cuh, consume.cuh, publish.cuh, attend.cuh) with one or two pairs of warps where the kernel has seven, and with
few units. What the kernel waits for outside of its CTA is not in the model: a stage's x comes from all CTAs, and here the publisher alone says
``go`` when the stage before has been added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanoqwen.config import load_settings
from nanoqwen.cuda.constants import BUNDLE, int4_block_bytes
from nanoqwen.warpmodel.machine import Arrive, ArriveExpect, Copy, Kernel, Operation, Read, Sync, SyncWarp, Wait, Write

#: Bytes of one unit: a bundle of blocks of INT4 weights.
UNIT_BYTES = BUNDLE * int4_block_bytes(load_settings().quant.group)

PRODUCER, PUBLISHER = "producer", "publisher"


def _value(unit: int) -> str:
    return f"unit {unit}"


# [ask]
def _ask(unit: int, buffers: int, ahead: int = 1) -> Iterator[Operation]:
    """The producer's part in one unit: no more than ``ahead`` units in flight, nobody who still reads the buffer, then the copy."""
    b, parity = unit % buffers, unit // buffers % 2
    if unit >= ahead:
        yield Wait(f"full[{(unit - ahead) % buffers}]", (unit - ahead) // buffers % 2)
    yield Wait(f"empty[{b}]", parity ^ 1)
    yield ArriveExpect(f"full[{b}]", UNIT_BYTES)
    yield Copy(f"units[{b}]", _value(unit), UNIT_BYTES, f"full[{b}]")


def _take(unit: int, buffers: int, early: bool = False) -> Iterator[Operation]:
    """A consumer warp's part: its blocks of the unit into registers. ``early``: it gives the buffer back before it has read."""
    b, parity = unit % buffers, unit // buffers % 2
    yield Wait(f"full[{b}]", parity)
    if early:
        yield Arrive(f"empty[{b}]")
    yield Read(f"units[{b}]", _value(unit))
    yield SyncWarp()
    if not early:
        yield Arrive(f"empty[{b}]")
# [/ask]


# [ring]
def ring_of_units(
    stages: Sequence[int] = (2, 1), buffers: int = 2, tile_ring: int = 2, hold: int = 1, *,
    pairs: int = 1, warps: int = 2, ahead: int = 1, early: bool = False, releases: int | None = None, wait_tile: bool = True,
) -> Kernel:  # fmt: skip
    """A CTA that goes through ``stages`` of so many row tiles in a ring of ``buffers`` units and one of ``tile_ring`` tiles.

    A tile is a unit for each of ``pairs`` pairs, which have ``warps`` warps each (two in the kernel). ``hold`` units of a stage are taken into
    registers before its x is there; at most ``ahead`` units are in flight. The other keyword arguments break it: buffers given back before they
    are read; buffers free after ``releases`` arrivals; sums left without a look whether the publisher has added those before.
    """
    first = [sum(stages[:i]) for i in range(len(stages) + 1)]  # tiles
    names = [f"warp {i}" for i in range(pairs * warps)]

    def producer() -> Iterator[Operation]:
        for unit in range(first[-1] * pairs):  # it knows nothing of stages
            yield from _ask(unit, buffers, ahead)

    def consumer(warp: int) -> Iterator[Operation]:
        for stage in range(len(stages)):
            tiles = range(first[stage], first[stage + 1])
            units = [tile * pairs + warp // warps for tile in tiles]  # its pair's
            for unit in units[:hold]:
                yield from _take(unit, buffers, early)
            yield Wait("go", stage % 2)  # x is there
            for tile, later in zip(tiles, [*units[hold:], *[None] * hold]):
                if later is not None:
                    yield from _take(later, buffers, early)
                slot, parity = tile % tile_ring, tile // tile_ring % 2
                if wait_tile:
                    yield Wait(f"tile_empty[{slot}]", parity ^ 1)
                yield Write(f"sums[{slot}][{warp}]", f"tile {tile}")
                yield SyncWarp()
                yield Arrive(f"tile_full[{slot}]")

    def publisher() -> Iterator[Operation]:
        for stage in range(len(stages)):
            yield Arrive("go")
            for tile in range(first[stage], first[stage + 1]):
                slot, parity = tile % tile_ring, tile // tile_ring % 2
                yield Wait(f"tile_full[{slot}]", parity)
                for warp in range(len(names)):
                    yield Read(f"sums[{slot}][{warp}]", f"tile {tile}")
                yield SyncWarp()
                yield Arrive(f"tile_empty[{slot}]")

    programs = {PRODUCER: producer(), **{name: consumer(i) for i, name in enumerate(names)}, PUBLISHER: publisher()}
    barriers = {f"full[{i}]": 1 for i in range(buffers)} | {f"empty[{i}]": releases or warps for i in range(buffers)} | {"go": 1}
    barriers |= {f"tile_full[{i}]": len(names) for i in range(tile_ring)} | {f"tile_empty[{i}]": 1 for i in range(tile_ring)}
    who = f"{pairs} pair of {warps}" if pairs == 1 else f"{pairs} pairs of {warps}"
    return Kernel(f"{first[-1] * pairs} units in a ring of {buffers}, {ahead} in flight, {who}, {len(stages)} stage{'s' * (len(stages) > 1)}", programs, barriers)
# [/ring]


# [tail]
def pages_in_ring(pages: int, buffers: int = 2, *, tail_first: bool = True) -> Kernel:
    """Attention's units in the same ring, a page each. The last page has the token's own row, which the consumers put into its copy first of all.

    ``tail_first``: the last page is asked for before the others, as in the kernel; otherwise in the order of the text.
    """
    order = [pages - 1, *range(pages - 1)] if tail_first else list(range(pages))
    tail = order.index(pages - 1)

    def producer() -> Iterator[Operation]:
        for unit in range(pages):
            yield from _ask(unit, buffers)

    def consumer(warp: int) -> Iterator[Operation]:
        b, parity = tail % buffers, tail // buffers % 2
        if warp == 0:
            yield Wait(f"full[{b}]", parity)
            yield Write(f"units[{b}]", "with its row")
        yield Sync(1, 2)  # the row is in place before any page is used
        for unit in range(pages):
            b, parity = unit % buffers, unit // buffers % 2
            yield Wait(f"full[{b}]", parity)
            yield Read(f"units[{b}]", "with its row" if unit == tail else _value(unit))
            yield SyncWarp()
            yield Arrive(f"empty[{b}]")

    warps = {PRODUCER: producer(), **{f"warp {i}": consumer(i) for i in range(2)}}
    barriers = {f"full[{i}]": 1 for i in range(buffers)} | {f"empty[{i}]": 2 for i in range(buffers)}
    return Kernel(f"{pages} pages in a ring of {buffers}, the last {'first' if tail_first else 'last'}", warps, barriers)
# [/tail]
