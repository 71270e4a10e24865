"""A time that no order of the lanes can beat, for given stages, paths and costs.

A rank cannot begin before a micro-batch has reached it, and it must do all its work. After its last
backward the ranks before it still have backwards to do (but not after a W, which no rank waits for):

    rank 2 | ....head.... | work work work work work | ....tail....

    bound = the largest head + work + tail of any rank
          = or the time of one micro-batch alone, there and back, if that is larger

For waves this is 3 M + 3(P-1)/(2W) + 2(P-1)c with whole backwards, 3 M + (P-1)/(2W) + (P-1)c with split ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.ir.action import Action, Op
from penstock.ir.needs import BACKWARD, WEIGHTS
from penstock.ir.schedule import MicroBatch, Schedule


def lower_bound(
    schedule: Schedule, cost: Cost, cap: float | Sequence[float] | None = None
) -> float:
    """Return a time that no lanes with these stages, paths, cuts and split backwards can beat."""
    table = schedule.table
    seconds = columns(schedule, cost).seconds
    work = [float(seconds[begin:end].sum()) for begin, end in pairwise(table.first)]
    head = [math.inf] * schedule.ranks
    tail = [math.inf] * schedule.ranks
    alone = 0.0
    for number in _distinct_microbatches(schedule):
        walk = _Walk(schedule, cost, number)
        alone = max(alone, walk.there_and_back)
        for rank, before, after in walk.first_visits:
            head[rank] = min(head[rank], before)
            tail[rank] = min(tail[rank], after)
    for rank in set(table.rank[table.kind == WEIGHTS].tolist()):
        tail[rank] = 0.0  # its last action may be a W
    bound = alone
    for rank in range(schedule.ranks):
        if head[rank] < math.inf:
            bound = max(bound, head[rank] + work[rank] + tail[rank])
    return bound


class _Walk:
    """The way of a micro-batch's first slice along its path and back.

    first_visits: (rank, seconds before it is reached, seconds after its last backward).
    there_and_back: seconds of the whole way.
    """

    def __init__(self, schedule: Schedule, cost: Cost, number: int) -> None:
        path = schedule.microbatches[number].path
        self.first_visits: list[tuple[int, float, float]] = []
        self.there_and_back = 0.0
        before = 0.0
        after = 0.0
        seen: set[int] = set()
        for position, stage in enumerate(path):
            rank = schedule.stages[stage].rank
            forward = Action(Op.F, stage, number)
            backward = _backward(schedule, number, position)
            forward_seconds = cost.seconds(schedule, forward)
            backward_seconds = cost.seconds(schedule, backward)
            if rank not in seen:
                seen.add(rank)
                self.first_visits.append((rank, before, after))
            if position + 1 == len(path):
                self.there_and_back = (
                    before + forward_seconds + backward_seconds + after
                )
                return
            next_rank = schedule.stages[path[position + 1]].rank
            next_backward = _backward(schedule, number, position + 1)
            before += forward_seconds + _hop_seconds(
                schedule, cost, forward, rank, next_rank
            )
            after += backward_seconds + _hop_seconds(
                schedule, cost, next_backward, next_rank, rank
            )


def _distinct_microbatches(schedule: Schedule) -> list[int]:
    """Return one micro-batch of each kind: same path, same cuts, backwards split on the same stages."""
    kinds: dict[tuple[MicroBatch, tuple[Op, ...]], int] = {}
    for number, microbatch in enumerate(schedule.microbatches):
        positions = range(len(microbatch.path))
        ops = tuple(_backward(schedule, number, at).op for at in positions)
        kinds.setdefault((microbatch, ops), number)
    return list(kinds.values())


def _backward(schedule: Schedule, number: int, position: int) -> Action:
    """Return the B or I of a micro-batch's first slice at a position of its path."""
    table = schedule.table
    slot = table.slot(BACKWARD, number, position, 0)
    return table.action(int(table.at[slot]))


def _hop_seconds(
    schedule: Schedule, cost: Cost, action: Action, source: int, target: int
) -> float:
    """Return the seconds of an action's message from one rank to another."""
    if source == target:
        return 0.0
    size = cost.message(schedule, action)
    return cost.latency(source, target) + size / cost.bandwidth(source, target)
