"""Paths to compare planned ones with: the same nodes, slots and micro-batches, but less planning.

random       random paths that keep to the rules
shortest     each path as short as possible, regardless of the others: no collision avoidance (the paper's TC2)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from penstock.ir.table import Ints
from penstock.plan.paths.planner import PathPlan, finish_plan
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders
from penstock.plan.paths.search import Budget
from penstock.plan.paths.simulator import (
    NodePath,
    choose_queueing,
    path_in_order,
    simulate_solution,
    solution_of,
)
from penstock.plan.paths.starts import random_routes

SHORTENING_MOVES = 4000
WORK_PER_FORWARD = 2.5  # forward and backward of a part, in forwards


def random_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Return a plan with random paths: any legal order, any replica with a free place.

    All parts are visited equally often.
    """
    paths = random_routes(plan.problem, plan.solution.part_of_node, seed)
    return _plan_with(plan, paths)


def shortest_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Return a plan that makes the longest trips as short as possible and ignores the queues."""
    random = Random(seed)
    problem = plan.problem
    part_of_node = plan.solution.part_of_node
    best = random_routes(problem, part_of_node, seed)
    longest = _trip_seconds(problem, best)
    for _ in range(SHORTENING_MOVES):
        unit = random.randrange(len(best))
        other = random.randrange(len(best))
        trial = _exchange_nodes(problem, part_of_node, best, unit, other, random)
        if trial is None:
            continue
        trips = _trip_seconds(problem, trial)
        if trips < longest:
            best = trial
            longest = trips
    return _plan_with(plan, best)


def _exchange_nodes(
    problem: Problem,
    part_of_node: Ints,
    paths: list[NodePath],
    unit: int,
    other: int,
    random: Random,
) -> list[NodePath] | None:
    """Let two units exchange a node, and put both paths into their shortest order.

    Return None if the rules allow no order of the exchanged parts.
    """
    path = list(paths[unit])
    other_path = list(paths[other])
    if len(path) < 2:
        return None
    i = random.randrange(1, len(path))
    j = random.randrange(1, len(other_path))
    path[i], other_path[j] = other_path[j], path[i]
    exchanged = list(paths)
    for changed, nodes in ((unit, path), (other, other_path)):
        shortest = _shortest_order(problem, part_of_node, nodes)
        if shortest is None:
            return None
        exchanged[changed] = shortest
    return exchanged


def _shortest_order(
    problem: Problem, part_of_node: Ints, path: list[int]
) -> NodePath | None:
    """Return the path with its nodes in the quickest order that the rules allow, or None."""
    parts = [int(part_of_node[node]) for node in path[1:]]
    if len(set(parts)) < len(parts):
        return None
    node_of_part = dict(zip(parts, path[1:], strict=True))
    orders = part_orders(frozenset(parts), problem.rules)
    ways = [path_in_order(path[0], node_of_part, order) for order in orders]
    if not ways:
        return None
    return min(ways, key=lambda way: _seconds_alone(problem, way))


def _trip_seconds(problem: Problem, paths: list[NodePath]) -> list[float]:
    """Return how long each path takes alone, the slowest first."""
    seconds = [_seconds_alone(problem, path) for path in set(paths)]
    return sorted(seconds, reverse=True)


def _seconds_alone(problem: Problem, path: NodePath) -> float:
    """Return about how long a micro-batch takes on this path if it never waits."""
    arrays = problem.arrays
    hop = arrays.hop(1)
    slowness = float(arrays.slow[list(path)].sum())
    work = slowness * float(arrays.forward[1].sum()) * WORK_PER_FORWARD
    way = 0.0
    for a, b in pairwise([*path, path[0]]):
        way += float(hop[a, b] + hop[b, a])
    return work + way


def _plan_with(plan: PathPlan, paths: list[NodePath]) -> PathPlan:
    """Return a plan with the same arrangement and other paths."""
    problem = plan.problem
    start = solution_of(problem, plan.solution.part_of_node, paths)
    solution = choose_queueing(problem, start)
    if not np.isfinite(simulate_solution(problem, solution).makespan):
        solution = replace(solution, avoid_deadlock=True)
    return finish_plan(problem, solution, plan.bound, Budget(0))
