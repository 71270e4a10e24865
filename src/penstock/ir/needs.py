"""The dependency rules: what must finish before an action can start.

No other module knows these rules.

Micro-batch 0 in two slices through stages a, b; an arrow leads from an action to one that needs it:

    aF0.0 ──► bF0.0          F  the same slice on the previous stage of the path
      │         │               the earlier slice on the same stage (its keys and values)
      ▼         ▼
    aF0.1 ──► bF0.1          B  its own F
                │               the same slice's backward on the next stage of the path
                ▼               the later slice's backward on the same stage
    aB0.1 ◄── bB0.1
      │         │            W  its own I; if a backward is split, I takes the place of B in all of the above
      ▼         ▼
    aB0.0 ◄── bB0.0          R  its own O, which needs its own F; a B needs its own R if there is one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.action import (
    BACKWARD,
    FORWARD,
    KINDS,
    OFFLOAD,
    RELOAD,
    WEIGHTS,
    Action,
)

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule
    from penstock.ir.table import Ints, Table


class Rule(NamedTuple):
    """An action of `kind` needs the action of kind `needed` at an offset from it.

    `path` counts the stages along the path, and `slice` the slices. `if_any` says that a schedule may do without the
    needed action.
    """

    kind: int
    needed: int
    path: int
    slice: int
    if_any: bool = False


RULES = (
    Rule(FORWARD, FORWARD, -1, 0),
    Rule(FORWARD, FORWARD, 0, -1),
    Rule(BACKWARD, FORWARD, 0, 0),
    Rule(BACKWARD, BACKWARD, +1, 0),
    Rule(BACKWARD, BACKWARD, 0, +1),
    Rule(WEIGHTS, BACKWARD, 0, 0),
    Rule(OFFLOAD, FORWARD, 0, 0),
    Rule(RELOAD, OFFLOAD, 0, 0),
    Rule(BACKWARD, RELOAD, 0, 0, if_any=True),
)


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions that must finish before `action` may start.

    >>> from penstock import make, needs
    >>> from penstock.ir import parse_action
    >>> needs(make("1f1b", ranks=3, microbatches=4), parse_action("1B2"))
    (<1F2>, <2B2>)
    """
    table = schedule.table
    if not _is_of(schedule, action):
        raise ShapeError(
            f"this schedule has no action {action}: its micro-batch does not exist, does not "
            "visit this stage, or has fewer slices"
        )
    microbatch = schedule.microbatches[action.microbatch]
    position = microbatch.path.index(action.stage)
    needed = []
    for rule in RULES:
        if rule.kind != action.op.kind:
            continue
        there = position + rule.path
        piece = action.slice + rule.slice
        is_on_path = 0 <= there < len(microbatch.path)
        is_slice = 0 <= piece < microbatch.slices
        if is_on_path and is_slice:
            slot = table.slot(rule.needed, action.microbatch, there, piece)
            number = int(table.at[slot])
            if number >= 0 or not rule.if_any:
                needed.append(table.action(number))
    return tuple(needed)


def _is_of(schedule: Schedule, action: Action) -> bool:
    """Whether a micro-batch of the schedule has this slice and visits this stage."""
    if not 0 <= action.microbatch < len(schedule.microbatches):
        return False
    microbatch = schedule.microbatches[action.microbatch]
    return action.stage in microbatch.path and 0 <= action.slice < microbatch.slices


def needed_slots(table: Table) -> Ints:
    """The rules applied to all actions at once.

    Row i holds the slots that action i needs, and -1 where a rule does not apply.
    """
    slots = np.full((len(table.kind), len(RULES)), -1, dtype=np.int64)
    columns_used = np.zeros(KINDS, dtype=np.int64)
    for rule in RULES:
        mine = np.flatnonzero((table.kind == rule.kind) & table.valid)
        microbatch = table.microbatch[mine]
        there = table.position[mine] + rule.path
        piece = table.slice[mine] + rule.slice
        inside = (
            (there >= 0)
            & (there < table.length[microbatch])
            & (piece >= 0)
            & (piece < table.slices[microbatch])
        )
        slot = table.slot(rule.needed, microbatch[inside], there[inside], piece[inside])
        user = mine[inside]
        if rule.if_any:
            is_there = table.at[slot] >= 0
            slot, user = slot[is_there], user[is_there]
        if len(user):
            slots[user, columns_used[rule.kind]] = slot
            columns_used[rule.kind] += 1
    return slots[:, : max(columns_used.max(), 1)]
