"""Shapes that many schedules share: where stages live, and how forwards and backwards are woven into a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product, zip_longest

from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Stage

ActionList = list[Action]


# ---------------------------------------------------------------- where stages live
def loop_placement(ranks: int, chunks: int = 1) -> list[Stage]:
    """Stages go round and round the ranks.  4 stages on 2 ranks: 0 1 0 1"""
    return [Stage(stage % ranks, stage) for stage in range(ranks * chunks)]


def wave_placement(ranks: int, waves: int) -> list[Stage]:
    """Stages go down the ranks and come back, wave after wave.  8 stages on 2 ranks: 0 1 1 0 0 1 1 0"""
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return [Stage(rank, part) for part, rank in enumerate(there_and_back * waves)]


def paths_through(
    stages: Sequence[Stage], microbatches: int, slices: int = 1
) -> list[MicroBatch]:
    """Micro-batches that visit all stages in order, each cut into so many equal slices."""
    return [
        MicroBatch(tuple(range(len(stages))), slices, tuple(range(slices + 1)))
    ] * microbatches


# ---------------------------------------------------------------- how a lane is woven
def in_rounds(
    op: Op, rank: int, ranks: int, chunks: int, microbatches: int
) -> ActionList:
    """A rank's chunks in rounds of as many micro-batches as ranks; going back, the last chunk first.

    2 ranks, 2 chunks, rank 0 | 0F0 0F1 2F0 2F1  0F2 0F3 2F2 2F3
    """
    order = list(range(chunks))[:: 1 if op is Op.F else -1]
    turns = product(range(0, microbatches, ranks), order)
    return [
        Action(op, chunk * ranks + rank, m)
        for first, chunk in turns
        for m in range(first, first + ranks)
    ]


def forwards(stage: int, microbatches: int, slices: int = 1) -> ActionList:
    """0F0 0F0.1 0F1 0F1.1 ..."""
    return [
        Action(Op.F, stage, m, s) for m in range(microbatches) for s in range(slices)
    ]


def backwards(stage: int, microbatches: int, slices: int = 1) -> ActionList:
    """0B0.1 0B0 0B1.1 0B1 ...: the slices of a micro-batch last first."""
    return [
        Action(Op.B, stage, m, s)
        for m in range(microbatches)
        for s in reversed(range(slices))
    ]


def weave(ahead: int, there: ActionList, back: Sequence[ActionList]) -> ActionList:
    """Forwards with a head start, then one step back and one forward in turn.  ahead 3: F0 F1 F2 B0 F3 B1 ... B3"""
    nothing: ActionList = []
    turns = zip_longest(back, ([action] for action in there[ahead:]), fillvalue=nothing)
    return there[:ahead] + [
        action for pair in turns for step in pair for action in step
    ]


def whole_backwards(back: ActionList) -> list[ActionList]:
    """Backwards as steps of one B each."""
    return [[action] for action in back]


def split_backwards(action: Action) -> tuple[Action, Action]:
    """The I and the W of a B."""
    _, stage, microbatch, piece = action
    return Action(Op.I, stage, microbatch, piece), Action(
        Op.W, stage, microbatch, piece
    )


def only_first(lane: ActionList, microbatches: int) -> ActionList:
    """A lane without the micro-batches past a number. What is left of an order that can run can run."""
    return [action for action in lane if action.microbatch < microbatches]


# ---------------------------------------------------------------- what makes sense
def require_at_least(least: int, **shape: int) -> None:
    """Refuses numbers that are too small, by name."""
    for name, value in shape.items():
        if value < least:
            raise ShapeError(f"{name} {value} is too few; the least is {least}")


# ---------------------------------------------------------------- split backwards
def lag_weights(back: ActionList, lag: int) -> list[ActionList]:
    """Backwards split, the weights `lag` behind.  lag 1: [I0] [I1 W0] [I2 W1] [W2]"""
    inputs, weights = zip(*map(split_backwards, back), strict=True)
    steps = [[i] for i in inputs[:lag]]
    steps += [[i, w] for i, w in zip(inputs[lag:], weights, strict=False)]
    return steps + [[w] for w in weights[max(len(back) - lag, 0) :]]


def interleave_queues(letters: str, queues: Mapping[str, ActionList]) -> ActionList:
    """The next action of the queue each letter names; letters past a queue's end are passed over.  fFf: f0 F0 f1"""
    left = {letter: iter(queue) for letter, queue in queues.items()}
    return [
        action for letter in letters if (action := next(left[letter], None)) is not None
    ]
