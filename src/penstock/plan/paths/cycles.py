"""The shortest round trips: from a node over a number of other nodes, all different, and home.

walks[r, u, v]    the least time from u over r more nodes home to v, if a walk may visit a node twice. One matrix
                  product for each r, in which times are added and the minimum takes the place of the sum.
trips             a depth-first search from each node, nearest nodes first, as long as a walk home could still be
                  shorter than the best trip.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats

# Steps of the search for shortest trips. If they do not suffice, the shortest walk counts.
MAX_TRIP_STEPS = 3_000_000
MIN_TRIP_STEPS_PER_NODE = 1000


def shortest_cycles(link: Floats, home: Floats, hops: int) -> Floats:
    """Return, for each node, the time of the shortest trip from it over `hops` different other nodes.

    link: seconds to go on to a node and of its work there [node, node].
    home: seconds of the way home from the last node [node, node].
    """
    if hops == 0:
        return np.zeros(len(link))
    link = link.copy()
    np.fill_diagonal(link, np.inf)
    walks = walks_home(link, home, hops)
    shortest = np.empty(len(link))
    max_steps = MAX_TRIP_STEPS // len(link) + MIN_TRIP_STEPS_PER_NODE
    compile_if_large(_find_trips, MIN_COMPILED_SIZE)(
        link, walks, hops, max_steps, shortest
    )
    return shortest


def walks_home(link: Floats, home: Floats, hops: int) -> Floats:
    """Return [r, u, v]: the least time from u over r more nodes home to v.

    The link from a node to itself must be infinite.
    """
    walks = np.empty((hops, len(link), len(link)))
    walks[0] = home
    for r in range(1, hops):
        onward = walks[r - 1].copy()
        np.fill_diagonal(onward, np.inf)  # the node that it comes home to is not a hop
        walks[r] = min_plus(link, onward)
    return walks


def min_plus(left: Floats, right: Floats) -> Floats:
    """Return the minimum of left[i, k] + right[k, j] over k."""
    out = np.full((len(left), right.shape[1]), np.inf)
    compile_if_large(_min_plus_loop, MIN_COMPILED_SIZE)(
        np.ascontiguousarray(left), np.ascontiguousarray(right), out
    )
    return out


def _min_plus_loop(left: Floats, right: Floats, out: Floats) -> None:
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            through = left[i, k]
            for j in range(right.shape[1]):
                out[i, j] = min(out[i, j], through + right[k, j])


def _find_trips(  # noqa: PLR0915
    link: Floats, walks: Floats, hops: int, max_steps: int, shortest: Floats
) -> None:
    """Fill `shortest` by a depth-first search from each node.

    A branch ends where even the shortest walk home would not beat the best trip.
    """
    count = len(link)
    path = np.zeros(hops + 1, np.int64)
    place = np.zeros(hops + 1, np.int64)
    so_far = np.zeros(hops + 1)
    ranked = np.zeros((hops + 1, count), np.int64)
    onward = np.zeros(count)

    def rank_nodes(depth: int, home: int) -> None:
        """List the nodes that may come next, those with the shortest walk home first."""
        for node in range(count):
            rest = walks[hops - depth - 1, node, home]
            onward[node] = link[path[depth], node] + rest
        order = np.argsort(onward)
        for place in range(count):
            ranked[depth, place] = order[place]

    for home in range(count):
        best = np.inf
        steps = 0
        depth = 0
        path[0] = home
        place[0] = 0
        so_far[0] = 0.0
        rank_nodes(0, home)
        while depth >= 0 and steps < max_steps:
            steps += 1
            here = path[depth]
            left = hops - depth - 1  # nodes after the next
            if place[depth] >= count:
                depth -= 1
                continue
            there = ranked[depth, place[depth]]
            place[depth] += 1
            seen = False
            for k in range(depth + 1):
                seen = seen or path[k] == there
            if seen:
                continue
            least = so_far[depth] + link[here, there] + walks[left, there, home]
            if least >= best:
                depth -= 1  # the nodes ranked after it are no shorter
                continue
            if left == 0:
                best = least
                continue
            depth += 1
            path[depth] = there
            place[depth] = 0
            so_far[depth] = so_far[depth - 1] + link[here, there]
            rank_nodes(depth, home)
        if depth >= 0 or best == np.inf:
            # The search was too long. The shortest walk is a bound: it is no longer than a trip.
            least = np.inf
            for there in range(count):
                if there != home:
                    least = min(least, link[home, there] + walks[hops - 1, there, home])
            best = least
        shortest[home] = best
