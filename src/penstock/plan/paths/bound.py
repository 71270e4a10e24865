"""A time that no arrangement, no paths and no order can beat under given rules.

One micro-batch alone takes `trip` seconds: its work, and its way there and back. No plan makes it
shorter than the shortest trip from its data node. If the arrangement is free, d nodes must be data
nodes, so at least the d-th shortest trip counts. Now take a data node with s slots and q
micro-batches. Each micro-batch has a forward (f, with the gap) at its start and a backward (b) at
its end on that node, which does one task at a time:

    slot 0 |f------trip------b|f------trip------b|        s slots, each with its first start and its last end:
    slot 1 | .f------trip------b|f------trip------b|      the j-th first start is not before j f,
    slot 2 | . .f------trip------b|f------trip------b|    the j-th last end not after T - j b, so

    s T  >=  q trip + (f + b) s (s-1) / 2

If slots are reserved, every path is used `rounds` times in a row: T >= rounds trip + (s-1) max(f, b).
If the reserved slots are just enough, every node is on s paths, so the worst node's shortest trip
counts too.

This bound ignores which tasks wait for each other on the data node. The module `windows` tries all
orders of these tasks, if there are not too many. The bound also ignores that not all micro-batches
can take the same shortest trip. The module `prices` therefore makes good nodes expensive.

Three more bounds count: the work of a data node; the work of a part over its replicas, after the
first micro-batch can have arrived and before the last must leave; and the sums of gradients over
the replicas of a part, which come after its last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, pairwise

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import ends_of_sums, least_sum_seconds
from penstock.plan.paths.cycles import min_plus, shortest_cycles
from penstock.plan.paths.prices import Market, price_bound
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import MAX_ORDERED_PARTS, part_orders, part_subsets
from penstock.plan.paths.windows import Window, least_end, round_down

MAX_PART_ORDERS = 2000  # orders of parts that are tried one by one
MAX_SUBSET_PARTS = 12  # parts up to which the orders are listed at all
ANY_PART = -1  # stands for any part on a path, if there are too many orders
TIME_BISECTIONS = 60
LEAST_SECONDS = 1e-12  # to divide by
COUNT_ROUNDING = 1e-9


def pass_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Return a lower bound on the mean time of a pass: only the last of them sums gradients."""
    bound = path_bound(problem, sizes, labels)
    if problem.passes == 1 or not problem.has_sums:
        return bound
    return problem.mean_pass(path_bound(problem.without_sums(), sizes, labels), bound)


