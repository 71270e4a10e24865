"""Which gradients are summed over ranks, and in which order the sums begin.

Stages of one part on several ranks are replicas, and their gradients are summed. So are those of
tied weights, over all ranks that hold the first or the last part:

    rank 0 | 0F0 0F1 ... 0B1 [sum of part 0 ......]           a sum begins when the last backward
    rank 1 | 1F0 1F1 ... 1B1                                  of its parts is done on all its ranks,
    rank 2 | 2F0 2F1 ... 2B0 2B1 [sum of part 0 ..]           and runs while the ranks go on

All ranks begin their sums in one order: that in which the sums become ready if every action
takes one tick. The simulator and the runtime both take the order from here.

A plan may say how a sum is made; without one, the backend sums in its own way:

    ring        ranks in their order; each has an equal share of the numbers, which goes around twice
    direct      ranks, with the share of the numbers that each of them adds up and sends to all others
    two levels  groups of ranks that are near each other: sums in each group, then between the groups

`penstock.cost.sums` chooses among them. The runtime sends their messages, in rounds. The numbers
to sum are cut into cells; in each round a rank sends cells to others and receives cells from others,
and it begins the next round when it has received everything:

    ring, 3 ranks        rank 0           rank 1           rank 2
    round 0   adds       cell 0 to 1      cell 1 to 2      cell 2 to 0
    round 1   adds       cell 2 to 1      cell 0 to 2      cell 1 to 0      all is summed somewhere
    round 2   copies     cell 1 to 1      cell 2 to 2      cell 0 to 0
    round 3   copies     cell 0 to 1      cell 1 to 2      cell 2 to 0      everyone has all sums

Every cell is summed by one rank, or by several that add the same numbers in the same order. So all
ranks end up with the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import prod
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.action import FORWARD, WEIGHTS
from penstock.ir.schedule import Schedule


class SharedGradients(NamedTuple):
    """Gradients that several ranks sum: those of one part, or of the weights that two parts share."""

    name: str
    parts: tuple[int, ...]
    ranks: tuple[int, ...]
    # The tick at which the last backward of these parts is done on all ranks.
    ready: int


def ranks_of(schedule: Schedule, parts: Sequence[int]) -> tuple[int, ...]:
    """The ranks that hold a stage of these parts. A stage that no micro-batch visits gets the sum too."""
    return tuple(
        sorted({stage.rank for stage in schedule.stages if stage.part in parts})
    )


def first_holders(schedule: Schedule, names: Sequence[Iterable[str]]) -> dict[str, int]:
    """The first rank that holds each parameter, given the names in each part. It alone counts and saves it."""
    holders: dict[str, int] = {}
    for stage in sorted(schedule.stages, key=lambda stage: stage.rank):
        for name in names[stage.part]:
            holders.setdefault(name, stage.rank)
    return holders


def completion(schedule: Schedule, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """The last backward of these parts on a rank (-1: none), and the tick of the last one on any rank."""
    last, ticks = last_backwards(schedule), _last_ticks(schedule)
    own = max(last.get((part, rank), -1) for part in parts)
    return own, max(ticks[part] for part in parts)


def weight_actions(schedule: Schedule, part: int, rank: int) -> list[int]:
    """The W actions of a part on a rank."""
    table = schedule.table
    weights = np.flatnonzero((table.kind == WEIGHTS) & (table.rank == rank)).tolist()
    return [one for one in weights if schedule.stages[table.stage[one]].part == part]


def shared_gradients(
    schedule: Schedule, tied: bool = False
) -> tuple[SharedGradients, ...]:
    """All sums of a step, in the order in which they begin.

    With `tied`, the first and the last part share weights, which are summed on their own.

    >>> from penstock import make
    >>> [(one.name, one.ranks) for one in shared_gradients(make("1f1b", ranks=2, microbatches=2, copies=2))]
    [('part 1', (1, 3)), ('part 0', (0, 2))]
    """
    holders: list[set[int]] = [set() for _ in range(schedule.parts)]
    for stage in schedule.stages:
        holders[stage.part].add(stage.rank)
    groups: list[tuple[str, tuple[int, ...], set[int]]] = [
        (f"part {part}", (part,), ranks)
        for part, ranks in enumerate(holders)
        if len(ranks) > 1
    ]
    last = schedule.parts - 1
    both_ends = holders[0] | holders[last]
    if tied and last > 0 and len(both_ends) > 1:
        groups.append(("tied weights", (0, last), both_ends))
    if not groups:
        return ()
    ticks = _last_ticks(schedule)
    sums = []
    for name, parts, ranks in groups:
        ready = max(ticks[part] for part in parts)
        sums.append(SharedGradients(name, parts, tuple(sorted(ranks)), ready))
    return tuple(sorted(sums, key=lambda one: (one.ready, one.name)))


def last_backwards(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The last backward of each part on each rank, by (part, rank). Parts without any are left out."""
    table = schedule.table
    backwards = np.flatnonzero(table.kind != FORWARD)
    last_of_stage = np.full(len(schedule.stages), -1, dtype=np.int64)
    np.maximum.at(last_of_stage, table.stage[backwards], backwards)
    last: dict[tuple[int, int], int] = {}
    for stage, number in zip(schedule.stages, last_of_stage.tolist(), strict=True):
        if number >= 0:
            key = (stage.part, stage.rank)
            last[key] = max(last.get(key, -1), number)
    return last


