"""A cost around another one: all as it is there, but for what the one around it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.cost.cost import Cost
from penstock.ir.action import Action
from penstock.ir.schedule import Schedule


@runtime_checkable
class PausingCost(Protocol):
    """What a cost may have beside what every cost has."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """Seconds for which a rank rests after an action; its message leaves before."""
        ...


@runtime_checkable
class RebuildingCost(Protocol):
    """Another thing that a cost may have: it knows of activations that are not kept but computed again."""

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes a backward adds to what its forward left, while it runs."""
        ...


@runtime_checkable
class TyingCost(Protocol):
    """Another thing that a cost may have: it knows of a weight that the first and the last part have in common."""

    def tied(self, schedule: Schedule) -> float:
        """Bytes of that weight, its gradient and its optimizer state: a rank with both parts holds them once."""
        ...


@dataclass(frozen=True, slots=True)
class CostAround:
    """Another cost, as it is."""

    cost: Cost

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time."""
        return self.cost.serial

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        return self.cost.seconds(schedule, action)

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long a rank rests after it."""
        return (
            self.cost.pause(schedule, action)
            if isinstance(self.cost, PausingCost)
            else 0.0
        )

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes a forward leaves."""
        return self.cost.held(schedule, action)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes an I leaves."""
        return self.cost.kept(schedule, action)

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes that are computed again."""
        return (
            self.cost.rebuilt(schedule, action)
            if isinstance(self.cost, RebuildingCost)
            else 0.0
        )

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a result."""
        return self.cost.message(schedule, action)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights."""
        return self.cost.weights(schedule, stage)

    def tied(self, schedule: Schedule) -> float:
        """Bytes that the first and the last part have in common."""
        return self.cost.tied(schedule) if isinstance(self.cost, TyingCost) else 0.0

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte is there."""
        return self.cost.latency(source, target)

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes a second."""
        return self.cost.bandwidth(source, target)
