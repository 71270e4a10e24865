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
That misses who waits for whom on the data node: `penstock.plan.paths.windows` tries all orders of its tasks, where they are
not too many. It also misses that not all can take the same shortest trip: `penstock.plan.paths.prices` makes good nodes dear.
Beside that: the work of a data node; the work of a part over its replicas, after the first can have arrived and before
the last must leave; and the sum of gradients over the data nodes comes after all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import least_sum_seconds, sum_seconds_by_part
from penstock.plan.paths.cycles import min_plus, shortest_cycles
from penstock.plan.paths.prices import Market, price_bound
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import MAX_ORDERED_PARTS, part_orders, part_subsets
from penstock.plan.paths.windows import Window, least_end, rounded_down

MAX_PART_ORDERS = 2000  # of parts, tried one by one; past that, any


def path_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Seconds; `labels`: the parts of nodes where they are given, else every arrangement of these sizes is covered."""
    return _given(problem, labels) if labels is not None else _free(problem, sizes)


class _Work:
    """Seconds of everything, as a bound may count them: of several slices, the least."""

    def __init__(self, problem: Problem) -> None:
        traffic = problem.traffic
        forward, backward = traffic.forward.min(axis=1), traffic.backward.min(axis=1)
        body, more = problem.body, traffic.forward.sum(axis=1) - forward
        rest = (
            more + traffic.backward.sum(axis=1) - backward
        )  # the other slices, one after the other, on one node
        both = forward + backward
        self.part = both[
            :body
        ].copy()  # there and back over a part, in waves over both its halves
        if problem.waves:
            self.part += both[body:][::-1]
            self.data = self.own = float(self.part[0] + rest[0])
        else:
            self.own = float(both[0] + rest[0])
            self.data = float(self.own + both[-1])
        self.f = float(traffic.forward[0].sum())
        self.b = float(traffic.backward[0].sum())
        whole = traffic.forward.sum(axis=1) + traffic.backward.sum(axis=1)
        self.whole = whole[:body].copy()
        if problem.waves:
            self.whole += whole[body:][::-1]
        self.lot = float(self.whole[0] + (0.0 if problem.waves else whole[-1]))
        least = traffic.message.min()
        self.one_way: Floats = traffic.latency + traffic.byte * least
        self.pair: Floats = self.one_way + self.one_way.T
        self.inner, self.close = (2.0, 0.0) if problem.waves else (1.0, 1.0)
        self.gaps = (
            2 * problem.slices * (2 if problem.waves else 1)
        )  # tasks of a micro-batch on a hop


def _windows(
    problem: Problem, work: _Work, node: int, trip: float, there: float, back: float
) -> float:
    """The least time of a data node with such a trip, there and back."""
    traffic, policy = problem.traffic, problem.policy
    slow, count = traffic.slow[node], problem.microbatches
    least_gap = min(traffic.gap, traffic.first_gap)
    whole = (
        problem.slices == 1
    )  # else the slices of one micro-batch may mingle with those of another
    f, b = (
        (work.f * slow + least_gap, work.b * slow + traffic.gap)
        if whole
        else (0.0, 0.0)
    )
    used = range(1, int(min(traffic.slots[node], count)) + 1)
    found = min(trip * count / held + (f + b) * (held - 1) / 2 for held in used)
    found = max(found, trip + (count - 1) * max(f, b))
    if policy.reserved:
        found = max(found, policy.rounds * trip + (problem.units - 1) * max(f, b))
    if whole and not problem.waves:
        found = max(found, _exact(problem, node, there, back))
    tasks = 3 * problem.slices * count
    return float(max(found, count * work.lot * slow + (tasks - 1) * least_gap))


def _exact(problem: Problem, node: int, there: float, back: float) -> float:
    traffic = problem.traffic
    slow = float(traffic.slow[node])
    forward, backward = (
        table[:, 0] * slow for table in (traffic.forward, traffic.backward)
    )
    seconds = (
        forward[0],
        forward[-1],
        backward[-1],
        backward[0],
        there,
        back,
        traffic.gap,
        traffic.first_gap,
    )
    slots = int(min(traffic.slots[node], problem.microbatches))
    return _least_end(
        Window(*map(rounded_down, map(float, seconds))), problem.microbatches, slots
    )


_least_end = lru_cache(maxsize=4096)(least_end)


# ---------------------------------------------------------------- parts of nodes given
def _given(problem: Problem, labels: Ints) -> float:
    work, traffic = _Work(problem), problem.traffic
    data = np.flatnonzero(labels == 0)
    trip, before, stay, there, back = _shortest(problem, work, labels, data)
    sums = sum_seconds_by_part(traffic, labels, problem.body, problem.gradients)
    ways = zip(trip.tolist(), there.tolist(), back.tolist(), strict=True)
    ends = [
        _windows(problem, work, int(node), *way)
        for node, way in zip(data, ways, strict=True)
    ]
    found = [max(ends) + float(sums[0])]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    places = (
        len(data) * problem.units * min(problem.hops, len(alive))
    )  # on paths, each of which is used in all rounds
    visits = places // max(len(alive), 1) * problem.policy.rounds
    for part in alive:
        nodes = np.flatnonzero(labels == part)
        found.append(
            _least_time(problem, work, nodes, part, visits, before[nodes], stay[nodes])
        )
        if visits:  # what nobody visits has nothing to sum
            found.append(
                _least_time(problem, work, nodes, part, visits, np.zeros(len(nodes)))
                + float(sums[part])
            )
    return max(found)


def _least_time(
    problem: Problem,
    work: _Work,
    nodes: Ints,
    part: int,
    visits: int,
    outside: Floats,
    stay: Floats | None = None,
) -> float:
    """The least T in which these nodes can serve so many micro-batches, each with `outside` seconds elsewhere."""
    traffic = problem.traffic
    each = work.whole[part] * traffic.slow[nodes] + work.gaps * traffic.gap
    usable = np.isfinite(outside)
    if not usable.any() or not visits:
        return 0.0

    def served(time: float) -> int:
        inside = np.maximum(time - outside[usable], 0.0)
        counts = np.floor(
            (inside + traffic.gap) / np.maximum(each[usable], 1e-12) + 1e-9
        )
        if stay is not None:
            room = (
                traffic.slots[nodes][usable] * inside / np.maximum(stay[usable], 1e-12)
            )
            counts = np.minimum(counts, np.floor(room + 1e-9))
        return int(counts.sum())

    low, high = (
        0.0,
        float(
            outside[usable].max()
            + visits * (each[usable].max() + (0 if stay is None else stay.max()))
        ),
    )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if served(middle) >= visits else (middle, high)
    return low


def _shortest(
    problem: Problem, work: _Work, labels: Ints, data: Ints
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Of each data node the shortest trip, of each hop the least time outside it and the least time a visit stays;
    and of each data node the shortest way there and the shortest back."""
    traffic = problem.traffic
    home = work.data * traffic.slow[data]
    ways = _ways(problem, data)
    trip = np.full(len(data), np.inf)
    outside, stay = np.full(traffic.nodes, np.inf), np.full(traffic.nodes, np.inf)
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    way_there, way_back = np.full((2, len(data)), np.inf if hops else 0.0)
    if hops == 0:
        return home, outside, stay, way_there, way_back
    all_orders = chain.from_iterable(
        part_orders(chosen, problem.rules) for chosen in part_subsets(alive, hops)
    )
    rows = (
        list(islice(all_orders, MAX_PART_ORDERS + 1))
        if len(alive) <= 12 and hops <= MAX_ORDERED_PARTS
        else []
    )
    if not rows or len(rows) > MAX_PART_ORDERS:
        rows = [tuple([NO_PART] * hops)]
    for row in rows:
        layers = [
            np.flatnonzero(labels == part)
            if part != NO_PART
            else np.flatnonzero(labels > 0)
            for part in row
        ]
        own = [_own(work.part, labels, layer) * traffic.slow[layer] for layer in layers]
        forth, home_again = (
            [
                _own(table.min(axis=1), labels, layer) * traffic.slow[layer]
                for layer in layers
            ]
            for table in (traffic.forward, traffic.backward)
        )
        way_there = np.minimum(way_there, _through(data, layers, work.one_way, forth))
        way_back = np.minimum(
            way_back, _through(data, layers, work.one_way.T, home_again)
        )
        there = [work.inner * work.pair[np.ix_(data, layers[0])]]
        for k in range(1, hops):
            link = work.inner * work.pair[np.ix_(layers[k - 1], layers[k])]
            there.append(min_plus(there[-1] + own[k - 1], link))
        left = [work.close * work.pair[np.ix_(layers[-1], data)].T]
        for k in range(hops - 1, 0, -1):
            link = work.inner * work.pair[np.ix_(layers[k - 1], layers[k])]
            left.append(min_plus(left[-1] + own[k], link.T))
        left.reverse()
        for k in range(hops):
            through = there[k] + own[k] + left[k] + home[:, None]
            trip = np.minimum(trip, through.min(axis=1))
            held = (own[k] + left[k]).min(axis=0)
            stay[layers[k]] = np.minimum(stay[layers[k]], held)
            outside[layers[k]] = ways[layers[k]]
    return trip, outside, stay, way_there, way_back


