"""Predict when everything happens, in one pass over the actions.

    start = as soon as the rank is free and has rested, and all results that it needs are there
    end   = start + seconds

A message leaves when its action ends. On a serial link, each message waits for the one before
it. A rank finishes its actions in the order of its lane, so its messages take each link in that
order, too.

**Messages that wait for each other**, as they do over NCCL: each of its two ranks must first have done
everything that comes before the message in its program: its actions, because torch lets a message wait
for what was launched before, and its messages, because a communicator carries one after the other.

    rank 0   ▓▓▓ 0F1 ▓▓▓ 0F1>1 ──►                        0F1 has left, but rank 1 still computes, and then
    rank 1   ▓▓▓▓▓▓▓▓▓ 1F0 ▓▓▓▓▓▓▓▓▓ 2B0<2 ──► 0F1<0      receives 2B0 first, because its program has it first
    rank 2                   ▓▓▓▓▓▓▓ 2B0 ▓▓▓▓▓

A sender goes on before its message has arrived, and a late receiver takes it in less than its whole
way, as far as the buffers between them hold it (`penstock.cost.network`). Without buffers a message
keeps both of its ranks until it has arrived. With two channels, messages to higher ranks and messages
to lower ranks do not wait for each other. With one, sums of gradients wait for the end of a lane.

A profile that was measured over NCCL says how many channels its network has. `simulate` then
predicts this way, and so does everything that calls it: plans, forecasts, reports.

A search times the same actions in many orders. Its loop in `penstock.plan.improve` takes the same columns
(`Actions`), and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock.cost import Cost, ModelCost, PartCost, Seconds
from penstock.cost.columns import Columns, columns, levels, seconds_in_lanes
from penstock.cost.memory import weights_of
from penstock.cost.network import check_channels, sums_wait
from penstock.ir import Op, Schedule, Timeline
from penstock.ir.action import COMPUTING_OPS
from penstock.ir.compiled import compile_if_large
from penstock.ir.program import moments
from penstock.ir.table import Floats, Ints
from penstock.sim.sums import sums_of


class Actions(NamedTuple):
    """The columns of the actions that decide when each of them runs; the numbers of `Columns` and `Table`."""

    first: Ints  # number of the first action of each lane; one more entry for the end
    rank: Ints
    target: Ints  # the rank that receives the result of an action; -1 if it stays
    needs: Ints
    seconds: Floats
    pause: Floats
    link: Ints
    latency: Floats
    wire: Floats
    send: Floats
    receive: Floats


class Times(NamedTuple):
    """When every action and its message start and end, and the action that each one waited for last; -1 for none."""

    start: Floats
    end: Floats
    sent: Floats
    arrived: Floats
    cause: Ints


def actions_of(schedule: Schedule, costs: Columns, seconds: Floats) -> Actions:
    """Return the columns of a schedule whose actions take these seconds."""
    table = schedule.table
    return Actions(
        table.first,
        table.rank,
        costs.target,
        table.needs,
        seconds,
        costs.pause,
        costs.link,
        costs.latency,
        costs.wire,
        costs.send,
        costs.receive,
    )


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The timeline of a schedule under a cost.

    >>> from penstock import UnitCost, make, simulate
    >>> simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()).makespan
    33.0
    """
    if cost.network.channels is not None:
        return simulate_in_order(schedule, cost, cost.network.channels)
    return _simulate(schedule, cost, channels=0)


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
    return _simulate(schedule, cost, channels)


def _simulate(schedule: Schedule, cost: Cost, channels: int) -> Timeline:
    """The timeline of a schedule whose ranks share this many channels; 0 if messages leave at once."""
    table = schedule.table
    costs = columns(schedule, cost)
    actions = actions_of(schedule, costs, seconds_in_lanes(schedule, costs))
    count = len(table)
    times = Times(
        np.empty(count),
        np.empty(count),
        np.full(count, np.nan),
        np.full(count, np.nan),
        np.full(count, -1, dtype=np.int32),
    )
    order = moments(table, actions.target) if channels else table.order
    compile_if_large(_run, count)(order, actions, cost.network.serial, channels, times)
    return complete_timeline(schedule, cost, costs, times, sums_wait(channels))


