"""A rank that rests between two actions: handing over a tensor, waking a process, launching a kernel.

    rank 2 | F0 .F1 .B0   .F2 .       the message of an action leaves at its end, before the rest

A `Cost` that has a `pause` is a `PausingCost`; the simulator asks for it. All other costs rest for no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.around import CostAround
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PausedCost(CostAround):
    """Another cost, with rests: `gap` after an action, `first` after a forward of part 0, `head` after one of the head."""

    gap: float = 0.0
    first: float = 0.0
    head: float = 0.0

    def pause(self, schedule: Schedule, action: Action) -> float:
        """Seconds of rest."""
        part = schedule.stages[action.stage].part
        if action.op is Op.F and part == schedule.parts - 1:
            return self.head
        return self.first if action.op is Op.F and part == 0 else self.gap
