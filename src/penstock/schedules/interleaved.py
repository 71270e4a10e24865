"""Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): several chunks of the model on a rank, a smaller bubble."""

from __future__ import annotations

from penstock.ir.action import Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.orders import (
    in_rounds,
    loop_placement,
    only_first,
    paths_through,
    require_at_least,
    weave,
    whole_backwards,
)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Rounds of as many micro-batches as ranks, so that the next chunk's work is there when a chunk's is done.

    A last round that is not full is one with micro-batches left out. With B twice F
    (ranks=2, microbatches=4, chunks=2):

    rank 0 | F0 F1 F0 F1 F2 .  B0 -- F3 B1 -- F2 B0 -- F3 B1 -- .  B2 -- .  B3 -- B2 -- B3 --
    rank 1 | .  F0 F1 F0 B0 -- F1 B1 -- F2 B0 -- F3 B1 -- F2 B2 -- F3 B3 -- B2 -- B3 -- .  .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, chunks=chunks)
    stages = loop_placement(ranks, chunks)
    lanes = []
    for rank in range(ranks):
        there, back = (
            in_rounds(op, rank, ranks, chunks, microbatches) for op in (Op.F, Op.B)
        )
        ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        lanes.append(
            only_first(weave(ahead, there, whole_backwards(back)), microbatches)
        )
    return schedule_of(stages, paths_through(stages, microbatches), lanes)
