"""Whether the lanes of a schedule can run to the end, and in which order their actions do.

Each rank runs its lane from left to right and stops at an action that needs another one. If
all of them stop before the end, they wait for each other in a circle:

rank 0 | 0F0 0B0 0F1 0B1      waits at 0B0 for 1B0, which rank 1 runs after 1F1
rank 1 | 1F0 1F1 1B0 1B1      waits at 1F1 for 0F1, which rank 0 runs after 0B0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.compiled import compile_if_large
from penstock.ir.faults import draw_lane
from penstock.ir.table import Ints, Table

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule


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
    for rank in _circle(table, cursor):
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


def _circle(table: Table, cursor: Ints) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first.

    They are found by asking from rank to rank who waits for whom, until a rank comes up again.
    """
    is_stuck = cursor < table.first[1:]
    rank = int(np.flatnonzero(is_stuck)[0])
    asked: list[int] = []
    while rank not in asked:
        asked.append(rank)
        blocker = _blocker(table, cursor, rank)
        rank = int(table.rank[blocker])
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
