"""A rank's lane, compiled: every instruction becomes a step that holds numbers instead of names.

    2F1     the value it makes, the value it needs (the output of 1F1), its stage and its micro-batch
    2B1     the value it makes, the gradient it needs (the output of 3B1), and the forward it goes back over (2F1)

A value has the number of the action that makes it. Units, which are slices of micro-batches, are numbered one
micro-batch after the other. Who needs what comes from the schedule's table of needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from penstock.ir.action import BACKWARD, FORWARD, KINDS, OFFLOAD, WEIGHTS
from penstock.ir.program import Free, Instruction, Program, RunAction, Send
from penstock.ir.schedule import Schedule

# What a step does: one of the kinds of action, or one of these.
SEND, RECEIVE, FREE = range(KINDS, KINDS + 3)


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One compiled instruction; -1 marks a field that does not apply."""

    do: int
    instruction: Instruction
    value: int  # made, sent, received or freed
    source: int = -1  # the value it needs: the input of an F, the gradient of a B
    forward: int = -1  # the F to which an action belongs
    stage: int = -1
    microbatch: int = -1
    unit: int = -1  # the slice, numbered over all micro-batches
    last: bool = False  # on the last stage of the path, where the loss is
    split: bool = False  # an I, or an F whose backward is an I
    offloaded: bool = False  # an F whose saved tensors are moved to the host
    peer: int = -1
    goes_back: bool = False  # the message is a gradient


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and what follows it before the next one: messages in order, and values to drop."""

    step: LaneStep | None  # None: only messages, before the first action
    messages: tuple[LaneStep, ...]
    frees: tuple[int, ...]


class Lane:
    """The turns of one rank, and the one that runs now."""

    __slots__ = ("position", "receives", "turns")

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        messages = chain.from_iterable(turn.messages for turn in turns)
        self.receives = [message for message in messages if message.do == RECEIVE]
        self.position = 0


def lane_turns(program: Program, rank: int) -> list[Turn]:
    """The turns of a rank's lane."""
    steps = lane_steps(program, rank)
    starts = [number for number, step in enumerate(steps) if step.do < SEND]
    cuts = sorted({0, *starts, len(steps)})
    return [_turn(steps[begin:end]) for begin, end in pairwise(cuts)]


def _turn(steps: list[LaneStep]) -> Turn:
    action = steps[0] if steps[0].do < SEND else None
    messages = tuple(step for step in steps if step.do in (SEND, RECEIVE))
    frees = tuple(step.value for step in steps if step.do == FREE)
    return Turn(action, messages, frees)


def lane_steps(program: Program, rank: int) -> list[LaneStep]:
    """The instructions of a rank's lane, compiled."""
    schedule = program.schedule
    actions = chain.from_iterable(schedule.lanes)
    values = {action: number for number, action in enumerate(actions)}
    slices = (microbatch.slices for microbatch in schedule.microbatches)
    first_units = list(accumulate(slices, initial=0))
    steps = []
    for instruction in program.lanes[rank]:
        action = instruction.action
        value = values[action]
        unit = first_units[action.microbatch] + action.slice
        if isinstance(instruction, RunAction):
            steps.append(_action(schedule, instruction, value, unit))
        elif isinstance(instruction, Free):
            steps.append(LaneStep(FREE, instruction, value))
        else:
            message = LaneStep(
                SEND if isinstance(instruction, Send) else RECEIVE,
                instruction,
                value,
                unit=unit,
                peer=instruction.peer,
                goes_back=action.op.kind != FORWARD,
            )
            steps.append(message)
    return steps


def _action(
    schedule: Schedule, instruction: RunAction, value: int, unit: int
) -> LaneStep:
    table = schedule.table
    action = instruction.action
    path = schedule.microbatches[action.microbatch].path
    kind = int(table.kind[value])
    first_slot = int(table.slots[value]) - kind
    backward = int(table.at[first_slot + BACKWARD])
    return LaneStep(
        kind,
        instruction,
        value,
        _source_of(schedule, value, action.stage),
        int(table.at[first_slot + FORWARD]),
        action.stage,
        action.microbatch,
        unit,
        last=path[-1] == action.stage,
        split=int(table.then[backward]) == WEIGHTS,
        offloaded=kind == FORWARD and int(table.at[first_slot + OFFLOAD]) >= 0,
    )


def _source_of(schedule: Schedule, value: int, stage: int) -> int:
    """The needed value that another stage makes; -1 if there is none."""
    for needed in schedule.table.needs[value].tolist():
        if needed >= 0 and schedule.table.stage[needed] != stage:
            return int(needed)
    return -1


# ---------------------------------------------------------------- frozen stages
# Leaves out the backwards of frozen stages, and the messages between them, that no trained parameter needs.
#
#     stages     0        1        2        3             stage 2 trains, at least in part; the others are frozen
#     forward   F ─────► F ─────► F ─────► F
#     backward   .        .        B ◄───── B             3 still passes the gradient on; 0 and 1 have nothing to do,
#                                                         and 2 does not send them any gradient
#
# A backward that nobody needs stays in the lane, so that all lanes are as planned, but it does nothing. Its message is
# left out on both ends.

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
        if step.do == FORWARD and visit in closed_visits:
            closed.add(step.value)
    return needed_turns, Rests(frozenset(idle), frozenset(closed))


def _is_unneeded(message: LaneStep, closed: frozenset[StageVisit]) -> bool:
    """Whether a message is a gradient for stages that do not train."""
    action = message.instruction.action
    return message.goes_back and (action.stage, action.microbatch) in closed
