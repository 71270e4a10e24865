"""The search for the best paths, in stages that do not depend on the budget.

    stage        0      1        2                3              4          5
    moves       300   1,200    4,800           19,200         20,000     40,000 ...
    start       other circuits in each                        the best   other circuits, and so on in turn
                 |------|--------|----------------|-------------|-------- ...
                             ^ a budget of N moves ends here    ^ one of 4 N ends here, on the same way

Most stages anneal from scratch, from hot to cold, over their own number of moves. From stage 4 on,
every other stage starts from the best solution so far, and less hot. A search with a small budget
makes the same first moves as one with a large budget, and both return the best solution they met.
So more work never gives a worse plan, and a seed gives the same plan on every machine.

A cluster that is planned site by site or cell by cell is worse off in the middle of a stage: some
sites are improved, others are not. There, a stage from scratch counts only once it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from penstock.plan.paths.budget import Budget
from penstock.plan.paths.improve import improve_solution, needs_groups
from penstock.plan.paths.move_search import WARM
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.solution import (
    Solution,
    better_queueing,
    choose_queueing,
    solution_value,
)

# Moves of a search by default: four whole stages, about two seconds for twenty nodes.
DEFAULT_SEARCH_MOVES = 25_500
FIRST_STAGE_MOVES = 300
STAGE_GROWTH = 4  # each stage has this many times the moves of the one before
MAX_STAGE_MOVES = 40_000
FIRST_RESTART = 4  # the first stage that starts from the best solution so far
RESTART_MOVES = 20_000
SITE_STAGE_MOVES = 120_000  # moves of a long stage that plans site by site
MAX_CELL_STAGE_MOVES = 500_000  # moves of the longest stages that plan cell by cell
TRIED_STARTS = 3  # solutions that get a short search before the best is chosen
TRIAL_SHARE = 0.12  # share of a stage's moves for each short search
GROUP_TRIAL_MOVES = 1_500  # moves of a short search that works group by group
Starts = Callable[[int, Budget], Sequence[Solution]]
StageMoves = Callable[[int], int]
NoteStage = Callable[[Solution], None]
UNLIMITED_MOVES = 1 << 60  # until the budget ends or nothing more is found


def search_in_stages(
    problem: Problem,
    starts: Starts,
    budget: Budget,
    free: bool,
    seed: int,
    site_stages: StageMoves | None = None,
    note: NoteStage = lambda solution: None,
) -> Solution:
    """Return the best solution that the search meets within its budget.

    starts: makes the solutions that a stage starts from, given a seed and a budget.
    free: whether nodes may change their parts.
    site_stages: the moves of each stage, if the starts are planned site by site or cell by cell.
    note: called with the solution of each stage that is complete.
    """
    if site_stages is not None:
        return _search_by_sites(problem, starts, budget, free, seed, site_stages, note)

    def value(solution: Solution) -> tuple[float, float]:
        return solution_value(problem, solution)

    best: Solution | None = None
    end = 0
    for stage in count():
        stage_seed = seed + stage
        end += stage_moves(stage)
        if best is not None and is_restart(stage):
            solution = improve_solution(
                problem, best, budget, free, stage_seed, stage_moves(stage), WARM
            )
            best = min(best, solution, key=value)
            if budget.iterations >= end and not budget.cut_short:
                note(solution)
            if budget.spent:
                return best
            continue
        solution = _run_stage(
            problem,
            starts(stage_seed, budget),
            budget,
            free,
            stage_seed,
            stage_moves(stage),
        )
        if best is None or value(solution) < value(best):
            best = solution
        if budget.iterations >= end and not budget.cut_short:
            note(solution)
        if budget.spent:
            return best
    raise AssertionError("the stages never end")


def _search_by_sites(
    problem: Problem,
    starts: Starts,
    budget: Budget,
    free: bool,
    seed: int,
    site_stages: StageMoves,
    note: NoteStage,
) -> Solution:
    """Return the best solution of the stages that are complete, or that improve the best so far."""

    def value(solution: Solution) -> tuple[float, float]:
        return solution_value(problem, solution)

    simple = starts(seed, Budget(0))
    best = min((choose_queueing(problem, start) for start in simple), key=value)
    for stage in count():
        stage_seed = seed + stage
        moves = site_stages(stage)
        part = budget.part(moves)
        improves = moves == RESTART_MOVES
        if improves:
            solution = improve_solution(
                problem, best, part, free, stage_seed, moves, WARM
            )
        else:
            solution = _run_stage(
                problem, starts(stage_seed, part), part, free, stage_seed, moves
            )
        complete = part.iterations == moves
        if complete or improves or part.cut_short:
            best = min(best, solution, key=value)
        budget.count(part)
        if complete and not part.cut_short:
            note(solution)
        if budget.spent or not part.used:
            return best
    raise AssertionError("the stages never end")


def stage_moves(stage: int) -> int:
    """Return the number of moves of a stage.

    It grows fast, so that most of any budget goes into one long annealing.

    >>> [stage_moves(stage) for stage in range(7)]
    [300, 1200, 4800, 19200, 20000, 40000, 20000]
    """
    if is_restart(stage):
        return RESTART_MOVES
    return int(min(FIRST_STAGE_MOVES * STAGE_GROWTH**stage, MAX_STAGE_MOVES))


def site_stage_moves(stage: int) -> int:
    """Return the number of moves of a stage that plans site by site.

    Every site needs its share of the moves, so the second stage has all that the default leaves,
    and later stages from scratch have enough for a dozen sites.

    >>> [site_stage_moves(stage) for stage in range(8)]
    [300, 25200, 20000, 120000, 20000, 20000, 20000, 120000]
    """
    if stage < 2:
        return (FIRST_STAGE_MOVES, DEFAULT_SEARCH_MOVES - FIRST_STAGE_MOVES)[stage]
    return SITE_STAGE_MOVES if stage % 4 == 3 else RESTART_MOVES


def cell_stage_moves(stage: int) -> int:
    """Return the number of moves of a stage that plans cell by cell.

    The paths of different cells never meet, so no stage improves the whole.

    >>> [cell_stage_moves(stage) for stage in range(5)]
    [300, 25200, 120000, 500000, 500000]
    """
    if stage < 2:
        return site_stage_moves(stage)
    return SITE_STAGE_MOVES if stage == 2 else MAX_CELL_STAGE_MOVES


def is_restart(stage: int) -> bool:
    """Whether a stage starts from the best solution so far."""
    return stage >= FIRST_RESTART and (stage - FIRST_RESTART) % 2 == 0


def _run_stage(
    problem: Problem,
    starts: Sequence[Solution],
    budget: Budget,
    free: bool,
    seed: int,
    moves: int,
) -> Solution:
    """Search each of the best starts for a while, and the best result of these to the end."""

    def value(solution: Solution) -> tuple[float, float]:
        return solution_value(problem, solution)

    queued = [better_queueing(problem, start) for start in starts]
    ranked = sorted(queued, key=value)[:TRIED_STARTS]
    grouped = any(needs_groups(solution) for solution in ranked)
    trial_moves = GROUP_TRIAL_MOVES if grouped else int(TRIAL_SHARE * moves)
    tried = ranked[:1]
    if len(ranked) > 1:
        for start in ranked:
            tried.append(
                improve_solution(problem, start, budget, free, seed, trial_moves)
            )
            if budget.spent:
                break
    best = min(tried, key=value)
    if budget.spent:
        return best
    moves_left = moves - (len(tried) - 1) * trial_moves
    if grouped:
        moves_left = UNLIMITED_MOVES
    return improve_solution(problem, best, budget, free, seed, moves_left)
