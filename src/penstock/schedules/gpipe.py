"""GPipe (Huang et al., 2019): all forwards, then all backwards."""

from __future__ import annotations

from penstock.ir.schedule import Schedule
from penstock.schedules.orders import (
    ActionList,
    backwards,
    forwards,
    loop_placement,
    require_at_least,
    schedule_through,
)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """The simplest order, but every rank holds all micro-batches when the backwards begin.

    Drawn with B twice as long as F (ranks=3, microbatches=4):

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
    rank 1 | .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
    rank 2 | .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)

    def lane(rank: int) -> ActionList:
        return forwards(rank, microbatches) + backwards(rank, microbatches)

    return schedule_through(loop_placement(ranks), microbatches, lane)
