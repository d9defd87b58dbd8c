"""One CTA as a machine small enough to explore completely: warps, barriers, and copies that land whenever they like.

A warp is a generator that yields operations. Its control flow depends on no value it reads, so the generator is run out once and a
warp becomes a list of operations and a program counter. All state is then a small tuple (``State``), and a step is a pure function
from one state to the next.

What the model assumes:

* A warp is one thing: its 32 lanes move together. ``SyncWarp`` therefore does nothing here. On the card it orders the lanes of its own
  warp, and that is all it does.
* Shared memory is sequentially consistent, one cell for each buffer, written whole. Reordering of plain reads and writes, and fences
  between the two memory proxies, are outside the model.
* A bulk copy is issued in one step and lands in a later one, at any time. Its bytes count on its mbarrier in the moment they land.
* ``Sync`` counts arrivals **for each barrier number, one a warp, wherever in the program they come from**. Two ``__syncthreads()`` in two
  branches are the same barrier 0, and arrivals at them add up. Without a count the barrier waits for all warps that have not exited. What
  an in-branch ``__syncthreads()`` does here follows from this one rule and from the other barriers of the kernel. CUDA calls it undefined;
  the rule is what Hopper is believed to do, and chapter 05 compares it with a card, kernel by kernel.
* There is no clock: the model tells which schedules exist, not which are likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Union


# [operations]
@dataclass(frozen=True)
class Read:
    """Read a cell of shared memory; ``expect`` is the value that a correct kernel finds there."""

    cell: str
    expect: str


@dataclass(frozen=True)
class Write:
    cell: str
    value: str


@dataclass(frozen=True)
class SyncWarp:
    """``__syncwarp()``: orders the lanes of this warp. It waits for no other warp and for no copy."""


@dataclass(frozen=True)
class Sync:
    """``bar.sync barrier, 32 * warps``: arrive and wait. ``Sync()`` is ``__syncthreads()``: barrier 0, all warps that still run."""

    barrier: int = 0
    warps: int | None = None


@dataclass(frozen=True)
class SyncArrive:
    """``bar.arrive barrier, 32 * warps``: arrive and go on."""

    barrier: int
    warps: int


@dataclass(frozen=True)
class Arrive:
    """``mbarrier.arrive``: one arrival."""

    mbarrier: str


@dataclass(frozen=True)
class ArriveExpect:
    """``mbarrier.arrive.expect_tx``: one arrival, and ``nbytes`` more that must land before the phase can end."""

    mbarrier: str
    nbytes: int


@dataclass(frozen=True)
class Wait:
    """A loop around ``mbarrier.try_wait.parity``: blocks until the barrier is no longer in a phase of this parity."""

    mbarrier: str
    parity: int


@dataclass(frozen=True)
class Copy:
    """``cp.async.bulk``: returns at once. ``value`` and its ``nbytes`` land in ``cell`` later and are then taken off the mbarrier's count."""

    cell: str
    value: str
    nbytes: int
    mbarrier: str | None = None


@dataclass(frozen=True)
class Exit:
    """The end of a warp; appended to every program."""
# [/operations]


Operation = Union[Read, Write, SyncWarp, Sync, SyncArrive, Arrive, ArriveExpect, Wait, Copy, Exit]

#: What a cell holds before anything was written to it.
OLD = "old"
#: Who takes the step in which a copy lands.
COPY_ENGINE = "copy engine"


class Kernel:
    """A program for each warp, and the mbarriers with the arrivals that complete a phase of each (initialised before the first step)."""

    def __init__(self, name: str, warps: Mapping[str, Iterable[Operation]], mbarriers: Mapping[str, int] | None = None) -> None:
        self.name = name
        self.warps = tuple(warps)
        self.programs = tuple((*operations, Exit()) for operations in warps.values())
        self.arrivals = dict(mbarriers or {})
        used = [op for program in self.programs for op in program]
        self.cells = tuple(sorted({op.cell for op in used if isinstance(op, (Read, Write, Copy))}))
        self.barriers = tuple(sorted({op.barrier for op in used if isinstance(op, (Sync, SyncArrive))}))
        unknown = {op.mbarrier for op in used if isinstance(op, (Arrive, ArriveExpect, Wait, Copy))} - {None, *self.arrivals}
        if unknown:
            raise ValueError(f"kernel {name!r} uses an mbarrier that is not initialised: {', '.join(sorted(unknown))}")


