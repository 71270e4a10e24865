"""Plans SkipPipe's partial paths: from a cluster and a model to a schedule, with a lower bound.

    sizes ──► circuits ──► parts of nodes ──► paths, order, starts ──► Schedule ──► simulate ──► makespan
              (formula)                    (search, simulated)                                bound, gap

All steps share one objective: the end of the training step, including the sums of gradients if
they have bytes. The module `rules` has the rules of a plan, `Policy` says how the nodes behave,
and the module `bound` has the lower bound for all plans under the same rules.

The search counts moves, not seconds (see the module `stages`): a seed gives the same plan on
every machine, and more moves never give a worse plan. Only a time limit, if the caller asks for
one, can end the search earlier; the plan then says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost.cost import PlannedSumsCost
from penstock.errors import ShapeError
from penstock.ir.action import Action, backward, forward
from penstock.ir.plan import Facts, Plan
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.sums import SumPlan
from penstock.ir.table import Ints
from penstock.ir.timeline import Timeline
from penstock.plan.paths.bound import pass_bound
from penstock.plan.paths.divide import (
    cell_solution,
    cut_into_cells,
    near_nodes,
    site_solution,
)
from penstock.plan.paths.problem import (
    ModelParts,
    Problem,
    QueueOrder,
    waved_partition,
)
from penstock.plan.paths.rules import (
    RuleFault,
    Rules,
    check_schedule_rules,
    find_rule_faults,
    rules_from,
    rules_text,
)
from penstock.plan.paths.search import Budget
from penstock.plan.paths.simulator import (
    PathTimes,
    Solution,
    simulate_solution,
    solution_of,
    tasks_in_order,
    visits_of,
)
from penstock.plan.paths.stages import (
    MAX_NODES_AT_ONCE,
    cell_stage_moves,
    search_in_stages,
    site_stage_moves,
)
from penstock.plan.paths.starts import (
    arrange,
    exchange_parts,
    find_circuits,
    fit_nodes,
    part_of_each_node,
    random_routes,
    replica_counts,
    route_units,
)
from penstock.schedules.facts import refuse_if_too_large
from penstock.sim.simulate import simulate
from penstock.sim.sums import plan_sums

CIRCUIT_MOVES_PER_CIRCUIT = 20_000  # moves that find the first circuits
MAX_CIRCUIT_NODES = 200  # more nodes get no more of these moves
MAX_NODES_TO_DROP = 100  # largest cluster in which the search may leave out bad nodes
SITE_SHARE = 0.8  # share of the moves that plan sites, before the whole is improved
NO_CIRCUITS = np.zeros((0, 1), dtype=np.int64)
# Seconds of travel that one second of work already given to a node counts for.
BUSY_PRICES = (0.1, 0.4, 1.5)


@dataclass(frozen=True, slots=True)
class PathPlan:
    """A schedule with its makespan, its lower bound, and the work of the search.

    makespan: seconds of a step, with the sums of gradients; the mean of a pass if a step has several.
    bound: seconds that no plan under the same rules can beat.
    seconds: how long the search took.
    simulations: moves that the search tried.
    cut_short: whether a time limit or an interrupt ended the search before it had done its work.
    lost: nodes that are gone.
    homes: (node, part) of all nodes that were ever there, if some are gone.
    total_microbatches: micro-batches of a step before any node was lost.
    """

    schedule: Schedule
    makespan: float
    bound: float
    seconds: float
    simulations: int
    problem: Problem
    solution: Solution
    cut_short: bool = False
    lost: tuple[int, ...] = ()
    homes: tuple[tuple[int, int], ...] = ()
    total_microbatches: int = 0

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a fraction of the bound."""
        return self.makespan / self.bound - 1.0

    @property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each part."""
        members: list[list[int]] = [[] for _ in range(self.problem.body)]
        for node, part in enumerate(self.solution.part_of_node.tolist()):
            if part >= 0:
                members[part].append(node)
        return tuple(map(tuple, members))

    @property
    def timeline(self) -> Timeline:
        """The timeline of the schedule in `penstock.sim.simulate`."""
        return simulate(self.schedule, self.problem.cost())


def plan_paths(
    problem: Problem,
    budget: Budget,
    seed: int = 0,
    stages: list[PathPlan] | None = None,
) -> PathPlan:
    """Return the best plan that a search finds for a problem.

    budget: how long the search goes on. If a time limit or an interrupt ends it earlier, the plan is
        marked as `cut_short`.
    stages: a list that takes the plan of each complete stage of the search.
    """
    part_of_node = given_parts(problem)
    if part_of_node is None:
        shape = np.array(_sizes(problem))
    else:
        shape = np.bincount(part_of_node[part_of_node >= 0], minlength=problem.body)
    per_data_node = 2 * (problem.hops + 2) * problem.microbatches * problem.slices
    refuse_if_too_large(
        per_data_node * int(shape[0]),
        f"{shape[0]} data nodes with microbatches={problem.microbatches} slices={problem.slices}",
    )
    bound = pass_bound(problem, shape, part_of_node)

    def starts(stage_seed: int, stage_budget: Budget) -> list[Solution]:
        return _start_solutions(problem, part_of_node, shape, stage_budget, stage_seed)

    free = part_of_node is None
    site_stages = None
    if free and may_divide(problem) and cut_into_cells(problem, int(shape[0])):
        site_stages = cell_stage_moves
    elif free and has_sites(problem):
        site_stages = site_stage_moves

    def note(solution: Solution) -> None:
        if stages is not None:
            stages.append(finish_plan(problem, solution, bound, budget))

    solution = search_in_stages(problem, starts, budget, free, seed, site_stages, note)
    return finish_plan(problem, solution, bound, budget)


# ---------------------------------------------------------------- solutions to start from
def _start_solutions(
    problem: Problem, part_of_node: Ints | None, shape: Ints, budget: Budget, seed: int
) -> list[Solution]:
    """Return solutions to start from, on the given arrangement or on several that are chosen here.

    Some of the chosen arrangements suit circuits, others suit routes.
    """
    circuits_at_most = min(problem.arrays.nodes, MAX_CIRCUIT_NODES)
    moves = CIRCUIT_MOVES_PER_CIRCUIT * circuits_at_most // 4
    if part_of_node is not None:
        circuits = find_circuits(problem, part_of_node, moves, seed)
        return first_solutions(problem, part_of_node, circuits, seed)
    even_sizes = tuple(shape.tolist())
    by_cells = None
    if may_divide(problem):
        by_cells = cell_solution(problem, even_sizes, BUSY_PRICES, budget, seed)
    if by_cells is not None:
        return [by_cells]
    may_drop_nodes = (
        not problem.policy.reserved
        and problem.arrays.nodes <= MAX_NODES_TO_DROP
        and problem.hops > 0
    )
    arrangement, circuits = arrange(problem, even_sizes, moves, seed)
    arrangement, circuits = fit_nodes(problem, arrangement, circuits)
    solutions = first_solutions(problem, arrangement, circuits, seed)
    if may_drop_nodes:
        solutions += _exchanged_solutions(problem, arrangement, seed)
    if has_sites(problem):
        site_budget = budget.part(int(SITE_SHARE * budget.iterations))
        by_sites = site_solution(problem, even_sizes, BUSY_PRICES, site_budget, seed)
        budget.count(site_budget)
        if by_sites is not None:
            solutions.append(by_sites)
    return solutions


def may_divide(problem: Problem) -> bool:
    """Whether a cluster is so large that its cells or sites are planned one by one, if it has any."""
    is_large = problem.arrays.nodes > MAX_NODES_AT_ONCE
    may_arrange = problem.sizes is None and not problem.policy.reserved
    return is_large and may_arrange and problem.hops > 0


def has_sites(problem: Problem) -> bool:
    """Whether a cluster is planned site by site, unless it has cells."""
    return may_divide(problem) and len(near_nodes(problem)) > 1


def _exchanged_solutions(
    problem: Problem, arrangement: Ints, seed: int
) -> list[Solution]:
    """Return solutions for arrangements that suit routes, and for one that suits sums of gradients."""
    solutions = []
    for with_sums in (False, True) if problem.has_sums else (False,):
        exchanged = exchange_parts(problem, arrangement, seed, with_sums)
        exchanged, _ = fit_nodes(problem, exchanged, NO_CIRCUITS)
        solutions += route_solutions(problem, exchanged)
    return solutions


def first_solutions(
    problem: Problem, part_of_node: Ints, circuits: Ints, seed: int
) -> list[Solution]:
    """Return a solution along the circuits and, unless slots are reserved, solutions along routes.

    The circuits only count if they visit all parts equally often. If slots are reserved and they do
    not, the paths are random.
    """
    visits = np.bincount(part_of_node[circuits[:, 1:]].ravel(), minlength=problem.body)
    alive = np.unique(part_of_node[part_of_node > 0])
    even = len(set(visits[alive].tolist())) <= 1
    reserved = problem.policy.reserved
    solutions = []
    if even:
        paths = circuits.tolist() * problem.units
        solutions.append(solution_of(problem, part_of_node, paths))
    elif reserved:
        paths = random_routes(problem, part_of_node, seed)
        solutions.append(solution_of(problem, part_of_node, paths))
    return solutions if reserved else solutions + route_solutions(problem, part_of_node)


def route_solutions(problem: Problem, part_of_node: Ints) -> list[Solution]:
    """Return solutions in which every unit visits the cheapest nodes, for several prices of busy nodes."""
    solutions = []
    for price in BUSY_PRICES:
        paths = route_units(problem, part_of_node, price)
        solutions.append(solution_of(problem, part_of_node, paths))
    return solutions


# ---------------------------------------------------------------- from a solution to a plan
def finish_plan(
    problem: Problem,
    solution: Solution,
    bound: float,
    budget: Budget,
    lost: tuple[int, ...] = (),
) -> PathPlan:
    """Return a solution as a plan, timed by `penstock.sim.simulate`."""
    times = simulate_solution(problem, solution)
    schedule = schedule_from(problem, solution, times)
    timeline = simulate(schedule, problem.cost())
    makespan = problem.mean_pass(float(timeline.end.max()), timeline.makespan)
    assert bound <= makespan * (1 + 1e-9), "the plan beats its lower bound"
    return PathPlan(
        schedule,
        makespan,
        min(bound, makespan),
        budget.elapsed,
        budget.used,
        problem,
        solution,
        budget.cut_short,
        lost,
    )


def rule_faults(plan: PathPlan) -> tuple[RuleFault, ...]:
    """Return the rules that a plan breaks. A correct search returns plans that break none."""
    problem = plan.problem
    part_of_node = plan.solution.part_of_node
    lost_parts = [part for part in range(problem.body) if part not in part_of_node]
    return find_rule_faults(
        plan.schedule,
        problem.body,
        problem.rules,
        _slots_of(plan).tolist(),
        plan.timeline,
        lost_parts,
    )


def _slots_of(plan: PathPlan) -> Ints:
    """Return how many micro-batches each node can hold with its part."""
    return plan.problem.arrays.slots_with(plan.solution.part_of_node)


def paths_plan(
    plan: PathPlan,
    model: ModelParts | None = None,
    rotation: Sequence[PathPlan] = (),
    full: PathPlan | None = None,
    sum_messages: str = "float32",
) -> Plan:
    """Return the plan as a plan.json stores it, with the figures that led to it.

    model: the model that was planned for, if it is known. Its layers are then part of the plan.
    rotation: further plans on the same arrangement, which steps take in turn with the first one.
    full: a plan on the same arrangement for steps that run all parts.
    sum_messages: the type in which sums of gradients travel, as `penstock.cost.profile` prices it.
    """
    problem = plan.problem
    bound_holds_for = "every plan under these rules"
    if problem.arrangement is not None:
        bound_holds_for += " on this arrangement"
    orders = {QueueOrder(order).name.lower() for order in plan.solution.orders}
    why: Facts = (
        ("makespan", plan.makespan),
        ("lower_bound", plan.bound),
        ("gap", plan.gap),
        ("bound_holds_for", bound_holds_for),
        ("simulations", plan.simulations),
        ("cut_short", plan.cut_short),
        ("skipped", problem.body - 1 - problem.hops),
        ("slices", problem.slices),
        ("waves", problem.waves),
        ("turn", " ".join(sorted(orders))),
        ("rules", rules_text(problem.rules)),
        ("slots", " ".join(map(str, _slots_of(plan).tolist()))),
        ("sums", "planned" if problem.planned_sums else "ring"),
        ("sum_messages", sum_messages),
        ("passes", problem.passes),
    )
    if problem.has_sums:
        why = (*why, ("last_backward", float(plan.timeline.end.max())))
    if rotation:
        slowest = max(other.makespan for other in rotation)
        why = (*why, ("rotation_makespan", slowest))
    if full is not None:
        why = (*why, ("full_makespan", full.makespan))
        if problem.has_sums:
            last = float(full.timeline.end.max())
            why = (*why, ("full_last_backward", last))
    partition: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    if model is not None:
        partition = model.partition
        if problem.waves:
            partition = waved_partition(partition)
        recompute = model.recompute
        why = (*why, *model.facts)
    return Plan(
        plan.schedule,
        "paths",
        partition,
        why,
        recompute,
        rotation=tuple(other.schedule for other in rotation),
        full=None if full is None else full.schedule,
        sums=planned_sums_of(plan),
    )


def planned_sums_of(plan: PathPlan) -> tuple[SumPlan, ...]:
    """Return how the replicas of each part sum their gradients; empty if the backend decides."""
    cost = plan.problem.cost()
    if not isinstance(cost, PlannedSumsCost):
        return ()
    return plan_sums(plan.timeline, cost)


def check_rules(plan: Plan) -> Rules | None:
    """Raise a `ScheduleError` if a plan breaks the rules that it was planned with; return them, or None without any."""
    facts = plan.facts
    schedule = plan.schedule
    own_rules = facts.get("rules")
    if not isinstance(own_rules, str):
        return None
    rules = rules_from(own_rules.split())
    body = schedule.parts // 2 if facts.get("waves") is True else schedule.parts - 1
    held = {stage.part for stage in schedule.stages}
    lost_parts = sorted(set(range(1, body)) - held)
    slots = None
    slots_text = facts.get("slots")
    if isinstance(slots_text, str):
        slots = [int(count) for count in slots_text.split()]
    check_schedule_rules(schedule, body, rules, slots, lost_parts)
    return rules


# ---------------------------------------------------------------- from a solution to a schedule
def schedule_from(problem: Problem, solution: Solution, times: PathTimes) -> Schedule:
    """Return the schedule of a simulated solution.

    Stages are listed by node; the head, or the way up of a wave, follows the other stage of its
    node. Lanes have their actions in order of their starts.
    """
    assert np.isfinite(times.makespan), "the micro-batches deadlock"
    visits = visits_of(problem, solution)
    stages: list[Stage] = []
    stage_number: dict[tuple[int, int], int] = {}
    for node, part in enumerate(solution.part_of_node.tolist()):
        for piece in problem.pieces_of(part):
            stage_number[node, piece] = len(stages)
            stages.append(Stage(node, piece))
    cuts = problem.cuts if problem.slices > 1 else ()
    microbatches = []
    for row, pieces in zip(visits.nodes.tolist(), visits.parts.tolist(), strict=True):
        path = [stage_number[visit] for visit in zip(row, pieces, strict=True)]
        microbatches.append(MicroBatch(tuple(path), problem.tokens, cuts))
    return schedule_of(stages, microbatches, _lanes(times, visits.nodes, microbatches))


def _lanes(
    times: PathTimes, nodes: Ints, microbatches: list[MicroBatch]
) -> list[list[Action]]:
    """Return the actions of each node in order of their starts."""
    lanes: list[list[Action]] = [[] for _ in range(len(times.last))]
    _, length, slices, _ = times.start.shape
    for task in tasks_in_order(times):
        number, rest = divmod(task, length * slices * 2)
        position, rest = divmod(rest, slices * 2)
        piece, kind = divmod(rest, 2)
        stage = microbatches[number].path[position]
        direction = backward if kind else forward
        action = direction(stage, number, piece)
        lanes[nodes[number, position]].append(action)
    return lanes


# ---------------------------------------------------------------- the arrangement and the sizes that are given
def given_parts(problem: Problem) -> Ints | None:
    """Return the part of each node if the arrangement is given."""
    if problem.arrangement is None:
        return None
    part_of_node = part_of_each_node(problem.arrangement, problem.arrays.nodes)
    if part_of_node.max() >= problem.body:
        raise ShapeError(
            f"the arrangement has {part_of_node.max() + 1} parts, but the model has {problem.body}"
        )
    missing = [part for part in range(problem.body) if part not in part_of_node]
    if missing:
        raise ShapeError(
            f"part {missing[0]} is on no node; every part needs at least one"
        )
    too_small = np.flatnonzero(problem.arrays.slots_with(part_of_node) < 1)
    if len(too_small):
        node = int(too_small[0])
        raise ShapeError(
            f"part {part_of_node[node]} does not fit into the memory of node {node}; "
            "give it another part, or make more parts"
        )
    return part_of_node


def _sizes(problem: Problem) -> tuple[int, ...]:
    """Return the number of nodes of each part: those given, or balanced ones."""
    nodes = problem.arrays.nodes
    sizes = problem.sizes
    data = problem.data_nodes
    if sizes is None:
        return replica_counts(nodes, problem.body, problem.hops, data)
    if data not in (None, sizes[0] if sizes else None):
        raise ShapeError(f"{data} data nodes, but the first of the sizes is {sizes[0]}")
    if len(sizes) != problem.body:
        raise ShapeError(
            f"there are sizes for {len(sizes)} parts, but the model has {problem.body}"
        )
    if sum(sizes) != nodes:
        raise ShapeError(
            f"the sizes add up to {sum(sizes)} nodes, but the cluster has {nodes}"
        )
    if min(sizes) < 1:
        raise ShapeError("a part has no node; every part needs at least one")
    return tuple(sizes)
