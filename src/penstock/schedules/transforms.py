"""From schedule to schedule: split the backwards, cut the tokens, copy the pipeline, repeat it. They compose.

split_backward   | F0 F1 B0 B1      ->  F0 F1 I0 W0 I1 W1
slice_tokens     | F0 F1 B0 B1      ->  F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1
recut            | the same order, with other boundaries between the slices
replicate        | two more ranks do the same with micro-batches of their own
repeat           | F0 F1 B0 B1      ->  F0 F1 B0 B1 F2 F3 B2 B3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.schedules.orders import require_at_least, split_backwards
from penstock.schedules.size import refuse_size


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as I and W, one after the other: its input gradient leaves a W earlier. See also `defer_weights`."""
    return _expand(
        schedule,
        lambda action: split_backwards(action) if action.op is Op.B else (action,),
    )


def slice_tokens(schedule: Schedule, cuts: Sequence[int]) -> Schedule:
    """Every micro-batch cut at these token boundaries, from 0 to its number of tokens.

    >>> from penstock import make
    >>> slice_tokens(make("1f1b", ranks=2, microbatches=1), (0, 384, 1024)).lanes[1]
    (<1F0>, <1F0.1>, <1B0.1>, <1B0>)
    """
    if schedule.slices > 1:
        raise ShapeError(
            "this schedule is sliced already; cut the schedule it was made from"
        )
    pieces = range(len(cuts) - 1)

    def sliced(action: Action) -> Sequence[Action]:
        order = pieces if action.op is Op.F else reversed(pieces)
        return [action._replace(slice=piece) for piece in order]

    table = [
        replace(m, tokens=cuts[-1] if cuts else 0, cuts=tuple(cuts))
        for m in schedule.microbatches
    ]
    return _expand(schedule, sliced, table)


def recut(schedule: Schedule, cuts: Sequence[int]) -> Schedule:
    """The same order of slices, cut at other token boundaries: one more than there are slices.

    >>> from penstock import make
    >>> recut(make("seq1f1b", ranks=2, microbatches=1, slices=2), (0, 384, 1024)).microbatches[0].tokens
    1024
    """
    if {m.slices for m in schedule.microbatches} != {len(cuts) - 1}:
        raise ShapeError(
            f"{len(cuts) - 1} slices between the cuts, {schedule.slices} in the schedule"
        )
    table = [
        replace(m, tokens=cuts[-1], cuts=tuple(cuts)) for m in schedule.microbatches
    ]
    return schedule_of(schedule.stages, table, schedule.lanes)


def even_cuts(slices: int) -> tuple[int, ...]:
    """Cuts into equal slices of one token each: for where only their shares matter."""
    require_at_least(1, slices=slices)
    return tuple(range(slices + 1))


def replicate(schedule: Schedule, copies: int) -> Schedule:
    """Data parallelism: so many copies of the pipeline side by side, each with its own ranks and micro-batches."""
    require_at_least(1, copies=copies)
    refuse_size(copies * schedule.actions, f"a pipeline in {copies} copies")
    ranks, stages, count = (
        schedule.ranks,
        len(schedule.stages),
        len(schedule.microbatches),
    )
    table: list[Stage] = []
    microbatches: list[MicroBatch] = []
    lanes: list[list[Action]] = []
    for copy in range(copies):
        table += [
            Stage(stage.rank + copy * ranks, stage.part) for stage in schedule.stages
        ]
        microbatches += [
            replace(m, path=tuple(s + copy * stages for s in m.path))
            for m in schedule.microbatches
        ]
        lanes += [_moved(lane, copy * stages, copy * count) for lane in schedule.lanes]
    return schedule_of(table, microbatches, lanes)


def repeat(schedule: Schedule, units: int) -> Schedule:
    """So many times the same, one after the other, with new micro-batches each time."""
    require_at_least(1, units=units)
    count = len(schedule.microbatches)
    lanes = [
        [a for unit in range(units) for a in _moved(lane, 0, unit * count)]
        for lane in schedule.lanes
    ]
    return schedule_of(schedule.stages, schedule.microbatches * units, lanes)


def _moved(lane: Sequence[Action], stages: int, microbatches: int) -> list[Action]:
    return [
        Action(op, stage + stages, m + microbatches, piece)
        for op, stage, m, piece in lane
    ]


def _expand(
    schedule: Schedule,
    into: Callable[[Action], Sequence[Action]],
    microbatches: Sequence[MicroBatch] | None = None,
) -> Schedule:
    lanes = [
        [small for action in lane for small in into(action)] for lane in schedule.lanes
    ]
    return schedule_of(schedule.stages, microbatches or schedule.microbatches, lanes)
