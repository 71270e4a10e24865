"""Measures how fast sums of gradients are while all ranks sum at the same time.

Links are measured with one message at a time. But the replicas of all parts sum their gradients at
about the same time, at the end of a step, and then ranks share sockets, cores and memory. So all
ranks sum in pairs here, as the replicas of Chimera do, and the middle of an odd number joins a pair:

    rank    0  1  2  3  4  5             0  1  2  3  4
            │  │  └──┘  │  │             │  └──┴──┘  │
            │  └────────┘  │             └───────────┘
            └──────────────┘

Larger and larger sums are timed until one takes long enough to be timed well. The time of a tiny sum
is subtracted, because latencies are priced by themselves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.network import Network, PerPair, value_of_pair
from penstock.cost.sizes import FLOAT32_BYTES
from penstock.measure.rows import gather_rows
from penstock.runtime.comm.comm import Comm

TINY_BYTES = 1 << 10
LEAST_BYTES = 1 << 16
GROWTH = 4
# Sums grow up to the first size, or until one takes as long as the second number says: it is timed well
# then. The models of GPUs are larger, and large sums over NCCL are faster than small ones.
LARGEST = {"cpu": (1 << 26, 0.03), "cuda": (1 << 28, 0.06)}
# Sums of each size; their median counts, because single ones are sometimes delayed.
ROUNDS = 5

Group = tuple[int, ...]


def measured_sum_bandwidth(
    comm: Comm, links: Network, device: torch.device | str = "cpu"
) -> PerPair:
    """Measure the bytes per second that a rank sends while all ranks sum; all ranks must call this.

    The slowest group counts, because a step ends with its last sum. If each pair of ranks has its
    own link, some are faster than others. A sum then gets the same share of every bandwidth: the
    median of what the groups had of their slowest link.
    """
    groups = groups_that_sum(comm.ranks)
    rates = _rates(comm, groups, device)
    if not isinstance(links.bandwidth, tuple):
        return min(rates)
    slowest = [_slowest_bandwidth(links, group) for group in groups]
    if math.inf in slowest:
        return min(rates)
    pairs = zip(rates, slowest, strict=True)
    share = statistics.median(rate / bandwidth for rate, bandwidth in pairs)
    return tuple(tuple(share * one for one in row) for row in links.bandwidth)


def groups_that_sum(ranks: int) -> list[Group]:
    """Divide at least two ranks into pairs that are mirror images; the middle rank joins a pair.

    >>> groups_that_sum(4), groups_that_sum(5), groups_that_sum(3)
    ([(0, 3), (1, 2)], [(0, 4), (1, 2, 3)], [(0, 1, 2)])
    """
    groups: list[Group] = [(rank, ranks - 1 - rank) for rank in range(ranks // 2)]
    if ranks % 2:
        first, last = groups[-1]
        groups[-1] = (first, ranks // 2, last)
    return groups


def _rates(
    comm: Comm, groups: Sequence[Group], device: torch.device | str
) -> list[float]:
    """The bytes per second that the ranks of each group send, along a ring, while all of them sum."""
    comm.prepare(list(groups))
    (mine,) = (group for group in groups if comm.rank in group)
    _timed_sums(comm, mine, TINY_BYTES, device)  # connects the ranks
    tiny = _median_sums(comm, mine, TINY_BYTES, device)
    size = LEAST_BYTES
    took = _median_sums(comm, mine, size, device) - tiny
    most_bytes, long_seconds = LARGEST[torch.device(device).type]
    while size < most_bytes and float(took.max()) < long_seconds:
        size *= GROWTH
        took = _median_sums(comm, mine, size, device) - tiny
    seconds = took.tolist()
    rates = []
    for group in groups:
        sent = 2 * (len(group) - 1) / len(group) * size
        longest = max(seconds[rank] for rank in group)
        rates.append(sent / longest if longest > 0 else math.inf)
    return rates


def _median_sums(
    comm: Comm, group: Group, size: int, device: torch.device | str
) -> Tensor:
    """The median seconds that each rank takes to sum `size` bytes."""
    rounds = [_timed_sums(comm, group, size, device) for _ in range(ROUNDS)]
    return torch.stack(rounds).median(dim=0).values


def _timed_sums(
    comm: Comm, group: Group, size: int, device: torch.device | str
) -> Tensor:
    """The seconds that each rank takes to sum `size` bytes with its group, while all others do the same."""
    gradients = torch.ones(size // FLOAT32_BYTES, device=device)
    comm.barrier()
    settle(device)
    begin = time.perf_counter()
    comm.add(gradients, group).wait()
    settle(device)  # under NCCL it is the GPU that waits
    seconds = torch.zeros(comm.ranks, dtype=torch.float64)
    seconds[comm.rank] = time.perf_counter() - begin
    return gather_rows(comm, seconds)


def settle(device: torch.device | str) -> None:
    """Let the host wait until a GPU has done everything that was launched; do nothing for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _slowest_bandwidth(links: Network, group: Group) -> float:
    """The least bandwidth between two ranks of a group."""
    return min(
        value_of_pair(links.bandwidth, source, target, "bandwidth")
        for source in group
        for target in group
        if source != target
    )
