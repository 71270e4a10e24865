"""What a planned schedule is compared with: the same nodes, slots and micro-batches, and no plan, or half of one.

    full         every micro-batch through all parts, in order; planned as well as we can, all data nodes in use
    random       paths drawn at random that keep to the rules
    shortest     every path the shortest that is left, without a look at who else comes along: no collisions avoided
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from penstock.ir.table import Ints
from penstock.plan.arrangement import circuits_of
from penstock.plan.draft import Budget, Clock, Draft, Path, run, settle, worth
from penstock.plan.groups import improved
from penstock.plan.path_bounds import path_bound
from penstock.plan.paths import PathPlan, finished, first_drafts
from penstock.plan.problem import Policy, Problem
from penstock.plan.routes import placed
from penstock.plan.rules import orders


def full(
    plan: PathPlan,
    seconds: float = 2.0,
    iterations: int | None = None,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> PathPlan:
    """No part left out, on the same arrangement, as well planned as paths are; slots belong to who is there."""
    budget = Budget(iterations, seconds, clock(), clock)
    rules = replace(plan.problem.rules, share=0.0, behind=0, distance=0, swaps=0)
    policy = Policy(plan.problem.policy.turns, ordered=plan.problem.policy.ordered)
    problem = replace(plan.problem, rules=rules, policy=policy)
    labels = np.array(plan.draft.labels)
    drafts = first_drafts(problem, labels, circuits_of(problem, labels, 1, seed), seed)
    best = min((settle(problem, draft) for draft in drafts), key=lambda draft: worth(problem, draft))
    best = improved(problem, best, budget, False, seed)
    bound = path_bound(problem, np.bincount(labels[labels >= 0]), labels)
    return finished(problem, best, bound, budget)


def random_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Paths at random: any legal order, any replica that has a place left, parts equally often."""
    paths = placed(plan.problem, np.array(plan.draft.labels), seed)
    return _as_they_come(plan, paths)


def shortest_paths(plan: PathPlan, seed: int = 0) -> PathPlan:
    """Without collision avoidance: the slowest trip made as short as it gets, nobody's queue looked at."""
    random = Random(seed)
    problem, labels = plan.problem, np.array(plan.draft.labels)
    best: list[Path] = list(random_paths(plan, seed).draft.paths)
    slowest = _trips(problem, best)
    for _ in range(4000):
        one, other = random.randrange(len(best)), random.randrange(len(best))
        tried = _exchanged(problem, labels, best, one, other, random)
        if tried is not None and (found := _trips(problem, tried)) < slowest:
            best, slowest = tried, found
    return _as_they_come(plan, best)


def _exchanged(
    problem: Problem, labels: Ints, paths: list[Path], one: int, other: int, random: Random
) -> list[Path] | None:
    mine, yours = list(paths[one]), list(paths[other])
    if len(mine) < 2:
        return None
    i, j = random.randrange(1, len(mine)), random.randrange(1, len(yours))
    mine[i], yours[j] = yours[j], mine[i]
    tried = list(paths)
    for unit, path in ((one, mine), (other, yours)):
        parts = [int(labels[node]) for node in path[1:]]
        allowed = orders(frozenset(parts), problem.rules) if len(set(parts)) == len(parts) else ()
        if not allowed:
            return None
        where = dict(zip(parts, path[1:], strict=True))
        ways = [(path[0], *(where[part] for part in order)) for order in allowed]
        tried[unit] = min(ways, key=lambda way: _alone(problem, way))
    return tried


def _trips(problem: Problem, paths: list[Path]) -> list[float]:
    """How long each path takes alone, the slowest first."""
    return sorted((_alone(problem, path) for path in set(paths)), reverse=True)


def _alone(problem: Problem, path: Path) -> float:
    hop, nodes = problem.traffic.hop(1), [*path, path[0]]
    work = float(problem.traffic.slow[list(path)].sum()) * float(problem.traffic.forward[1].sum()) * 2.5
    return work + sum(float(hop[a, b] + hop[b, a]) for a, b in pairwise(nodes))


def _as_they_come(plan: PathPlan, paths: list[Path]) -> PathPlan:
    problem = plan.problem
    draft = settle(problem, Draft(plan.draft.labels, tuple(paths), problem.policy.turns[0]))
    if not np.isfinite(run(problem, draft).makespan):
        draft = replace(draft, careful=True)
    return finished(problem, draft, plan.bound, Budget(0, 0.0, time.perf_counter()))
