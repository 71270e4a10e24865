"""Plans SkipPipe's partial paths: from a cluster and a model to a schedule, and a bound for all under the same rules.

    sizes ──► circuits ──► parts of nodes ──► paths, order, starts ──► Schedule ──► simulate ──► makespan
              (formula)                    (search, simulated)                                bound, gap

One objective all the way: the end of the step, with the sums of gradients if they have bytes. `penstock.plan.paths.rules`
says what a plan keeps to, `Policy` how the nodes behave, `penstock.plan.paths.bound` what nobody can beat.

The search counts moves, not seconds (`penstock.plan.paths.staged_search`): a seed gives the same plan on every machine, and more
moves never give a worse one. Only a time limit, if one is asked for, can end it earlier; the plan then says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.cost.model import PartCost
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.plan import Facts, Plan
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Ints
from penstock.ir.timeline import Timeline
from penstock.plan.paths.allreduce import sum_seconds_by_part
from penstock.plan.paths.arrangement import (
    arrange,
    find_circuits,
    part_of_each_node,
    replica_counts,
    tilt_counts,
)
from penstock.plan.paths.bound import path_bound
from penstock.plan.paths.budget import Budget, TimeSource, never_stop
from penstock.plan.paths.part_exchange import exchange_parts
from penstock.plan.paths.path_simulator import PathTimes
from penstock.plan.paths.problem import PLANNED, Policy, Problem, expand_paths
from penstock.plan.paths.routes import random_routes, route_units
from penstock.plan.paths.rules import (
    RuleFault,
    Rules,
    check_schedule_rules,
    find_rule_faults,
    rules_from,
    rules_text,
)
from penstock.plan.paths.solution import Solution, simulate_solution
from penstock.plan.paths.staged_search import ITERATIONS, search
from penstock.schedules.size import refuse_size
from penstock.sim.simulate import simulate

CIRCUIT_MOVES = 20_000  # tried for each circuit, to begin with
MAX_NODES_TO_DROP = 100  # nodes up to which leaving out the worst is tried
BUSY_PRICES = (
    0.1,
    0.4,
    1.5,
)  # seconds of a way that one second of work already given to a node is worth


@dataclass(frozen=True, slots=True)
class PathPlan:
    """A schedule, what it takes, what none can beat, and the work of the search.

    cut_short: a time limit or an interrupt ended the search before it had done its work.
    """

    schedule: Schedule
    makespan: float  # with the sums of gradients
    bound: float
    seconds: float  # that the search took
    simulations: int  # moves that the search tried
    problem: Problem
    solution: Solution
    cut_short: bool = False
    lost: tuple[int, ...] = ()  # nodes that are gone
    homes: tuple[
        tuple[int, int], ...
    ] = ()  # (node, part) of all that were ever there, if some are gone
    whole: int = 0  # micro-batches of a step before any was lost

    @property
    def gap(self) -> float:
        """How far from the bound, as a fraction of it."""
        return self.makespan / self.bound - 1.0

    @property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each part."""
        labels = self.solution.labels
        return tuple(
            tuple(n for n, p in enumerate(labels) if p == part)
            for part in range(self.problem.body)
        )

    @property
    def timeline(self) -> Timeline:
        """As the simulator has it."""
        return simulate(self.schedule, self.problem.cost())


