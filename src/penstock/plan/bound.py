"""What no order of the lanes can beat, for given stages, paths and costs.

A rank cannot begin before a micro-batch has reached it, must do all its work, and what follows its last backward
on the ranks before it comes on top (not so after a W, which nobody waits for):

    rank 2 | ....head.... | work work work work work | ....tail....

    bound = the most, over ranks, of head + work + tail
          = or the time of one micro-batch alone, there and back, if that is more

For waves this is 3 M + 3(P-1)/(2W) + 2(P-1)c with whole backwards, 3 M + (P-1)/(2W) + (P-1)c with split ones.
"""

from __future__ import annotations

import math

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.ir.action import Action, Op
from penstock.ir.needs import BACKWARD, WEIGHTS
from penstock.ir.schedule import MicroBatch, Schedule


def lower_bound(schedule: Schedule, cost: Cost) -> float:
    """No lanes for these stages, paths, cuts and splits of backwards take less time."""
    table, costs = schedule.table, columns(schedule, cost)
    work = [
        float(costs.seconds[begin:end].sum())
        for begin, end in zip(table.first[:-1], table.first[1:], strict=True)
    ]
    head, tail = [math.inf] * schedule.ranks, [math.inf] * schedule.ranks
    alone = 0.0
    for walk in _walks(schedule, cost):
        alone = max(alone, walk.alone)
        for rank, before, after in walk.first_visits:
            head[rank], tail[rank] = min(head[rank], before), min(tail[rank], after)
    for rank in set(table.rank[table.kind == WEIGHTS].tolist()):
        tail[rank] = 0.0  # its last action may be a W
    full = [h + w + t for h, w, t in zip(head, work, tail, strict=True) if h < math.inf]
    return max([alone, *full])


class _Walk:
    """One micro-batch's first slice along its path: what comes before each rank is reached, and after it is left."""

    def __init__(self, schedule: Schedule, cost: Cost, number: int) -> None:
        microbatch = schedule.microbatches[number]
        self.first_visits: list[tuple[int, float, float]] = []
        before = after = there_and_back = 0.0
        seen: set[int] = set()
        for position, stage in enumerate(microbatch.path):
            rank = schedule.stages[stage].rank
            back = _backward(schedule, number, position)
            if rank not in seen:
                seen.add(rank)
                self.first_visits.append((rank, before, after))
            there = Action(Op.F, stage, number)
            following = microbatch.path[position + 1 : position + 2]
            for then in following:
                target = schedule.stages[then].rank
                onward = _backward(schedule, number, position + 1)
                before += cost.seconds(schedule, there) + _hop(
                    schedule, cost, there, rank, target
                )
                after += cost.seconds(schedule, back) + _hop(
                    schedule, cost, onward, target, rank
                )
            if not following:
                there_and_back = (
                    before
                    + cost.seconds(schedule, there)
                    + cost.seconds(schedule, back)
                    + after
                )
        self.alone = there_and_back


def _walks(schedule: Schedule, cost: Cost) -> list[_Walk]:
    """A walk for each kind of micro-batch: same path, same cuts, backwards split on the same stages."""
    kinds: dict[tuple[MicroBatch, tuple[Op, ...]], int] = {}
    for number, microbatch in enumerate(schedule.microbatches):
        splits = tuple(
            _backward(schedule, number, position).op
            for position in range(len(microbatch.path))
        )
        kinds.setdefault((microbatch, splits), number)
    return [_Walk(schedule, cost, number) for number in kinds.values()]


def _backward(schedule: Schedule, number: int, position: int) -> Action:
    """The B or I of the first slice there."""
    table = schedule.table
    return table.action(int(table.at[table.slot(BACKWARD, number, position, 0)]))


def _hop(
    schedule: Schedule, cost: Cost, action: Action, source: int, target: int
) -> float:
    if source == target:
        return 0.0
    return cost.latency(source, target) + cost.message(
        schedule, action
    ) / cost.bandwidth(source, target)
