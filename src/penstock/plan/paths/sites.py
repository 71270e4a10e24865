"""Divides a large cluster into sites that are planned one by one.

    Oslo      24 nodes ──► 6 data nodes, 18 others, paths that stay in Oslo
    Rome      23 nodes ──► 6 data nodes, 17 others, paths that stay in Rome
    Bern       3 nodes ─┐
    Geneva     4 nodes ─┴► merged, because a site needs all parts

The nodes of a place form a site. Small sites are merged with the nearest ones, and large sites are
cut, so that a site has about as many nodes as one annealing can handle. Every site gets its share
of the data nodes. The parts that the units visit are dealt out over all sites together, so that all
parts are visited equally often over the whole cluster, but not in each site.

Sites that are alike in every number, and get the same parts to visit, get the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.arrangement import (
    NO_PART_HELD,
    arrange,
    fit_nodes,
    replica_counts,
)
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.circuits import circuit_terms
from penstock.plan.paths.improve import improve_solution
from penstock.plan.paths.part_exchange import MAX_EXCHANGE_MOVES, exchange_parts
from penstock.plan.paths.path_simulator import QueueOrder
from penstock.plan.paths.problem import Problem, numbers_of_nodes
from penstock.plan.paths.routes import deal_parts, route_units
from penstock.plan.paths.solution import NodePath, Solution, solution_value

MAX_SITE_NODES = 24  # nodes that one annealing improves at once
MIN_SITE_NODES_PER_PART = 2
SITE_CIRCUIT_MOVES = 20_000
MIN_EXCHANGE_MOVES = 200
SITE_MOVES = 6_000  # moves that improve the plan of a site


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
    any_labels = np.repeat(np.arange(problem.body), sizes)
    dealt = deal_parts(problem, any_labels)
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    paths: list[NodePath] = []
    delays: list[float] = []
    known: dict[object, Solution] = {}
    moves = max(MAX_EXCHANGE_MOVES // len(sites), MIN_EXCHANGE_MOVES)
    begin = 0
    for nodes, share in zip(sites, shares, strict=True):
        end = begin + share * problem.units
        mine = dealt[begin:end]
        begin = end
        here = site_problem(problem, nodes)
        key = (share, tuple(mine), *numbers_of_nodes(problem, nodes))
        if key not in known:
            first = _first_plan(here, share, mine, prices, moves, seed)
            known[key] = improve_solution(here, first, budget, True, seed, SITE_MOVES)
        local = known[key]
        labels[nodes] = local.labels
        delays += local.delays or (0.0,) * len(local.paths)
        paths += [tuple(nodes[list(path)].tolist()) for path in local.paths]
    return Solution(
        tuple(labels.tolist()),
        tuple(paths),
        _queue_order_of(known.values()),
        problem.stagger(problem.policy.staggers[0]),
        tuple(delays),
        any(local.careful for local in known.values()),
    )


def _queue_order_of(plans: Collection[Solution]) -> QueueOrder:
    """Return the queue order that most of these plans have."""
    return Counter(plan.queue_order for plan in plans).most_common(1)[0][0]


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
    """Return how many data nodes each site has, in proportion to its nodes."""
    nodes = sum(map(len, sites))
    wanted = [total * len(site) / nodes for site in sites]
    shares = [max(int(share), 1) for share in wanted]
    while sum(shares) < total:
        lacking = [share - given for share, given in zip(wanted, shares, strict=True)]
        shares[int(np.argmax(lacking))] += 1
    most = [len(site) - (problem.body - 1) for site in sites]
    fits = all(share <= top for share, top in zip(shares, most, strict=True))
    return shares if sum(shares) == total and fits else None


def _first_plan(
    problem: Problem,
    data_nodes: int,
    dealt: Sequence[tuple[int, ...]],
    prices: Sequence[float],
    moves: int,
    seed: int,
) -> Solution:
    """Return the better of several simple solutions for the nodes of one site."""
    sizes = replica_counts(
        problem.traffic.nodes, problem.body, problem.hops, data_nodes
    )
    arranged, circuits = arrange(problem, sizes, SITE_CIRCUIT_MOVES, seed)
    arranged, _ = fit_nodes(problem, arranged, circuits)
    exchanged = exchange_parts(problem, arranged, seed, problem.has_sums, moves)
    exchanged, _ = fit_nodes(problem, exchanged, circuits)
    solutions = []
    for labels in (arranged, exchanged):
        for price in prices:
            paths = route_units(problem, labels, price, dealt)
            queue_order = problem.policy.queue_orders[0]
            labels_here = tuple(labels.tolist())
            solutions.append(Solution(labels_here, tuple(paths), queue_order))
    return min(solutions, key=lambda solution: solution_value(problem, solution))
