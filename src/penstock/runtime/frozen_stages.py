"""Stages that do not train: what of the backward nobody needs.

    stages     0        1        2        3             stage 2 trains, or some of it; the others are frozen
    forward   F ─────► F ─────► F ─────► F
    backward   .        .        B ◄───── B             3 still passes the gradient on; 0 and 1 have nothing to do,
                                                        and 2 does not send them any
A backward that nobody needs stays in the lane, so that all lanes are as they were planned, but does nothing. Its
message is left out on both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.runtime.lane import Do, Turn

Place = tuple[int, int]  # a stage and a micro-batch


@dataclass(frozen=True, slots=True)
class Rests:
    """Of one rank, by the numbers of actions: what is not done."""

    idle: frozenset[int] = (
        frozenset()
    )  # nothing trains on this stage or before it: no graph, no backward
    closed: frozenset[int] = (
        frozenset()
    )  # forwards before which nothing trains: their input needs no gradient


def places_at_rest(
    schedule: Schedule, trains: Sequence[bool]
) -> tuple[frozenset[Place], frozenset[Place]]:
    """Where nothing has to be done in the backward, and where no gradient has to come out."""
    idle, closed = set(), set()
    for number, microbatch in enumerate(schedule.microbatches):
        needed = False
        for stage in microbatch.path:
            if not needed:
                closed.add((stage, number))
            needed = needed or trains[stage]
            if not needed:
                idle.add((stage, number))
    return frozenset(idle), frozenset(closed)


def rest_frozen_stages(
    schedule: Schedule, trains: Sequence[bool], turns: Iterable[Turn]
) -> tuple[list[Turn], Rests]:
    """A rank's turns without the messages that nobody needs, and what else is not done."""
    idle, closed = places_at_rest(schedule, trains)
    kept, still, shut = [], set(), set()
    for turn in turns:
        step = turn.step
        messages = [
            m
            for m in turn.messages
            if not (m.goes_back and _place(m.instruction.action) in closed)
        ]
        kept.append(replace(turn, messages=tuple(messages)))
        if step is not None and (step.stage, step.microbatch) in idle:
            still.add(step.value)
        if (
            step is not None
            and step.do is Do.FORWARD
            and (step.stage, step.microbatch) in closed
        ):
            shut.add(step.value)
    return kept, Rests(frozenset(still), frozenset(shut))


def _place(action: Action) -> Place:
    return action.stage, action.microbatch
