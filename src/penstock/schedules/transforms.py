"""Transforms from one schedule to another: split backwards, cut tokens, move memory to the host, copy or repeat.

They can be combined.

split_backward   | F0 F1 B0 B1      ->  F0 F1 I0 W0 I1 W1
slice_tokens     | F0 F1 B0 B1      ->  F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1
recut            | the same order, with other boundaries between the slices
replicate        | more ranks do the same with micro-batches of their own
repeat           | F0 F1 B0 B1      ->  F0 F1 B0 B1 F2 F3 B2 B3
offload          | F0 F1 F2 B0 B1 B2  ->  F0 O0 F1 O1 R0 F2 O2 R1 B0 R2 B1 B2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import ShapeError
from penstock.ir.action import BACKWARD, FORWARD, Action, Op, halves
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.schedules.facts import refuse_if_too_large
from penstock.schedules.orders import require_at_least


def split_backward(schedule: Schedule) -> Schedule:
    """Replace every B by its I and W, so that the input gradient leaves before the weight gradient is computed.

    `defer_weights` then moves each W to where its rank would idle.
    """

    def split(action: Action) -> Sequence[Action]:
        is_whole = action.op.kind == BACKWARD and action.op.row.then < 0
        return halves(action) if is_whole else (action,)

    return _expand(schedule, split, schedule.microbatches)


def slice_tokens(schedule: Schedule, cuts: Sequence[int]) -> Schedule:
    """Cut every micro-batch at these token boundaries, from 0 to its number of tokens.

    >>> from penstock import make
    >>> slice_tokens(make("1f1b", ranks=2, microbatches=1), (0, 384, 1024)).lanes[1]
    (<1F0>, <1F0.1>, <1B0.1>, <1B0>)
    """
    if schedule.slices > 1:
        raise ShapeError(
            "this schedule is sliced already; cut the schedule it was made from"
        )
    pieces = range(len(cuts) - 1)
    if len(pieces) == 1:
        return recut(schedule, cuts)

    def cut(action: Action) -> Sequence[Action]:
        order = pieces if action.op.kind == FORWARD else reversed(pieces)
        return [action._replace(slice=piece) for piece in order]

    return _expand(schedule, cut, _cut_microbatches(schedule, cuts))


def recut(schedule: Schedule, cuts: Sequence[int]) -> Schedule:
    """Keep the order of the slices but cut at other token boundaries, one more than the number of slices.

    >>> from penstock import make
    >>> halves = make("seq1f1b", ranks=2, microbatches=1, slices=2)
    >>> recut(halves, (0, 384, 1024)).microbatches[0].tokens
    1024
    """
    if {m.slices for m in schedule.microbatches} != {len(cuts) - 1}:
        raise ShapeError(
            f"the cuts make {len(cuts) - 1} slices, "
            f"but the schedule has {schedule.slices}"
        )
    table = _cut_microbatches(schedule, cuts)
    return schedule_of(schedule.stages, table, schedule.lanes)


def even_cuts(slices: int) -> tuple[int, ...]:
    """Return cuts into equal slices of one token each, for where only their proportions matter."""
    require_at_least(1, slices=slices)
    return tuple(range(slices + 1))


def replicate(schedule: Schedule, copies: int, side_by_side: bool = False) -> Schedule:
    """Data parallelism: add copies of the pipeline, each with its own ranks and micro-batches.

    The ranks of a copy have neighbouring numbers; with `side_by_side`, the copies of a rank do.
    """
    require_at_least(1, copies=copies)
    refuse_if_too_large(copies * schedule.actions, f"a pipeline in {copies} copies")
    stages: list[Stage] = []
    microbatches: list[MicroBatch] = []
    lanes: list[list[Action]] = []
    for copy in range(copies):
        first_stage = copy * len(schedule.stages)
        first_microbatch = copy * len(schedule.microbatches)
        for stage in schedule.stages:
            rank = copy * schedule.ranks + stage.rank
            if side_by_side:
                rank = stage.rank * copies + copy
            stages.append(Stage(rank, stage.part))
        for microbatch in schedule.microbatches:
            path = tuple(stage + first_stage for stage in microbatch.path)
            microbatches.append(replace(microbatch, path=path))
        lanes += [
            _renumber(lane, first_stage, first_microbatch) for lane in schedule.lanes
        ]
    if side_by_side:
        ranks = schedule.ranks
        lanes = [
            lanes[copy * ranks + rank]
            for rank in range(ranks)
            for copy in range(copies)
        ]
    return schedule_of(stages, microbatches, lanes)


def repeat(schedule: Schedule, units: int) -> Schedule:
    """Run the schedule `units` times in a row, with new micro-batches each time."""
    require_at_least(1, units=units)
    count = len(schedule.microbatches)
    lanes = []
    for lane in schedule.lanes:
        repeated: list[Action] = []
        for unit in range(units):
            repeated += _renumber(lane, 0, unit * count)
        lanes.append(repeated)
    return schedule_of(schedule.stages, schedule.microbatches * units, lanes)


def offload(schedule: Schedule, ahead: int) -> Schedule:
    """Move what a forward keeps to the host (O), and back (R) when `ahead` actions remain until its backward.

    A forward whose backward comes sooner keeps everything where it is.

    >>> from penstock import make
    >>> offload(make("gpipe", ranks=1, microbatches=3), 1).lanes[0]
    (<0F0>, <0O0>, <0F1>, <0O1>, <0R0>, <0F2>, <0O2>, <0R1>, <0B0>, <0R2>, <0B1>, <0B2>)
    """
    require_at_least(1, offload=ahead)
    lanes = []
    for lane in schedule.lanes:
        place = {
            action[1:]: number
            for number, action in enumerate(lane)
            if action.op.kind == BACKWARD
        }
        reloads: dict[int, list[Action]] = {}
        moved = []
        for number, action in enumerate(lane):
            moved += [*reloads.pop(number, ()), action]
            back = place[action[1:]] - ahead
            if action.op.kind == FORWARD and back > number + 1:
                moved.append(action._replace(op=Op.O))
                reloads.setdefault(back, []).append(action._replace(op=Op.R))
        lanes.append(moved)
    return schedule_of(schedule.stages, schedule.microbatches, lanes)


def _cut_microbatches(schedule: Schedule, cuts: Sequence[int]) -> list[MicroBatch]:
    """Return the schedule's micro-batches with new cuts."""
    tokens = cuts[-1] if cuts else 0
    return [
        replace(microbatch, tokens=tokens, cuts=tuple(cuts))
        for microbatch in schedule.microbatches
    ]


def _renumber(
    lane: Sequence[Action], first_stage: int, first_microbatch: int
) -> list[Action]:
    """Shift the stages and micro-batches of a lane."""
    return [
        Action(op, stage + first_stage, microbatch + first_microbatch, piece)
        for op, stage, microbatch, piece in lane
    ]


def _expand(
    schedule: Schedule,
    into: Callable[[Action], Sequence[Action]],
    microbatches: Sequence[MicroBatch],
) -> Schedule:
    """Replace every action by the actions that `into` returns for it."""
    lanes = [
        [part for action in lane for part in into(action)] for lane in schedule.lanes
    ]
    return schedule_of(schedule.stages, microbatches, lanes)
