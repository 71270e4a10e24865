"""Controllable memory (Qi et al., 2024): V-shaped pipelines made of one building block, repeated every period.

A block holds one micro-batch's F, I and W on both stages of every rank, in slots of equal length. The block of the
next micro-batch starts six slots later, one slot for each of the six actions of a rank. So no two actions of a rank
may fall on the same slot of the six:

    slot    0  1  2  3  4  5  6  7  8  9 10 11
    rank 0  F  .  .  F  I  .  .  I  ...            V-Min, 2 ranks: each hop takes one slot,
    rank 1  .  F  F  .  .  I  I  .  ...            and W fills the slots that are left

If every hop takes one slot, a rank holds a third of 1F1B's memory (V-Min). If hops take one slot on the way there and
two on the way back, it holds half (V-Half).
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from penstock.cost.cost import UnitCost
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.list_scheduling import defer_weights
from penstock.schedules.orders import paths_through, require_at_least, wave_placement

PERIOD = 6  # slots between two micro-batches: F, I and W on two stages

# Slots per hop on the four legs of a block: F there, F back, I there, I back.
Hops = tuple[int, int, int, int]
# The actions of one rank in a block: slot, letter of the op, and stage.
BuildingBlock = list[tuple[int, str, int]]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """About half of 1F1B's activations at two thirds of its bubble.

    The published code is a little better: for 8 ranks and 16 micro-batches it takes 56.5 and holds 5 micro-batches,
    where this one takes 57.5 and holds 5.5. The planner finds 56.5 in a memory of 5.

    Drawn with F, I and W of the same length (ranks=3, microbatches=4):

    rank 0 | F0 F1 .  .  .  F0 I0 F2 W0 F1 I1 W1 I0 F3 W0 F2 I2 W2 I1 W1 .  F3 I3 I2 W3 W2 .  I3 W3
    rank 1 | .  F0 .  .  F0 F1 .  I0 F1 W0 F2 I0 I1 W0 F2 W1 F3 I1 I2 W1 F3 W2 I2 I3 W2 W3 I3 W3 .
    rank 2 | .  .  F0 F0 .  .  F1 F1 I0 I0 W0 F2 W0 F2 I1 I1 W1 F3 W1 F3 I2 I2 W2 W2 I3 I3 W3 W3 .
    """
    return _repeat_block(ranks, microbatches, hops=(1, 2, 1, 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """About a third of 1F1B's activations; it slows down where F, I and W differ in length.

    Drawn with F, I and W of the same length (ranks=3, microbatches=4):

    rank 0 | F0 .  .  .  .  F0 F1 I0 W0 .  .  F1 F2 I0 I1 W1 W0 F2 F3 I1 I2 W2 W1 F3 .  I2 I3 W3 W2 .  .  I3 W3
    rank 1 | .  F0 .  .  F0 .  .  F1 I0 W0 F1 .  I0 F2 W0 I1 F2 W1 I1 F3 W1 I2 F3 W2 I2 W2 .  I3 W3 .  I3 W3 .
    rank 2 | .  .  F0 F0 .  .  .  .  F1 F1 I0 I0 W0 W0 F2 F2 I1 I1 W1 W1 F3 F3 I2 I2 W2 W2 .  .  I3 I3 W3 W3 .
    """
    return _repeat_block(ranks, microbatches, hops=(1, 1, 1, 1))


class _RankSlots(NamedTuple):
    """The slots of one rank's forwards and input gradients, on the way there and on the way back."""

    forward_there: int
    forward_back: int
    input_there: int
    input_back: int


def _repeat_block(ranks: int, microbatches: int, hops: Hops) -> Schedule:
    """Start one block per micro-batch, a period apart, and then move each W to where its rank would idle."""
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    stages = wave_placement(ranks, 1)
    lanes = []
    for block in _find_blocks(ranks, hops):
        turns = sorted(
            (slot + PERIOD * microbatch, letter, stage, microbatch)
            for slot, letter, stage in block
            for microbatch in range(microbatches)
        )
        lanes.append([Action(Op(letter), stage, m) for _, letter, stage, m in turns])
    table = paths_through(stages, microbatches)
    return defer_weights(schedule_of(stages, table, lanes), UnitCost())


def _find_blocks(ranks: int, hops: Hops) -> list[BuildingBlock]:
    """Return the blocks of all ranks that wait the fewest slots at the three turns.

    A block is valid if no two actions of a rank fall on the same slot of the period.
    """
    every_wait = product(range(PERIOD), repeat=3)
    for waits in sorted(every_wait, key=lambda waits: (sum(waits), waits)):
        slots = _slots_of_ranks(ranks, hops, waits)
        if all(len({slot % PERIOD for slot in own}) == 4 for own in slots):
            return [_add_weights(rank, ranks, slots[rank]) for rank in range(ranks)]
    raise AssertionError(f"no block of hops {hops} for {ranks} ranks")


def _slots_of_ranks(ranks: int, hops: Hops, waits: tuple[int, ...]) -> list[_RankSlots]:
    """The slots of every rank, if the micro-batch waits this many slots at each of its three turns."""
    last = ranks - 1
    first_turn = hops[0] * last + 1 + waits[0]
    second_turn = first_turn + hops[1] * last + 1 + waits[1]
    third_turn = second_turn + hops[2] * last + 1 + waits[2]
    slots = []
    for rank in range(ranks):
        distance = last - rank
        slots.append(
            _RankSlots(
                hops[0] * rank,
                first_turn + hops[1] * distance,
                second_turn + hops[2] * rank,
                third_turn + hops[3] * distance,
            )
        )
    return slots


def _add_weights(rank: int, ranks: int, slots: _RankSlots) -> BuildingBlock:
    """Put the two W of a rank into the two slots that are left, as early as possible."""
    stage_there = rank
    stage_back = 2 * ranks - 1 - rank
    taken = {slot % PERIOD for slot in slots}
    one, other = sorted(set(range(PERIOD)) - taken)

    def next_slot(slot: int, residue: int) -> int:
        """The first slot after a given one that falls on a residue of the period."""
        return slot + 1 + (residue - slot - 1) % PERIOD

    choices = [
        (next_slot(slots.input_there, one), next_slot(slots.input_back, other)),
        (next_slot(slots.input_there, other), next_slot(slots.input_back, one)),
    ]
    weight_there, weight_back = min(choices, key=sum)
    return [
        (slots.forward_there, "F", stage_there),
        (slots.forward_back, "F", stage_back),
        (slots.input_there, "I", stage_back),
        (slots.input_back, "I", stage_there),
        (weight_there, "W", stage_back),
        (weight_back, "W", stage_there),
    ]
