"""The schedule that is left when ranks are lost: the others take over their micro-batches, so that all are trained.

    stages    rank 0: part 0   rank 1: part 1   rank 2: part 0   rank 3: part 1

    rank 1 is lost       before          after, with ranks 0 2 3 numbered 0 1 2
    micro-batches 0 1    0 -> 1          0 -> 3
    micro-batches 2 3    2 -> 3          2 -> 3

A micro-batch that visited a lost rank visits another rank with the same parts, the one that has the
least to do. The rest of its path stays, so the ranks that worked with the lost one keep working;
unless it is faster to leave out the whole pipeline that the lost rank belonged to. If nobody else
holds a part, the rank with the least to do gets it.

A short search finds the order of the lanes. It counts its work, so the same loss always gives the same
plan. A rank may hold as many activations as before, or as another rank with as many weights did: in
many schedules the last ranks hold fewer than their memory has room for.

Which ranks of a plan stay empty if there are too few workers, and the speed that the others allow.

    ranks    0: parts 0 3   1: part 1   2: part 2   3: parts 0 3   4: part 1   5: part 2

    the worker of rank 0 is lost      Rank 3 has twice the work, and a step takes twice as long.
    the worker of rank 2 moves        Rank 2 is empty instead of rank 0. Part 2 has little to do, so a step
                                      takes hardly longer than before.

A worker that changes its rank gets the weights of another part, so a move must pay. `least_time` compares
ranks without planning paths and orders: no plan for the ranks that are not empty can be faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.cost.cost import UnitCost
from penstock.errors import ShapeError
from penstock.ir.action import Action
from penstock.ir.compiled import many_schedules
from penstock.ir.plan import Plan
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.plan.orders import OrderSearch
from penstock.schedules.coverage import pipelines_of
from penstock.sim.simulate import simulate

# Work of one search: simulations of all lanes, and actions that they may time together, which
# takes a tenth of a second.
MAX_SIMULATIONS = 4_000
MAX_REPLANNED_ACTIONS = 2_000_000
HEAD_WORK = 0.5  # work of a part without layers, compared with a layer
# Weights of the embedding, and of the head, compared with a layer.
END_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class PacedCost(UnitCost):
    """Every part takes its own time and memory, and every rank has its own speed."""

    parts: tuple[float, ...] = ()  # the work of each part
    paces: tuple[float, ...] = ()  # of each rank: 2 takes twice as long as 1

    def share(self, schedule: Schedule, action: Action) -> float:
        """The work of an action, in forwards of a part with work 1."""
        microbatch = schedule.microbatches[action.microbatch]
        begin, end = schedule.span(action)
        tokens = (end - begin) / microbatch.tokens
        return tokens * self.parts[schedule.stages[action.stage].part]

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes on its rank."""
        pace = self.paces[schedule.rank_of(action)] if self.paces else 1.0
        # Without zero-argument super, which a dataclass with slots does not support.
        return pace * UnitCost.seconds(self, schedule, action)


def part_work(plan: Plan) -> list[float]:
    """Return the work of each part, in layers."""
    return [max(float(layers), HEAD_WORK) for layers in plan.partition]


def orphans(schedule: Schedule, lost: Collection[int]) -> tuple[int, ...]:
    """Return the parts that only lost ranks hold."""
    left = {stage.part for stage in schedule.stages if stage.rank not in lost}
    return tuple(part for part in range(schedule.parts) if part not in left)


def without_ranks(
    schedule: Schedule,
    lost: Collection[int],
    work: Sequence[float] = (),
    homes: Mapping[int, int] | None = None,
    paces: Sequence[float] = (),
) -> Schedule:
    """Return the schedule for the ranks that are left, renumbered in their order.

    work: the work of each part, such as its layers; by default all have the same.
    homes: ranks (by their old numbers) that should take orphaned parts, if they are left.
    paces: how long each rank (by its old number) takes for the same work, compared with
        the others. Replicas of a part get work in proportion to their speed.

    >>> from penstock import make
    >>> from penstock.schedules.transforms import replicate
    >>> two = replicate(make("1f1b", ranks=2, microbatches=2), 2)
    >>> smaller = without_ranks(two, [1])
    >>> smaller.ranks, [m.path for m in smaller.microbatches]
    (3, [(0, 2), (0, 2), (1, 2), (1, 2)])
    """
    left = [rank for rank in range(schedule.ranks) if rank not in lost]
    if not left:
        raise ShapeError("all ranks are lost, so nobody can take over their work")
    works = tuple(work) or (1.0,) * schedule.parts
    pace = tuple(paces) or (1.0,) * schedule.ranks
    survivors = _Survivors(schedule, left, works, pace)
    survivors.adopt(orphans(schedule, lost), homes or {})
    damaged = _stages_beside(schedule, lost)
    choices = survivors.route_choices(damaged, rebalance=bool(paces))
    cost = PacedCost(parts=works, paces=tuple(pace[rank] for rank in left))
    return _fastest_schedule(survivors, choices, cost)


