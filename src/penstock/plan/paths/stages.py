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

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from penstock.plan.paths.lanes import LaneSearch, can_search_lanes
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.search import (
    DEFAULT_SEARCH_MOVES,
    HOT,
    MAX_GROUP_NODES,
    WARM,
    Annealing,
    Budget,
)
from penstock.plan.paths.simulator import (
    Solution,
    better_queueing,
    choose_queueing,
    simulate_solution,
    solution_value,
    with_units,
)

# ---------------------------------------------------------------- groups of paths that meet
# Improves a solution: all of it at once if it is small, otherwise group by group.
#
# In a large cluster most paths never meet, so their times do not depend on each other. The slowest
# paths, all paths that meet them and some others nearby form a *group* of about twenty nodes, which
# is improved on its own:
#
#     o--o--o   o--o--o   o--o--o   o--o--o
#     slowest ──┐ nearby ─┐
#               └─ a group┘  annealed, and kept if the whole becomes better; then the next group

MAX_FAILED_GROUPS = 200  # groups in a row without a gain before the search gives up
MAX_NODES_AT_ONCE = MAX_GROUP_NODES + 8  # larger solutions are improved in groups
MIN_GROUP_MOVES = 60
GROUP_MOVES_PER_UNIT = 12
FAILURES_PER_EFFORT = 4  # groups without a gain, after which groups get more moves
MAX_EFFORT = 16  # times as many moves
LANE_SHARE = 0.25  # share of the moves that improve lanes
MIN_LANE_MOVES = 500
LANE_MOVES_PER_UNIT = 200
MAX_FAILED_LANES = 3  # searches in a row without a gain before it gives up


def improve_solution(
    problem: Problem,
    solution: Solution,
    budget: Budget,
    free: bool,
    seed: int,
    steps: int,
    hot: float = HOT,
) -> Solution:
    """Return the solution after a search of `steps` moves, which begins at temperature `hot`.

    If the budget ends before that, the best solution so far is returned as it is. A larger budget
    meets that solution too, and so never returns a worse one.
    """
    random = Random(seed)
    lane_moves = int(LANE_SHARE * steps) if can_search_lanes(problem) else 0
    if needs_groups(solution):
        return _improve_by_groups(
            problem, solution, budget, free, random, steps, lane_moves
        )
    units = list(range(len(solution.paths)))
    annealing = Annealing(problem, solution, units, free, random)
    complete = annealing.run(budget, steps - lane_moves, hot)
    better = _better(problem, solution, annealing.best, complete)
    if not complete:
        return better
    return _improve_lanes(problem, better, budget, random, lane_moves)


def _improve_lanes(
    problem: Problem, solution: Solution, budget: Budget, random: Random, steps: int
) -> Solution:
    """Improve the lanes of the units that end last, as long as that helps."""
    current = solution_value(problem, solution)
    end = budget.used + steps
    failed = 0
    while budget.used < end and failed < MAX_FAILED_LANES:
        units = _slowest_component(problem, solution)
        moves = max(MIN_LANE_MOVES, LANE_MOVES_PER_UNIT * len(units))
        moves = min(moves * (1 + failed), end - budget.used)
        search = LaneSearch(problem, solution, units, random)
        complete = search.run(budget, moves)
        trial = with_units(solution, units, search.best)
        value = solution_value(problem, trial)
        if value < current:
            solution = trial
            current = value
            failed = 0
        else:
            failed += 1
        if not complete:
            break
    return solution


def _slowest_component(problem: Problem, solution: Solution) -> list[int]:
    """Return the units that share nodes with the one that ends last."""
    ends = simulate_solution(problem, solution).finish
    last = int(ends.argmax())
    components = _components(solution)
    return next(units for units in components.values() if last in units)


def needs_groups(solution: Solution) -> bool:
    """Whether a solution visits too many nodes to be improved all at once."""
    return len(_nodes_of(solution, range(len(solution.paths)))) > MAX_NODES_AT_ONCE


def _nodes_of(solution: Solution, units: range | list[int]) -> set[int]:
    """Return the nodes that these units visit."""
    return set(solution.paths[units].ravel().tolist())


