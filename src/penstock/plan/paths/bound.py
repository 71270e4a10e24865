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

This bound ignores which tasks wait for each other on the data node. `least_end` tries all
orders of these tasks, if there are not too many. The bound also ignores that not all micro-batches
can take the same shortest trip. `price_bound` therefore makes good nodes expensive.

Three more bounds count: the work of a data node; the work of a part over its replicas, after the
first micro-batch can have arrived and before the last must leave; and the sums of gradients over
the replicas of a part, which come after its last backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import LeastWork, Problem, ProblemArrays
from penstock.plan.paths.rules import MAX_ORDERED_PARTS, part_orders, part_subsets
from penstock.plan.paths.simulator import ends_of_sums

# ---------------------------------------------------------------- bisection


class Bracket(NamedTuple):
    """A time that is not enough, and a time that is. The first one may count as a lower bound."""

    low: float
    high: float


def bisect_times(
    high: float, is_enough: Callable[[float], bool], halvings: int
) -> Bracket:
    """Narrow down the least time that is enough, given one that is.

    >>> bisect_times(8.0, lambda time: time >= 3.0, 3)
    Bracket(low=2.0, high=3.0)
    """
    low = 0.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return Bracket(low, high)


# ---------------------------------------------------------------- the shortest round trips in any arrangement
# The shortest round trips: from a node over a number of other nodes, all different, and home.
#
# walks[r, u, v]    the least time from u over r more nodes home to v, if a walk may visit a node twice. One matrix
#                   product for each r, in which times are added and the minimum takes the place of the sum.
# trips             a depth-first search from each node, nearest nodes first, as long as a walk home could still be
#                   shorter than the best trip.

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


# ---------------------------------------------------------------- the shortest trips on a given arrangement
# The shortest trips of micro-batches over the nodes of a given arrangement.
#
# A trip starts at a data node, visits a node of each part on its path, and comes home. The nodes that
# may be visited at one place of a path are a layer:
#
#     data nodes      nodes of part 1      nodes of part 3      data nodes
#         0 ───────────── 2 ───────────────── 5 ───────────────── 0
#         1 ───────────── 3 ───────────────── 6 ───────────────── 1

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
    problem: Problem, work: LeastWork, part_of_node: Ints, data: Ints
) -> Trips:
    """Find the shortest trips over any parts in any order that the rules allow."""
    arrays = problem.arrays
    data_work = work.data * arrays.slow[data]
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    hops = min(problem.hops, len(alive))
    never_visited = np.full(arrays.nodes, np.inf)
    if hops == 0:
        no_way = np.zeros(len(data))
        return Trips(data_work, no_way, no_way, never_visited, never_visited)
    unknown = np.full(len(data), np.inf)
    trips = Trips(unknown, unknown, unknown, never_visited.copy(), never_visited.copy())
    outside = _seconds_outside_from(problem, work, data)
    for order in _part_orders_to_try(problem, alive, hops):
        layers = [_nodes_of_part(part_of_node, part) for part in order]
        _try_ways(problem, work, trips, part_of_node, data, layers)
        _try_round_trips(problem, work, trips, part_of_node, data, layers)
        for layer in layers:
            trips.outside[layer] = outside[layer]
    return trips


def _try_ways(
    problem: Problem,
    work: LeastWork,
    trips: Trips,
    part_of_node: Ints,
    data: Ints,
    layers: Sequence[Ints],
) -> None:
    """Shorten the ways to the heads and back, if those over these layers of nodes are shorter."""
    forward = [
        _seconds_on(problem, work.forward, part_of_node, layer) for layer in layers
    ]
    backward = [
        _seconds_on(problem, work.backward, part_of_node, layer) for layer in layers
    ]
    there = _shortest_way(data, layers, work.one_way, forward)
    back = _shortest_way(data, layers, work.one_way.T, backward)
    trips.there = np.minimum(trips.there, there)
    trips.back = np.minimum(trips.back, back)


def _try_round_trips(
    problem: Problem,
    work: LeastWork,
    trips: Trips,
    part_of_node: Ints,
    data: Ints,
    layers: Sequence[Ints],
) -> None:
    """Shorten the trips and the stays, if those over these layers of nodes are shorter.

    data node ──arrive[k]──► [own[k]: the work on a node of layer k] ──rest[k]──► data node
    """
    own = [
        _seconds_on(problem, work.trip_part, part_of_node, layer) for layer in layers
    ]
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
    data_work = work.data * problem.arrays.slow[data]
    for k, layer in enumerate(layers):
        through = arrive[k] + own[k] + rest[k] + data_work[:, None]
        trips.trip = np.minimum(trips.trip, through.min(axis=1))
        held = (own[k] + rest[k]).min(axis=0)
        trips.stay[layer] = np.minimum(trips.stay[layer], held)


