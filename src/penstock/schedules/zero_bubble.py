"""Zero bubble (Qi et al., 2024): backwards split, weight gradients where a rank would idle."""

from __future__ import annotations

from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.orders import (
    backwards,
    forwards,
    in_rounds,
    interleave_queues,
    lag_weights,
    loop_placement,
    only_first,
    paths_through,
    require_at_least,
    split_backwards,
    wave_placement,
    weave,
)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with its W so late that the last rank idles no more, at 1F1B's peak memory. F, I, W alike
    (ranks=3, microbatches=4):

    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return interleaved_zb(ranks, microbatches, chunks=1)


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB1P: interleaved chunks, and on rank r each W comes r steps after its I. F, I, W alike
    (ranks=2, microbatches=4, chunks=2):

    rank 0 | F0 F1 F0 F1 .  I0 W0 F2 I1 W1 F3 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 I2 W2 I3 W3
    rank 1 | .  F0 F1 F0 I0 F1 I1 W0 F2 I0 W1 F3 I1 W0 F2 I2 W1 F3 I3 W2 I2 W3 I3 W2 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, chunks=chunks)
    stages = loop_placement(ranks, chunks)
    lanes = []
    for rank in range(ranks):
        there, back = (
            in_rounds(op, rank, ranks, chunks, microbatches) for op in (Op.F, Op.B)
        )
        ahead = (chunks - 1) * ranks + (ranks - 1 - rank) + 1
        lanes.append(
            only_first(weave(ahead, there, lag_weights(back, rank)), microbatches)
        )
    return schedule_of(stages, paths_through(stages, microbatches), lanes)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two chunks a rank, placed there and back: no rank idles once all have begun, at 1F1B's peak memory.

    A lane is spelled with small letters for the way there, capitals for the way back (ranks=2, microbatches=4):

    rank 0 | F0 F1 F2 F0 I0 W0 F1 I1 W1 F3 I0 W0 F2 I2 W2 I1 W1 F3 I3 W3 I2 W2 I3 W3 .
    rank 1 | .  F0 F0 F1 F1 I0 W0 F2 I0 W0 F2 I1 W1 F3 I1 W1 F3 I2 W2 I2 I3 I3 W2 W3 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    stages, full = wave_placement(ranks, 1), max(microbatches, 2 * ranks - 1)
    lanes = []
    for rank in range(ranks):
        deep = ranks - rank
        fill = "f" * (2 * deep - 1) + "Ff" * rank + "FIW" * deep
        drain = "iI" * rank + "iw" * deep + "W" * full + "w" * full
        word = fill + "fiwFIW" * (full - ranks) + drain
        queues = legs(rank, 2 * ranks - 1 - rank, full)
        lanes.append(only_first(interleave_queues(word, queues), microbatches))
    return schedule_of(stages, paths_through(stages, microbatches), lanes)


def legs(there: int, back: int, microbatches: int) -> dict[str, list[Action]]:
    """Queues of the two stages of a rank: f i w of the way there, F I W of the way back."""
    queues = {}
    for letters, stage in (("fiw", there), ("FIW", back)):
        split = [split_backwards(action) for action in backwards(stage, microbatches)]
        queues[letters[0]] = forwards(stage, microbatches)
        queues[letters[1]], queues[letters[2]] = (
            [i for i, _ in split],
            [w for _, w in split],
        )
    return queues