def _better(
    problem: Problem, old: Solution, new: Solution, choose_queues: bool
) -> Solution:
    """Return the better of two solutions.

    choose_queues: first give each the queue order and stagger that suit it best.
    """
    if not math.isfinite(simulate_solution(problem, new).makespan):
        new = replace(new, avoid_deadlock=True)
    tried = [old, new]
    if choose_queues:
        tried = [better_queueing(problem, solution) for solution in tried]
    return min(tried, key=lambda solution: solution_value(problem, solution))


def _improve_by_groups(
    problem: Problem,
    solution: Solution,
    budget: Budget,
    free: bool,
    random: Random,
    steps: int,
    lane_moves: int,
) -> Solution:
    """Improve one group after the other, the slowest first, and then the lanes."""
    current = solution_value(problem, solution)
    failed = 0
    end = budget.used + steps - lane_moves
    while budget.used < end and failed < MAX_FAILED_GROUPS:
        units = _choose_group(problem, solution, random, failed)
        # While gradients count, every other group leaves the arrangement alone.
        free_now = free and (not problem.has_sums or failed % 2 == 0)
        annealing = Annealing(problem, solution, units, free_now, random)
        before = annealing.least
        moves = max(MIN_GROUP_MOVES, GROUP_MOVES_PER_UNIT * len(units))
        moves *= min(1 + failed // FAILURES_PER_EFFORT, MAX_EFFORT)
        if not annealing.run(budget, moves):
            return solution
        if annealing.least >= before:
            failed += 1
            continue
        trial = with_units(solution, units, annealing.best)
        value = solution_value(problem, trial)
        if value < current:
            solution = trial
            current = value
            failed = 0
        else:
            failed += 1
    solution = better_queueing(problem, solution)
    if budget.spent:
        return solution
    return _improve_lanes(problem, solution, budget, random, lane_moves)


def _choose_group(
    problem: Problem, solution: Solution, random: Random, failed: int
) -> list[int]:
    """Return the units of a slow component and of others nearby, until there are enough nodes.

    The more groups have failed, the less the choice prefers slow components.
    """
    components = _components(solution)
    times = simulate_solution(problem, solution)
    ends = times.finish.reshape(-1, len(solution.paths)).max(axis=0)
    latest = {
        root: max(ends[unit] for unit in units) for root, units in components.items()
    }
    ranked = sorted(components, key=lambda root: -latest[root])
    place = int(random.expovariate(1.0) * (1 + failed / 10))
    first = ranked[min(place, len(ranked) - 1)]
    chosen = list(components[first])
    nodes = _nodes_of(solution, chosen)
    distance = _distances(problem, solution, nodes, components)
    nearest = sorted(
        distance, key=lambda root: distance[root] * random.uniform(0.2, 1.8)
    )
    for root in nearest:
        more = _nodes_of(solution, components[root])
        if root == first or len(nodes | more) > MAX_GROUP_NODES:
            continue
        nodes |= more
        chosen += components[root]
    return sorted(chosen)


def _distances(
    problem: Problem,
    solution: Solution,
    nodes: set[int],
    components: dict[int, list[int]],
) -> dict[int, float]:
    """Return how far each component is from these nodes: the mean over its first path."""
    least = problem.arrays.hop(1)[sorted(nodes)].min(axis=0)
    distances = {}
    for root, units in components.items():
        first_path = solution.paths[units[0]]
        distances[root] = float(least[first_path].mean())
    return distances


def _components(solution: Solution) -> dict[int, list[int]]:
    """Return the units that share nodes, directly or through others, under one node of each set.

    The times of one set do not depend on the others.
    """
    paths = solution.paths.tolist()
    parent = {node: node for path in paths for node in path}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for path in paths:
        for node in path[1:]:
            parent[root(node)] = root(path[0])
    components: dict[int, list[int]] = {}
    for unit, path in enumerate(paths):
        components.setdefault(root(path[0]), []).append(unit)
    return components


# ---------------------------------------------------------------- stages

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