def plan_paths(
    cluster: Cluster,
    parts: Sequence[PartCost],
    microbatches: int,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    policy: Policy = PLANNED,
    *,
    arrangement: Sequence[Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
    data_nodes: int | None = None,
    tokens: int = 1,
    slices: int = 1,
    waves: bool = False,
    gradients: float = 0.0,
    gap: float = 0.0,
    first_gap: float = 0.0,
    iterations: int = ITERATIONS,
    seconds: float | None = None,
    seed: int = 0,
    clock: TimeSource = time.perf_counter,
    stop: Callable[[], bool] = never_stop,
) -> PathPlan:
    """The best plan found for a model of these `parts` (the head last) and so many micro-batches a data node.

    arrangement: the nodes of each part, if they are given; sizes: else how many nodes each part gets, or `data_nodes`,
    how many the first part does (what is not given of the others is searched for); tokens of a micro-batch, cut into
    `slices`; waves: every node is passed twice, down and up; gradients: bytes of a part's, summed over its replicas at
    the end; gap: seconds between two tasks on a node. The search tries `iterations` moves. It ends earlier, and the
    plan is marked `cut_short`, if a time limit of `seconds` by `clock` is given and passes, or once `stop()` is True.
    """
    budget = Budget(iterations, seconds, clock, stop)
    problem = Problem(
        cluster,
        tuple(parts),
        microbatches,
        rules,
        policy,
        tokens,
        slices,
        waves,
        gradients,
        gap,
        first_gap,
        sizes is not None,
        arrangement is not None,
    )
    nodes = len(cluster.nodes)
    if arrangement is not None:
        labels = part_of_each_node(arrangement, nodes)
        _refuse(problem, labels)
        shape = np.bincount(labels[labels >= 0], minlength=problem.body)
    else:
        labels, shape = None, np.array(_sizes(problem, sizes, data_nodes, nodes))
    return best_plan(problem, labels, shape, budget, seed)


def best_plan(
    problem: Problem, labels: Ints | None, shape: Ints, budget: Budget, seed: int
) -> PathPlan:
    """The best plan that a search finds for a problem. `labels`: the part of each node, if the arrangement is given."""
    actions = (
        2 * (problem.hops + 2) * problem.microbatches * problem.slices * int(shape[0])
    )
    refuse_size(
        actions,
        f"{shape[0]} data nodes with microbatches={problem.microbatches} slices={problem.slices}",
    )
    bound = path_bound(problem, shape, labels)
    solution = search(
        problem,
        lambda turn: _first_solutions(problem, labels, shape, turn),
        budget,
        labels is None,
        seed,
    )
    return finish_plan(problem, solution, bound, budget)


def _first_solutions(
    problem: Problem, labels: Ints | None, shape: Ints, seed: int
) -> list[Solution]:
    """To begin with: on the arrangement that is given, else on some that suit circuits, and some that suit routes."""
    moves = CIRCUIT_MOVES * min(problem.traffic.nodes, 200) // 4
    if labels is not None:
        return first_solutions(
            problem, labels, find_circuits(problem, labels, moves, seed), seed
        )
    few = (
        not problem.policy.reserved
        and problem.traffic.nodes <= MAX_NODES_TO_DROP
        and problem.hops > 0
    )
    sizes = tuple(shape.tolist())
    solutions: list[Solution] = []
    for tried in dict.fromkeys(
        [
            sizes,
            tilt_counts(sizes, problem.hops) if few and not problem.sized else sizes,
        ]
    ):
        arrangement, circuits = arrange(problem, tried, moves, seed)
        solutions += first_solutions(problem, arrangement, circuits, seed)
        solutions += (
            route_solutions(problem, exchange_parts(problem, arrangement, seed))
            if few
            else []
        )
    return solutions


def first_solutions(
    problem: Problem, labels: Ints, circuits: Ints, seed: int
) -> list[Solution]:
    """Lanes, if they meet all parts equally often; where slots are free for all, routes as well."""
    met = np.bincount(labels[circuits[:, 1:]].ravel(), minlength=problem.body)[1:]
    alive = np.bincount(labels[labels > 0], minlength=problem.body)[1:] > 0
    solutions = (
        [circuit_solution(problem, labels, circuits)]
        if len(set(met[alive].tolist())) <= 1
        else []
    )
    if problem.policy.reserved:
        return solutions or [
            replace(
                circuit_solution(problem, labels, circuits),
                paths=tuple(random_routes(problem, labels, seed)),
            )
        ]
    return [*solutions, *route_solutions(problem, labels)]


def route_solutions(problem: Problem, labels: Ints) -> list[Solution]:
    """Every unit over the cheapest nodes, for several prices of a node that is busy."""
    first = circuit_solution(problem, labels, np.zeros((0, 1), dtype=np.int64))
    return [
        replace(first, paths=tuple(route_units(problem, labels, weight)))
        for weight in BUSY_PRICES
    ]


def finish_plan(
    problem: Problem,
    solution: Solution,
    bound: float,
    budget: Budget,
    lost: tuple[int, ...] = (),
) -> PathPlan:
    """A solution as a plan, timed by the simulator."""
    schedule = schedule_from(problem, solution, simulate_solution(problem, solution))
    makespan = step_seconds(problem, schedule, np.array(solution.labels))
    assert bound <= makespan * (1 + 1e-9), "a bound above a plan"
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


def step_seconds(problem: Problem, schedule: Schedule, labels: Ints) -> float:
    """The makespan by the simulator, with the sums of gradients after each part's last backward."""
    timeline = simulate(schedule, problem.cost())
    if problem.gradients <= 0:
        return timeline.makespan
    sums = sum_seconds_by_part(problem.traffic, labels, problem.body, problem.gradients)
    table = schedule.table
    ends = np.zeros(schedule.ranks)
    np.maximum.at(ends, table.rank, timeline.end)
    busy = (ends > 0) & (labels >= 0)
    return max(timeline.makespan, float((ends[busy] + sums[labels[busy]]).max()))


def circuit_solution(problem: Problem, labels: Ints, circuits: Ints) -> Solution:
    """Every micro-batch of a data node on that node's circuit."""
    paths = tuple(
        tuple(circuit) for _ in range(problem.units) for circuit in circuits.tolist()
    )
    return Solution(
        tuple(labels.tolist()),
        paths,
        problem.policy.queue_orders[0],
        problem.stagger(problem.policy.staggers[0]),
    )


def rule_faults(plan: PathPlan) -> tuple[RuleFault, ...]:
    """The rules that a plan breaks: none."""
    problem = plan.problem
    gone = [part for part in range(problem.body) if part not in plan.solution.labels]
    return find_rule_faults(
        plan.schedule,
        problem.body,
        problem.rules,
        problem.traffic.slots.tolist(),
        plan.timeline,
        gone,
    )


def paths_plan(plan: PathPlan) -> Plan:
    """As a plan.json keeps it, with the figures that chose it."""
    problem = plan.problem
    why: Facts = (
        ("makespan", plan.makespan),
        ("lower_bound", plan.bound),
        ("gap", plan.gap),
        (
            "bound_holds_for",
            f"every plan under these rules{' on this arrangement' if problem.arranged else ''}",
        ),
        ("simulations", plan.simulations),
        ("cut_short", plan.cut_short),
        ("skipped", problem.body - 1 - problem.hops),
        ("slices", problem.slices),
        ("waves", problem.waves),
        ("turn", plan.solution.queue_order.name.lower()),
        ("rules", rules_text(problem.rules)),
        ("slots", " ".join(map(str, problem.traffic.slots.tolist()))),
    )
    return Plan(plan.schedule, "paths", (), why)


def check_rules(plan: Plan, texts: Sequence[str] = ()) -> Rules | None:
    """Refuses a plan that breaks the rules it was made by, or those given; None: it names none and none are given."""
    facts, schedule = plan.facts, plan.schedule
    kept = facts.get("rules")
    if not isinstance(kept, str) and not texts:
        return None
    rules = rules_from([*(kept.split() if isinstance(kept, str) else ()), *texts])
    body = schedule.parts // 2 if facts.get("waves") is True else schedule.parts - 1
    lost = sorted(set(range(1, body)) - {stage.part for stage in schedule.stages})
    slots = facts.get("slots")
    check_schedule_rules(
        schedule,
        body,
        rules,
        [int(word) for word in slots.split()] if isinstance(slots, str) else None,
        lost,
    )
    return rules


# ---------------------------------------------------------------- from a solution to a schedule
def schedule_from(problem: Problem, solution: Solution, flow: PathTimes) -> Schedule:
    """The three tables: stages by node, heads (or the ways up) after them, lanes in the order of the starts."""
    assert np.isfinite(flow.makespan), "micro-batches wait for each other in a circle"
    labels = np.array(solution.labels)
    nodes, parts = expand_paths(
        problem, np.array(solution.paths, dtype=np.int64), labels
    )
    stages: list[Stage] = []
    number: dict[tuple[int, int], int] = {}
    for node, part in enumerate(labels.tolist()):
        for piece in _pieces(problem, part):
            number[node, piece] = len(stages)
            stages.append(Stage(node, piece))
    cuts = problem.cuts if problem.slices > 1 else ()
    table = [
        MicroBatch(
            tuple(number[at] for at in zip(row, pieces, strict=True)),
            problem.tokens,
            cuts,
        )
        for row, pieces in zip(nodes.tolist(), parts.tolist(), strict=True)
    ]
    return schedule_of(stages, table, _lanes(flow, nodes, table))


def _pieces(problem: Problem, part: int) -> tuple[int, ...]:
    """The parts of the schedule that a node with a part of the model holds."""
    if part < 0:
        return ()
    if problem.waves:
        return part, 2 * problem.body - 1 - part
    return (0, problem.body) if part == 0 else (part,)


def _lanes(flow: PathTimes, nodes: Ints, table: list[MicroBatch]) -> list[list[Action]]:
    lanes: list[list[Action]] = [[] for _ in range(len(flow.last))]
    _, length, slices, _ = flow.start.shape
    start = flow.start.ravel()
    # of equal starts, what lasts no time comes first: an F before its own B
    back = np.broadcast_to(np.arange(2), flow.start.shape).ravel()
    for at in np.lexsort((back, start)).tolist():
        m, rest = divmod(at, length * slices * 2)
        p, rest = divmod(rest, slices * 2)
        piece, kind = divmod(rest, 2)
        lanes[nodes[m, p]].append(
            Action(Op.B if kind else Op.F, table[m].path[p], m, piece)
        )
    return lanes


# ---------------------------------------------------------------- sizes
def _sizes(
    problem: Problem, sizes: Sequence[int] | None, data: int | None, nodes: int
) -> tuple[int, ...]:
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
        raise ShapeError("a part without a node; every part needs one at least")
    return tuple(sizes)


def _refuse(problem: Problem, labels: Ints) -> None:
    if labels.max() >= problem.body:
        raise ShapeError(
            f"the arrangement has {labels.max() + 1} parts, but the model has {problem.body}"
        )
    missing = [part for part in range(problem.body) if not (labels == part).any()]
    if missing:
        raise ShapeError(
            f"part {missing[0]} is on no node; every part needs one at least"
        )
