"""Predicts when everything happens: one pass over the actions, each after all that it needs.

    start = the latest of: the rank is free and has rested; what it needs is there (over a link: once the message is)
    end   = start + seconds

Messages leave when their action ends. On a serial link each waits for the one before it; a rank finishes its actions
in the order of its lane, so that order is also the order of the messages on each of its links.
"""

from __future__ import annotations

import numpy as np

from penstock.cost.columns import Columns, columns, levels
from penstock.cost.cost import Cost
from penstock.ir.compiled import at_speed
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The timeline of a schedule under a cost.

    >>> from penstock import UnitCost, make, simulate
    >>> simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()).makespan
    33.0
    """
    table, costs = schedule.table, columns(schedule, cost)
    start, end = np.empty(len(table)), np.empty(len(table))
    sent, arrived = np.full(len(table), np.nan), np.full(len(table), np.nan)
    cause = np.full(len(table), -1, dtype=np.int32)
    at_speed(_run, len(table))(
        table.order,
        table.rank,
        table.needs,
        costs.seconds,
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
    """Times with what is held meanwhile."""
    held, weights = levels(schedule, costs), weights_of(schedule, cost)
    return Timeline(
        schedule,
        start,
        end,
        held,
        weights,
        sent,
        arrived,
        costs.bytes,
        cause,
        cost.units,
    )


def weights_of(schedule: Schedule, cost: Cost) -> Floats:
    """Bytes of weights on each rank. Stages of one part share them, as do the first and the last part a tied weight."""
    held = {
        (stage.rank, stage.part): number for number, stage in enumerate(schedule.stages)
    }
    weights = np.zeros(schedule.ranks)
    for (rank, _), number in held.items():
        weights[rank] += cost.weights(schedule, number)
    last = schedule.parts - 1
    tied = cost.tied(schedule) if last else 0.0
    for rank in range(schedule.ranks if tied else 0):
        if (rank, 0) in held and (rank, last) in held:
            weights[rank] -= tied
    return weights


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
