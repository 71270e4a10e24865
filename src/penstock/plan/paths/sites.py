"""Divides a large cluster into sites that are planned one by one.

    Oslo      24 nodes ──► 6 data nodes, 18 others, paths that stay in Oslo
    Rome      23 nodes ──► 6 data nodes, 17 others, paths that stay in Rome
    Bern       3 nodes ─┐
    Geneva     4 nodes ─┴► merged, because a site needs all parts

The nodes of a place form a site. Small sites are merged with the nearest ones, and large sites are
cut, so that a site has about as many nodes as one annealing can handle. Every site gets its share
of the data nodes; slow sites then give some of theirs to quick ones. The parts that the units visit
are dealt out over all sites together, so that all parts are visited equally often over the whole
cluster, but not in each site.

Sites that are alike in every number, and get the same parts to visit, get the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.arrangement import (
    NO_PART_HELD,
    arrange,
    fit_nodes,
    part_designs,
    replica_counts,
)
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.circuits import circuit_terms, improve_circuits
from penstock.plan.paths.improve import improve_solution
from penstock.plan.paths.move_search import HOT, WARM
from penstock.plan.paths.part_exchange import MAX_EXCHANGE_MOVES, exchange_parts
from penstock.plan.paths.path_simulator import NO_TURN, QueueOrder
from penstock.plan.paths.problem import Problem, numbers_of_nodes, positions_of
from penstock.plan.paths.routes import cheapest_route, deal_parts, route_units
from penstock.plan.paths.solution import (
    Delays,
    NodePath,
    Solution,
    Turns,
    choose_queueing,
    solution_value,
)

MAX_SITE_NODES = 24  # nodes that one annealing improves at once
MIN_SITE_NODES_PER_PART = 2
SITE_CIRCUIT_MOVES = 20_000
MIN_EXCHANGE_MOVES = 200
SITE_MOVES = 6_000  # moves that improve the plan of a site
MAX_BALANCING_MOVES = 12  # data nodes that are moved between sites
MAX_REFINEMENTS = 40  # searches for the slowest sites
MAX_FAILED_REFINEMENTS = 4  # of these in a row without a gain
REFINEMENT_MOVES = 6_000  # of each
# Sites with too few nodes for their data nodes take longer by about this power of what is missing.
CROWDING_POWER = 1.5
TRIED_SITES = 2  # sites that a data node is offered to
PartDeal = tuple[tuple[int, ...], ...]  # the parts of each unit of a data node


class SitePlan(NamedTuple):
    """A plan of one site, with nodes counted from 0, and the end of its step."""

    problem: Problem
    solution: Solution
    seconds: float


def site_solution(
    problem: Problem,
    sizes: Sequence[int],
    prices: Sequence[float],
    budget: Budget,
    seed: int,
) -> Solution | None:
    """Return a solution in which no path leaves its site, or None if there is only one site.

    sizes: the number of nodes of each part.
    prices: prices of busy nodes; each site takes the one that suits it best.
    """
    sites = near_nodes(problem)
    if len(sites) < 2:
        return None
    shares = _data_nodes_of(problem, sites, sizes[0])
    if shares is None:
        return None
    deals = _deal_to_sites(problem, sizes, shares)
    planner = _SitePlanner(problem, sites, prices, budget, seed)
    plans = [
        planner.plan(nodes, deal) for nodes, deal in zip(sites, deals, strict=True)
    ]
    _balance(planner, sites, deals, plans)
    _refine(planner, plans)
    return _join(problem, sites, plans)


def _deal_to_sites(
    problem: Problem, sizes: Sequence[int], shares: Sequence[int]
) -> list[list[PartDeal]]:
    """Return, for each data node of each site, the parts that its units visit.

    Over all sites, every part is visited equally often.
    """
    data = sizes[0]
    if data * problem.hops % (problem.body - 1) == 0:
        # Then all units of a data node may visit the same parts.
        designs = part_designs(data, problem.body, problem.hops)
        of_each = [(design,) * problem.units for design in designs]
    else:
        dealt = deal_parts(problem, np.repeat(np.arange(problem.body), sizes))
        of_each = [tuple(dealt[number::data]) for number in range(data)]
    deals = []
    for share in shares:
        deals.append(of_each[:share])
        of_each = of_each[share:]
    return deals


def _balance(
    planner: _SitePlanner,
    sites: Sequence[Ints],
    deals: list[list[PartDeal]],
    plans: list[SitePlan],
) -> None:
    """Move data nodes from the slowest site to quicker ones as long as that helps."""
    for _ in range(MAX_BALANCING_MOVES):
        if planner.budget.spent:
            return
        order = sorted(range(len(sites)), key=lambda site: plans[site].seconds)
        slowest = order[-1]
        if len(deals[slowest]) < 2:
            return
        fewer = deals[slowest][:-1]
        relieved = planner.plan(sites[slowest], fewer)
        for quick in order[:TRIED_SITES]:
            more = [*deals[quick], deals[slowest][-1]]
            if quick == slowest or not planner.fits(sites[quick], more):
                continue
            loaded = planner.plan(sites[quick], more)
            if max(relieved.seconds, loaded.seconds) < plans[slowest].seconds:
                plans[slowest], plans[quick] = relieved, loaded
                deals[slowest], deals[quick] = fewer, more
                break
        else:
            return


def _refine(planner: _SitePlanner, plans: list[SitePlan]) -> None:
    """Improve the slowest site, and all that are like it, until nothing is gained any more."""
    failed = 0
    for turn in range(1, MAX_REFINEMENTS):
        if planner.budget.spent or failed >= MAX_FAILED_REFINEMENTS:
            return
        slowest = max(plans, key=lambda plan: plan.seconds)
        better = planner.improve(slowest, REFINEMENT_MOVES, turn)
        failed = 0 if better.seconds < slowest.seconds else failed + 1
        for number, plan in enumerate(plans):
            if plan is slowest:
                plans[number] = better


def _join(
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
        count = len(local.paths)
        labels[nodes] = local.labels
        paths += [tuple(nodes[list(path)].tolist()) for path in local.paths]
        delays += local.delays or (no_delays,) * count
        orders += local.own_orders or (local.queue_order,) * count
        turns += local.turns or (free,) * count
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


def near_nodes(problem: Problem) -> list[Ints]:
    """Return the nodes of each site, in ascending order."""
    places: dict[str, list[int]] = {}
    for number, node in enumerate(problem.cluster.nodes):
        name = node.site or f"node {number}"
        places.setdefault(name, []).append(number)
    groups: list[Ints] = []
    for members in places.values():
        pieces = -(-len(members) // MAX_SITE_NODES)
        groups += [np.array(piece) for piece in np.array_split(members, pieces)]
    return _merge_small(groups, circuit_terms(problem).pair, problem.body)


def _merge_small(groups: list[Ints], pair: Floats, parts: int) -> list[Ints]:
    """Merge the smallest group with the nearest one until all are large enough."""
    least = min(MIN_SITE_NODES_PER_PART * parts + parts // 2, MAX_SITE_NODES)
    groups = list(groups)
    while len(groups) > 1:
        groups.sort(key=lambda nodes: (len(nodes), int(nodes[0])))
        small = groups[0]
        if len(small) >= least:
            break
        distances = [
            float(pair[np.ix_(small, other)].mean()) * _crowding(small, other)
            for other in groups[1:]
        ]
        nearest = 1 + int(np.argmin(distances))
        groups[nearest] = np.sort(np.concatenate([small, groups[nearest]]))
        del groups[0]
    return sorted(groups, key=lambda nodes: int(nodes[0]))


def _crowding(small: Ints, other: Ints) -> float:
    """Return a factor that keeps merged groups from getting too large."""
    return 1.0 if len(small) + len(other) <= MAX_SITE_NODES else 3.0


def _data_nodes_of(
    problem: Problem, sites: Sequence[Ints], total: int
) -> list[int] | None:
    """Return how many data nodes each site has, or None if they do not fit.

    First come those whose paths can stay in one place with nodes of their own. The others go where
    nodes are near each other and not yet crowded.
    """
    length = problem.hops + 1
    shares = [_lanes_in_places(problem, site, length) for site in sites]
    if not sum(shares) or sum(shares) > total:
        nodes = sum(map(len, sites))
        shares = [max(total * len(site) // nodes, 1) for site in sites]
    most = [len(site) - (problem.body - 1) for site in sites]
    ways = [_mean_trip(problem, site) for site in sites]
    while sum(shares) < total:
        seconds = []
        for way, share, site, top in zip(ways, shares, sites, most, strict=True):
            crowding = max((share + 1) * length / len(site), 1.0)
            seconds.append(way * crowding**CROWDING_POWER if share < top else np.inf)
        shares[int(np.argmin(seconds))] += 1
    fits = all(1 <= share <= top for share, top in zip(shares, most, strict=True))
    return shares if sum(shares) == total and fits else None


def _lanes_in_places(problem: Problem, site: Ints, length: int) -> int:
    """Return how many paths of this length fit into the places of a site side by side."""
    places = Counter(problem.cluster.nodes[node].site for node in site.tolist())
    return sum(count // length for name, count in places.items() if name)


def _mean_trip(problem: Problem, site: Ints) -> float:
    """Return about how long a path over random nodes of a site takes."""
    terms = circuit_terms(problem)
    links = float(terms.pair[np.ix_(site, site)].mean()) * (problem.hops + 1)
    return links + float(
        terms.data[site].mean() + problem.hops * terms.hop[site].mean()
    )


class _SitePlanner:
    """Plans sites, and sites that are alike only once."""

    def __init__(
        self,
        problem: Problem,
        sites: Sequence[Ints],
        prices: Sequence[float],
        budget: Budget,
        seed: int,
    ) -> None:
        self.problem = problem
        self.prices = prices
        self.budget = budget
        self.seed = seed
        self.exchange_moves = max(MAX_EXCHANGE_MOVES // len(sites), MIN_EXCHANGE_MOVES)
        self.known: dict[object, SitePlan] = {}

    def fits(self, nodes: Ints, deal: Sequence[PartDeal]) -> bool:
        """Whether a site has enough nodes for these data nodes and all parts."""
        return len(deal) <= len(nodes) - (self.problem.body - 1)

    def plan(self, nodes: Ints, deal: Sequence[PartDeal]) -> SitePlan:
        """Return a plan for these nodes, with one data node for each deal."""
        key = (tuple(deal), numbers_of_nodes(self.problem, nodes))
        if key not in self.known:
            problem = site_problem(self.problem, nodes)
            first = self._first_plan(problem, deal)
            seconds = solution_value(problem, first)[0]
            simple = SitePlan(problem, first, seconds)
            self.known[key] = self.improve(simple, SITE_MOVES, 0, HOT)
        return self.known[key]

    def improve(
        self, plan: SitePlan, moves: int, turn: int, hot: float = WARM
    ) -> SitePlan:
        """Return the plan after a search of so many moves. Another turn makes other moves."""
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
        return SitePlan(plan.problem, solution, seconds)

    def _first_plan(self, problem: Problem, deal: Sequence[PartDeal]) -> Solution:
        """Return the best of several simple solutions for the nodes of one site."""
        seed = self.seed
        sizes = replica_counts(
            problem.traffic.nodes, problem.body, problem.hops, len(deal)
        )
        arranged, circuits = arrange(problem, sizes, SITE_CIRCUIT_MOVES, seed)
        arranged, _ = fit_nodes(problem, arranged, circuits)
        exchanged = exchange_parts(
            problem, arranged, seed, problem.has_sums, self.exchange_moves
        )
        exchanged, _ = fit_nodes(problem, exchanged, circuits)
        # Successive units belong to different data nodes.
        dealt = [parts[unit] for unit in range(problem.units) for parts in deal]
        solutions = []
        for labels in (arranged, exchanged):
            for price in self.prices:
                paths = route_units(problem, labels, price, dealt)
                solutions.append(_solution_of(problem, labels, paths))
        if all(len(set(parts)) == 1 for parts in deal):
            lanes = _lane_solution(problem, [parts[0] for parts in deal], seed)
            if lanes is not None:
                solutions.append(lanes)
        queued = [choose_queueing(problem, solution) for solution in solutions]
        return min(queued, key=lambda solution: solution_value(problem, solution))


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
