"""Which places of a plan stay empty if there are too few workers, and the speed that the others allow.

    seats    0: parts 0 3   1: part 1   2: part 2   3: parts 0 3   4: part 1   5: part 2

    the worker of seat 0 is lost      Seat 3 has twice the work, and a step takes twice as long.
    the worker of seat 2 moves        Seat 2 is empty instead of seat 0. Part 2 has little to do, so a step
                                      takes hardly longer than before.

A worker that changes its seat gets the weights of another part, so a move must pay. `least_time` compares
seats without planning paths and orders: no plan for the seats that are taken can be faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from penstock.cost.unit import UnitCost
from penstock.ir.plan import Plan
from penstock.ir.schedule import Schedule
from penstock.plan.orders import has_split_backwards
from penstock.plan.survivors import orphans, part_work

# The share of a step that a worker must save with its move to another seat.
LEAST_SAVED_BY_A_MOVE = 0.1
TIED_LAYERS = 1e-9  # times that differ by less count as equal


def least_time(
    schedule: Schedule,
    empty: Collection[int],
    work: Sequence[float],
    paces: Mapping[int, float] | None = None,
) -> float:
    """Return a time that no plan for the ranks that are not empty can beat, in layers.

    Whatever paths micro-batches take, and in whatever order: the ranks that hold some parts
    do all visits of these parts, and they begin after the shortest way there. A part
    that nobody holds is adopted by one rank, which does it alone.
    """
    load = _Load(schedule, work)
    longest = load.longest_path()
    slow = paces or {}
    groups = _groups(schedule, empty)
    for part in orphans(schedule, empty):
        groups[frozenset({part})] = {-1}
    for parts, ranks in groups.items():
        total = load.seconds(parts)
        share = total / sum(1 / slow.get(rank, 1.0) for rank in ranks)
        if len(parts) == 1 and not slow:
            share = max(share, load.most_of_one_rank(min(parts), len(ranks)))
        longest = max(longest, load.shortest_ways(parts) + share)
    return longest


def seats_to_change(plan: Plan, empty: Collection[int]) -> dict[int, int]:
    """Return which taken seats might be empty instead, each with the seat that its worker would take.

    Every move makes the least time of a step shorter by a tenth or more. Whether a step of the
    best plan becomes shorter, too, is for the caller to find out.
    """
    work = part_work(plan)

    def mean_time(seats: Collection[int]) -> float:
        return sum(least_time(one, seats, work) for one in plan.schedules)

    schedule = plan.schedule
    moves: dict[int, int] = {}
    now = set(empty)
    best = mean_time(now)
    for _ in range(len(now)):
        found = None
        for seat in _one_of_each_kind(schedule, set(range(schedule.ranks)) - now):
            for goal in _one_of_each_kind(schedule, now - moves.keys()):
                then = (now - {goal}) | {seat}
                if seat in moves.values() or _loses_parts(schedule, now, then):
                    continue
                time = mean_time(then)
                if time <= (1 - LEAST_SAVED_BY_A_MOVE) * best + TIED_LAYERS:
                    found, best = (seat, goal, then), time
        if found is None:
            break
        seat, goal, now = found
        moves[seat] = goal
    return moves


def _loses_parts(schedule: Schedule, now: set[int], then: set[int]) -> bool:
    """Whether nobody would hold a part any more that somebody holds now."""
    return not set(orphans(schedule, then)) <= set(orphans(schedule, now))


def _one_of_each_kind(schedule: Schedule, ranks: Collection[int]) -> list[int]:
    """Return the last of the ranks that hold the same parts, for each set of parts."""
    held: dict[int, set[int]] = {rank: set() for rank in sorted(ranks)}
    for stage in schedule.stages:
        if stage.rank in held:
            held[stage.rank].add(stage.part)
    kinds = {frozenset(parts): rank for rank, parts in held.items()}
    return sorted(kinds.values())


def _groups(
    schedule: Schedule, empty: Collection[int]
) -> dict[frozenset[int], set[int]]:
    """Return groups of parts that share no rank with other groups, and the ranks that hold them."""
    groups: list[tuple[set[int], set[int]]] = []
    for stage in schedule.stages:
        if stage.rank in empty:
            continue
        parts, ranks = {stage.part}, {stage.rank}
        others = []
        for group in groups:
            if group[0] & parts or group[1] & ranks:
                parts |= group[0]
                ranks |= group[1]
            else:
                others.append(group)
        groups = [*others, (parts, ranks)]
    return {frozenset(parts): ranks for parts, ranks in groups}


class _Load:
    """What the micro-batches of a schedule do, in layers, wherever they do it."""

    def __init__(self, schedule: Schedule, work: Sequence[float]) -> None:
        self.work = work
        cost = UnitCost()
        self.split = has_split_backwards(schedule)
        self.is_sliced = any(one.slices > 1 for one in schedule.microbatches)
        self.forward = cost.F
        self.back, self.backward = cost.least_backward(self.split)
        self.paths = [
            [schedule.stages[number].part for number in microbatch.path]
            for microbatch in schedule.microbatches
        ]

    def seconds(self, parts: Collection[int]) -> float:
        """The time of all visits of some parts."""
        return sum(self.visits(part) * self.visit_seconds(part) for part in parts)

    def visits(self, part: int) -> int:
        """The number of visits of a part."""
        return sum(path.count(part) for path in self.paths)

    def visit_seconds(self, part: int) -> float:
        """The time of one visit of a part, there and back."""
        return (self.forward + self.backward) * self.work[part]

    def most_of_one_rank(self, part: int, ranks: int) -> float:
        """The time of the rank that has most visits of a part, dealt out as evenly as possible."""
        return math.ceil(self.visits(part) / ranks) * self.visit_seconds(part)

    def shortest_ways(self, parts: Collection[int]) -> float:
        """The least time before a rank with these parts can begin, and after it has ended.

        A rank can end with weight gradients, which nothing waits for, if backwards are split. And
        the first slice of a micro-batch comes earlier than all of it.
        """
        befores = [self._work_before(path, parts) for path in self.paths]
        found = [before for before in befores if before is not None]
        if not found or self.is_sliced:
            return 0.0
        return min(found) * (self.forward + (0.0 if self.split else self.backward))

    def _work_before(self, path: Sequence[int], parts: Collection[int]) -> float | None:
        """The work on a path before the first of some parts; None if it visits none of them."""
        before = 0.0
        for part in path:
            if part in parts:
                return before
            before += self.work[part]
        return None

    def longest_path(self) -> float:
        """The time that one micro-batch takes alone."""
        if self.is_sliced:
            return 0.0
        both = self.forward + self.back
        return max(sum(self.work[part] for part in path) * both for path in self.paths)
