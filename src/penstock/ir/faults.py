"""How the faults of a schedule are drawn, with carets under the faulty action.

2B0 needs 2F0, which no rank ever runs

  rank 2 | 2F1 2B0 2F2 2B1 2F3 2B2
               ^^^
  every micro-batch needs one F on every stage of its path
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from penstock.ir.table import Ints, Table

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule

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
