"""A cost with noise on it: a searched schedule is scored under costs that the search has not seen."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.cost.around import CostAround
from penstock.ir.action import Action
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class NoisyCost(CostAround):
    """Each op on each stage, and each link, is slower or faster by up to `spread`, always the same for one `seed`."""

    spread: float = 0.1
    seed: int = 0

    def factor(self, *what: object) -> float:
        """1 give or take the spread."""
        return 1.0 + self.spread * (
            2.0 * random.Random(f"{self.seed} {what}").random() - 1.0
        )

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """With noise."""
        noise = self.factor(
            action.op.value,
            schedule.stages[action.stage].part,
            schedule.rank_of(action),
        )
        return self.cost.seconds(schedule, action) * noise

    def latency(self, source: int, target: int) -> float:
        """With noise."""
        return self.cost.latency(source, target) * self.factor(
            "latency", source, target
        )

    def bandwidth(self, source: int, target: int) -> float:
        """With noise."""
        return self.cost.bandwidth(source, target) / self.factor(
            "bandwidth", source, target
        )
