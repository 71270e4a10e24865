"""The same prediction where ranks share processors: who is ready waits for one, and keeps it for a turn at least.

    two cores    rank 0 |F0--F1--   F2--      three are ready: the one that came last waits,
                 rank 1 |    F0----  F1--     until another has to wait for a message or its turn is over
                 rank 2 |        ··F0--

Waiting for a processor is no work, and shows as idle time, as in a measured step. So does a pause after an action, but
it takes the processor: what a process does between two actions. Messages take none.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.sim.simulate import simulate, timeline_of

SOON = 1e-12  # of the work of an action: done
TURN = 4e-3  # seconds that a process keeps a core while others wait for it: a tick of most Linux kernels


def simulate_shared(
    schedule: Schedule, cost: Cost, processors: int, turn: float = TURN
) -> Timeline:
    """The timeline of a schedule whose ranks share so many processors; of as many as ranks, the one of `simulate`.

    >>> from penstock import UnitCost, make
    >>> [simulate_shared(make("gpipe", ranks=2, microbatches=2), UnitCost(), n, turn=1).makespan for n in (2, 1)]
    [9.0, 12.0]
    """
    if processors >= schedule.ranks:
        return simulate(schedule, cost)
    found = _Sharing(schedule, cost, processors, turn)
    while found.waiting or found.queue or found.running:
        found.admit()
        found.advance()
    return timeline_of(
        schedule,
        cost,
        found.costs,
        found.start,
        found.end,
        found.sent,
        found.arrived,
        found.cause,
    )


class _Sharing:
    """Who runs, who waits for a processor, who waits for what it needs; now."""

    def __init__(
        self, schedule: Schedule, cost: Cost, processors: int, turn: float
    ) -> None:
        self.table, self.costs = schedule.table, columns(schedule, cost)
        self.serial, self.processors, self.turn, self.now = (
            cost.serial,
            processors,
            turn,
            0.0,
        )
        count, table = len(self.table), self.table
        self.start, self.end, self.sent, self.arrived = (
            np.full(count, np.nan) for _ in range(4)
        )
        self.cause = np.full(count, -1, dtype=np.int32)
        self.due, self.last = (
            table.first[:-1].copy(),
            table.first[1:],
        )  # next action of each rank, end of its lane
        self.free = np.zeros(self.costs.link.max(initial=0) + 1)
        self.left = self.costs.seconds.astype(float)  # seconds of work, by action
        self.waiting = {
            rank for rank in range(schedule.ranks) if self.due[rank] < self.last[rank]
        }
        self.queue: deque[int] = deque()
        self.running: dict[int, float] = {}  # rank: when its turn is over
        self.resting: dict[
            int, float
        ] = {}  # of those, seconds of a pause that are left

    def ready(self, rank: int) -> float:
        """When the next action of a rank has all that it needs; infinite if that is not known yet."""
        number, when = self.due[rank], 0.0
        if number > self.table.first[rank]:
            when, self.cause[number] = self.end[number - 1], number - 1
        for needed in self.table.needs[number]:
            if needed >= 0:
                there = (
                    self.end[needed]
                    if self.table.rank[needed] == rank
                    else self.arrived[needed]
                )
                if np.isnan(there):
                    return np.inf
                if there > when:
                    when, self.cause[number] = float(there), needed
        return when

    def admit(self) -> None:
        """Who has what it needs waits for a processor; who is first gets one that is free, or whose turn is over."""
        now, queue, running = self.now, self.queue, self.running
        queue += sorted(
            (rank for rank in self.waiting if self.ready(rank) <= now), key=self.ready
        )
        self.waiting.difference_update(queue)
        for rank in [rank for rank, until in running.items() if until <= now]:
            if queue:
                del running[rank]
                queue.append(rank)
            else:
                running[rank] = now + self.turn
        while queue and len(running) < self.processors:
            rank = queue.popleft()
            running[rank] = now + self.turn
            if rank not in self.resting and np.isnan(self.start[self.due[rank]]):
                self.start[self.due[rank]] = now

    def advance(self) -> None:
        """To the next moment at which anything changes."""
        now, due, running, resting = self.now, self.due, self.running, self.resting
        events = [now + resting.get(rank, self.left[due[rank]]) for rank in running]
        events += [when for when in map(self.ready, self.waiting) if when > now]
        then = min(events + (list(running.values()) if self.queue else []))
        self.now = then
        for rank in list(running):
            if rank in resting:
                resting[rank] -= then - now
                if resting[rank] <= SOON * then:
                    del resting[rank]
                    self.go_on(rank)
            else:
                self.left[due[rank]] -= then - now
                if self.left[due[rank]] <= SOON * max(
                    self.costs.seconds[due[rank]], then
                ):
                    self.finish(rank)

    def finish(self, rank: int) -> None:
        """An action is done: its message leaves; the rank rests, then goes on with what it has, or waits."""
        number, costs = self.due[rank], self.costs
        self.end[number] = self.now
        if costs.link[number] >= 0:
            leave = (
                max(self.now, self.free[costs.link[number]])
                if self.serial
                else self.now
            )
            self.free[costs.link[number]] = leave + costs.wire[number]
            self.sent[number], self.arrived[number] = (
                leave,
                leave + costs.wire[number] + costs.latency[number],
            )
        self.due[rank] += 1
        if costs.pause[number] and self.due[rank] < self.last[rank]:
            self.resting[rank] = costs.pause[number]
        else:
            self.go_on(rank)

    def go_on(self, rank: int) -> None:
        """A rank that runs is free for its next action."""
        over = self.due[rank] == self.last[rank]
        if not over and self.ready(rank) <= self.now:
            self.start[self.due[rank]] = self.now
            return
        del self.running[rank]
        if not over:
            self.waiting.add(rank)