def _seconds_on(
    problem: Problem, seconds: Floats, part_of_node: Ints, layer: Ints
) -> Floats:
    """Return the work of each node of a layer, given the seconds of each part."""
    own: Floats = seconds[part_of_node[layer]] * problem.arrays.slow[layer]
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


def _nodes_of_part(part_of_node: Ints, part: int) -> Ints:
    if part == ANY_PART:
        return np.flatnonzero(part_of_node > 0)
    return np.flatnonzero(part_of_node == part)


def _seconds_outside_from(problem: Problem, work: LeastWork, data: Ints) -> Floats:
    """Return the least seconds before a first visit of each node and after a last one, together.

    The micro-batch that comes first need not be the one that leaves last. So the two are minimized
    separately, over any nodes.
    """
    arrays = problem.arrays
    one_way = work.one_way
    forward = work.forward[: problem.body]
    backward = work.backward[: problem.body]
    first_forward = float((forward[0] * arrays.slow[data]).min())
    last_backward = float((backward[0] * arrays.slow[data]).min())
    there = one_way[data].min(axis=0) + first_forward
    back = one_way[:, data].min(axis=1) + last_backward
    before = there
    after = back
    for _ in range(problem.hops - 1):
        onward = (there + forward[1:].min() * arrays.slow)[:, None] + one_way
        there = onward.min(axis=0)
        homeward = (back + backward[1:].min() * arrays.slow)[None, :] + one_way
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


# ---------------------------------------------------------------- one data node alone
# The least time that one data node needs, whatever happens elsewhere: an exact search over all orders of its tasks.
#
# Each micro-batch visits the data node four times, and needs a certain time between the visits. The
# node does one task at a time, and at most `slots` micro-batches are under way at once:
#
#     F ──── there ────► H h ──── back ────► B           H, h: forward and backward of the head
#     |------------------ a slot ----------------|
#
# All micro-batches are alike, so they can keep the same order everywhere: if one overtakes another
# between two tasks, the two can exchange the rest of their ways, and no time changes. So an order of
# the tasks is a word over the letters F H h B, each q times for q micro-batches, and the k-th H
# belongs to the k-th F.
#
# The search builds the words letter by letter. The only facts about a prefix that matter are how
# often each letter occurs, when the node is free, and when the micro-batches under way come back. If
# two prefixes have the same counts and one is nowhere later, the other can be dropped. Few prefixes
# remain, and the least end of all words is exact for these times between the visits, and therefore a
# bound for longer ones.

MAX_LABELS = 2_500  # prefixes that are kept; beyond that there is no bound from here
TIME_TOLERANCE = 1e-12  # seconds

