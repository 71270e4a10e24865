"""A different plan in each step, so that every shard of the data meets every set of parts.

    step 0   shard 0 on data node a   shard 1 on b   shard 2 on c        plan 0
    step 1   shard 1 on data node a   shard 2 on b   shard 0 on c        plan 0
    ...                                     once every shard was on every data node:    plan 1

All plans have the same arrangement (weights stay where they are) and about the same makespan. The
paths of one plan meet only some of the possible sets of parts. So further plans are searched for,
each with one missing set forced onto a path, until some plan meets every set. The shards move over
the data nodes as well. So after (data nodes x plans) steps every shard has met every set of parts.
A set that would make a plan slower than the `slack` allows is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.plan.paths.baselines import full_pipeline
from penstock.plan.paths.budget import Budget, TimeSource, never_stop
from penstock.plan.paths.improve import improve_solution
from penstock.plan.paths.planner import PathPlan, finish_plan
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders, part_subsets
from penstock.plan.paths.solution import (
    TIME_ROUNDING,
    NodePath,
    Solution,
    path_in_order,
    simulate_solution,
    solution_value,
)
from penstock.plan.paths.staged_search import DEFAULT_SEARCH_MOVES

PartSet = frozenset[int]
MAX_FORCED_UNITS = 60  # units that are tried for one set of parts
FORCED_SET_MOVES = 6_000  # moves of the search for a plan that meets one set of parts
DEFAULT_ROTATION_MOVES = 120_000  # moves and simulations of all these searches


@dataclass(frozen=True, slots=True)
class Rotation:
    """Plans to use in turn.

    left_out: sets of parts that no plan meets within the slack.
    cut_short: whether a time limit ended the search before it had done its work.
    """

    plans: tuple[PathPlan, ...]
    left_out: tuple[PartSet, ...]
    cut_short: bool = False

    @property
    def makespan(self) -> float:
        """The makespan of the slowest plan."""
        return max(plan.makespan for plan in self.plans)

    def at(self, step: int) -> tuple[PathPlan, tuple[int, ...]]:
        """Return the plan of a step, and the shard that each data node reads."""
        data_nodes = len(self.plans[0].partitions[0])
        plan = self.plans[step // data_nodes % len(self.plans)]
        shift = step % data_nodes
        shards = tuple((node + shift) % data_nodes for node in range(data_nodes))
        return plan, shards


def parts_met(plan: PathPlan) -> frozenset[PartSet]:
    """Return the sets of parts, without the first part, that the paths of a plan meet."""
    return _part_sets(plan.solution)


def rotate(
    plan: PathPlan,
    slack: float = 0.0,
    iterations: int = DEFAULT_ROTATION_MOVES,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> Rotation:
    """Return the plan and others that together meet every set of parts.

    slack: by which share of its makespan another plan may be slower.
    iterations: moves of all searches together. They end earlier if `seconds` pass on the `clock`.
    """
    problem = plan.problem
    budget = Budget(iterations, seconds, clock, stop)
    longest = plan.makespan * (1.0 + slack) + TIME_ROUNDING
    plans = [plan]
    missing = _missing_sets(plan, plans)
    attempt = 0
    while missing and not budget.spent:
        solution = _solution_with(plan, missing[0], budget, seed + attempt)
        attempt += 1
        other = None
        if solution is not None:
            other = finish_plan(problem, solution, plan.bound, budget)
        if other is not None and other.makespan <= longest:
            plans.append(other)
            missing = _missing_sets(plan, plans)
        else:
            missing = [*missing[1:], missing[0]]
    left_out = tuple(sorted(missing, key=sorted))
    return Rotation(tuple(plans), left_out, budget.cut_short)


def full_steps(
    plan: PathPlan,
    iterations: int = DEFAULT_SEARCH_MOVES,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> PathPlan:
    """Return the best plan of a step that runs all parts, with the weights where this plan has them.

    Training takes it now and then, between steps with partial paths.
    """
    arranged = replace(plan, problem=replace(plan.problem, arranged=True))
    return full_pipeline(arranged, iterations, seconds, seed, clock, stop)


def _missing_sets(plan: PathPlan, plans: Sequence[PathPlan]) -> list[PartSet]:
    """Return the sets of parts that a path may meet, but no path of these plans does."""
    problem = plan.problem
    alive = [part for part in range(1, problem.body) if part in plan.solution.labels]
    met: set[PartSet] = set()
    for other in plans:
        met |= parts_met(other)
    subsets = part_subsets(alive, min(problem.hops, len(alive)))
    allowed = [parts for parts in subsets if part_orders(parts, problem.rules)]
    return [parts for parts in allowed if parts not in met]


def _solution_with(
    plan: PathPlan, wanted: PartSet, budget: Budget, seed: int
) -> Solution | None:
    """Return the best solution in which a path meets the wanted parts, or None."""
    problem = plan.problem
    random = Random(seed)

    def value(solution: Solution) -> tuple[float, float]:
        return solution_value(problem, solution)

    units = list(range(len(plan.solution.paths)))
    random.shuffle(units)
    solutions = []
    for unit in units[:MAX_FORCED_UNITS]:
        for paths in force_parts(problem, plan.solution, unit, wanted, random):
            solution = replace(plan.solution, paths=paths)
            if not np.isfinite(simulate_solution(problem, solution).makespan):
                solution = replace(solution, careful=True)
            solutions.append(solution)
    budget.used += len(solutions) + 1
    if not solutions:
        return None
    best = min(solutions, key=value)
    if value(best)[0] <= plan.makespan + TIME_ROUNDING:
        return best
    improved = improve_solution(problem, best, budget, False, seed, FORCED_SET_MOVES)
    return improved if wanted in _part_sets(improved) else best


def force_parts(
    problem: Problem, solution: Solution, unit: int, wanted: PartSet, random: Random
) -> list[tuple[NodePath, ...]]:
    """Let a unit exchange nodes with others until it meets the wanted parts.

    Return the paths of all units, once for each order that the rules allow on the path of this
    unit. The list is empty if no exchange is possible.
    """
    labels = solution.labels
    paths = list(solution.paths)
    for part in sorted(wanted):
        mine = {labels[node]: node for node in paths[unit][1:]}
        if part in mine:
            continue
        extra = next(own for own in mine if own not in wanted)
        partners = []
        for other, path in enumerate(paths):
            if other != unit and _can_exchange(problem, labels, path, part, extra):
                partners.append(other)
        if not partners:
            return []
        partner = random.choice(partners)
        theirs = {labels[node]: node for node in paths[partner][1:]}
        mine[part] = theirs.pop(part)
        theirs[extra] = mine.pop(extra)
        paths[unit] = path_in_order(paths[unit][0], mine, sorted(mine))
        order = random.choice(part_orders(frozenset(theirs), problem.rules))
        paths[partner] = path_in_order(paths[partner][0], theirs, order)
    node_of_part = {labels[node]: node for node in paths[unit][1:]}
    results = []
    for order in part_orders(wanted, problem.rules):
        paths[unit] = path_in_order(paths[unit][0], node_of_part, order)
        results.append(tuple(paths))
    return results


def _can_exchange(
    problem: Problem, labels: tuple[int, ...], path: NodePath, given: int, taken: int
) -> bool:
    """Whether a path can give away one part and take another."""
    parts = {labels[node] for node in path[1:]}
    if given not in parts or taken in parts:
        return False
    changed = frozenset(parts - {given} | {taken})
    return bool(part_orders(changed, problem.rules))


def _part_sets(solution: Solution) -> frozenset[PartSet]:
    part_sets = set()
    for path in solution.paths:
        part_sets.add(frozenset(solution.labels[node] for node in path[1:]))
    return frozenset(part_sets)
