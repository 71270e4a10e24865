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

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import ends_of_sums, least_sum_seconds
from penstock.plan.paths.bisection import bisect_times
from penstock.plan.paths.cycles import shortest_cycles
from penstock.plan.paths.least_work import LeastWork
from penstock.plan.paths.prices import Market, price_bound
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.trips import shortest_trips
from penstock.plan.paths.windows import Window, least_end, round_down

TIME_BISECTIONS = 60
LEAST_SECONDS = 1e-12  # to divide by
VISIT_ROUNDING = 1e-9  # by which a number of visits may miss a whole number


def pass_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Return a lower bound on the mean time of a pass: only the last of them sums gradients."""
    last = path_bound(problem, sizes, labels)
    if problem.passes == 1 or not problem.has_sums:
        return last
    other = path_bound(problem.without_sums(), sizes, labels)
    return problem.mean_pass(other, last)


def path_bound(problem: Problem, sizes: Ints, labels: Ints | None) -> float:
    """Return a time that no plan can beat.

    labels: the part of each node, if the arrangement is given. Otherwise the bound holds for every
        arrangement with these `sizes`.
    """
    if labels is None:
        return _bound_for_sizes(problem, sizes)
    return _bound_for_labels(problem, labels)


# ---------------------------------------------------------------- one data node
class Ways(NamedTuple):
    """The shortest ways of a micro-batch from a data node, in seconds."""

    trip: float  # there and back, with all work
    there: float  # to the head
    back: float  # from the head


def _data_node_end(problem: Problem, work: LeastWork, node: int, ways: Ways) -> float:
    """Return the least end of a data node."""
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
        full = ways.trip * count / held
        ramp = (forward + backward) * (held - 1) / 2
        return float(full + ramp)

    slots = int(min(traffic.slots[node], count))
    own_work = count * work.whole_data * slow
    tasks = 3 * problem.slices * count
    bounds = [
        min(map(end_with, range(1, slots + 1))),
        ways.trip + (count - 1) * longer,
        own_work + (tasks - 1) * least_gap,
    ]
    if policy.reserved:
        in_a_row = policy.rounds * ways.trip
        bounds.append(in_a_row + (problem.units - 1) * longer)
    if unsliced and not problem.waves:
        bounds.append(_exact_data_node_end(problem, node, ways))
    return float(max(bounds))


def _exact_data_node_end(problem: Problem, node: int, ways: Ways) -> float:
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
        there=round_down(ways.there),
        back=round_down(ways.back),
        pause=round_down(float(traffic.gap)),
        first_pause=round_down(float(traffic.first_gap)),
    )
    slots = int(min(traffic.slots[node], problem.microbatches))
    return _cached_least_end(window, problem.microbatches, slots)


_cached_least_end = lru_cache(maxsize=4096)(least_end)


# ---------------------------------------------------------------- a given arrangement
def _bound_for_labels(problem: Problem, labels: Ints) -> float:
    """Return a bound for the arrangement with these parts of the nodes."""
    work = LeastWork(problem)
    data = np.flatnonzero(labels == 0)
    trips = shortest_trips(problem, work, labels, data)
    ends = []
    for node, *ways in zip(data, trips.trip, trips.there, trips.back, strict=True):
        ends.append(_data_node_end(problem, work, int(node), _ways(*ways)))
    bounds = [max(ends), _least_end_of_sums(problem, labels, data, np.array(ends), 0)]
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
    # places on the paths, each of which is used in all rounds
    places = len(data) * problem.units * min(problem.hops, len(alive))
    visits = places // max(len(alive), 1) * problem.policy.rounds
    for part in alive:
        nodes = np.flatnonzero(labels == part)
        service = _Service(problem, work, nodes, part, visits)
        outside = trips.outside[nodes]
        bounds.append(service.least_time(outside, trips.stay[nodes]))
        if visits and problem.has_sums:
            at_once = np.zeros(len(nodes))
            served = service.least_time(at_once)
            bounds.append(_least_end_after(problem, labels, nodes, served, part))
    return max(bounds)


def _ways(trip: float, there: float, back: float) -> Ways:
    """The ways as plain numbers, which a cache can compare."""
    return Ways(float(trip), float(there), float(back))


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


@dataclass(frozen=True, slots=True)
class _Service:
    """Nodes of one part, and the visits that they have to serve together."""

    problem: Problem
    work: LeastWork
    nodes: Ints
    part: int
    visits: int

    def least_time(self, outside: Floats, stay: Floats | None = None) -> float:
        """Return the least time in which the nodes can serve all visits.

        outside: seconds before the first visit of each node and after its last.
        stay: seconds that a visit occupies a slot, at least.
        """
        usable = np.isfinite(outside)
        if not usable.any() or not self.visits:
            return 0.0
        traffic = self.problem.traffic
        gaps = self.work.tasks_per_hop * traffic.gap
        slow = traffic.slow[self.nodes]
        each = (self.work.whole_part[self.part] * slow + gaps)[usable]
        slots = traffic.slots[self.nodes][usable].astype(float)
        longest_stay = 0 if stay is None else stay.max()

        def is_enough(time: float) -> bool:
            inside = np.maximum(time - outside[usable], 0.0)
            counts = _whole_visits(inside + traffic.gap, each)
            if stay is not None:
                by_slots = _whole_visits(slots * inside, stay[usable])
                counts = np.minimum(counts, by_slots)
            return int(counts.sum()) >= self.visits

        one_by_one = self.visits * (each.max() + longest_stay)
        high = float(outside[usable].max() + one_by_one)
        return bisect_times(high, is_enough, TIME_BISECTIONS).low


def _whole_visits(seconds: Floats | float, each: Floats) -> Floats:
    """How many visits that take `each` seconds fit into some seconds."""
    visits: Floats = np.floor(
        seconds / np.maximum(each, LEAST_SECONDS) + VISIT_ROUNDING
    )
    return visits


# ---------------------------------------------------------------- any arrangement
def _bound_for_sizes(problem: Problem, sizes: Ints) -> float:
    """Return a bound for every arrangement with these sizes."""
    work = LeastWork(problem)
    traffic = problem.traffic
    data = int(sizes[0])
    hop = work.trip_part[1:].min() if len(work.trip_part) > 1 else 0.0
    trip = _cycles(problem, work, hop) + work.data * traffic.slow
    there, back = _shortest_ways_from_any_node(problem, work, trip)
    ends = []
    for node, ways in enumerate(zip(trip, there, back, strict=True)):
        ends.append(_data_node_end(problem, work, node, _ways(*ways)))
    last_ends = [sorted(ends)[data - 1]]
    if _all_slots_are_reserved(problem, data):
        last_ends.append(_end_through_any_node(problem, work, hop))
    if problem.hops:
        market = _market(problem, work, trip, np.array(ends))
        last_ends.append(price_bound(market, data))
    sums = least_sum_seconds(problem, 0, data)
    slot_seconds = problem.microbatches * data * _least_slot_seconds(work, problem)
    return max(
        max(last_ends) + sums,
        _least_hop_time(problem, work, data),
        slot_seconds / int(traffic.slots.sum()),
    )


def _cycles(problem: Problem, work: LeastWork, hop: float) -> Floats:
    """The shortest way from each node over other nodes and home again, on which each hop works this long."""
    link = work.inner * work.pair + hop * problem.traffic.slow[None, :]
    home = work.close * work.pair
    return shortest_cycles(link, home, problem.hops)


def _end_through_any_node(problem: Problem, work: LeastWork, hop: float) -> float:
    """Return the least end if every node is on a path, also the one with the longest trip."""
    slow = problem.traffic.slow
    least_work = min(hop, work.data)
    extra = (work.data - least_work) * float(slow.min())
    trips = _cycles(problem, work, least_work) + least_work * slow + extra
    return problem.policy.rounds * float(trips.max())


def _all_slots_are_reserved(problem: Problem, data: int) -> bool:
    """Whether the paths need exactly the slots of all nodes that are no data nodes."""
    slots = problem.traffic.slots
    if not problem.policy.reserved or problem.waves:
        return False
    if not (slots == slots[0]).all():
        return False
    needed = problem.units * data * problem.hops
    return bool(needed == (problem.traffic.nodes - data) * int(slots[0]))


def _least_hop_time(problem: Problem, work: LeastWork, data: int) -> float:
    """Return the least time in which the nodes that are no data nodes can do all work of the hops."""
    traffic = problem.traffic
    visits = data * problem.microbatches * problem.hops
    gaps = work.tasks_per_hop * traffic.gap
    each = work.whole_part[1:].min() * traffic.slow + gaps
    each = np.sort(each)[: traffic.nodes - data]

    def is_enough(time: float) -> bool:
        counts = _whole_visits(time + traffic.gap, each)
        return bool(counts.sum() >= visits)

    one_by_one = float(visits * each.max())
    return bisect_times(one_by_one, is_enough, TIME_BISECTIONS).low


def _shortest_ways_from_any_node(
    problem: Problem, work: LeastWork, trip: Floats
) -> tuple[Floats, Floats]:
    """Return, for each node as a data node, the least seconds to its head, and back from its head."""
    traffic = problem.traffic
    hops = problem.hops
    if not hops:
        return np.zeros(traffic.nodes), np.zeros(traffic.nodes)
    middle = slice(1, problem.body)
    forward = work.forward[middle].min(initial=np.inf)
    backward = work.backward[middle].min(initial=np.inf)
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


def _market(problem: Problem, work: LeastWork, trip: Floats, ends: Floats) -> Market:
    """Return the input of the bound by prices."""
    traffic = problem.traffic
    count = problem.microbatches
    window = np.minimum(traffic.slots, count).astype(float)
    head = 0.0 if problem.waves else work.data - work.own
    hop = float(work.trip_part[1:].min())
    ramp = _ramp(problem, work, window)
    ramp[count * trip < ramp] = 0.0  # then fewer slots might do better
    whole_hop = work.whole_part[1:].min() * traffic.slow
    return Market(
        link=work.inner * work.pair + hop * traffic.slow[None, :],
        home=work.close * work.pair + head * traffic.slow[None, :],
        data=(work.data - head) * traffic.slow,
        hop=hop * traffic.slow,
        work=whole_hop + work.tasks_per_hop * traffic.gap,
        gap=traffic.gap,
        ramp=ramp,
        outside=_seconds_outside(problem, work),
        least_end=ends,
        window=window,
        slots=traffic.slots.astype(float),
        microbatches=count,
        hops=problem.hops,
    )


def _ramp(problem: Problem, work: LeastWork, window: Floats) -> Floats:
    """The seconds in which the slots of each data node are not yet all in use, or no longer."""
    slow = problem.traffic.slow
    first_and_last = np.zeros(problem.traffic.nodes)
    if problem.slices == 1:
        first_and_last = (work.first_forward + work.first_backward) * slow
    ramp: Floats = first_and_last * window * (window - 1) / 2
    return ramp


def _seconds_outside(problem: Problem, work: LeastWork) -> Floats:
    """The least seconds before the first visit of each node, and after its last."""
    traffic = problem.traffic
    apart = work.one_way.copy()
    np.fill_diagonal(apart, np.inf)
    first_forward = traffic.forward[0].min() * traffic.slow
    last_backward = traffic.backward[0].min() * traffic.slow
    before = (first_forward[:, None] + apart).min(axis=0)
    after = (apart + last_backward[None, :]).min(axis=1)
    outside: Floats = before + after
    return outside


def _least_slot_seconds(work: LeastWork, problem: Problem) -> float:
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
