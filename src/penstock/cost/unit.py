"""Costs in units of one rank's work for one micro-batch: the arithmetic of the papers' figures.

F = 1    the forward of everything a micro-batch does on a rank; with k stages of its path
         on the rank, each stage takes 1/k of it
B = 2    its backward; a split backward takes I = W = B/2
comm     the latency of a hop between two ranks
sum      the time to send one rank's gradients to another rank: what two replicas take to sum
         them. n replicas sum in a ring: 2 (n-1)/n of it, and 2 (n-1) hops
bytes    1 stands for the activations of one micro-batch on one rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import PAPER_UNITS, Units


@dataclass(frozen=True, slots=True)
class UnitCost(Cost):
    """F and B for one rank and one micro-batch; a slice takes its share of the tokens.

    I and W take half of B each unless they are given.
    """

    F: float = 1.0
    B: float = 2.0
    comm: float = 0.0
    I: float | None = None  # noqa: E741
    W: float | None = None
    sum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F", "B", "comm", "I", "W", "sum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ShapeError(
                    f"{name}={value} is not a time; give a number that is at least 0"
                )

    @property
    def units(self) -> Units:
        """Forwards of a micro-batch, and micro-batches."""
        return PAPER_UNITS

    @property
    def input_seconds(self) -> float:
        """The time of an I."""
        return self.B / 2 if self.I is None else self.I

    @property
    def weight_seconds(self) -> float:
        """The time of a W."""
        return self.B / 2 if self.W is None else self.W

    def least_backward(self, split: bool) -> tuple[float, float]:
        """The least time until a backward sends its gradient, and the least time of all its work.

        `split` says whether backwards may be split.
        """
        if not split:
            return self.B, self.B
        both = self.input_seconds + self.weight_seconds
        return min(self.B, self.input_seconds), min(self.B, both)

    def share(self, schedule: Schedule, action: Action) -> float:
        """The fraction of a rank's work for a micro-batch that one action does."""
        stages_on_rank = int(schedule.table.crowd[action.stage])
        return _token_share(schedule, action) / stages_on_rank

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        whole = {
            Op.F: self.F,
            Op.B: self.B,
            Op.I: self.input_seconds,
            Op.W: self.weight_seconds,
        }
        return whole[action.op] * self.share(schedule, action)

    def held(self, schedule: Schedule, action: Action) -> float:
        """A forward leaves its share of the micro-batch's activations."""
        return self.share(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """The message of a whole micro-batch is one unit."""
        return _token_share(schedule, action)

    def gradients(self, schedule: Schedule, stage: int) -> float:
        """The gradients of all parts that a path has on one rank are one unit."""
        return 1.0 / int(schedule.table.crowd[stage])

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """A ring: 2 (n-1) hops, each with one n-th of the gradients."""
        count = len(ranks)
        return 2.0 * (count - 1) * (self.comm + self.sum * size / count)

    def latency(self, source: int, target: int) -> float:
        """Every hop takes the same time."""
        return self.comm


def _token_share(schedule: Schedule, action: Action) -> float:
    begin, end = schedule.span(action)
    return (end - begin) / schedule.microbatches[action.microbatch].tokens
