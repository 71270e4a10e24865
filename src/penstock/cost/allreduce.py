"""The time that several ranks need to sum their gradients (an all-reduce).

    ring   each sends a share to the next, 2 (n-1) times     2 (n-1) (latency + bytes / n / bandwidth)
    star   all send to one, which sends the sum back         2 (latency + bytes / bandwidth)  of its slowest link

The slowest link of the ring sets its pace. The simulator prices rings, which is what gloo and
NCCL run; the planner of paths also considers stars, for few bytes over slow networks. Messages
that use the same links at the same time are not considered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.cost.network import Network, PerPair, value_of_pair
from penstock.ir.table import Floats


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


def star_seconds(latency: Floats, byte: Floats, size: float) -> float:
    """The seconds to sum `size` bytes on the rank with the best links, and to send the sum back."""
    whole = latency + byte * size
    slower_way = np.maximum(whole, whole.T)
    return 2.0 * float(slower_way.max(axis=1).min())


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
