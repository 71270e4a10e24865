"""Who ran what, when: predicted by the simulator, measured by the runtime, and nobody downstream can tell them apart.

    time      0   1   2   3   4
    rank 0 |  F0  F1  .   B0  ...      a span is one action from `start` to `end`
    rank 1 |  .   F0  B0  F1  ...

Columns hold one entry an action, in the order of the schedule's table: lane 0's actions, then lane 1's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints


@dataclass(frozen=True, slots=True)
class Units:
    """What the numbers of a timeline count.

    The papers' figures count time in forwards of a micro-batch and memory in
    micro-batches. A measured step has real seconds, but the runtime counts the forwards
    that it keeps, not their bytes.
    """

    seconds: bool = True  # otherwise one forward of a micro-batch on a rank
    bytes: bool = True  # otherwise the activations of one micro-batch on a rank


REAL_UNITS = Units()
PAPER_UNITS = Units(seconds=False, bytes=False)
MEASURED_UNITS = Units(seconds=True, bytes=False)


class Span(NamedTuple):
    """One action on its rank, from start to end, in seconds."""

    rank: int
    action: Action
    start: float
    end: float


class Message(NamedTuple):
    """A tensor that leaves a rank: the action it comes from, whither, when it went and came, how much it is."""

    action: Action
    source: int
    target: int
    sent: float
    arrived: float
    bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A schedule with the times at which it ran, or would run."""

    schedule: Schedule
    start: Floats  # seconds
    end: Floats
    activations: Floats  # bytes of activations on the action's rank while it runs
    weights: Floats  # bytes of weights, one entry a rank
    sent: Floats  # seconds at which an action's message left; nan: no message
    arrived: Floats
    bytes: Floats  # of the message
    cause: Ints  # the action that held each one up: the last of those it waited for; -1: none
    units: Units = REAL_UNITS

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action."""
        return float(self.end.max())

    @property
    def busy(self) -> Floats:
        """Seconds each rank works."""
        seconds = np.zeros(self.schedule.ranks)
        np.add.at(seconds, self.schedule.table.rank, self.end - self.start)
        return seconds

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they idle; of no time at all, 0."""
        whole = self.schedule.ranks * self.makespan
        return 1.0 - float(self.busy.sum()) / whole if whole else 0.0

    @property
    def peak_activations(self) -> Floats:
        """The most bytes of activations each rank holds at once."""
        most = np.zeros(self.schedule.ranks)
        np.maximum.at(most, self.schedule.table.rank, self.activations)
        return most

    def peak_bytes(self, rank: int) -> float:
        """The most bytes a rank holds at once, weights and activations."""
        return float(self.weights[rank] + self.peak_activations[rank])

    def lane(self, rank: int) -> slice:
        """Where a rank's actions lie in the columns."""
        first = self.schedule.table.first
        return slice(int(first[rank]), int(first[rank + 1]))

    def spans(self) -> Iterator[Span]:
        """Every action with its times, rank by rank."""
        for rank, lane in enumerate(self.schedule.lanes):
            here = self.lane(rank)
            for action, start, end in zip(
                lane, self.start[here].tolist(), self.end[here].tolist(), strict=True
            ):
                yield Span(rank, action, start, end)

    def messages(self) -> Iterator[Message]:
        """Every tensor that leaves its rank."""
        table, target = self.schedule.table, self.schedule.table.target()
        for number in np.flatnonzero(target >= 0).tolist():
            yield Message(
                table.action(number),
                int(table.rank[number]),
                int(target[number]),
                float(self.sent[number]),
                float(self.arrived[number]),
                float(self.bytes[number]),
            )

    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes over each link, by (source rank, target rank)."""
        table, target = self.schedule.table, self.schedule.table.target()
        leaves = np.flatnonzero(target >= 0)
        link = table.rank[leaves] * self.schedule.ranks + target[leaves]
        pairs, where = np.unique(link, return_inverse=True)
        total = np.bincount(where, self.bytes[leaves], minlength=len(pairs))
        ranks = self.schedule.ranks
        return {
            (int(p) // ranks, int(p) % ranks): float(b)
            for p, b in zip(pairs, total, strict=True)
        }

    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions, each held up by the one before it, that ends with the last: shorten it to be faster."""
        number, chain = int(self.end.argmax()), []
        while number >= 0:
            chain.append(self.schedule.table.action(number))
            number = int(self.cause[number])
        return tuple(reversed(chain))