def _last_ticks(schedule: Schedule) -> list[int]:
    """The tick of the last backward of each part on any rank."""
    ticks = [0] * schedule.parts
    for (part, _), number in last_backwards(schedule).items():
        ticks[part] = max(ticks[part], int(schedule.table.tick[number]))
    return ticks


SHARE_ROUNDING = 1e-6  # by which the shares of a sum may miss 1


class SumKind(StrEnum):
    """A kind of sum."""

    RING = "ring"
    DIRECT = "direct"
    TWO_LEVELS = "two levels"


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The sum of the gradients of one part, or of weights that several parts share.

    ranks: all ranks that take part; a ring goes around in this order.
    shares: the share of the numbers that each rank adds up, if the kind is direct.
    groups: the ranks once more, in groups, if the kind is two levels.
    whole: whether the groups then send their whole sums to all other groups; otherwise each
        group adds up a share of them, and sends it back.
    """

    parts: tuple[int, ...]
    kind: SumKind
    ranks: tuple[int, ...]
    shares: tuple[float, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        fault = _fault_of_ranks(self) or _fault_of_kind(self)
        if fault:
            raise ShapeError(f"the sum of {self.name}: {fault}")

    @property
    def name(self) -> str:
        """What is summed, for errors."""
        return f"part{'s' * (len(self.parts) > 1)} {' and '.join(map(str, self.parts))}"


def _fault_of_ranks(plan: SumPlan) -> str:
    """What is wrong with the parts and ranks of a sum; empty if nothing is."""
    ranks = plan.ranks
    if not plan.parts:
        return "it names no part"
    if len(ranks) < 2:
        return f"it has {len(ranks)} ranks; a sum needs at least two"
    if len(set(ranks)) < len(ranks):
        return "it names a rank twice"
    return ""


def _fault_of_kind(plan: SumPlan) -> str:
    """What is wrong with the shares or groups of a sum; empty if nothing is."""
    ranks = plan.ranks
    if plan.kind is SumKind.DIRECT:
        if len(plan.shares) != len(ranks):
            return f"it has {len(plan.shares)} shares for {len(ranks)} ranks"
        if not all(0 <= share < math.inf for share in plan.shares):
            return "a share is negative or not a number"
        if abs(sum(plan.shares) - 1) > SHARE_ROUNDING:
            return f"its shares add up to {sum(plan.shares):g}, not to 1"
    if plan.kind is SumKind.TWO_LEVELS:
        members = [rank for group in plan.groups for rank in group]
        if members != list(ranks) or not all(plan.groups):
            return "its groups do not list each rank once, in the order of the ranks"
    return ""


def even_sum(parts: Sequence[int], ranks: Sequence[int]) -> SumPlan:
    """The sum in which every rank adds up an equal share."""
    share = 1.0 / len(ranks)
    shares = (share,) * len(ranks)
    return SumPlan(tuple(parts), SumKind.DIRECT, tuple(ranks), shares)


def unfit_sums(schedule: Schedule, sums: Iterable[SumPlan]) -> list[str]:
    """What is wrong with the sums of a schedule: parts without replicas, or the wrong ranks."""
    faults = []
    seen: set[tuple[int, ...]] = set()
    for plan in sums:
        holders = ranks_of(schedule, plan.parts)
        if plan.parts in seen:
            faults.append(f"there are two sums of {plan.name}")
        seen.add(plan.parts)
        if tuple(sorted(plan.ranks)) != holders:
            named = " ".join(map(str, sorted(plan.ranks)))
            held = " ".join(map(str, holders)) or "none"
            faults.append(
                f"the sum of {plan.name} is over ranks {named}, "
                f"but the ranks that hold it are {held}"
            )
    return faults


def sums_of_survivors(
    sums: Iterable[SumPlan], left: Sequence[int]
) -> tuple[SumPlan, ...]:
    """The sums of the ranks that are left, which get new numbers in their order.

    Rings close the gap, and those that add up shares divide what the lost ranks had.
    """
    new_number = {rank: place for place, rank in enumerate(left)}
    smaller = []
    for plan in sums:
        ranks = [rank for rank in plan.ranks if rank in new_number]
        if len(ranks) > 1:
            smaller.append(_smaller_sum(plan, new_number))
    return tuple(smaller)


def _smaller_sum(plan: SumPlan, new_number: Mapping[int, int]) -> SumPlan:
    """The same kind of sum over the ranks that have a new number."""
    kept = [place for place, rank in enumerate(plan.ranks) if rank in new_number]
    ranks = tuple(new_number[plan.ranks[place]] for place in kept)
    if plan.kind is SumKind.RING:
        return replace(plan, ranks=ranks)
    if plan.kind is SumKind.DIRECT:
        shares = [plan.shares[place] for place in kept]
        total = sum(shares)
        if total <= 0:
            return even_sum(plan.parts, ranks)
        return replace(
            plan, ranks=ranks, shares=tuple(share / total for share in shares)
        )
    groups = []
    for group in plan.groups:
        members = tuple(new_number[rank] for rank in group if rank in new_number)
        if members:
            groups.append(members)
    return replace(plan, ranks=ranks, groups=tuple(groups))


def fitting_sums(
    schedule: Schedule, sums: Iterable[SumPlan], left: Sequence[int] | None = None
) -> tuple[SumPlan, ...]:
    """The sums that fit a schedule after its stages have changed.

    left: the old numbers of the schedule's ranks, if some are lost. A part that has got another
        rank is summed directly, with equal shares.
    """
    given = tuple(sums)
    if left is not None:
        given = sums_of_survivors(given, left)
    fitting = []
    for plan in given:
        holders = ranks_of(schedule, plan.parts)
        if tuple(sorted(plan.ranks)) == holders:
            fitting.append(plan)
        elif len(holders) > 1:
            fitting.append(even_sum(plan.parts, holders))
    return tuple(fitting)


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
        owners = 1 if plan.whole else len(plan.groups)
        count = owners * prod(map(len, plan.groups))
    return (1.0 / count,) * count


def cell_bounds(plan: SumPlan, numbers: int) -> list[int]:
    """Where the cells of `numbers` numbers begin, and where the last one ends.

    >>> cell_bounds(SumPlan((0,), SumKind.RING, (0, 1, 2)), 10)
    [0, 3, 7, 10]
    """
    ends = list(itertools.accumulate(cell_shares(plan)))
    return [0, *(round(numbers * (end / ends[-1])) for end in ends)]


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