def path_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Return a time that no plan can beat.

    labels: the part of each node, if the arrangement is given. Otherwise the bound holds for every
        arrangement with these `sizes`.
    """
    if labels is None:
        return _bound_for_sizes(problem, sizes)
    return _bound_for_labels(problem, labels)


class _Work:
    """Seconds of work and of links, as a bound may count them: the least slice of each part.

    trip_part: forward and backward of a slice over each part; in waves over both its halves.
    own: a data node's work on its first part, for one micro-batch.
    data: the same, with the head.
    first_forward, first_backward: a data node's first forward and last backward of a micro-batch.
    whole_part: all slices of a micro-batch over each part.
    whole_data: all slices of a micro-batch over the first part and the head.
    one_way, pair: seconds of a link, and of a link and back.
    inner: how often a micro-batch uses a link of its path, there and back.
    close: how often it uses the link from its last node to its data node.
    tasks_per_hop: tasks of a micro-batch on a node of its path.
    """

    def __init__(self, problem: Problem) -> None:
        traffic = problem.traffic
        body = problem.body
        forward = traffic.forward.min(axis=1)
        backward = traffic.backward.min(axis=1)
        whole_forward = traffic.forward.sum(axis=1)
        whole_backward = traffic.backward.sum(axis=1)
        # the other slices, which one node does one after the other
        other_slices = whole_forward - forward + whole_backward - backward
        both = forward + backward
        whole = whole_forward + whole_backward
        self.trip_part = both[:body].copy()
        self.whole_part = whole[:body].copy()
        if problem.waves:
            self.trip_part += both[body:][::-1]
            self.whole_part += whole[body:][::-1]
            self.own = float(self.trip_part[0] + other_slices[0])
            self.data = self.own
            self.whole_data = float(self.whole_part[0])
            self.inner = 2.0
            self.close = 0.0
            self.tasks_per_hop = 4 * problem.slices
        else:
            self.own = float(both[0] + other_slices[0])
            self.data = float(self.own + both[-1])
            self.whole_data = float(self.whole_part[0] + whole[-1])
            self.inner = 1.0
            self.close = 1.0
            self.tasks_per_hop = 2 * problem.slices
        self.first_forward = float(whole_forward[0])
        self.first_backward = float(whole_backward[0])
        self.one_way: Floats = traffic.latency + traffic.byte * traffic.message.min()
        self.pair: Floats = self.one_way + self.one_way.T


def _least_by_bisection(high: float, is_enough: Callable[[float], bool]) -> float:
    """Return a time just below the least one that is enough, given one that is."""
    low = 0.0
    for _ in range(TIME_BISECTIONS):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return low


# ---------------------------------------------------------------- one data node
def _data_node_end(
    problem: Problem, work: _Work, node: int, trip: float, there: float, back: float
) -> float:
    """Return the least end of a data node whose shortest trip takes `trip` seconds.

    there, back: the shortest way to the head and from the head.
    """
    traffic = problem.traffic
    policy = problem.policy
    slow = traffic.slow[node]
    count = problem.microbatches
    least_gap = min(traffic.gap, traffic.first_gap)
    unsliced = problem.slices == 1
    forward = 0.0
    backward = 0.0
    if unsliced:  # slices of one micro-batch may mingle with those of another
        forward = work.first_forward * slow + least_gap
        backward = work.first_backward * slow + traffic.gap
    longer = max(forward, backward)

    def end_with(held: int) -> float:
        """Return the bound s T >= q trip + (f + b) s (s-1) / 2 for this number of slots."""
        return float(trip * count / held + (forward + backward) * (held - 1) / 2)

    slots = int(min(traffic.slots[node], count))
    tasks = 3 * problem.slices * count
    bounds = [
        min(map(end_with, range(1, slots + 1))),
        trip + (count - 1) * longer,
        count * work.whole_data * slow + (tasks - 1) * least_gap,
    ]
    if policy.reserved:
        bounds.append(policy.rounds * trip + (problem.units - 1) * longer)
    if unsliced and not problem.waves:
        bounds.append(_exact_data_node_end(problem, node, there, back))
    return float(max(bounds))


def _exact_data_node_end(
    problem: Problem, node: int, there: float, back: float
) -> float:
    """Return the least end over all orders of a data node's tasks."""
    traffic = problem.traffic
    slow = float(traffic.slow[node])
    forward = traffic.forward[:, 0] * slow
    backward = traffic.backward[:, 0] * slow
    window = Window(
        forward=round_down(float(forward[0])),
        head=round_down(float(forward[-1])),
        head_back=round_down(float(backward[-1])),
        backward=round_down(float(backward[0])),
        there=round_down(float(there)),
        back=round_down(float(back)),
        pause=round_down(float(traffic.gap)),
        first_pause=round_down(float(traffic.first_gap)),
    )
    slots = int(min(traffic.slots[node], problem.microbatches))
    return _cached_least_end(window, problem.microbatches, slots)


_cached_least_end = lru_cache(maxsize=4096)(least_end)


# ---------------------------------------------------------------- a given arrangement
def _bound_for_labels(problem: Problem, labels: Ints) -> float:
    """Return a bound for the arrangement with these parts of the nodes."""
    work = _Work(problem)
    data = np.flatnonzero(labels == 0)
    trips = _shortest_trips(problem, work, labels, data)
    ends = []
    for number, node in enumerate(data.tolist()):
        trip = float(trips.trip[number])
        there = float(trips.there[number])
        back = float(trips.back[number])
        ends.append(_data_node_end(problem, work, node, trip, there, back))
    bounds = [max(ends), _least_end_of_sums(problem, labels, data, np.array(ends), 0)]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    # places on the paths, each of which is used in all rounds
    places = len(data) * problem.units * min(problem.hops, len(alive))
    visits = places // max(len(alive), 1) * problem.policy.rounds
    for part in alive:
        nodes = np.flatnonzero(labels == part)
        outside = trips.outside[nodes]
        stay = trips.stay[nodes]
        bounds.append(
            _least_service_time(problem, work, nodes, part, visits, outside, stay)
        )
        if visits and problem.has_sums:
            at_once = np.zeros(len(nodes))
            served = _least_service_time(problem, work, nodes, part, visits, at_once)
            bounds.append(_least_end_after(problem, labels, nodes, served, part))
    return max(bounds)