TaskCounts = tuple[int, int, int, int]  # of F, H, h and B in a prefix
# When the node is free, and then when the micro-batches under way come back: for H, for h, for B.
Label = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The seconds of a data node's tasks for one micro-batch, and of the ways in between.

    pause: seconds after h and after B.
    first_pause: seconds after F.
    """

    forward: float
    head: float
    head_back: float
    backward: float
    there: float
    back: float
    pause: float = 0.0
    first_pause: float = 0.0


def least_end(window: Window, microbatches: int, slots: int) -> float:
    """Return the least time for all micro-batches, or 0 if the search would be too long.

    >>> least_end(Window(1.0, 0.5, 0.5, 2.0, there=2.0, back=3.0), microbatches=1, slots=1)
    9.0
    """
    prefixes: dict[TaskCounts, list[Label]] = {(0, 0, 0, 0): [(0.0,)]}
    seen = 0
    for _ in range(4 * microbatches):
        longer: dict[TaskCounts, list[Label]] = {}
        for counts, labels in prefixes.items():
            undominated = _undominated(labels)
            seen += len(undominated)
            if seen > MAX_LABELS:
                return 0.0
            for label in undominated:
                extensions = _extend(window, counts, label, microbatches, slots)
                for new_counts, new_label in extensions:
                    longer.setdefault(new_counts, []).append(new_label)
        prefixes = longer
    ends = [label[0] for labels in prefixes.values() for label in labels]
    return min(ends) - window.pause if ends else 0.0


def _extend(
    window: Window, counts: TaskCounts, label: Label, microbatches: int, slots: int
) -> list[tuple[TaskCounts, Label]]:
    """Return the prefixes that are one letter longer."""
    begun, headed, turned, done = counts
    free = label[0]
    for_head = label[1 : 1 + begun - headed]
    for_turn = label[1 + begun - headed : 1 + begun - turned]
    for_back = label[1 + begun - turned :]
    extensions: list[tuple[TaskCounts, Label]] = []
    if begun < microbatches and begun - done < slots:  # F
        end = free + window.forward
        extended = (
            end + window.first_pause,
            *for_head,
            end + window.there,
            *for_turn,
            *for_back,
        )
        extensions.append(((begun + 1, headed, turned, done), extended))
    if for_head:  # H
        end = max(free, for_head[0]) + window.head
        extended = (end, *for_head[1:], *for_turn, end, *for_back)
        extensions.append(((begun, headed + 1, turned, done), extended))
    if for_turn:  # h
        end = max(free, for_turn[0]) + window.head_back
        extended = (
            end + window.pause,
            *for_head,
            *for_turn[1:],
            *for_back,
            end + window.back,
        )
        extensions.append(((begun, headed, turned + 1, done), extended))
    if for_back:  # B
        end = max(free, for_back[0]) + window.backward
        extended = (end + window.pause, *for_head, *for_turn, *for_back[1:])
        extensions.append(((begun, headed, turned, done + 1), extended))
    return extensions


def _undominated(labels: list[Label]) -> list[Label]:
    """Return the labels that no other label beats or equals everywhere."""
    undominated: list[Label] = []
    for label in sorted(labels):
        dominated = any(_is_nowhere_later(other, label) for other in undominated)
        if not dominated:
            undominated.append(label)
    return undominated


def _is_nowhere_later(label: Label, other: Label) -> bool:
    return all(map(_is_no_later, label, other))


def _is_no_later(time: float, other: float) -> bool:
    return time <= other + TIME_TOLERANCE


def round_down(seconds: float) -> float:
    """Return at most `seconds`, with four digits, so that nodes that are nearly alike share one result."""
    if seconds <= 0 or not math.isfinite(seconds):
        return seconds
    step = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return math.floor(seconds / step) * step


# ---------------------------------------------------------------- prices for good nodes
# A bound for every arrangement, by prices for the slots and the time of good nodes.
#
# The shortest trips all lead over the same few nodes, which cannot serve everybody. Let T be the
# makespan of a plan, D the set of its data nodes, q the number of micro-batches per data node, and
# trip(m) the time that a micro-batch takes alone, on its data node and away from it. Then
#
#     for a data node d      sum of trip(m) over its micro-batches + ramp   <=  s T         s: its slots
#     for any other node n   sum of hold(m, n) over its visits              <=  s (T - o)   o: the time before the first
#                            sum of work over its visits                    <=  T - o          visit and after the last
#
# Here hold(m, n) is the least time from m's forward on n to its backward there: its work on n, and the
# rest of its way there and back. (If T < o, n is not used at all. A data node has no visits of
# others.) Multiply the lines by 1 / (s |D|) for each data node, by a price p(n) >= 0 for a second of a
# slot and w(n) >= 0 for a second of work, and add them up:
#
#     T + sum of (p s + w)(T - o) over nodes not in D  >=  sum over d in D of (ramp / s |D| + q P(d))
#
# P(d) is the least value, over all trips from d, of trip / (s |D|) + sum of (p hold + w work) over the
# nodes of the trip. D has only nodes that can be done by T as data nodes, with the shortest trip for
# every micro-batch (`least_end`). These are few if T is small, and they lie close together,
# so that their trips compete for the same nodes. For any prices, the least T that satisfies the line
# above for the cheapest choice of D is a bound: a larger T allows more data nodes and offers more.
# Prices rise where the cheapest trips ask for more than a node has (a subgradient method), and
# the best bound found on the way counts.
#
#     P(d) = least over d -> a -> b -> c -> d of the sum of (price so far) x (seconds of the next link and node)

PRICE_UPDATES = 90
LARGE_CLUSTER_NODES = 60  # larger clusters get a third of the updates
MAX_UPDATES_WITHOUT_GAIN = 10  # then prices change by smaller steps
FIRST_PRICE_STEP = 0.15
MAX_PRICED_NODES = 250  # larger clusters would take too long
# Steps of the search for cheapest trips, in each update of the prices.
MAX_CHEAPEST_STEPS = 400_000
MIN_CHEAPEST_STEPS_PER_NODE = 200
PRICE_BISECTIONS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """The seconds of everything, as a bound may count them. One number per node, or per pair of nodes."""

    link: Floats  # to the next node of a trip, and its work there [node, node]
    home: Floats  # the last link, and the head [node, node]
    data: Floats  # a data node's own work on one micro-batch, without the head
    hop: Floats  # another node's work on one slice
    work: Floats  # another node's work on all slices, with the gaps
    gap: float
    ramp: Floats  # slot-seconds that a data node cannot use
    outside: Floats  # before the first visit and after the last
    least_end: Floats  # the least end of each node as a data node, whatever its trips
    window: Floats  # micro-batches that a data node can have under way
    slots: Floats  # micro-batches that another node can hold
    microbatches: int
    hops: int


@dataclass(frozen=True, slots=True, eq=False)
class _Prices:
    """The price of a second of a slot and of a second of work on each node."""

    slot: Floats
    work: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Optimum:
    """The bound for some prices, the cheapest data nodes, and the cheapest trip from each node."""

    bound: float
    data_nodes: Ints
    trips: Ints


def price_bound(market: Market, data: int) -> float:
    """Return a time that no plan with this number of data nodes can beat."""
    count = len(market.data)
    if count > MAX_PRICED_NODES or not 1 <= market.hops < count or data >= count:
        return 0.0
    link = market.link.copy()
    np.fill_diagonal(link, np.inf)
    home = market.home.copy()
    np.fill_diagonal(home, np.inf)
    walks = walks_home(link, home, market.hops)
    prices = _Prices(np.zeros(count), np.zeros(count))
    best = 0.0
    best_prices = prices
    step = FIRST_PRICE_STEP
    without_gain = 0
    updates = PRICE_UPDATES if count <= LARGE_CLUSTER_NODES else PRICE_UPDATES // 3
    for _ in range(updates):
        optimum = _optimum(market, data, link, home, walks, prices)
        if optimum.bound > best * (1 + 1e-9):
            best = optimum.bound
            best_prices = prices
            without_gain = 0
        else:
            without_gain += 1
        if without_gain >= MAX_UPDATES_WITHOUT_GAIN:
            step = 0.5 * step
            without_gain = 0
            prices = best_prices
            optimum = _optimum(market, data, link, home, walks, prices)
        held, worked = _demand(market, link, home, optimum)
        supply = np.maximum(optimum.bound - market.outside, 0.0)
        supply[optimum.data_nodes] = 0.0
        slot_excess = held / market.slots - supply
        work_excess = worked - supply
        length = float(np.sqrt((slot_excess**2).sum() + (work_excess**2).sum()))
        if length < 1e-9:
            break
        rate = step / length / data
        prices = _Prices(
            np.maximum(prices.slot + rate * slot_excess / market.slots, 0.0),
            np.maximum(prices.work + rate * work_excess, 0.0),
        )
    return best


def _optimum(
    market: Market,
    data: int,
    link: Floats,
    home: Floats,
    walks: Floats,
    prices: _Prices,
) -> _Optimum:
    """Return the bound for these prices, and the data nodes and trips that are cheapest at it."""
    count = len(prices.slot)
    own = 1.0 / (data * market.window)
    cheapest = np.zeros(count)
    trips = np.zeros((count, market.hops + 1), dtype=np.int64)
    compile_if_large(_find_cheapest_trips, MIN_COMPILED_SIZE)(
        link,
        home,
        walks,
        market.hops,
        own,
        prices.slot,
        prices.work * market.work + prices.slot * market.hop,
        MAX_CHEAPEST_STEPS // count + MIN_CHEAPEST_STEPS_PER_NODE,
        cheapest,
        trips,
    )
    base = market.ramp * own + market.microbatches * (cheapest + own * market.data)
    rate = prices.slot * market.slots + prices.work
    gap_value = prices.work * market.gap

    def demanded(end: float) -> Floats:
        """What each node would ask for as a data node, and no longer offer as another one.

        It is infinite for a node that cannot be done by this end as a data node.
        """
        room = np.maximum(end - market.outside, 0.0)
        total: Floats = base + rate * room + gap_value
        return np.where(market.least_end <= end, total, np.inf)

    def offered(end: float) -> float:
        room = np.maximum(end - market.outside, 0.0)
        return end + float((rate * room + gap_value).sum())

    def is_enough(end: float) -> bool:
        cheapest_nodes = np.partition(demanded(end), data - 1)[:data]
        return offered(end) >= float(cheapest_nodes.sum())

    high = float(base.max()) * data + float(market.least_end.max()) + 1.0
    least = bisect_times(high, is_enough, PRICE_BISECTIONS)
    data_nodes = np.argpartition(demanded(least.high), data - 1)[:data]
    return _Optimum(least.low, data_nodes, trips)


def _demand(
    market: Market, link: Floats, home: Floats, optimum: _Optimum
) -> tuple[Floats, Floats]:
    """Return the seconds of slots and of work that the cheapest trips take on each node."""
    held = np.zeros(len(link))
    worked = np.zeros(len(link))
    for node in optimum.data_nodes.tolist():
        trip = optimum.trips[node].tolist()
        if trip[0] < 0:
            continue
        rest = float(home[trip[-1], node])
        for place in range(market.hops, 0, -1):
            here = trip[place]
            held[here] += market.microbatches * (rest + market.hop[here])
            worked[here] += market.microbatches * market.work[here]
            rest += float(link[trip[place - 1], here])
    return held, worked


def _find_cheapest_trips(  # noqa: PLR0912, PLR0915
    link: Floats,
    home: Floats,
    walks: Floats,
    hops: int,
    own: Floats,
    slot: Floats,
    fixed: Floats,
    max_steps: int,
    cheapest: Floats,
    trips: Ints,
) -> None:
    """Fill `cheapest` and `trips` by a depth-first search from each node.

    The rest of a trip costs at least the price so far times the shortest walk home.
    """
    count = len(link)
    path = np.zeros(hops + 1, np.int64)
    place = np.zeros(hops + 1, np.int64)
    cost = np.zeros(hops + 1)
    price = np.zeros(hops + 1)
    ranked = np.zeros((hops, count), np.int64)
    least = np.zeros((hops, count))
    for data in range(count):
        best = np.inf
        steps = 0
        depth = 0
        path[0] = data
        place[0] = 0
        cost[0] = 0.0
        price[0] = own[data]
        trips[data, 0] = -1
        fresh = True
        while depth >= 0 and steps < max_steps:
            steps += 1
            here = path[depth]
            left = hops - depth - 1  # nodes after the next
            if fresh:
                for node in range(count):
                    rest = walks[left, node, data]
                    least[depth, node] = (
                        price[depth] * (link[here, node] + rest)
                        + slot[node] * rest
                        + fixed[node]
                    )
                order = np.argsort(least[depth])
                for k in range(count):
                    ranked[depth, k] = order[k]
                fresh = False
            if place[depth] >= count:
                depth -= 1
                continue
            there = ranked[depth, place[depth]]
            place[depth] += 1
            if cost[depth] + least[depth, there] >= best:
                depth -= 1  # the nodes ranked after it are no cheaper
                continue
            seen = False
            for k in range(depth + 1):
                seen = seen or path[k] == there
            if seen:
                continue
            so_far = cost[depth] + price[depth] * link[here, there] + fixed[there]
            if left == 0:
                best = so_far + (price[depth] + slot[there]) * home[there, data]
                for k in range(depth + 1):
                    trips[data, k] = path[k]
                trips[data, hops] = there
                continue
            depth += 1
            path[depth] = there
            place[depth] = 0
            cost[depth] = so_far
            price[depth] = price[depth - 1] + slot[there]
            fresh = True
        if depth >= 0:
            # The search was too long. The shortest walk without prices costs no more than a trip.
            trips[data, 0] = -1
            best = np.inf
            for node in range(count):
                if node != data:
                    walk = link[data, node] + walks[hops - 1, node, data]
                    best = min(best, own[data] * walk)
        cheapest[data] = best


# ---------------------------------------------------------------- least sums of gradients

SUM_BISECTIONS = 50
MAX_SORTED_NODES = 200  # larger clusters get a coarser bound
LEAST_SECONDS_PER_BYTE = 1e-30  # to divide by


def least_sum_seconds(problem: Problem, part: int, replicas: int) -> float:
    """Return a lower bound on the seconds from the last backward of a part to the end of its sums.

    Only the sums that have to wait for that backward count.
    """
    seconds = 0.0
    for size in problem.arrays.sums[part, 1:].tolist():
        if problem.planned_sums:
            seconds += _least_exchange(problem.arrays, replicas, size)
        else:
            seconds += _least_ring(problem.arrays, replicas, size)
    return seconds


def _least_ring(arrays: ProblemArrays, replicas: int, size: float) -> float:
    """Return a lower bound for a ring of any `replicas` nodes."""
    if replicas < 2 or size <= 0 or arrays.nodes < 2:
        return 0.0
    apart = ~np.eye(arrays.nodes, dtype=np.bool_)
    share = arrays.latency[apart] + arrays.byte[apart] * (size / replicas)
    return 2.0 * (replicas - 1) * float(share.min())


def _least_exchange(arrays: ProblemArrays, replicas: int, size: float) -> float:
    """Return a lower bound for any kind of sum over any `replicas` nodes.

    The node that is done last must still send all its bytes, over at most as many links as there
    are other replicas.
    """
    if replicas < 2 or size <= 0 or arrays.nodes < replicas:
        return 0.0
    latency = arrays.latency.copy()
    np.fill_diagonal(latency, np.inf)
    byte = np.maximum(arrays.byte, LEAST_SECONDS_PER_BYTE)
    if arrays.nodes > MAX_SORTED_NODES:
        apart = ~np.eye(arrays.nodes, dtype=np.bool_)
        return float(latency.min() + byte[apart].min() * size / (replicas - 1))

    def is_enough(seconds: float) -> bool:
        sent = np.maximum(seconds - latency, 0.0) / byte
        best = np.sort(sent, axis=1)[:, -(replicas - 1) :].sum(axis=1)
        return bool(best.max() >= size)

    high = float((arrays.latency + arrays.byte * size).max()) + 1e-12
    return bisect_times(high, is_enough, SUM_BISECTIONS).low


# ---------------------------------------------------------------- the bound

TIME_BISECTIONS = 60
LEAST_SECONDS = 1e-12  # to divide by
VISIT_ROUNDING = 1e-9  # by which a number of visits may miss a whole number


def pass_bound(problem: Problem, sizes: Ints, part_of_node: Ints | None) -> float:
    """Return a lower bound on the mean time of a pass: only the last of them sums gradients."""
    last = path_bound(problem, sizes, part_of_node)
    if problem.passes == 1 or not problem.has_sums:
        return last
    other = path_bound(problem.without_sums(), sizes, part_of_node)
    return problem.mean_pass(other, last)


def path_bound(problem: Problem, sizes: Ints, part_of_node: Ints | None) -> float:
    """Return a time that no plan can beat.

    part_of_node: the part of each node, if the arrangement is given. Otherwise the bound holds for every
        arrangement with these `sizes`.
    """
    if part_of_node is None:
        return _bound_for_sizes(problem, sizes)
    return _bound_for_arrangement(problem, part_of_node)


# ---------------------------------------------------------------- one data node
class Ways(NamedTuple):
    """The shortest ways of a micro-batch from a data node, in seconds."""

    trip: float  # there and back, with all work
    there: float  # to the head
    back: float  # from the head


def _data_node_end(problem: Problem, work: LeastWork, node: int, ways: Ways) -> float:
    """Return the least end of a data node."""
    arrays = problem.arrays
    policy = problem.policy
    slow = arrays.slow[node]
    count = problem.microbatches
    least_gap = min(arrays.gap, arrays.first_gap)
    unsliced = problem.slices == 1
    forward = 0.0
    backward = 0.0
    if unsliced:  # slices of one micro-batch may mingle with those of another
        forward = work.first_forward * slow + least_gap
        backward = work.first_backward * slow + arrays.gap
    longer = max(forward, backward)

    def end_with(held: int) -> float:
        """Return the bound s T >= q trip + (f + b) s (s-1) / 2 for this number of slots."""
        full = ways.trip * count / held
        ramp = (forward + backward) * (held - 1) / 2
        return float(full + ramp)

    slots = int(min(arrays.slots[node], count))
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
    arrays = problem.arrays
    slow = float(arrays.slow[node])
    forward = arrays.forward[:, 0] * slow
    backward = arrays.backward[:, 0] * slow
    window = Window(
        forward=round_down(float(forward[0])),
        head=round_down(float(forward[-1])),
        head_back=round_down(float(backward[-1])),
        backward=round_down(float(backward[0])),
        there=round_down(ways.there),
        back=round_down(ways.back),
        pause=round_down(float(arrays.gap)),
        first_pause=round_down(float(arrays.first_gap)),
    )
    slots = int(min(arrays.slots[node], problem.microbatches))
    return _cached_least_end(window, problem.microbatches, slots)


_cached_least_end = lru_cache(maxsize=4096)(least_end)


# ---------------------------------------------------------------- a given arrangement
def _bound_for_arrangement(problem: Problem, part_of_node: Ints) -> float:
    """Return a bound for the arrangement with these parts of the nodes."""
    work = LeastWork(problem)
    data = np.flatnonzero(part_of_node == 0)
    trips = shortest_trips(problem, work, part_of_node, data)
    ends = []
    for node, *ways in zip(data, trips.trip, trips.there, trips.back, strict=True):
        ends.append(_data_node_end(problem, work, int(node), _ways(*ways)))
    bounds = [
        max(ends),
        _least_end_of_sums(problem, part_of_node, data, np.array(ends), 0),
    ]
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    # places on the paths, each of which is used in all rounds
    places = len(data) * problem.units * min(problem.hops, len(alive))
    visits = places // max(len(alive), 1) * problem.policy.rounds
    for part in alive:
        nodes = np.flatnonzero(part_of_node == part)
        service = _Service(problem, work, nodes, part, visits)
        outside = trips.outside[nodes]
        bounds.append(service.least_time(outside, trips.stay[nodes]))
        if visits and problem.has_sums:
            at_once = np.zeros(len(nodes))
            served = service.least_time(at_once)
            bounds.append(_least_end_after(problem, part_of_node, nodes, served, part))
    return max(bounds)


def _ways(trip: float, there: float, back: float) -> Ways:
    """The ways as plain numbers, which a cache can compare."""
    return Ways(float(trip), float(there), float(back))


def _least_end_of_sums(
    problem: Problem, part_of_node: Ints, nodes: Ints, ends: Floats, part: int
) -> float:
    """Return the least end of a part's sums if its nodes do not end before these times.

    The head's gradients may be summed before the last backward of the first part, so they do not
    count.
    """
    if not problem.has_sums:
        return 0.0
    last = np.zeros(len(part_of_node))
    last[nodes] = ends
    long_ago = np.zeros(len(part_of_node))
    without_head = problem.arrays._replace(sums=problem.arrays.sums * (0.0, 1.0, 1.0))
    sums = ends_of_sums(
        without_head, problem.planned_sums, part_of_node, last, long_ago
    )
    return float(sums[part])


def _least_end_after(
    problem: Problem, part_of_node: Ints, nodes: Ints, served: float, part: int
) -> float:
    """Return the least end of a part's sums if one of its nodes, whichever it is, ends at `served` or later."""
    ends = []
    for place in range(len(nodes)):
        last = np.zeros(len(nodes))
        last[place] = served
        ends.append(_least_end_of_sums(problem, part_of_node, nodes, last, part))
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
        arrays = self.problem.arrays
        gaps = self.work.tasks_per_hop * arrays.gap
        slow = arrays.slow[self.nodes]
        each = (self.work.whole_part[self.part] * slow + gaps)[usable]
        slots = arrays.slots[self.nodes][usable].astype(float)
        longest_stay = 0 if stay is None else stay.max()

        def is_enough(time: float) -> bool:
            inside = np.maximum(time - outside[usable], 0.0)
            counts = _whole_visits(inside + arrays.gap, each)
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
    arrays = problem.arrays
    data = int(sizes[0])
    hop = work.trip_part[1:].min() if len(work.trip_part) > 1 else 0.0
    trip = _cycles(problem, work, hop) + work.data * arrays.slow
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
        slot_seconds / int(arrays.slots.sum()),
    )


