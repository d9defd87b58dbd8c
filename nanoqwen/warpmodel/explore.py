"""All interleavings of a kernel, breadth first: the shortest schedule to each fault, or the proof that there is none.

A state that was reached before is not explored again, so the search ends although the number of schedules is astronomical. It is a
proof for the kernel, sizes and rules it was given, and for nothing larger.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from nanoqwen.warpmodel.machine import COPY_ENGINE, Copy, Event, Fault, Kernel, Machine, Operation, Read, State, SyncWarp

#: What can go wrong, and what it means.
FAULTS = {
    "early": "a warp reads a buffer before the bytes it wants were written or even asked for",
    "in flight": "a warp reads a buffer while the copy of the bytes it wants is still on its way",
    "overwritten": "a warp reads a buffer whose bytes were there and have been replaced",
    "deadlock": "no warp can take a step, no copy is under way, and not all have exited",
    "overrun": "more arrivals at an mbarrier than its phase takes",
    "late copy": "a copy lands after the last warp has exited",
}


@dataclass(frozen=True)
class Step:
    """One line of a schedule.

    ``actor`` is a warp's name or COPY_ENGINE. ``opens`` names the barriers that this step completes, so that whoever waits may go on.
    ``fault`` is a key of FAULTS or "", ``note`` says what happened.
    """

    actor: str
    operation: Operation
    opens: tuple[str, ...] = ()
    fault: str = ""
    note: str = ""


@dataclass
class Report:
    """What a search found.

    ``schedules`` has a shortest schedule to each kind of fault, ``clean`` a shortest one that ends without any (None: there is none).
    ``complete`` is False when the search stopped at its limit: then the absence of a fault proves nothing.
    """

    kernel: Kernel
    states: int = 0
    steps: int = 0
    complete: bool = True
    schedules: dict[str, list[Step]] = field(default_factory=dict)
    clean: list[Step] | None = None

    @property
    def proved(self) -> bool:
        """All interleavings were seen, and none has a fault."""
        return self.complete and not self.schedules

    def __str__(self) -> str:
        said = f"{self.kernel.name}: {self.states:,} states, {self.steps:,} steps, "
        if self.schedules:
            return said + ", ".join(f"{kind} after {len(schedule)} steps" for kind, schedule in self.schedules.items())
        return said + ("no fault in any interleaving" if self.complete else "no fault so far; the search is not complete")


# [explore]
def explore(kernel: Kernel, *, reduce: bool = True, limit: int = 2_000_000) -> Report:
    """Visit every state that some schedule of ``kernel`` reaches; at most ``limit``.

    A schedule ends at its fault: what a kernel does after reading garbage is of no interest. With ``reduce``, a step that commutes with
    everything else (see ``_commutes``) is taken at once instead of being tried in every order.
    """
    machine = Machine(kernel)
    report = Report(kernel)
    start = machine.start()
    origin: Origin = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        report.states += 1
        if machine.finished(state) and report.clean is None:
            report.clean = _lines(machine, origin, state)
        events = list(machine.enabled(state))
        if not events and not machine.finished(state):
            report.schedules.setdefault("deadlock", _lines(machine, origin, state) + _stuck(machine, state))
        if reduce:
            events = [event for event in events if _commutes(machine, event)][:1] or events
        for event in events:
            report.steps += 1
            try:
                following = machine.step(state, event)
            except Fault as fault:
                kind = _kind(machine, origin, state, event, fault)
                if kind not in report.schedules:
                    last = Step(machine.actor(event), machine.operation(event), (), kind, str(fault))
                    report.schedules[kind] = [*_lines(machine, origin, state), last]
                continue
            if following in origin:
                continue
            if len(origin) >= limit:
                report.complete = False
                continue
            origin[following] = (state, event)
            queue.append(following)
    return report


def _commutes(machine: Machine, event: Event) -> bool:
    """Whether taking ``event`` first loses no fault.

    ``SyncWarp`` changes nothing but its own counter. Issuing a copy changes nothing that another warp can see: only its landing does, and
    that remains free to come at any later time, also after everything that could have come before the issue. Neither can be disabled by a
    step of someone else. (A wrong read that was "early" may be called "in flight" then. It remains a wrong read.)
    """
    return not event.lands and isinstance(machine.operation(event), (SyncWarp, Copy))
# [/explore]


#: How each state was reached first: from which state, by which event.
Origin = Dict[State, Optional[Tuple[State, Event]]]


def _path(origin: Origin, state: State) -> list[tuple[State, Event, State]]:
    """(state, event, state after it) from the start up to ``state``."""
    path = []
    while (step := origin[state]) is not None:
        path.append((*step, state))
        state = step[0]
    return path[::-1]


def _kind(machine: Machine, origin: Origin, state: State, event: Event, fault: Fault) -> str:
    """The kind of a fault; that of a wrong read depends on where the right bytes are: gone, on their way, or not asked for."""
    op = machine.operation(event)
    if not isinstance(op, Read):
        return fault.kind
    if any(copy.cell == op.cell and copy.value == op.expect for copy in map(machine.operation, machine.flights(state))):
        return "in flight"
    cell = machine.kernel.cells.index(op.cell)
    return "overwritten" if any(earlier.cells[cell] == op.expect for earlier, _, _ in _path(origin, state)) else "early"


def _lines(machine: Machine, origin: Origin, state: State) -> list[Step]:
    """The first schedule that reached ``state``."""
    return [
        Step(machine.actor(event), machine.operation(event), machine.opened(before, after)) for before, event, after in _path(origin, state)
    ]


def _stuck(machine: Machine, state: State) -> list[Step]:
    """In a deadlock: a line for each warp that has not exited, with what it waits at."""
    nexts = [Event(warp, counter) for warp, counter in enumerate(state.counters) if counter < len(machine.kernel.programs[warp])]
    return [Step(machine.actor(event), machine.operation(event), (), "deadlock", "waits for ever") for event in nexts]
