"""The shortest round trips there are: from a node over so many other nodes, all different, and home.

walks[r, u, v]    from u over r more nodes home to v, which may meet a node twice: one matrix product each, with
                  + for times and the least for the sum
trips             depth first from each node, nearest first, as long as a walk home could still be shorter
"""

from __future__ import annotations

import numpy as np

from penstock.ir.compiled import COMPILE_FROM, at_speed
from penstock.ir.table import Floats

MAX_SHORTEST_STEPS = 3_000_000  # steps of the search for shortest trips; past that, walks that may meet a node twice


def shortest_cycles(link: Floats, home: Floats, hops: int) -> Floats:
    """Of each node the shortest trip from it over `hops` other, different nodes.

    link: seconds to go on to a node and to be there [node, node]; home: seconds of the way home.
    """
    if hops == 0:
        return np.zeros(len(link))
    link = link.copy()
    np.fill_diagonal(link, np.inf)
    walks = walks_home(link, home, hops)
    found = np.empty(len(link))
    at_speed(_trips, COMPILE_FROM)(
        link, walks, hops, MAX_SHORTEST_STEPS // len(link) + 1000, found
    )
    return found


def walks_home(link: Floats, home: Floats, hops: int) -> Floats:
    """[r, u, v]: the least from u over r more nodes home to v; a link from a node to itself must be infinite."""
    walks = np.empty((hops, len(link), len(link)))
    walks[0] = home
    for r in range(1, hops):
        onward = walks[r - 1].copy()
        np.fill_diagonal(onward, np.inf)  # the node it comes home to is no hop
        walks[r] = min_plus(link, onward)
    return walks


def min_plus(left: Floats, right: Floats) -> Floats:
    """The least of left[i, k] + right[k, j] over k."""
    out = np.full((len(left), right.shape[1]), np.inf)
    at_speed(_min_plus_loop, COMPILE_FROM)(
        np.ascontiguousarray(left), np.ascontiguousarray(right), out
    )
    return out


def _min_plus_loop(left: Floats, right: Floats, out: Floats) -> None:
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            through = left[i, k]
            for j in range(right.shape[1]):
                out[i, j] = min(out[i, j], through + right[k, j])


def _trips(link: Floats, walks: Floats, hops: int, effort: int, found: Floats) -> None:
    """Depth first from each node, nearest first, as long as a walk home could still be shorter than the best trip."""
    count = len(link)
    path = np.zeros(hops + 1, np.int64)
    place = np.zeros(hops + 1, np.int64)
    so_far = np.zeros(hops + 1)
    ranked = np.zeros((hops + 1, count), np.int64)
    for home in range(count):
        best, steps, depth = np.inf, 0, 0
        path[0], place[0], so_far[0] = home, 0, 0.0
        onward = link[home] + walks[hops - 1, :, home]
        ranked[0] = np.argsort(onward)
        while depth >= 0 and steps < effort:
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
                depth -= 1  # those after it are no shorter
                continue
            if left == 0:
                best = least
                continue
            depth += 1
            path[depth], place[depth], so_far[depth] = (
                there,
                0,
                so_far[depth - 1] + link[here, there],
            )
            ranked[depth] = np.argsort(link[there] + walks[left - 1, :, home])
        if depth >= 0 or best == np.inf:  # too much: a walk is no longer than a trip
            least = np.inf
            for there in range(count):
                if there != home:
                    least = min(least, link[home, there] + walks[hops - 1, there, home])
            best = least
        found[home] = best
