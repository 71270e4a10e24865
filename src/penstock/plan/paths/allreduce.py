"""The time that the replicas of a part need to sum their gradients: that of a ring or a star, whichever is quicker."""

from __future__ import annotations

import numpy as np

from penstock.cost.allreduce import ring_seconds, star_seconds
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
    return min(star_seconds(latency, byte, size), ring_seconds(latency, byte, size))


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
