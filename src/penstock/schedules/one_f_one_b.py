"""1F1B, also known as DAPPLE or PipeDream-flush: each backward runs as soon as it can."""

from __future__ import annotations

from penstock.ir.schedule import Schedule
from penstock.schedules.orders import (
    ActionList,
    backwards,
    forwards,
    loop_placement,
    require_at_least,
    schedule_through,
    weave,
    whole_backwards,
)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Each rank holds at most `ranks - rank` micro-batches in flight.

    Drawn with B twice as long as F (ranks=3, microbatches=4):

    rank 0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
    rank 1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
    rank 2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)

    def lane(rank: int) -> ActionList:
        there = forwards(rank, microbatches)
        back = backwards(rank, microbatches)
        return weave(ranks - rank, there, whole_backwards(back))

    return schedule_through(loop_placement(ranks), microbatches, lane)
