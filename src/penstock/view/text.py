"""A timeline as text: in colours for the terminal, or plain, as in docstrings.

rank 0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --       one cell per tick of time
rank 1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .        .   idle
rank 2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .        --  the action before it goes on
                                                                     +   idle, while gradients are summed
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from penstock.errors import ShapeError
from penstock.ir.action import Action, forward
from penstock.ir.table import Floats
from penstock.ir.timeline import Timeline
from penstock.view import palette
from penstock.view.numbers import short, write_time
from penstock.view.palette import (
    PAINTS,
    SUM_COLOUR,
    SUM_NAME,
    Paint,
    label_of,
)

MAX_LANES = 64
SUM_SIGN = "+"  # for a rank that only takes part in a sum of gradients


# ---------------------------------------------------------------- plain
def plain(timeline: Timeline, tick: float = 1.0) -> str:
    """A line per rank and a cell per tick. An action that takes no time has no cell.

    A rank that only takes part in a sum of gradients has `+` in its cell.

    >>> from penstock import UnitCost, make, simulate
    >>> print(plain(simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())))
    rank 0 | F0 F1 .  .  B0 -- .  B1 --
    rank 1 | .  F0 B0 -- F1 B1 -- .  .
    """
    ranks = timeline.schedule.ranks
    ticks = _ticks(timeline.makespan, tick, "the makespan")
    rows = [["."] * ticks for _ in range(ranks)]
    width = 1
    for one in timeline.sums:
        first = _ticks(one.start, tick, f"the start of the sum of {one.name}")
        last = _ticks(one.end, tick, f"the end of the sum of {one.name}")
        for rank in one.ranks:
            rows[rank][first:last] = [SUM_SIGN] * (last - first)
    for span in timeline.spans():
        first = _ticks(span.start, tick, f"the start of {span.action}")
        last = _ticks(span.end, tick, f"the end of {span.action}")
        if last > first:
            label = _full_label(span.action)
            width = max(width, len(label), 2 if last > first + 1 else 0)
            rows[span.rank][first:last] = [label, *["--"] * (last - first - 1)]
    digits = len(str(ranks - 1))
    lines = []
    for rank, row in enumerate(rows):
        cells = " ".join(f"{cell:<{width}}" for cell in row)
        lines.append(f"rank {rank:>{digits}} | {cells}".rstrip())
    return "\n".join(lines)


def _ticks(time: float, tick: float, what: str) -> int:
    """The number of ticks in a time."""
    count = round(time / tick)
    if abs(time / tick - count) > 1e-6:
        raise ShapeError(
            f"{what}, {short(time, 8)}, is not a multiple of the tick {short(tick, 8)}\n"
            "  choose a tick that divides every time, or use gantt or svg"
        )
    return count


# ---------------------------------------------------------------- in colours
class ActionColumns(NamedTuple):
    """One action runs in the columns from `first` up to, but not including, `last`."""

    first: int
    last: int
    action: int


def gantt(timeline: Timeline, width: int = 100, colours: bool = True) -> Text:
    """A line per rank, with time scaled to the width.

    Of many ranks it shows an even selection. Without colours, boxes end in `|`.

    4 ranks · 8 micro-batches · makespan 33 forwards · bubble 27.3% · peak 4 micro-batches
    rank 0 F0 F1 F2 F3                   B0    F4 B1    ...
    rank 1    F0 F1 F2             B0    F3 B1    ...
           0          5           10          15
     F  forward   B  backward
    """
    ranks = timeline.schedule.ranks
    even = np.linspace(0, ranks - 1, min(ranks, MAX_LANES)).round().astype(int)
    shown = sorted(set(even.tolist()))
    left = len(f"rank {ranks - 1} ")
    columns = max(width - left, 8)
    lines = _header(timeline, width)
    if len(shown) < ranks:
        lines.append(Text(f"{len(shown)} of {ranks} ranks shown", style="dim italic"))
    edge = "▉" if colours else "|"
    lanes = _lanes(timeline, shown, columns, edge)
    for rank, lane in zip(shown, lanes, strict=True):
        name = f"rank {rank}".rjust(left - 1) + " "
        lines.append(Text().append(name, style="dim").append_text(lane))
    lines.append(Text(" " * left).append_text(_axis(timeline, columns)))
    lines.append(_legend(timeline, width))
    return Text("\n").join(lines)


def _header(timeline: Timeline, width: int) -> list[Text]:
    """The facts, on as few lines as possible."""
    first, *others = palette.facts(timeline)
    lines = [first]
    for fact in others:
        longer = f"{lines[-1]} · {fact}"
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fact)
    return [Text(line, style="bold") for line in lines]


def _lanes(
    timeline: Timeline, ranks: list[int], columns: int, edge: str
) -> Iterator[Text]:
    """Boxes, with labels for which even short boxes have room; shades if boxes are too thin."""
    schedule = timeline.schedule
    paint = palette.paints(timeline)
    widths = (timeline.end - timeline.start) * columns / (timeline.makespan or 1.0)
    short_width, median_width = np.quantile(widths, (0.1, 0.5))
    if median_width < 0.8:
        for rank in ranks:
            yield _shades(*palette.means(timeline, rank, columns, paint))
        return
    longest = forward(0, len(schedule.microbatches) - 1, schedule.slices - 1)
    labels = (_full_label, _numbered_label)
    fitting = (one for one in labels if len(one(longest)) <= short_width)
    write_label = next(fitting, _bare_label)
    for rank in ranks:
        line = Text()
        column = 0
        idle = idle_columns(timeline, rank, columns)
        for run in action_columns(timeline, rank, columns):
            line.append(idle[column : run.first], style=SUM_COLOUR)
            label = write_label(schedule.table.action(run.action))
            run_paint = PAINTS[int(paint[run.action])]
            line.append_text(_box(label, run.last - run.first, run_paint, edge))
            column = run.last
        yield line.append(idle[column:], style=SUM_COLOUR)


def idle_columns(timeline: Timeline, rank: int, columns: int) -> str:
    """What a rank shows in each column of time if it is idle: a sign if it takes part in a sum."""
    middle = (np.arange(columns) + 0.5) * timeline.makespan / columns
    signs = np.full(columns, " ")
    for one in timeline.sums:
        if rank in one.ranks:
            signs[(middle >= one.start) & (middle < one.end)] = SUM_SIGN
    return "".join(signs.tolist())


def action_columns(
    timeline: Timeline, rank: int, columns: int
) -> Iterator[ActionColumns]:
    """The actions that a rank runs in the middle of each column of time.

    Idle columns are left out.
    """
    here = timeline.lane(rank)
    start, end = timeline.start[here], timeline.end[here]
    if not len(start):
        return
    middle = (np.arange(columns) + 0.5) * timeline.makespan / columns
    running = np.searchsorted(start, middle, side="right") - 1  # -1: idle
    running[(running >= 0) & (middle >= end[running])] = -1
    edges = np.flatnonzero(np.diff(running, prepend=-2, append=-2)).tolist()
    for first, last in pairwise(edges):
        if running[first] >= 0:
            yield ActionColumns(first, last, int(running[first]) + here.start)


def _full_label(action: Action) -> str:
    return action.op.value + _numbered_label(action)


def _numbered_label(action: Action) -> str:
    return label_of(action.microbatch, action.slice)


def _bare_label(action: Action) -> str:
    return str(action.microbatch)


def _box(label: str, width: int, paint: Paint, edge: str) -> Text:
    """A box with its label on the left and an edge on the right, if they fit: `F3 ▉`."""
    if len(label) > width:
        label = ""
    box = Text(label.ljust(width - 1), style=f"{paint.ink} on {paint.fill}")
    if len(box) < width:
        box.append(edge, style=f"{paint.fill} on default")
    return box


def _shades(work: Floats, colour: Floats) -> Text:
    """A character for each column, denser the more of its time the rank works."""
    line = Text()
    means = colour.round().astype(int).tolist()
    for share, mean in zip(work.tolist(), means, strict=True):
        density = " ░▒▓█"[round(min(share, 1.0) * 4)]
        line.append(density, style="#{:02x}{:02x}{:02x}".format(*mean))
    return line


def _axis(timeline: Timeline, columns: int) -> Text:
    """Round times below their columns."""
    step = palette.round_step(timeline.makespan, max(columns // 8, 1))
    line = ""
    for number in range(int(timeline.makespan / step * (1 + 1e-9)) + 1):
        column = round(number * step / timeline.makespan * columns)
        text = write_time(number * step, timeline.units) if number else "0"
        free_from = len(line) + 1 if line else 0
        if column >= free_from and column + cell_len(text) <= columns:
            line = line.ljust(column) + text
    return Text(line, style="dim")


def _legend(timeline: Timeline, width: int) -> Text:
    line = Text()
    for op in palette.ops_of(timeline):
        fill, ink = palette.paint_of(op)
        line.append(f" {op.value} ", style=f"{ink} on {fill}")
        line.append(f" {op.row.label}  ", style="dim")
    if timeline.sums:
        line.append(f" {SUM_SIGN} ", style=SUM_COLOUR)
        line.append(f" {SUM_NAME}  ", style="dim")
    line.rstrip()
    line.truncate(width)
    return line