def complete_timeline(
    schedule: Schedule,
    cost: Cost,
    costs: Columns,
    times: Times,
    sums_wait: bool = False,
) -> Timeline:
    """A timeline with these times, the memory in use meanwhile, and the sums of gradients."""
    return Timeline(
        schedule,
        times.start,
        times.end,
        levels(schedule, costs),
        weights_of(schedule, cost),
        times.sent,
        times.arrived,
        costs.bytes,
        times.cause,
        cost.units,
        sums_of(schedule, cost, times.end, sums_wait),
    )


def _run(
    order: Ints, actions: Actions, serial: bool, channels: int, times: Times
) -> None:
    """Go through the runs and the messages of a step, and write down their times.

    Without channels, `order` has the actions, and every message leaves when its action ends. With channels, it has the
    moments of the program.
    """
    first, rank, target, needs, seconds, pause, link, latency, wire, send, receive = (
        actions
    )
    start, end, sent, arrived, cause = times
    ranks = len(first) - 1
    last = np.full(ranks, -1, np.int64)  # the last action that has run on a rank
    # When each link is free again, or each channel of a rank.
    free = np.zeros(link.max() + 1 if len(link) else 1)
    busy = np.zeros((ranks, max(channels, 1)))
    for moment in order:
        number = moment if moment >= 0 else ~moment
        mine = rank[number]
        if moment >= 0:
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
            if channels == 0 and link[number] >= 0:
                leave = end[number]
                if serial:
                    leave = max(leave, free[link[number]])
                    free[link[number]] = leave + wire[number]
                sent[number] = leave
                arrived[number] = leave + wire[number] + latency[number]
        else:
            other = target[number]
            channel = 1 % channels if mine < other else 0
            # A rank's own last action has ended by then, because torch lets a message wait for it.
            leave = max(busy[mine, channel], end[last[mine]])
            take = busy[other, channel]
            if last[other] >= 0:
                take = max(take, end[last[other]])
            hop = latency[number] + wire[number]
            saved = hop - receive[number]  # if the receiver comes late
            if take - saved > leave:
                # The buffers hold it meanwhile, as if it left just in time.
                sent[number] = take - saved
                arrived[number] = take + receive[number]
            else:
                sent[number] = leave
                arrived[number] = leave + hop
            busy[mine, channel] = min(leave + send[number], arrived[number])
            busy[other, channel] = arrived[number]


# ---------------------------------------------------------------- measured steps
def simulate_own_times(timeline: Timeline) -> Timeline:
    """Simulate a measured step once more, with the typical times of its own actions (`own_cost`).

    The result shows how much of a measured bubble belongs to the schedule and how much to
    noise: every action of one operation and part takes the same time, and messages are free.
    """
    simulated = simulate(timeline.schedule, own_cost(timeline))
    return replace(simulated, activations=timeline.activations, units=timeline.units)


def own_cost(
    timeline: Timeline, middle: Callable[[list[float]], float] = median
) -> ModelCost:
    """A cost in which each action takes the `middle` of the measured times of its kind.

    Two actions are of one kind if they have the same operation and part.
    """
    schedule = timeline.schedule
    durations: dict[tuple[int, Op], list[float]] = {}
    for _, action, start, end in timeline.spans():
        kind = (schedule.stages[action.stage].part, action.op)
        durations.setdefault(kind, []).append(end - start)

    curves = {kind: Seconds(base=middle(own)) for kind, own in durations.items()}
    nothing = Seconds()
    parts = []
    for part in range(schedule.parts):
        f, b, i, w = (curves.get((part, op)) for op in COMPUTING_OPS)
        parts.append(PartCost(f or nothing, i or nothing, w or nothing, b, held=1.0))
    return ModelCost(tuple(parts))
