"""Predict when everything happens if ranks share processors.

A rank that is ready waits for a processor, and then keeps it for at least one turn:

    two cores    rank 0 |F0--F1--   F2--      three are ready: the last one waits until
                 rank 1 |    F0----  F1--     another one waits for a message, or its turn is over
                 rank 2 |        ··F0--

A processor that goes from one rank to another may lose a moment (`Cost.handover`). Waiting for a
processor counts as idle time, as in a measured step. A pause after an action is
idle time, too, but it occupies the processor: it stands for the work of a process between two
actions. Messages need no processor.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from penstock.cost.columns import columns, seconds_in_lanes
from penstock.cost.cost import Cost
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.sim.simulate import Times, complete_timeline, simulate

RELATIVE_TOLERANCE = 1e-12  # an action with less work left than this is done
MIN_TURN_SECONDS = 4e-3  # seconds that a process keeps a core while others wait: a tick of most Linux kernels


def simulate_shared(
    schedule: Schedule, cost: Cost, processors: int, turn: float = MIN_TURN_SECONDS
) -> Timeline:
    """The timeline of a schedule whose ranks share processors.

    With a processor for each rank, this is `simulate`.

    >>> from penstock import UnitCost, make
    >>> [simulate_shared(make("gpipe", ranks=2, microbatches=2), UnitCost(), n, turn=1).makespan for n in (2, 1)]
    [9.0, 12.0]
    """
    if processors >= schedule.ranks:
        return simulate(schedule, cost)
    machine = _Machine(schedule, cost, processors, turn)
    while machine.waiting or machine.queue or machine.running:
        machine.admit()
        machine.advance()
    return complete_timeline(
        schedule,
        cost,
        machine.costs,
        Times(
            np.array(machine.start),
            np.array(machine.end),
            np.array(machine.sent),
            np.array(machine.arrived),
            np.array(machine.cause, dtype=np.int32),
        ),
    )


class _Machine:
    """The state at one moment: each rank runs, waits for a processor, or waits for results.

    Everything is in lists, because single entries of numpy's arrays are slow to read.
    """

    def __init__(
        self, schedule: Schedule, cost: Cost, processors: int, turn: float
    ) -> None:
        table = schedule.table
        self.costs = costs = columns(schedule, cost)
        self.serial = cost.network.serial
        self.processors = processors
        self.turn = turn
        self.handover = cost.handover
        self.now = 0.0
        count = len(table)
        self.rank: list[int] = table.rank.tolist()
        self.needs: list[list[int]] = table.needs.tolist()
        self.seconds: list[float] = seconds_in_lanes(schedule, costs).tolist()
        self.pause: list[float] = costs.pause.tolist()
        self.link: list[int] = costs.link.tolist()
        self.wire: list[float] = costs.wire.tolist()
        self.latency: list[float] = costs.latency.tolist()
        self.start = [math.nan] * count
        self.end = [math.nan] * count
        self.sent = [math.nan] * count
        self.arrived = [math.nan] * count
        self.cause = [-1] * count
        first: list[int] = table.first.tolist()
        self.first = first[:-1]  # the beginning of each rank's lane
        self.last = first[1:]  # the end of its lane
        self.due = first[:-1]  # its next action
        self.free = [0.0] * (max(self.link, default=0) + 1)  # by link
        # Seconds left of what each rank does: its due action, or the pause before that.
        self.left = [0.0] * schedule.ranks
        lanes = zip(self.first, self.last, strict=True)
        self.waiting = {rank for rank, (begin, end) in enumerate(lanes) if begin < end}
        for rank in self.waiting:
            self.left[rank] = self.seconds[self.due[rank]]
        self.queue: deque[int] = deque()  # ranks that wait for a processor
        self.running: dict[int, float] = {}  # rank: the end of its turn
        self.resting: set[int] = set()  # running ranks that pause
        self.seats = [-1] * processors  # the rank that ran last on each processor

    def ready(self, rank: int) -> float:
        """When the next action of a rank has all that it needs; infinite if unknown yet."""
        number = self.due[rank]
        time = 0.0
        if number > self.first[rank]:
            time = self.end[number - 1]
            self.cause[number] = number - 1
        for needed in self.needs[number]:
            if needed < 0:
                continue
            is_here = self.rank[needed] == rank
            available = self.end[needed] if is_here else self.arrived[needed]
            if math.isnan(available):
                return math.inf
            if available > time:
                time = available
                self.cause[number] = needed
        return time

    def admit(self) -> None:
        """Queue the ranks that are ready, and give processors to the first in the queue.

        A rank whose turn is over goes back to the queue if others wait.
        """
        now = self.now
        queue = self.queue
        running = self.running
        ready = [rank for rank in self.waiting if self.ready(rank) <= now]
        queue += sorted(ready, key=self.ready)
        self.waiting.difference_update(queue)
        turn_over = [rank for rank, until in running.items() if until <= now]
        for rank in turn_over:
            if queue:
                del running[rank]
                queue.append(rank)
            else:
                running[rank] = now + self.turn
        while queue and len(running) < self.processors:
            rank = queue.popleft()
            lost = self.seat(rank)
            running[rank] = now + lost + self.turn
            self.left[rank] += lost
            number = self.due[rank]
            if rank not in self.resting and math.isnan(self.start[number]):
                self.start[number] = now + lost

    def seat(self, rank: int) -> float:
        """Put a rank on a free processor, its last one if it can; return the seconds of the handover."""
        if rank in self.seats:
            return 0.0
        free = [n for n, last in enumerate(self.seats) if last not in self.running]
        seat = min(free, key=self.seats.__getitem__)  # one that nobody has used, if any
        unused = self.seats[seat] < 0
        self.seats[seat] = rank
        return 0.0 if unused else self.handover

    def advance(self) -> None:
        """Advance to the next moment at which anything changes."""
        now = self.now
        running = self.running
        events = [now + self.left[rank] for rank in running]
        events += [when for when in map(self.ready, self.waiting) if when > now]
        if self.queue:
            events += running.values()
        then = min(events)
        self.now = then
        for rank in list(running):
            self.left[rank] -= then - now
            scale = max(self.seconds[self.due[rank]], then)
            if self.left[rank] > RELATIVE_TOLERANCE * scale:
                continue
            if rank in self.resting:
                self.resting.remove(rank)
                self.go_on(rank)
            else:
                self.finish(rank)

    def finish(self, rank: int) -> None:
        """End the action of a rank: send its message, and let the rank rest or go on."""
        number = self.due[rank]
        self.end[number] = self.now
        link = self.link[number]
        if link >= 0:
            leave = self.now
            if self.serial:
                leave = max(leave, self.free[link])
            self.free[link] = leave + self.wire[number]
            self.sent[number] = leave
            self.arrived[number] = leave + self.wire[number] + self.latency[number]
        self.due[rank] += 1
        if self.pause[number] and self.due[rank] < self.last[rank]:
            self.resting.add(rank)
            self.left[rank] = self.pause[number]
        else:
            self.go_on(rank)

    def go_on(self, rank: int) -> None:
        """Let a running rank start its next action, or give up its processor."""
        number = self.due[rank]
        if number == self.last[rank]:
            del self.running[rank]
            return
        self.left[rank] = self.seconds[number]
        if self.ready(rank) <= self.now:
            self.start[number] = self.now
        else:
            del self.running[rank]
            self.waiting.add(rank)
