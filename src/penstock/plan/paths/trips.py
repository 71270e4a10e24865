"""The shortest trips of micro-batches over the nodes of a given arrangement.

A trip starts at a data node, visits a node of each part on its path, and comes home. The nodes that
may be visited at one place of a path are a layer:

    data nodes      nodes of part 1      nodes of part 3      data nodes
        0 ───────────── 2 ───────────────── 5 ───────────────── 0
        1 ───────────── 3 ───────────────── 6 ───────────────── 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.cycles import min_plus
from penstock.plan.paths.least_work import LeastWork
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import MAX_ORDERED_PARTS, part_orders, part_subsets

MAX_PART_ORDERS = 2000  # orders of parts that are tried one by one
MAX_SUBSET_PARTS = 12  # parts up to which the orders are listed at all
ANY_PART = -1  # stands for any part on a path, if there are too many orders


@dataclass(slots=True, eq=False)
class Trips:
    """The shortest trips on a given arrangement.

    trip: the shortest trip of each data node.
    there, back: the shortest way of each data node to its head, and back from its head.
    outside: seconds before a micro-batch can first be on each node and after it is home from there.
    stay: seconds that a visit of each node occupies a slot, at least.
    """

    trip: Floats
    there: Floats
    back: Floats
    outside: Floats
    stay: Floats


def shortest_trips(
    problem: Problem, work: LeastWork, labels: Ints, data: Ints
) -> Trips:
    """Find the shortest trips over any parts in any order that the rules allow."""
    traffic = problem.traffic
    data_work = work.data * traffic.slow[data]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    never_visited = np.full(traffic.nodes, np.inf)
    if hops == 0:
        no_way = np.zeros(len(data))
        return Trips(data_work, no_way, no_way, never_visited, never_visited)
    unknown = np.full(len(data), np.inf)
    trips = Trips(unknown, unknown, unknown, never_visited.copy(), never_visited.copy())
    outside = _seconds_outside(problem, work, data)
    for order in _part_orders_to_try(problem, alive, hops):
        layers = [_nodes_of_part(labels, part) for part in order]
        _try_ways(problem, work, trips, labels, data, layers)
        _try_round_trips(problem, work, trips, labels, data, layers)
        for layer in layers:
            trips.outside[layer] = outside[layer]
    return trips


def _try_ways(
    problem: Problem,
    work: LeastWork,
    trips: Trips,
    labels: Ints,
    data: Ints,
    layers: Sequence[Ints],
) -> None:
    """Shorten the ways to the heads and back, if those over these layers of nodes are shorter."""
    forward = [_seconds_on(problem, work.forward, labels, layer) for layer in layers]
    backward = [_seconds_on(problem, work.backward, labels, layer) for layer in layers]
    there = _shortest_way(data, layers, work.one_way, forward)
    back = _shortest_way(data, layers, work.one_way.T, backward)
    trips.there = np.minimum(trips.there, there)
    trips.back = np.minimum(trips.back, back)


def _try_round_trips(
    problem: Problem,
    work: LeastWork,
    trips: Trips,
    labels: Ints,
    data: Ints,
    layers: Sequence[Ints],
) -> None:
    """Shorten the trips and the stays, if those over these layers of nodes are shorter.

    data node ──arrive[k]──► [own[k]: the work on a node of layer k] ──rest[k]──► data node
    """
    own = [_seconds_on(problem, work.trip_part, labels, layer) for layer in layers]
    pairs = [work.pair[np.ix_(*neighbors)] for neighbors in pairwise(layers)]
    links = [work.inner * pair for pair in pairs]
    first_link = work.inner * work.pair[np.ix_(data, layers[0])]
    last_link = work.close * work.pair[np.ix_(layers[-1], data)].T
    arrive = [first_link]
    for k in range(1, len(layers)):
        arrive.append(min_plus(arrive[-1] + own[k - 1], links[k - 1]))
    rest = [last_link]
    for k in range(len(layers) - 1, 0, -1):
        rest.append(min_plus(rest[-1] + own[k], links[k - 1].T))
    rest.reverse()
    data_work = work.data * problem.traffic.slow[data]
    for k, layer in enumerate(layers):
        through = arrive[k] + own[k] + rest[k] + data_work[:, None]
        trips.trip = np.minimum(trips.trip, through.min(axis=1))
        held = (own[k] + rest[k]).min(axis=0)
        trips.stay[layer] = np.minimum(trips.stay[layer], held)


def _seconds_on(problem: Problem, seconds: Floats, labels: Ints, layer: Ints) -> Floats:
    """Return the work of each node of a layer, given the seconds of each part."""
    own: Floats = seconds[labels[layer]] * problem.traffic.slow[layer]
    return own


def _part_orders_to_try(
    problem: Problem, alive: Sequence[int], hops: int
) -> list[tuple[int, ...]]:
    """Return all orders of parts on a path; if there are too many, one order of any parts."""
    any_parts = [(ANY_PART,) * hops]
    if len(alive) > MAX_SUBSET_PARTS or hops > MAX_ORDERED_PARTS:
        return any_parts
    subsets = part_subsets(alive, hops)
    every_order = chain.from_iterable(
        part_orders(parts, problem.rules) for parts in subsets
    )
    orders = list(islice(every_order, MAX_PART_ORDERS + 1))
    if not orders or len(orders) > MAX_PART_ORDERS:
        return any_parts
    return orders


def _nodes_of_part(labels: Ints, part: int) -> Ints:
    if part == ANY_PART:
        return np.flatnonzero(labels > 0)
    return np.flatnonzero(labels == part)


def _seconds_outside(problem: Problem, work: LeastWork, data: Ints) -> Floats:
    """Return the least seconds before a first visit of each node and after a last one, together.

    The micro-batch that comes first need not be the one that leaves last. So the two are minimized
    separately, over any nodes.
    """
    traffic = problem.traffic
    one_way = work.one_way
    forward = work.forward[: problem.body]
    backward = work.backward[: problem.body]
    first_forward = float((forward[0] * traffic.slow[data]).min())
    last_backward = float((backward[0] * traffic.slow[data]).min())
    there = one_way[data].min(axis=0) + first_forward
    back = one_way[:, data].min(axis=1) + last_backward
    before = there
    after = back
    for _ in range(problem.hops - 1):
        onward = (there + forward[1:].min() * traffic.slow)[:, None] + one_way
        there = onward.min(axis=0)
        homeward = (back + backward[1:].min() * traffic.slow)[None, :] + one_way
        back = homeward.min(axis=1)
        before = np.minimum(before, there)
        after = np.minimum(after, back)
    outside: Floats = before + after
    return outside


def _shortest_way(
    data: Ints, layers: Sequence[Ints], one_way: Floats, own: Sequence[Floats]
) -> Floats:
    """Return, for each data node, the least seconds over one node of each layer and home."""
    way = one_way[np.ix_(data, layers[0])]
    for before, layer, seconds in zip(layers, layers[1:], own, strict=False):
        way = min_plus(way + seconds, one_way[np.ix_(before, layer)])
    last_link = one_way[np.ix_(layers[-1], data)].T
    least: Floats = (way + own[-1] + last_link).min(axis=1)
    return least
