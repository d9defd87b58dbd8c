"""A schedule as a drawing: a lane for each warp and one for the copy engine, time runs down. It fits a phone that way."""

from __future__ import annotations

import html

from nanoqwen.book.display import Html, svg
from nanoqwen.book.palette import css_colour
from nanoqwen.warpmodel.explore import FAULTS, Step
from nanoqwen.warpmodel.machine import COPY_ENGINE, Arrive, ArriveExpect, Copy, Exit, Operation, Read, Sync, SyncArrive, SyncWarp, Wait, Write

_LANE, _ROW, _TOP, _NUMBER = 91, 27, 34, 24  # pixels: narrow enough that three warps and the copy engine fit a phone
_BOX, _BAR = _LANE - 5, 9  # a step's box; the width that a copy on its way takes, beside the copy engine's boxes


def timeline(schedule: list[Step], *, title: str, caption: str | None = None, skip: tuple[type, ...] = (Exit, SyncWarp)) -> Html:
    """The steps of ``schedule`` as a figure of the book; operations of a type in ``skip`` are left out.

    A read is green and ticked when it finds the bytes it wants, orange and crossed when not. A blue bar beside the copy engine's lane
    is a copy on its way. A dashed line across all lanes: a barrier opens. Raises ValueError for an empty schedule.
    """
    steps = [step for step in schedule if not isinstance(step.operation, skip) or step.fault or step.opens]
    if not steps:
        raise ValueError("a schedule without steps cannot be drawn")
    lanes = sorted({step.actor for step in steps} - {COPY_ENGINE}, key=lambda name: (not name.startswith("producer"), name)) + [COPY_ENGINE]
    flights = _flights(steps)
    bars = 1 + max((slot for _, _, slot in flights), default=-1)
    left = {name: _NUMBER + _LANE * number for number, name in enumerate(lanes)}
    flying = left[COPY_ENGINE]  # the bars stand left of the copy engine's boxes
    left[COPY_ENGINE] += _BAR * bars
    width, height = left[COPY_ENGINE] + _LANE, _TOP + _ROW * len(steps) + 6
    shapes = [_lane(name, x, height) for name, x in left.items()]
    shapes += [_flight(flying + _BAR * slot, first, last) for first, last, slot in flights]
    for row, step in enumerate(steps):
        shapes += _step(step, row, left[step.actor], width)
    body = "\n".join(shapes)
    markup = f'<svg viewBox="0 0 {width} {height}"><g font-family="var(--nq-figure-font, sans-serif)">\n{body}\n</g></svg>'
    return svg(markup, title=title, alt=spoken(steps), caption=caption)


def spoken(steps: list[Step]) -> str:
    """A schedule in words, for those who do not see the drawing."""
    said = []
    for number, step in enumerate(steps, 1):
        opens = f", opens {' and '.join(step.opens)}" if step.opens else ""
        said.append(f"{number}. {step.actor}: {label(step)}{opens}")
    faults = [f"{step.fault}: {FAULTS[step.fault]}" for step in steps if step.fault][:1]
    return "; ".join(said) + ". " + (f"Fault, {faults[0]}." if faults else "No fault.")


def label(step: Step) -> str:
    """A few words for one step."""
    if step.fault == "deadlock":
        return f"stuck: {_words(step.operation)}"
    if step.actor == COPY_ENGINE:
        return f"{step.operation.cell} lands"
    return _words(step.operation) + (" (wrong bytes)" if step.fault and isinstance(step.operation, Read) else "")


def _words(op: Operation) -> str:
    if isinstance(op, Sync):
        return "__syncthreads" if op.warps is None else f"bar.sync {op.barrier}"
    if isinstance(op, (Read, Write, Copy)):
        return f"{type(op).__name__.lower()} {op.cell}"
    if isinstance(op, (Arrive, ArriveExpect, Wait)):
        verb = {Arrive: "arrive", ArriveExpect: "expect", Wait: "wait"}[type(op)]
        return f"{verb} {op.mbarrier}"
    return {SyncArrive: "bar.arrive", SyncWarp: "__syncwarp", Exit: "exit"}[type(op)]


def _y(row: int) -> float:
    return _TOP + _ROW * row


def _text(x: float, y: float, text: str, weight: int = 400, anchor: str = "middle") -> str:
    style = f'font-size="11" font-weight="{weight}" text-anchor="{anchor}" fill="currentColor"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'


def _lane(name: str, x: float, height: float) -> str:
    middle = x + _LANE / 2
    line = f'<path d="M{middle:g} {_TOP - 6} V{height - 2:g}" stroke="{css_colour("rule")}"/>'
    return line + _text(middle, 18, name, 600)


def _flights(steps: list[Step]) -> list[tuple[int, int, int]]:
    """(row of issue, row of landing, slot) of each copy; the last row + 1 for one that never lands; copies in flight together differ in slot."""
    found: list[tuple[int, int, int]] = []
    until: list[int] = []  # per slot: the row in which it is free again
    for row, step in enumerate(steps):
        if not isinstance(step.operation, Copy) or step.actor == COPY_ENGINE:
            continue
        landings = (i for i in range(row, len(steps)) if steps[i].actor == COPY_ENGINE and steps[i].operation == step.operation)
        end = next(landings, len(steps))
        slot = next((i for i, free in enumerate(until) if free < row), len(until))
        until[slot : slot + 1] = [end]
        found.append((row, end, slot))
    return found


def _flight(x: float, first: int, last: int) -> str:
    top = _y(first) + 11
    size = f'width="5" height="{_y(last) + 11 - top:g}" rx="2.5"'
    return f'<rect x="{x + 2:g}" y="{top:g}" {size} fill="{css_colour("hbm")}"/>'


def _step(step: Step, row: int, x: float, width: float) -> list[str]:
    """One box with its label, its number at the left, and a line across when the step opens a barrier."""
    x, y = x + (_LANE - _BOX) / 2, _y(row)
    name = "accent" if step.fault else {Read: "shared", Copy: "hbm"}.get(type(step.operation), "rule")
    colour, place = css_colour(name), f'x="{x:g}" y="{y:g}" width="{_BOX}" height="22" rx="5"'
    mark = "✗ " if step.fault else "✓ " if isinstance(step.operation, Read) else ""
    words = f"{step.operation.cell} lands" if step.actor == COPY_ENGINE else _words(step.operation)
    shapes = [
        _text(_NUMBER - 5, y + 15, str(row + 1), anchor="end"),
        f'<rect {place} fill="var(--nq-page, #fcfcfa)"/>',  # covers the lane's line
        f'<rect {place} fill="{colour}" fill-opacity="0.16" stroke="{colour}" stroke-width="{2 if step.fault else 1.2}"/>',
        _text(x + _BOX / 2, y + 15, mark + words, 600 if isinstance(step.operation, Read) and step.fault else 400),
    ]
    if step.opens:
        line = f'M{_NUMBER} {y + 24.5:g} H{width:g}'
        shapes.append(f'<path d="{line}" stroke="{css_colour("accent")}" stroke-width="1.4" stroke-dasharray="5 3"/>')
    return shapes
