"""The search for a solution, in stages that do not depend on how much work it is given.

    stage        0      1        2                3
    moves       300   1,200    4,800           19,200          40,000 ...        each from other circuits
                 |------|--------|----------------|------------- ...
                             ^ a budget of N moves ends here    ^ one of 4 N here, on the same way

Every stage anneals from scratch: hot to cold over its own number of moves. A search with a small budget does the first
moves of one with a large budget, and both return the best solution they met. So more work never gives a worse plan, and a
seed gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from penstock.plan.paths.budget import Budget
from penstock.plan.paths.improve import improve_solution, in_groups
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.solution import Solution, choose_queueing, solution_value

ITERATIONS = 25_500  # moves of a search by default: four whole stages, about two seconds for twenty nodes
FIRST_STAGE, GROWTH, LAST_STAGE = 300, 4, 40_000  # moves of the stages
STARTS = 3  # solutions that are searched for a while before one is chosen
TRIAL = 0.12  # share of a stage's moves for each of them
GROUP_TRIAL = (
    1_500  # moves for each of them where a solution is improved group by group
)
FOREVER = 1 << 60  # moves: until the budget ends, or nothing more is found


def search(
    problem: Problem,
    starts: Callable[[int], Sequence[Solution]],
    budget: Budget,
    free: bool,
    seed: int,
) -> Solution:
    """The best solution that is met. `starts` makes solutions to begin with from a seed; `free`: nodes may change parts."""
    best: Solution | None = None
    for stage in count():
        found = _stage(
            problem,
            starts(seed + stage),
            budget,
            free,
            seed + stage,
            stage_moves(stage),
        )
        if best is None or solution_value(problem, found) < solution_value(
            problem, best
        ):
            best = found
        if budget.spent:
            return best
    raise AssertionError("stages never end")


def stage_moves(stage: int) -> int:
    """The moves of a stage: they grow fast, so that most of any budget goes into one long annealing.

    >>> [stage_moves(stage) for stage in range(6)]
    [300, 1200, 4800, 19200, 40000, 40000]
    """
    return int(min(FIRST_STAGE * GROWTH**stage, LAST_STAGE))


def _stage(
    problem: Problem,
    solutions: Sequence[Solution],
    budget: Budget,
    free: bool,
    seed: int,
    moves: int,
) -> Solution:
    """The best solution after a short search of each of the best starts, and a long one of the best of these."""
    ranked = sorted(
        (choose_queueing(problem, solution) for solution in solutions),
        key=lambda solution: solution_value(problem, solution),
    )[:STARTS]
    grouped = any(in_groups(solution) for solution in ranked)
    trial = GROUP_TRIAL if grouped else int(TRIAL * moves)
    tried = ranked[:1]
    if len(ranked) > 1:
        for solution in ranked:
            tried.append(improve_solution(problem, solution, budget, free, seed, trial))
            if budget.spent:
                break
    best = min(tried, key=lambda solution: solution_value(problem, solution))
    if budget.spent:
        return best
    rest = FOREVER if grouped else moves - (len(tried) - 1) * trial
    return improve_solution(problem, best, budget, free, seed, rest)
