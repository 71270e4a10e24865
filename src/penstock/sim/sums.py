"""The sums of gradients of a step whose actions have their times, and how each of them is done.

Replicas of a part sum their gradients once the last backward of that part is done on all of them.
The sum runs beside the remaining actions and takes nothing from them, but a rank takes part in one
sum at a time. With `sums_wait`, a rank begins its sums only after its last action. A cost may let
ranks send their gradients before the last one is ready (`sum_end`); the sum is then shorter. The step
ends with the last action or sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from penstock.cost.cost import Cost
from penstock.cost.memory import gradient_sums
from penstock.cost.sums import link_matrices, quickest_sum
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan, last_backwards
from penstock.ir.table import Floats
from penstock.ir.timeline import Sum, Timeline


class SumInterval(NamedTuple):
    """A sum of gradients, the times at which its ranks are ready for it, and its end."""

    name: str
    parts: tuple[int, ...]
    ranks: tuple[int, ...]
    bytes: float
    ready: tuple[float, ...]  # of each rank
    end: float
    cause: int  # the action for which it waited last; -1 if there is none


def sums_of(
    schedule: Schedule, cost: Cost, end: Floats, wait: bool = False
) -> tuple[Sum, ...]:
    """The sums of gradients of a step whose actions end at these times. Those that take no time are left out."""
    sums = []
    for interval in sum_intervals(schedule, cost, end, wait):
        start = max(interval.ready)
        if interval.end > start:
            sums.append(
                Sum(
                    interval.name,
                    interval.ranks,
                    start,
                    interval.end,
                    interval.bytes,
                    interval.cause,
                )
            )
    return tuple(sums)


def sum_intervals(
    schedule: Schedule, cost: Cost, end: Floats, wait: bool = False
) -> Iterator[SumInterval]:
    """All sums of gradients of a step whose actions end at these times.

    A rank begins its sums in the order of `shared_gradients`, one after the other; with `wait`, after its last action.
    """
    sums = list(gradient_sums(schedule, cost))
    if not sums:
        return
    last = last_backwards(schedule)
    free = [0.0] * schedule.ranks  # when each rank can take part in its next sum
    delayed_by = [-1] * schedule.ranks  # the action for which it waits until then
    if wait:
        for rank, lane in enumerate(pairwise(schedule.table.first.tolist())):
            if lane[0] < lane[1]:
                delayed_by[rank] = lane[1] - 1
                free[rank] = float(end[delayed_by[rank]])
    for (name, parts, ranks, _), size in sums:
        for rank in ranks:
            for part in parts:
                number = last.get((part, rank), -1)
                if number >= 0 and end[number] > free[rank]:
                    free[rank] = float(end[number])
                    delayed_by[rank] = number
        latest = max(ranks, key=lambda rank: free[rank])
        cause = delayed_by[latest]
        ready = tuple(free[rank] for rank in ranks)
        done = cost.sum_end(ranks, size, ready) if size > 0 else max(ready)
        for rank in ranks:
            free[rank] = done
            delayed_by[rank] = cause
        yield SumInterval(name, parts, ranks, size, ready, done, cause)


def plan_sums(timeline: Timeline, cost: Cost) -> tuple[SumPlan, ...]:
    """The quickest sum of each part, given when each rank is ready for it."""
    plans = []
    for _, parts, ranks, size, ready, _, _ in sum_intervals(
        timeline.schedule, cost, timeline.end
    ):
        if size > 0:
            links = link_matrices(ranks, cost.latency, cost.bandwidth)
            plans.append(quickest_sum(*links, size, ready, ranks, parts))
    return tuple(plans)
