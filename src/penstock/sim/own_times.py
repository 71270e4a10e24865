"""Simulates a measured step once more, with the typical times of its own actions.

The result shows how much of a measured bubble belongs to the schedule and how much to
noise: every action of one operation and part takes the same time, and messages are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from penstock.cost import ModelCost, PartCost, Seconds
from penstock.ir import Op, Timeline
from penstock.sim.simulate import simulate


def simulate_own_times(timeline: Timeline) -> Timeline:
    """Simulate a measured step with the cost that `own_cost` derives from it."""
    simulated = simulate(timeline.schedule, own_cost(timeline))
    return replace(simulated, activations=timeline.activations, units=timeline.units)


def own_cost(
    timeline: Timeline, middle: Callable[[list[float]], float] = median
) -> ModelCost:
    """A cost in which each action takes the `middle` of the measured times of its kind.

    Two actions are of one kind if they have the same operation and part.
    """
    schedule = timeline.schedule
    durations: dict[tuple[int, Op], list[float]] = {}
    for _, action, start, end in timeline.spans():
        kind = (schedule.stages[action.stage].part, action.op)
        durations.setdefault(kind, []).append(end - start)

    def seconds(part: int, op: Op) -> Seconds:
        measured = durations.get((part, op))
        return Seconds(base=middle(measured)) if measured else Seconds()

    parts = []
    for part in range(schedule.parts):
        whole_backward = seconds(part, Op.B) if (part, Op.B) in durations else None
        parts.append(
            PartCost(
                seconds(part, Op.F),
                seconds(part, Op.I),
                seconds(part, Op.W),
                whole_backward,
                held=1.0,
            )
        )
    return ModelCost(tuple(parts))
