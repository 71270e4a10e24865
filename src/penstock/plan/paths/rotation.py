"""A different plan each step: the same arrangement, about the same makespan, other parts for every piece of the data.

    step 0   shard 0 on data node a   shard 1 on b   shard 2 on c        plan 0
    step 1   shard 1 on data node a   shard 2 on b   shard 0 on c        plan 0
    ...                                                                  when all shards were everywhere: plan 1

Weights stay where they are. A plan's paths meet some of the sets of parts there are; further plans are searched, each
with a set forced onto a path, until every set is met by one of them, and the shards wander over the data nodes. So
after data nodes x plans steps every shard has met every set of parts. What slows a plan down past `slack` is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.plan.paths.budget import Budget, TimeSource
from penstock.plan.paths.improve import improve_solution
from penstock.plan.paths.planner import PathPlan, finish_plan
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders, part_subsets
from penstock.plan.paths.solution import Solution, simulate_solution, solution_value

Parts = frozenset[int]
MAX_UNITS = 60  # that are tried for a set of parts
ATTEMPT = 6_000  # moves of the search for a plan that meets a set of parts
ITERATIONS = 120_000  # moves and simulated solutions of all of these searches


@dataclass(frozen=True, slots=True)
class Rotation:
    """Plans to take in turn, and the sets of parts that none of them meets within the slack.

    cut_short: a time limit ended the search before it had done its work.
    """

    plans: tuple[PathPlan, ...]
    left_out: tuple[Parts, ...]
    cut_short: bool = False

    @property
    def makespan(self) -> float:
        """Of the slowest."""
        return max(plan.makespan for plan in self.plans)

    def at(self, step: int) -> tuple[PathPlan, tuple[int, ...]]:
        """The plan of a step, and the shard each data node reads, in the order of the data nodes."""
        data = len(self.plans[0].partitions[0])
        turn, shift = step // data % len(self.plans), step % data
        return self.plans[turn], tuple((node + shift) % data for node in range(data))


def parts_met(plan: PathPlan) -> frozenset[Parts]:
    """The sets of parts, beside the first, that the plan's paths meet."""
    return _met(plan.solution)


def rotate(
    plan: PathPlan,
    slack: float = 0.0,
    iterations: int = ITERATIONS,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
) -> Rotation:
    """The plan and others that together meet every set of parts, none slower by more than a share of `slack`.

    The searches try `iterations` moves in all, or end after `seconds` by `clock` if these are given and pass first.
    """
    problem, budget = plan.problem, Budget(iterations, seconds, clock)
    alive = [part for part in range(1, problem.body) if part in plan.solution.labels]
    wanted = [
        s
        for s in part_subsets(alive, min(problem.hops, len(alive)))
        if part_orders(s, problem.rules)
    ]
    plans, seen = [plan], set(parts_met(plan))
    missing = [chosen for chosen in wanted if chosen not in seen]
    turn = 0
    while missing and not budget.spent:
        solution = _with(plan, missing[0], budget, seed + turn)
        turn += 1
        other = (
            None
            if solution is None
            else finish_plan(problem, solution, plan.bound, budget)
        )
        if other is not None and other.makespan <= plan.makespan * (1.0 + slack) + 1e-9:
            plans.append(other)
            seen |= parts_met(other)
            missing = [chosen for chosen in wanted if chosen not in seen]
        else:
            missing = [*missing[1:], missing[0]]
    return Rotation(tuple(plans), tuple(sorted(missing, key=sorted)), budget.cut_short)


def _with(plan: PathPlan, wanted: Parts, budget: Budget, seed: int) -> Solution | None:
    """The best solution in which a path meets the wanted parts; None: there is none."""
    problem, random = plan.problem, Random(seed)
    units = list(range(len(plan.solution.paths)))
    random.shuffle(units)
    tried = [
        paths
        for unit in units[:MAX_UNITS]
        for paths in force_parts(problem, plan.solution, unit, wanted, random)
    ]
    solutions = [replace(plan.solution, paths=paths) for paths in tried]
    budget.used += len(solutions) + 1
    solutions = [
        solution
        if np.isfinite(simulate_solution(problem, solution).makespan)
        else replace(solution, careful=True)
        for solution in solutions
    ]
    if not solutions:
        return None
    best = min(solutions, key=lambda solution: solution_value(problem, solution))
    if solution_value(problem, best)[0] <= plan.makespan + 1e-9:
        return best
    searched = improve_solution(problem, best, budget, False, seed, ATTEMPT)
    return searched if wanted in _met(searched) else best


def force_parts(
    problem: Problem, solution: Solution, unit: int, wanted: Parts, random: Random
) -> list[tuple[tuple[int, ...], ...]]:
    """The paths after a unit has exchanged nodes with others until it meets the wanted parts; [] if that fails."""
    labels, paths = solution.labels, list(solution.paths)
    for part in sorted(wanted):
        mine = {labels[node]: node for node in paths[unit][1:]}
        if part in mine:
            continue
        extra = next(p for p in mine if p not in wanted)
        others = [
            u
            for u, path in enumerate(paths)
            if u != unit and _may_take(problem, labels, path, part, extra)
        ]
        if not others:
            return []
        other = random.choice(others)
        yours = {labels[node]: node for node in paths[other][1:]}
        give, take = {**mine, part: yours[part]}, {**yours, extra: mine[extra]}
        del give[extra], take[part]
        paths[unit] = (paths[unit][0], *(give[p] for p in sorted(give)))
        paths[other] = (
            paths[other][0],
            *(
                take[p]
                for p in random.choice(part_orders(frozenset(take), problem.rules))
            ),
        )
    where = {labels[node]: node for node in paths[unit][1:]}
    found = []
    for order in part_orders(wanted, problem.rules):
        paths[unit] = (paths[unit][0], *(where[part] for part in order))
        found.append(tuple(paths))
    return found


def _may_take(
    problem: Problem,
    labels: tuple[int, ...],
    path: tuple[int, ...],
    part: int,
    extra: int,
) -> bool:
    """Whether a path can give away one part and take another."""
    parts = {labels[node] for node in path[1:]}
    return (
        part in parts
        and extra not in parts
        and bool(part_orders(frozenset(parts - {part} | {extra}), problem.rules))
    )


def _met(solution: Solution) -> frozenset[Parts]:
    return frozenset(
        frozenset(solution.labels[node] for node in path[1:]) for path in solution.paths
    )
