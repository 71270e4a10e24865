"""Building blocks that many schedules share: where stages live, and how forwards and backwards make up a lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from penstock.errors import ShapeError
from penstock.ir.action import Action, backward, forward, halves
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of

ActionList = list[Action]


def require_at_least(least: int, **shape: int) -> None:
    """Refuse a number of the shape that is too small, and name it."""
    for name, value in shape.items():
        if value < least:
            raise ShapeError(f"{name} must be at least {least}, not {value}")


# ---------------------------------------------------------------- where stages live
def loop_placement(ranks: int, chunks: int = 1) -> list[Stage]:
    """Place stages round and round the ranks.

    4 stages on 2 ranks: 0 1 0 1
    """
    return [Stage(stage % ranks, stage) for stage in range(ranks * chunks)]


def wave_placement(ranks: int, waves: int) -> list[Stage]:
    """Place stages down the ranks and back, wave after wave.

    8 stages on 2 ranks: 0 1 1 0 0 1 1 0
    """
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return [Stage(rank, part) for part, rank in enumerate(there_and_back * waves)]


def paths_through(
    stages: Sequence[Stage], microbatches: int, slices: int = 1
) -> list[MicroBatch]:
    """Return micro-batches that visit all stages in order, each in `slices` equal slices."""
    path = tuple(range(len(stages)))
    cuts = tuple(range(slices + 1))
    return [MicroBatch(path, slices, cuts)] * microbatches


def schedule_through(
    stages: Sequence[Stage],
    microbatches: int,
    lane: Callable[[int], ActionList],
    slices: int = 1,
) -> Schedule:
    """Return a schedule whose micro-batches visit all stages in order, with the lane of each rank.

    A lane may be made for more micro-batches: an order that can run can still run without some of them.
    """
    ranks = 1 + max(stage.rank for stage in stages)
    lanes = [keep_first(lane(rank), microbatches) for rank in range(ranks)]
    return schedule_of(stages, paths_through(stages, microbatches, slices), lanes)


# ---------------------------------------------------------------- one direction
def forwards(stage: int, microbatches: int, slices: int = 1) -> ActionList:
    """Return the forwards of a stage, the first slice of a micro-batch first.

    0F0 0F0.1 0F1 0F1.1 ...
    """
    return [
        forward(stage, microbatch, piece)
        for microbatch in range(microbatches)
        for piece in range(slices)
    ]


def backwards(stage: int, microbatches: int, slices: int = 1) -> ActionList:
    """Return the backwards of a stage, the last slice of a micro-batch first.

    0B0.1 0B0 0B1.1 0B1 ...
    """
    return [
        backward(stage, microbatch, piece)
        for microbatch in range(microbatches)
        for piece in reversed(range(slices))
    ]


def in_rounds(
    rank: int, ranks: int, chunks: int, microbatches: int
) -> tuple[ActionList, ActionList]:
    """Return the forwards and the backwards of all chunks of a rank, in rounds of as many micro-batches as ranks.

    Forwards begin each round with the first chunk, backwards with the last.

    2 ranks, 2 chunks, rank 0 | 0F0 0F1 2F0 2F1  0F2 0F3 2F2 2F3
                              | 2B0 2B1 0B0 0B1  2B2 2B3 0B2 0B3
    """
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    there: ActionList = []
    back: ActionList = []
    for first in range(0, microbatches, ranks):
        members = range(first, first + ranks)
        for stage in stages:
            there += [forward(stage, microbatch) for microbatch in members]
        for stage in reversed(stages):
            back += [backward(stage, microbatch) for microbatch in members]
    return there, back


# ---------------------------------------------------------------- steps back
def whole_backwards(back: ActionList) -> list[ActionList]:
    """Return steps of one B each."""
    return [[action] for action in back]


def lag_weights(back: ActionList, lag: int) -> list[ActionList]:
    """Return steps of split backwards in which each W comes `lag` steps after its I.

    lag 1: [I0] [I1 W0] [I2 W1] [W2]
    """
    inputs, weights = zip(*map(halves, back), strict=True)
    alone = [[i] for i in inputs[:lag]]
    paired = [[i, w] for i, w in zip(inputs[lag:], weights, strict=False)]
    left_over = [[w] for w in weights[max(len(back) - lag, 0) :]]
    return alone + paired + left_over


# ---------------------------------------------------------------- a lane
def weave(ahead: int, there: ActionList, back: Sequence[ActionList]) -> ActionList:
    """Give the forwards a head start, then alternate one step back and one forward.

    ahead 3: F0 F1 F2 B0 F3 B1 ... B3
    """
    nothing: ActionList = []
    later = ([action] for action in there[ahead:])
    lane = there[:ahead]
    for step_back, step_forward in zip_longest(back, later, fillvalue=nothing):
        lane += step_back
        lane += step_forward
    return lane


def interleave_queues(letters: str, queues: Mapping[str, ActionList]) -> ActionList:
    """For each letter, take the next action of the queue with that letter; skip it if the queue is empty.

    fFf: f0 F0 f1
    """
    left = {letter: iter(queue) for letter, queue in queues.items()}
    lane = []
    for letter in letters:
        action = next(left[letter], None)
        if action is not None:
            lane.append(action)
    return lane


def keep_first(lane: ActionList, microbatches: int) -> ActionList:
    """Leave out all but the first micro-batches of a lane."""
    return [action for action in lane if action.microbatch < microbatches]