def _least_end_of_sums(
    problem: Problem, labels: Ints, nodes: Ints, ends: Floats, part: int
) -> float:
    """Return the least end of a part's sums if its nodes do not end before these times.

    The head's gradients may be summed before the last backward of the first part, so they do not
    count.
    """
    if not problem.has_sums:
        return 0.0
    last = np.zeros(len(labels))
    last[nodes] = ends
    long_ago = np.zeros(len(labels))
    without_head = replace(problem.traffic, sums=problem.traffic.sums * (0.0, 1.0, 1.0))
    sums = ends_of_sums(without_head, problem.planned_sums, labels, last, long_ago)
    return float(sums[part])


def _least_end_after(
    problem: Problem, labels: Ints, nodes: Ints, served: float, part: int
) -> float:
    """Return the least end of a part's sums if one of its nodes, whichever it is, ends at `served` or later."""
    ends = []
    for place in range(len(nodes)):
        last = np.zeros(len(nodes))
        last[place] = served
        ends.append(_least_end_of_sums(problem, labels, nodes, last, part))
    return min(ends)


def _least_service_time(
    problem: Problem,
    work: _Work,
    nodes: Ints,
    part: int,
    visits: int,
    outside: Floats,
    stay: Floats | None = None,
) -> float:
    """Return the least time in which these nodes can serve the visits.

    outside: seconds before the first visit of each node and after its last.
    stay: seconds that a visit occupies a slot, at least.
    """
    traffic = problem.traffic
    usable = np.isfinite(outside)
    if not usable.any() or not visits:
        return 0.0
    slow = traffic.slow[nodes]
    each = (work.whole_part[part] * slow + work.tasks_per_hop * traffic.gap)[usable]
    slots = traffic.slots[nodes][usable]
    longest_stay = 0 if stay is None else stay.max()

    def is_enough(time: float) -> bool:
        inside = np.maximum(time - outside[usable], 0.0)
        by_work = (inside + traffic.gap) / np.maximum(each, LEAST_SECONDS)
        counts = np.floor(by_work + COUNT_ROUNDING)
        if stay is not None:
            by_slots = slots * inside / np.maximum(stay[usable], LEAST_SECONDS)
            counts = np.minimum(counts, np.floor(by_slots + COUNT_ROUNDING))
        return int(counts.sum()) >= visits

    high = float(outside[usable].max() + visits * (each.max() + longest_stay))
    return _least_by_bisection(high, is_enough)


@dataclass(slots=True, eq=False)
class _Trips:
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


