"""Paths for nodes whose parts are known, one unit after the other, each over the cheapest nodes there are.

    unit 0  parts 1 2 3      price of a node: what it has been given to do already
    unit 1  parts 1 4 5
    unit 2  parts 2 3 4      all parts equally often

A node that is far from all others is simply not taken. That is the other start of a search: circuits share the work
over all nodes, routes leave out the bad ones.
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

NodePath = tuple[int, ...]


def deal_parts(problem: Problem, labels: Ints) -> list[tuple[int, ...]]:
    """For each unit the parts it meets beside the first: all equally often, units in turns over the data nodes."""
    data = int((labels == 0).sum())
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    turning = (
        len(alive) > 0 and data * hops % len(alive) == 0
    )  # then every turn is even by itself, and may be shifted
    units = range(problem.units * data)
    return [
        spread_parts(alive, hops, unit + (unit // data if turning else 0))
        for unit in units
    ]


def route_units(
    problem: Problem,
    labels: Ints,
    weight: float,
    rows: Sequence[tuple[int, ...]] | None = None,
) -> list[NodePath]:
    """A path for every unit. `weight`: how many seconds of a node's earlier work count as one of the way."""
    found, data = circuit_terms(problem), np.flatnonzero(labels == 0).tolist()
    price = np.zeros(problem.traffic.nodes)
    paths = []
    for unit, row in enumerate(rows or deal_parts(problem, labels)):
        allowed = part_orders(frozenset(row), problem.rules)
        if not allowed:
            raise ShapeError(
                f"no order of the parts {' '.join(map(str, row))} keeps to the rules; leave out less"
            )
        home = data[unit % len(data)]
        path = min(
            (_cheapest(found, labels, home, order, price) for order in allowed),
            key=lambda way: way[0],
        )[1]
        for node in path[1:]:
            price[node] += weight * float(found.hop[node])
        paths.append(path)
    return paths


def random_routes(problem: Problem, labels: Ints, seed: int) -> list[NodePath]:
    """Paths at random that keep to the rules: any legal order, any replica that has a place left."""
    random = Random(seed)
    rows, data = deal_parts(problem, labels), np.flatnonzero(labels == 0).tolist()
    places = _places(problem, labels, random, rows)
    random.shuffle(rows)
    paths = []
    for unit, row in enumerate(rows):
        order = random.choice(part_orders(frozenset(row), problem.rules))
        paths.append((data[unit % len(data)], *(places[part].pop() for part in order)))
    return paths


def _places(
    problem: Problem, labels: Ints, random: Random, rows: Sequence[tuple[int, ...]]
) -> dict[int, list[int]]:
    """Of every part as many places on its replicas as it needs: one a slot where slots are reserved, else in turns."""
    found = {}
    for part in {part for row in rows for part in row}:
        nodes, needed = (
            np.flatnonzero(labels == part).tolist(),
            sum(part in row for row in rows),
        )
        if problem.policy.reserved:
            found[part] = [
                node for node in nodes for _ in range(int(problem.traffic.slots[node]))
            ]
            if len(found[part]) < needed:
                raise ShapeError(
                    f"part {part} has {len(found[part])} slots on {len(nodes)} nodes, but {needed} paths need one; "
                    "give it more nodes, or leave slots to whoever is there"
                )
        else:
            found[part] = nodes * (needed // len(nodes) + 1)
        random.shuffle(found[part])
    return found


def _cheapest(
    found: CircuitTerms, labels: Ints, home: int, order: Sequence[int], price: Floats
) -> tuple[float, NodePath]:
    """The cheapest nodes for parts in this order, layer by layer."""
    layers = [np.flatnonzero(labels == part) for part in order]
    if not layers:
        return 0.0, (home,)
    cost = (
        found.inner * found.pair[home, layers[0]]
        + found.hop[layers[0]]
        + price[layers[0]]
    )
    steps: list[Ints] = []
    for before, layer in pairwise(layers):
        through = cost[:, None] + found.inner * found.pair[np.ix_(before, layer)]
        steps.append(through.argmin(axis=0))
        cost = through.min(axis=0) + found.hop[layer] + price[layer]
    cost = cost + found.close * found.pair[layers[-1], home]
    at = int(cost.argmin())
    least = float(cost[at])
    nodes = [int(layers[-1][at])]
    for step, layer in zip(reversed(steps), reversed(layers[:-1]), strict=True):
        at = int(step[at])
        nodes.append(int(layer[at]))
    return least, (home, *reversed(nodes))
