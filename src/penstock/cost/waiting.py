"""The cost of a runtime whose ranks wait until their messages have left.

Our own runtime and torch's send in the background. In other runtimes a rank computes again only when its message has
arrived:

    in the background   rank 0 | F0 F1 F2            waiting   rank 0 | F0 -- F1 -- F2
                                  └─►0 └─►1                                └─►0  └─►1
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.wrapped import WrappedCost
from penstock.ir.action import FORWARD, WEIGHTS, Action
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class WaitingCost(WrappedCost):
    """Lets a rank rest while its message travels. Micro-batches must visit all stages in order."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action: as long as its message takes."""
        rest = self.cost.pause(schedule, action)
        receiver = _receiver(schedule, action)
        rank = schedule.stages[action.stage].rank
        if receiver is None or receiver == rank:
            return rest
        size = self.cost.message(schedule, action)
        seconds = size / self.cost.bandwidth(rank, receiver)
        return rest + self.cost.latency(rank, receiver) + seconds


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """The rank to which the result of an action goes; None if nobody needs it."""
    if action.op.kind == WEIGHTS:
        return None
    path = schedule.microbatches[action.microbatch].path
    place = path.index(action.stage) + (1 if action.op.kind == FORWARD else -1)
    return schedule.stages[path[place]].rank if 0 <= place < len(path) else None