def _shortest_trips(problem: Problem, work: _Work, labels: Ints, data: Ints) -> _Trips:
    """Find the shortest trips over any parts in any order that the rules allow."""
    traffic = problem.traffic
    data_work = work.data * traffic.slow[data]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    hops = min(problem.hops, len(alive))
    never_visited = np.full(traffic.nodes, np.inf)
    if hops == 0:
        no_way = np.zeros(len(data))
        return _Trips(data_work, no_way, no_way, never_visited, never_visited)
    unknown = np.full(len(data), np.inf)
    trips = _Trips(
        unknown, unknown, unknown, never_visited.copy(), never_visited.copy()
    )
    outside = _seconds_outside(problem, data)
    least_forward = traffic.forward.min(axis=1)
    least_backward = traffic.backward.min(axis=1)

    def work_on(seconds: Floats, layer: Ints) -> Floats:
        """Return the work of each node of a layer, given the seconds of each part."""
        own: Floats = seconds[labels[layer]] * traffic.slow[layer]
        return own

    for order in _part_orders_to_try(problem, alive, hops):
        layers = [_nodes_of_part(labels, part) for part in order]
        own = [work_on(work.trip_part, layer) for layer in layers]
        forward = [work_on(least_forward, layer) for layer in layers]
        backward = [work_on(least_backward, layer) for layer in layers]
        there = _shortest_way(data, layers, work.one_way, forward)
        back = _shortest_way(data, layers, work.one_way.T, backward)
        trips.there = np.minimum(trips.there, there)
        trips.back = np.minimum(trips.back, back)
        pairs = [work.pair[np.ix_(*neighbors)] for neighbors in pairwise(layers)]
        links = [work.inner * pair for pair in pairs]
        first_link = work.inner * work.pair[np.ix_(data, layers[0])]
        last_link = work.close * work.pair[np.ix_(layers[-1], data)].T
        arrive = [first_link]  # seconds from a data node to each node of a layer
        for k in range(1, hops):
            arrive.append(min_plus(arrive[-1] + own[k - 1], links[k - 1]))
        rest = [last_link]  # seconds from a node of a layer home
        for k in range(hops - 1, 0, -1):
            rest.append(min_plus(rest[-1] + own[k], links[k - 1].T))
        rest.reverse()
        for k, layer in enumerate(layers):
            through = arrive[k] + own[k] + rest[k] + data_work[:, None]
            trips.trip = np.minimum(trips.trip, through.min(axis=1))
            held = (own[k] + rest[k]).min(axis=0)
            trips.stay[layer] = np.minimum(trips.stay[layer], held)
            trips.outside[layer] = outside[layer]
    return trips


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


def _seconds_outside(problem: Problem, data: Ints) -> Floats:
    """Return the least seconds before a first visit of each node and after a last one, together.

    The micro-batch that comes first need not be the one that leaves last. So the two are minimized
    separately, over any nodes.
    """
    traffic = problem.traffic
    one_way = traffic.latency + traffic.byte * traffic.message.min()
    forward = traffic.forward.min(axis=1)[: problem.body]
    backward = traffic.backward.min(axis=1)[: problem.body]
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


# ---------------------------------------------------------------- any arrangement
def _bound_for_sizes(problem: Problem, sizes: Ints) -> float:
    """Return a bound for every arrangement with these sizes."""
    work = _Work(problem)
    traffic = problem.traffic
    data = int(sizes[0])
    hop = work.trip_part[1:].min() if len(work.trip_part) > 1 else 0.0
    link = work.inner * work.pair + hop * traffic.slow[None, :]
    home = work.close * work.pair
    trip = shortest_cycles(link, home, problem.hops) + work.data * traffic.slow
    there, back = _shortest_ways_from_any_node(problem, work, trip)
    ends = []
    for node in range(traffic.nodes):
        ways = (float(trip[node]), float(there[node]), float(back[node]))
        ends.append(_data_node_end(problem, work, node, *ways))
    last_end = sorted(ends)[data - 1]
    if _all_slots_are_reserved(problem, data):
        # Then every node is on a path, also the one with the longest trip.
        least_work = min(hop, work.data)
        extra = (work.data - least_work) * float(traffic.slow.min())
        link = work.inner * work.pair + least_work * traffic.slow[None, :]
        cycles = shortest_cycles(link, home, problem.hops)
        through_any = cycles + least_work * traffic.slow + extra
        last_end = max(last_end, problem.policy.rounds * float(through_any.max()))
    if problem.hops:
        last_end = max(
            last_end, price_bound(_market(problem, work, trip, np.array(ends)), data)
        )
    sums = least_sum_seconds(problem, 0, data)
    slot_seconds = problem.microbatches * data * _least_slot_seconds(work, problem)
    return max(
        last_end + sums,
        _least_hop_time(problem, work, data),
        slot_seconds / int(traffic.slots.sum()),
    )


def _all_slots_are_reserved(problem: Problem, data: int) -> bool:
    """Whether the paths need exactly the slots of all nodes that are no data nodes."""
    slots = problem.traffic.slots
    if not problem.policy.reserved or problem.waves:
        return False
    if not (slots == slots[0]).all():
        return False
    needed = problem.units * data * problem.hops
    return bool(needed == (problem.traffic.nodes - data) * int(slots[0]))


