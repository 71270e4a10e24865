"""What makes three tables a schedule. Collects every fault and raises once, each drawn with a caret under the action:

2B0 needs 2F0, which no rank ever runs

  rank 2 | 2F1 2B0 2F2 2B1 2F3 2B2
               ^^^
  every micro-batch needs one F on every stage of its path
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Op
from penstock.ir.compiled import at_speed
from penstock.ir.needs import BACKWARD, FORWARD, WEIGHTS, needed_slots
from penstock.ir.table import Ints, Table, split_slots, tabulate

if TYPE_CHECKING:
    from penstock.ir.schedule import MicroBatch, Schedule

DRAWN = 100  # faults of one sort that are drawn; the rest are counted
AROUND = 6  # actions shown on each side of the one at fault


def check(schedule: Schedule) -> Table:
    """The schedule's columns, if it is one; else a `ScheduleError` with every fault."""
    faults = list(_table_faults(schedule))
    if faults:
        raise ScheduleError(faults)
    table = tabulate(schedule.stages, schedule.microbatches, schedule.lanes)
    faults += _unsound(schedule, table)
    faults += _doubled(schedule, table)
    slots = needed_slots(table)
    faults += _missing(schedule, table, slots)
    table.needs = np.where(slots >= 0, table.at[slots], -1).astype(np.int32)
    faults += _order(schedule, table)
    if faults:
        raise ScheduleError(faults)
    return table


def draw_lane(lanes: Sequence[Sequence[object]], rank: int, index: int) -> str:
    """A lane around one of its entries, with a caret under it."""
    lane, head = lanes[rank], f"  rank {rank} | "
    begin, end = max(index - AROUND, 0), min(index + AROUND + 1, len(lane))
    words = [str(entry) for entry in lane[begin:end]]
    left = ["..."] if begin else []
    line = head + " ".join([*left, *words, *(["..."] if end < len(lane) else [])])
    before = len(head) + sum(len(word) + 1 for word in [*left, *words[: index - begin]])
    return f"{line}\n{' ' * before}{'^' * len(words[index - begin])}"


def _fault(
    schedule: Schedule, table: Table, number: int, what: str, advice: str
) -> str:
    rank = int(table.rank[number])
    return f"{what}\n\n{draw_lane(schedule.lanes, rank, number - int(table.first[rank]))}\n  {advice}"


def _some(numbers: Ints) -> Iterator[int]:
    yield from (int(number) for number in numbers[:DRAWN])


def _rest(numbers: Ints, what: str) -> list[str]:
    return [f"and {len(numbers) - DRAWN} more {what}"] if len(numbers) > DRAWN else []


# ---------------------------------------------------------------- the tables themselves
def _table_faults(schedule: Schedule) -> Iterator[str]:
    if not schedule.lanes or not schedule.stages or not schedule.microbatches:
        yield "a schedule needs at least one rank, one stage and one micro-batch"
    last = len(schedule.lanes) - 1
    for number, stage in enumerate(schedule.stages):
        if not 0 <= stage.rank <= last:
            yield (
                f"stage {number} lives on rank {stage.rank}, which does not exist (ranks 0..{last})\n"
                "  give that rank a lane, or move the stage"
            )
        if stage.part < 0:
            yield f"stage {number} holds part {stage.part}; parts are counted from 0"
    for number, microbatch in enumerate(schedule.microbatches):
        yield from _path_faults(schedule, number, microbatch)
        yield from _cut_faults(number, microbatch)


def _path_faults(
    schedule: Schedule, number: int, microbatch: MicroBatch
) -> Iterator[str]:
    drawn = f"\n\n  micro-batch {number} | path {' '.join(map(str, microbatch.path))}\n"
    if not microbatch.path:
        yield f"micro-batch {number} visits no stage{drawn}  a path needs at least one stage"
    seen: dict[int, int] = {}
    for stage in microbatch.path:
        if not 0 <= stage < len(schedule.stages):
            stages = len(schedule.stages)
            yield f"micro-batch {number} visits stage {stage}, which does not exist (stages 0..{stages - 1}){drawn}"
            continue
        part = schedule.stages[stage].part
        if part in seen:
            yield (
                f"micro-batch {number} visits part {part} twice: on stages {seen[part]} and {stage}{drawn}"
                "  a path takes one stage of a part at most"
            )
        seen[part] = stage


