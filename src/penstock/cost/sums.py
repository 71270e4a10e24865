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
how each part is summed (`quickest_sum`). Messages that use the same links at the same
time are not considered. A ring of the backend uses the bandwidth that sums had while all ranks
summed, where it was measured (`penstock.cost.network.sum_bandwidth`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.cost.network import Network, sum_bandwidth, value_of_pair
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.sums import CellMessage, SumKind, SumPlan, cell_shares, rounds_of
from penstock.ir.table import Floats, Ints

SHARE_BISECTIONS = 40
MAX_EXACT_SHARES = 12  # ranks up to which the shares follow every pair of links
TINY = 1e-30  # seconds, to divide by
NEAR = 0.25  # ranks are near each other if their link takes this share of the slowest
MAX_CELLS = 1024  # pieces into which a sum on two levels may cut the gradients

# Kinds of sums; groups send each other their whole sums, or shares of them.
RING, DIRECT, WHOLE_GROUPS, SHARED_GROUPS = range(4)


class SumChoices(NamedTuple):
    """The quickest sums of all parts, one after the other, and the end of the last of each part."""

    ends: Floats  # [part]
    kinds: Ints  # RING, DIRECT, WHOLE_GROUPS or SHARED_GROUPS [part, sum]
    # What each node can add up of a direct sum; at least 1 together [sum, node].
    shares: Floats
    # The same number for all nodes of a group, if there are two levels [sum, node].
    groups: Ints


def ring_order(latency: Floats, byte: Floats, size: float) -> list[int]:
    """The order of the ring that goes from each rank to the nearest one that is left.

    The two matrices have the seconds of a message and of each of its bytes, by (source, target).
    """
    seconds = _share_seconds(latency, byte, size)
    order = [0]
    is_left = np.ones(len(seconds), dtype=np.bool_)
    is_left[0] = False
    while len(order) < len(seconds):
        nearest = int(np.where(is_left, seconds[order[-1]], np.inf).argmin())
        order.append(nearest)
        is_left[nearest] = False
    return order


def ring_seconds(latency: Floats, byte: Floats, size: float) -> float:
    """The seconds to sum `size` bytes along the ring of `ring_order`.

    >>> link = np.ones((4, 4))
    >>> ring_seconds(0.5 * link, 0.01 * link, 400.0)
    9.0
    """
    order = ring_order(latency, byte, size)
    following = order[1:] + order[:1]
    slowest = float(_share_seconds(latency, byte, size)[order, following].max())
    return 2.0 * (len(order) - 1) * slowest


def _share_seconds(latency: Floats, byte: Floats, size: float) -> Floats:
    """The seconds of a message with an equal share of the bytes, by (source, target)."""
    seconds: Floats = latency + byte * (size / len(latency))
    return seconds


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
    latency, bandwidth = network.latency, sum_bandwidth(network)
    if not isinstance(latency, tuple) and not isinstance(bandwidth, tuple):
        return even_ring_seconds(len(ranks), latency, bandwidth, size)

    def hop(source: int, target: int) -> float:
        return value_of_pair(latency, source, target, "latency")

    def speed(source: int, target: int) -> float:
        return value_of_pair(bandwidth, source, target, "bandwidth")

    return ring_seconds(*link_matrices(ranks, hop, speed), size)


def link_matrices(
    ranks: Sequence[int],
    latency: Callable[[int, int], float],
    bandwidth: Callable[[int, int], float],
) -> tuple[Floats, Floats]:
    """The seconds of a message and of each of its bytes between these ranks, by (source, target)."""
    hop = np.zeros((len(ranks), len(ranks)))
    byte = np.zeros((len(ranks), len(ranks)))
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            if a != b:
                hop[i, j] = latency(a, b)
                byte[i, j] = 1.0 / bandwidth(a, b)
    return hop, byte


def planned_sum_end(
    latency: Floats, byte: Floats, size: float, ready: Sequence[float]
) -> float:
    """When the quickest kind of sum ends, if each rank has its gradients `ready` at its own time.

    >>> link = np.ones((3, 3))
    >>> round(planned_sum_end(0.5 * link, 0.01 * link, 600.0, [0.0, 0.0, 9.0]), 2)
    12.75
    """
    return float(choose_sum(latency, byte, size, ready).ends[0])


def choose_sum(
    latency: Floats, byte: Floats, size: float, ready: Sequence[float]
) -> SumChoices:
    """The quickest kind of sum over all these ranks, each with its gradients `ready` at its own time."""
    labels = np.zeros(len(ready), dtype=np.int64)
    times = np.array([ready], dtype=np.float64)
    return choose_sums(latency, byte, labels, times, np.array([[size]]), True, True)


def choose_sums(
    latency: Floats,
    byte: Floats,
    labels: Ints,
    times: Floats,
    sizes: Floats,
    planned: bool,
    detailed: bool = False,
) -> SumChoices:
    """How the gradients of each part are summed, and when its sums end.

    labels: the part of each node.
    times: when each node has its gradients for each sum [sum, node].
    sizes: the bytes of the sums of each part, one after the other [part, sum].
    planned: take the quickest kind of sum; otherwise rings.
    detailed: find the shares of direct sums, too.
    """
    parts, sums = sizes.shape
    choices = SumChoices(
        np.zeros(parts),
        np.zeros((parts, sums), np.int64),  # rings
        np.zeros((sums, len(labels))),
        np.zeros((sums, len(labels)), np.int64),
    )
    compile_if_large(_fill_choices, MIN_COMPILED_SIZE)(
        latency, byte, labels, times, sizes, planned, detailed, choices
    )
    return choices


def _fill_choices(  # noqa: PLR0915
    latency: Floats,
    byte: Floats,
    labels: Ints,
    times: Floats,
    sizes: Floats,
    planned: bool,
    detailed: bool,
    choices: SumChoices,
) -> None:
    """Fill the choices.

    Members of a part are numbered k = 0 .. n-1; `members[k]` is the node.
    """
    count = len(labels)
    members = np.zeros(count, np.int64)
    ready = np.zeros(count)
    left = np.zeros(count, np.bool_)
    group = np.zeros(count, np.int64)
    population = np.zeros(count)  # of each group

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

    def direct(number: int, n: int, size: float, begin: float, latest: float) -> float:
        """The least end at which the largest shares of all owners cover all bytes, or `latest`.

        With `detailed`, one more round notes the shares at that end.
        """
        low = begin
        high = latest
        for turn in range(SHARE_BISECTIONS + detailed):
            notes = turn == SHARE_BISECTIONS
            end = high if notes else 0.5 * (low + high)
            total = 0.0
            for owner in range(n):
                share = largest_share(n, size, owner, end)
                total += share
                if notes:
                    choices.shares[number, members[owner]] = share
            if total >= 1.0:
                high = end
            else:
                low = end
        return high

    def find_groups(n: int, size: float) -> None:
        """Put nodes into one group that are near each other, or near to a node of the group."""
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

    def two_levels(n: int, size: float) -> tuple[float, bool]:
        """The seconds to sum in the groups, between the groups, and in the groups again.

        Also whether the groups send each other their whole sums.
        """
        group_count = 0
        cells = 1.0
        for k in range(n):
            if population[k] > 0.0:
                group_count += 1
                cells *= population[k]
        if group_count in (1, n) or cells * group_count > MAX_CELLS:
            return np.inf, False
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
                    shared = max(shared, latency[a, b] + piece / group_count)
        return 2.0 * within + min(whole, 2.0 * shared), whole <= 2.0 * shared

    for part in range(len(choices.ends)):
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
            if not planned:
                continue
            find_groups(n, size)
            seconds, whole = two_levels(n, size)
            if begin + seconds < end:
                end = begin + seconds
                kind = WHOLE_GROUPS if whole else SHARED_GROUPS
                choices.kinds[part, number] = kind
                for k in range(n):
                    choices.groups[number, members[k]] = group[k]
            least = direct(number, n, size, begin, end)
            if least < end:
                end = least
                choices.kinds[part, number] = DIRECT
        choices.ends[part] = end


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
