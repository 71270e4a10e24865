"""Further plans on the arrangement of a plan: for other steps, for full steps, and when nodes are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Ints
from penstock.plan.paths.bound import pass_bound
from penstock.plan.paths.planner import (
    PathPlan,
    finish_plan,
    first_solutions,
    plan_paths,
)
from penstock.plan.paths.problem import NO_PART_HELD, Policy, Problem
from penstock.plan.paths.rules import part_orders, part_subsets
from penstock.plan.paths.search import Budget
from penstock.plan.paths.simulator import (
    TIME_ROUNDING,
    NodePath,
    Solution,
    path_in_order,
    simulate_solution,
    solution_value,
)
from penstock.plan.paths.stages import improve_solution, search_in_stages
from penstock.plan.paths.starts import find_circuits

# ---------------------------------------------------------------- full pipelines


def full_pipeline(
    plan: PathPlan,
    budget: Budget,
    seed: int = 0,
    stages: list[PathPlan] | None = None,
) -> PathPlan:
    """Return the best full pipeline that the same search finds. It leaves out no part.

    It has the same nodes, data nodes, micro-batches and links. It chooses its own arrangement and
    sizes, unless the paths were planned for given ones. Slots are not reserved for paths. `stages`
    takes the plan of each complete stage of the search.
    """
    planned = plan.problem
    problem = replace(
        planned,
        rules=planned.rules.full_model(),
        policy=Policy(planned.policy.queue_orders, ordered=planned.policy.ordered),
        arrangement=None if planned.arrangement is None else plan.partitions,
        data_nodes=len(plan.partitions[0]),
    )
    return plan_paths(problem, budget, seed, stages)


# ---------------------------------------------------------------- a different plan in each step
# A different plan in each step, so that every shard of the data meets every set of parts.
#
#     step 0   shard 0 on data node a   shard 1 on b   shard 2 on c        plan 0
#     step 1   shard 1 on data node a   shard 2 on b   shard 0 on c        plan 0
#     ...                                     once every shard was on every data node:    plan 1
#
# All plans have the same arrangement (weights stay where they are) and about the same makespan. The
# paths of one plan meet only some of the possible sets of parts. So further plans are searched for,
# each with one missing set forced onto a path, until some plan meets every set. The shards move over
# the data nodes as well. So after (data nodes x plans) steps every shard has met every set of parts.
# A set that would make a plan slower than the `slack` allows is left out.

PartSet = frozenset[int]
MAX_FORCED_UNITS = 60  # units that are tried for one set of parts
FORCED_SET_MOVES = 6_000  # moves of the search for a plan that meets one set of parts


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
    plan: PathPlan, budget: Budget, slack: float = 0.0, seed: int = 0
) -> Rotation:
    """Return the plan and others that together meet every set of parts.

    budget: how long all searches together go on.
    slack: by which share of its makespan another plan may be slower.
    """
    problem = plan.problem
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


def full_steps(plan: PathPlan, budget: Budget, seed: int = 0) -> PathPlan:
    """Return the best plan of a step that runs all parts, with the weights where this plan has them.

    Training takes it now and then, between steps with partial paths.
    """
    arranged = replace(plan.problem, arrangement=plan.partitions)
    return full_pipeline(replace(plan, problem=arranged), budget, seed)


def _missing_sets(plan: PathPlan, plans: Sequence[PathPlan]) -> list[PartSet]:
    """Return the sets of parts that a path may meet, but no path of these plans does."""
    problem = plan.problem
    alive = [
        part for part in range(1, problem.body) if part in plan.solution.part_of_node
    ]
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
            solution = replace(plan.solution, paths=np.array(paths))
            if not np.isfinite(simulate_solution(problem, solution).makespan):
                solution = replace(solution, avoid_deadlock=True)
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
    part_of_node = solution.part_of_node.tolist()
    paths = list(map(tuple, solution.paths.tolist()))
    for part in sorted(wanted):
        mine = {part_of_node[node]: node for node in paths[unit][1:]}
        if part in mine:
            continue
        extra = next(own for own in mine if own not in wanted)
        partners = []
        for other, path in enumerate(paths):
            if other != unit and _can_exchange(
                problem, part_of_node, path, part, extra
            ):
                partners.append(other)
        if not partners:
            return []
        partner = random.choice(partners)
        theirs = {part_of_node[node]: node for node in paths[partner][1:]}
        mine[part] = theirs.pop(part)
        theirs[extra] = mine.pop(extra)
        paths[unit] = path_in_order(paths[unit][0], mine, sorted(mine))
        order = random.choice(part_orders(frozenset(theirs), problem.rules))
        paths[partner] = path_in_order(paths[partner][0], theirs, order)
    node_of_part = {part_of_node[node]: node for node in paths[unit][1:]}
    results = []
    for order in part_orders(wanted, problem.rules):
        paths[unit] = path_in_order(paths[unit][0], node_of_part, order)
        results.append(tuple(paths))
    return results


def _can_exchange(
    problem: Problem,
    part_of_node: tuple[int, ...],
    path: NodePath,
    given: int,
    taken: int,
) -> bool:
    """Whether a path can give away one part and take another."""
    parts = {part_of_node[node] for node in path[1:]}
    if given not in parts or taken in parts:
        return False
    changed = frozenset(parts - {given} | {taken})
    return bool(part_orders(changed, problem.rules))


def _part_sets(solution: Solution) -> frozenset[PartSet]:
    parts = solution.part_of_node[solution.paths[:, 1:]]
    return frozenset(map(frozenset, parts.tolist()))


# ---------------------------------------------------------------- an arrangement for partial and full steps
# Chooses the arrangement on which partial and full steps are fast together.
#
#     stages of the search for paths             arrangement ──► a full step on it ─┐
#     stages of the search for full pipelines    arrangement ──► paths on it       ─┴─► the least mean of a step
#
# Every `full`-th step runs all parts (see the module `rules`), with the weights where the paths need them. An
# arrangement that is good for paths may be bad for full steps, so the goal is the mean over both. Each complete
# stage of the two searches proposes an arrangement. What is planned on it depends on that stage only, so a longer
# search compares all pairs of a shorter one and more: its mean is never slower.


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
        yield StepPair(plan, full_steps(plan, part, seed))
    first = paths[0]
    for full in fulls:
        if budget.spent or not all(full.partitions):
            continue
        part = budget.part(max(1, full.simulations))
        yield StepPair(_paths_on(first, full, part, seed), full)


def _paths_on(first: PathPlan, full: PathPlan, budget: Budget, seed: int) -> PathPlan:
    """Return paths for the arrangement of a full pipeline, as a plan of the same problem as `first`."""
    problem = replace(first.problem, arrangement=full.partitions)
    found = plan_paths(problem, budget, seed)
    # The bound of `first` holds for every arrangement.
    return replace(found, problem=first.problem, bound=min(first.bound, found.makespan))


# ---------------------------------------------------------------- lost nodes
# Plans again when nodes are lost or come back, in about a second.
#
#     node 7 is lost    Paths over node 7 use another replica of its part.
#                       If no replica is left, all paths skip the part until it returns.
#                       If it was a data node, the other data nodes take over its micro-batches.
#
# Weights stay where they are: no remaining node gets another part. Lost nodes keep their numbers, and
# their lanes are empty.

RECOVERY_CIRCUIT_MOVES = 20_000  # moves that find the circuits a search starts from
DEFAULT_RECOVERY_MOVES = 6_300  # moves of the search: its first three stages


def replan(
    plan: PathPlan,
    budget: Budget,
    lost: Sequence[int] = (),
    returned: Sequence[int] = (),
    seed: int = 0,
) -> PathPlan:
    """Return a plan for the nodes that are left.

    lost: nodes that have gone since the plan was made.
    returned: nodes that were lost before and come back with the parts they had.
    """
    homes = dict(plan.homes) | _parts_by_node(plan.solution)
    gone = (set(plan.lost) | set(lost)) - set(returned)
    part_of_node = np.full(
        len(plan.solution.part_of_node), NO_PART_HELD, dtype=np.int64
    )
    for node, part in homes.items():
        if node not in gone:
            part_of_node[node] = part
    _refuse_nodes(plan, part_of_node, lost, returned)
    data_nodes_before = set(plan.solution.paths[:, 0].tolist())
    total_before = len(data_nodes_before) * plan.problem.microbatches
    total = max(plan.total_microbatches, total_before)
    data_nodes = int((part_of_node == 0).sum())
    problem = replace(
        plan.problem,
        policy=_recovery_policy(plan.problem.policy),
        microbatches=max(round(total / data_nodes), 1),
    )
    bound = pass_bound(
        problem, np.bincount(part_of_node[part_of_node >= 0]), part_of_node
    )

    def starts(stage_seed: int, _budget: Budget) -> list[Solution]:
        circuits = find_circuits(
            problem, part_of_node, RECOVERY_CIRCUIT_MOVES, stage_seed
        )
        return first_solutions(problem, part_of_node, circuits, stage_seed)

    best = search_in_stages(problem, starts, budget, False, seed)
    recovered = finish_plan(problem, best, bound, budget, tuple(sorted(gone)))
    return replace(
        recovered,
        homes=tuple(sorted(homes.items())),
        total_microbatches=total,
    )


def _parts_by_node(solution: Solution) -> dict[int, int]:
    """Return the part of each node that holds one."""
    held = enumerate(solution.part_of_node.tolist())
    return {node: part for node, part in held if part != NO_PART_HELD}


def _recovery_policy(policy: Policy) -> Policy:
    """Return the policy without reserved slots: the remaining nodes may have fewer slots than paths."""
    if not policy.reserved:
        return policy
    return Policy(policy.queue_orders, ordered=policy.ordered)


def _refuse_nodes(
    plan: PathPlan, part_of_node: Ints, lost: Sequence[int], returned: Sequence[int]
) -> None:
    nodes = len(plan.solution.part_of_node)
    for change, changed in (("lost", lost), ("returned", returned)):
        for node in changed:
            if not 0 <= node < nodes:
                raise ShapeError(
                    f"node {node} is {change}, but the plan has nodes 0..{nodes - 1}"
                )
    never_lost = set(returned) - set(plan.lost)
    if never_lost:
        raise ShapeError(f"node {min(never_lost)} returned, but it was not lost")
    if not (part_of_node == 0).any():
        raise ShapeError(
            "no data node is left: no remaining node holds part 0\n"
            "  bring a data node back, or make a new plan"
        )
    if not (part_of_node > 0).any():
        raise ShapeError(
            "only data nodes are left: no remaining node holds any other part\n"
            "  bring nodes back, or make a new plan"
        )
