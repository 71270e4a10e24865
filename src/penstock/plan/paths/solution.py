"""A solution of a path problem, as the search changes it, and what it is worth.

A *unit* is whatever has a path of its own: one micro-batch, or all micro-batches that use the same
path in successive rounds. Once its times have been simulated, a solution becomes a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from penstock.ir.table import Ints
from penstock.plan.paths.allreduce import ends_of_sums
from penstock.plan.paths.path_simulator import PathTimes, QueueOrder, simulate_paths
from penstock.plan.paths.problem import Problem, expand_paths, start_conditions

# A plan counts as this many seconds longer for each second of forbidden waiting.
WAIT_FINE = 10.0
TIME_ROUNDING = 1e-9  # seconds by which equal times may differ
NodePath = tuple[int, ...]
Delays = tuple[float, ...]
Turns = tuple[int, ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Solution:
    """The part of each node, the path of each unit, and the order in which nodes serve their queues.

    labels: the part of each node, or -1 for a node that holds none.
    paths: the nodes that each unit visits; the first is its data node.
    queue_order: which of the waiting tasks a node takes next.
    own_orders: the queue order of each unit, if units that never meet have different ones.
    stagger: seconds between the first starts on a data node.
    delays: seconds by which each unit stands further back in the queues of its tasks, forward and
        backward at each position of its path; empty if no unit does.
    careful: keep slots free for older micro-batches, so that no deadlock can arise.
    turns: the place of each task of each unit in the order of its node, or -1 if that node serves
        its queue; empty if all nodes do.
    """

    labels: tuple[int, ...]
    paths: tuple[NodePath, ...]
    queue_order: QueueOrder
    stagger: float = 0.0
    delays: tuple[Delays, ...] = ()
    careful: bool = False
    own_orders: tuple[QueueOrder, ...] = ()
    turns: tuple[Turns, ...] = ()


def path_in_order(
    data_node: int, node_of_part: dict[int, int], order: Sequence[int]
) -> NodePath:
    """Return the path from a data node over the nodes of these parts."""
    return (data_node, *[node_of_part[part] for part in order])


def simulate_solution(problem: Problem, solution: Solution) -> PathTimes:
    """Return the times of all tasks of a solution."""
    paths = np.array(solution.paths, dtype=np.int64)
    labels = np.array(solution.labels, dtype=np.int64)
    nodes, parts = expand_paths(problem, paths, labels)
    after, release = start_conditions(problem, paths, solution.stagger)
    delay = None
    if solution.delays:
        delay = np.tile(np.array(solution.delays), (problem.policy.rounds, 1))
    return simulate_paths(
        problem.traffic,
        nodes,
        parts,
        _queue_orders(problem, solution),
        after,
        release,
        delay,
        solution.careful,
        problem.traffic.slots_with(labels),
        np.array(solution.turns, dtype=np.int64) if solution.turns else None,
    )


def _queue_orders(problem: Problem, solution: Solution) -> QueueOrder | Ints:
    """Return the queue order of all micro-batches, or of each."""
    if not solution.own_orders:
        return solution.queue_order
    return np.tile(np.array(solution.own_orders), problem.policy.rounds)


def step_end(problem: Problem, times: PathTimes, labels: Ints) -> float:
    """Return the end of the last backward or sum of gradients; with several passes, the mean time of one.

    Seconds that tasks wait for longer than the rules allow are added many times. The end is
    infinite if micro-batches deadlock, or if a part does not fit on one of its nodes.
    """
    if times.makespan == np.inf or problem.traffic.slots_with(labels).min() < 1:
        return math.inf
    fine = WAIT_FINE * times.overdue
    if not problem.has_sums:
        return times.makespan + fine
    sums = ends_of_sums(
        problem.traffic, problem.planned_sums, labels, times.last, times.last_up
    )
    end = max(times.makespan, float(sums.max()))
    return problem.mean_pass(times.makespan, end) + fine


def mean_end_of_sums(problem: Problem, times: PathTimes, labels: Ints) -> float:
    """Return the mean end of the parts' sums, planned ones even if rings are used.

    A ring is as slow as its slowest link, so most moves of a search would change nothing.
    """
    sums = ends_of_sums(problem.traffic, True, labels, times.last, times.last_up)
    return float(sums.mean())


def choose_queueing(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with the queue order, stagger and care that end the step first."""
    labels = np.array(solution.labels)
    best = solution
    least = math.inf
    for queue_order in problem.policy.queue_orders:
        for choice in problem.policy.staggers:
            stagger = problem.stagger(choice)
            for careful in (False, True):
                trial = replace(
                    solution,
                    queue_order=queue_order,
                    stagger=stagger,
                    careful=careful,
                    own_orders=(),
                    turns=(),
                )
                times = simulate_solution(problem, trial)
                end = step_end(problem, times, labels)
                if end < least:
                    best = trial
                    least = end
                if end < math.inf:
                    break  # only solutions that deadlock need care
    return best


def better_queueing(problem: Problem, solution: Solution) -> Solution:
    """Return the solution as it is or with another choice of queueing, whichever is better."""
    chosen = choose_queueing(problem, solution)
    return min((solution, chosen), key=lambda trial: solution_value(problem, trial))


def solution_value(problem: Problem, solution: Solution) -> tuple[float, float]:
    """Return the end of the step and the mean end of the micro-batches. Less is better."""
    labels = np.array(solution.labels)
    times = simulate_solution(problem, solution)
    return step_end(problem, times, labels), float(times.finish.mean())


def units_alone(solution: Solution, units: Sequence[int]) -> Solution:
    """Return the solution of some units alone."""

    def own(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(values[unit] for unit in units) if values else ()

    return replace(
        solution,
        paths=own(solution.paths),
        delays=own(solution.delays),
        own_orders=own(solution.own_orders),
        turns=own(solution.turns),
    )
