"""Controllable memory (Qi et al., 2024): V-shaped pipelines made of one block, repeated every period.

A block is one micro-batch's F, I, W on both stages of every rank, in slots of equal length; the next micro-batch's
comes six slots later, one for each of the six actions of a rank, so no two may fall on one slot of six:

    slot    0  1  2  3  4  5  6  7  8  9 10 11
    rank 0  F  .  .  F  I  .  .  I  ...            V-Min, 2 ranks: each hop takes one slot
    rank 1  .  F  F  .  .  I  I  .  ...            and W fills the slots that are left

Hops of one slot hold a third of 1F1B's memory (V-Min); hops of one slot there and two back, a half (V-Half).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from penstock.cost.unit import UnitCost
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.listing import defer_weights
from penstock.schedules.orders import paths_through, require_at_least, wave_placement

PERIOD = 6  # slots: F, I, W on two stages
BuildingBlock = list[tuple[int, Op, int]]  # of one rank: slot, op, stage


def v_half(ranks: int, microbatches: int) -> Schedule:
    """About half of 1F1B's activations at two thirds of its bubble. F, I, W alike (ranks=3, microbatches=4):

    rank 0 | F0 F1 .  .  .  F0 I0 F2 W0 F1 I1 W1 I0 F3 W0 F2 I2 W2 I1 W1 .  F3 I3 I2 W3 W2 .  I3 W3
    rank 1 | .  F0 .  .  F0 F1 .  I0 F1 W0 F2 I0 I1 W0 F2 W1 F3 I1 I2 W1 F3 W2 I2 I3 W2 W3 I3 W3 .
    rank 2 | .  .  F0 F0 .  .  F1 F1 I0 I0 W0 F2 W0 F2 I1 I1 W1 F3 W1 F3 I2 I2 W2 W2 I3 I3 W3 W3 .
    """
    return _repeated(ranks, microbatches, hops=(1, 2, 1, 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """About a third of 1F1B's activations; slows down where F, I and W differ. F, I, W alike (ranks=3, microbatches=4):

    rank 0 | F0 .  .  .  .  F0 F1 I0 W0 .  .  F1 F2 I0 I1 W1 W0 F2 F3 I1 I2 W2 W1 F3 .  I2 I3 W3 W2 .  .  I3 W3
    rank 1 | .  F0 .  .  F0 .  .  F1 I0 W0 F1 .  I0 F2 W0 I1 F2 W1 I1 F3 W1 I2 F3 W2 I2 W2 .  I3 W3 .  I3 W3 .
    rank 2 | .  .  F0 F0 .  .  .  .  F1 F1 I0 I0 W0 W0 F2 F2 I1 I1 W1 W1 F3 F3 I2 I2 W2 W2 .  .  I3 I3 W3 W3 .
    """
    return _repeated(ranks, microbatches, hops=(1, 1, 1, 1))


def _repeated(
    ranks: int, microbatches: int, hops: tuple[int, int, int, int]
) -> Schedule:
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    stages, lanes = wave_placement(ranks, 1), []
    for block in _blocks(ranks, hops):
        turns = [
            (slot + PERIOD * m, op, stage, m)
            for slot, op, stage in block
            for m in range(microbatches)
        ]
        lanes.append([Action(op, stage, m) for _, op, stage, m in sorted(turns)])
    return defer_weights(
        schedule_of(stages, paths_through(stages, microbatches), lanes), UnitCost()
    )


def _blocks(ranks: int, hops: tuple[int, int, int, int]) -> list[BuildingBlock]:
    """The block with the fewest slots waited at the three turns in which no two actions of a rank fall on one slot."""
    for waits in sorted(
        product(range(PERIOD), repeat=3), key=lambda waits: (sum(waits), waits)
    ):
        slots = list(_slots(ranks, hops, waits))
        if all(len({slot % PERIOD for slot in rank}) == 4 for rank in slots):
            return [_with_weights(rank, ranks, slots[rank]) for rank in range(ranks)]
    raise AssertionError(f"no block of hops {hops} for {ranks} ranks")


def _slots(
    ranks: int, hops: tuple[int, int, int, int], waits: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """Of each rank: the slots of its F there, F back, I there, I back."""
    last = ranks - 1
    first = hops[0] * last + 1 + waits[0]
    second = first + hops[1] * last + 1 + waits[1]
    third = second + hops[2] * last + 1 + waits[2]
    for rank in range(ranks):
        up = last - rank
        yield (
            hops[0] * rank,
            first + hops[1] * up,
            second + hops[2] * rank,
            third + hops[3] * up,
        )


def _with_weights(
    rank: int, ranks: int, slots: tuple[int, int, int, int]
) -> BuildingBlock:
    """The two W in the two slots that are left, so that they come as early as they can."""
    there, back = rank, 2 * ranks - 1 - rank
    one, other = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in slots})

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    pairs = [
        (after(slots[2], x), after(slots[3], y))
        for x, y in ((one, other), (other, one))
    ]
    weights = min(pairs, key=sum)
    return [
        (slots[0], Op.F, there),
        (slots[1], Op.F, back),
        (slots[2], Op.I, back),
        (slots[3], Op.I, there),
        (weights[0], Op.W, back),
        (weights[1], Op.W, there),
    ]
