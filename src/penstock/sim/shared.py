"""The same prediction where ranks share processors: who is ready runs, all who run at the same speed.

    two cores    rank 0 |F0--F1--          two run: each at full speed
                 rank 1 |    F0------F1    three run: each at two thirds
                 rank 2 |        F0--
    speed        1    1    2/3   1

Messages take no processor.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.sim.simulate import simulate, timeline_of

SOON = 1e-12  # of the work of an action: done


def simulate_shared(schedule: Schedule, cost: Cost, processors: int) -> Timeline:
    """The timeline of a schedule whose ranks share so many processors; of as many as ranks, the one of `simulate`.

    >>> from penstock import UnitCost, make
    >>> [simulate_shared(make("gpipe", ranks=2, microbatches=2), UnitCost(), n).makespan for n in (2, 1)]
    [9.0, 12.0]
    """
    if processors >= schedule.ranks:
        return simulate(schedule, cost)
    table, costs = schedule.table, columns(schedule, cost)
    start, end = np.full(len(table), np.nan), np.full(len(table), np.nan)
    sent, arrived = np.full(len(table), np.nan), np.full(len(table), np.nan)
    cause = np.full(len(table), -1, dtype=np.int32)
    due, last = table.first[:-1].copy(), table.first[1:]  # the next action of each rank, and the end of its lane
    free = np.zeros(costs.link.max(initial=0) + 1)
    running: dict[int, float] = {}  # rank: seconds of work that are left
    waiting = {rank for rank in range(schedule.ranks) if due[rank] < last[rank]}
    now = 0.0

    def ready(rank: int) -> float:
        """When the next action of a rank has all that it needs; infinite if that is not known yet."""
        number, when = due[rank], 0.0
        if number > table.first[rank]:
            when, cause[number] = end[number - 1] + costs.pause[number - 1], number - 1
        for needed in table.needs[number]:
            if needed >= 0:
                there = end[needed] if table.rank[needed] == rank else arrived[needed]
                if np.isnan(there):
                    return np.inf
                if there > when:
                    when, cause[number] = float(there), needed
        return when

    while waiting or running:
        for rank in [rank for rank in waiting if ready(rank) <= now]:
            waiting.remove(rank)
            start[due[rank]], running[rank] = now, costs.seconds[due[rank]]
        speed = min(1.0, processors / len(running)) if running else 1.0
        done = (now + left / speed for left in running.values())
        then = min(chain(done, (when for when in map(ready, waiting) if when > now)))
        for rank in list(running):
            running[rank] -= (then - now) * speed
            if running[rank] <= SOON * max(costs.seconds[due[rank]], then):
                number = due[rank]
                del running[rank]
                end[number] = then
                if costs.link[number] >= 0:
                    leave = max(then, free[costs.link[number]]) if cost.serial else then
                    free[costs.link[number]] = leave + costs.wire[number]
                    sent[number], arrived[number] = leave, leave + costs.wire[number] + costs.latency[number]
                due[rank] += 1
                if due[rank] < last[rank]:
                    waiting.add(rank)
        now = then
    return timeline_of(schedule, cost, costs, start, end, sent, arrived, cause)
