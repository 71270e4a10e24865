"""What a planned schedule is compared with: the same nodes, slots and micro-batches, and no plan, or half of one.

full         every micro-batch through all parts, in order; planned by the search that plans the paths
random       paths drawn at random that keep to the rules
shortest     every path the shortest that is left, without a look at who else comes along: no collisions avoided
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from penstock.ir.table import Ints
from penstock.plan.paths.arrangement import replica_counts
from penstock.plan.paths.budget import Budget, TimeSource, never_stop
from penstock.plan.paths.planner import PathPlan, best_plan, finish_plan
from penstock.plan.paths.problem import Policy, Problem
from penstock.plan.paths.routes import random_routes
from penstock.plan.paths.rules import Rules, part_orders
from penstock.plan.paths.solution import (
    NodePath,
    Solution,
    choose_queueing,
    simulate_solution,
)
from penstock.plan.paths.staged_search import ITERATIONS


def whole(rules: Rules) -> Rules:
    """The rules under which nothing is left out, and every micro-batch meets the parts in order."""
    return replace(rules, share=0.0, behind=0, distance=0, swaps=0)


def full_pipeline(
    plan: PathPlan,
    iterations: int = ITERATIONS,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> PathPlan:
    """The best full pipeline that the same search finds: no part is left out.

    It has the same nodes, data nodes, micro-batches and links. It chooses its own arrangement unless the paths were
    planned on a given one; its sizes are its own too, unless they were given. Slots belong to who is there.
    """
    budget = Budget(iterations, seconds, clock, stop)
    policy = Policy(
        plan.problem.policy.queue_orders, ordered=plan.problem.policy.ordered
    )
    problem = replace(plan.problem, rules=whole(plan.problem.rules), policy=policy)
    sizes = [len(nodes) for nodes in plan.partitions]
    if problem.arranged:
        return best_plan(
            problem, np.array(plan.solution.labels), np.array(sizes), budget, seed
        )
    if not problem.sized:
        sizes = list(
            replica_counts(problem.traffic.nodes, problem.body, problem.hops, sizes[0])
        )
    return best_plan(problem, None, np.array(sizes), budget, seed)


def random_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Paths at random: any legal order, any replica that has a place left, parts equally often."""
    paths = random_routes(plan.problem, np.array(plan.solution.labels), seed)
    return _as_they_come(plan, paths)


def shortest_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Without collision avoidance: the slowest trip made as short as it gets, nobody's queue looked at."""
    random = Random(seed)
    problem, labels = plan.problem, np.array(plan.solution.labels)
    best: list[NodePath] = list(random_paths(plan, seed).solution.paths)
    slowest = _trips(problem, best)
    for _ in range(4000):
        one, other = random.randrange(len(best)), random.randrange(len(best))
        tried = _exchanged(problem, labels, best, one, other, random)
        if tried is not None and (found := _trips(problem, tried)) < slowest:
            best, slowest = tried, found
    return _as_they_come(plan, best)


def _exchanged(
    problem: Problem,
    labels: Ints,
    paths: list[NodePath],
    one: int,
    other: int,
    random: Random,
) -> list[NodePath] | None:
    mine, yours = list(paths[one]), list(paths[other])
    if len(mine) < 2:
        return None
    i, j = random.randrange(1, len(mine)), random.randrange(1, len(yours))
    mine[i], yours[j] = yours[j], mine[i]
    tried = list(paths)
    for unit, path in ((one, mine), (other, yours)):
        parts = [int(labels[node]) for node in path[1:]]
        allowed = (
            part_orders(frozenset(parts), problem.rules)
            if len(set(parts)) == len(parts)
            else ()
        )
        if not allowed:
            return None
        where = dict(zip(parts, path[1:], strict=True))
        ways = [(path[0], *(where[part] for part in order)) for order in allowed]
        tried[unit] = min(ways, key=lambda way: _alone(problem, way))
    return tried


def _trips(problem: Problem, paths: list[NodePath]) -> list[float]:
    """How long each path takes alone, the slowest first."""
    return sorted((_alone(problem, path) for path in set(paths)), reverse=True)


def _alone(problem: Problem, path: NodePath) -> float:
    hop, nodes = problem.traffic.hop(1), [*path, path[0]]
    work = (
        float(problem.traffic.slow[list(path)].sum())
        * float(problem.traffic.forward[1].sum())
        * 2.5
    )
    return work + sum(float(hop[a, b] + hop[b, a]) for a, b in pairwise(nodes))


def _as_they_come(plan: PathPlan, paths: list[NodePath]) -> PathPlan:
    problem = plan.problem
    solution = choose_queueing(
        problem,
        Solution(plan.solution.labels, tuple(paths), problem.policy.queue_orders[0]),
    )
    if not np.isfinite(simulate_solution(problem, solution).makespan):
        solution = replace(solution, careful=True)
    return finish_plan(problem, solution, plan.bound, Budget(0))
