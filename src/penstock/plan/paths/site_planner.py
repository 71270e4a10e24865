"""Plans the nodes of a site as if there were no others, and joins the plans of all sites.

    site      nodes 8 9 10 11, one data node, whose units visit the parts 1 2 4
    alone     nodes 0 1 2 3: first solutions, annealing, lanes       another site that is alike takes the same plan
    joined    the paths of all sites, with the numbers that the nodes have in the whole cluster

Paths of different sites never meet. So the step ends with the slowest site, and further searches
only go to that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.ir.table import Ints
from penstock.plan.paths.arrangement import (
    NO_PART_HELD,
    arrange,
    fit_nodes,
    replica_counts,
)
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.circuits import circuit_terms, improve_circuits
from penstock.plan.paths.improve import improve_solution
from penstock.plan.paths.move_search import HOT, WARM
from penstock.plan.paths.part_exchange import MAX_EXCHANGE_MOVES, exchange_parts
from penstock.plan.paths.path_simulator import NO_TURN, QueueOrder
from penstock.plan.paths.problem import Problem, numbers_of_nodes, positions_of
from penstock.plan.paths.routes import cheapest_route, route_units
from penstock.plan.paths.solution import (
    Delays,
    NodePath,
    Solution,
    Turns,
    choose_queueing,
    solution_value,
)

MAX_SITE_NODES = 24  # nodes that one annealing improves at once
SITE_CIRCUIT_MOVES = 20_000
MIN_EXCHANGE_MOVES = 200
SITE_MOVES = 6_000  # moves that improve the plan of a site
MAX_FAILED_REFINEMENTS = 100  # searches for the slowest site in a row without a gain
SITE_RESTART_MOVES = 4_000  # moves of such a search from scratch
RESTART_TURNS = 3  # one search of this many starts from the best plan so far
REFINEMENT_MOVES = 6_000  # moves of that one
# Sites with too few nodes for their data nodes take longer by about this power of what is missing.
CROWDING_POWER = 1.5
PartDeal = tuple[tuple[int, ...], ...]  # the parts of each unit of a data node


class SitePlan(NamedTuple):
    """A plan of one site, with nodes counted from 0, and the end of its step."""

    problem: Problem
    solution: Solution
    seconds: float
    deal: tuple[PartDeal, ...]


class SitePlanner:
    """Plans sites, and sites that are alike only once."""

    def __init__(
        self,
        problem: Problem,
        sites: int,
        prices: Sequence[float],
        budget: Budget,
        seed: int,
    ) -> None:
        self.problem = problem
        self.prices = prices
        self.budget = budget
        self.seed = seed
        self.exchange_moves = max(MAX_EXCHANGE_MOVES // sites, MIN_EXCHANGE_MOVES)
        self.known: dict[object, SitePlan] = {}

    def fits(self, nodes: Ints, deal: Sequence[PartDeal]) -> bool:
        """Whether a site has enough nodes for these data nodes and all parts that they visit."""
        return len(deal) + len(_visits(deal)) <= len(nodes)

    def plan(
        self, nodes: Ints, deal: Sequence[PartDeal], moves: int = SITE_MOVES
    ) -> SitePlan:
        """Return a plan for these nodes, with one data node for each deal."""
        key = (tuple(deal), numbers_of_nodes(self.problem, nodes), moves)
        if key not in self.known:
            problem = site_problem(self.problem, nodes)
            self.known[key] = self._search(problem, deal, moves, 0)
        return self.known[key]

    def plan_again(self, plan: SitePlan, turn: int) -> SitePlan:
        """Return the plan of the same site after another search, from scratch or from the plan itself."""
        if turn % RESTART_TURNS:
            return self._search(plan.problem, plan.deal, SITE_RESTART_MOVES, turn)
        return self._improve(plan, REFINEMENT_MOVES, turn, WARM)

    def _search(
        self, problem: Problem, deal: Sequence[PartDeal], moves: int, turn: int
    ) -> SitePlan:
        """Return the plan of a search from scratch. Another turn makes other moves."""
        first = self._first_solution(problem, deal, self.seed + turn)
        seconds = solution_value(problem, first)[0]
        simple = SitePlan(problem, first, seconds, tuple(deal))
        return self._improve(simple, moves, turn, HOT)

    def _improve(self, plan: SitePlan, moves: int, turn: int, hot: float) -> SitePlan:
        """Return the plan after a search that starts from it."""
        solution = improve_solution(
            plan.problem,
            plan.solution,
            self.budget,
            True,
            self.seed + turn,
            moves,
            hot,
        )
        seconds = solution_value(plan.problem, solution)[0]
        return plan._replace(solution=solution, seconds=seconds)

    def _first_solution(
        self, problem: Problem, deal: Sequence[PartDeal], seed: int
    ) -> Solution:
        """Return the best of several simple solutions for the nodes of one site."""
        # Successive units belong to different data nodes.
        dealt = [parts[unit] for unit in range(problem.units) for parts in deal]
        solutions = []
        for labels in self._arrangements(problem, deal, seed):
            for price in self.prices:
                paths = route_units(problem, labels, price, dealt)
                solutions.append(_solution_of(problem, labels, paths))
        if all(len(set(parts)) == 1 for parts in deal):
            lanes = _lane_solution(problem, [parts[0] for parts in deal], seed)
            if lanes is not None:
                solutions.append(lanes)
        queued = [choose_queueing(problem, solution) for solution in solutions]
        return min(queued, key=lambda solution: solution_value(problem, solution))

    def _arrangements(
        self, problem: Problem, deal: Sequence[PartDeal], seed: int
    ) -> Iterator[Ints]:
        """Yield arrangements that hold all parts that these data nodes visit."""
        nodes = problem.traffic.nodes
        visits = _visits(deal)
        circuits: Ints = np.zeros((0, 1), dtype=np.int64)
        labels: Ints
        if len(visits) == problem.body - 1:
            sizes = replica_counts(nodes, problem.body, problem.hops, len(deal))
            labels, circuits = arrange(problem, sizes, SITE_CIRCUIT_MOVES, seed)
            labels, _ = fit_nodes(problem, labels, circuits)
            yield labels
        else:
            order = np.random.default_rng(seed).permutation(nodes)
            labels = np.empty(nodes, dtype=np.int64)
            labels[order] = _parts_for(visits, nodes, len(deal))
        exchanged = exchange_parts(
            problem, labels, seed, problem.has_sums, self.exchange_moves
        )
        exchanged, _ = fit_nodes(problem, exchanged, circuits)
        yield exchanged


def _visits(deal: Sequence[PartDeal]) -> Counter[int]:
    """Return how often each part is visited."""
    return Counter(part for units in deal for parts in units for part in parts)


def _parts_for(visits: Counter[int], nodes: int, data: int) -> list[int]:
    """Return a part for each node: part 0 for the data nodes, the others in proportion to their visits.

    >>> _parts_for(Counter({1: 12, 4: 6}), nodes=5, data=1)
    [0, 1, 4, 1, 1]
    """
    parts = [0] * data + sorted(visits)
    replicas = Counter(parts)
    while len(parts) < nodes:
        part = max(visits, key=lambda part: (visits[part] / replicas[part], -part))
        parts.append(part)
        replicas[part] += 1
    return parts


def refine_slowest(planner: SitePlanner, plans: list[SitePlan]) -> None:
    """Search for better plans of the slowest site, and all that are like it, until nothing is gained any more."""
    failed = 0
    for turn in count(1):
        if planner.budget.spent or failed >= MAX_FAILED_REFINEMENTS:
            return
        slowest = max(plans, key=lambda plan: plan.seconds)
        tried = planner.plan_again(slowest, turn)
        better = min(slowest, tried, key=lambda plan: plan.seconds)
        failed = 0 if better.seconds < slowest.seconds else failed + 1
        for number, plan in enumerate(plans):
            if plan is slowest:
                plans[number] = better


def join_plans(
    problem: Problem, sites: Sequence[Ints], plans: Sequence[SitePlan]
) -> Solution:
    """Return the plans of all sites as one solution."""
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    paths: list[NodePath] = []
    delays: list[Delays] = []
    orders: list[QueueOrder] = []
    turns: list[Turns] = []
    free = (NO_TURN,) * 2 * positions_of(problem) * problem.slices
    no_delays = (0.0,) * 2 * positions_of(problem)
    for nodes, plan in zip(sites, plans, strict=True):
        local = plan.solution
        units = len(local.paths)
        labels[nodes] = local.labels
        paths += [tuple(nodes[list(path)].tolist()) for path in local.paths]
        delays += local.delays or (no_delays,) * units
        orders += local.own_orders or (local.queue_order,) * units
        turns += local.turns or (free,) * units
    return Solution(
        tuple(labels.tolist()),
        tuple(paths),
        orders[0],
        problem.stagger(problem.policy.staggers[0]),
        tuple(delays),
        any(plan.solution.careful for plan in plans),
        tuple(orders),
        tuple(turns),
    )


def site_problem(problem: Problem, nodes: Ints) -> Problem:
    """Return the problem of these nodes alone."""
    cluster = problem.cluster
    numbers = nodes.tolist()
    alone = Cluster(
        tuple(cluster.nodes[node] for node in numbers),
        tuple(tuple(cluster.latency[a][b] for b in numbers) for a in numbers),
        tuple(tuple(cluster.bandwidth[a][b] for b in numbers) for a in numbers),
        cluster.serial,
    )
    return replace(problem, cluster=alone)


def crowded_trip(problem: Problem, nodes: Ints, data: int) -> float:
    """Return about how long a path over random nodes of a site takes, if the site has `data` data nodes."""
    terms = circuit_terms(problem)
    length = problem.hops + 1
    links = float(terms.pair[np.ix_(nodes, nodes)].mean()) * length
    hop = float(terms.hop[nodes].mean())
    trip = links + float(terms.data[nodes].mean()) + problem.hops * hop
    crowding = max(data * length / len(nodes), 1.0)
    return float(trip * crowding**CROWDING_POWER)


def _solution_of(problem: Problem, labels: Ints, paths: Sequence[NodePath]) -> Solution:
    queue_order = problem.policy.queue_orders[0]
    return Solution(tuple(labels.tolist()), tuple(paths), queue_order)


def _lane_solution(
    problem: Problem, designs: Sequence[tuple[int, ...]], seed: int
) -> Solution | None:
    """Return a solution in which most data nodes have hops of their own.

    If there are too few nodes, the last data nodes use those of the others. If even that is
    impossible, return None.
    """
    nodes = problem.traffic.nodes
    length = problem.hops + 1
    lanes = min(len(designs), nodes // length)
    order = np.random.default_rng(seed).permutation(nodes)
    circuits, spare = improve_circuits(
        problem,
        order[: lanes * length].reshape(lanes, length),
        order[lanes * length :],
        None,
        SITE_CIRCUIT_MOVES,
        seed,
    )
    labels = np.full(nodes, NO_PART_HELD, dtype=np.int64)
    labels[circuits[:, 0]] = 0
    for circuit, design in zip(circuits, designs, strict=False):
        labels[circuit[1:]] = design
    late = designs[lanes:]
    if len(spare) < len(late):
        return None
    labels[spare[: len(late)]] = 0
    wanted = [part for design in late for part in design] or list(designs[0])
    for number, node in enumerate(spare[len(late) :].tolist()):
        labels[node] = wanted[number % len(wanted)]
    paths = [tuple(circuit) for circuit in circuits.tolist()] * problem.units
    if any(not (labels == part).any() for part in wanted):
        return None
    loads = np.zeros(nodes)
    loads[circuits[:, 1:].ravel()] = problem.units
    for _ in range(problem.units):
        for data_node, design in zip(spare.tolist(), late, strict=False):
            path = cheapest_route(problem, labels, data_node, design, loads)
            loads[list(path[1:])] += 1
            paths.append(path)
    if problem.traffic.slots_with(labels).min() < 1:
        return None
    return _solution_of(problem, labels, paths)
