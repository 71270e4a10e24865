"""A rank that rests between two actions: handing over a tensor, waking a process, launching a kernel.

    rank 2 | F0 .F1 .B0   .F2 .       the message of an action leaves at its end, before the rest

A `Cost` that has a `pause` is a `PausingCost`; the simulator asks for it. All other costs rest for no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.cost.cost import Cost
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule


@runtime_checkable
class PausingCost(Protocol):
    """What a cost may have beside what every cost has."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """Seconds for which a rank rests after an action; its message leaves before."""
        ...


@dataclass(frozen=True, slots=True)
class PausedCost:
    """Another cost, with rests: `gap` after an action, `first` after a forward of part 0, none between head F and B."""

    cost: Cost
    gap: float = 0.0
    first: float = 0.0

    def pause(self, schedule: Schedule, action: Action) -> float:
        """Seconds of rest."""
        part = schedule.stages[action.stage].part
        if action.op is Op.F and part == schedule.parts - 1:
            return 0.0
        return self.first if action.op is Op.F and part == 0 else self.gap

    @property
    def serial(self) -> bool:
        """As it is."""
        return self.cost.serial

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """As it is."""
        return self.cost.seconds(schedule, action)

    def held(self, schedule: Schedule, action: Action) -> float:
        """As it is."""
        return self.cost.held(schedule, action)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """As it is."""
        return self.cost.kept(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """As it is."""
        return self.cost.message(schedule, action)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """As it is."""
        return self.cost.weights(schedule, stage)

    def latency(self, source: int, target: int) -> float:
        """As it is."""
        return self.cost.latency(source, target)

    def bandwidth(self, source: int, target: int) -> float:
        """As it is."""
        return self.cost.bandwidth(source, target)