def _cycles(problem: Problem, work: LeastWork, hop: float) -> Floats:
    """The shortest way from each node over other nodes and home again, on which each hop works this long."""
    link = work.inner * work.pair + hop * problem.arrays.slow[None, :]
    home = work.close * work.pair
    return shortest_cycles(link, home, problem.hops)


def _end_through_any_node(problem: Problem, work: LeastWork, hop: float) -> float:
    """Return the least end if every node is on a path, also the one with the longest trip."""
    slow = problem.arrays.slow
    least_work = min(hop, work.data)
    extra = (work.data - least_work) * float(slow.min())
    trips = _cycles(problem, work, least_work) + least_work * slow + extra
    return problem.policy.rounds * float(trips.max())


def _all_slots_are_reserved(problem: Problem, data: int) -> bool:
    """Whether the paths need exactly the slots of all nodes that are no data nodes."""
    slots = problem.arrays.slots
    if not problem.policy.reserved or problem.waves:
        return False
    if not (slots == slots[0]).all():
        return False
    needed = problem.units * data * problem.hops
    return bool(needed == (problem.arrays.nodes - data) * int(slots[0]))


def _least_hop_time(problem: Problem, work: LeastWork, data: int) -> float:
    """Return the least time in which the nodes that are no data nodes can do all work of the hops."""
    arrays = problem.arrays
    visits = data * problem.microbatches * problem.hops
    gaps = work.tasks_per_hop * arrays.gap
    each = work.whole_part[1:].min() * arrays.slow + gaps
    each = np.sort(each)[: arrays.nodes - data]

    def is_enough(time: float) -> bool:
        counts = _whole_visits(time + arrays.gap, each)
        return bool(counts.sum() >= visits)

    one_by_one = float(visits * each.max())
    return bisect_times(one_by_one, is_enough, TIME_BISECTIONS).low


