"""Shapes that many schedules share: where stages live, and how forwards and backwards are woven into a lane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Stage

Lane = list[Action]


# ---------------------------------------------------------------- where stages live
def looped(ranks: int, chunks: int = 1) -> list[Stage]:
    """Stages go round and round the ranks.  4 stages on 2 ranks: 0 1 0 1"""
    return [Stage(stage % ranks, stage) for stage in range(ranks * chunks)]


def waves_of(ranks: int, waves: int) -> list[Stage]:
    """Stages go down the ranks and come back, wave after wave.  8 stages on 2 ranks: 0 1 1 0 0 1 1 0"""
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return [Stage(rank, part) for part, rank in enumerate(there_and_back * waves)]


def through(stages: Sequence[Stage], microbatches: int, slices: int = 1) -> list[MicroBatch]:
    """Micro-batches that visit all stages in order, each cut into so many equal slices."""
    return [MicroBatch(tuple(range(len(stages))), slices, tuple(range(slices + 1)))] * microbatches


# ---------------------------------------------------------------- how a lane is woven
def forwards(stage: int, microbatches: int, slices: int = 1) -> Lane:
    """0F0 0F0.1 0F1 0F1.1 ..."""
    return [Action(Op.F, stage, m, s) for m in range(microbatches) for s in range(slices)]


def backwards(stage: int, microbatches: int, slices: int = 1) -> Lane:
    """0B0.1 0B0 0B1.1 0B1 ...: the slices of a micro-batch last first."""
    return [Action(Op.B, stage, m, s) for m in range(microbatches) for s in reversed(range(slices))]


def weave(ahead: int, there: Lane, back: Lane) -> Lane:
    """Forwards with a head start, then one backward and one forward in turn.  ahead 3: F0 F1 F2 B0 F3 B1 ... B3"""
    ahead = min(ahead, len(there))
    turns = zip_longest(back, there[ahead:])
    return there[:ahead] + [action for action in chain.from_iterable(turns) if action is not None]


def halves(action: Action) -> tuple[Action, Action]:
    """The I and the W of a B."""
    return action._replace(op=Op.I), action._replace(op=Op.W)


def only(lane: Lane, microbatches: int) -> Lane:
    """A lane without the micro-batches past a number. What is left of an order that can run can run."""
    return [action for action in lane if action.microbatch < microbatches]


# ---------------------------------------------------------------- what makes sense
def at_least(least: int, **shape: int) -> None:
    """Refuses numbers that are too small, by name."""
    for name, value in shape.items():
        if value < least:
            raise ShapeError(f"{name} {value} is too few; the least is {least}")