class MBarrier(NamedTuple):
    """Phase bit, arrivals still pending, bytes still on their way."""

    phase: int
    pending: int
    nbytes: int


class Bar(NamedTuple):
    """A barrier of ``bar.sync``: arrivals so far, and the warps that wait at it."""

    arrived: int = 0
    waiting: frozenset[int] = frozenset()


# [state]
class State(NamedTuple):
    """Everything that decides what can happen next. ``flights`` are copies issued and not landed, as (warp, position in its program)."""

    counters: tuple[int, ...]
    cells: tuple[str, ...]
    bars: tuple[Bar, ...]
    mbarriers: tuple[MBarrier, ...]
    flights: tuple[tuple[int, int], ...]
# [/state]


class Event(NamedTuple):
    """One step: warp ``warp`` executes operation ``at`` of its program, or, with ``lands``, a copy that it issued there lands."""

    warp: int
    at: int
    lands: bool = False


class Fault(Exception):
    """A step that a correct kernel never takes; ``kind`` is "wrong read", "overrun" or "late copy"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Machine:
    """The rules: which events a state allows, and what each leads to."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._cell = {name: i for i, name in enumerate(kernel.cells)}
        self._bar = {number: i for i, number in enumerate(kernel.barriers)}
        self._mbarrier = {name: i for i, name in enumerate(kernel.arrivals)}
        self._arrivals = tuple(kernel.arrivals.values())

    def start(self) -> State:
        kernel = self.kernel
        return State(
            (0,) * len(kernel.programs),
            (OLD,) * len(kernel.cells),
            (Bar(),) * len(kernel.barriers),
            tuple(MBarrier(0, count, 0) for count in self._arrivals),
            (),
        )

    def operation(self, event: Event) -> Operation:
        return self.kernel.programs[event.warp][event.at]

    def actor(self, event: Event) -> str:
        """Whose step it is: the warp's name, or COPY_ENGINE when a copy lands."""
        return COPY_ENGINE if event.lands else self.kernel.warps[event.warp]

    def flights(self, state: State) -> list[Event]:
        """The landings that are still to come."""
        return [Event(warp, at, lands=True) for warp, at in state.flights]

    def opened(self, before: State, after: State) -> tuple[str, ...]:
        """Names of the barriers that the step from ``before`` to ``after`` completed (of a ``Sync`` of one warp alone, none)."""
        released = [f"barrier {n}" for n, a, b in zip(self.kernel.barriers, before.bars, after.bars) if a.arrived and not b.arrived]
        flipped = [name for name, a, b in zip(self.kernel.arrivals, before.mbarriers, after.mbarriers) if a.phase != b.phase]
        return (*released, *flipped)

    def exited(self, state: State) -> list[bool]:
        return [counter == len(program) for counter, program in zip(state.counters, self.kernel.programs)]

    def finished(self, state: State) -> bool:
        return all(self.exited(state)) and not state.flights

    # [enabled]
    def enabled(self, state: State) -> Iterator[Event]:
        """Every event that may come next: any warp that is not blocked takes a step, or any copy in flight lands."""
        blocked = set().union(*(bar.waiting for bar in state.bars))
        for warp, (counter, program) in enumerate(zip(state.counters, self.kernel.programs)):
            if counter == len(program) or warp in blocked:
                continue
            op = program[counter]
            if isinstance(op, Wait) and state.mbarriers[self._mbarrier[op.mbarrier]].phase == op.parity:
                continue
            yield Event(warp, counter)
        yield from self.flights(state)
    # [/enabled]

    # [step]
    def step(self, state: State, event: Event) -> State:
        """The state after ``event``. Raises Fault when it is one that a correct kernel never takes."""
        op = self.operation(event)
        if event.lands:
            return self._land(state, event, op)
        advanced = state._replace(counters=_put(state.counters, event.warp, event.at + 1))
        if isinstance(op, Read):
            found = state.cells[self._cell[op.cell]]
            if found != op.expect:
                raise Fault("wrong read", f"reads {found!r} in {op.cell} where {op.expect!r} should be")
            return advanced
        if isinstance(op, Write):
            return advanced._replace(cells=_put(state.cells, self._cell[op.cell], op.value))
        if isinstance(op, Copy):
            return advanced._replace(flights=tuple(sorted((*state.flights, (event.warp, event.at)))))
        if isinstance(op, Sync):
            index = self._bar[op.barrier]
            bar = state.bars[index]
            bar = Bar(bar.arrived + 1, bar.waiting | {event.warp})
            return self._release(state._replace(bars=_put(state.bars, index, bar)), index, op.warps)
        if isinstance(op, SyncArrive):
            index = self._bar[op.barrier]
            bar = state.bars[index]
            return self._release(advanced._replace(bars=_put(state.bars, index, bar._replace(arrived=bar.arrived + 1))), index, op.warps)
        if isinstance(op, (Arrive, ArriveExpect)):
            return self._arrive(advanced, op.mbarrier, op.nbytes if isinstance(op, ArriveExpect) else 0)
        if isinstance(op, Exit):
            return self._exit(advanced)
        return advanced  # SyncWarp, and a Wait whose phase has ended
    # [/step]

    # [barriers]
    def _release(self, state: State, index: int, warps: int | None) -> State:
        """Let the waiting warps of a barrier go on, if enough have arrived: ``warps``, or all that have not exited."""
        bar = state.bars[index]
        needed = warps if warps is not None else self.exited(state).count(False)
        if bar.arrived < needed:
            return state
        counters = tuple(counter + (warp in bar.waiting) for warp, counter in enumerate(state.counters))
        return state._replace(counters=counters, bars=_put(state.bars, index, Bar()))

    def _exit(self, state: State) -> State:
        """A warp is gone: a barrier without a count now waits for one warp fewer."""
        for index, bar in enumerate(state.bars):
            if bar.waiting and all(self._at(state, warp).warps is None for warp in bar.waiting):
                state = self._release(state, index, None)
        return state

    def _at(self, state: State, warp: int) -> Sync:
        return self.kernel.programs[warp][state.counters[warp]]

    def _arrive(self, state: State, name: str, nbytes: int) -> State:
        index = self._mbarrier[name]
        phase, pending, coming = state.mbarriers[index]
        if pending == 0:
            raise Fault("overrun", f"arrives at {name}, whose phase has had all its arrivals and still waits for {coming} bytes")
        return self._flip(state, index, MBarrier(phase, pending - 1, coming + nbytes))

    def _land(self, state: State, event: Event, op: Copy) -> State:
        if all(self.exited(state)):
            raise Fault("late copy", f"{op.value!r} lands in {op.cell} after the last warp has exited")
        flights = tuple(flight for flight in state.flights if flight != (event.warp, event.at))
        state = state._replace(cells=_put(state.cells, self._cell[op.cell], op.value), flights=flights)
        if op.mbarrier is None:
            return state
        index = self._mbarrier[op.mbarrier]
        phase, pending, coming = state.mbarriers[index]
        return self._flip(state, index, MBarrier(phase, pending, coming - op.nbytes))

    def _flip(self, state: State, index: int, now: MBarrier) -> State:
        """Store an mbarrier; its phase ends when no arrival is pending and no byte is on its way."""
        if now.pending == 0 and now.nbytes == 0:
            now = MBarrier(now.phase ^ 1, self._arrivals[index], 0)
        return state._replace(mbarriers=_put(state.mbarriers, index, now))
    # [/barriers]


def _put(values: tuple, index: int, value) -> tuple:
    """``values`` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])
