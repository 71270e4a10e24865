"""A rank's lane worked out: every instruction as a step that holds numbers instead of names.

    2F1     the value it makes, the value it takes in (what 1F1 made), its stage's module, its micro-batch
    2B1     the value it makes, the gradient it takes (what 3B1 made), the forward it goes back over (2F1)

Values are numbered like the actions that make them, units (slices of micro-batches) one micro-batch after the other.
Who needs what is read from the schedule's table of needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from penstock.ir.action import Action, Op
from penstock.ir.needs import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.program import Free, Instruction, Program, Receive, RunAction, Send
from penstock.ir.schedule import Schedule


class Do(IntEnum):
    """What a step does."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    SEND = 3
    RECEIVE = 4
    FREE = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, worked out; -1 stands for none."""

    do: Do
    instruction: Instruction
    value: int  # made, sent, received or freed
    source: int = -1  # the value it takes: the input of an F, the gradient of a B
    forward: int = -1  # of a B, I or W: the F it belongs to
    stage: int = -1
    microbatch: int = -1
    unit: int = -1  # the slice of the micro-batch; its number among those of all
    last: bool = False  # on the last stage of the path: the loss is here
    split: bool = False  # an I, or an F whose backward is an I
    peer: int = -1
    goes_back: bool = False  # a message that is a gradient


@dataclass(frozen=True, slots=True)
class Turn:
    """One action with what follows it before the next: messages, in their order, and values to drop."""

    step: Step | None  # None: only messages, before the first action
    messages: tuple[Step, ...]
    frees: tuple[int, ...]


def lane_turns(program: Program, rank: int) -> list[Turn]:
    """A rank's lane as turns."""
    steps = lane_steps(program, rank)
    starts = [number for number, step in enumerate(steps) if step.do <= Do.WEIGHTS]
    cuts = sorted({0, *starts, len(steps)})
    return [_turn(steps[begin:end]) for begin, end in pairwise(cuts)]


def receives_of(turns: Sequence[Turn]) -> list[Step]:
    """The receives of a lane, in their order."""
    return [step for turn in turns for step in turn.messages if step.do is Do.RECEIVE]


def _turn(steps: list[Step]) -> Turn:
    action = steps[0] if steps[0].do <= Do.WEIGHTS else None
    messages = tuple(step for step in steps if step.do in (Do.SEND, Do.RECEIVE))
    return Turn(
        action, messages, tuple(step.value for step in steps if step.do is Do.FREE)
    )


def lane_steps(program: Program, rank: int) -> list[Step]:
    """A rank's lane, worked out."""
    number = {action: n for n, action in enumerate(_actions(program.schedule))}
    first = list(
        accumulate((m.slices for m in program.schedule.microbatches), initial=0)
    )
    return [
        _step(program.schedule, instruction, number, first)
        for instruction in program.lanes[rank]
    ]


def _actions(schedule: Schedule) -> Iterator[Action]:
    for lane in schedule.lanes:
        yield from lane


def _step(
    schedule: Schedule,
    instruction: Instruction,
    number: dict[Action, int],
    first: list[int],
) -> Step:
    action, value = instruction.action, number[instruction.action]
    unit = first[action.microbatch] + action.slice
    back = action.op is not Op.F
    if isinstance(instruction, Free):
        return Step(Do.FREE, instruction, value)
    if isinstance(instruction, Send):
        return Step(
            Do.SEND,
            instruction,
            value,
            unit=unit,
            peer=instruction.peer,
            goes_back=back,
        )
    if isinstance(instruction, Receive):
        return Step(
            Do.RECEIVE,
            instruction,
            value,
            unit=unit,
            peer=instruction.peer,
            goes_back=back,
        )
    assert isinstance(instruction, RunAction)
    return _run(schedule, instruction, value, unit)


def _run(schedule: Schedule, instruction: RunAction, value: int, unit: int) -> Step:
    table, action = schedule.table, instruction.action
    needed = [int(n) for n in table.needs[value] if n >= 0]
    source = next((n for n in needed if table.stage[n] != action.stage), -1)
    kind = int(table.kind[value])
    forward = (
        value
        if kind == FORWARD
        else next((n for n in needed if table.kind[n] == FORWARD), -1)
    )
    if kind == WEIGHTS:
        forward = next(
            int(n)
            for n in table.needs[needed[0]]
            if n >= 0 and table.kind[n] == FORWARD
        )
    backward = int(table.at[table.slots[forward] + BACKWARD])
    return Step(
        Do(kind),
        instruction,
        value,
        source,
        forward,
        action.stage,
        action.microbatch,
        unit,
        last=schedule.microbatches[action.microbatch].path[-1] == action.stage,
        split=table.action(backward).op is Op.I,
    )
