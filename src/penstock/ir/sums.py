"""Which gradients are summed over ranks, and in which order the sums begin.

Stages of one part on several ranks are replicas, and their gradients are summed. So are those of
tied weights, over all ranks that hold the first or the last part:

    rank 0 | 0F0 0F1 ... 0B1 [sum of part 0 ......]           a sum begins when the last backward
    rank 1 | 1F0 1F1 ... 1B1                                  of its parts is done on all its ranks,
    rank 2 | 2F0 2F1 ... 2B0 2B1 [sum of part 0 ..]           and runs while the ranks go on

All ranks begin their sums in one order: that in which the sums become ready if every action
takes one tick. The simulator and the runtime both take the order from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ir.needs import FORWARD, WEIGHTS
from penstock.ir.table import Ints

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule


class SharedGradients(NamedTuple):
    """Gradients that several ranks sum: those of one part, or of the weights that two parts share."""

    name: str
    parts: tuple[int, ...]
    ranks: tuple[int, ...]
    # The tick at which the last backward of these parts is done on all ranks.
    ready: int


def ranks_of(schedule: Schedule, parts: Sequence[int]) -> tuple[int, ...]:
    """The ranks that hold a stage of these parts. A stage that no micro-batch visits gets the sum too."""
    return tuple(
        sorted({stage.rank for stage in schedule.stages if stage.part in parts})
    )


def first_holders(schedule: Schedule, names: Sequence[Iterable[str]]) -> dict[str, int]:
    """The first rank that holds each parameter, given the names in each part. It alone counts and saves it."""
    holders: dict[str, int] = {}
    for stage in sorted(schedule.stages, key=lambda stage: stage.rank):
        for name in names[stage.part]:
            holders.setdefault(name, stage.rank)
    return holders


def completion(schedule: Schedule, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """The last backward of these parts on a rank (-1: none), and the tick of the last one on any rank."""
    table = schedule.table
    is_backward = np.isin(_part_of_actions(schedule), parts) & (table.kind != FORWARD)
    backwards = np.flatnonzero(is_backward)
    own = backwards[table.rank[backwards] == rank]
    return int(own.max(initial=-1)), int(table.tick[backwards].max(initial=0))


def weight_actions(schedule: Schedule, part: int, rank: int) -> list[int]:
    """The W actions of a part on a rank."""
    table = schedule.table
    own = (_part_of_actions(schedule) == part) & (table.rank == rank)
    actions: list[int] = np.flatnonzero(own & (table.kind == WEIGHTS)).tolist()
    return actions


def shared_gradients(
    schedule: Schedule, tied: bool = False
) -> tuple[SharedGradients, ...]:
    """All sums of a step, in the order in which they begin.

    With `tied`, the first and the last part share weights, which are summed on their own.

    >>> from penstock import make
    >>> [(one.name, one.ranks) for one in shared_gradients(make("1f1b", ranks=2, microbatches=2, copies=2))]
    [('part 1', (1, 3)), ('part 0', (0, 2))]
    """
    holders: list[set[int]] = [set() for _ in range(schedule.parts)]
    for stage in schedule.stages:
        holders[stage.part].add(stage.rank)
    groups: list[tuple[str, tuple[int, ...], set[int]]] = [
        (f"part {part}", (part,), ranks)
        for part, ranks in enumerate(holders)
        if len(ranks) > 1
    ]
    last = schedule.parts - 1
    both_ends = holders[0] | holders[last]
    if tied and last > 0 and len(both_ends) > 1:
        groups.append(("tied weights", (0, last), both_ends))
    if not groups:
        return ()
    ticks = _last_ticks(schedule)
    sums = []
    for name, parts, ranks in groups:
        ready = max(int(ticks[part]) for part in parts)
        sums.append(SharedGradients(name, parts, tuple(sorted(ranks)), ready))
    return tuple(sorted(sums, key=lambda one: (one.ready, one.name)))


def last_backwards(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The last backward of each part on each rank, by (part, rank). Parts without any are left out."""
    table = schedule.table
    backwards = np.flatnonzero(table.kind != FORWARD)
    last_of_stage = np.full(len(schedule.stages), -1, dtype=np.int64)
    np.maximum.at(last_of_stage, table.stage[backwards], backwards)
    last: dict[tuple[int, int], int] = {}
    for stage, number in zip(schedule.stages, last_of_stage.tolist(), strict=True):
        if number >= 0:
            key = (stage.part, stage.rank)
            last[key] = max(last.get(key, -1), number)
    return last


def _last_ticks(schedule: Schedule) -> Ints:
    """The tick of the last backward of each part on any rank."""
    table = schedule.table
    is_backward = table.kind != FORWARD
    parts = _part_of_actions(schedule)[is_backward]
    ticks = np.zeros(schedule.parts, dtype=np.int64)
    np.maximum.at(ticks, parts, table.tick[is_backward])
    return ticks


def _part_of_actions(schedule: Schedule) -> Ints:
    """The part of each action of a schedule's table."""
    part_of_stage = np.array([stage.part for stage in schedule.stages])
    parts: Ints = part_of_stage[schedule.table.stage]
    return parts