def _ways(problem: Problem, data: Ints) -> Floats:
    """Seconds before a micro-batch can first be at a node, and after which it is home from there, at least.

    The one who comes first need not be the one who leaves last, so both are least for themselves, over any nodes.
    """
    traffic = problem.traffic
    one_way = traffic.latency + traffic.byte * traffic.message.min()
    forward, backward = (
        traffic.forward.min(axis=1)[: problem.body],
        traffic.backward.min(axis=1)[: problem.body],
    )
    there = one_way[data].min(axis=0) + float((forward[0] * traffic.slow[data]).min())
    back = one_way[:, data].min(axis=1) + float(
        (backward[0] * traffic.slow[data]).min()
    )
    first, last = there, back
    for _ in range(problem.hops - 1):
        there = (there + forward[1:].min() * traffic.slow)[:, None] + one_way
        back = (back + backward[1:].min() * traffic.slow)[None, :] + one_way
        there, back = there.min(axis=0), back.min(axis=1)
        first, last = np.minimum(first, there), np.minimum(last, back)
    found: Floats = first + last
    return found


NO_PART = -1


def _own(seconds: Floats, labels: Ints, layer: Ints) -> Floats:
    own: Floats = seconds[labels[layer]]
    return own


def _through(
    data: Ints, layers: Sequence[Ints], one_way: Floats, own: Sequence[Floats]
) -> Floats:
    """Of each data node the least time over one node of each layer and home."""
    way = one_way[np.ix_(data, layers[0])]
    for before, layer, seconds in zip(layers, layers[1:], own, strict=False):
        way = min_plus(way + seconds, one_way[np.ix_(before, layer)])
    least: Floats = (way + own[-1] + one_way[np.ix_(layers[-1], data)].T).min(axis=1)
    return least


