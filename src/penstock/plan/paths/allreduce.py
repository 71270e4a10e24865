"""How long the replicas of a part take to sum their gradients once all have done their work.

    star   all send to one, which sends the sum back      2 (latency + bytes / bandwidth)       of its slowest link
    ring   a share to the next, again and again           2 (r-1) (latency + bytes / r / bandwidth)

The quicker of the two counts. A ring visits the replicas each time the nearest of those left.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.path_simulator import Traffic


def sum_seconds(traffic: Traffic, nodes: Ints, size: float) -> float:
    """Seconds for so many bytes of gradients over these nodes."""
    count = len(nodes)
    if count < 2 or size <= 0:
        return 0.0
    within = np.ix_(nodes, nodes)
    latency, byte = traffic.latency[within], traffic.byte[within]
    whole = np.maximum(latency + byte * size, (latency + byte * size).T)
    star = 2.0 * float(whole.max(axis=1).min())
    share = latency + byte * (size / count)
    return min(star, 2.0 * (count - 1) * _longest_link(share))


def _longest_link(link: Floats) -> float:
    """The slowest link of a ring that goes to the nearest that is left."""
    left = np.ones(len(link), dtype=np.bool_)
    here, longest = 0, 0.0
    left[0] = False
    for _ in range(len(link) - 1):
        there = int(np.where(left, link[here], np.inf).argmin())
        longest, here = max(longest, float(link[here, there])), there
        left[there] = False
    return max(longest, float(link[here, 0]))


def sum_seconds_by_part(
    traffic: Traffic, labels: Ints, parts: int, size: float
) -> Floats:
    """Seconds for each part. The head lies with part 0 and is summed with it."""
    return np.array(
        [
            sum_seconds(traffic, np.flatnonzero(labels == part), size)
            for part in range(parts)
        ]
    )


def least_sum(traffic: Traffic, replicas: int, size: float) -> float:
    """No so many replicas anywhere sum so many bytes in less time."""
    if replicas < 2 or size <= 0 or traffic.nodes < 2:
        return 0.0
    apart = ~np.eye(traffic.nodes, dtype=np.bool_)
    latency, byte = (
        float(traffic.latency[apart].min()),
        float(traffic.byte[apart].min()),
    )
    return 2.0 * (latency + byte * size * (replicas - 1) / replicas)
