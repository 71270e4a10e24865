"""Token slices: TeraPipe (Li et al., 2021) and Seq1F1B (Sun et al., 2024) run a pipeline inside one sequence."""

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


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """All forwards, slice by slice, then all backwards, last slice first: GPipe with a bubble of one slice per rank.

    Drawn with B twice as long as F (ranks=3, microbatches=1, slices=3):

    rank 0 | F0   F0.1 F0.2 .    .    .    .    .    .    B0.2 --   B0.1 --   B0   --
    rank 1 | .    F0   F0.1 F0.2 .    .    .    B0.2 --   B0.1 --   B0   --   .    .
    rank 2 | .    .    F0   F0.1 F0.2 B0.2 --   B0.1 --   B0   --   .    .    .    .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, slices=slices)

    def lane(rank: int) -> ActionList:
        there = forwards(rank, microbatches, slices)
        back = backwards(rank, microbatches, slices)
        return there + back

    return schedule_through(loop_placement(ranks), microbatches, lane, slices)


def seq1f1b(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """1F1B over slices: the first rank holds `slices + ranks - 1` slices instead of `ranks` micro-batches.

    Drawn with B twice as long as F (ranks=3, microbatches=2, slices=2):

    rank 0 | F0   F0.1 F1   F1.1 .    .    .    .    B0.1 --   .    B0   --   .    B1.1 --   B1   --
    rank 1 | .    F0   F0.1 F1   .    .    B0.1 --   F1.1 B0   --   .    B1.1 --   B1   --   .    .
    rank 2 | .    .    F0   F0.1 B0.1 --   F1   B0   --   F1.1 B1.1 --   B1   --   .    .    .    .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, slices=slices)

    def lane(rank: int) -> ActionList:
        there = forwards(rank, microbatches, slices)
        back = backwards(rank, microbatches, slices)
        head_start = slices + ranks - 1 - rank
        return weave(head_start, there, whole_backwards(back))

    return schedule_through(loop_placement(ranks), microbatches, lane, slices)
