"""Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): several chunks of the model per rank shrink the bubble."""

from __future__ import annotations

from penstock.ir.schedule import Schedule
from penstock.schedules.orders import (
    ActionList,
    in_rounds,
    loop_placement,
    require_at_least,
    schedule_through,
    weave,
    whole_backwards,
)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Micro-batches come in rounds of `ranks`, so that when a chunk is done, the next chunk has work waiting.

    If the last round is not full, it is a full round with micro-batches left out. Drawn
    with B twice as long as F (ranks=2, microbatches=4, chunks=2):

    rank 0 | F0 F1 F0 F1 F2 .  B0 -- F3 B1 -- F2 B0 -- F3 B1 -- .  B2 -- .  B3 -- B2 -- B3 --
    rank 1 | .  F0 F1 F0 B0 -- F1 B1 -- F2 B0 -- F3 B1 -- F2 B2 -- F3 B3 -- B2 -- B3 -- .  .
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, chunks=chunks)

    def lane(rank: int) -> ActionList:
        there, back = in_rounds(rank, ranks, chunks, microbatches)
        head_start = (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        return weave(head_start, there, whole_backwards(back))

    return schedule_through(loop_placement(ranks, chunks), microbatches, lane)
