"""The cheapest path from a data node over one replica of each part and back, by dynamic programming.

    data node      replicas of      replicas of
                   the 1st part     the 2nd part
                ┌── a ────────────── d ──┐
        h ──────┼── b ──────┬─────── e ──┼────── h        each node remembers the cheapest way to it
                └── c ──────┘        f ──┘

A way costs the links that it takes, there and back, and the price of each node that it visits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.plan.paths.solution import NodePath


class LinkPrices(NamedTuple):
    """What the links of a path cost."""

    pair: Sequence[Sequence[float]]  # seconds over a link and back [node][node]
    inner: float  # how often a micro-batch uses a link within the path, there and back
    close: float  # how often it uses the link from the last node to the data node


class Layer(NamedTuple):
    """The replicas of a part, with the cost of the cheapest way to each of them.

    back_pointers: the place, in the layer before, from which that way comes.
    """

    nodes: Sequence[int]
    costs: list[float]
    back_pointers: list[int]


def cheapest_path(
    data_node: int,
    replicas: Sequence[Sequence[int]],
    price: Sequence[float],
    links: LinkPrices,
) -> NodePath:
    """Return the data node and the cheapest choice of one of the replicas of each part.

    >>> pair = [[0, 1, 9], [1, 0, 9], [9, 9, 0]]
    >>> cheapest_path(0, [[1, 2]], [0, 0, 0], LinkPrices(pair, 1.0, 1.0))
    (0, 1)
    """
    layers = [Layer([data_node], [0.0], [])]
    for nodes in replicas:
        layers.append(_next_layer(layers[-1], nodes, price, links))
    home = links.pair[data_node]
    last = layers.pop()
    ends = [
        cost + links.close * home[node]
        for node, cost in zip(last.nodes, last.costs, strict=True)
    ]
    place = ends.index(min(ends))
    path = [last.nodes[place]]
    after = last
    while layers:
        place = after.back_pointers[place]
        after = layers.pop()
        path.append(after.nodes[place])
    return tuple(reversed(path))


def _next_layer(
    before: Layer, nodes: Sequence[int], price: Sequence[float], links: LinkPrices
) -> Layer:
    """Find the cheapest way from the layer before to each of these nodes."""
    inner = links.inner
    costs = []
    back_pointers = []
    for node in nodes:
        row = links.pair[node]
        least = math.inf
        best = 0
        for place, source in enumerate(before.nodes):
            cost = before.costs[place] + inner * row[source]
            if cost < least:
                least = cost
                best = place
        costs.append(least + price[node])
        back_pointers.append(best)
    return Layer(nodes, costs, back_pointers)
