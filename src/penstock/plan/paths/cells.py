"""Divides the places of a large cluster into cells, each with few data nodes.

    Oslo  24 nodes ──► d 1 2 4   d 1 2 4   d 3 4 5   ...      six cells: a data node with hops of its own
    Rome  23 nodes ──► d 2 3 5   d 1 3 5   ...   d d 1 2 3 4 5
                                                 a cell with one data node more, because there must be 12 in all
    Bern   5 nodes ─┐
    Basel  5 nodes ─┼► d d d d 1 1 2 2 2 3 3 ...              three places that only together have room for one more
    Zurich 5 nodes ─┘

A path never leaves its cell. A small cell is easy to plan well, and most cells of a large cluster
are alike: they share one plan, which a search can afford many moves for. So a cluster is first cut
into as many cells with one data node each as its places have room for. Nodes that are left over
join a cell of their place. The data nodes that are still missing go where the nodes are near each
other and not crowded, and several cells may merge to make room for one.

The units of a cell either all visit the same parts, or they visit all parts equally often, whichever
is quicker. Over the whole cluster all parts are visited equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.circuits import circuit_terms
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.routes import deal_parts
from penstock.plan.paths.rules import part_orders
from penstock.plan.paths.site_planner import (
    MAX_SITE_NODES,
    PartDeal,
    SitePlan,
    SitePlanner,
    crowded_trip,
    join_plans,
    refine_slowest,
)
from penstock.plan.paths.sites import places_of
from penstock.plan.paths.solution import Solution

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
    slots = problem.traffic.part_slots
    if slots is not None and slots.min() < 1:
        return None
    length = problem.hops + 1
    cells: list[NodeCell] = []
    small_places = []
    for members in places_of(problem):
        # Nodes of about the same speed share a cell.
        members.sort(key=lambda node: (problem.traffic.slow[node], node))
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
        merged = [_merge(cells, group) for group in groups]
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
            cell = _merge(self.cells, group)
            self.known[group] = np.inf
            room = len(cell.nodes) - cell.data - 1
            if len(cell.nodes) <= MAX_SITE_NODES and room >= self.problem.hops:
                nodes = np.array(cell.nodes)
                self.known[group] = crowded_trip(self.problem, nodes, cell.data + 1)
        return self.known[group]


def _merge(cells: Sequence[NodeCell], group: Sequence[int]) -> NodeCell:
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
    labels = np.arange(len(nodes)) % problem.body
    labels[: cell.data] = 0
    labels[cell.data :] = 1 + np.arange(len(nodes) - cell.data) % (problem.body - 1)
    sets = deal_parts(problem, labels)
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
