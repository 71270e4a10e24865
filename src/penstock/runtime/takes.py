"""Assigns each micro-batch on a stage to a take: a set of recordings for one micro-batch at a time.

A take is busy from the first action of a micro-batch to its last, so a stage needs as many takes as it has
micro-batches in flight:

    stage 1    F0  F1  F2  B0  F3  B1  F4  B2 ...
    take        a   b   c   a   a   b   b   c
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from penstock.runtime.frozen_stages import Rests, StageVisit
from penstock.runtime.lane import Do, LaneStep, Turn

# The shapes of a micro-batch, its cuts, and what the stage gets and passes on.
VisitShape: TypeAlias = tuple[Hashable, ...]
TakeMoment = tuple[Do, int]  # an action within a take: what it does, on which slice


class TakeKind(NamedTuple):
    """What two micro-batches must have in common to use the same take of a stage, one after the other."""

    stage: int
    shape: VisitShape
    steps: tuple[tuple[Do, int, bool, bool], ...]  # action, slice, split, last
    idle: bool = False  # nothing trains up to here: the backward has nothing to do
    closed: bool = False  # nothing trains before it: its input needs no gradient


def stage_visits(turns: Sequence[Turn]) -> dict[StageVisit, list[LaneStep]]:
    """The steps of each stage with each micro-batch, in the order of the lane."""
    visits: dict[StageVisit, list[LaneStep]] = {}
    for turn in turns:
        step = turn.step
        if step is not None:
            visit = step.stage, step.microbatch
            visits.setdefault(visit, []).append(step)
    return visits


def assign_takes(
    visits: Mapping[StageVisit, Sequence[LaneStep]],
    shapes: Mapping[StageVisit, VisitShape],
    rests: Rests | None = None,
) -> dict[StageVisit, tuple[TakeKind, int]]:
    """The kind of each visit, and the number of the first take of that kind which is free."""
    rests = rests or Rests()
    assigned: dict[StageVisit, tuple[TakeKind, int]] = {}
    busy_until: dict[TakeKind, list[int]] = {}  # last action of each take's visitor
    for visit, steps in visits.items():
        kind = recording_kind(steps, shapes[visit], rests)
        first = steps[0].value
        last = steps[-1].value
        takes = busy_until.setdefault(kind, [])
        number = _first_free(takes, first)
        if number == len(takes):
            takes.append(last)
        else:
            takes[number] = last
        assigned[visit] = kind, number
    return assigned


def _first_free(busy_until: Sequence[int], action: int) -> int:
    """The first take that is free before an action; the number of takes if all are busy."""
    for number, last in enumerate(busy_until):
        if last < action:
            return number
    return len(busy_until)


def recording_kind(
    steps: Sequence[LaneStep], shape: VisitShape, rests: Rests
) -> TakeKind:
    """The kind of a visit."""
    actions = tuple((*take_moment(step), step.split, step.last) for step in steps)
    first = steps[0].value
    return TakeKind(
        steps[0].stage,
        shape,
        actions,
        idle=first in rests.idle,
        closed=first in rests.closed,
    )


def take_moment(step: LaneStep) -> TakeMoment:
    """The key of a step within its take."""
    return step.do, step.instruction.action.slice
