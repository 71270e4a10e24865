"""Costs in units of one rank's work for one micro-batch: the arithmetic of the papers' figures.

F = 1    forward of all that a micro-batch does on a rank: with k stages of its path there, each takes 1/k
B = 2    its backward; split, I = W = B/2
comm     latency of a hop between two ranks
bytes    1 = the activations of one micro-batch on one rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class UnitCost:
    """F and B per rank and micro-batch, a slice by its share of the tokens. I and W are B/2 unless given."""

    F: float = 1.0
    B: float = 2.0
    comm: float = 0.0
    I: float | None = None  # noqa: E741
    W: float | None = None

    @property
    def serial(self) -> bool:
        """Links carry any number of messages at once."""
        return False

    def share(self, schedule: Schedule, action: Action) -> float:
        """Of one rank's work for the micro-batch: by stages on that rank, and by tokens."""
        begin, end = schedule.span(action)
        return (
            (end - begin)
            / schedule.microbatches[action.microbatch].tokens
            / int(schedule.table.crowd[action.stage])
        )

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        half = self.B / 2
        whole = {
            Op.F: self.F,
            Op.B: self.B,
            Op.I: half if self.I is None else self.I,
            Op.W: half if self.W is None else self.W,
        }
        return whole[action.op] * self.share(schedule, action)

    def held(self, schedule: Schedule, action: Action) -> float:
        """A micro-batch's share of its activations."""
        return self.share(schedule, action)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """A split backward holds all of it until W."""
        return self.share(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """One unit is a whole micro-batch's message."""
        begin, end = schedule.span(action)
        return (end - begin) / schedule.microbatches[action.microbatch].tokens

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Not counted in these units."""
        return 0.0

    def latency(self, source: int, target: int) -> float:
        """A hop."""
        return self.comm

    def bandwidth(self, source: int, target: int) -> float:
        """As much as you like."""
        return math.inf
