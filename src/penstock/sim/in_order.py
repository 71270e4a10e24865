"""Predicts a step whose messages wait for each other, as they do over NCCL.

`simulate` lets a message leave as soon as its action ends. Over NCCL it occupies both of its ranks, and
each of them has done everything that comes before the message in its program: its actions, because
torch lets a message wait for what was launched before, and its messages, because a communicator carries
one after the other.

    rank 0   ▓▓▓ 0F1 ▓▓▓ ........... 0F1>1 ──►        0F1 is ready to go, but rank 1 still computes, and then
    rank 1   ▓▓▓▓▓▓▓ 1F0 ▓▓▓▓▓▓▓ 2B0<2 ──► 0F1<0      receives 2B0 first, because its program has it first
    rank 2               ▓▓▓▓▓▓▓ 2B0 ▓▓▓▓▓

With two channels, messages to higher ranks and messages to lower ranks do not wait for each other.

A profile that was measured over NCCL says how many channels its network has. `simulate` then
predicts this way, and so does everything that calls it: plans, forecasts, reports.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from penstock.cost.columns import columns, seconds_in_lanes
from penstock.cost.cost import Cost
from penstock.cost.network import check_channels
from penstock.ir.program import Program, Receive, RunAction, Send
from penstock.ir.timeline import Timeline
from penstock.ir.verify import verify
from penstock.sim.completion import complete_timeline


def simulate_in_order(program: Program, cost: Cost, channels: int = 1) -> Timeline:
    """The timeline of a program under a cost, if the messages of a rank share one or two channels.

    >>> from penstock import UnitCost, lower, make
    >>> program = lower(make("zb-v", ranks=4, microbatches=8))
    >>> simulate_in_order(program, UnitCost(comm=0.25)).makespan
    33.0
    >>> simulate_in_order(program, UnitCost(comm=0.25), channels=2).makespan
    30.0
    """
    check_channels(channels)
    return _Walk(program, cost, channels).run()


class _Walk:
    """Goes through all messages in an order in which they can happen, and runs what comes before each."""

    def __init__(self, program: Program, cost: Cost, channels: int) -> None:
        schedule = program.schedule
        self.program = program
        self.cost = cost
        self.channels = channels
        self.costs = columns(schedule, cost)
        self.seconds = seconds_in_lanes(schedule, self.costs)
        self.number = {
            action: number
            for number, action in enumerate(chain.from_iterable(schedule.lanes))
        }
        count = len(self.number)
        self.start = np.empty(count)
        self.end = np.empty(count)
        self.sent = np.full(count, np.nan)
        self.arrived = np.full(count, np.nan)
        self.cause = np.full(count, -1, dtype=np.int32)
        self.place = [0] * schedule.ranks  # of the next instruction
        self.last = [-1] * schedule.ranks  # the last action that has run
        # When each channel of a rank is free again.
        self.free = [[0.0] * channels for _ in range(schedule.ranks)]

    def run(self) -> Timeline:
        """Run the whole program."""
        for action, source, target in verify(self.program):
            self.advance(source)
            self.advance(target)
            self.carry(self.number[action], source, target)
            self.place[source] += 1
            self.place[target] += 1
        for rank in range(len(self.program.lanes)):
            self.advance(rank)
        return complete_timeline(
            self.program.schedule,
            self.cost,
            self.costs,
            self.start,
            self.end,
            self.sent,
            self.arrived,
            self.cause,
        )

    def advance(self, rank: int) -> None:
        """Run the actions of a rank up to its next message."""
        lane = self.program.lanes[rank]
        while self.place[rank] < len(lane):
            instruction = lane[self.place[rank]]
            if isinstance(instruction, Send | Receive):
                return
            if isinstance(instruction, RunAction):
                self.act(rank, self.number[instruction.action])
            self.place[rank] += 1

    def act(self, rank: int, number: int) -> None:
        """Run an action as soon as its rank is free and everything that it needs is there."""
        table = self.program.schedule.table
        before = self.last[rank]
        now = self.end[before] + self.costs.pause[before] if before >= 0 else 0.0
        held_up = before
        for needed in table.needs[number].tolist():
            if needed < 0:
                continue
            is_here = table.rank[needed] == rank
            there = self.end[needed] if is_here else self.arrived[needed]
            if there > now:
                now = there
                held_up = needed
        self.start[number] = now
        self.end[number] = now + self.seconds[number]
        self.cause[number] = held_up
        self.last[rank] = number

    def carry(self, number: int, source: int, target: int) -> None:
        """Carry the result of an action to another rank once both ranks have done what comes before."""
        channel = int(source < target) % self.channels
        leave = float(self.end[number])
        for rank in (source, target):
            leave = max(leave, self.free[rank][channel])
            if self.last[rank] >= 0:
                leave = max(leave, float(self.end[self.last[rank]]))
        arrival = leave + self.costs.latency[number] + self.costs.wire[number]
        self.sent[number] = leave
        self.arrived[number] = arrival
        self.free[source][channel] = self.free[target][channel] = float(arrival)
