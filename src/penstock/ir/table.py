"""A schedule as columns of numbers, which makes it fast to check and simulate a million actions.

The actions are numbered lane by lane: first those of lane 0, then those of lane 1. Each
action that could exist has a *slot*:

    micro-batch 0                                   micro-batch 1 ...
    first stage of its path    second stage
    slice 0  slice 1           slice 0 ...
    F B W    F B W             F B W                (B: either B or I)

So a step along the path, or to the next slice, is an addition. The column `at` tells which
action fills a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import KINDS, OP_CODES, OPS, Action

if TYPE_CHECKING:
    from penstock.ir.schedule import MicroBatch, Stage

Ints: TypeAlias = NDArray[np.integer[Any]]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Number = TypeVar("Number", int, Ints)

_KIND_OF_CODE = np.array([op.kind for op in OPS], dtype=np.int8)
_THEN_OF_CODE = np.array([op.row.then for op in OPS], dtype=np.int8)


@dataclass(slots=True)
class Table:
    """Columns with one entry per action, and the sizes that locate the slots.

    `tabulate` and `check` fill them; after that they are only read.
    """

    first: Ints  # number of the first action of each lane; one more entry for the end
    rank: Ints
    op: Ints  # as in OP_CODES
    kind: Ints  # the kind of its op
    then: Ints  # the kind of action that must follow at the same place; -1 if none must
    stage: Ints
    microbatch: Ints
    slice: Ints
    # The place of the stage on the path of the micro-batch; -1 if it is off the path.
    position: Ints
    length: Ints  # of the path of each micro-batch
    slices: Ints  # of each micro-batch
    base: Ints  # first slot of each micro-batch; one more entry for the end
    valid: Bools  # whether stage, micro-batch and slice exist, and it is on its path and rank
    slots: Ints  # slot of each action; -1 if it is not valid
    at: Ints  # the action in each slot; -1 if the slot is empty
    stages_on_rank: (
        Ints  # for each stage: the largest number of stages of a path on its rank
    )
    # The actions that each action needs, filled up with -1.
    needs: Ints = field(default_factory=lambda: np.empty((0, 3), dtype=np.int32))
    # All actions, each after the ones it needs.
    order: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    # When each action ends if every action takes one tick.
    tick: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def slot(
        self, kind: int, microbatch: Number, position: Number, piece: Number
    ) -> Number:
        """The slot of an action."""
        place = position * self.slices[microbatch] + piece
        slot: Number = self.base[microbatch] + place * KINDS + kind
        return slot

    def action(self, number: int) -> Action:
        """The action with this number."""
        return Action(
            OPS[self.op[number]],
            int(self.stage[number]),
            int(self.microbatch[number]),
            int(self.slice[number]),
        )

    def actions(self, numbers: Ints) -> list[Action]:
        """The actions with these numbers."""
        ops = self.op[numbers].tolist()
        stages = self.stage[numbers].tolist()
        microbatches = self.microbatch[numbers].tolist()
        pieces = self.slice[numbers].tolist()
        return [
            Action(OPS[op], stage, microbatch, piece)
            for op, stage, microbatch, piece in zip(
                ops, stages, microbatches, pieces, strict=True
            )
        ]

    def __len__(self) -> int:
        return len(self.op)

    def levels(self, gain: Floats, loss: Floats) -> Floats:
        """What its rank holds while each action runs, if it adds `gain` when it starts and frees `loss` when it ends.

        A rank does one thing at a time, so the order of its lane decides, not the clock.
        """
        level = np.empty(len(self))
        for begin, end in pairwise(self.first.tolist()):
            freed = np.cumsum(loss[begin:end])
            level[begin:end] = np.cumsum(gain[begin:end])
            level[begin + 1 : end] -= freed[:-1]
        return level

    def peaks(self, values: Floats) -> Floats:
        """The largest value among the actions of each rank; at least 0."""
        largest = np.zeros(len(self.first) - 1)
        np.maximum.at(largest, self.rank, values)
        return largest

    def target(self) -> Ints:
        """The rank that receives the result of each action; -1 if the result stays."""
        target = np.full(len(self), -1, dtype=np.int64)
        for column in range(self.needs.shape[1]):
            user = np.flatnonzero(self.needs[:, column] >= 0)
            source = self.needs[user, column]
            abroad = self.rank[source] != self.rank[user]
            target[source[abroad]] = self.rank[user[abroad]]
        return target


def tabulate(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    lanes: Sequence[Sequence[Action]],
) -> Table:
    """The columns of the actions, faulty ones included: these have `valid` false."""
    lane_lengths = [len(lane) for lane in lanes]
    total = sum(lane_lengths)

    def column(field: int) -> Ints:
        actions = chain.from_iterable(lanes)
        return np.fromiter((action[field] for action in actions), np.int64, total)

    codes = (OP_CODES[action[0]] for action in chain.from_iterable(lanes))
    op = np.fromiter(codes, np.int8, total)
    stage = column(1)
    microbatch = column(2)
    piece = column(3)
    rank = np.repeat(np.arange(len(lanes)), lane_lengths)
    length = np.array([len(m.path) for m in microbatches], dtype=np.int64)
    slices = np.array([m.slices for m in microbatches], dtype=np.int64)
    base = np.concatenate([[0], np.cumsum(length * slices * KINDS)]).astype(np.int64)

    exists = (
        (stage >= 0)
        & (stage < len(stages))
        & (microbatch >= 0)
        & (microbatch < len(microbatches))
    )
    position = np.full(total, -1, dtype=np.int64)
    position[exists] = _positions(
        stages, microbatches, stage[exists], microbatch[exists]
    )
    home = np.array([s.rank for s in stages], dtype=np.int64)
    valid = exists & (position >= 0) & (piece >= 0)
    is_slice = piece[valid] < slices[microbatch[valid]]
    is_home = home[stage[valid]] == rank[valid]
    valid[valid] = is_slice & is_home
    kind = _KIND_OF_CODE[op]
    table = Table(
        first=np.concatenate([[0], np.cumsum(lane_lengths)]).astype(np.int64),
        rank=rank,
        op=op,
        kind=kind,
        then=_THEN_OF_CODE[op],
        stage=stage,
        microbatch=microbatch,
        slice=piece,
        position=position,
        length=length,
        slices=slices,
        base=base,
        valid=valid,
        slots=np.full(total, -1, dtype=np.int64),
        at=np.full(int(base[-1]), -1, dtype=np.int64),
        stages_on_rank=_stages_on_rank(stages, microbatches),
    )
    numbers = np.flatnonzero(valid)
    place = position[numbers] * slices[microbatch[numbers]] + piece[numbers]
    table.slots[numbers] = base[microbatch[numbers]] + place * KINDS + kind[numbers]
    # Written from last to first: if two actions share a slot, the first one gets it.
    table.at[table.slots[numbers][::-1]] = numbers[::-1]
    return table


def _positions(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    stage: Ints,
    microbatch: Ints,
) -> Ints:
    """The position of each stage on the path of its micro-batch; -1 if it is not on it."""
    rows: dict[tuple[int, ...], int] = {}  # one row per distinct path
    row_of = [rows.setdefault(m.path, len(rows)) for m in microbatches]
    positions = np.full((len(rows), len(stages)), -1, dtype=np.int64)
    for path, row in rows.items():
        for position, visited in enumerate(path):
            if 0 <= visited < len(stages):
                positions[row, visited] = position
    return positions[np.array(row_of, dtype=np.int64)[microbatch], stage]


def _stages_on_rank(
    stages: Sequence[Stage], microbatches: Sequence[MicroBatch]
) -> Ints:
    """For each stage, the largest number of stages of a path on its rank."""
    largest = np.ones(len(stages), dtype=np.int64)
    for path in {m.path for m in microbatches}:
        existing = [stage for stage in path if 0 <= stage < len(stages)]
        on_rank = Counter(stages[stage].rank for stage in existing)
        for stage in existing:
            count = on_rank[stages[stage].rank]
            largest[stage] = max(largest[stage], count)
    return largest


def called_slots(table: Table) -> Bools:
    """For every slot, whether an action of the same place calls for it: a backward after each F, a W after each I."""
    called = np.zeros(len(table.at), dtype=np.bool_)
    filled = np.flatnonzero(table.at >= 0)
    then = table.then[table.at[filled]]
    calling = then >= 0
    first = filled[calling] // KINDS * KINDS
    called[first + then[calling]] = True
    return called
