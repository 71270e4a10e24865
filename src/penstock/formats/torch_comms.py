"""torch's second CSV format, `compute_comms`: actions with their messages, in the order that `verify` proves.

torch's runtime runs these rows as they stand, without a lowering of its own:

    0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,...,0REDUCE_GRAD,0RESHARD
    1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,...

There a message has the number of the stage that sends or receives it: 0SEND_F0 and 1RECV_F0 are the two ends of one
message. UNSHARD, REDUCE_GRAD and RESHARD are for stages under FSDP, whose weights are gathered once and whose
gradients are summed once in a step; REDUCE_GRAD also scales gradients.

torch 2.15 wants a wait for every SEND and REDUCE_GRAD, such as 0WAIT_SEND_F0, which older versions cannot read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from penstock.formats.torch_csv import check_expressible
from penstock.ir.action import FORWARD, Action
from penstock.ir.program import (
    Free,
    InstructionLane,
    Program,
    Receive,
    RunAction,
    Send,
)
from penstock.ir.schedule import Schedule

_TORCH_WITH_WAITS = (2, 15)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_INPUT_BACKWARD = re.compile(r"(\d+)[BI](\d+)")


def dump_torch_comms(program: Program) -> str:
    """The program as a torch CSV with communication; parts become torch's stages.

    It is written for the torch that is installed, or for the newest one.
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows(torch_rows(program, installed_torch_waits()))
    return text.getvalue()


def installed_torch_waits() -> bool:
    """Whether the installed torch wants a wait for every send and sum, as torch 2.15 does; True without torch."""
    try:
        numbers = _VERSION.match(version("torch"))
    except PackageNotFoundError:
        return True
    return not numbers or tuple(map(int, numbers.groups())) >= _TORCH_WITH_WAITS


def torch_rows(program: Program, waits: bool) -> list[list[str]]:
    """The words of each rank's row.

    >>> from penstock import lower, make
    >>> program = lower(make("1f1b", ranks=2, microbatches=1))
    >>> torch_rows(program, waits=False)[1]
    ['1UNSHARD', '1RECV_F0', '1F0', '1B0', '1SEND_B0', '1REDUCE_GRAD', '1RESHARD']
    >>> torch_rows(program, waits=True)[1][4:]
    ['1SEND_B0', '1REDUCE_GRAD', '1WAIT_REDUCE_GRAD', '1RESHARD', '1WAIT_SEND_B0']
    """
    check_expressible(program.schedule)
    rows = [_row(program.schedule, lane) for lane in program.lanes]
    return [list(_with_waits(row)) for row in rows] if waits else rows


def _with_waits(row: list[str]) -> Iterator[str]:
    """Add a wait for every send and sum, in the places where torch's own lowering has them.

    A forward's message has certainly arrived when its gradient has come back, so that the wait takes no time. Other
    messages may still be on their way and are waited for at the end.
    """
    sent: list[str] = []
    for word in row:
        yield word
        if "SEND" in word:
            sent.append(word)
        elif word.endswith("REDUCE_GRAD"):
            yield _wait_of(word)
        elif backward := _INPUT_BACKWARD.fullmatch(word):
            stage, microbatch = backward.groups()
            arrived = f"{stage}SEND_F{microbatch}"
            if arrived in sent:
                sent.remove(arrived)
                yield _wait_of(arrived)
    yield from map(_wait_of, sent)


def _wait_of(word: str) -> str:
    """0SEND_F1 becomes 0WAIT_SEND_F1."""
    return re.sub("[A-Z]", r"WAIT_\g<0>", word, count=1)


def _row(schedule: Schedule, lane: InstructionLane) -> list[str]:
    last = _last_actions(lane)
    row: list[str] = []
    gathered: set[int] = set()
    ending: list[str] = []  # what follows once the last message of a stage is sent
    for instruction in lane:
        action = instruction.action
        part = schedule.stages[action.stage].part
        if isinstance(instruction, Free):
            continue
        if isinstance(instruction, Send):
            row.append(f"{part}SEND_{_direction(action)}{action.microbatch}")
            continue
        row += ending
        ending = []
        word = str(action._replace(stage=part))
        if isinstance(instruction, Receive):
            part += 1 if action.op.kind == FORWARD else -1
            word = f"{part}RECV_{_direction(action)}{action.microbatch}"
        elif last[action.stage] == action:
            ending = [f"{part}REDUCE_GRAD", f"{part}RESHARD"]
        if part not in gathered:
            gathered.add(part)
            row.append(f"{part}UNSHARD")
        row.append(word)
    return row + ending


def _last_actions(lane: InstructionLane) -> dict[int, Action]:
    """The last action of each stage, which completes its gradients."""
    actions = [one.action for one in lane if isinstance(one, RunAction)]
    return {action.stage: action for action in actions}


def _direction(action: Action) -> str:
    """F for a forward's result, B for that of a whole or an input gradient."""
    return "F" if action.op.kind == FORWARD else "B"
