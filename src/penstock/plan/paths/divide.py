"""Divides a large cluster into sites or cells that are planned one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import NamedTuple

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import (
    NO_PART_HELD,
    Problem,
    circuit_terms,
    numbers_of_nodes,
)
from penstock.plan.paths.rules import part_orders
from penstock.plan.paths.search import HOT, WARM, Budget
from penstock.plan.paths.simulator import (
    Solution,
    choose_queueing,
    solution_of,
    solution_value,
)
from penstock.plan.paths.stages import improve_solution
from penstock.plan.paths.starts import (
    MAX_EXCHANGE_MOVES,
    arrange,
    cheapest_route,
    deal_parts,
    exchange_parts,
    fit_nodes,
    improve_circuits,
    part_designs,
    replica_counts,
    route_units,
)

# ---------------------------------------------------------------- one site
# Plans the nodes of a site as if there were no others, and joins the plans of all sites.
#
#     site      nodes 8 9 10 11, one data node, whose units visit the parts 1 2 4
#     alone     nodes 0 1 2 3: first solutions, annealing, lanes       another site that is alike takes the same plan
#     joined    the paths of all sites, with the numbers that the nodes have in the whole cluster
#
# Paths of different sites never meet. So the step ends with the slowest site, and further searches
# only go to that one.

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
        for part_of_node in self._arrangements(problem, deal, seed):
            for price in self.prices:
                paths = route_units(problem, part_of_node, price, dealt)
                solutions.append(solution_of(problem, part_of_node, paths))
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
        nodes = problem.arrays.nodes
        visits = _visits(deal)
        circuits: Ints = np.zeros((0, 1), dtype=np.int64)
        part_of_node: Ints
        if len(visits) == problem.body - 1:
            sizes = replica_counts(nodes, problem.body, problem.hops, len(deal))
            part_of_node, circuits = arrange(problem, sizes, SITE_CIRCUIT_MOVES, seed)
            part_of_node, _ = fit_nodes(problem, part_of_node, circuits)
            yield part_of_node
        else:
            order = np.random.default_rng(seed).permutation(nodes)
            part_of_node = np.empty(nodes, dtype=np.int64)
            part_of_node[order] = _parts_for(visits, nodes, len(deal))
        exchanged = exchange_parts(
            problem, part_of_node, seed, problem.has_sums, self.exchange_moves
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
    part_of_node = np.full(problem.arrays.nodes, NO_PART_HELD, dtype=np.int64)
    own = [plan.solution for plan in plans]
    paths = []
    for nodes, local in zip(sites, own, strict=True):
        part_of_node[nodes] = local.part_of_node
        paths.append(nodes[local.paths])
    return Solution(
        part_of_node,
        np.concatenate(paths),
        np.concatenate([local.orders for local in own]),
        np.concatenate([local.delays for local in own]),
        np.concatenate([local.turns for local in own]),
        problem.stagger(problem.policy.staggers[0]),
        any(local.avoid_deadlock for local in own),
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


def _lane_solution(
    problem: Problem, designs: Sequence[tuple[int, ...]], seed: int
) -> Solution | None:
    """Return a solution in which most data nodes have hops of their own.

    If there are too few nodes, the last data nodes use those of the others. If even that is
    impossible, return None.
    """
    nodes = problem.arrays.nodes
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
    part_of_node = np.full(nodes, NO_PART_HELD, dtype=np.int64)
    part_of_node[circuits[:, 0]] = 0
    for circuit, design in zip(circuits, designs, strict=False):
        part_of_node[circuit[1:]] = design
    late = designs[lanes:]
    if len(spare) < len(late):
        return None
    part_of_node[spare[: len(late)]] = 0
    wanted = [part for design in late for part in design] or list(designs[0])
    for number, node in enumerate(spare[len(late) :].tolist()):
        part_of_node[node] = wanted[number % len(wanted)]
    paths = [tuple(circuit) for circuit in circuits.tolist()] * problem.units
    if any(not (part_of_node == part).any() for part in wanted):
        return None
    hop = circuit_terms(problem).hop
    loads = np.zeros(nodes)
    loads[circuits[:, 1:]] = problem.units
    for _ in range(problem.units):
        for data_node, design in zip(spare.tolist(), late, strict=False):
            price = loads * hop
            path = cheapest_route(problem, part_of_node, data_node, design, price)
            loads[list(path[1:])] += 1
            paths.append(path)
    if problem.arrays.slots_with(part_of_node).min() < 1:
        return None
    return solution_of(problem, part_of_node, paths)


# ---------------------------------------------------------------- sites
# Divides a large cluster into sites that are planned one by one.
#
#     Oslo      24 nodes ──► 6 data nodes, 18 others, paths that stay in Oslo
#     Rome      23 nodes ──► 6 data nodes, 17 others, paths that stay in Rome
#     Bern       3 nodes ─┐
#     Geneva     4 nodes ─┴► merged, because a site needs all parts
#
# The nodes of a place form a site. Small sites are merged with the nearest ones, and large sites are
# cut, so that a site has about as many nodes as one annealing can handle. Every site gets its share
# of the data nodes; slow sites then give some of theirs to quick ones. The parts that the units visit
# are dealt out over all sites together, so that all parts are visited equally often over the whole
# cluster, but not in each site.
#
# Sites that are alike in every number, and get the same parts to visit, get the same plan.

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


# ---------------------------------------------------------------- cells
# Divides the places of a large cluster into cells, each with few data nodes.
#
#     Oslo  24 nodes ──► d 1 2 4   d 1 2 4   d 3 4 5   ...      six cells: a data node with hops of its own
#     Rome  23 nodes ──► d 2 3 5   d 1 3 5   ...   d d 1 2 3 4 5
#                                                  a cell with one data node more, because there must be 12 in all
#     Bern   5 nodes ─┐
#     Basel  5 nodes ─┼► d d d d 1 1 2 2 2 3 3 ...              three places that only together have room for one more
#     Zurich 5 nodes ─┘
#
# A path never leaves its cell. A small cell is easy to plan well, and most cells of a large cluster
# are alike: they share one plan, which a search can afford many moves for. So a cluster is first cut
# into as many cells with one data node each as its places have room for. Nodes that are left over
# join a cell of their place. The data nodes that are still missing go where the nodes are near each
# other and not crowded, and several cells may merge to make room for one.
#
# The units of a cell either all visit the same parts, or they visit all parts equally often, whichever
# is quicker. Over the whole cluster all parts are visited equally often.

MAX_MERGED_CELLS = 4  # cells that merge to make room for one more data node
CELL_TRIAL_MOVES = 1_500  # moves that decide whether units visit the same parts
TRIED_NEIGHBORS = 8  # cells near a slow one that it may merge with
MAX_RELIEFS = 12  # slow cells that merge with a neighbor
GROUPING_BISECTIONS = 12
VisitedParts = tuple[int, ...]
Group = tuple[int, ...]  # numbers of cells


@dataclass(frozen=True, slots=True)
class NodeCell:
    """Nodes that are planned together, and the number of data nodes among them."""

    nodes: tuple[int, ...]
    data: int


def cell_solution(
    problem: Problem,
    sizes: Sequence[int],
    prices: Sequence[float],
    budget: Budget,
    seed: int,
) -> Solution | None:
    """Return a solution in which no path leaves its cell, or None if the places are too small for cells.

    sizes: the number of nodes of each part.
    prices: prices of busy nodes; each cell takes the one that suits it best.
    """
    cells = cut_into_cells(problem, sizes[0])
    if cells is None:
        return None
    planner = SitePlanner(problem, len(cells), prices, budget, seed)
    bag = Counter(deal_parts(problem, np.repeat(np.arange(problem.body), sizes)))
    deals = _deal_to_cells(problem, planner, cells, bag)
    if deals is None:
        return None
    sites = [np.array(cell.nodes) for cell in cells]
    plans = [
        planner.plan(nodes, deal) for nodes, deal in zip(sites, deals, strict=True)
    ]
    _relieve_slowest(planner, sites, plans)
    refine_slowest(planner, plans)
    return join_plans(problem, sites, plans)


def cut_into_cells(problem: Problem, data: int) -> list[NodeCell] | None:
    """Return cells with `data` data nodes in all, or None if most data nodes would find no room.

    Every part must fit into the memory of every node, because a cell is too small to choose.
    """
    if problem.arrays.part_slots.min() < 1:
        return None
    length = problem.hops + 1
    cells: list[NodeCell] = []
    small_places = []
    for members in places_of(problem):
        # Nodes of about the same speed share a cell.
        members.sort(key=lambda node: (problem.arrays.slow[node], node))
        lanes = len(members) // length
        if not lanes:
            small_places.append(members)
            continue
        for lane in range(lanes):
            end = (lane + 1) * length if lane < lanes - 1 else len(members)
            cells.append(NodeCell(tuple(members[lane * length : end]), 1))
    if not data / 2 < len(cells) <= data:
        return None
    pair = circuit_terms(problem).pair
    for members in small_places:
        nearest = _nearest_with_room(pair, cells, members)
        if nearest is None:
            return None
        cells[nearest] = NodeCell((*cells[nearest].nodes, *members), 1)
    return _add_data_nodes(problem, cells, data - len(cells))


def _nearest_with_room(
    pair: Floats, cells: Sequence[NodeCell], members: Sequence[int]
) -> int | None:
    """Return the nearest cell that can take these nodes, or None if there is none."""
    roomy = [
        number
        for number, cell in enumerate(cells)
        if len(cell.nodes) + len(members) <= MAX_SITE_NODES
    ]
    if not roomy:
        return None
    return min(roomy, key=lambda number: pair[cells[number].nodes[0], members[0]])


def _add_data_nodes(
    problem: Problem, cells: Sequence[NodeCell], count: int
) -> list[NodeCell]:
    """Return the cells with `count` more data nodes.

    Cells that have nodes to spare take one each, alone or merged with others nearby. The slowest of
    these groups should be as quick as possible, so the limit on their times is found by bisection.
    """
    cells = list(cells)
    while count > 0:
        length = problem.hops + 1
        spare = [len(cell.nodes) - cell.data * length for cell in cells]
        roomy = [place for place, nodes in enumerate(spare) if nodes > 0]
        grouping = _Grouping(problem, cells, roomy or list(range(len(cells))))
        groups = grouping.best(count)
        if not groups:
            return cells
        count -= len(groups)
        taken = {number for group in groups for number in group}
        others = [cell for number, cell in enumerate(cells) if number not in taken]
        merged = [_merge_cells(cells, group) for group in groups]
        cells = [*others, *(NodeCell(cell.nodes, cell.data + 1) for cell in merged)]
    return cells


class _Grouping:
    """Ways to merge cells near each other into groups, each of which takes one data node more."""

    def __init__(
        self, problem: Problem, cells: Sequence[NodeCell], roomy: Sequence[int]
    ) -> None:
        pair = circuit_terms(problem).pair
        first = [cell.nodes[0] for cell in cells]
        self.problem = problem
        self.cells = cells
        self.nearest = {
            number: sorted(roomy, key=lambda other: pair[first[number], first[other]])
            for number in roomy
        }
        self.known: dict[Group, float] = {}
        # Remote cells choose first, because they have few others nearby.
        self.roomy = sorted(roomy, key=self._least_seconds, reverse=True)

    def _least_seconds(self, number: int) -> float:
        """Return the time of the quickest group around a cell."""
        sizes = range(1, MAX_MERGED_CELLS + 1)
        return min(self.seconds(self._nearest_group(number, size)) for size in sizes)

    def _nearest_group(
        self, number: int, size: int, taken: Collection[int] = ()
    ) -> Group:
        """Return a cell and the nearest others that are not taken."""
        free = [other for other in self.nearest[number] if other not in taken]
        return tuple(sorted(free[:size]))

    def best(self, count: int) -> list[Group]:
        """Return `count` groups, or as many as possible, with the least time of the slowest."""
        every = self._within(np.inf, count)
        fastest = min((self.seconds((number,)) for number in self.roomy), default=0.0)
        low = 0.5 * fastest
        high = max(map(self.seconds, every), default=0.0)
        best = every
        for _ in range(GROUPING_BISECTIONS):
            middle = (low + high) / 2
            groups = self._within(middle, count)
            if len(groups) < len(every):
                low = middle
            else:
                high = middle
                best = groups
        return best

    def _within(self, limit: float, count: int) -> list[Group]:
        """Return up to `count` groups that take no longer than the limit, the smallest groups first."""
        groups: list[Group] = []
        taken: set[int] = set()
        for size in range(1, MAX_MERGED_CELLS + 1):
            for number in self.roomy:
                group = self._nearest_group(number, size, taken)
                if number in taken or len(group) < size or len(groups) == count:
                    continue
                if self.seconds(group) <= limit:
                    groups.append(group)
                    taken.update(group)
        return groups

    def seconds(self, group: Group) -> float:
        """Return about how long a path takes in a group with one data node more, or infinity if it does not fit."""
        if group not in self.known:
            cell = _merge_cells(self.cells, group)
            self.known[group] = np.inf
            room = len(cell.nodes) - cell.data - 1
            if len(cell.nodes) <= MAX_SITE_NODES and room >= self.problem.hops:
                nodes = np.array(cell.nodes)
                self.known[group] = crowded_trip(self.problem, nodes, cell.data + 1)
        return self.known[group]


def _merge_cells(cells: Sequence[NodeCell], group: Sequence[int]) -> NodeCell:
    nodes = [node for number in group for node in cells[number].nodes]
    return NodeCell(tuple(sorted(nodes)), sum(cells[number].data for number in group))


# ---------------------------------------------------------------- which parts the units visit
def _deal_to_cells(
    problem: Problem,
    planner: SitePlanner,
    cells: Sequence[NodeCell],
    bag: Counter[VisitedParts],
) -> list[list[PartDeal]] | None:
    """Return, for each data node of each cell, the parts that its units visit.

    bag: the sets of parts that the units of the whole cluster visit, which are dealt out.
    Return None if the cells have no room for them.
    """
    mixed = {
        number
        for number, cell in enumerate(cells)
        if _prefers_all_parts(problem, planner, cell)
    }
    deals = _deal_alike(problem, cells, mixed, bag)
    if deals is None:
        deals = _deal_rest(problem, cells, mixed, bag)
    if deals is None:
        # Too few units are left of each set. The largest cell takes what is left of all sets.
        roomiest = max(range(len(cells)), key=lambda number: len(cells[number].nodes))
        deals = _deal_rest(problem, cells, mixed | {roomiest}, bag)
    if deals is None:
        return None
    for cell, deal in zip(cells, deals, strict=True):
        if not planner.fits(np.array(cell.nodes), deal):
            return None
    return deals


def _prefers_all_parts(problem: Problem, planner: SitePlanner, cell: NodeCell) -> bool:
    """Whether a cell with several data nodes is quicker if its units visit all parts equally often."""
    nodes = np.array(cell.nodes)
    part_of_node = np.arange(len(nodes)) % problem.body
    part_of_node[: cell.data] = 0
    part_of_node[cell.data :] = 1 + np.arange(len(nodes) - cell.data) % (
        problem.body - 1
    )
    sets = deal_parts(problem, part_of_node)
    all_parts = _deal_in_turn(sets, cell.data)
    if cell.data == 1 or not planner.fits(nodes, all_parts):
        return False
    same_parts = [(sets[0],) * problem.units] * cell.data
    all_seconds = planner.plan(nodes, all_parts, CELL_TRIAL_MOVES).seconds
    same_seconds = planner.plan(nodes, same_parts, CELL_TRIAL_MOVES).seconds
    return all_seconds < same_seconds


def _deal_in_turn(sets: Sequence[VisitedParts], data: int) -> list[PartDeal]:
    return [tuple(sets[number::data]) for number in range(data)]


def _deal_alike(
    problem: Problem,
    cells: Sequence[NodeCell],
    mixed: set[int],
    bag: Counter[VisitedParts],
) -> list[list[PartDeal]] | None:
    """Give mixed cells of the same size the same sets, and the other cells what is left, if that is possible.

    The sets are taken in the order in which the bag lists them. Over any number of successive sets
    all parts are visited equally often, give or take one.
    """
    left = Counter(bag)
    mixed_deals = {}
    for number in mixed:
        units = cells[number].data * problem.units
        sets = list(islice(cycle(bag), units))
        left.subtract(sets)
        mixed_deals[number] = _deal_in_turn(sets, cells[number].data)
    others = [number for number in range(len(cells)) if number not in mixed]
    same_deals = _deal_same_parts(problem, cells, others, left)
    if same_deals is None or any(left.values()):
        return None
    deals = mixed_deals | same_deals
    return [deals[number] for number in range(len(cells))]


def _deal_rest(
    problem: Problem,
    cells: Sequence[NodeCell],
    mixed: set[int],
    bag: Counter[VisitedParts],
) -> list[list[PartDeal]] | None:
    """Give mixed cells what the other cells leave."""
    left = Counter(bag)
    others = [number for number in range(len(cells)) if number not in mixed]
    deals = _deal_same_parts(problem, cells, others, left)
    if deals is None:
        return None
    for number in sorted(mixed):
        taken = _share_of_bag(left, cells[number].data * problem.units)
        left -= taken
        deals[number] = _deal_in_turn(_spread_sets(taken), cells[number].data)
    return [deals[number] for number in range(len(cells))]


def _deal_same_parts(
    problem: Problem,
    cells: Sequence[NodeCell],
    numbers: Sequence[int],
    left: Counter[VisitedParts],
) -> dict[int, list[PartDeal]] | None:
    """Deal to cells whose units all visit the same parts, the largest first, and take that out of the bag.

    Return None if too few units are left of every set.
    """
    deals = {}
    for number in sorted(numbers, key=lambda number: -cells[number].data):
        units = cells[number].data * problem.units
        enough = [parts for parts in left if left[parts] >= units]
        if not enough:
            return None
        orders = {parts: part_orders(frozenset(parts), problem.rules) for parts in left}
        if cells[number].data > 1:  # a crowded cell needs paths in several orders
            parts = max(enough, key=lambda parts: (len(orders[parts]), left[parts]))
        else:
            parts = max(enough, key=lambda parts: left[parts])
        left[parts] -= units
        deals[number] = [(parts,) * problem.units] * cells[number].data
    return deals


def _share_of_bag(bag: Counter[VisitedParts], count: int) -> Counter[VisitedParts]:
    """Return `count` sets of the bag, of each kind in proportion to what is there."""
    total = bag.total()
    share = Counter({parts: bag[parts] * count // total for parts in bag})
    lacking = sorted(
        bag, key=lambda parts: (share[parts] - bag[parts] * count / total, parts)
    )
    share.update(lacking[: count - share.total()])
    return share


def _spread_sets(bag: Counter[VisitedParts]) -> list[VisitedParts]:
    """Return the sets of a bag in turn, so that equal ones are far apart."""
    left = Counter(bag)
    spread: list[VisitedParts] = []
    while left.total():
        for parts in sorted(left):
            if left[parts] > 0:
                spread.append(parts)
                left[parts] -= 1
    return spread


# ---------------------------------------------------------------- slow cells
def _relieve_slowest(
    planner: SitePlanner, sites: list[Ints], plans: list[SitePlan]
) -> None:
    """Merge the slowest cell with the nearest one, as long as that helps."""
    pair = circuit_terms(planner.problem).pair
    for _ in range(MAX_RELIEFS):
        slowest = max(range(len(plans)), key=lambda site: plans[site].seconds)
        mine = sites[slowest]
        others = [
            site
            for site in range(len(sites))
            if site != slowest and len(sites[site]) + len(mine) <= MAX_SITE_NODES
        ]
        if planner.budget.spent or not others:
            return
        near = sorted(
            others, key=lambda site: float(pair[np.ix_(mine, sites[site])].mean())
        )
        nearest = min(
            near[:TRIED_NEIGHBORS],
            key=lambda site: crowded_trip(
                planner.problem,
                np.concatenate([mine, sites[site]]),
                len(plans[slowest].deal) + len(plans[site].deal),
            ),
        )
        nodes = np.sort(np.concatenate([mine, sites[nearest]]))
        merged = planner.plan(nodes, plans[slowest].deal + plans[nearest].deal)
        is_shared = sum(plan is plans[slowest] for plan in plans) > 1
        if is_shared or merged.seconds >= plans[slowest].seconds:
            return
        sites[slowest] = nodes
        plans[slowest] = merged
        del sites[nearest]
        del plans[nearest]
