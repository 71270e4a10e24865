"""Predict when everything happens, in one pass over the actions.

    start = as soon as the rank is free and has rested, and all results that it needs are there
    end   = start + seconds

A message leaves when its action ends. On a serial link, each message waits for the one before
it. A rank finishes its actions in the order of its lane, so its messages take each link in that
order, too. Over NCCL messages wait for more than that, and `penstock.sim.in_order` predicts the step.
"""

from __future__ import annotations

import numpy as np

from penstock.cost.columns import columns, seconds_in_lanes
from penstock.cost.cost import Cost
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline
from penstock.sim.completion import complete_timeline
from penstock.sim.in_order import simulate_in_order


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The timeline of a schedule under a cost.

    >>> from penstock import UnitCost, make, simulate
    >>> simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()).makespan
    33.0
    """
    if cost.channels is not None:
        return simulate_in_order(schedule, cost, cost.channels)
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
    return complete_timeline(schedule, cost, costs, start, end, sent, arrived, cause)


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
