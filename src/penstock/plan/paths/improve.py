"""Improves a whole solution: all at once if it is small, else group by group.

In a large cluster most paths never meet, and then their times do not depend on each other. The slowest paths with all
that meet them, and some others nearby, are a *group* of about twenty nodes, which is improved for itself:

    o--o--o   o--o--o   o--o--o   o--o--o
    slowest ──┐ nearby ─┐
              └─ a group┘  annealed, and kept if the whole is better; then the next
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np

from penstock.plan.paths.anneal import GROUP, Search
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.solution import (
    Solution,
    better_queueing,
    simulate_solution,
    solution_value,
)

STUCK = 200  # groups in a row that could not be improved: time to start somewhere else


def improve_solution(
    problem: Problem,
    solution: Solution,
    budget: Budget,
    free: bool,
    seed: int,
    steps: int,
) -> Solution:
    """The solution after a search of `steps` moves: all at once if it is small, else group by group, the slowest first.

    If the budget ends before, the best solution so far is returned as it is. A larger budget meets that solution too, and so
    never returns a worse one.
    """
    random = Random(seed)
    if not in_groups(solution):
        whole = Search(
            problem, solution, list(range(len(solution.paths))), free, random
        )
        complete = whole.anneal(budget, steps)
        return _checked(problem, solution, whole.solution(), complete)
    return _by_groups(problem, solution, budget, free, random, steps)


def in_groups(solution: Solution) -> bool:
    """Whether a solution visits too many nodes to be improved all at once."""
    return len({node for path in solution.paths for node in path}) > GROUP + 8


def _checked(problem: Problem, old: Solution, new: Solution, settled: bool) -> Solution:
    """The better one; `settled`: each with the turns and staggers that suit it best."""
    if not math.isfinite(simulate_solution(problem, new).makespan):
        new = replace(new, careful=True)
    tried = [
        better_queueing(problem, solution) if settled else solution
        for solution in (old, new)
    ]
    return min(tried, key=lambda solution: solution_value(problem, solution))


def _by_groups(
    problem: Problem,
    solution: Solution,
    budget: Budget,
    free: bool,
    random: Random,
    steps: int,
) -> Solution:
    solution = replace(solution, delays=solution.delays or (0.0,) * len(solution.paths))
    current = solution_value(problem, solution)
    idle, end = 0, budget.used + steps
    while budget.used < end and idle < STUCK:
        group = _group(problem, solution, random, idle)
        search = Search(
            problem,
            solution,
            group,
            free and (problem.gradients <= 0 or idle % 2 == 0),
            random,
        )
        before = search.end, search.value
        if not search.anneal(budget, steps=max(60, 12 * len(group))):
            return solution
        if (search.end, search.value) >= before:
            idle += 1
            continue
        tried = _merged(solution, search)
        found = solution_value(problem, tried)
        if found < current:
            solution, current, idle = tried, found, 0
        else:
            idle += 1
    return better_queueing(problem, solution)


def _merged(solution: Solution, search: Search) -> Solution:
    paths, delays = list(solution.paths), list(solution.delays)
    for unit, path, delay in zip(
        search.units, search.paths, search.delays.tolist(), strict=True
    ):
        paths[unit], delays[unit] = path, delay
    return replace(
        solution,
        labels=tuple(search.part),
        paths=tuple(paths),
        delays=tuple(delays),
    )


def _group(
    problem: Problem, solution: Solution, random: Random, idle: int
) -> list[int]:
    """The units that meet the slowest one, and others that do not, until there are nodes enough."""
    together = _companies(solution)
    found = simulate_solution(problem, solution)
    count = len(solution.paths)
    ends = found.finish.reshape(-1, count).max(axis=0)
    late = {root: max(ends[unit] for unit in units) for root, units in together.items()}
    ranked = sorted(together, key=lambda root: -late[root])
    first = ranked[min(int(random.expovariate(1.0) * (1 + idle / 10)), len(ranked) - 1)]
    chosen = list(together[first])
    nodes = {node for unit in chosen for node in solution.paths[unit]}
    near = _nearness(problem, solution, nodes, together)
    for root in sorted(near, key=lambda root: near[root] * random.uniform(0.2, 1.8)):
        more = {node for unit in together[root] for node in solution.paths[unit]}
        if root == first or len(nodes | more) > GROUP:
            continue
        nodes |= more
        chosen += together[root]
    return sorted(chosen)


def _nearness(
    problem: Problem,
    solution: Solution,
    nodes: set[int],
    together: dict[int, list[int]],
) -> dict[int, float]:
    here = sorted(nodes)
    least = problem.traffic.hop(1)[here].min(axis=0)
    return {
        root: float(
            np.mean(
                [least[node] for unit in units[:1] for node in solution.paths[unit]]
            )
        )
        for root, units in together.items()
    }


def _companies(solution: Solution) -> dict[int, list[int]]:
    """Units that share a node, or meet one that does: their times do not depend on others."""
    parent = {node: node for path in solution.paths for node in path}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for path in solution.paths:
        for node in path[1:]:
            parent[root(node)] = root(path[0])
    found: dict[int, list[int]] = {}
    for unit, path in enumerate(solution.paths):
        found.setdefault(root(path[0]), []).append(unit)
    return found
