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

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.arrangement import part_designs
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.circuits import circuit_terms
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.routes import deal_parts
from penstock.plan.paths.site_planner import (
    MAX_SITE_NODES,
    PartDeal,
    SitePlan,
    SitePlanner,
    crowded_trip,
    join_plans,
    refine_slowest,
)
from penstock.plan.paths.solution import Solution

MIN_SITE_NODES_PER_PART = 2
MAX_BALANCING_MOVES = 12  # data nodes that are moved between sites
TRIED_SITES = 2  # sites that a data node is offered to


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
    planner = SitePlanner(problem, len(sites), prices, budget, seed)
    plans = [
        planner.plan(nodes, deal) for nodes, deal in zip(sites, deals, strict=True)
    ]
    _balance(planner, sites, deals, plans)
    refine_slowest(planner, plans)
    return join_plans(problem, sites, plans)


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
    planner: SitePlanner,
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


def places_of(problem: Problem) -> list[list[int]]:
    """Return the nodes of each place. A node without a site is a place of its own."""
    places: dict[str, list[int]] = {}
    for number, node in enumerate(problem.cluster.nodes):
        name = node.site or f"node {number}"
        places.setdefault(name, []).append(number)
    return list(places.values())


def near_nodes(problem: Problem) -> list[Ints]:
    """Return the nodes of each site, in ascending order."""
    groups: list[Ints] = []
    for members in places_of(problem):
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
    while sum(shares) < total:
        seconds = []
        for share, site, top in zip(shares, sites, most, strict=True):
            longer = crowded_trip(problem, site, share + 1)
            seconds.append(longer if share < top else np.inf)
        shares[int(np.argmin(seconds))] += 1
    fits = all(1 <= share <= top for share, top in zip(shares, most, strict=True))
    return shares if sum(shares) == total and fits else None


def _lanes_in_places(problem: Problem, site: Ints, length: int) -> int:
    """Return how many paths of this length fit into the places of a site side by side."""
    places = Counter(problem.cluster.nodes[node].site for node in site.tolist())
    return sum(count // length for name, count in places.items() if name)