# ---------------------------------------------------------------- any arrangement
def _free(problem: Problem, sizes: Ints) -> float:
    work, traffic = _Work(problem), problem.traffic
    hop = work.part[1:].min() if len(work.part) > 1 else 0.0
    link, home = (
        work.inner * work.pair + hop * traffic.slow[None, :],
        work.close * work.pair,
    )
    trip = shortest_cycles(link, home, problem.hops) + work.data * traffic.slow
    there, back = _ways_alone(problem, work, trip)
    ends = sorted(
        _windows(
            problem,
            work,
            node,
            float(trip[node]),
            float(there[node]),
            float(back[node]),
        )
        for node in range(traffic.nodes)
    )
    data = int(sizes[0])
    last = ends[data - 1]
    used, places = problem.units * data * problem.hops, int(traffic.slots.sum())
    equal = bool((traffic.slots == traffic.slots[0]).all()) and not problem.waves
    if (
        problem.policy.reserved
        and equal
        and used == (traffic.nodes - data) * int(traffic.slots[0])
    ):
        least = min(hop, work.data)
        extra = (work.data - least) * float(traffic.slow.min())
        link = work.inner * work.pair + least * traffic.slow[None, :]
        anywhere = (
            shortest_cycles(link, home, problem.hops) + least * traffic.slow + extra
        )
        last = max(last, problem.policy.rounds * float(anywhere.max()))
    if problem.hops:
        last = max(last, price_bound(_market(problem, work, trip), data))
    found = [last + least_sum_seconds(traffic, data, problem.gradients)]
    visits = data * problem.microbatches * problem.hops
    each = np.sort(work.whole[1:].min() * traffic.slow + work.gaps * traffic.gap)[
        : traffic.nodes - data
    ]
    low, high = 0.0, float(visits * each.max())
    for _ in range(60):
        middle = (low + high) / 2
        enough = (
            np.floor((middle + traffic.gap) / np.maximum(each, 1e-12) + 1e-9).sum()
            >= visits
        )
        low, high = (low, middle) if enough else (middle, high)
    found.append(low)
    inside = problem.microbatches * data * _held(work, problem)
    found.append(inside / places)
    return max(found)


