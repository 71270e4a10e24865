"""Compare two timelines of one schedule: predicted and measured, or two costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.action import Action
from penstock.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Difference:
    """An action that takes longer or shorter than expected, in seconds."""

    action: Action
    rank: int
    expected: float
    actual: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The expected and the actual figures, in pairs."""

    makespan: tuple[float, float]
    bubble: tuple[float, float]
    peak: tuple[float, float]
    largest: tuple[Difference, ...]  # the actions whose durations differ most

    @property
    def ratio(self) -> float:
        """The actual makespan over the expected one."""
        return self.makespan[1] / self.makespan[0]


def compare(expected: Timeline, actual: Timeline, most: int = 5) -> Comparison:
    """Compare two timelines, and list the `most` actions that differ most."""
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
    expected_peak = float(expected.peak_activations.max())
    actual_peak = float(actual.peak_activations.max())
    return Comparison(
        (expected.makespan, actual.makespan),
        (expected.bubble, actual.bubble),
        (expected_peak, actual_peak),
        tuple(largest),
    )