def _least_hop_time(problem: Problem, work: _Work, data: int) -> float:
    """Return the least time in which the nodes that are no data nodes can do all work of the hops."""
    traffic = problem.traffic
    visits = data * problem.microbatches * problem.hops
    gaps = work.tasks_per_hop * traffic.gap
    each = work.whole_part[1:].min() * traffic.slow + gaps
    each = np.sort(each)[: traffic.nodes - data]

    def is_enough(time: float) -> bool:
        counts = (time + traffic.gap) / np.maximum(each, LEAST_SECONDS)
        return bool(np.floor(counts + COUNT_ROUNDING).sum() >= visits)

    return _least_by_bisection(float(visits * each.max()), is_enough)


def _shortest_ways_from_any_node(
    problem: Problem, work: _Work, trip: Floats
) -> tuple[Floats, Floats]:
    """Return, for each node as a data node, the least seconds to its head, and back from its head."""
    traffic = problem.traffic
    hops = problem.hops
    if not hops:
        return np.zeros(traffic.nodes), np.zeros(traffic.nodes)
    middle = slice(1, problem.body)
    forward = traffic.forward.min(axis=1)[middle].min(initial=np.inf)
    backward = traffic.backward.min(axis=1)[middle].min(initial=np.inf)
    symmetric = (work.one_way == work.one_way.T).all()
    equal_nodes = (traffic.slow == traffic.slow[0]).all()
    if symmetric and equal_nodes:  # then the shortest trip is the shortest both ways
        trip_work = work.data + work.trip_part[1:].min() * hops
        links = (trip - trip_work * traffic.slow) / 2
        there = links + forward * hops * traffic.slow
        back = links + backward * hops * traffic.slow
        return there, back
    onward = work.one_way + forward * traffic.slow[None, :]
    homeward = work.one_way.T + backward * traffic.slow[None, :]
    there = shortest_cycles(onward, work.one_way, hops)
    back = shortest_cycles(homeward, work.one_way.T, hops)
    return there, back


def _market(problem: Problem, work: _Work, trip: Floats, ends: Floats) -> Market:
    """Return the input of the bound by prices."""
    traffic = problem.traffic
    count = problem.microbatches
    window = np.minimum(traffic.slots, count).astype(float)
    head = 0.0 if problem.waves else work.data - work.own
    hop = float(work.trip_part[1:].min())
    first_and_last = np.zeros(traffic.nodes)
    if problem.slices == 1:
        first_and_last = (work.first_forward + work.first_backward) * traffic.slow
    ramp = first_and_last * window * (window - 1) / 2
    ramp[count * trip < ramp] = 0.0  # then fewer slots might do better
    apart = work.one_way.copy()
    np.fill_diagonal(apart, np.inf)
    first_forward = traffic.forward[0].min() * traffic.slow
    last_backward = traffic.backward[0].min() * traffic.slow
    before = (first_forward[:, None] + apart).min(axis=0)
    after = (apart + last_backward[None, :]).min(axis=1)
    whole_hop = work.whole_part[1:].min() * traffic.slow
    return Market(
        link=work.inner * work.pair + hop * traffic.slow[None, :],
        home=work.close * work.pair + head * traffic.slow[None, :],
        data=(work.data - head) * traffic.slow,
        hop=hop * traffic.slow,
        work=whole_hop + work.tasks_per_hop * traffic.gap,
        gap=traffic.gap,
        ramp=ramp,
        outside=before + after,
        least_end=ends,
        window=window,
        slots=traffic.slots.astype(float),
        microbatches=count,
        hops=problem.hops,
    )


def _least_slot_seconds(work: _Work, problem: Problem) -> float:
    """Return the least slot-seconds that one micro-batch takes on all its nodes together.

    It holds a slot on a node during its work there and on all nodes after it.
    """
    nodes = problem.traffic.nodes
    slow = float(problem.traffic.slow.min())
    hop = float(work.trip_part[1:].min()) * slow
    link = 0.0
    if nodes > 1:
        apart = ~np.eye(nodes, dtype=np.bool_)
        link = float(work.pair[apart].min())
    seconds = 0.0
    for k in range(1, problem.hops + 1):
        seconds += k * hop + (work.inner * k + work.close - work.inner) * link
    return seconds
