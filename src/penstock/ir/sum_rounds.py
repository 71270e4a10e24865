"""The messages of a planned sum, in rounds.

The numbers to sum are cut into cells. In each round a rank sends cells to others and receives
cells from others; it begins the next round when it has received everything.

    ring, 3 ranks        rank 0           rank 1           rank 2
    round 0   adds       cell 0 to 1      cell 1 to 2      cell 2 to 0
    round 1   adds       cell 2 to 1      cell 0 to 2      cell 1 to 0      all is summed somewhere
    round 2   copies     cell 1 to 1      cell 2 to 2      cell 0 to 0
    round 3   copies     cell 0 to 1      cell 1 to 2      cell 2 to 0      everyone has all sums

Every cell is summed by one rank, or by several that add the same numbers in the same order. So
all ranks end up with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from enum import Enum
from math import prod
from typing import NamedTuple

from penstock.ir.sum_plan import SumKind, SumPlan


class RoundKind(Enum):
    """What a rank does with the cells that it receives in a round."""

    ADD = "add"  # Adds them to its own.
    EXCHANGE = "exchange"  # The same, but others add the same cells too.
    COPY = "copy"  # Takes them in place of its own.


class CellMessage(NamedTuple):
    """Cells that go to or come from another rank.

    The receiver adds layer after layer, of which one has its own cells, so that the order of the
    additions does not depend on which message comes first.
    """

    peer: int
    cells: tuple[int, ...]
    layer: int = 0


class Round(NamedTuple):
    """What one rank sends and receives at one time."""

    kind: RoundKind
    sends: tuple[CellMessage, ...]
    receives: tuple[CellMessage, ...]
    own_layer: int = 0


def cell_shares(plan: SumPlan) -> tuple[float, ...]:
    """The share of all numbers that each cell has."""
    if plan.kind is SumKind.DIRECT:
        return plan.shares
    count = len(plan.ranks)
    if plan.kind is SumKind.TWO_LEVELS:
        count = count_cells(map(len, plan.groups), plan.whole)
    return (1.0 / count,) * count


def cell_bounds(plan: SumPlan, numbers: int) -> list[int]:
    """Where the cells of `numbers` numbers begin, and where the last one ends.

    >>> cell_bounds(SumPlan((0,), SumKind.RING, (0, 1, 2)), 10)
    [0, 3, 7, 10]
    """
    ends = list(itertools.accumulate(cell_shares(plan)))
    return [0, *(round(numbers * (end / ends[-1])) for end in ends)]


def count_cells(sizes: Iterable[int], whole: bool) -> int:
    """The number of cells of a sum over groups of these sizes."""
    listed = list(sizes)
    return prod(listed) * (1 if whole else len(listed))


def rounds_of(plan: SumPlan, rank: int) -> tuple[Round, ...]:
    """The rounds of one rank.

    >>> two = SumPlan((0,), SumKind.DIRECT, (4, 7), (0.5, 0.5))
    >>> [(one.kind.value, one.sends[0][:2]) for one in rounds_of(two, 4)]
    [('add', (7, (1,))), ('copy', (7, (0,)))]
    """
    if plan.kind is SumKind.RING:
        return tuple(_ring_rounds(plan, plan.ranks.index(rank)))
    if plan.kind is SumKind.DIRECT:
        return _direct_rounds(plan, plan.ranks.index(rank))
    return _group_rounds(plan, rank)


def _ring_rounds(plan: SumPlan, place: int) -> Iterator[Round]:
    """Shares go around once while they are added up, and once more as sums."""
    ranks = plan.ranks
    count = len(ranks)
    following, before = ranks[(place + 1) % count], ranks[place - 1]
    for kind, first in ((RoundKind.ADD, place), (RoundKind.COPY, place + 1)):
        for turn in range(count - 1):
            sent = (first - turn) % count
            send = CellMessage(following, (sent,))
            receive = CellMessage(before, ((sent - 1) % count,))
            yield Round(kind, (send,), (receive,), own_layer=1)


def _direct_rounds(plan: SumPlan, place: int) -> tuple[Round, ...]:
    """Everyone sends each owner its share, and each owner sends its sum to everyone."""
    others = [other for other in range(len(plan.ranks)) if other != place]
    owners = [other for other in others if plan.shares[other] > 0]
    to_owners = tuple(CellMessage(plan.ranks[other], (other,)) for other in owners)
    listeners = others if plan.shares[place] > 0 else []
    mine = [
        CellMessage(plan.ranks[other], (place,), layer=other) for other in listeners
    ]
    sums = tuple(CellMessage(message.peer, (place,)) for message in mine)
    return (
        Round(RoundKind.ADD, to_owners, tuple(mine), own_layer=place),
        Round(RoundKind.COPY, sums, to_owners),
    )


def _group_rounds(plan: SumPlan, rank: int) -> tuple[Round, ...]:
    """Sum in the groups, between the groups, and share the sums in the groups.

    A cell has a number for each group: the member of that group that deals with it. So any two
    members of different groups deal with equally many cells together. If groups add up shares, a
    cell also has the number of the group that adds it up.
    """
    groups = plan.groups
    spans = [range(len(group)) for group in groups]
    if not plan.whole:
        spans.append(range(len(groups)))
    cells = list(enumerate(itertools.product(*spans)))
    home = next(number for number, group in enumerate(groups) if rank in group)
    place = groups[home].index(rank)

    def select(*wanted: tuple[int, int]) -> tuple[int, ...]:
        """The cells with these digits, each given as (group, member)."""
        found = []
        for number, digits in cells:
            if all(digits[where] == digit for where, digit in wanted):
                found.append(number)
        return tuple(found)

    owner = len(groups)  # the digit that says which group adds up a cell
    mates = [member for member in spans[home] if member != place]
    theirs = [CellMessage(groups[home][m], select((home, m)), m) for m in mates]
    mine = select((home, place))
    ours = [CellMessage(groups[home][m], mine, m) for m in mates]
    both = []
    for group, members in enumerate(groups):
        if group != home:
            for member, peer in enumerate(members):
                both.append((group, peer, ((home, place), (group, member))))
    within = Round(RoundKind.ADD, tuple(theirs), tuple(ours), place)
    gather = Round(RoundKind.COPY, tuple(ours), tuple(theirs))
    if plan.whole:
        met = tuple(CellMessage(peer, select(*at), group) for group, peer, at in both)
        return (within, Round(RoundKind.EXCHANGE, met, met, home), gather)
    away = [
        CellMessage(peer, select(*at, (owner, group)), group)
        for group, peer, at in both
    ]
    here = [
        CellMessage(peer, select(*at, (owner, home)), group) for group, peer, at in both
    ]
    return (
        within,
        Round(RoundKind.ADD, tuple(away), tuple(here), home),
        Round(RoundKind.COPY, tuple(here), tuple(away)),
        gather,
    )
