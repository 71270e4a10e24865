"""Zero bubble (Qi et al., 2024): split backwards, with weight gradients where a rank would idle."""

from __future__ import annotations

from penstock.ir.action import halves
from penstock.ir.schedule import Schedule
from penstock.schedules.orders import (
    ActionList,
    backwards,
    forwards,
    in_rounds,
    interleave_queues,
    lag_weights,
    loop_placement,
    require_at_least,
    schedule_through,
    wave_placement,
    weave,
)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with each W so late that the last rank no longer idles, at 1F1B's peak memory.

    Drawn with F, I and W of the same length (ranks=3, microbatches=4):

    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return interleaved_zb(ranks, microbatches, chunks=1)


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB1P: chunks are interleaved, and on rank r each W comes r steps after its I.

    Drawn with F, I and W of the same length (ranks=2, microbatches=4, chunks=2):

    rank 0 | F0 F1 F0 F1 .  I0 W0 F2 I1 W1 F3 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 I2 W2 I3 W3
    rank 1 | .  F0 F1 F0 I0 F1 I1 W0 F2 I0 W1 F3 I1 W0 F2 I2 W1 F3 I3 W2 I2 W3 I3 W2 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, chunks=chunks)

    def lane(rank: int) -> ActionList:
        there, back = in_rounds(rank, ranks, chunks, microbatches)
        head_start = (chunks - 1) * ranks + (ranks - 1 - rank) + 1
        return weave(head_start, there, lag_weights(back, rank))

    return schedule_through(loop_placement(ranks, chunks), microbatches, lane)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two chunks per rank, placed there and back: no rank idles once all have begun, at 1F1B's peak memory.

    The code spells a lane with small letters for the way there and capitals for the way
    back. Drawn with F, I and W of the same length (ranks=2, microbatches=4):

    rank 0 | F0 F1 F2 F0 I0 W0 F1 I1 W1 F3 I0 W0 F2 I2 W2 I1 W1 F3 I3 W3 I2 W2 I3 W3 .
    rank 1 | .  F0 F0 F1 F1 I0 W0 F2 I0 W0 F2 I1 W1 F3 I1 W1 F3 I2 W2 I2 I3 I3 W2 W3 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    built = max(microbatches, 2 * ranks - 1)

    def lane(rank: int) -> ActionList:
        deep = ranks - rank
        fill = "f" * (2 * deep - 1) + "Ff" * rank + "FIW" * deep
        steady = "fiwFIW" * (built - ranks)
        drain = "iI" * rank + "iw" * deep + "W" * built + "w" * built
        queues = _queues_of_rank(rank, ranks, built)
        return interleave_queues(fill + steady + drain, queues)

    return schedule_through(wave_placement(ranks, 1), microbatches, lane)


def _queues_of_rank(rank: int, ranks: int, microbatches: int) -> dict[str, ActionList]:
    """Return a rank's actions as queues: f, i and w for its stage there, F, I and W for its stage back."""
    queues = {}
    for forward, input_gradient, weight_gradient, stage in (
        ("f", "i", "w", rank),
        ("F", "I", "W", 2 * ranks - 1 - rank),
    ):
        split = [halves(action) for action in backwards(stage, microbatches)]
        queues[forward] = forwards(stage, microbatches)
        queues[input_gradient] = [pair[0] for pair in split]
        queues[weight_gradient] = [pair[1] for pair in split]
    return queues
