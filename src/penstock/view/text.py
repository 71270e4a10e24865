"""A timeline in letters: in colours for the terminal, or plain, as docstrings draw it.

rank 0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --       a cell a tick of time
rank 1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .        .   idle
rank 2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .        --  still the action before it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.table import Floats
from penstock.ir.timeline import Timeline
from penstock.view import palette
from penstock.view.numbers import short, write_time
from penstock.view.palette import (
    OP_NAMES,
    PAINTS,
    Paint,
    label_of,
)

LINES = 64  # ranks shown at most


# ---------------------------------------------------------------- plain
def plain(timeline: Timeline, tick: float = 1.0) -> str:
    """One cell a tick of time, a line a rank. An action that takes no time has no cell.

    >>> from penstock import UnitCost, make, simulate
    >>> print(plain(simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())))
    rank 0 | F0 F1 .  .  B0 -- .  B1 --
    rank 1 | .  F0 B0 -- F1 B1 -- .  .
    """
    ranks = timeline.schedule.ranks
    rows = [
        ["."] * _ticks(timeline.makespan, tick, "the makespan") for _ in range(ranks)
    ]
    for span in timeline.spans():
        first = _ticks(span.start, tick, f"the start of {span.action}")
        last = _ticks(span.end, tick, f"the end of {span.action}")
        rows[span.rank][first:last] = [
            _full(span.action),
            *["--"] * (last - first - 1),
        ][: last - first]
    wide = max(len(cell) for row in rows for cell in row)
    digits = len(str(ranks - 1))
    lines = (
        f"rank {rank:>{digits}} | " + " ".join(f"{cell:<{wide}}" for cell in row)
        for rank, row in enumerate(rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def _ticks(time: float, tick: float, what: str) -> int:
    """How many ticks a time is."""
    count = round(time / tick)
    if abs(time / tick - count) > 1e-6:
        raise ShapeError(
            f"{what}, {short(time, 8)}, is not a multiple of the tick {short(tick, 8)}\n"
            "  choose a tick that divides every time, or draw it to scale with gantt or svg"
        )
    return count


# ---------------------------------------------------------------- in colours
class ActionColumns(NamedTuple):
    """Columns `first` to `last`, not included, in which one action runs."""

    first: int
    last: int
    action: int


def gantt(timeline: Timeline, width: int = 100, colours: bool = True) -> Text:
    """A line a rank, time scaled to the width. Of many ranks, some, evenly chosen. Without colours boxes end in `|`.

    4 ranks · 8 micro-batches · makespan 33 · bubble 27.3% · peak 4
    rank 0 F0 F1 F2 F3                   B0    F4 B1    ...
    rank 1    F0 F1 F2             B0    F3 B1    ...
           0          5           10          15
     F  forward   B  backward
    """
    ranks = timeline.schedule.ranks
    shown = sorted(
        set(np.linspace(0, ranks - 1, min(ranks, LINES)).round().astype(int).tolist())
    )
    left = len(f"rank {ranks - 1} ")
    columns = max(width - left, 8)
    lines = _header(timeline, width)
    if len(shown) < ranks:
        lines.append(Text(f"{len(shown)} of {ranks} ranks shown", style="dim italic"))
    for rank, lane in zip(
        shown, _lanes(timeline, shown, columns, "▉" if colours else "|"), strict=True
    ):
        lines.append(
            Text()
            .append(f"rank {rank}".rjust(left - 1) + " ", style="dim")
            .append_text(lane)
        )
    lines.append(Text(" " * left).append_text(_axis(timeline, columns)))
    lines.append(_legend(timeline, width))
    return Text("\n").join(lines)


def _header(timeline: Timeline, width: int) -> list[Text]:
    """The facts, as many on a line as fit."""
    lines = [""]
    for fact in palette.facts(timeline):
        longer = f"{lines[-1]} · {fact}" if lines[-1] else fact
        lines[-1:] = [longer] if cell_len(longer) <= width else [lines[-1], fact]
    return [Text(line, style="bold") for line in lines]


def _lanes(
    timeline: Timeline, ranks: list[int], columns: int, edge: str
) -> Iterator[Text]:
    """Boxes with as much in them as even a short one has room for; or shades, if boxes are thinner than a column."""
    paint, seconds = palette.paints(timeline), timeline.end - timeline.start
    short_one, usual = (
        np.quantile(seconds, (0.1, 0.5)) * columns / (timeline.makespan or 1.0)
    )
    if usual < 0.8:
        yield from (
            _shades(*palette.means(timeline, rank, columns, paint)) for rank in ranks
        )
        return
    words = [_full, _numbered, _bare]
    longest = Action(
        Op.F, 0, len(timeline.schedule.microbatches) - 1, timeline.schedule.slices - 1
    )
    word = next((word for word in words if len(word(longest)) <= short_one), _bare)
    for rank in ranks:
        line, at = Text(), 0
        for run in action_columns(timeline, rank, columns):
            line.append(" " * (run.first - at))
            label = word(timeline.schedule.table.action(run.action))
            line.append_text(
                _box(label, run.last - run.first, PAINTS[int(paint[run.action])], edge)
            )
            at = run.last
        yield line.append(" " * (columns - at))


def action_columns(
    timeline: Timeline, rank: int, columns: int
) -> Iterator[ActionColumns]:
    """What a rank does in the middle of each column, with time scaled to so many columns. Idle columns are left out."""
    here = timeline.lane(rank)
    start, end = timeline.start[here], timeline.end[here]
    if not len(start):
        return
    middle = (np.arange(columns) + 0.5) * timeline.makespan / columns
    found = np.searchsorted(start, middle, side="right") - 1
    found[(found >= 0) & (middle >= end[found])] = -1
    edges = np.flatnonzero(np.diff(found, prepend=-2, append=-2))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if found[first] >= 0:
            yield ActionColumns(first, last, int(found[first]) + here.start)


def _full(action: Action) -> str:
    return action.op.value + _numbered(action)


def _numbered(action: Action) -> str:
    return label_of(action.microbatch, action.slice)


def _bare(action: Action) -> str:
    return str(action.microbatch)


def _box(label: str, width: int, paint: Paint, edge: str) -> Text:
    """The label on the left, if it fits, and a sliver of space on the right, if there is room: `F3 ▉`."""
    label = label if len(label) <= width else ""
    body = Text(label.ljust(width - 1), style=f"{paint.ink} on {paint.fill}")
    return (
        body
        if len(body) == width
        else body.append(edge, style=f"{paint.fill} on default")
    )


def _shades(work: Floats, colour: Floats) -> Text:
    """The more of a column's time a rank works, the denser the sign."""
    line = Text()
    for share, mean in zip(
        work.tolist(), colour.round().astype(int).tolist(), strict=True
    ):
        line.append(
            " ░▒▓█"[round(min(share, 1.0) * 4)],
            style="#{:02x}{:02x}{:02x}".format(*mean),
        )
    return line


def _axis(timeline: Timeline, columns: int) -> Text:
    """Round times under their columns."""
    step = palette.round_step(timeline.makespan, max(columns // 8, 1))
    line = ""
    for number in range(int(timeline.makespan / step * (1 + 1e-9)) + 1):
        column = round(number * step / timeline.makespan * columns)
        text = write_time(number * step, timeline.units) if number else "0"
        if column >= len(line) + bool(line) and column + cell_len(text) <= columns:
            line = line.ljust(column) + text
    return Text(line, style="dim")


def _legend(timeline: Timeline, width: int) -> Text:
    line = Text()
    for op in palette.ops_of(timeline):
        fill, ink = palette.paint_of(op)
        line.append(f" {op.value} ", style=f"{ink} on {fill}").append(
            f" {OP_NAMES[op]}  ", style="dim"
        )
    line.rstrip()
    line.truncate(width)
    return line
