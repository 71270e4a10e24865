"""The time that several ranks need to sum their gradients (an all-reduce).

    ring        each sends a share to the next, 2 (n-1) times; this is what gloo and NCCL run
                2 (n-1) (latency + bytes / n / bandwidth), with the slowest link of the ring
    direct      everyone owns a share: all send it to its owner, who sends its sum back to all
                2 (latency + share / bandwidth), with the slowest link of each owner
    two levels  ranks that are near each other sum first, then these groups sum directly, each
                over all its links, and then the near ranks exchange what they have

A rank that is done early sends its shares early, if sums are direct. So the rank that is done last
can own much: it has received the shares of all others by then, and only sends the sum.

    rank 0 | work . . [sends its shares]
    rank 1 | work . . . . . . [sends the sum of its share, and its part of the others]

The planner of paths takes the quickest of the three for each part, if it may, and the plan says
how each part is summed (`penstock.cost.planned_sum`). Messages that use the same links at the same
time are not considered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.cost.network import Network, PerPair, value_of_pair
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints

SHARE_BISECTIONS = 40
MAX_EXACT_SHARES = 12  # ranks up to which the shares follow every pair of links
TINY = 1e-30  # seconds, to divide by
NEAR = 0.25  # ranks are near each other if their link takes this share of the slowest
MAX_CELLS = 1024  # pieces into which a sum on two levels may cut the gradients


def ring_seconds(latency: Floats, byte: Floats, size: float) -> float:
    """The seconds to sum `size` bytes along a ring.

    The two matrices have the seconds of a message and of each of its bytes, by (source, target).
    The ring goes from each rank to the nearest one that is left.

    >>> link = np.ones((4, 4))
    >>> ring_seconds(0.5 * link, 0.01 * link, 400.0)
    9.0
    """
    count = len(latency)
    share = latency + byte * (size / count)
    return 2.0 * (count - 1) * _slowest_ring_link(share)


def even_ring_seconds(
    ranks: int, latency: float, bandwidth: float, size: float
) -> float:
    """The seconds to sum `size` bytes along a ring whose links are all alike.

    >>> even_ring_seconds(4, 0.5, 100.0, 400.0)
    9.0
    """
    return 2.0 * (ranks - 1) * (latency + size / ranks / bandwidth)


def sum_over_network(network: Network, ranks: Sequence[int], size: float) -> float:
    """The seconds to sum `size` bytes over these ranks of a network, along a ring."""
    if len(ranks) < 2 or size <= 0:
        return 0.0
    latency, bandwidth = network.latency, network.bandwidth
    if not isinstance(latency, tuple) and not isinstance(bandwidth, tuple):
        return even_ring_seconds(len(ranks), latency, bandwidth, size)
    hops = _matrix(latency, ranks, "latency")
    with np.errstate(divide="ignore"):
        byte = 1.0 / _matrix(bandwidth, ranks, "bandwidth")
    return ring_seconds(hops, byte, size)


def _matrix(value: PerPair, ranks: Sequence[int], quantity: str) -> Floats:
    """One number for each pair of these ranks."""
    if not isinstance(value, tuple):
        return np.full((len(ranks), len(ranks)), value)
    value_of_pair(value, max(ranks), max(ranks), quantity)  # refuses unknown ranks
    rows = [[value[a][b] for b in ranks] for a in ranks]
    return np.array(rows, dtype=np.float64)


def planned_sum_end(
    latency: Floats, byte: Floats, size: float, ready: Sequence[float]
) -> float:
    """When the quickest kind of sum ends, if each rank has its gradients `ready` at its own time.

    >>> link = np.ones((3, 3))
    >>> round(planned_sum_end(0.5 * link, 0.01 * link, 600.0, [0.0, 0.0, 9.0]), 2)
    12.75
    """
    labels = np.zeros(len(ready), dtype=np.int64)
    sizes = np.array([[size]])
    times = np.array([ready], dtype=np.float64)
    return float(sum_ends(latency, byte, labels, times, sizes, True)[0])


def sum_ends(
    latency: Floats,
    byte: Floats,
    labels: Ints,
    times: Floats,
    sizes: Floats,
    planned: bool,
) -> Floats:
    """When the sums of each part end.

    labels: the part of each node.
    times: when each node has its gradients for each sum [sum, node].
    sizes: the bytes of the sums of each part, one after the other [part, sum].
    planned: take the quickest kind of sum; otherwise rings.
    """
    ends = np.zeros(len(sizes))
    compile_if_large(_fill_sum_ends, MIN_COMPILED_SIZE)(
        latency, byte, labels, times, sizes, planned, ends
    )
    return ends


def _fill_sum_ends(  # noqa: PLR0915
    latency: Floats,
    byte: Floats,
    labels: Ints,
    times: Floats,
    sizes: Floats,
    planned: bool,
    ends: Floats,
) -> None:
    count = len(labels)
    members = np.zeros(count, np.int64)
    ready = np.zeros(count)
    left = np.zeros(count, np.bool_)
    group = np.zeros(count, np.int64)
    population = np.zeros(count)

    def ring(n: int, size: float) -> float:
        """Go from each node to the nearest one that is left; the slowest link sets the pace."""
        for k in range(n):
            left[k] = k > 0
        here = 0
        slowest = 0.0
        share = size / n
        for _ in range(n - 1):
            best = np.inf
            there = 0
            for k in range(n):
                if left[k]:
                    a, b = members[here], members[k]
                    seconds = latency[a, b] + byte[a, b] * share
                    if seconds < best:
                        best = seconds
                        there = k
            slowest = max(slowest, best)
            here = there
            left[there] = False
        a, b = members[here], members[0]
        slowest = max(slowest, latency[a, b] + byte[a, b] * share)
        return float(2.0 * (n - 1) * slowest)

    def largest_share(n: int, size: float, owner: int, end: float) -> float:
        """The share of the bytes that a node can own if its sum is to reach all by this end."""
        share = 1.0
        o = members[owner]
        for k in range(n):
            if k == owner:
                continue
            target = members[k]
            room = end - ready[owner] - latency[o, target]
            if room < 0.0:
                return 0.0
            share = min(share, room / max(size * byte[o, target], TINY))
        if n > MAX_EXACT_SHARES:
            into = 0.0
            there = 0.0
            out = 0.0
            back = 0.0
            for k in range(n):
                if k != owner:
                    a = members[k]
                    there = max(there, ready[k] + latency[a, o])
                    into = max(into, byte[a, o])
                    back = max(back, latency[o, a])
                    out = max(out, byte[o, a])
            room = end - there - back
            if room < 0.0:
                return 0.0
            return min(share, room / max(size * (into + out), TINY))
        for k in range(n):
            if k == owner:
                continue
            source = members[k]
            for m in range(n):
                if m == owner:
                    continue
                target = members[m]
                room = end - ready[k] - latency[source, o] - latency[o, target]
                if room < 0.0:
                    return 0.0
                both = size * (byte[source, o] + byte[o, target])
                share = min(share, room / max(both, TINY))
        return share

    def direct(n: int, size: float, begin: float, latest: float) -> float:
        """The least end at which the largest shares of all owners cover all bytes."""
        low = begin
        high = latest
        for _ in range(SHARE_BISECTIONS):
            middle = 0.5 * (low + high)
            total = 0.0
            for owner in range(n):
                total += largest_share(n, size, owner, middle)
            if total >= 1.0:
                high = middle
            else:
                low = middle
        return high

    def two_levels(n: int, size: float) -> float:  # noqa: PLR0912
        """Sum in groups of near nodes, between the groups, and in the groups again."""
        slowest = 0.0
        for k in range(n):
            group[k] = k
            population[k] = 0.0
            for m in range(n):
                if k != m:
                    a, b = members[k], members[m]
                    slowest = max(slowest, latency[a, b] + byte[a, b] * size)
        for k in range(n):
            for m in range(k):
                a, b = members[k], members[m]
                there = latency[a, b] + byte[a, b] * size
                back = latency[b, a] + byte[b, a] * size
                if max(there, back) <= NEAR * slowest and group[k] != group[m]:
                    old, new = group[k], group[m]
                    for q in range(n):
                        if group[q] == old:
                            group[q] = new
        for k in range(n):
            population[group[k]] += 1.0
        groups = 0
        cells = 1.0
        for k in range(n):
            if population[k] > 0.0:
                groups += 1
                cells *= population[k]
        if groups in (1, n) or cells * groups > MAX_CELLS:
            return np.inf
        within = 0.0  # one exchange of shares in a group
        whole = 0.0  # all groups send their sums to all others
        shared = 0.0  # one exchange of shares between groups
        for k in range(n):
            for m in range(n):
                if k == m:
                    continue
                a, b = members[k], members[m]
                mine, other = population[group[k]], population[group[m]]
                if group[k] == group[m]:
                    seconds = latency[a, b] + byte[a, b] * size / mine
                    within = max(within, seconds)
                else:
                    piece = byte[a, b] * size / (mine * other)
                    whole = max(whole, latency[a, b] + piece)
                    shared = max(shared, latency[a, b] + piece / groups)
        return 2.0 * within + min(whole, 2.0 * shared)

    for part in range(len(ends)):
        n = 0
        for node in range(count):
            if labels[node] == part:
                members[n] = node
                n += 1
        end = 0.0
        for number in range(sizes.shape[1]):
            size = sizes[part, number]
            begin = 0.0
            for k in range(n):
                ready[k] = max(end, times[number, members[k]])
                begin = max(begin, ready[k])
            if n < 2 or size <= 0.0:
                continue
            end = begin + ring(n, size)
            if planned:
                end = min(end, begin + two_levels(n, size))
                end = direct(n, size, begin, end)
        ends[part] = end


def _slowest_ring_link(seconds: Floats) -> float:
    """The slowest link of a ring that always goes to the nearest rank that is left."""
    left = np.ones(len(seconds), dtype=np.bool_)
    left[0] = False
    here = 0
    slowest = 0.0
    for _ in range(len(seconds) - 1):
        there = int(np.where(left, seconds[here], np.inf).argmin())
        slowest = max(slowest, float(seconds[here, there]))
        here = there
        left[there] = False
    return max(slowest, float(seconds[here, 0]))
