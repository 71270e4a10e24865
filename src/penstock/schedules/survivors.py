"""The schedule that is left when ranks are lost: the others take over their micro-batches, so that all are trained.

    stages    rank 0: part 0   rank 1: part 1   rank 2: part 0   rank 3: part 1

    rank 1 is lost       before          after, with ranks 0 2 3 numbered 0 1 2
    micro-batches 0 1    0 -> 1          0 -> 3
    micro-batches 2 3    2 -> 3          2 -> 3

A micro-batch that visited a lost rank visits another rank with the same part, the one that has the
least to do. The rest of its path stays, so the ranks that worked with the lost one keep working;
unless it is faster to leave out the whole pipeline that the lost rank belonged to. If nobody else
holds a part, the rank with the least to do gets it. The lanes are made anew by list scheduling, and
no rank holds more activations than before, unless it got another part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.schedules.coverage import pipelines_of
from penstock.schedules.list_scheduling import (
    Priority,
    backward_first,
    list_schedule,
    oldest_first,
)
from penstock.sim.simulate import simulate


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
    """Return the schedule for the ranks that are left, numbered anew in their order.

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
    unused: list[frozenset[int]] = [frozenset()]
    damaged = _stages_beside(schedule, lost)
    if survivors.can_leave(damaged):
        unused.append(damaged)
    choices = []
    for stages_left in unused:
        choices.append(survivors.routes(stages_left, bool(paces)))
        if paces:  # Slow ranks may keep their first micro-batches, or their last ones.
            choices.append(survivors.routes(stages_left, True, last_first=True))
    split = any(action.op is Op.I for lane in schedule.lanes for action in lane)
    cost = PacedCost(parts=works, paces=tuple(pace[rank] for rank in left))
    candidates = []
    for routed in choices:
        stages, microbatches = survivors.renumber(routed)
        caps = survivors.caps(microbatches, stages)
        for priority in (backward_first, oldest_first):
            listed = _list(stages, microbatches, cost, caps, split, priority)
            candidates.append(listed)
    return min(candidates, key=lambda one: float(simulate(one, cost).makespan))


def _stages_beside(schedule: Schedule, lost: Collection[int]) -> frozenset[int]:
    """The stages of pipelines that have lost a rank."""
    pipelines = pipelines_of(schedule)
    hit = set()
    for number, stage in enumerate(schedule.stages):
        if stage.rank in lost:
            hit.add(pipelines[number])
    return frozenset(n for n, pipeline in enumerate(pipelines) if pipeline in hit)


def _list(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    cost: PacedCost,
    caps: Sequence[float],
    split: bool,
    priority: Priority,
) -> Schedule:
    """List lanes for all ranks; those without anything to do come back with empty lanes."""
    ranks = 1 + max(stage.rank for stage in stages)
    listed = list_schedule(stages, microbatches, cost, caps[:ranks], split, priority)
    idle = len(caps) - listed.ranks
    lanes = [*listed.lanes, *[()] * idle]
    return schedule_of(listed.stages, listed.microbatches, lanes)


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
        visits = [0] * self.schedule.parts
        for microbatch in self.schedule.microbatches:
            for number in microbatch.path:
                visits[self.schedule.stages[number].part] += 1
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

    def routes(
        self, unused: frozenset[int], rebalance: bool, last_first: bool = False
    ) -> list[MicroBatch]:
        """Return the micro-batches, with paths over stages that are left and not `unused`.

        With `rebalance`, they also leave stages whose ranks are slower than others; the last
        ones leave first if `last_first`.
        """
        before = dict(self.load)
        for microbatch in self.schedule.microbatches:
            for number in microbatch.path:
                if number in unused:
                    self.count(number, -1)
        microbatches = []
        order = self.schedule.microbatches
        for microbatch in reversed(order) if last_first else order:
            path = []
            for number in microbatch.path:
                chosen = number
                gone = self.stages[number] is None or number in unused
                if rebalance and not gone:
                    self.count(number, -1)
                if rebalance or gone:
                    part = self.schedule.stages[number].part
                    chosen = self.least_loaded(part, unused)
                path.append(chosen)
            microbatches.append(replace(microbatch, path=tuple(path)))
        self.load = before
        return microbatches[::-1] if last_first else microbatches

    def least_loaded(self, part: int, unused: frozenset[int]) -> int:
        """The stage of a part whose rank will be done first with one more visit, counted in."""
        best = -1
        earliest = 0.0
        for number, stage in enumerate(self.stages):
            if stage is None or stage.part != part or number in unused:
                continue
            end = self.load[stage.rank] + self.work[part] * self.pace[stage.rank]
            if best < 0 or end < earliest:
                best, earliest = number, end
        if part not in self.adopted:  # The load of an adopted part is counted already.
            self.count(best)
        return best

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
        """The most activations that each rank may hold: what it held before.

        A rank that adopted a part may hold in addition what the part's old ranks held, and
        every rank must be able to hold one whole micro-batch.
        """
        before = PacedCost(parts=tuple(self.work), paces=tuple(self.pace))
        peaks = simulate(self.schedule, before).peak_activations.tolist()
        caps = [peaks[rank] for rank in self.left]
        for part, rank in self.adopted.items():
            held = [peaks[one.rank] for one in self.schedule.stages if one.part == part]
            caps[self.left.index(rank)] += max(held, default=0.0)
        for microbatch in microbatches:
            needed = [0.0] * len(caps)
            for number in microbatch.path:
                needed[stages[number].rank] += self.work[stages[number].part]
            caps = [max(pair) for pair in zip(caps, needed, strict=True)]
        return caps
