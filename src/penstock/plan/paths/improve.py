"""Improves a whole draft: all at once if it is small, else group by group.

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
from penstock.plan.paths.candidate import (
    Budget,
    Draft,
    draft_value,
    settle_delayed,
    simulate_draft,
)
from penstock.plan.paths.problem import Problem

STUCK = 200  # groups in a row that could not be improved: time to start somewhere else


def improve_draft(
    problem: Problem, draft: Draft, budget: Budget, free: bool, seed: int, steps: int
) -> Draft:
    """The draft after a search of `steps` moves: all at once if it is small, else group by group, the slowest first.

    If the budget ends before, the best draft so far is returned as it is. A larger budget meets that draft too, and so
    never returns a worse one.
    """
    random = Random(seed)
    if not in_groups(draft):
        whole = Search(problem, draft, list(range(len(draft.paths))), free, random)
        complete = whole.anneal(budget, steps)
        return _checked(problem, draft, whole.draft(), complete)
    return _by_groups(problem, draft, budget, free, random, steps)


def in_groups(draft: Draft) -> bool:
    """Whether a draft visits too many nodes to be improved all at once."""
    return len({node for path in draft.paths for node in path}) > GROUP + 8


def _checked(problem: Problem, old: Draft, new: Draft, settled: bool) -> Draft:
    """The better one; `settled`: each with the turns and staggers that suit it best."""
    if not math.isfinite(simulate_draft(problem, new).makespan):
        new = replace(new, careful=True)
    tried = [
        settle_delayed(problem, draft) if settled else draft for draft in (old, new)
    ]
    return min(tried, key=lambda draft: draft_value(problem, draft))


def _by_groups(
    problem: Problem,
    draft: Draft,
    budget: Budget,
    free: bool,
    random: Random,
    steps: int,
) -> Draft:
    draft = replace(draft, delays=draft.delays or (0.0,) * len(draft.paths))
    current = draft_value(problem, draft)
    idle, end = 0, budget.used + steps
    while budget.used < end and idle < STUCK:
        group = _group(problem, draft, random, idle)
        search = Search(
            problem,
            draft,
            group,
            free and (problem.gradients <= 0 or idle % 2 == 0),
            random,
        )
        before = search.end, search.value
        if not search.anneal(budget, steps=max(60, 12 * len(group))):
            return draft
        if (search.end, search.value) >= before:
            idle += 1
            continue
        tried = _merged(draft, search)
        found = draft_value(problem, tried)
        if found < current:
            draft, current, idle = tried, found, 0
        else:
            idle += 1
    return settle_delayed(problem, draft)


def _merged(draft: Draft, search: Search) -> Draft:
    paths, delays = list(draft.paths), list(draft.delays)
    for unit, path, delay in zip(
        search.units, search.paths, search.delays.tolist(), strict=True
    ):
        paths[unit], delays[unit] = path, delay
    return replace(
        draft,
        labels=tuple(search.part),
        paths=tuple(paths),
        delays=tuple(delays),
    )


def _group(problem: Problem, draft: Draft, random: Random, idle: int) -> list[int]:
    """The units that meet the slowest one, and others that do not, until there are nodes enough."""
    together = _companies(draft)
    found = simulate_draft(problem, draft)
    count = len(draft.paths)
    ends = found.finish.reshape(-1, count).max(axis=0)
    late = {root: max(ends[unit] for unit in units) for root, units in together.items()}
    ranked = sorted(together, key=lambda root: -late[root])
    first = ranked[min(int(random.expovariate(1.0) * (1 + idle / 10)), len(ranked) - 1)]
    chosen = list(together[first])
    nodes = {node for unit in chosen for node in draft.paths[unit]}
    near = _nearness(problem, draft, nodes, together)
    for root in sorted(near, key=lambda root: near[root] * random.uniform(0.2, 1.8)):
        more = {node for unit in together[root] for node in draft.paths[unit]}
        if root == first or len(nodes | more) > GROUP:
            continue
        nodes |= more
        chosen += together[root]
    return sorted(chosen)


def _nearness(
    problem: Problem, draft: Draft, nodes: set[int], together: dict[int, list[int]]
) -> dict[int, float]:
    here = sorted(nodes)
    least = problem.traffic.hop(1)[here].min(axis=0)
    return {
        root: float(
            np.mean([least[node] for unit in units[:1] for node in draft.paths[unit]])
        )
        for root, units in together.items()
    }


def _companies(draft: Draft) -> dict[int, list[int]]:
    """Units that share a node, or meet one that does: their times do not depend on others."""
    parent = {node: node for path in draft.paths for node in path}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for path in draft.paths:
        for node in path[1:]:
            parent[root(node)] = root(path[0])
    found: dict[int, list[int]] = {}
    for unit, path in enumerate(draft.paths):
        found.setdefault(root(path[0]), []).append(unit)
    return found
