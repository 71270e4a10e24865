"""A cost as columns of numbers, one entry an action of a schedule: what the simulator and the list scheduler run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.cost.around import PausingCost, RebuildingCost
from penstock.cost.cost import Cost
from penstock.ir.action import CODE, Action, Op
from penstock.ir.needs import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints, Table

ABSENT = -2  # of a path that does not come to a stage


@dataclass(frozen=True, slots=True)
class Columns:
    """Seconds and bytes of every action, and its message."""

    seconds: Floats
    gain: Floats  # bytes of activations an action adds to its rank when it starts
    loss: Floats  # bytes it sets free there when it ends
    bytes: Floats  # of its message; 0: no message
    link: Ints  # number of the link its message takes; -1: no message
    latency: Floats
    wire: Floats  # seconds its message is on the wire
    pause: Floats  # seconds its rank rests afterwards


def columns(schedule: Schedule, cost: Cost) -> Columns:
    """All of a cost for all of a schedule."""
    table, codes = schedule.table, _codes(schedule)
    target = table.target()
    size = np.where(
        target >= 0, _each(schedule, _codes_by_path(schedule, codes), cost.message), 0.0
    )
    held, kept = _each(schedule, codes, cost.held), _each(schedule, codes, cost.kept)
    pause = (
        _each(schedule, codes, cost.pause)
        if isinstance(cost, PausingCost)
        else np.zeros(len(table))
    )
    again = (
        _each(schedule, codes, cost.rebuilt)
        if isinstance(cost, RebuildingCost)
        else np.zeros(len(table))
    )
    loss = _losses(table, held, kept)
    more = np.maximum(-loss, 0.0)  # an I may keep more for its W than its F had left
    spike = np.maximum(again - more, 0.0)  # there while it runs alone
    return Columns(
        _each(schedule, codes, cost.seconds),
        np.where(table.kind == FORWARD, held, 0.0) + more + spike,
        np.maximum(loss, 0.0) + spike,
        size,
        *_links(schedule, cost, target, size),
        pause,
    )


def levels(schedule: Schedule, costs: Columns) -> Floats:
    """Bytes held on the rank while each action runs. A rank does one thing at a time: the order of its lane decides."""
    found, first = np.empty(len(costs.gain)), schedule.table.first
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        freed = np.cumsum(costs.loss[begin:end])
        found[begin:end] = np.cumsum(costs.gain[begin:end])
        found[begin + 1 : end] -= freed[:-1]
    return found


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
    code = (
        table.op.astype(np.int64) * len(schedule.stages) + table.stage
    ) * total + span
    size = len(CODE) * len(schedule.stages) * total
    if size > 4 * len(table) + 1024:
        _, examples, numbers = np.unique(code, return_index=True, return_inverse=True)
        return examples, numbers
    example = np.full(size, -1, dtype=np.int64)
    example[code] = np.arange(len(table))
    used = np.flatnonzero(example >= 0)
    renumber = np.zeros(size, dtype=np.int64)
    renumber[used] = np.arange(len(used))
    return example[used], renumber[code]


def _codes_by_path(schedule: Schedule, codes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The same, for what depends on the stage before too: a gradient is as large as what came from there."""
    rows: dict[tuple[int, ...], int] = {}
    seen: dict[int, int] = {}  # most are one and the same object
    mine = np.empty(len(schedule.microbatches), dtype=np.int64)
    for number, microbatch in enumerate(schedule.microbatches):
        row = seen.get(id(microbatch.path))
        if row is None:
            row = seen[id(microbatch.path)] = rows.setdefault(
                microbatch.path, len(rows)
            )
        mine[number] = row
    before = np.full((len(rows), len(schedule.stages)), ABSENT, dtype=np.int64)
    for path, row in rows.items():
        before[row, list(path)] = (-1, *path[:-1])
    least = np.where(before == ABSENT, len(schedule.stages), before).min(axis=0)
    if (before.max(axis=0) <= least).all():  # one and the same on all paths
        return codes
    table, (_, numbers) = schedule.table, codes
    code = (
        numbers * (len(schedule.stages) + 1)
        + 1
        + before[mine[table.microbatch], table.stage]
    )
    _, examples, renumbered = np.unique(code, return_index=True, return_inverse=True)
    return examples, renumbered


def _each(
    schedule: Schedule,
    codes: tuple[Ints, Ints],
    ask: Callable[[Schedule, Action], float],
) -> Floats:
    """A cost for every action, asked once for each combination."""
    example, number = codes
    answers = [ask(schedule, schedule.table.action(int(action))) for action in example]
    column: Floats = np.array(answers, dtype=np.float64)[number]
    return column


def _links(
    schedule: Schedule, cost: Cost, target: Ints, size: Floats
) -> tuple[Ints, Floats, Floats]:
    ranks, leaves = schedule.ranks, np.flatnonzero(target >= 0)
    pairs, where = np.unique(
        schedule.table.rank[leaves] * ranks + target[leaves], return_inverse=True
    )
    ends = [(int(pair) // ranks, int(pair) % ranks) for pair in pairs]
    link = np.full(len(target), -1, dtype=np.int64)
    latency, wire = np.zeros(len(target)), np.zeros(len(target))
    link[leaves] = where
    latency[leaves] = np.array(
        [cost.latency(*pair) for pair in ends], dtype=np.float64
    )[where]
    wire[leaves] = (
        size[leaves]
        / np.array([cost.bandwidth(*pair) for pair in ends], dtype=np.float64)[where]
    )
    return link, latency, wire


def _losses(table: Table, held: Floats, kept: Floats) -> Floats:
    """B frees what its F left; I all but what its W keeps; W the rest."""
    loss = np.zeros(len(table))
    backward = np.flatnonzero(table.kind == BACKWARD)
    loss[backward] = held[table.at[table.slots[backward] - 1]]
    split = backward[table.op[backward] == CODE[Op.I]]
    loss[split] -= kept[split]
    weights = np.flatnonzero(table.kind == WEIGHTS)
    loss[weights] = kept[table.at[table.slots[weights] - 1]]
    return loss
