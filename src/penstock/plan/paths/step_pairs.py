"""Chooses the arrangement on which partial and full steps are fast together.

    stages of the search for paths             arrangement ──► a full step on it ─┐
    stages of the search for full pipelines    arrangement ──► paths on it       ─┴─► the least mean of a step

Every `full`-th step runs all parts (see the module `rules`), with the weights where the paths need them. An arrangement
that is good for paths may be bad for full steps, so the goal is the mean over both. Each complete stage of the two
searches proposes an arrangement. What is planned on it depends on that stage only, so a longer search compares all
pairs of a shorter one and more: its mean is never slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.plan.paths.budget import Budget
from penstock.plan.paths.planner import PathPlan, best_plan
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rotation import full_steps


@dataclass(frozen=True, slots=True)
class StepPair:
    """A plan of partial paths, and one of steps with all parts on the same arrangement."""

    paths: PathPlan
    full: PathPlan

    @property
    def mean(self) -> float:
        """The mean seconds of a step over partial and full ones."""
        period = self.paths.problem.rules.full
        return ((period - 1) * self.paths.makespan + self.full.makespan) / period


def best_pair(
    paths: Sequence[PathPlan], fulls: Sequence[PathPlan], budget: Budget, seed: int = 0
) -> StepPair:
    """Return the pair with the least mean, of one for each arrangement of these plans.

    paths: plans of partial paths, of which there must be one.
    fulls: full pipelines, each with an arrangement of its own.
    budget: its time limit ends the search with the pairs so far.
    """
    return min(_pairs(paths, fulls, budget, seed), key=lambda pair: pair.mean)


def _pairs(
    paths: Sequence[PathPlan], fulls: Sequence[PathPlan], budget: Budget, seed: int
) -> Iterator[StepPair]:
    for number, plan in enumerate(paths):
        if number and budget.spent:
            return
        part = budget.part(max(1, plan.simulations))
        full = full_steps(
            plan, part.iterations, part.seconds, seed, part.clock, part.stop
        )
        yield StepPair(plan, full)
    first = paths[0]
    for full in fulls:
        if budget.spent or not all(full.partitions):
            continue
        part = budget.part(max(1, full.simulations))
        yield StepPair(_paths_on(first, full, part, seed), full)


def _paths_on(first: PathPlan, full: PathPlan, budget: Budget, seed: int) -> PathPlan:
    """Return paths for the arrangement of a full pipeline, as a plan of the same problem as `first`."""
    problem: Problem = replace(first.problem, arranged=True)
    labels = np.array(full.solution.labels)
    shape = np.bincount(labels[labels >= 0], minlength=problem.body)
    found = best_plan(problem, labels, shape, budget, seed)
    # The bound of `first` holds for every arrangement.
    return replace(found, problem=first.problem, bound=min(first.bound, found.makespan))
