"""DualPipeV (DeepSeek-AI, 2025): a V of two chunks per rank that pairs forwards with backwards for overlap."""

from __future__ import annotations

from penstock.ir.action import Action, Op, halves
from penstock.ir.schedule import Schedule
from penstock.schedules.orders import (
    ActionList,
    require_at_least,
    schedule_through,
    wave_placement,
)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """F and B run side by side in the middle, so that a runtime may overlap them; backwards are split at both ends.

    For fewer than 2 * ranks micro-batches, this is the order for 2 * ranks with some
    left out. Drawn with B twice as long as F (ranks=2, microbatches=4):

    rank 0 | F0 F1 F2 F0 I0 W0 F1 F3 B1 -- F2 B0 -- B2 -- F3 .  B1 -- B3 -- I2 W2 I3 W3
    rank 1 | .  F0 F0 F1 F1 F2 B0 -- F2 B0 -- F3 B1 -- F3 B1 -- B2 -- B2 -- I3 I3 W3 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    built = max(microbatches, 2 * ranks)
    return schedule_through(
        wave_placement(ranks, 1),
        microbatches,
        lambda rank: _build_lane(rank, ranks, built),
    )


def _build_lane(rank: int, ranks: int, microbatches: int) -> ActionList:
    """Build the lane that a rank's letters spell.

    Small letters are for the stage on the way there and capitals for the one on the way
    back. The letter w runs the oldest weight gradient that is still due.
    """
    lane: ActionList = []
    due_weights: ActionList = []
    count = {"f": 0, "F": 0, "b": 0, "B": 0}
    for letter in _spell_lane(rank, ranks, microbatches):
        if letter == "w":
            lane += due_weights[:1]
            due_weights = due_weights[1:]
            continue
        stage = rank if letter.islower() else 2 * ranks - 1 - rank
        counter = letter.replace("i", "b").replace("I", "B")
        microbatch = count[counter]
        action = Action(Op(letter.upper()), stage, microbatch)
        lane.append(action)
        if letter in "iI":
            _, weight_gradient = halves(action)
            due_weights.append(weight_gradient)
        count[counter] += 1
    return lane


def _spell_lane(rank: int, ranks: int, microbatches: int) -> str:
    near = rank + 1
    deep = ranks - rank - 1
    last_backwards = "Bb" * near
    whole = last_backwards[:near]
    split = last_backwards[near:].translate(str.maketrans("bB", "iI"))
    return (
        "ff" * deep
        + "fF" * near
        + "IwF" * deep
        + "fBFb" * (microbatches - 2 * ranks + near)
        + "BFb" * deep
        + whole
        + split
        + "wi" * deep
        + "w" * near
    )
