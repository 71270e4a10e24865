"""Workers that share a device, or a memory: each is faster while others rest.

    alone ─────────────── load 0      seconds of an action, between two profiles: one rank measuring by itself,
    together ──────────── load 1      and all ranks at the same time
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.around import CostAround
from penstock.cost.cost import Cost
from penstock.ir.action import Action
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Crowded(CostAround):
    """The cost while a share `load` of the other ranks works; `cost` is that of all at the same time."""

    alone: Cost
    load: float = 1.0

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """Between the two."""
        alone = self.alone.seconds(schedule, action)
        return alone + self.load * (self.cost.seconds(schedule, action) - alone)