def _shortest_ways_from_any_node(
    problem: Problem, work: LeastWork, trip: Floats
) -> tuple[Floats, Floats]:
    """Return, for each node as a data node, the least seconds to its head, and back from its head."""
    arrays = problem.arrays
    hops = problem.hops
    if not hops:
        return np.zeros(arrays.nodes), np.zeros(arrays.nodes)
    middle = slice(1, problem.body)
    forward = work.forward[middle].min(initial=np.inf)
    backward = work.backward[middle].min(initial=np.inf)
    symmetric = (work.one_way == work.one_way.T).all()
    equal_nodes = (arrays.slow == arrays.slow[0]).all()
    if symmetric and equal_nodes:  # then the shortest trip is the shortest both ways
        trip_work = work.data + work.trip_part[1:].min() * hops
        links = (trip - trip_work * arrays.slow) / 2
        there = links + forward * hops * arrays.slow
        back = links + backward * hops * arrays.slow
        return there, back
    onward = work.one_way + forward * arrays.slow[None, :]
    homeward = work.one_way.T + backward * arrays.slow[None, :]
    there = shortest_cycles(onward, work.one_way, hops)
    back = shortest_cycles(homeward, work.one_way.T, hops)
    return there, back


def _market(problem: Problem, work: LeastWork, trip: Floats, ends: Floats) -> Market:
    """Return the input of the bound by prices."""
    arrays = problem.arrays
    count = problem.microbatches
    window = np.minimum(arrays.slots, count).astype(float)
    head = 0.0 if problem.waves else work.data - work.own
    hop = float(work.trip_part[1:].min())
    ramp = _ramp(problem, work, window)
    ramp[count * trip < ramp] = 0.0  # then fewer slots might do better
    whole_hop = work.whole_part[1:].min() * arrays.slow
    return Market(
        link=work.inner * work.pair + hop * arrays.slow[None, :],
        home=work.close * work.pair + head * arrays.slow[None, :],
        data=(work.data - head) * arrays.slow,
        hop=hop * arrays.slow,
        work=whole_hop + work.tasks_per_hop * arrays.gap,
        gap=arrays.gap,
        ramp=ramp,
        outside=_seconds_outside(problem, work),
        least_end=ends,
        window=window,
        slots=arrays.slots.astype(float),
        microbatches=count,
        hops=problem.hops,
    )


