"""A timeline tells when each rank ran each action.

The simulator predicts timelines, and the runtime measures them. Their users cannot tell them
apart.

    time      0   1   2   3   4
    rank 0 |  F0  F1  .   B0  ...      a span is one action from `start` to `end`
    rank 1 |  .   F0  B0  F1  ...

Columns hold one entry per action, in the order of the schedule's table: first the actions of
lane 0, then those of lane 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
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
    """A tensor that leaves a rank: its action, the two ranks, the send and arrival time, the size."""

    action: Action
    source: int
    target: int
    sent: float
    arrived: float
    bytes: float


class Sum(NamedTuple):
    """A sum of gradients over ranks, which runs beside their actions, from start to end in seconds."""

    name: str
    ranks: tuple[int, ...]
    start: float
    end: float
    bytes: float
    cause: int  # the action for which it waited last; -1 if there is none


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A schedule with the times at which it ran, or would run."""

    schedule: Schedule
    start: Floats  # seconds
    end: Floats
    activations: Floats  # bytes of activations on the action's rank while it runs
    weights: Floats  # bytes of weights, one entry per rank
    sent: Floats  # seconds at which the message of an action left; NaN if it has none
    arrived: Floats
    bytes: Floats  # size of the message
    cause: Ints  # the action for which each action waited last; -1 if it did not wait
    units: Units = REAL_UNITS
    sums: tuple[Sum, ...] = ()  # in the order in which they begin

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action or sum of gradients."""
        last = float(self.end.max())
        return max([last, *(one.end for one in self.sums)])

    @property
    def busy(self) -> Floats:
        """Seconds each rank works."""
        seconds = np.zeros(self.schedule.ranks)
        np.add.at(seconds, self.schedule.table.rank, self.end - self.start)
        return seconds

    @property
    def bubble(self) -> float:
        """The fraction of the time of all ranks in which they are idle."""
        total = self.schedule.ranks * self.makespan
        if total == 0:
            return 0.0
        return 1.0 - float(self.busy.sum()) / total

    @property
    def peak_activations(self) -> Floats:
        """The largest number of bytes of activations on each rank."""
        return self.schedule.table.peaks(self.activations)

    def peak_bytes(self, rank: int) -> float:
        """The largest number of bytes on a rank, weights and activations together."""
        return float(self.weights[rank] + self.peak_activations[rank])

    def lane(self, rank: int) -> slice:
        """The place of a rank's actions in the columns."""
        first = self.schedule.table.first
        return slice(int(first[rank]), int(first[rank + 1]))

    def spans(self) -> Iterator[Span]:
        """All actions with their times, rank by rank."""
        for rank, lane in enumerate(self.schedule.lanes):
            place = self.lane(rank)
            starts = self.start[place].tolist()
            ends = self.end[place].tolist()
            for action, start, end in zip(lane, starts, ends, strict=True):
                yield Span(rank, action, start, end)

    def messages(self) -> Iterator[Message]:
        """All tensors that leave their ranks."""
        table = self.schedule.table
        target = table.target()
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
        """The bytes sent over each link, by (source rank, target rank)."""
        sizes: dict[tuple[int, int], float] = {}
        for message in self.messages():
            link = (message.source, message.target)
            sizes[link] = sizes.get(link, 0.0) + message.bytes
        return sizes

    @property
    def last_cause(self) -> int:
        """The action that sets the makespan: the last one, or the one for which the last sum waited."""
        last = max(self.sums, key=lambda one: one.end, default=None)
        if last is not None and last.end > self.end.max() and last.cause >= 0:
            return last.cause
        return int(self.end.argmax())

    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions, each delayed by the one before it, that ends with the last one.

        If a sum of gradients ends later, the chain ends with the action for which that sum
        waited. Only a shorter chain makes the step faster.
        """
        number = self.last_cause
        chain = []
        while number >= 0:
            chain.append(self.schedule.table.action(number))
            number = int(self.cause[number])
        return tuple(reversed(chain))


class Idle(NamedTuple):
    """The idle seconds of each rank by cause.

    Together with the time in which a rank works, they make up the makespan.
    """

    schedule: list[float]
    hop: list[float]
    host: list[float]
    end: list[float]  # after its last action, while others still work


def message_seconds(timeline: Timeline) -> float:
    """The time that a message is on its way, in the median; 0 without messages."""
    seconds = timeline.arrived - timeline.sent
    known = seconds[np.isfinite(seconds)]
    return float(np.median(known)) if len(known) else 0.0


def split_idle_time(timeline: Timeline, hop: float) -> Idle:
    """Split the idle time by cause, if a message takes `hop` seconds."""
    table = timeline.schedule.table
    idle = Idle(*([0.0] * timeline.schedule.ranks for _ in Idle._fields))
    for rank in range(timeline.schedule.ranks):
        free = 0.0  # when the rank has finished what it has started so far
        for number in range(int(table.first[rank]), int(table.first[rank + 1])):
            needed = table.needs[number]
            needed = needed[needed >= 0]
            ends = timeline.end[needed]
            ready = float(ends.max(initial=0.0))
            is_late = (table.rank[needed] != rank) & (ends >= free - hop)
            start = float(timeline.start[number])
            possible = max(ready, free)
            delay = max(start - possible, 0.0)
            on_the_way = 0.0
            if is_late.any():  # it waits for a message
                on_the_way = min(delay, max(ready + hop - possible, 0.0))
            idle.schedule[rank] += max(min(ready, start) - free, 0.0)
            idle.hop[rank] += on_the_way
            idle.host[rank] += delay - on_the_way
            free = max(free, float(timeline.end[number]))
        idle.end[rank] = timeline.makespan - free
    return idle


@dataclass(frozen=True, slots=True)
class Difference:
    """An action that takes longer or shorter than expected, in seconds."""

    action: Action
    rank: int
    expected: float
    actual: float


def largest_differences(
    expected: Timeline, actual: Timeline, most: int = 5
) -> list[Difference]:
    """The actions of two timelines of a schedule whose durations differ most."""
    if expected.schedule != actual.schedule:
        raise ShapeError(
            "the timelines belong to different schedules, "
            "so they cannot be compared action by action"
        )
    table = expected.schedule.table
    expected_times = expected.end - expected.start
    actual_times = actual.end - actual.start
    change = np.abs(actual_times - expected_times)
    largest = []
    for number in np.argsort(-change, kind="stable")[:most].tolist():
        difference = Difference(
            table.action(number),
            int(table.rank[number]),
            float(expected_times[number]),
            float(actual_times[number]),
        )
        largest.append(difference)
    return largest
