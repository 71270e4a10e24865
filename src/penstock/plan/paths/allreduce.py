"""When the replicas of each part have summed their gradients.

The module `penstock.cost.allreduce` has the kinds of sums. Every part sums as soon as its replicas
are done, beside whatever else goes on.
"""

from __future__ import annotations

import numpy as np

from penstock.cost.allreduce import choose_sums
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.bisection import bisect_times
from penstock.plan.paths.path_simulator import Traffic
from penstock.plan.paths.problem import Problem

SUM_BISECTIONS = 50
MAX_SORTED_NODES = 200  # larger clusters get a coarser bound
LEAST_SECONDS_PER_BYTE = 1e-30  # to divide by


def ends_of_sums(
    traffic: Traffic, planned: bool, labels: Ints, last: Floats, last_up: Floats
) -> Floats:
    """Return when each part's gradients are summed, or 0 if it has none to sum.

    last: the end of the last backward of each node.
    last_up: the end of the last backward of its head, or of its way up in a wave.
    """
    times = np.stack([last_up, last, last])
    links = (traffic.latency, traffic.byte)
    return choose_sums(*links, labels, times, traffic.sums, planned).ends


def seconds_of_sums(problem: Problem, labels: Ints) -> Floats:
    """Return how long each part's sums take if all its replicas are done at once."""
    at_once = np.zeros(len(labels))
    return ends_of_sums(problem.traffic, problem.planned_sums, labels, at_once, at_once)


def least_sum_seconds(problem: Problem, part: int, replicas: int) -> float:
    """Return a lower bound on the seconds from the last backward of a part to the end of its sums.

    Only the sums that have to wait for that backward count.
    """
    seconds = 0.0
    for size in problem.traffic.sums[part, 1:].tolist():
        if problem.planned_sums:
            seconds += _least_exchange(problem.traffic, replicas, size)
        else:
            seconds += _least_ring(problem.traffic, replicas, size)
    return seconds


def _least_ring(traffic: Traffic, replicas: int, size: float) -> float:
    """Return a lower bound for a ring of any `replicas` nodes."""
    if replicas < 2 or size <= 0 or traffic.nodes < 2:
        return 0.0
    apart = ~np.eye(traffic.nodes, dtype=np.bool_)
    share = traffic.latency[apart] + traffic.byte[apart] * (size / replicas)
    return 2.0 * (replicas - 1) * float(share.min())


def _least_exchange(traffic: Traffic, replicas: int, size: float) -> float:
    """Return a lower bound for any kind of sum over any `replicas` nodes.

    The node that is done last must still send all its bytes, over at most as many links as there
    are other replicas.
    """
    if replicas < 2 or size <= 0 or traffic.nodes < replicas:
        return 0.0
    latency = traffic.latency.copy()
    np.fill_diagonal(latency, np.inf)
    byte = np.maximum(traffic.byte, LEAST_SECONDS_PER_BYTE)
    if traffic.nodes > MAX_SORTED_NODES:
        apart = ~np.eye(traffic.nodes, dtype=np.bool_)
        return float(latency.min() + byte[apart].min() * size / (replicas - 1))

    def is_enough(seconds: float) -> bool:
        sent = np.maximum(seconds - latency, 0.0) / byte
        best = np.sort(sent, axis=1)[:, -(replicas - 1) :].sum(axis=1)
        return bool(best.max() >= size)

    high = float((traffic.latency + traffic.byte * size).max()) + 1e-12
    return bisect_times(high, is_enough, SUM_BISECTIONS).low
