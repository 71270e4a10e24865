"""The order in which a lane treats one stage, cut out of the plan for a micro-batch or two.

lane of the rank      0F0 2F0 0F1 2F1 2B0 0B0 2F2 2B1 ...
stage 2 alone             2F0     2F1 2B0     2F2 2B1
micro-batches 0, 1        2F0     2F1 2B0         2B1      1 is the companion: held at the same time as 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule
from penstock.runtime.batch import Batch
from penstock.runtime.executor import Executor
from penstock.runtime.proof.options import Option, Options


class Operation(NamedTuple):
    """An op on a slice of one of the micro-batches of a `StageOrder`, by its number there."""

    op: Op
    microbatch: int
    slice: int


@dataclass(frozen=True, slots=True)
class StageOrder:
    """A micro-batch and its companion, if it has one, and the operations on them in order."""

    microbatches: tuple[MicroBatch, ...]
    operations: tuple[Operation, ...]

    @property
    def is_split(self) -> bool:
        """Whether weight gradients have operations of their own."""
        return any(operation.op is Op.W for operation in self.operations)

    def under(self, planned: Options, options: Options) -> list[Operation]:
        """Return the operations with these of the planned options.

        That is the lane's own order, or the plainest one if an option that shaped it is off.
        """
        shaping = {Option.SLICES, Option.INTERLEAVED} & planned
        keeps_shape = shaping <= options
        order = list(self.operations) if keeps_shape else self.plainest(options)
        return order if Option.SPLIT in options else join_backwards(order)

    def plainest(self, options: Options) -> list[Operation]:
        """Return all forwards of a micro-batch, then all its backwards.

        With interleaving, the forwards of both micro-batches come first.
        """
        order: list[Operation] = []
        numbers = range(len(self.microbatches))
        if Option.INTERLEAVED in options:
            for number in numbers:
                order += self._forwards(number, options)
            for number in numbers:
                order += self._backwards(number, options)
        else:
            for number in numbers:
                order += self._forwards(number, options)
                order += self._backwards(number, options)
        return order

    def _slices(self, number: int, options: Options) -> range:
        """The slices of a micro-batch under these options."""
        planned = self.microbatches[number].slices
        return range(planned if Option.SLICES in options else 1)

    def _forwards(self, number: int, options: Options) -> list[Operation]:
        slices = self._slices(number, options)
        return [Operation(Op.F, number, piece) for piece in slices]

    def _backwards(self, number: int, options: Options) -> list[Operation]:
        """The backwards of a micro-batch, last slice first."""
        ops = (Op.I, Op.W) if self.is_split else (Op.B,)
        order: list[Operation] = []
        for piece in reversed(self._slices(number, options)):
            order += [Operation(op, number, piece) for op in ops]
        return order


def join_backwards(order: Sequence[Operation]) -> list[Operation]:
    """Return the order with a whole backward, B, in the place of each I, and without W."""
    joined: list[Operation] = []
    for operation in order:
        if operation.op is Op.I:
            joined.append(operation._replace(op=Op.B))
        elif operation.op is not Op.W:
            joined.append(operation)
    return joined


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
        operations.append(Operation(action.op, number, action.slice))
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


class MicroBatchKind(NamedTuple):
    """What two micro-batches must have in common to be run together."""

    operations: list[tuple[Op, int]]  # ops and slices, sorted
    shape: tuple[int, ...]  # of its input, without the rows
    enters_here: bool  # whether the stage is the first of its path
    ends_here: bool


def _kind(
    schedule: Schedule, lane: Sequence[Action], positions: Sequence[int], batch: Batch
) -> MicroBatchKind:
    """The kind of the micro-batch that has these positions in the lane."""
    actions = [lane[position] for position in positions]
    stage = actions[0].stage
    number = actions[0].microbatch
    path = schedule.microbatches[number].path
    return MicroBatchKind(
        operations=sorted((action.op, action.slice) for action in actions),
        shape=batch.shapes[number][1:],
        enters_here=path[0] == stage,
        ends_here=path[-1] == stage,
    )
