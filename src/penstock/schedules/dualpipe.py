"""DualPipeV (DeepSeek-AI, 2025): a V of two chunks a rank whose middle pairs a forward with a backward to overlap."""

from __future__ import annotations

from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.orders import (
    ActionList,
    only_first,
    paths_through,
    require_at_least,
    wave_placement,
)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """F and B side by side in the middle, so that a runtime may overlap them; split backwards at both ends.

    Below 2 * ranks micro-batches some are left out of that order. With B twice F (ranks=2, microbatches=4):

    rank 0 | F0 F1 F2 F0 I0 W0 F1 F3 B1 -- F2 B0 -- B2 -- F3 .  B1 -- B3 -- I2 W2 I3 W3
    rank 1 | .  F0 F0 F1 F1 F2 B0 -- F2 B0 -- F3 B1 -- F3 B1 -- B2 -- B2 -- I3 I3 W3 W3
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    stages, full = wave_placement(ranks, 1), max(microbatches, 2 * ranks)
    lanes = [
        only_first(_spelled(rank, ranks, full), microbatches) for rank in range(ranks)
    ]
    return schedule_of(stages, paths_through(stages, microbatches), lanes)


def _spelled(rank: int, ranks: int, microbatches: int) -> ActionList:
    """Small letters for the way there, capitals for the way back, w for the oldest weight gradient that is due."""
    near, deep = rank + 1, ranks - rank - 1
    turn = "Bb" * near  # its second half is split
    word = (
        "ff" * deep
        + "fF" * near
        + "IwF" * deep
        + "fBFb" * (microbatches - 2 * ranks + near)
        + "BFb" * deep
        + turn[:near]
        + turn[near:].translate(str.maketrans("bB", "iI"))
        + "wi" * deep
        + "w" * near
    )
    lane: ActionList = []
    due: ActionList = []
    count = {"f": 0, "F": 0, "b": 0, "B": 0}
    for letter in word:
        if letter == "w":
            lane += due[:1]
            due = due[1:]
            continue
        stage = rank if letter.islower() else 2 * ranks - 1 - rank
        counter = letter.replace("i", "b").replace("I", "B")
        lane.append(Action(Op(letter.upper()), stage, count[counter]))
        if letter in "iI":
            due.append(Action(Op.W, stage, count[counter]))
        count[counter] += 1
    return lane
