"""A plan in the making: parts of nodes, paths of units, how waiting is settled; what it takes, and when to stop.

A *unit* is a micro-batch, or all rounds of one path. A draft becomes a schedule when its times have been simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import sum_seconds_by_part
from penstock.plan.paths.flow import Flow, QueueOrder, simulate_flow
from penstock.plan.paths.problem import Problem, expand_paths, start_conditions

NodePath = tuple[int, ...]
TimeSource = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Draft:
    """Parts of nodes, paths of units as nodes, and how waiting is settled."""

    labels: tuple[int, ...]
    paths: tuple[NodePath, ...]
    turn: QueueOrder
    stagger: float = 0.0
    delays: tuple[float, ...] = ()
    careful: bool = False


def never() -> bool:
    """The default of `stop`: nobody asks the search to end."""
    return False


@dataclass(slots=True)
class Budget:
    """Ends a search after `iterations` moves, so that it does not depend on the machine.

    A time limit in `seconds`, or `stop` returning True, ends it earlier. `cut_short` then says so.
    """

    iterations: int
    seconds: float | None = None
    clock: TimeSource = time.perf_counter
    stop: Callable[[], bool] = never
    used: int = 0
    cut_short: bool = False
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ShapeError(f"a search of {self.iterations} moves; the least is 0")
        self.begin = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.begin

    @property
    def spent(self) -> bool:
        """Whether the search has to end."""
        if self.used >= self.iterations or self.cut_short:
            return True
        self.cut_short = self.stop() or (
            self.seconds is not None and self.elapsed >= self.seconds
        )
        return self.cut_short


def simulate_draft(problem: Problem, draft: Draft) -> Flow:
    """The times of a draft."""
    paths = np.array(draft.paths, dtype=np.int64)
    nodes, parts = expand_paths(problem, paths, np.array(draft.labels, dtype=np.int64))
    after, release = start_conditions(problem, paths, draft.stagger)
    delay = (
        np.tile(np.array(draft.delays), problem.policy.rounds) if draft.delays else None
    )
    return simulate_flow(
        problem.traffic, nodes, parts, draft.turn, after, release, delay, draft.careful
    )


def step_end(problem: Problem, found: Flow, labels: Ints, sums: Floats) -> float:
    """The end of the last backward, or of the last sum of gradients."""
    if problem.gradients <= 0 or found.makespan == np.inf:
        return found.makespan
    busy = (labels >= 0) & (found.last > 0)
    return max(found.makespan, float((found.last[busy] + sums[labels[busy]]).max()))


def settle_waiting(problem: Problem, draft: Draft) -> Draft:
    """The draft with the turn, stagger and care that end first."""
    labels, best, least = np.array(draft.labels), draft, math.inf
    sums = sum_seconds_by_part(problem.traffic, labels, problem.body, problem.gradients)
    for turn in problem.policy.turns:
        for choice in problem.policy.staggers:
            for careful in (False, True):
                tried = replace(
                    draft, turn=turn, stagger=problem.stagger(choice), careful=careful
                )
                found = step_end(problem, simulate_draft(problem, tried), labels, sums)
                if found < least:
                    best, least = tried, found
                if found < math.inf:
                    break  # care is only for those that run into a circle
    return best


def settle_delayed(problem: Problem, draft: Draft) -> Draft:
    """As it is, or settled anew, whichever is better."""
    return min(
        (draft, settle_waiting(problem, draft)),
        key=lambda tried: draft_value(problem, tried),
    )


def draft_value(problem: Problem, draft: Draft) -> tuple[float, float]:
    """The end of a whole draft's step, and the mean of its micro-batches."""
    labels, found = np.array(draft.labels), simulate_draft(problem, draft)
    sums = sum_seconds_by_part(problem.traffic, labels, problem.body, problem.gradients)
    return step_end(problem, found, labels, sums), float(found.finish.mean())
