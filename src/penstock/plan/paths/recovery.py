"""Nodes that are lost, and nodes that come back: a plan for who is left, in about a second.

    lost 7    paths over 7 go over another replica of its part
              no replica left: the part is skipped, by all, until it returns
              a data node: its micro-batches are dealt to the other data nodes

Weights stay where they are: nobody who is left gets another part. Lost nodes keep their number, and an empty lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Ints
from penstock.plan.paths.arrangement import NO_PART_HELD, find_circuits
from penstock.plan.paths.bound import path_bound
from penstock.plan.paths.budget import Budget, TimeSource, never_stop
from penstock.plan.paths.planner import PathPlan, finish_plan, first_solutions
from penstock.plan.paths.problem import Policy
from penstock.plan.paths.solution import Solution
from penstock.plan.paths.staged_search import search

CIRCUIT_MOVES = 20_000  # tried in all, to begin with
ITERATIONS = 6_300  # moves of the search: its first three stages


def replan(
    plan: PathPlan,
    lost: Sequence[int] = (),
    returned: Sequence[int] = (),
    iterations: int = ITERATIONS,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> PathPlan:
    """A plan for the nodes that are left. `returned`: of those lost before, with the parts they had.

    The search tries `iterations` moves, or ends after `seconds` by `clock` if these are given and pass first.
    """
    budget = Budget(iterations, seconds, clock, stop)
    homes = dict(plan.homes) | {
        node: part
        for node, part in enumerate(plan.solution.labels)
        if part != NO_PART_HELD
    }
    gone = (set(plan.lost) | set(lost)) - set(returned)
    labels = np.array(
        [
            NO_PART_HELD if n in gone else homes.get(n, NO_PART_HELD)
            for n in range(len(plan.solution.labels))
        ]
    )
    _refuse(plan, labels, lost, returned)
    before = len({path[0] for path in plan.solution.paths}) * plan.problem.microbatches
    data = int((labels == 0).sum())
    total = max(plan.whole, before)
    policy = plan.problem.policy
    if policy.reserved:  # fewer slots than paths: they go to whoever is there
        policy = Policy(policy.queue_orders, ordered=policy.ordered)
    problem = replace(
        plan.problem, policy=policy, microbatches=max(round(total / data), 1)
    )
    bound = path_bound(problem, np.bincount(labels[labels >= 0]), labels)

    def starts(turn: int) -> list[Solution]:
        return first_solutions(
            problem, labels, find_circuits(problem, labels, CIRCUIT_MOVES, turn), turn
        )

    best = search(problem, starts, budget, False, seed)
    found = finish_plan(problem, best, bound, budget, tuple(sorted(gone)))
    return replace(found, homes=tuple(sorted(homes.items())), whole=total)


def _refuse(
    plan: PathPlan, labels: Ints, lost: Sequence[int], returned: Sequence[int]
) -> None:
    nodes = len(plan.solution.labels)
    for word, some in (("lost", lost), ("returned", returned)):
        for node in some:
            if not 0 <= node < nodes:
                raise ShapeError(
                    f"node {node} is {word}, but there are nodes 0..{nodes - 1}"
                )
    strange = set(returned) - set(plan.lost)
    if strange:
        raise ShapeError(f"node {min(strange)} returned, but it was not lost")
    if not (labels == 0).any():
        raise ShapeError(
            "no data node is left: nobody holds part 0\n  bring one back, or plan anew"
        )
    if not (labels > 0).any():
        raise ShapeError(
            "only data nodes are left: no part beside the first\n  bring nodes back, or plan anew"
        )
