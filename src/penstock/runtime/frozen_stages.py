"""Leaves out the backwards of frozen stages, and the messages between them, that no trained parameter needs.

    stages     0        1        2        3             stage 2 trains, at least in part; the others are frozen
    forward   F ─────► F ─────► F ─────► F
    backward   .        .        B ◄───── B             3 still passes the gradient on; 0 and 1 have nothing to do,
                                                        and 2 does not send them any gradient

A backward that nobody needs stays in the lane, so that all lanes are as planned, but it does nothing. Its message is
left out on both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.ir.schedule import Schedule
from penstock.runtime.lane import Do, LaneStep, Turn

StageVisit = tuple[int, int]  # stage, micro-batch


@dataclass(frozen=True, slots=True)
class Rests:
    """The actions of one rank that have less to do, by their numbers."""

    # Nothing trains up to here: no graph, no backward.
    idle: frozenset[int] = frozenset()
    closed: frozenset[int] = frozenset()  # forwards whose input needs no gradient


def resting_visits(
    schedule: Schedule, trains: Sequence[bool]
) -> tuple[frozenset[StageVisit], frozenset[StageVisit]]:
    """The visits whose backward has nothing to do, and those that need not pass a gradient on."""
    idle = set()
    closed = set()
    for number, microbatch in enumerate(schedule.microbatches):
        needed = False  # whether anything has trained so far on this path
        for stage in microbatch.path:
            visit = stage, number
            if not needed:
                closed.add(visit)
            needed = needed or trains[stage]
            if not needed:
                idle.add(visit)
    return frozenset(idle), frozenset(closed)


def rest_frozen_stages(
    schedule: Schedule, trains: Sequence[bool], turns: Iterable[Turn]
) -> tuple[list[Turn], Rests]:
    """A rank's turns without the messages that nobody needs, and its actions that have less to do."""
    idle_visits, closed_visits = resting_visits(schedule, trains)
    needed_turns = []
    idle = set()
    closed = set()
    for turn in turns:
        messages = [m for m in turn.messages if not _is_unneeded(m, closed_visits)]
        needed_turns.append(replace(turn, messages=tuple(messages)))
        step = turn.step
        if step is None:
            continue
        visit = step.stage, step.microbatch
        if visit in idle_visits:
            idle.add(step.value)
        if step.do is Do.FORWARD and visit in closed_visits:
            closed.add(step.value)
    return needed_turns, Rests(frozenset(idle), frozenset(closed))


def _is_unneeded(message: LaneStep, closed: frozenset[StageVisit]) -> bool:
    """Whether a message is a gradient for stages that do not train."""
    action = message.instruction.action
    return message.goes_back and (action.stage, action.microbatch) in closed
