"""torch's second CSV format, `compute_comms`: actions with their messages, in the order that `verify` proves.

torch's runtime runs these rows as they stand, without a lowering of its own:

    0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,...,0REDUCE_GRAD,0RESHARD
    1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,...

There a message has the number of the stage that sends or receives it: 0SEND_F0 and 1RECV_F0 are the two ends of one
message. UNSHARD, REDUCE_GRAD and RESHARD are for stages under FSDP, whose weights are gathered once and whose
gradients are summed once in a step; REDUCE_GRAD also scales gradients.
"""

from __future__ import annotations

import csv
import io

from penstock.formats.torch_csv import check_expressible
from penstock.ir.action import Action, Op
from penstock.ir.program import (
    Free,
    InstructionLane,
    Program,
    Receive,
    RunAction,
    Send,
)
from penstock.ir.schedule import Schedule


def dump_torch_comms(program: Program) -> str:
    """The program as a torch CSV with communication; parts become torch's stages."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(torch_rows(program))
    return text.getvalue()


def torch_rows(program: Program) -> list[list[str]]:
    """The words of each rank's row.

    >>> from penstock import lower, make
    >>> torch_rows(lower(make("1f1b", ranks=2, microbatches=1)))[1]
    ['1UNSHARD', '1RECV_F0', '1F0', '1B0', '1SEND_B0', '1REDUCE_GRAD', '1RESHARD']
    """
    check_expressible(program.schedule)
    return [_row(program.schedule, lane) for lane in program.lanes]


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
            part += 1 if action.op is Op.F else -1
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
    return "F" if action.op is Op.F else "B"
