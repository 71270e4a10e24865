"""Check whether three tables are a schedule.

The check collects all faults and raises them in one error, each drawn with a caret under the
action:

2B0 needs 2F0, which no rank ever runs

  rank 2 | 2F1 2B0 2F2 2B1 2F3 2B2
               ^^^
  every micro-batch needs one F on every stage of its path

Then it walks along the lanes. Each rank runs its lane from left to right and stops at an action that
needs another one. If all of them stop before the end, they wait for each other in a circle:

rank 0 | 0F0 0B0 0F1 0B1      waits at 0B0 for 1B0, which rank 1 runs after 1F1
rank 1 | 1F0 1F1 1B0 1B1      waits at 1F1 for 0F1, which rank 0 runs after 0B0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.action import (
    BACKWARD,
    FORWARD,
    KINDS,
    RELOAD,
    WEIGHTS,
    Action,
    Op,
    backward,
    halves,
)
from penstock.ir.compiled import compile_if_large
from penstock.ir.needs import needed_slots
from penstock.ir.table import Ints, Table, called_slots, tabulate

if TYPE_CHECKING:
    from penstock.ir.schedule import MicroBatch, Schedule


BACKWARD_RULE = "a backward is either B alone, or I and W"
OFFLOAD_RULE = "what a forward keeps leaves with an O and comes back with an R"


def check(schedule: Schedule) -> Table:
    """The columns of a schedule, or a `ScheduleError` with all faults."""
    faults = list(_table_faults(schedule))
    if faults:
        raise ScheduleError(faults)
    table = tabulate(schedule.stages, schedule.microbatches, schedule.lanes)
    faults += _invalid_faults(schedule, table)
    faults += _duplicate_faults(schedule, table)
    slots = needed_slots(table)
    faults += _missing_faults(schedule, table, slots)
    faults += _uncalled_faults(schedule, table)
    table.needs = np.where(slots >= 0, table.at[slots], -1).astype(np.int32)
    faults += order_faults(schedule, table)
    if faults:
        raise ScheduleError(faults)
    return table


# ---------------------------------------------------------------- stages and micro-batches
def _table_faults(schedule: Schedule) -> Iterator[str]:
    if not schedule.lanes or not schedule.stages or not schedule.microbatches:
        yield "a schedule needs at least one rank, one stage and one micro-batch"
    last = len(schedule.lanes) - 1
    for number, stage in enumerate(schedule.stages):
        if not 0 <= stage.rank <= last:
            yield (
                f"stage {number} lives on rank {stage.rank}, "
                f"which does not exist (ranks 0..{last})\n"
                "  give that rank a lane, or move the stage"
            )
        if stage.part < 0:
            yield f"stage {number} holds part {stage.part}; parts are numbered from 0"
    for number, microbatch in enumerate(schedule.microbatches):
        yield from _path_faults(schedule, number, microbatch)
        yield from _cut_faults(number, microbatch)


def _path_faults(
    schedule: Schedule, number: int, microbatch: MicroBatch
) -> Iterator[str]:
    name = f"micro-batch {number}"
    path = " ".join(map(str, microbatch.path))
    drawing = f"\n\n  {name} | path {path}\n"
    if not microbatch.path:
        yield f"{name} visits no stage{drawing}  a path needs at least one stage"
    last = len(schedule.stages) - 1
    visited: dict[int, int] = {}  # part: stage
    for stage in microbatch.path:
        if not 0 <= stage <= last:
            yield (
                f"{name} visits stage {stage}, "
                f"which does not exist (stages 0..{last}){drawing}"
            )
            continue
        part = schedule.stages[stage].part
        if part in visited:
            yield (
                f"{name} visits part {part} twice: "
                f"on stages {visited[part]} and {stage}{drawing}"
                "  a path may visit only one stage of each part"
            )
        visited[part] = stage


def _cut_faults(number: int, microbatch: MicroBatch) -> Iterator[str]:
    cuts = microbatch.cuts
    tokens = microbatch.tokens
    is_rising = all(begin < end for begin, end in pairwise(cuts))
    is_whole = len(cuts) >= 2 and cuts[0] == 0 and cuts[-1] == tokens
    if not is_rising or not is_whole:
        drawn_cuts = " ".join(map(str, cuts))
        yield (
            f"the cuts of micro-batch {number} do not cover its tokens 0..{tokens}\n\n"
            f"  micro-batch {number} | cuts {drawn_cuts}\n"
            f"  cuts rise from 0 to the number of tokens, {tokens}"
        )


# ---------------------------------------------------------------- single actions
def _invalid_faults(schedule: Schedule, table: Table) -> list[str]:
    """Actions that name something that does not exist, or are on the wrong rank."""
    invalid = np.flatnonzero(~table.valid)
    others = "actions like these"
    return draw_action_faults(schedule, table, invalid, _explain_invalid, others)


def _explain_invalid(schedule: Schedule, table: Table, number: int) -> tuple[str, str]:
    """What is wrong with an action, and what to do about it."""
    action = table.action(number)
    last_stage = len(schedule.stages) - 1
    if not 0 <= action.stage <= last_stage:
        what = (
            f"{action} is on stage {action.stage}, "
            f"which does not exist (stages 0..{last_stage})"
        )
        return what, "name a stage of the table"
    last_microbatch = len(schedule.microbatches) - 1
    if not 0 <= action.microbatch <= last_microbatch:
        what = (
            f"{action} is for micro-batch {action.microbatch}, "
            f"which does not exist (micro-batches 0..{last_microbatch})"
        )
        return what, "are the micro-batches of this lane off by one?"
    microbatch = schedule.microbatches[action.microbatch]
    if action.stage not in microbatch.path:
        path = " ".join(map(str, microbatch.path))
        what = (
            f"{action} is off the path of micro-batch {action.microbatch}, "
            f"which is {path}"
        )
        return what, "remove it, or put the stage on the path"
    if not 0 <= action.slice < microbatch.slices:
        what = (
            f"{action} is for slice {action.slice}, "
            f"but micro-batch {action.microbatch} has {microbatch.slices}"
        )
        return what, "slices are numbered from 0"
    home = schedule.stages[action.stage].rank
    what = (
        f"{action} is in the lane of rank {int(table.rank[number])}, "
        f"but stage {action.stage} lives on rank {home}"
    )
    return what, f"move it to the lane of rank {home}"


def _duplicate_faults(schedule: Schedule, table: Table) -> list[str]:
    """Actions whose slot another action has taken already."""
    valid = np.flatnonzero(table.valid)
    holder = table.at[table.slots[valid]]
    duplicates = valid[holder != valid]
    others = "duplicate actions"
    return draw_action_faults(schedule, table, duplicates, _explain_duplicate, others)


def _explain_duplicate(
    schedule: Schedule, table: Table, number: int
) -> tuple[str, str]:
    """Which action was there before, and the rule that forbids both."""
    action = table.action(number)
    slot = table.slots[number]
    holder = table.action(int(table.at[slot]))
    if action == holder:
        return f"{action} occurs twice", "each action runs once"
    return f"{action} and {holder} both occur", BACKWARD_RULE


# ---------------------------------------------------------------- missing actions
def _missing_faults(schedule: Schedule, table: Table, slots: Ints) -> list[str]:
    """Empty slots that must be filled.

    Each is drawn under an action that needs it, or next to which it belongs.
    """
    is_empty = table.at < 0
    is_required = called_slots(table)
    is_required[FORWARD::KINDS] = True
    is_required[BACKWARD::KINDS] = True
    missing = np.flatnonzero(is_empty & is_required)
    if not len(missing):
        return []
    users = _users(slots, missing)
    faults = []
    for slot in drawn_ones(missing):
        user = users.get(slot)
        if user is not None:
            faults.append(_draw_needed(schedule, table, slot, user))
        else:
            faults.append(_draw_unneeded(schedule, table, slot))
    return faults + count_others(missing, "missing actions")


def _users(slots: Ints, missing: Ints) -> dict[int, int]:
    """The first action that needs each missing slot."""
    numbers, columns = np.nonzero(np.isin(slots, missing))
    users: dict[int, int] = {}
    for number, column in zip(numbers.tolist(), columns.tolist(), strict=True):
        users.setdefault(int(slots[number, column]), number)
    return users


def _draw_needed(schedule: Schedule, table: Table, slot: int, user: int) -> str:
    """The message for a missing action, under an action that needs it."""
    action = _action_in(schedule, table, slot)
    what = f"{table.action(user)} needs {action}, which no rank ever runs"
    lacking = "F" if slot % KINDS == FORWARD else "B (or I and W)"
    advice = f"every micro-batch needs one {lacking} on every stage of its path"
    return draw_action_fault(schedule, table, user, what, advice)


def _draw_unneeded(schedule: Schedule, table: Table, slot: int) -> str:
    """The message for a missing action that no other needs, next to where it belongs."""
    action = _action_in(schedule, table, slot)
    kind = slot % KINDS
    # A missing backward belongs after its F, a missing W after its I, and a missing R after its O.
    before = int(table.at[slot - 1]) if kind != FORWARD else -1
    if kind == WEIGHTS:
        partner = table.action(before)
        what = f"{partner} has no {action}: the weight gradient is never computed"
        return draw_action_fault(schedule, table, before, what, BACKWARD_RULE)
    if kind == RELOAD:
        partner = table.action(before)
        what = f"{partner} has no {action}: what it moves away never comes back"
        return draw_action_fault(schedule, table, before, what, OFFLOAD_RULE)
    what = f"no rank ever runs {action}"
    if before >= 0:
        advice = "every F needs its backward: B, or I and W"
        return draw_action_fault(schedule, table, before, what, advice)
    rank = schedule.rank_of(action)
    place = f"it belongs in the lane of rank {rank}, which has stage {action.stage}"
    return f"{what}\n\n  {place}"


def _action_in(schedule: Schedule, table: Table, slot: int) -> Action:
    """The action that belongs in a slot."""
    microbatch = int(np.searchsorted(table.base, slot, side="right")) - 1
    place, kind = divmod(slot - int(table.base[microbatch]), KINDS)
    position, piece = divmod(place, int(table.slices[microbatch]))
    op = next(op for op in Op if op.kind == kind)
    stage = schedule.microbatches[microbatch].path[position]
    return Action(op, stage, microbatch, piece)


def _uncalled_faults(schedule: Schedule, table: Table) -> list[str]:
    """Each W whose backward is a B instead of an I, and each R without an O."""
    is_filled = table.at >= 0
    is_uncalled = is_filled & ~called_slots(table)
    has_backward = is_filled[BACKWARD::KINDS]
    weights = table.at[WEIGHTS::KINDS][is_uncalled[WEIGHTS::KINDS] & has_backward]
    reloads = table.at[RELOAD::KINDS][is_uncalled[RELOAD::KINDS]]
    return [
        *draw_action_faults(schedule, table, weights, _explain_weights, "W without I"),
        *draw_action_faults(schedule, table, reloads, _explain_reload, "R without O"),
    ]


def _explain_weights(schedule: Schedule, table: Table, number: int) -> tuple[str, str]:
    """Which I is missing beside a W, and which B is in its place."""
    action = table.action(number)
    whole = backward(action.stage, action.microbatch, action.slice)
    partner, _ = halves(action)
    return f"{action} has no {partner}: its backward is {whole}", BACKWARD_RULE


def _explain_reload(schedule: Schedule, table: Table, number: int) -> tuple[str, str]:
    """Which O is missing beside an R."""
    action = table.action(number)
    partner = action._replace(op=Op.O)
    return f"{action} has no {partner}: nothing was moved away", OFFLOAD_RULE


# ---------------------------------------------------------------- drawing faults
MAX_DRAWN_FAULTS = 100  # of each kind; the others are only counted
DRAWN_NEIGHBOURS = 6  # actions drawn on each side of the faulty one
# Says what is wrong with the action of a number, and what to do about it.
Explain: TypeAlias = "Callable[[Schedule, Table, int], tuple[str, str]]"


def draw_lane(lanes: Sequence[Sequence[object]], rank: int, index: int) -> str:
    """The lane of a rank around one of its entries, with carets under that entry."""
    lane = lanes[rank]
    begin = max(index - DRAWN_NEIGHBOURS, 0)
    end = min(index + DRAWN_NEIGHBOURS + 1, len(lane))
    before = [str(entry) for entry in lane[begin:index]]
    after = [str(entry) for entry in lane[index + 1 : end]]
    if begin > 0:
        before.insert(0, "...")
    if end < len(lane):
        after.append("...")
    marked = str(lane[index])
    left = "".join(f"{word} " for word in (f"  rank {rank} |", *before))
    right = "".join(f" {word}" for word in after)
    return f"{left}{marked}{right}\n{' ' * len(left)}{'^' * len(marked)}"


def draw_action_fault(
    schedule: Schedule, table: Table, number: int, what: str, advice: str
) -> str:
    """The message for a faulty action."""
    rank = int(table.rank[number])
    index = number - int(table.first[rank])
    return f"{what}\n\n{draw_lane(schedule.lanes, rank, index)}\n  {advice}"


def draw_action_faults(
    schedule: Schedule, table: Table, numbers: Ints, explain: Explain, others: str
) -> list[str]:
    """The messages for the first of these faulty actions, and the count of the others."""
    faults = []
    for number in drawn_ones(numbers):
        what, advice = explain(schedule, table, number)
        faults.append(draw_action_fault(schedule, table, number, what, advice))
    return faults + count_others(numbers, others)


def drawn_ones(numbers: Ints) -> list[int]:
    """The first faulty actions or slots, which are drawn."""
    first: list[int] = numbers[:MAX_DRAWN_FAULTS].tolist()
    return first


def count_others(numbers: Ints, what: str) -> list[str]:
    """A line for the faults that are not drawn."""
    others = len(numbers) - MAX_DRAWN_FAULTS
    return [f"and {others} more {what}"] if others > 0 else []


# ---------------------------------------------------------------- the order of the lanes
def order_faults(schedule: Schedule, table: Table) -> list[str]:
    """Walk along the lanes, and fill in `order` and `tick`.

    If no rank can go on before the end, some of them wait for each other in a circle.
    """
    table.tick = np.zeros(len(table), dtype=np.int32)
    cursor = table.first[:-1].copy()
    walk = compile_if_large(_walk, len(table))
    walk(table.first, table.rank, table.needs, table.tick, cursor)
    if (cursor < table.first[1:]).any():
        return [_draw_circle(schedule, table, cursor)]
    table.order = np.argsort(table.tick, kind="stable").astype(np.int32)
    return []


def _walk(first: Ints, rank: Ints, needs: Ints, tick: Ints, cursor: Ints) -> None:
    """Let each rank run as far as it can, and wake those that wait for an action.

    Fills in the tick of each action, and leaves in `cursor` how far each rank came.
    """
    ranks = len(first) - 1
    # A stack of the ranks that may go on; `count` of its entries are in use.
    awake = np.arange(ranks)[::-1].copy()
    count = ranks
    # Several ranks may sleep until the same action has run. They are a chain:
    # sleeper[action] ──► a rank, under[rank] ──► the next one, ... ──► -1
    sleeper = np.full(len(rank), -1, np.int32)
    under = np.full(ranks, -1, np.int32)
    while count > 0:
        count -= 1
        mine = awake[count]
        while cursor[mine] < first[mine + 1]:
            number = cursor[mine]
            # It runs after the action before it in the lane, and after all that it needs.
            now = tick[number - 1] if number > first[mine] else 0
            blocker = -1
            for column in range(needs.shape[1]):
                needed = needs[number, column]
                if needed < 0:
                    continue
                has_run = needed < cursor[rank[needed]]
                if not has_run:
                    blocker = needed
                    break
                now = max(now, tick[needed])
            if blocker >= 0:
                under[mine] = sleeper[blocker]
                sleeper[blocker] = mine
                break
            tick[number] = now + 1
            cursor[mine] += 1
            woken = sleeper[number]
            while woken >= 0:
                awake[count] = woken
                count += 1
                woken = under[woken]


def _draw_circle(schedule: Schedule, table: Table, cursor: Ints) -> str:
    """The message for ranks that wait for each other; `cursor` has their next actions."""
    waits = []
    lanes = []
    stuck = np.flatnonzero(cursor < table.first[1:])
    for rank in find_circle(
        int(stuck[0]), lambda rank: int(table.rank[_blocker(table, cursor, rank)])
    ):
        number = int(cursor[rank])
        waits.append(_draw_wait(table, cursor, rank))
        index = number - int(table.first[rank])
        lanes.append(draw_lane(schedule.lanes, rank, index))
    return "\n".join(
        [
            "this order can never run: the ranks wait for each other, in a circle",
            "",
            *waits,
            "",
            *lanes,
            "  put each action after the ones that it needs",
        ]
    )


def find_circle(rank: int, waits_for: Callable[[int], int]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first.

    They are found by asking from rank to rank who waits for whom, until a rank comes up again.
    """
    asked: list[int] = []
    while rank not in asked:
        asked.append(rank)
        rank = waits_for(rank)
    return asked[asked.index(rank) :]


def _draw_wait(table: Table, cursor: Ints, rank: int) -> str:
    """A line that says what a rank waits for, and why that does not come."""
    action = table.action(int(cursor[rank]))
    blocker = _blocker(table, cursor, rank)
    line = f"  rank {rank} waits at {action} for {table.action(blocker)}"
    other = int(table.rank[blocker])
    next_there = int(cursor[other])
    if blocker != next_there:
        line += f", which rank {other} runs after {table.action(next_there)}"
    return line


def _blocker(table: Table, cursor: Ints, rank: int) -> int:
    """The action for which a rank waits."""
    for needed in table.needs[cursor[rank]].tolist():
        if needed >= 0 and needed >= cursor[table.rank[needed]]:
            return int(needed)
    raise AssertionError("a rank that waits has a blocker")
