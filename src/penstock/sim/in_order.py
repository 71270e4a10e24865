"""Predicts a step whose messages wait for each other, as they do over NCCL.

`simulate` lets a message leave as soon as its action ends, and the rank that needs it finds it there.
Over NCCL each of its two ranks must first have done everything that comes before the message in its
program: its actions, because torch lets a message wait for what was launched before, and its messages,
because a communicator carries one after the other.

    rank 0   ▓▓▓ 0F1 ▓▓▓ 0F1>1 ──►                        0F1 has left, but rank 1 still computes, and then
    rank 1   ▓▓▓▓▓▓▓▓▓ 1F0 ▓▓▓▓▓▓▓▓▓ 2B0<2 ──► 0F1<0      receives 2B0 first, because its program has it first
    rank 2                   ▓▓▓▓▓▓▓ 2B0 ▓▓▓▓▓

A sender goes on before its message has arrived, and a late receiver takes it in less than its whole
way, as far as the buffers between them hold it (`penstock.cost.buffers`). Without buffers a message
keeps both of its ranks until it has arrived. With two channels, messages to higher ranks and messages
to lower ranks do not wait for each other. With one, sums of gradients wait for the end of a lane.

A profile that was measured over NCCL says how many channels its network has. `simulate` then
predicts this way, and so does everything that calls it: plans, forecasts, reports.
"""

from __future__ import annotations

import numpy as np

from penstock.cost.columns import columns, seconds_in_lanes
from penstock.cost.cost import Cost
from penstock.cost.network import check_channels, sums_wait
from penstock.ir.compiled import compile_if_large
from penstock.ir.program import moments
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline
from penstock.sim.completion import complete_timeline


def simulate_in_order(schedule: Schedule, cost: Cost, channels: int = 1) -> Timeline:
    """The timeline of a schedule under a cost, if the messages of a rank share one or two channels.

    >>> from penstock import UnitCost, make
    >>> schedule = make("zb-v", ranks=4, microbatches=8)
    >>> simulate_in_order(schedule, UnitCost(comm=0.25)).makespan
    33.0
    >>> simulate_in_order(schedule, UnitCost(comm=0.25), channels=2).makespan
    30.0
    """
    check_channels(channels)
    table = schedule.table
    costs = columns(schedule, cost)
    target = table.target()
    start = np.empty(len(table))
    end = np.empty(len(table))
    sent = np.full(len(table), np.nan)
    arrived = np.full(len(table), np.nan)
    cause = np.full(len(table), -1, dtype=np.int32)
    run = compile_if_large(_run, len(table))
    run(
        moments(table, target),
        table.rank,
        target,
        table.needs,
        seconds_in_lanes(schedule, costs),
        costs.pause,
        costs.latency + costs.wire,
        costs.send,
        costs.receive,
        start,
        end,
        sent,
        arrived,
        cause,
        np.zeros((schedule.ranks, channels)),
    )
    return complete_timeline(
        schedule,
        cost,
        costs,
        start,
        end,
        sent,
        arrived,
        cause,
        sums_wait(channels),
    )


def _run(
    moments: Ints,
    rank: Ints,
    target: Ints,
    needs: Ints,
    seconds: Floats,
    pause: Floats,
    hop: Floats,
    send: Floats,
    receive: Floats,
    start: Floats,
    end: Floats,
    sent: Floats,
    arrived: Floats,
    cause: Ints,
    free: Floats,
) -> None:
    """Go through the runs and the messages of a step. `free` says when each channel of a rank is free again."""
    channels = free.shape[1]
    last = np.full(len(free), -1, np.int64)  # the last action that has run on a rank
    for moment in moments:
        if moment >= 0:
            mine = rank[moment]
            before = last[mine]
            now = end[before] + pause[before] if before >= 0 else 0.0
            held_up = before
            for column in range(needs.shape[1]):
                needed = needs[moment, column]
                if needed >= 0:
                    there = end[needed] if rank[needed] == mine else arrived[needed]
                    if there > now:
                        now = there
                        held_up = needed
            start[moment] = now
            end[moment] = now + seconds[moment]
            cause[moment] = held_up
            last[mine] = moment
        else:
            number = ~moment
            source = rank[number]
            there = target[number]
            channel = 1 % channels if source < there else 0
            # A rank's own last action has ended by then, because torch lets a message wait for it.
            leave = max(free[source, channel], end[last[source]])
            take = free[there, channel]
            if last[there] >= 0:
                take = max(take, end[last[there]])
            saved = hop[number] - receive[number]  # if the receiver comes late
            if take - saved > leave:
                # The buffers hold it meanwhile, as if it left just in time.
                sent[number] = take - saved
                arrived[number] = take + receive[number]
            else:
                sent[number] = leave
                arrived[number] = leave + hop[number]
            free[source, channel] = min(leave + send[number], arrived[number])
            free[there, channel] = arrived[number]
