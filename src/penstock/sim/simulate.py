"""Predict when everything happens, in one pass over the actions.

    start = as soon as the rank is free and has rested, and all results that it needs are there
    end   = start + seconds

A message leaves when its action ends. On a serial link, each message waits for the one before
it. A rank finishes its actions in the order of its lane, so its messages take each link in that
order, too.

Replicas of a part sum their gradients once the last backward of that part is done on all of them.
The sum runs beside the remaining actions and takes nothing from them, but a rank takes part in one
sum at a time. A cost may let ranks send their gradients before the last one is ready (`sum_end`);
the sum is then shorter. The step ends with the last action or sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import Columns, columns, levels, seconds_in_lanes
from penstock.cost.cost import Cost
from penstock.cost.memory import weights_of
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Schedule
from penstock.ir.sums import last_backwards, shared_gradients
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Sum, Timeline


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The timeline of a schedule under a cost.

    >>> from penstock import UnitCost, make, simulate
    >>> simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()).makespan
    33.0
    """
    table = schedule.table
    costs = columns(schedule, cost)
    start = np.empty(len(table))
    end = np.empty(len(table))
    sent = np.full(len(table), np.nan)
    arrived = np.full(len(table), np.nan)
    cause = np.full(len(table), -1, dtype=np.int32)
    run = compile_if_large(_run, len(table))
    run(
        table.order,
        table.rank,
        table.needs,
        seconds_in_lanes(schedule, costs),
        costs.pause,
        costs.link,
        costs.latency,
        costs.wire,
        cost.serial,
        start,
        end,
        sent,
        arrived,
        cause,
        schedule.ranks,
    )
    return timeline_of(schedule, cost, costs, start, end, sent, arrived, cause)


def timeline_of(
    schedule: Schedule,
    cost: Cost,
    costs: Columns,
    start: Floats,
    end: Floats,
    sent: Floats,
    arrived: Floats,
    cause: Ints,
) -> Timeline:
    """A timeline with these times, and the memory in use meanwhile."""
    return Timeline(
        schedule,
        start,
        end,
        levels(schedule, costs),
        weights_of(schedule, cost),
        sent,
        arrived,
        costs.bytes,
        cause,
        cost.units,
        sums_of(schedule, cost, end),
    )


class SumTurn(NamedTuple):
    """A sum of gradients, the times at which its ranks are ready for it, and its end."""

    name: str
    parts: tuple[int, ...]
    ranks: tuple[int, ...]
    bytes: float
    ready: tuple[float, ...]  # of each rank
    end: float
    cause: int  # the action for which it waited last; -1 if there is none


def sums_of(schedule: Schedule, cost: Cost, end: Floats) -> tuple[Sum, ...]:
    """The sums of gradients of a step whose actions end at these times. Those that take no time are left out."""
    sums = []
    for turn in sum_turns(schedule, cost, end):
        start = max(turn.ready)
        if turn.end > start:
            sums.append(
                Sum(turn.name, turn.ranks, start, turn.end, turn.bytes, turn.cause)
            )
    return tuple(sums)


def sum_turns(schedule: Schedule, cost: Cost, end: Floats) -> Iterator[SumTurn]:
    """All sums of gradients of a step whose actions end at these times.

    A rank begins its sums in the order of `shared_gradients`, one after the other.
    """
    tied_bytes = cost.tied_gradients(schedule)
    shared = shared_gradients(schedule, tied_bytes > 0)
    if not shared:
        return
    stage_of_part = {stage.part: number for number, stage in enumerate(schedule.stages)}
    last = last_backwards(schedule)
    free = [0.0] * schedule.ranks  # when each rank can take part in its next sum
    delayed_by = [-1] * schedule.ranks  # the action for which it waits until then
    for name, parts, ranks, _ in shared:
        size = tied_bytes
        if len(parts) == 1:
            size = cost.gradients(schedule, stage_of_part[parts[0]])
        for rank in ranks:
            for part in parts:
                number = last.get((part, rank), -1)
                if number >= 0 and end[number] > free[rank]:
                    free[rank] = float(end[number])
                    delayed_by[rank] = number
        latest = max(ranks, key=lambda rank: free[rank])
        cause = delayed_by[latest]
        ready = tuple(free[rank] for rank in ranks)
        done = cost.sum_end(ranks, size, ready)
        for rank in ranks:
            free[rank] = done
            delayed_by[rank] = cause
        yield SumTurn(name, parts, ranks, size, ready, done, cause)


def _run(
    order: Ints,
    rank: Ints,
    needs: Ints,
    seconds: Floats,
    pause: Floats,
    link: Ints,
    latency: Floats,
    wire: Floats,
    serial: bool,
    start: Floats,
    end: Floats,
    sent: Floats,
    arrived: Floats,
    cause: Ints,
    ranks: int,
) -> None:
    last = np.full(ranks, -1, np.int64)
    free = np.zeros(link.max() + 1 if len(link) else 1)
    for number in order:
        mine = rank[number]
        before = last[mine]
        now = end[before] + pause[before] if before >= 0 else 0.0
        held_up = before
        for column in range(needs.shape[1]):
            needed = needs[number, column]
            if needed >= 0:
                there = end[needed] if rank[needed] == mine else arrived[needed]
                if there > now:
                    now = there
                    held_up = needed
        start[number] = now
        end[number] = now + seconds[number]
        cause[number] = held_up
        last[mine] = number
        if link[number] >= 0:
            leave = end[number]
            if serial:
                leave = max(leave, free[link[number]])
                free[link[number]] = leave + wire[number]
            sent[number] = leave
            arrived[number] = leave + wire[number] + latency[number]
