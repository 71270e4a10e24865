"""Which kind of sum is the quickest for given links, and when a planned sum ends.

`penstock.cost.allreduce` chooses the sum, and here its choice becomes a plan for the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.cost.allreduce import (
    DIRECT,
    RING,
    WHOLE_GROUPS,
    choose_sum,
    ring_order,
)
from penstock.ir.sums import CellMessage, SumKind, SumPlan, cell_shares, rounds_of
from penstock.ir.table import Floats


def quickest_sum(
    latency: Floats,
    byte: Floats,
    size: float,
    ready: Sequence[float],
    ranks: Sequence[int],
    parts: Sequence[int],
) -> SumPlan:
    """The sum of `size` bytes whose end `planned_sum_end` computes.

    The two matrices have the seconds of a message and of each of its bytes between these ranks,
    and each rank has its gradients `ready` at its own time.

    >>> import numpy as np
    >>> link = np.ones((3, 3))
    >>> plan = quickest_sum(0.5 * link, 0.01 * link, 600.0, [0.0, 0.0, 9.0], [4, 5, 6], [1])
    >>> plan.kind.value, [round(share, 2) for share in plan.shares]
    ('direct', [0.23, 0.23, 0.54])
    """
    choice = choose_sum(latency, byte, size, ready)
    kind = int(choice.kinds[0, 0])
    if kind == RING:
        return ring_plan(latency, byte, size, ranks, parts)
    if kind == DIRECT:
        shares = choice.shares[0] / choice.shares[0].sum()
        return SumPlan(
            tuple(parts), SumKind.DIRECT, tuple(ranks), tuple(shares.tolist())
        )
    members: dict[int, list[int]] = {}
    for rank, group in zip(ranks, choice.groups[0].tolist(), strict=True):
        members.setdefault(group, []).append(rank)
    groups = tuple(tuple(members[group]) for group in sorted(members))
    return SumPlan(
        tuple(parts),
        SumKind.TWO_LEVELS,
        tuple(rank for group in groups for rank in group),
        groups=groups,
        whole=kind == WHOLE_GROUPS,
    )


def ring_plan(
    latency: Floats,
    byte: Floats,
    size: float,
    ranks: Sequence[int],
    parts: Sequence[int],
) -> SumPlan:
    """The ring that goes from each rank to the nearest one that is left, as its price assumes."""
    order = ring_order(latency, byte, size)
    return SumPlan(tuple(parts), SumKind.RING, tuple(ranks[place] for place in order))


def rounds_end(
    plan: SumPlan,
    latency: Floats,
    byte: Floats,
    size: float,
    ready: Sequence[float],
    ranks: Sequence[int],
) -> float:
    """When the rounds of a planned sum of `size` bytes end, message by message.

    The matrices and the times are those of `ranks`, in their order.
    """
    place = {rank: number for number, rank in enumerate(ranks)}
    shares = cell_shares(plan)

    def arrival(source: int, message: CellMessage, now: float) -> float:
        """When a message arrives that leaves now."""
        link = place[source], place[message.peer]
        bytes_sent = size * sum(shares[cell] for cell in message.cells)
        return now + float(latency[link] + byte[link] * bytes_sent)

    now = {rank: ready[place[rank]] for rank in plan.ranks}
    rounds = {rank: rounds_of(plan, rank) for rank in plan.ranks}
    ended = dict.fromkeys(plan.ranks, 0)  # rounds
    arrivals: dict[tuple[int, int], deque[float]] = {}  # of messages under way, by link

    def begin_round(rank: int) -> None:
        """Send all messages of the next round of a rank, if it has one."""
        if ended[rank] < len(rounds[rank]):
            for message in rounds[rank][ended[rank]].sends:
                queue = arrivals.setdefault((rank, message.peer), deque())
                queue.append(arrival(rank, message, now[rank]))

    def end_round(rank: int) -> bool:
        """Receive all messages of the round of a rank, and begin the next; False if one is missing."""
        if ended[rank] == len(rounds[rank]):
            return False
        links = [(peer, rank) for peer, _, _ in rounds[rank][ended[rank]].receives]
        if not all(arrivals.get(link) for link in links):
            return False
        for link in links:
            now[rank] = max(now[rank], arrivals[link].popleft())
        ended[rank] += 1
        begin_round(rank)
        return True

    for rank in plan.ranks:
        begin_round(rank)
    goes_on = True
    while goes_on:
        moves = [end_round(rank) for rank in plan.ranks]
        goes_on = any(moves)
    return max(now.values())
