"""Plans again when nodes are lost or come back, in about a second.

    node 7 is lost    Paths over node 7 use another replica of its part.
                      If no replica is left, all paths skip the part until it returns.
                      If it was a data node, the other data nodes take over its micro-batches.

Weights stay where they are: no remaining node gets another part. Lost nodes keep their numbers, and
their lanes are empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Ints
from penstock.plan.paths.arrangement import NO_PART_HELD, find_circuits
from penstock.plan.paths.bound import pass_bound
from penstock.plan.paths.budget import Budget, TimeSource, never_stop
from penstock.plan.paths.planner import PathPlan, finish_plan, first_solutions
from penstock.plan.paths.problem import Policy
from penstock.plan.paths.solution import Solution
from penstock.plan.paths.staged_search import search_in_stages

RECOVERY_CIRCUIT_MOVES = 20_000  # moves that find the circuits a search starts from
DEFAULT_RECOVERY_MOVES = 6_300  # moves of the search: its first three stages


def replan(
    plan: PathPlan,
    lost: Sequence[int] = (),
    returned: Sequence[int] = (),
    iterations: int = DEFAULT_RECOVERY_MOVES,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> PathPlan:
    """Return a plan for the nodes that are left.

    lost: nodes that have gone since the plan was made.
    returned: nodes that were lost before and come back with the parts they had.
    iterations: moves of the search. It ends earlier if `seconds` pass on the `clock`.
    """
    budget = Budget(iterations, seconds, clock, stop)
    homes = dict(plan.homes) | _parts_by_node(plan.solution)
    gone = (set(plan.lost) | set(lost)) - set(returned)
    labels = np.full(len(plan.solution.labels), NO_PART_HELD, dtype=np.int64)
    for node, part in homes.items():
        if node not in gone:
            labels[node] = part
    _refuse_nodes(plan, labels, lost, returned)
    data_nodes_before = {path[0] for path in plan.solution.paths}
    total_before = len(data_nodes_before) * plan.problem.microbatches
    total = max(plan.total_microbatches, total_before)
    data_nodes = int((labels == 0).sum())
    problem = replace(
        plan.problem,
        policy=_recovery_policy(plan.problem.policy),
        microbatches=max(round(total / data_nodes), 1),
    )
    bound = pass_bound(problem, np.bincount(labels[labels >= 0]), labels)

    def starts(stage_seed: int, _budget: Budget) -> list[Solution]:
        circuits = find_circuits(problem, labels, RECOVERY_CIRCUIT_MOVES, stage_seed)
        return first_solutions(problem, labels, circuits, stage_seed)

    best = search_in_stages(problem, starts, budget, False, seed)
    recovered = finish_plan(problem, best, bound, budget, tuple(sorted(gone)))
    return replace(
        recovered,
        homes=tuple(sorted(homes.items())),
        total_microbatches=total,
    )


def _parts_by_node(solution: Solution) -> dict[int, int]:
    """Return the part of each node that holds one."""
    held = enumerate(solution.labels)
    return {node: part for node, part in held if part != NO_PART_HELD}


def _recovery_policy(policy: Policy) -> Policy:
    """Return the policy without reserved slots: the remaining nodes may have fewer slots than paths."""
    if not policy.reserved:
        return policy
    return Policy(policy.queue_orders, ordered=policy.ordered)


def _refuse_nodes(
    plan: PathPlan, labels: Ints, lost: Sequence[int], returned: Sequence[int]
) -> None:
    nodes = len(plan.solution.labels)
    for change, changed in (("lost", lost), ("returned", returned)):
        for node in changed:
            if not 0 <= node < nodes:
                raise ShapeError(
                    f"node {node} is {change}, but the plan has nodes 0..{nodes - 1}"
                )
    never_lost = set(returned) - set(plan.lost)
    if never_lost:
        raise ShapeError(f"node {min(never_lost)} returned, but it was not lost")
    if not (labels == 0).any():
        raise ShapeError(
            "no data node is left: no remaining node holds part 0\n"
            "  bring a data node back, or make a new plan"
        )
    if not (labels > 0).any():
        raise ShapeError(
            "only data nodes are left: no remaining node holds any other part\n"
            "  bring nodes back, or make a new plan"
        )
