"""Parts that no path visits: which rank holds them, and how an evaluation reaches them. Ranks without stages.

    parts   0 1 2 3 head      paths 0 1 3 head, 0 3 1 head: no micro-batch visits part 2

Training along these paths never changes part 2, but its weights still belong to the
model. So one rank holds them, every checkpoint contains them, and the loss on held-out
text is measured through all parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import UnitCost
from penstock.errors import ShapeError
from penstock.ir.action import Action, backward, forward
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.schedules.list_scheduling import (
    least_caps,
    list_schedule,
    oldest_first,
    sequential_schedule,
)
from penstock.sim.simulate import simulate


def hold_every_part(schedule: Schedule) -> Schedule:
    """Add a stage for each part that has none, on the rank with the fewest stages.

    Raises ShapeError if a path does not begin with the first part, which has the
    embedding, or does not end with the last part, which has the head.
    """
    _check_ends(schedule)
    held = {stage.part for stage in schedule.stages}
    missing = [part for part in range(schedule.parts) if part not in held]
    if not missing:
        return schedule
    counts = [0] * schedule.ranks
    for stage in schedule.stages:
        counts[stage.rank] += 1
    added = []
    for part in missing:
        rank = counts.index(min(counts))
        counts[rank] += 1
        added.append(Stage(rank, part))
    stages = [*schedule.stages, *added]
    return schedule_of(stages, schedule.microbatches, schedule.lanes)


def ranks_with_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return the ranks that hold a stage, in rising order."""
    return tuple(sorted({stage.rank for stage in schedule.stages}))


def drop_empty_ranks(schedule: Schedule) -> Schedule:
    """Renumber the ranks without those that hold no stage.

    A plan for the nodes of a cluster may leave nodes out, because they are lost or because
    they would only slow the others down. No process is started for them.
    """
    ranks = ranks_with_stages(schedule)
    if len(ranks) == schedule.ranks:
        return schedule
    number = {rank: place for place, rank in enumerate(ranks)}
    stages = [replace(stage, rank=number[stage.rank]) for stage in schedule.stages]
    lanes = [schedule.lanes[rank] for rank in ranks]
    return schedule_of(stages, schedule.microbatches, lanes)


def _check_ends(schedule: Schedule) -> None:
    last = schedule.parts - 1
    for number, microbatch in enumerate(schedule.microbatches):
        begin = schedule.stages[microbatch.path[0]].part
        end = schedule.stages[microbatch.path[-1]].part
        if (begin, end) != (0, last):
            raise ShapeError(
                f"the path of micro-batch {number} goes from part {begin} to part "
                f"{end}; it must begin with part 0, which has the embedding, and end "
                f"with part {last}, which has the head\n"
                "  put both on every path of the plan"
            )


def visited_parts(schedule: Schedule) -> frozenset[int]:
    """Return the parts that some micro-batch visits; the others are never trained."""
    stages = {stage for m in set(schedule.microbatches) for stage in m.path}
    return frozenset(schedule.stages[stage].part for stage in stages)


def through_all_parts(schedule: Schedule) -> Schedule:
    """Send every micro-batch through all parts in order, for an evaluation.

    The stages stay the same, and a schedule whose paths already visit every part in
    order is returned as it is. Each micro-batch keeps the stages it visits. For every
    other part it takes a stage of its own pipeline (its own data-parallel copy) if
    there is one; micro-batches take turns where there are several.
    """
    if visits_all_parts(schedule):
        return schedule
    pipelines = pipelines_of(schedule)
    microbatches = []
    for number, microbatch in enumerate(schedule.microbatches):
        own = {schedule.stages[stage].part: stage for stage in microbatch.path}
        pipeline = pipelines[microbatch.path[0]]
        path = []
        for part in range(schedule.parts):
            stage = own.get(part)
            if stage is None:
                stage = _nearest_stage(schedule, part, pipelines, pipeline, number)
            path.append(stage)
        microbatches.append(replace(microbatch, path=tuple(path)))
    lanes = _wavefronts(schedule, microbatches)
    return schedule_of(schedule.stages, microbatches, lanes)


def full_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule for steps that leave out no part, to train with now and then.

    Micro-batches take the paths of `through_all_parts`. The lanes are a list schedule in
    which no rank holds more micro-batches than in the given schedule, except where a single
    one already needs more.
    """
    if visits_all_parts(schedule):
        return schedule
    whole = through_all_parts(schedule)
    cost = UnitCost()
    split = schedule.is_split
    draft = sequential_schedule(whole.stages, whole.microbatches, split)
    least = least_caps(draft, columns(draft, cost))
    held = simulate(schedule, cost).peak_activations
    caps = np.maximum(least, held).tolist()
    return list_schedule(
        whole.stages, whole.microbatches, cost, caps, split, oldest_first
    )


def visits_all_parts(schedule: Schedule) -> bool:
    """Whether every micro-batch visits all parts in order."""
    every_part = list(range(schedule.parts))
    for microbatch in set(schedule.microbatches):
        if [schedule.stages[stage].part for stage in microbatch.path] != every_part:
            return False
    return True


def count_pipelines(schedule: Schedule) -> int:
    """Count the pipelines that no micro-batch connects, such as data-parallel copies."""
    return len(microbatches_by_pipeline(schedule))


def microbatches_by_pipeline(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of each pipeline that no micro-batch connects with another."""
    pipelines = pipelines_of(schedule)
    members: dict[int, list[int]] = {}
    for number, microbatch in enumerate(schedule.microbatches):
        members.setdefault(pipelines[microbatch.path[0]], []).append(number)
    return tuple(tuple(own) for own in members.values())


def pipelines_of(schedule: Schedule) -> list[int]:
    """Return the pipeline of each stage: stages that a path connects share a number."""
    group = list(range(len(schedule.stages)))

    def root(stage: int) -> int:
        while group[stage] != stage:
            stage = group[stage]
        return stage

    for path in {microbatch.path for microbatch in schedule.microbatches}:
        for stage in path[1:]:
            group[root(stage)] = root(path[0])
    return [root(stage) for stage in range(len(group))]


def _nearest_stage(
    schedule: Schedule, part: int, pipelines: Sequence[int], pipeline: int, turn: int
) -> int:
    """A stage of a part: in this pipeline, else on one of its ranks, else any."""
    numbered = list(enumerate(schedule.stages))
    ranks = {stage.rank for n, stage in numbered if pipelines[n] == pipeline}
    candidates = [n for n, stage in numbered if stage.part == part]
    same_pipeline = [n for n in candidates if pipelines[n] == pipeline]
    same_ranks = [n for n in candidates if schedule.stages[n].rank in ranks]
    nearest = same_pipeline or same_ranks or candidates
    return nearest[turn % len(nearest)]


def _wavefronts(
    schedule: Schedule, microbatches: Sequence[MicroBatch]
) -> list[list[Action]]:
    """Lanes with all forwards first: micro-batch m is at step p of its path in tick m + p.

    The backwards follow in reverse order. A schedule needs them, although an
    evaluation does not run them.
    """
    forwards = sorted(
        (number + place, number, stage, piece)
        for number, microbatch in enumerate(microbatches)
        for place, stage in enumerate(microbatch.path)
        for piece in range(microbatch.slices)
    )
    lanes: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for direction, order in ((forward, forwards), (backward, forwards[::-1])):
        for _, number, stage, piece in order:
            action = direction(stage, number, piece)
            lanes[schedule.rank_of(action)].append(action)
    return lanes
