"""How the replicas of a part sum their gradients: the kind of sum, and who does what in it.

    ring        ranks in their order; each has an equal share of the numbers, which goes around twice
    direct      ranks, with the share of the numbers that each of them adds up and sends to all others
    two levels  groups of ranks that are near each other: sums in each group, then between the groups

`penstock.cost.allreduce` chooses among them, `penstock.ir.sum_rounds` says which messages they
take, and the runtime sends these messages. Without a plan, the backend sums in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import ranks_of

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
