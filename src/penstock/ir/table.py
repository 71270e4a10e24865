"""A schedule as columns of numbers, derived once, so that a million actions are checked and simulated in a moment.

Actions are numbered lane by lane: lane 0's first, then lane 1's. Each action that could exist has a *slot*:

    micro-batch 0                                   micro-batch 1 ...
    first stage of its path    second stage
    slice 0  slice 1           slice 0 ...
    F B W    F B W             F B W                (B: either B or I)

so that a step along the path or to the next slice is an addition, and a table `at` says which action fills a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import CODE, OPS, Action, Op
from penstock.ir.needs import BACKWARD, KIND

if TYPE_CHECKING:
    from penstock.ir.schedule import MicroBatch, Stage

Ints: TypeAlias = NDArray[np.integer[Any]]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Number = TypeVar("Number", int, Ints)

_KIND_OF_CODE = np.array([KIND[op] for op in OPS], dtype=np.int8)


@dataclass(slots=True)
class Table:
    """Columns, one entry an action, and what finds the slots. Filled by `tabulate` and `check`, then only read."""

    first: Ints  # number of each lane's first action; one more entry for the end
    rank: Ints
    op: Ints  # as in CODE
    kind: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    position: Ints  # of the stage on the micro-batch's path; -1: off its path
    length: Ints  # of each micro-batch's path
    slices: Ints  # of each micro-batch
    base: Ints  # each micro-batch's first slot; one more entry for the end
    sound: Bools  # names a stage, micro-batch, slice that exist, on its path and rank
    slots: Ints  # of each action; -1 where not sound
    at: Ints  # the action in a slot; -1: none
    crowd: Ints  # of each stage: how many stages of one path share its rank, at most
    needs: Ints = field(
        default_factory=lambda: np.empty((0, 3), dtype=np.int32)
    )  # actions needed, -1: none
    order: Ints = field(
        default_factory=lambda: np.empty(0, dtype=np.int32)
    )  # all actions, each after its needs
    tick: Ints = field(
        default_factory=lambda: np.empty(0, dtype=np.int32)
    )  # when each could run if all took one tick

    def slot(
        self, kind: int, microbatch: Number, position: Number, piece: Number
    ) -> Number:
        """Where the action of that kind lies among all that could exist."""
        found: Number = (
            self.base[microbatch]
            + (position * self.slices[microbatch] + piece) * 3
            + kind
        )
        return found

    def action(self, number: int) -> Action:
        """The action with that number."""
        return Action(
            OPS[self.op[number]],
            int(self.stage[number]),
            int(self.microbatch[number]),
            int(self.slice[number]),
        )

    def __len__(self) -> int:
        return len(self.op)

    def target(self) -> Ints:
        """The rank to which each action's result is sent as a message; -1 where nothing leaves the rank."""
        user = np.full(len(self), -1, dtype=np.int64)
        for column in range(self.needs.shape[1]):
            mine = np.flatnonzero(self.needs[:, column] >= 0)
            source = self.needs[mine, column]
            abroad = self.rank[source] != self.rank[mine]
            user[source[abroad]] = self.rank[mine[abroad]]
        return user


def tabulate(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    lanes: Sequence[Sequence[Action]],
) -> Table:
    """Columns of the actions as they are, faults included: what does not exist gets `sound` false."""
    lengths = [len(lane) for lane in lanes]
    total = sum(lengths)

    def column(name: int) -> Ints:
        return np.fromiter(
            (action[name] for action in chain.from_iterable(lanes)), np.int64, total
        )

    op = np.fromiter(
        (CODE[action[0]] for action in chain.from_iterable(lanes)), np.int8, total
    )
    stage, microbatch, piece = column(1), column(2), column(3)
    rank = np.repeat(np.arange(len(lanes)), lengths)
    length = np.array([len(m.path) for m in microbatches], dtype=np.int64)
    slices = np.array([m.slices for m in microbatches], dtype=np.int64)
    base = np.concatenate([[0], np.cumsum(length * slices * 3)]).astype(np.int64)

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
    sound = exists & (position >= 0) & (piece >= 0)
    sound[sound] = (piece[sound] < slices[microbatch[sound]]) & (
        home[stage[sound]] == rank[sound]
    )
    kind = _KIND_OF_CODE[op]
    table = Table(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rank,
        op,
        kind,
        stage,
        microbatch,
        piece,
        position,
        length,
        slices,
        base,
        sound,
        np.full(total, -1, dtype=np.int64),
        np.full(int(base[-1]), -1, dtype=np.int64),
        _crowd(stages, microbatches),
    )
    where = np.flatnonzero(sound)
    table.slots[where] = (
        base[microbatch[where]]
        + (position[where] * slices[microbatch[where]] + piece[where]) * 3
        + kind[where]
    )
    table.at[table.slots[where][::-1]] = where[
        ::-1
    ]  # of two in one slot the first stays
    return table


def _positions(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    stage: Ints,
    microbatch: Ints,
) -> Ints:
    """Where each stage stands on the path of its micro-batch; -1: nowhere. One row a distinct path."""
    rows: dict[tuple[int, ...], int] = {}
    row = np.array(
        [rows.setdefault(m.path, len(rows)) for m in microbatches], dtype=np.int64
    )
    where = np.full((len(rows), len(stages)), -1, dtype=np.int64)
    for path, number in rows.items():
        for position, visited in enumerate(path):
            if 0 <= visited < len(stages):
                where[number, visited] = position
    return where[row[microbatch], stage]


def _crowd(stages: Sequence[Stage], microbatches: Sequence[MicroBatch]) -> Ints:
    most = np.ones(len(stages), dtype=np.int64)
    for path in {m.path for m in microbatches}:
        real = [s for s in path if 0 <= s < len(stages)]
        shared: dict[int, int] = {}
        for visited in real:
            shared[stages[visited].rank] = shared.get(stages[visited].rank, 0) + 1
        for visited in real:
            most[visited] = max(most[visited], shared[stages[visited].rank])
    return most


def split_slots(table: Table) -> Bools:
    """Of every backward slot: is it filled by I, so that a W must follow?"""
    filled = table.at[BACKWARD::3]
    split = np.zeros(len(filled), dtype=np.bool_)
    split[filled >= 0] = table.op[filled[filled >= 0]] == CODE[Op.I]
    return split