def _ways_alone(problem: Problem, work: _Work, trip: Floats) -> tuple[Floats, Floats]:
    """Of each node, as a data node: the least time there, until its head can begin, and back again."""
    traffic, body = problem.traffic, problem.body
    forward, backward = (
        table.min(axis=1)[1:body].min(initial=np.inf)
        for table in (traffic.forward, traffic.backward)
    )
    if not problem.hops:
        return np.zeros(traffic.nodes), np.zeros(traffic.nodes)
    alike = bool(
        (work.one_way == work.one_way.T).all()
        and (traffic.slow == traffic.slow[0]).all()
    )
    if alike:  # then the shortest trip is the shortest both ways
        links = (
            trip - (work.data + work.part[1:].min() * problem.hops) * traffic.slow
        ) / 2
        return (
            links + forward * problem.hops * traffic.slow,
            links + backward * problem.hops * traffic.slow,
        )
    there = shortest_cycles(
        work.one_way + forward * traffic.slow[None, :], work.one_way, problem.hops
    )
    back = shortest_cycles(
        work.one_way.T + backward * traffic.slow[None, :], work.one_way.T, problem.hops
    )
    return there, back


def _market(problem: Problem, work: _Work, trip: Floats) -> Market:
    traffic, count = problem.traffic, problem.microbatches
    slots = np.minimum(traffic.slots, count).astype(float)
    head = 0.0 if problem.waves else work.data - work.own
    hop = float(work.part[1:].min())
    seconds = (
        (work.f + work.b) * traffic.slow
        if problem.slices == 1
        else np.zeros(traffic.nodes)
    )
    ramp = seconds * slots * (slots - 1) / 2
    ramp[count * trip < ramp] = 0.0  # then fewer slots might do better
    apart = work.one_way.copy()
    np.fill_diagonal(apart, np.inf)
    first = (traffic.forward[0].min() * traffic.slow[:, None] + apart).min(axis=0)
    last = (apart + traffic.backward[0].min() * traffic.slow[None, :]).min(axis=1)
    return Market(
        link=work.inner * work.pair + hop * traffic.slow[None, :],
        home=work.close * work.pair + head * traffic.slow[None, :],
        data=(work.data - head) * traffic.slow,
        hop=hop * traffic.slow,
        work=work.whole[1:].min() * traffic.slow + work.gaps * traffic.gap,
        gap=traffic.gap,
        ramp=ramp,
        outside=first + last,
        window=slots,
        slots=traffic.slots.astype(float),
        microbatches=count,
        hops=problem.hops,
    )


def _held(work: _Work, problem: Problem) -> float:
    """Seconds of slots one micro-batch takes at least, over all its nodes: its work there and on the nodes after."""
    slow = float(problem.traffic.slow.min())
    hop = float(work.part[1:].min()) * slow
    apart = ~np.eye(problem.traffic.nodes, dtype=np.bool_)
    link = float(work.pair[apart].min()) if problem.traffic.nodes > 1 else 0.0
    hops = problem.hops
    return sum(
        k * hop + (work.inner * k + work.close - work.inner) * link
        for k in range(1, hops + 1)
    )
