"""The order in which a lane treats one stage, cut out of the plan for a micro-batch or two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule
from penstock.runtime.batch import Batch
from penstock.runtime.executor import Executor
from penstock.runtime.proof.options import Option, Options

# An operation on one of the micro-batches, and on a slice of it.
Operation = tuple[Op, int, int]


@dataclass(frozen=True, slots=True)
class StageOrder:
    """A micro-batch and its companion, if it has one, and the operations on them in order."""

    microbatches: tuple[MicroBatch, ...]
    operations: tuple[Operation, ...]

    @property
    def is_split(self) -> bool:
        """Whether weight gradients have operations of their own."""
        return any(op is Op.W for op, _, _ in self.operations)

    def under(self, planned: Options, options: Options) -> list[Operation]:
        """Return the operations with these of the planned options.

        That is the lane's own order, or the plainest one if an option that shaped it is off.
        """
        shaping = {Option.SLICES, Option.INTERLEAVED} & planned
        order = list(self.operations)
        if not shaping <= options:
            order = self.plainest(options)
        if Option.SPLIT in options:
            return order
        unsplit: list[Operation] = []
        for op, number, piece in order:
            if op is not Op.W:
                unsplit.append((Op.B if op is Op.I else op, number, piece))
        return unsplit

    def plainest(self, options: Options) -> list[Operation]:
        """Return all forwards of a micro-batch, then all its backwards.

        With interleaving, the forwards of both micro-batches come first.
        """
        backward_ops = (Op.I, Op.W) if self.is_split else (Op.B,)
        forwards: list[list[Operation]] = []  # of each micro-batch
        backwards: list[list[Operation]] = []
        for number, planned in enumerate(self.microbatches):
            pieces = range(planned.slices if Option.SLICES in options else 1)
            forwards.append([(Op.F, number, piece) for piece in pieces])
            backward: list[Operation] = []
            for piece in reversed(pieces):
                backward += [(op, number, piece) for op in backward_ops]
            backwards.append(backward)
        order: list[Operation] = []
        if Option.INTERLEAVED in options:
            for operations in (*forwards, *backwards):
                order += operations
        else:
            for forward, backward in zip(forwards, backwards, strict=True):
                order += forward + backward
        return order


def stage_order(
    executor: Executor, stage: int, microbatch: int, batch: Batch
) -> StageOrder:
    """Return what a rank's lane does with a stage, for a micro-batch and its companion."""
    schedule = executor.program.schedule
    full_lane = schedule.lanes[executor.comm.rank]
    lane = [action for action in full_lane if action.stage == stage]
    chosen = {microbatch}
    companion = _companion(schedule, lane, microbatch, batch)
    if companion is not None:
        chosen.add(companion)
    actions = [action for action in lane if action.microbatch in chosen]
    # The micro-batch that goes forward first comes first.
    numbers = list(dict.fromkeys(action.microbatch for action in actions))
    operations = []
    for action in actions:
        number = numbers.index(action.microbatch)
        operations.append((action.op, number, action.slice))
    microbatches = tuple(schedule.microbatches[number] for number in numbers)
    return StageOrder(microbatches, tuple(operations))


def _companion(
    schedule: Schedule, lane: Sequence[Action], microbatch: int, batch: Batch
) -> int | None:
    """A micro-batch of the same kind that the stage holds at the same time."""
    positions: dict[int, list[int]] = {}  # in the lane, by micro-batch
    for position, action in enumerate(lane):
        positions.setdefault(action.microbatch, []).append(position)
    mine = positions[microbatch]
    my_kind = _kind(schedule, lane, mine, batch)
    for other, theirs in positions.items():
        if other == microbatch:
            continue
        overlap = theirs[0] < mine[-1] and mine[0] < theirs[-1]
        if overlap and _kind(schedule, lane, theirs, batch) == my_kind:
            return other
    return None


def _kind(
    schedule: Schedule, lane: Sequence[Action], positions: Sequence[int], batch: Batch
) -> tuple[object, ...]:
    """What two micro-batches must have in common to be run together."""
    first = lane[positions[0]]
    number = first.microbatch
    path = schedule.microbatches[number].path
    actions = [lane[position] for position in positions]
    ops = sorted((action.op, action.slice) for action in actions)
    tokens = batch.shapes[number][1:]
    return ops, tokens, path[0] == first.stage, path[-1] == first.stage
