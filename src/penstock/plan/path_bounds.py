"""What no arrangement, no paths and no order can beat, under given rules.

One micro-batch alone takes `trip` seconds: its work, and its way there and back. No plan makes it shorter than the
shortest trip there is: from that data node where the arrangement is given, else from the node with the d-th shortest
one, since d nodes must be data nodes. A data node of s slots that sends q micro-batches, of which each has a forward
(f, with the gap) at its start and a backward (b) at its end on that node, one at a time:

    slot 0 |f------trip------b|f------trip------b|        s slots, each with its first start and its last end:
    slot 1 | .f------trip------b|f------trip------b|      the j-th first start is not before j f,
    slot 2 | . .f------trip------b|f------trip------b|    the j-th last end not after T - j b, so

    s T  >=  q trip + (f + b) s (s-1) / 2

If slots are reserved, every path is used `rounds` times in a row: T >= rounds trip + (s-1) max(f, b). And if the
reserved slots are just enough, every node is on s paths, so the worst node's shortest trip counts too.
Beside that: the work of a data node; the work of a part over its replicas, after the first can have arrived and before
the last must leave; and the sum of gradients over the data nodes comes after all of it.
"""

from __future__ import annotations

from itertools import chain, islice

import numpy as np

from penstock.ir.compiled import LARGE, at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.problem import Problem
from penstock.plan.rules import MANY, orders, subsets
from penstock.plan.sums import all_sums, least_sum

ORDERS = 2000  # of parts, tried one by one; past that, any
EFFORT = 3_000_000  # steps of the search for shortest trips; past that, walks that may meet a node twice


