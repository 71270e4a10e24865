"""Costs wrapped around another cost: the same in everything that they do not override."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost.allreduce import planned_sum_end
from penstock.cost.buffers import BufferedMessage
from penstock.cost.cost import Cost
from penstock.cost.planned_sum import quickest_sum, rounds_end
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan
from penstock.ir.table import Floats
from penstock.ir.timeline import Units


@dataclass(frozen=True, slots=True)
class WrappedCost(Cost):
    """Passes every question on to the cost inside."""

    cost: Cost

    @property
    def units(self) -> Units:
        """Whether the cost inside counts seconds and bytes."""
        return self.cost.units

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        return self.cost.seconds(schedule, action)

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action."""
        return self.cost.pause(schedule, action)

    @property
    def switch(self) -> float:
        """The share of its time that a forward takes longer right after a backward."""
        return self.cost.switch

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes that a forward leaves on its rank."""
        return self.cost.held(schedule, action)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes that an I leaves for its W."""
        return self.cost.kept(schedule, action)

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes that a backward recomputes."""
        return self.cost.rebuilt(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of an action's result."""
        return self.cost.message(schedule, action)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        return self.cost.weights(schedule, stage)

    def tied(self, schedule: Schedule) -> float:
        """Bytes of weights that the first and the last part share."""
        return self.cost.tied(schedule)

    def updates(self, schedule: Schedule) -> list[float]:
        """Seconds of the optimizer on each rank."""
        return self.cost.updates(schedule)

    def working(self, schedule: Schedule, action: Action) -> float:
        """Bytes that exist only while an action runs."""
        return self.cost.working(schedule, action)

    def carried(self, schedule: Schedule, action: Action) -> float:
        """Bytes of the keys and values of an action's tokens."""
        return self.cost.carried(schedule, action)

    def gradients(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's gradients, without those of tied weights."""
        return self.cost.gradients(schedule, stage)

    def tied_gradients(self, schedule: Schedule) -> float:
        """Bytes of the gradients of weights that the first and the last part share."""
        return self.cost.tied_gradients(schedule)

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long these ranks take to sum `size` bytes of gradients."""
        return self.cost.sum_seconds(ranks, size)

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time.

        A cost that changes `sum_seconds` alone must change this too.
        """
        return self.cost.sum_end(ranks, size, ready)

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time."""
        return self.cost.serial

    @property
    def channels(self) -> int | None:
        """How many channels the messages of a rank share."""
        return self.cost.channels

    @property
    def buffers(self) -> tuple[BufferedMessage, ...]:
        """How long messages that share channels keep their ranks busy."""
        return self.cost.buffers

    @property
    def handover(self) -> float:
        """Seconds that a shared processor loses when it goes from one rank to another."""
        return self.cost.handover

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return self.cost.latency(source, target)

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second."""
        return self.cost.bandwidth(source, target)


@dataclass(frozen=True, slots=True)
class NoisyCost(WrappedCost):
    """Makes each op on each stage, and each link, slower or faster by up to `spread`.

    A searched schedule is scored under such costs, which the search has not seen. The
    noise depends on `seed` alone, so it is the same in every run.
    """

    spread: float = 0.1
    seed: int = 0

    def factor(self, *subject: object) -> float:
        """A number between 1 - spread and 1 + spread, always the same for a subject."""
        uniform = random.Random(f"{self.seed} {subject}").random()
        return 1.0 + self.spread * (2.0 * uniform - 1.0)

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes, with noise."""
        part = schedule.stages[action.stage].part
        rank = schedule.rank_of(action)
        noise = self.factor(action.op.value, part, rank)
        return self.cost.seconds(schedule, action) * noise

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives, with noise."""
        noise = self.factor("latency", source, target)
        return self.cost.latency(source, target) * noise

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second, with noise."""
        noise = self.factor("bandwidth", source, target)
        return self.cost.bandwidth(source, target) / noise

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long these ranks take to sum `size` bytes of gradients, with noise."""
        noise = self.factor("sum", tuple(ranks))
        return self.cost.sum_seconds(ranks, size) * noise

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients, with noise."""
        begin = max(ready)
        exact = self.cost.sum_end(ranks, size, ready) - begin
        return begin + exact * self.factor("sum", tuple(ranks))


@dataclass(frozen=True, slots=True)
class PausedCost(WrappedCost):
    """Lets a rank rest between two actions.

        rank 2 | F0 .F1 .B0   .F2 .     a message leaves when its action ends, before the rest

    The rest stands for handing over a tensor, waking a process or launching a kernel.
    It takes `first` seconds after a forward of part 0, `head` seconds after a forward
    of the last part, and `gap` seconds after every other action.
    """

    gap: float = 0.0
    first: float = 0.0
    head: float = 0.0

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action."""
        part = schedule.stages[action.stage].part
        if action.op is not Op.F:
            return self.gap
        if part == schedule.parts - 1:
            return self.head
        if part == 0:
            return self.first
        return self.gap


@dataclass(frozen=True, slots=True)
class CopiedCost(WrappedCost):
    """Prices two copies of a pipeline as if there were `copies` of them.

    All copies do the same at the same time, so two of them show everything but the time of
    their sums. A ring of n ranks sends 2 (n-1) shares of the gradients, each one n-th.
    """

    copies: int = 2

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long all copies take to sum `size` bytes of gradients."""
        if len(ranks) < 2 or size <= 0:
            return 0.0
        once = self.cost.sum_seconds(ranks[:2], size)
        bytes_of_pair = self.cost.sum_seconds(ranks[:2], 2.0 * size) - once
        pair = once - bytes_of_pair  # the latency
        count = self.copies * len(ranks) // 2
        return (count - 1) * pair + 2.0 * (count - 1) / count * bytes_of_pair

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When all copies have summed `size` bytes of gradients, along a ring."""
        return max(ready) + self.sum_seconds(ranks, size)


@dataclass(frozen=True, slots=True)
class TimedSumsCost(WrappedCost):
    """Sums gradients in a way that depends on when each rank has its own ready."""

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long these ranks take to sum `size` bytes if all are ready at once."""
        return self.sum_end(ranks, size, [0.0] * len(ranks))


@dataclass(frozen=True, slots=True)
class PlannedSumsCost(TimedSumsCost):
    """Sums gradients in the quickest way that the links allow (`penstock.cost.allreduce`)."""

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time."""
        if len(ranks) < 2 or size <= 0:
            return max(ready)
        latency, byte = link_matrices(self.cost, ranks)
        return planned_sum_end(latency, byte, size, ready)

    def plan_sum(
        self,
        parts: Sequence[int],
        ranks: Sequence[int],
        size: float,
        ready: Sequence[float],
    ) -> SumPlan:
        """How these ranks reach that end."""
        latency, byte = link_matrices(self.cost, ranks)
        return quickest_sum(latency, byte, size, ready, ranks, parts)


@dataclass(frozen=True, slots=True)
class GivenSumsCost(TimedSumsCost):
    """Sums gradients as a plan says, message by message; sums that it does not have as the cost inside."""

    sums: tuple[SumPlan, ...] = ()

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time."""
        if len(ranks) < 2 or size <= 0:
            return max(ready)
        for plan in self.sums:
            if set(plan.ranks) == set(ranks):
                latency, byte = link_matrices(self.cost, ranks)
                return rounds_end(plan, latency, byte, size, ready, ranks)
        return self.cost.sum_end(ranks, size, ready)


def link_matrices(cost: Cost, ranks: Sequence[int]) -> tuple[Floats, Floats]:
    """The seconds of a message and of each of its bytes between these ranks."""
    latency = np.zeros((len(ranks), len(ranks)))
    byte = np.zeros((len(ranks), len(ranks)))
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            if a != b:
                latency[i, j] = cost.latency(a, b)
                byte[i, j] = 1.0 / cost.bandwidth(a, b)
    return latency, byte
