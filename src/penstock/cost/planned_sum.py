"""Which kind of sum is the quickest for given links, and when a planned sum ends.

`penstock.cost.allreduce` computes only the end of the quickest sum, because the search for paths
asks for it in every move. Here a finished plan learns how the ranks reach that end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from penstock.cost.allreduce import (
    MAX_CELLS,
    MAX_EXACT_SHARES,
    NEAR,
    SHARE_BISECTIONS,
    TINY,
    ring_seconds,
)
from penstock.ir.sum_plan import SumKind, SumPlan
from penstock.ir.sum_rounds import cell_shares, count_cells, rounds_of
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

    >>> link = np.ones((3, 3))
    >>> plan = quickest_sum(0.5 * link, 0.01 * link, 600.0, [0.0, 0.0, 9.0], [4, 5, 6], [1])
    >>> plan.kind.value, [round(share, 2) for share in plan.shares]
    ('direct', [0.23, 0.23, 0.54])
    """
    begin = max(ready)
    best = ring_plan(latency, byte, size, ranks, parts)
    end = begin + ring_seconds(latency, byte, size)
    two, seconds = _two_levels(latency, byte, size, ranks, parts)
    if two is not None and begin + seconds < end:
        best = two
        end = begin + seconds
    shares = _direct_shares(latency, byte, size, np.array(ready), begin, end)
    if shares is not None:
        best = SumPlan(tuple(parts), SumKind.DIRECT, tuple(ranks), shares)
    return best


def ring_plan(
    latency: Floats,
    byte: Floats,
    size: float,
    ranks: Sequence[int],
    parts: Sequence[int],
) -> SumPlan:
    """The ring that goes from each rank to the nearest one that is left, as its price assumes."""
    seconds = latency + byte * (size / len(ranks))
    order = [0]
    left = list(range(1, len(ranks)))
    while left:
        nearest = min(left, key=lambda other: seconds[order[-1], other])
        order.append(nearest)
        left.remove(nearest)
    return SumPlan(tuple(parts), SumKind.RING, tuple(ranks[place] for place in order))


def _direct_shares(
    latency: Floats,
    byte: Floats,
    size: float,
    ready: Floats,
    begin: float,
    latest: float,
) -> tuple[float, ...] | None:
    """The shares with which a direct sum ends first; None if it does not end before `latest`."""
    low, high = begin, latest
    found: Floats | None = None
    for _ in range(SHARE_BISECTIONS):
        middle = 0.5 * (low + high)
        shares = np.array(
            [
                _largest_share(latency, byte, size, ready, owner, middle)
                for owner in range(len(ready))
            ]
        )
        if shares.sum() >= 1.0:
            high = middle
            found = shares
        else:
            low = middle
    if found is None:
        return None
    return tuple((found / found.sum()).tolist())


def _largest_share(
    latency: Floats, byte: Floats, size: float, ready: Floats, owner: int, end: float
) -> float:
    """The share of the bytes that a rank can own if its sum is to reach all by this end."""
    others = np.arange(len(ready)) != owner
    out = latency[owner, others]
    out_byte = byte[owner, others]
    into = ready[others] + latency[others, owner]
    into_byte = byte[others, owner]
    room = end - ready[owner] - out
    if len(ready) > MAX_EXACT_SHARES:
        both_room = np.array(end - into.max() - out.max())
        both_byte = np.array(into_byte.max() + out_byte.max())
    else:
        both_room = end - into[:, None] - out[None, :]
        both_byte = into_byte[:, None] + out_byte[None, :]
    if room.min() < 0 or both_room.min() < 0:
        return 0.0
    limits = [
        float((room / np.maximum(size * out_byte, TINY)).min()),
        float((both_room / np.maximum(size * both_byte, TINY)).min()),
    ]
    return min(1.0, *limits)


def _two_levels(
    latency: Floats,
    byte: Floats,
    size: float,
    ranks: Sequence[int],
    parts: Sequence[int],
) -> tuple[SumPlan | None, float]:
    """The sum on two levels with its seconds; None if the ranks do not form groups."""
    count = len(ranks)
    seconds = latency + byte * size
    np.fill_diagonal(seconds, 0.0)
    near = np.maximum(seconds, seconds.T) <= NEAR * seconds.max()
    label = list(range(count))
    for k in range(count):
        for m in range(k):
            if near[k, m] and label[k] != label[m]:
                old, new = label[k], label[m]
                label = [new if one == old else one for one in label]
    groups = [
        [place for place in range(count) if label[place] == name]
        for name in sorted(set(label))
    ]
    sizes = [len(group) for group in groups]
    if len(groups) in (1, count) or count_cells(sizes, whole=False) > MAX_CELLS:
        return None, math.inf
    home = {place: number for number, group in enumerate(groups) for place in group}
    within = whole = shared = 0.0
    for k in range(count):
        for m in range(count):
            if k == m:
                continue
            mine, other = sizes[home[k]], sizes[home[m]]
            if home[k] == home[m]:
                within = max(within, float(latency[k, m] + byte[k, m] * size / mine))
                continue
            piece = float(byte[k, m]) * size / (mine * other)
            whole = max(whole, float(latency[k, m]) + piece)
            shared = max(shared, float(latency[k, m]) + piece / len(groups))
    named = tuple(tuple(ranks[place] for place in group) for group in groups)
    plan = SumPlan(
        tuple(parts),
        SumKind.TWO_LEVELS,
        tuple(rank for group in named for rank in group),
        groups=named,
        whole=whole <= 2.0 * shared,
    )
    return plan, 2.0 * within + min(whole, 2.0 * shared)


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
    shares = cell_shares(plan)
    place = {rank: number for number, rank in enumerate(ranks)}
    now = {rank: ready[place[rank]] for rank in plan.ranks}
    rounds = {rank: deque(rounds_of(plan, rank)) for rank in plan.ranks}
    arrivals: dict[tuple[int, int], deque[float]] = {}
    begun = dict.fromkeys(plan.ranks, False)
    moved = True
    while moved:
        moved = False
        for rank, left in rounds.items():
            while left:
                one = left[0]
                if not begun[rank]:
                    begun[rank] = True
                    moved = True
                    for peer, cells, _ in one.sends:
                        a, b = place[rank], place[peer]
                        sent = size * sum(shares[cell] for cell in cells)
                        arrival = now[rank] + float(latency[a, b] + byte[a, b] * sent)
                        link = arrivals.setdefault((rank, peer), deque())
                        link.append(arrival)
                if not all(arrivals.get((peer, rank)) for peer, _, _ in one.receives):
                    break
                for peer, _, _ in one.receives:
                    now[rank] = max(now[rank], arrivals[peer, rank].popleft())
                left.popleft()
                begun[rank] = False
                moved = True
    return max(now.values())