def path_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Seconds; `labels`: the parts of nodes where they are given, else every arrangement of these sizes is covered."""
    return _given(problem, labels) if labels is not None else _free(problem, sizes)


class _Work:
    """Seconds of everything, as a bound may count them: of several slices, the least."""

    def __init__(self, problem: Problem) -> None:
        traffic = problem.traffic
        forward, backward = traffic.forward.min(axis=1), traffic.backward.min(axis=1)
        body, more = problem.body, traffic.forward.sum(axis=1) - forward
        rest = more + traffic.backward.sum(axis=1) - backward  # the other slices, one after the other, on one node
        both = forward + backward
        self.part = both[:body].copy()  # there and back over a part, in waves over both its halves
        if problem.waves:
            self.part += both[body:][::-1]
            self.data = float(self.part[0] + rest[0])
        else:
            self.data = float(both[0] + both[-1] + rest[0])
        self.f = float(traffic.forward[0].sum())
        self.b = float(traffic.backward[0].sum())
        whole = traffic.forward.sum(axis=1) + traffic.backward.sum(axis=1)
        self.whole = whole[:body].copy()
        if problem.waves:
            self.whole += whole[body:][::-1]
        self.lot = float(self.whole[0] + (0.0 if problem.waves else whole[-1]))
        least = traffic.message.min()
        one_way = traffic.latency + traffic.byte * least
        self.pair = one_way + one_way.T
        self.inner, self.close = (2.0, 0.0) if problem.waves else (1.0, 1.0)
        self.gaps = 2 * problem.slices * (2 if problem.waves else 1)  # tasks of a micro-batch on a hop


def _windows(problem: Problem, work: _Work, node: int, trip: float) -> float:
    """The least time of a data node with such a trip."""
    traffic, policy = problem.traffic, problem.policy
    slow, count = traffic.slow[node], problem.microbatches
    least_gap = min(traffic.gap, traffic.first_gap)
    whole = problem.slices == 1  # else the slices of one micro-batch may mingle with those of another
    f, b = (work.f * slow + least_gap, work.b * slow + traffic.gap) if whole else (0.0, 0.0)
    used = range(1, int(min(traffic.slots[node], count)) + 1)
    found = min(trip * count / held + (f + b) * (held - 1) / 2 for held in used)
    found = max(found, trip + (count - 1) * max(f, b))
    if policy.reserved:
        found = max(found, policy.rounds * trip + (problem.units - 1) * max(f, b))
    tasks = 3 * problem.slices * count
    return float(max(found, count * work.lot * slow + (tasks - 1) * least_gap))


# ---------------------------------------------------------------- parts of nodes given
def _given(problem: Problem, labels: Ints) -> float:
    work, traffic = _Work(problem), problem.traffic
    data = np.flatnonzero(labels == 0)
    trip, before, stay = _shortest(problem, work, labels, data)
    sums = all_sums(traffic, labels, problem.body, problem.gradients)
    ends = [_windows(problem, work, int(node), float(trip[row])) for row, node in enumerate(data)]
    found = [max(ends) + float(sums[0])]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    visits = len(data) * problem.microbatches * min(problem.hops, len(alive)) // max(len(alive), 1)
    for part in alive:
        nodes = np.flatnonzero(labels == part)
        found.append(_least_time(problem, work, nodes, part, visits, before[nodes], stay[nodes]))
        found.append(_least_time(problem, work, nodes, part, visits, np.zeros(len(nodes))) + float(sums[part]))
    return max(found)


def _least_time(
    problem: Problem, work: _Work, nodes: Ints, part: int, visits: int, outside: Floats, stay: Floats | None = None
) -> float:
    """The least T in which these nodes can serve so many micro-batches, each with `outside` seconds elsewhere."""
    traffic = problem.traffic
    each = work.whole[part] * traffic.slow[nodes] + work.gaps * traffic.gap
    usable = np.isfinite(outside)
    if not usable.any() or not visits:
        return 0.0

    def served(time: float) -> int:
        inside = np.maximum(time - outside[usable], 0.0)
        counts = np.floor((inside + traffic.gap) / np.maximum(each[usable], 1e-12) + 1e-9)
        if stay is not None:
            room = traffic.slots[nodes][usable] * inside / np.maximum(stay[usable], 1e-12)
            counts = np.minimum(counts, np.floor(room + 1e-9))
        return int(counts.sum())

    low, high = 0.0, float(outside[usable].max() + visits * (each[usable].max() + (0 if stay is None else stay.max())))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if served(middle) >= visits else (middle, high)
    return low


def _shortest(problem: Problem, work: _Work, labels: Ints, data: Ints) -> tuple[Floats, Floats, Floats]:
    """Of each data node the shortest trip; of each hop the least time outside it, and the least time a visit stays."""
    traffic = problem.traffic
    home = work.data * traffic.slow[data]
    ways = _ways(problem, data)
    trip = np.full(len(data), np.inf)
    outside, stay = np.full(traffic.nodes, np.inf), np.full(traffic.nodes, np.inf)
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    if hops == 0:
        return home, outside, stay
    all_orders = chain.from_iterable(orders(chosen, problem.rules) for chosen in subsets(alive, hops))
    rows = list(islice(all_orders, ORDERS + 1)) if len(alive) <= 12 and hops <= MANY else []
    if not rows or len(rows) > ORDERS:
        rows = [tuple([NO_PART] * hops)]
    for row in rows:
        layers = [np.flatnonzero(labels == part) if part != NO_PART else np.flatnonzero(labels > 0) for part in row]
        own = [_own(work, labels, layer) * traffic.slow[layer] for layer in layers]
        there = [work.inner * work.pair[np.ix_(data, layers[0])]]
        for k in range(1, hops):
            link = work.inner * work.pair[np.ix_(layers[k - 1], layers[k])]
            there.append(_min_plus(there[-1] + own[k - 1], link))
        left = [work.close * work.pair[np.ix_(layers[-1], data)].T]
        for k in range(hops - 1, 0, -1):
            link = work.inner * work.pair[np.ix_(layers[k - 1], layers[k])]
            left.append(_min_plus(left[-1] + own[k], link.T))
        left.reverse()
        for k in range(hops):
            through = there[k] + own[k] + left[k] + home[:, None]
            trip = np.minimum(trip, through.min(axis=1))
            held = (own[k] + left[k]).min(axis=0)
            stay[layers[k]] = np.minimum(stay[layers[k]], held)
            outside[layers[k]] = ways[layers[k]]
    return trip, outside, stay


def _ways(problem: Problem, data: Ints) -> Floats:
    """Seconds before a micro-batch can first be at a node, and after which it is home from there, at least.

    The one who comes first need not be the one who leaves last, so both are least for themselves, over any nodes.
    """
    traffic = problem.traffic
    one_way = traffic.latency + traffic.byte * traffic.message.min()
    forward, backward = traffic.forward.min(axis=1)[: problem.body], traffic.backward.min(axis=1)[: problem.body]
    there = one_way[data].min(axis=0) + float((forward[0] * traffic.slow[data]).min())
    back = one_way[:, data].min(axis=1) + float((backward[0] * traffic.slow[data]).min())
    first, last = there, back
    for _ in range(problem.hops - 1):
        there = (there + forward[1:].min() * traffic.slow)[:, None] + one_way
        back = (back + backward[1:].min() * traffic.slow)[None, :] + one_way
        there, back = there.min(axis=0), back.min(axis=1)
        first, last = np.minimum(first, there), np.minimum(last, back)
    found: Floats = first + last
    return found


NO_PART = -1


def _own(work: _Work, labels: Ints, layer: Ints) -> Floats:
    own: Floats = work.part[labels[layer]]
    return own


def _min_plus(left: Floats, right: Floats) -> Floats:
    """The least of left[i, k] + right[k, j] over k."""
    out = np.full((len(left), right.shape[1]), np.inf)
    at_speed(_min_plus_loop, LARGE)(np.ascontiguousarray(left), np.ascontiguousarray(right), out)
    return out


def _min_plus_loop(left: Floats, right: Floats, out: Floats) -> None:
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            through = left[i, k]
            for j in range(right.shape[1]):
                out[i, j] = min(out[i, j], through + right[k, j])


# ---------------------------------------------------------------- any arrangement
def _free(problem: Problem, sizes: Ints) -> float:
    work, traffic = _Work(problem), problem.traffic
    hop = work.part[1:].min() if len(work.part) > 1 else 0.0
    trip = _cycles(problem, work, work.data * traffic.slow, hop * traffic.slow)
    ends = sorted(_windows(problem, work, node, float(trip[node])) for node in range(traffic.nodes))
    data = int(sizes[0])
    last = ends[data - 1]
    used, places = problem.units * data * problem.hops, int(traffic.slots.sum())
    equal = bool((traffic.slots == traffic.slots[0]).all()) and not problem.waves
    if problem.policy.reserved and equal and used == (traffic.nodes - data) * int(traffic.slots[0]):
        least = min(hop, work.data)
        extra = (work.data - least) * float(traffic.slow.min())
        anywhere = _cycles(problem, work, least * traffic.slow, least * traffic.slow) + extra
        last = max(last, problem.policy.rounds * float(anywhere.max()))
    found = [last + least_sum(traffic, data, problem.gradients)]
    visits = data * problem.microbatches * problem.hops
    each = np.sort(work.whole[1:].min() * traffic.slow + work.gaps * traffic.gap)[: traffic.nodes - data]
    low, high = 0.0, float(visits * each.max())
    for _ in range(60):
        middle = (low + high) / 2
        enough = np.floor((middle + traffic.gap) / np.maximum(each, 1e-12) + 1e-9).sum() >= visits
        low, high = (low, middle) if enough else (middle, high)
    found.append(low)
    inside = problem.microbatches * data * _held(work, problem)
    found.append(inside / places)
    return max(found)


def _held(work: _Work, problem: Problem) -> float:
    """Seconds of slots one micro-batch takes at least, over all its nodes: its work there and on the nodes after."""
    slow = float(problem.traffic.slow.min())
    hop = float(work.part[1:].min()) * slow
    apart = ~np.eye(problem.traffic.nodes, dtype=np.bool_)
    link = float(work.pair[apart].min()) if problem.traffic.nodes > 1 else 0.0
    hops = problem.hops
    return sum(k * hop + (work.inner * k + work.close - work.inner) * link for k in range(1, hops + 1))


def _cycles(problem: Problem, work: _Work, data: Floats, hop: Floats) -> Floats:
    """Of each node the shortest trip from it over `hops` other, different nodes."""
    hops, pair = problem.hops, work.pair
    if hops == 0:
        return data.copy()
    walks = np.empty((hops, len(pair), len(pair)))  # walks[r, u, v]: from u over r more nodes home to v
    walks[0] = work.close * pair
    link = work.inner * pair + hop[None, :]
    np.fill_diagonal(link, np.inf)
    for r in range(1, hops):
        onward = walks[r - 1].copy()
        np.fill_diagonal(onward, np.inf)  # the node it comes home to is no hop
        walks[r] = _min_plus(link, onward)
    found = np.empty(len(pair))
    at_speed(_trips, LARGE)(link, walks, hops, EFFORT // len(pair) + 1000, found)
    return data + found


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
            path[depth], place[depth], so_far[depth] = there, 0, so_far[depth - 1] + link[here, there]
            ranked[depth] = np.argsort(link[there] + walks[left - 1, :, home])
        if depth >= 0 or best == np.inf:  # too much: a walk is no longer than a trip
            least = np.inf
            for there in range(count):
                if there != home:
                    least = min(least, link[home, there] + walks[hops - 1, there, home])
            best = least
        found[home] = best
