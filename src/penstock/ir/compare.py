"""Two timelines of one schedule side by side: predicted and measured, or one cost and another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.action import Action
from penstock.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Difference:
    """An action that takes longer, or shorter, than expected."""

    action: Action
    rank: int
    expected: float  # seconds
    actual: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the second timeline is from the first."""

    makespan: tuple[float, float]
    bubble: tuple[float, float]
    peak: tuple[float, float]
    largest: tuple[Difference, ...]  # by how much an action's own time differs

    @property
    def ratio(self) -> float:
        """The second makespan over the first."""
        return self.makespan[1] / self.makespan[0]


def compare(expected: Timeline, actual: Timeline, most: int = 5) -> Comparison:
    """Both timelines in figures, with the actions that differ most."""
    if expected.schedule != actual.schedule:
        raise ShapeError(
            "only timelines of one schedule can be compared action by action"
        )
    table = expected.schedule.table
    first, second = expected.end - expected.start, actual.end - actual.start
    largest = np.argsort(-np.abs(second - first), kind="stable")[:most].tolist()
    return Comparison(
        (expected.makespan, actual.makespan),
        (expected.bubble, actual.bubble),
        (float(expected.peak_activations.max()), float(actual.peak_activations.max())),
        tuple(
            Difference(
                table.action(n), int(table.rank[n]), float(first[n]), float(second[n])
            )
            for n in largest
        ),
    )