def _ramp(problem: Problem, work: LeastWork, window: Floats) -> Floats:
    """The seconds in which the slots of each data node are not yet all in use, or no longer."""
    slow = problem.arrays.slow
    first_and_last = np.zeros(problem.arrays.nodes)
    if problem.slices == 1:
        first_and_last = (work.first_forward + work.first_backward) * slow
    ramp: Floats = first_and_last * window * (window - 1) / 2
    return ramp


def _seconds_outside(problem: Problem, work: LeastWork) -> Floats:
    """The least seconds before the first visit of each node, and after its last."""
    arrays = problem.arrays
    apart = work.one_way.copy()
    np.fill_diagonal(apart, np.inf)
    first_forward = arrays.forward[0].min() * arrays.slow
    last_backward = arrays.backward[0].min() * arrays.slow
    before = (first_forward[:, None] + apart).min(axis=0)
    after = (apart + last_backward[None, :]).min(axis=1)
    outside: Floats = before + after
    return outside


def _least_slot_seconds(work: LeastWork, problem: Problem) -> float:
    """Return the least slot-seconds that one micro-batch takes on all its nodes together.

    It holds a slot on a node during its work there and on all nodes after it.
    """
    nodes = problem.arrays.nodes
    slow = float(problem.arrays.slow.min())
    hop = float(work.trip_part[1:].min()) * slow
    link = 0.0
    if nodes > 1:
        apart = ~np.eye(nodes, dtype=np.bool_)
        link = float(work.pair[apart].min())
    seconds = 0.0
    for k in range(1, problem.hops + 1):
        seconds += k * hop + (work.inner * k + work.close - work.inner) * link
    return seconds