def _fastest_schedule(
    survivors: _Survivors, choices: Sequence[Sequence[MicroBatch]], cost: PacedCost
) -> Schedule:
    """Search for the lanes of each choice of paths, and return the fastest schedule."""
    split = survivors.schedule.is_split
    best: Schedule | None = None
    shortest = math.inf
    with many_schedules():
        for routed in choices:
            stages, microbatches = survivors.renumber(routed)
            caps = survivors.caps(microbatches, stages)
            found = _order(stages, microbatches, cost, caps, split, shortest)
            if found is None:
                continue
            makespan = float(simulate(found, cost).makespan)
            if makespan < shortest:
                best = found
                shortest = makespan
    assert best is not None
    return best


def _stages_beside(schedule: Schedule, lost: Collection[int]) -> frozenset[int]:
    """The stages of pipelines that have lost a rank."""
    pipelines = pipelines_of(schedule)
    hit = set()
    for number, stage in enumerate(schedule.stages):
        if stage.rank in lost:
            hit.add(pipelines[number])
    return frozenset(n for n, pipeline in enumerate(pipelines) if pipeline in hit)


def _order(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    cost: PacedCost,
    caps: Sequence[float],
    split: bool,
    limit: float,
) -> Schedule | None:
    """Search for lanes of all ranks; return None if no order can be faster than `limit`.

    Ranks without anything to do come back with empty lanes.
    """
    ranks = 1 + max(stage.rank for stage in stages)
    search = OrderSearch(stages, microbatches, cost, split)
    bound = search.bound(caps[:ranks])
    if bound >= limit:
        return None
    work = min(MAX_SIMULATIONS, MAX_REPLANNED_ACTIONS // search.size)
    best = search.best(caps[:ranks], work, bound=bound)
    idle = len(caps) - best.ranks
    lanes = [*best.lanes, *[()] * idle]
    return schedule_of(best.stages, best.microbatches, lanes)


class _Survivors:
    """The stages that are left, and how much each rank has to do."""

    def __init__(
        self,
        schedule: Schedule,
        left: Sequence[int],
        work: Sequence[float],
        pace: Sequence[float],
    ) -> None:
        self.schedule = schedule
        self.left = left
        self.work = work
        self.pace = pace
        # The stages that are left, with their old ranks; None in place of a lost stage.
        self.stages: list[Stage | None] = [
            stage if stage.rank in left else None for stage in schedule.stages
        ]
        self.adopted: dict[int, int] = {}  # from an orphaned part to its new rank
        self.load = dict.fromkeys(left, 0.0)
        for microbatch in schedule.microbatches:
            for number in microbatch.path:
                self.count(number)

    def count(self, number: int, times: int = 1) -> None:
        """Add the visit of a micro-batch to the load of the stage's rank, if it is left."""
        stage = self.stages[number]
        if stage is not None:
            work = self.work[stage.part] * self.pace[stage.rank]
            self.load[stage.rank] += times * work

    def adopt(self, parts: Sequence[int], homes: Mapping[int, int]) -> None:
        """Give each orphaned part to a rank: its home, or the rank with the least to do."""
        visits = Counter(
            self.schedule.stages[number].part
            for microbatch in self.schedule.microbatches
            for number in microbatch.path
        )
        for part in parts:
            rank = homes.get(part, -1)
            if rank not in self.load:
                rank = min(self.left, key=lambda one: (self.load[one], one))
            self.adopted[part] = rank
            self.load[rank] += visits[part] * self.work[part] * self.pace[rank]
            self.stages.append(Stage(rank, part))

    def can_leave(self, unused: frozenset[int]) -> bool:
        """Whether every part has a stage besides these, so that micro-batches can avoid them."""
        others = set()
        for number, stage in enumerate(self.stages):
            if stage is not None and number not in unused:
                others.add(stage.part)
        return bool(unused) and len(others) == self.schedule.parts

    def route_choices(
        self, damaged: frozenset[int], rebalance: bool
    ) -> list[list[MicroBatch]]:
        """Return the different ways to route the micro-batches: with and without the `damaged` stages."""
        avoided: list[frozenset[int]] = [frozenset()]
        if self.can_leave(damaged):
            avoided.append(damaged)
        choices: list[list[MicroBatch]] = []
        for unused in avoided:
            for last_first in (False, True):
                routed = self.routes(unused, rebalance, last_first)
                if routed not in choices:
                    choices.append(routed)
        return choices

    def routes(
        self, unused: frozenset[int], rebalance: bool, last_first: bool
    ) -> list[MicroBatch]:
        """Return the micro-batches, with paths over stages that are left and not `unused`.

        With `rebalance`, they also leave stages whose ranks are slower than others; the last
        ones leave first if `last_first`.
        """
        load_before = dict(self.load)
        order = self.schedule.microbatches
        for microbatch in order:
            for number in microbatch.path:
                if number in unused:
                    self.count(number, -1)
        places = self.places(unused)
        routed = []
        for microbatch in reversed(order) if last_first else order:
            path = self.reroute(microbatch.path, unused, rebalance, places)
            routed.append(replace(microbatch, path=path))
        self.load = load_before
        return routed[::-1] if last_first else routed

    def reroute(
        self,
        path: Sequence[int],
        unused: frozenset[int],
        rebalance: bool,
        places: Mapping[int, Mapping[int, int]],
    ) -> tuple[int, ...]:
        """Return a path without stages that are gone; with `rebalance`, all its visits move."""
        new_path = list(path)
        for positions in self.visits_by_rank(path):
            leaving = []
            for position in positions:
                number = path[position]
                is_gone = self.stages[number] is None or number in unused
                if rebalance and not is_gone:
                    self.count(number, -1)
                if rebalance or is_gone:
                    leaving.append(position)
            parts = [self.schedule.stages[path[one]].part for one in leaving]
            hosts = self.hosts(parts, places)
            for position, number in zip(leaving, hosts, strict=True):
                new_path[position] = number
        return tuple(new_path)

    def visits_by_rank(self, path: Sequence[int]) -> list[list[int]]:
        """The positions of a path, those on the same rank together."""
        positions: dict[int, list[int]] = {}
        for position, number in enumerate(path):
            rank = self.schedule.stages[number].rank
            positions.setdefault(rank, []).append(position)
        return list(positions.values())

    def places(self, unused: frozenset[int]) -> dict[int, dict[int, int]]:
        """The stages that may be visited, by rank and part."""
        places: dict[int, dict[int, int]] = {rank: {} for rank in self.left}
        for number, stage in enumerate(self.stages):
            if stage is not None and number not in unused:
                places[stage.rank].setdefault(stage.part, number)
        return places

    def hosts(
        self, parts: Sequence[int], places: Mapping[int, Mapping[int, int]]
    ) -> list[int]:
        """The stages that a micro-batch visits for some parts, counted in.

        One rank takes all of them if it can, so that visits that were together stay together:
        the one that will be done first.
        """
        ranks = [r for r in self.left if all(part in places[r] for part in parts)]
        if not ranks:
            return [self.hosts([part], places)[0] for part in parts]
        work = sum(self.work[part] for part in parts)
        best = min(ranks, key=lambda r: (self.load[r] + work * self.pace[r], r))
        stages = [places[best][part] for part in parts]
        for part, number in zip(parts, stages, strict=True):
            # The load of an adopted part is counted already.
            if part not in self.adopted:
                self.count(number)
        return stages

    def renumber(
        self, microbatches: Sequence[MicroBatch]
    ) -> tuple[list[Stage], list[MicroBatch]]:
        """Return stages and micro-batches without gaps in the numbers of ranks and stages."""
        ranks = {rank: number for number, rank in enumerate(self.left)}
        stages: list[Stage] = []
        numbers = {}
        for number, stage in enumerate(self.stages):
            if stage is not None:
                numbers[number] = len(stages)
                stages.append(Stage(ranks[stage.rank], stage.part))
        renumbered = []
        for microbatch in microbatches:
            path = tuple(numbers[stage] for stage in microbatch.path)
            renumbered.append(replace(microbatch, path=path))
        return stages, renumbered

    def caps(
        self, microbatches: Sequence[MicroBatch], stages: Sequence[Stage]
    ) -> list[float]:
        """The most activations that each rank may hold.

        That is what it held before or, if ranks are lost, what any rank with at least as many
        weights held. A rank that adopted a part may hold in addition what the part's old ranks
        held, and every rank must be able to hold one whole micro-batch.
        """
        before = PacedCost(parts=tuple(self.work), paces=tuple(self.pace))
        peaks = simulate(self.schedule, before).peak_activations.tolist()
        caps = [peaks[rank] for rank in self.left]
        if len(self.left) < self.schedule.ranks:
            weights = self.weights()
            for place, rank in enumerate(self.left):
                equals = [q for q, held in enumerate(weights) if held >= weights[rank]]
                caps[place] = max(peaks[q] for q in equals)
        for part, rank in self.adopted.items():
            held = [peaks[one.rank] for one in self.schedule.stages if one.part == part]
            caps[self.left.index(rank)] += max(held, default=0.0)
        for microbatch in microbatches:
            needed = [0.0] * len(caps)
            for number in microbatch.path:
                needed[stages[number].rank] += self.work[stages[number].part]
            caps = [max(pair) for pair in zip(caps, needed, strict=True)]
        return caps

    def weights(self) -> list[float]:
        """The weights that each rank of the whole schedule holds, in layers."""
        last = self.schedule.parts - 1
        weights = [0.0] * self.schedule.ranks
        for rank, part in {(one.rank, one.part) for one in self.schedule.stages}:
            weights[rank] += self.work[part]
            weights[rank] += END_WEIGHT * ((part == 0) + (part == last))
        return weights


# ---------------------------------------------------------------- empty ranks
# The share of a step that a worker must save with its move to another rank.
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
    paths = [
        [schedule.stages[number].part for number in microbatch.path]
        for microbatch in schedule.microbatches
    ]
    visits = Counter(part for path in paths for part in path)
    split = schedule.is_split
    is_sliced = any(one.slices > 1 for one in schedule.microbatches)
    cost = UnitCost()
    forward = cost.F
    back, backward = cost.least_backward(split)
    # One visit of a part, there and back.
    seconds = [(forward + backward) * one for one in work]
    longest = 0.0
    if not is_sliced:  # The first slice of a micro-batch comes earlier than all of it.
        alone = max(sum(work[part] for part in path) for path in paths)
        longest = alone * (forward + back)
    slow = paces or {}
    groups = _groups(schedule, empty)
    for part in orphans(schedule, empty):
        groups[frozenset({part})] = {-1}
    for parts, ranks in groups.items():
        total = sum(visits[part] * seconds[part] for part in parts)
        share = total / sum(1 / slow.get(rank, 1.0) for rank in ranks)
        if len(parts) == 1 and not slow:
            part = min(parts)
            share = max(share, math.ceil(visits[part] / len(ranks)) * seconds[part])
        ways = [_work_before(path, parts, work) for path in paths if {*path} & parts]
        if ways and not is_sliced:
            # A rank can end with weight gradients, which nothing waits for, if backwards are split.
            share += min(ways) * (forward + (0.0 if split else backward))
        longest = max(longest, share)
    return longest


def _work_before(
    path: Sequence[int], parts: Collection[int], work: Sequence[float]
) -> float:
    """Return the work on a path before the first of some parts."""
    before = 0.0
    for part in path:
        if part in parts:
            break
        before += work[part]
    return before


def moves_to_empty_ranks(plan: Plan, empty: Collection[int]) -> dict[int, int]:
    """Return which ranks might be empty instead, each with the empty rank that its worker would take.

    Every move makes the least time of a step shorter by a tenth or more. Whether a step of the
    best plan becomes shorter, too, is for the caller to find out.
    """
    work = part_work(plan)

    def mean_time(empty_ranks: Collection[int]) -> float:
        return sum(least_time(one, empty_ranks, work) for one in plan.schedules)

    schedule = plan.schedule
    moves: dict[int, int] = {}
    now = set(empty)
    best = mean_time(now)
    for _ in range(len(now)):
        found = None
        for rank in _one_of_each_kind(schedule, set(range(schedule.ranks)) - now):
            for goal in _one_of_each_kind(schedule, now - moves.keys()):
                then = (now - {goal}) | {rank}
                if rank in moves.values() or _loses_parts(schedule, now, then):
                    continue
                time = mean_time(then)
                if time <= (1 - LEAST_SAVED_BY_A_MOVE) * best + TIED_LAYERS:
                    found, best = (rank, goal, then), time
        if found is None:
            break
        rank, goal, now = found
        moves[rank] = goal
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
