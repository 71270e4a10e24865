"""Predicts when everything happens: one pass over the actions, each after all that it needs.

    start = the latest of: the rank is free; what it needs is there (over a link: once the message has arrived)
    end   = start + seconds

Messages leave when their action ends. On a serial link each waits for the one before it; a rank finishes its actions
in the order of its lane, so that order is also the order of the messages on each of its links.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.cost.cost import Cost
from penstock.ir.action import Action
from penstock.ir.compiled import at_speed
from penstock.ir.needs import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints, Table
from penstock.ir.timeline import Timeline


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """The timeline of a schedule under a cost.

    >>> from penstock import UnitCost, make, simulate
    >>> simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()).makespan
    33.0
    """
    table = schedule.table
    codes = _codes(schedule)
    seconds = _each(schedule, codes, cost.seconds)
    target = table.target()
    leaves = target >= 0
    size = np.where(leaves, _each(schedule, codes, cost.message), 0.0)
    link, latency, wire = _links(schedule, cost, target, size)
    blank = np.full(len(table), np.nan)
    start, end, sent, arrived = np.empty(len(table)), np.empty(len(table)), blank, blank.copy()
    cause = np.full(len(table), -1, dtype=np.int32)
    at_speed(_run, len(table))(
        table.order, table.rank, table.needs, seconds, link, latency, wire, cost.serial,
        start, end, sent, arrived, cause, schedule.ranks,
    )  # fmt: skip
    weights = np.zeros(schedule.ranks)
    for number, stage in enumerate(schedule.stages):
        weights[stage.rank] += cost.weights(schedule, number)
    return Timeline(schedule, start, end, _activations(schedule, codes, cost), weights, sent, arrived, size, cause)


def _run(
    order: Ints, rank: Ints, needs: Ints, seconds: Floats, link: Ints, latency: Floats, wire: Floats, serial: bool,
    start: Floats, end: Floats, sent: Floats, arrived: Floats, cause: Ints, ranks: int,
) -> None:  # fmt: skip
    last = np.full(ranks, -1, np.int64)
    free = np.zeros(link.max() + 1 if len(link) else 1)
    for number in order:
        mine = rank[number]
        before = last[mine]
        now = end[before] if before >= 0 else 0.0
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


# ---------------------------------------------------------------- costs, once for each combination
def _codes(schedule: Schedule) -> tuple[Ints, Ints]:
    """Numbers the combinations of op, stage and tokens that occur: an example of each, and each action's number."""
    table = schedule.table
    spans: dict[tuple[tuple[int, ...], int], int] = {}
    total = 0
    base = np.empty(len(schedule.microbatches), dtype=np.int64)
    for number, microbatch in enumerate(schedule.microbatches):
        key = (microbatch.cuts, microbatch.tokens)
        if key not in spans:
            spans[key] = total
            total += microbatch.slices
        base[number] = spans[key]
    span = base[table.microbatch] + table.slice
    code = (table.op.astype(np.int64) * len(schedule.stages) + table.stage) * total + span
    size = 4 * len(schedule.stages) * total
    if size > 4 * len(table) + 1024:
        _, examples, numbers = np.unique(code, return_index=True, return_inverse=True)
        return examples, numbers
    example = np.full(size, -1, dtype=np.int64)
    example[code] = np.arange(len(table))
    used = np.flatnonzero(example >= 0)
    renumber = np.zeros(size, dtype=np.int64)
    renumber[used] = np.arange(len(used))
    return example[used], renumber[code]


def _each(schedule: Schedule, codes: tuple[Ints, Ints], ask: Callable[[Schedule, Action], float]) -> Floats:
    """A cost for every action, asked once for each combination."""
    example, number = codes
    answers = [ask(schedule, schedule.table.action(int(action))) for action in example]
    column: Floats = np.array(answers, dtype=np.float64)[number]
    return column


def _links(schedule: Schedule, cost: Cost, target: Ints, size: Floats) -> tuple[Ints, Floats, Floats]:
    """Of each action's message: the link it takes (-1: none), its latency, and its seconds on the wire."""
    ranks, leaves = schedule.ranks, np.flatnonzero(target >= 0)
    pairs, where = np.unique(schedule.table.rank[leaves] * ranks + target[leaves], return_inverse=True)
    ends = [(int(pair) // ranks, int(pair) % ranks) for pair in pairs]
    link = np.full(len(target), -1, dtype=np.int64)
    latency, wire = np.zeros(len(target)), np.zeros(len(target))
    link[leaves] = where
    latency[leaves] = np.array([cost.latency(*pair) for pair in ends], dtype=np.float64)[where]
    wire[leaves] = size[leaves] / np.array([cost.bandwidth(*pair) for pair in ends], dtype=np.float64)[where]
    return link, latency, wire


def _activations(schedule: Schedule, codes: tuple[Ints, Ints], cost: Cost) -> Floats:
    """Bytes held on the rank while each action runs. A rank does one thing at a time: the order of its lane decides."""
    table: Table = schedule.table
    held, kept = _each(schedule, codes, cost.held), _each(schedule, codes, cost.kept)
    gain = np.where(table.kind == FORWARD, held, 0.0)
    loss = np.zeros(len(table))
    backward = np.flatnonzero(table.kind == BACKWARD)
    loss[backward] = held[_forward(table, backward)]
    split = backward[table.op[backward] == 2]
    loss[split] -= kept[split]
    weights = np.flatnonzero(table.kind == WEIGHTS)
    loss[weights] = kept[table.at[table.slots[weights] - 1]]
    level = np.cumsum(gain) - np.concatenate([[0.0], np.cumsum(loss)[:-1]])
    first = table.first[:-1]
    before = np.concatenate([[0.0], np.cumsum(gain) - np.cumsum(loss)])[np.minimum(first, len(table))]
    found: Floats = level - np.repeat(before, np.diff(table.first))
    return found


def _forward(table: Table, backward: Ints) -> Ints:
    found: Ints = table.at[table.slots[backward] - 1]
    return found
