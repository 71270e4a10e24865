"""Paths for nodes whose parts are known: one unit after the other takes the cheapest nodes.

    unit 0  parts 1 2 3      the price of a node: the work that it has already been given
    unit 1  parts 1 4 5
    unit 2  parts 2 3 4      all parts are visited equally often

A node that is far from all others is simply not visited. A search therefore has two kinds of start:
circuits spread the work over all nodes, routes leave out the bad ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.circuits import CircuitTerms, circuit_terms
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders, spread_parts

Route = tuple[int, ...]


def deal_parts(problem: Problem, labels: Ints) -> list[tuple[int, ...]]:
    """Return the parts that each unit visits after the first part, all equally often.

    Successive units belong to different data nodes.
    """
    data = int((labels == 0).sum())
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    # If one unit per data node visits all parts equally often, the next such set may be shifted.
    even = len(alive) > 0 and data * hops % len(alive) == 0
    dealt = []
    for unit in range(problem.units * data):
        shift = unit // data if even else 0
        dealt.append(spread_parts(alive, hops, unit + shift))
    return dealt


def route_units(
    problem: Problem,
    labels: Ints,
    weight: float,
    dealt: Sequence[tuple[int, ...]] | None = None,
) -> list[Route]:
    """Return the cheapest path for each unit in turn.

    weight: seconds of travel that one second of work already given to a node counts for.
    dealt: the parts that each unit visits, if they are not to be dealt out here.
    """
    terms = circuit_terms(problem)
    data = np.flatnonzero(labels == 0).tolist()
    price = np.zeros(problem.traffic.nodes)
    paths = []
    for unit, parts in enumerate(dealt or deal_parts(problem, labels)):
        orders = part_orders(frozenset(parts), problem.rules)
        if not orders:
            raise ShapeError(
                f"no order of the parts {' '.join(map(str, parts))} keeps to the rules; leave out fewer parts"
            )
        data_node = data[unit % len(data)]
        best: Route = ()
        least = np.inf
        for order in orders:
            seconds, path = _cheapest_route(terms, labels, data_node, order, price)
            if not best or seconds < least:
                best = path
                least = seconds
        for node in best[1:]:
            price[node] += weight * float(terms.hop[node])
        paths.append(best)
    return paths


def cheapest_route(
    problem: Problem, labels: Ints, data_node: int, parts: Sequence[int], loads: Floats
) -> Route:
    """Return the cheapest path over these parts, given how often each node has been visited already."""
    terms = circuit_terms(problem)
    price = loads * terms.hop
    orders = part_orders(frozenset(parts), problem.rules)
    routes = [
        _cheapest_route(terms, labels, data_node, order, price) for order in orders
    ]
    return min(routes)[1]


def random_routes(problem: Problem, labels: Ints, seed: int) -> list[Route]:
    """Return random paths that keep to the rules: any legal order, any replica with a free place."""
    random = Random(seed)
    dealt = deal_parts(problem, labels)
    data = np.flatnonzero(labels == 0).tolist()
    places = _places(problem, labels, random, dealt)
    random.shuffle(dealt)
    paths = []
    for unit, parts in enumerate(dealt):
        order = random.choice(part_orders(frozenset(parts), problem.rules))
        hops = [places[part].pop() for part in order]
        paths.append((data[unit % len(data)], *hops))
    return paths


def _places(
    problem: Problem,
    labels: Ints,
    random: Random,
    dealt: Sequence[tuple[int, ...]],
) -> dict[int, list[int]]:
    """Return, for each part, its replicas as often as paths may visit them, shuffled.

    If slots are reserved, a replica occurs once per slot. Otherwise all replicas of a part occur
    equally often.
    """
    places = {}
    for part in {part for parts in dealt for part in parts}:
        replicas = np.flatnonzero(labels == part).tolist()
        needed = sum(part in parts for parts in dealt)
        if problem.policy.reserved:
            places[part] = _one_per_slot(problem, replicas)
            if len(places[part]) < needed:
                raise ShapeError(
                    f"part {part} has {len(places[part])} slots on {len(replicas)} nodes, but {needed} "
                    "paths need one; give it more nodes, or do not reserve slots"
                )
        else:
            places[part] = replicas * (needed // len(replicas) + 1)
        random.shuffle(places[part])
    return places


def _one_per_slot(problem: Problem, nodes: list[int]) -> list[int]:
    """Return each node as often as it has slots."""
    places = []
    for node in nodes:
        places += [node] * int(problem.traffic.slots[node])
    return places


def _cheapest_route(
    terms: CircuitTerms,
    labels: Ints,
    data_node: int,
    order: Sequence[int],
    price: Floats,
) -> tuple[float, Route]:
    """Return the cheapest path over parts in this order, and its seconds with prices."""
    layers = [np.flatnonzero(labels == part) for part in order]
    if not layers:
        return 0.0, (data_node,)
    first = layers[0]
    cost = terms.inner * terms.pair[data_node, first] + terms.hop[first] + price[first]
    back_pointers: list[Ints] = []
    for before, layer in pairwise(layers):
        link = terms.inner * terms.pair[np.ix_(before, layer)]
        through = cost[:, None] + link
        back_pointers.append(through.argmin(axis=0))
        cost = through.min(axis=0) + terms.hop[layer] + price[layer]
    cost = cost + terms.close * terms.pair[layers[-1], data_node]
    at = int(cost.argmin())
    seconds = float(cost[at])
    nodes = [int(layers[-1][at])]
    for pointers, layer in zip(
        reversed(back_pointers), reversed(layers[:-1]), strict=True
    ):
        at = int(pointers[at])
        nodes.append(int(layer[at]))
    return seconds, (data_node, *reversed(nodes))
