"""The parts that a plan's paths leave out: who holds them, and how all of them are evaluated.

    parts   0 1 2 3 head      paths 0 1 3 head, 0 3 1 head: no micro-batch visits part 2

Training along such paths never changes part 2, but its weights belong to the model. So some rank holds them, every
checkpoint has them, and the loss on held-out text is measured through all parts, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of


def hold_every_part(schedule: Schedule) -> Schedule:
    """The same schedule, with a stage for each part that has none, on the rank that holds the fewest stages.

    Raises if a path does not begin with the first part, which has the embedding, or does not end with the last part,
    which has the head.
    """
    _check_ends(schedule)
    held = {stage.part for stage in schedule.stages}
    missing = [part for part in range(schedule.parts) if part not in held]
    if not missing:
        return schedule
    counts = [
        sum(stage.rank == rank for stage in schedule.stages)
        for rank in range(schedule.ranks)
    ]
    added = []
    for part in missing:
        rank = counts.index(min(counts))
        counts[rank] += 1
        added.append(Stage(rank, part))
    return schedule_of(
        [*schedule.stages, *added], schedule.microbatches, schedule.lanes
    )


def _check_ends(schedule: Schedule) -> None:
    last = schedule.parts - 1
    for number, microbatch in enumerate(schedule.microbatches):
        begin, end = (schedule.stages[microbatch.path[place]].part for place in (0, -1))
        if (begin, end) != (0, last):
            raise ShapeError(
                f"the path of micro-batch {number} goes from part {begin} to part {end}; it must begin with part 0, "
                f"which has the embedding, and end with part {last}, which has the head\n"
                "  put both on every path of the plan"
            )


def visited_parts(schedule: Schedule) -> frozenset[int]:
    """The parts that some micro-batch visits: the others are never trained."""
    return frozenset(
        schedule.stages[stage].part
        for one in set(schedule.microbatches)
        for stage in one.path
    )


def through_all_parts(schedule: Schedule) -> Schedule:
    """A schedule over the same stages in which every micro-batch visits all parts, in order; for evaluation.

    A schedule whose paths do so already is returned as it is. Each micro-batch keeps the stages that it visits; for
    every other part it takes a stage of its own pipeline (of its own data-parallel copy) if there is one, and
    micro-batches take turns where there are several.
    """
    everything = tuple(range(schedule.parts))
    if all(
        tuple(schedule.stages[stage].part for stage in m.path) == everything
        for m in set(schedule.microbatches)
    ):
        return schedule
    pipelines = _pipelines(schedule)
    table = []
    for number, microbatch in enumerate(schedule.microbatches):
        own = {schedule.stages[stage].part: stage for stage in microbatch.path}
        pipeline = pipelines[microbatch.path[0]]
        path = [
            own[part]
            if part in own
            else _stage_of(schedule, part, pipelines, pipeline, number)
            for part in everything
        ]
        table.append(replace(microbatch, path=tuple(path)))
    return schedule_of(schedule.stages, table, _wavefronts(schedule, table))


def count_pipelines(schedule: Schedule) -> int:
    """Pipelines that no micro-batch connects, such as data-parallel copies."""
    pipelines = _pipelines(schedule)
    return len({pipelines[microbatch.path[0]] for microbatch in schedule.microbatches})


def _pipelines(schedule: Schedule) -> list[int]:
    """Numbers the stages so that two have the same number if micro-batches connect them: copies have different ones."""
    group = list(range(len(schedule.stages)))

    def root(stage: int) -> int:
        while group[stage] != stage:
            stage = group[stage]
        return stage

    for path in {microbatch.path for microbatch in schedule.microbatches}:
        for stage in path[1:]:
            group[root(stage)] = root(path[0])
    return [root(stage) for stage in range(len(group))]


def _stage_of(
    schedule: Schedule, part: int, pipelines: Sequence[int], pipeline: int, turn: int
) -> int:
    """A stage of a part: one of this pipeline, or one on a rank of this pipeline, or any."""
    ranks = {
        stage.rank
        for number, stage in enumerate(schedule.stages)
        if pipelines[number] == pipeline
    }
    found = [
        number for number, stage in enumerate(schedule.stages) if stage.part == part
    ]
    for near in (
        [one for one in found if pipelines[one] == pipeline],
        [one for one in found if schedule.stages[one].rank in ranks],
    ):
        if near:
            return near[turn % len(near)]
    return found[turn % len(found)]


def _wavefronts(schedule: Schedule, table: Sequence[MicroBatch]) -> list[list[Action]]:
    """Lanes with all forwards first: micro-batch m is at the p-th stage of its path in tick m + p.

    The backwards come in the reverse order. A schedule needs them; an evaluation does not run them.
    """
    forwards = sorted(
        (number + place, number, stage, piece)
        for number, microbatch in enumerate(table)
        for place, stage in enumerate(microbatch.path)
        for piece in range(microbatch.slices)
    )
    lanes: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for op, order in ((Op.F, forwards), (Op.B, forwards[::-1])):
        for _, number, stage, piece in order:
            lanes[schedule.stages[stage].rank].append(Action(op, stage, number, piece))
    return lanes