def _cut_faults(number: int, microbatch: MicroBatch) -> Iterator[str]:
    cuts, tokens = microbatch.cuts, microbatch.tokens
    rising = all(a < b for a, b in pairwise(cuts))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != tokens or not rising:
        yield (
            f"the cuts of micro-batch {number} do not cover its tokens 0..{tokens}\n\n"
            f"  micro-batch {number} | cuts {' '.join(map(str, cuts))}\n"
            f"  cuts rise from 0 to the number of tokens, {tokens}"
        )


# ---------------------------------------------------------------- each action for itself
def _unsound(schedule: Schedule, table: Table) -> list[str]:
    bad = np.flatnonzero(~table.sound)
    return [_unsound_one(schedule, table, number) for number in _some(bad)] + _rest(
        bad, "actions like these"
    )


def _unsound_one(schedule: Schedule, table: Table, number: int) -> str:
    action, rank = table.action(number), int(table.rank[number])
    stages, microbatches = schedule.stages, schedule.microbatches
    if not 0 <= action.stage < len(stages):
        what = f"{action} is on stage {action.stage}, which does not exist (stages 0..{len(stages) - 1})"
        return _fault(schedule, table, number, what, "name a stage of the table")
    if not 0 <= action.microbatch < len(microbatches):
        last = len(microbatches) - 1
        what = f"{action} is for micro-batch {action.microbatch}, which does not exist (micro-batches 0..{last})"
        return _fault(
            schedule,
            table,
            number,
            what,
            "are the micro-batches of this lane off by one?",
        )
    microbatch = microbatches[action.microbatch]
    if action.stage not in microbatch.path:
        path = " ".join(map(str, microbatch.path))
        what = f"{action} is off the path of micro-batch {action.microbatch}, which is {path}"
        return _fault(
            schedule, table, number, what, "take it out, or put the stage on the path"
        )
    if not 0 <= action.slice < microbatch.slices:
        what = f"{action} is for slice {action.slice}, but micro-batch {action.microbatch} has {microbatch.slices}"
        return _fault(schedule, table, number, what, "slices are counted from 0")
    home = stages[action.stage].rank
    what = (
        f"{action} stands on rank {rank}, but stage {action.stage} lives on rank {home}"
    )
    return _fault(schedule, table, number, what, f"move it to the lane of rank {home}")


def _doubled(schedule: Schedule, table: Table) -> list[str]:
    sound = np.flatnonzero(table.sound)
    twice = sound[table.at[table.slots[sound]] != sound]
    found = []
    for number in _some(twice):
        action, other = (
            table.action(number),
            table.action(int(table.at[table.slots[number]])),
        )
        if action == other:
            what, advice = f"{action} stands twice", "each action runs once"
        else:
            what, advice = (
                f"{action} stands beside {other}",
                "a backward is either B alone, or I and W",
            )
        found.append(_fault(schedule, table, number, what, advice))
    return found + _rest(twice, "doubled actions")


# ---------------------------------------------------------------- all of them together
def _missing(schedule: Schedule, table: Table, slots: Ints) -> list[str]:
    """Empty slots that must be filled, each drawn under an action that needs it, or beside which it belongs."""
    empty = table.at < 0
    split = split_slots(table)
    wanted = np.ones(len(empty), dtype=np.bool_)
    wanted[WEIGHTS::3] = split
    missing = np.flatnonzero(empty & wanted)
    found = []
    if len(missing):
        users = _users(slots, missing)
        found = [
            _missing_one(schedule, table, slot, users.get(slot, -1))
            for slot in _some(missing)
        ]
    alone = table.at[WEIGHTS::3][~split & ~empty[WEIGHTS::3] & ~empty[BACKWARD::3]]
    for number in _some(alone):
        action = table.action(number)
        whole = action._replace(op=Op.B)
        what = f"{action} has no {action._replace(op=Op.I)}: its backward is {whole}"
        found.append(
            _fault(
                schedule,
                table,
                number,
                what,
                "a backward is either B alone, or I and W",
            )
        )
    return found + _rest(missing, "missing actions") + _rest(alone, "W without I")


def _users(slots: Ints, missing: Ints) -> dict[int, int]:
    row, column = np.nonzero(np.isin(slots, missing))
    return {
        int(slots[r, c]): int(r) for r, c in zip(row[::-1], column[::-1], strict=True)
    }


