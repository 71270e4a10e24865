"""The time that the replicas of a part need to sum their gradients (an all-reduce).

    star   all send to one node, which sends the sum back    2 (latency + bytes / bandwidth)  of its slowest link
    ring   each sends a share to the next, many times        2 (r-1) (latency + bytes / r / bandwidth)

The quicker of the two counts. The ring goes from each replica to the nearest one that is left.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.path_simulator import Traffic


def allreduce_seconds(traffic: Traffic, nodes: Ints, size: float) -> float:
    """Return the seconds to sum `size` bytes of gradients over these nodes."""
    count = len(nodes)
    if count < 2 or size <= 0:
        return 0.0
    within = np.ix_(nodes, nodes)
    latency = traffic.latency[within]
    byte = traffic.byte[within]
    whole = latency + byte * size
    slower_way = np.maximum(whole, whole.T)
    star = 2.0 * float(slower_way.max(axis=1).min())
    share = latency + byte * (size / count)
    ring = 2.0 * (count - 1) * _slowest_ring_link(share)
    return min(star, ring)


def _slowest_ring_link(seconds: Floats) -> float:
    """Return the slowest link of a ring that always goes to the nearest node that is left."""
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


def allreduce_seconds_by_part(
    traffic: Traffic, labels: Ints, parts: int, size: float
) -> Floats:
    """Return the seconds for each part. The head is on the data nodes and is summed with part 0."""
    seconds = np.zeros(parts)
    for part in range(parts):
        replicas = np.flatnonzero(labels == part)
        seconds[part] = allreduce_seconds(traffic, replicas, size)
    return seconds


def least_allreduce_seconds(traffic: Traffic, replicas: int, size: float) -> float:
    """Return a lower bound on the seconds to sum `size` bytes over any `replicas` nodes."""
    if replicas < 2 or size <= 0 or traffic.nodes < 2:
        return 0.0
    apart = ~np.eye(traffic.nodes, dtype=np.bool_)
    latency = float(traffic.latency[apart].min())
    byte = float(traffic.byte[apart].min())
    return 2.0 * (latency + byte * size * (replicas - 1) / replicas)