def _missing_one(schedule: Schedule, table: Table, slot: int, user: int) -> str:
    action = _action_in(schedule, table, slot)
    kind = slot % 3
    if user >= 0:
        what = f"{table.action(user)} needs {action}, which no rank ever runs"
        lacks = "F" if kind == FORWARD else "B (or I and W)"
        advice = f"every micro-batch needs one {lacks} on every stage of its path"
        return _fault(schedule, table, user, what, advice)
    beside = int(table.at[slot - 1]) if kind != FORWARD else -1
    if kind == WEIGHTS:
        what = f"{table.action(beside)} has no {action}: the weight gradient is never computed"
        return _fault(
            schedule, table, beside, what, "a backward is either B alone, or I and W"
        )
    what = f"no rank ever runs {action}"
    if beside >= 0:
        return _fault(
            schedule, table, beside, what, "every F needs its backward: B, or I and W"
        )
    rank = schedule.rank_of(action)
    return (
        f"{what}\n\n  it belongs to the lane of rank {rank}, with stage {action.stage}"
    )


def _action_in(schedule: Schedule, table: Table, slot: int) -> Action:
    microbatch = int(np.searchsorted(table.base, slot, side="right")) - 1
    place, kind = divmod(slot - int(table.base[microbatch]), 3)
    position, piece = divmod(place, int(table.slices[microbatch]))
    op = (Op.F, Op.B, Op.W)[kind]
    return Action(
        op, schedule.microbatches[microbatch].path[position], microbatch, piece
    )


# ---------------------------------------------------------------- can the lanes run?
def _order(schedule: Schedule, table: Table) -> list[str]:
    """Walks the lanes; fills `order` and `tick`. What is left when nobody can go on waits in a circle."""
    table.tick = np.zeros(len(table), dtype=np.int32)
    cursor = table.first[:-1].copy()
    at_speed(_walk, len(table))(
        table.first, table.rank, table.needs, table.tick, cursor
    )
    if (cursor < table.first[1:]).any():
        return [_cycle(schedule, table, cursor)]
    table.order = np.argsort(table.tick, kind="stable").astype(np.int32)
    return []


def _walk(first: Ints, rank: Ints, needs: Ints, tick: Ints, cursor: Ints) -> None:
    """Each rank runs as far as it can; who waits is woken by what it waits for. Numbers each action with its tick."""
    ranks = len(first) - 1
    sleeper = np.full(
        len(rank), -1, np.int32
    )  # the rank that was last to fall asleep waiting for an action
    under = np.full(ranks, -1, np.int32)  # the rank that fell asleep there before it
    awake = np.arange(ranks)[::-1].copy()
    count = ranks
    while count > 0:
        count -= 1
        mine = awake[count]
        while cursor[mine] < first[mine + 1]:
            number = cursor[mine]
            now = tick[number - 1] if number > first[mine] else 0
            blocker = -1
            for column in range(needs.shape[1]):
                needed = needs[number, column]
                if needed >= 0:
                    if needed >= cursor[rank[needed]]:
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


def _cycle(schedule: Schedule, table: Table, cursor: Ints) -> str:
    def blocker(rank: int) -> int:
        needed = [int(n) for n in table.needs[cursor[rank]] if n >= 0]
        return next(n for n in needed if n >= cursor[table.rank[n]])

    rank = int(np.flatnonzero(cursor < table.first[1:])[0])
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = int(table.rank[blocker(rank)])
    circle = seen[seen.index(rank) :]
    lines = []
    for member in circle:
        waits, needed = table.action(int(cursor[member])), blocker(member)
        other = int(table.rank[needed])
        head = table.action(int(cursor[other]))
        after = (
            "" if needed == cursor[other] else f", which rank {other} runs after {head}"
        )
        lines.append(
            f"  rank {member} waits at {waits} for {table.action(needed)}{after}"
        )
    drawn = [
        draw_lane(schedule.lanes, member, int(cursor[member] - table.first[member]))
        for member in circle
    ]
    return "\n".join(
        [
            "this order can never run: each waits for the next, in a circle",
            "",
            *lines,
            "",
            *drawn,
            "  put what is needed before what needs it",
        ]
    )
