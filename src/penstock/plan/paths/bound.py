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
can take the same shortest trip. `multiplier_bound` therefore makes good nodes expensive.

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


# ---------------------------------------------------------------- the cheapest round trips in any arrangement
# The cheapest round trips: from a node over a number of other nodes, all different, and home.
#
# walks[r, u, v]    the least time from u over r more nodes home to v, if a walk may visit a node twice. One matrix
#                   product for each r, in which times are added and the minimum takes the place of the sum.
# trips             a depth-first search from each node, cheapest nodes first, as long as a walk home could still be
#                   cheaper than the best trip.

# Steps of the search for shortest trips. If they do not suffice, the shortest walk counts.
MAX_TRIP_STEPS = 3_000_000
MIN_TRIP_STEPS_PER_NODE = 1000


class TripLinks(NamedTuple):
    """The links of trips over `hops` nodes; those from a node to itself are infinite."""

    link: Floats  # seconds to go on to a node and of its work there [node, node]
    home: Floats  # seconds of the way home from the last node [node, node]
    walks: Floats  # the least seconds over some more nodes home [hops, node, node]


class TripPrices(NamedTuple):
    """What a second on a trip costs. It costs more after each node that has a price."""

    own: Floats  # of the trips from each node
    slot: Floats  # more, from the visit of each node on
    fixed: Floats  # the price of a visit itself


def links_of_trips(link: Floats, home: Floats, hops: int) -> TripLinks:
    """Return the links of trips with the shortest walks home.

    link: seconds to go on to a node and of its work there [node, node].
    home: seconds of the way home from the last node [node, node].
    """
    link = link.copy()
    home = home.copy()
    np.fill_diagonal(link, np.inf)
    np.fill_diagonal(home, np.inf)
    walks = np.empty((hops, *home.shape))
    walks[0] = home
    for more in range(1, hops):
        onward = walks[more - 1].copy()
        np.fill_diagonal(onward, np.inf)  # the node that it comes home to is not a hop
        walks[more] = min_plus(link, onward)
    return TripLinks(link, home, walks)


def shortest_cycles(link: Floats, home: Floats, hops: int) -> Floats:
    """Return, for each node, the time of the shortest trip from it over `hops` different other nodes."""
    count = len(link)
    if hops == 0:
        return np.zeros(count)
    links = links_of_trips(link, home, hops)
    free = np.zeros(count)
    max_steps = MAX_TRIP_STEPS // count + MIN_TRIP_STEPS_PER_NODE
    shortest, _ = cheapest_trips(links, TripPrices(free + 1.0, free, free), max_steps)
    return shortest


def cheapest_trips(
    links: TripLinks, prices: TripPrices, max_steps: int
) -> tuple[Floats, Ints]:
    """Return the price of the cheapest trip from each node, and its nodes.

    The first of its nodes is -1 if `max_steps` do not suffice. The price is then that of a shorter walk.
    """
    hops, count, _ = links.walks.shape
    cheapest = np.zeros(count)
    trips = np.zeros((count, hops + 1), dtype=np.int64)
    search = compile_if_large(_find_trips, MIN_COMPILED_SIZE)
    search(links, prices, max_steps, cheapest, trips)
    return cheapest, trips


def _find_trips(  # noqa: PLR0915
    links: TripLinks, prices: TripPrices, max_steps: int, cheapest: Floats, trips: Ints
) -> None:
    """Fill `cheapest` and `trips` by a depth-first search from each node.

    The rest of a trip costs at least the price so far times the shortest walk home.
    """
    link = links.link
    hops, count, _ = links.walks.shape
    path = np.zeros(hops + 1, np.int64)
    place = np.zeros(hops + 1, np.int64)
    cost = np.zeros(hops + 1)
    price = np.zeros(hops + 1)
    ranked = np.zeros((hops, count), np.int64)
    least = np.zeros((hops, count))

    def rank_nodes(depth: int) -> None:
        """List the nodes that may come next, the cheapest first."""
        place[depth] = 0
        for node in range(count):
            rest = links.walks[hops - depth - 1, node, path[0]]
            onward = price[depth] * (link[path[depth], node] + rest)
            least[depth, node] = onward + prices.slot[node] * rest + prices.fixed[node]
        order = np.argsort(least[depth])
        for k in range(count):
            ranked[depth, k] = order[k]

    for data in range(count):
        best = np.inf
        steps = 0
        depth = 0
        path[0] = data
        cost[0] = 0.0
        price[0] = prices.own[data]
        rank_nodes(0)
        while depth >= 0 and steps < max_steps:
            steps += 1
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
            onward = price[depth] * link[path[depth], there]
            so_far = cost[depth] + onward + prices.fixed[there]
            dearer = price[depth] + prices.slot[there]
            if depth == hops - 1:
                best = so_far + dearer * links.home[there, data]
                path[hops] = there
                trips[data] = path
                continue
            depth += 1
            path[depth] = there
            cost[depth] = so_far
            price[depth] = dearer
            rank_nodes(depth)
        if depth >= 0 or best == np.inf:
            # The search was too long. The shortest walk without prices costs no more than a trip.
            trips[data, 0] = -1
            walk = np.inf
            for node in range(count):
                rest = links.walks[hops - 1, node, data]
                walk = min(walk, link[data, node] + rest)
            best = prices.own[data] * walk
        cheapest[data] = best


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


class Trips(NamedTuple):
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
    nodes = problem.arrays.nodes
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    hops = min(problem.hops, len(alive))
    trips = Trips(*(np.full(size, np.inf) for size in [len(data)] * 3 + [nodes] * 2))
    if hops == 0:
        trips.trip[:] = work.data * problem.arrays.slow[data]
        trips.there[:] = 0.0
        trips.back[:] = 0.0
        return trips
    outside = _seconds_outside(problem, work, data)
    for order in _part_orders_to_try(problem, alive, hops):
        layers = [_nodes_of_part(part_of_node, part) for part in order]
        _try_layers(problem, work, trips, part_of_node, data, layers)
        for layer in layers:
            trips.outside[layer] = outside[layer]
    return trips


def _try_layers(
    problem: Problem,
    work: LeastWork,
    trips: Trips,
    part_of_node: Ints,
    data: Ints,
    layers: Sequence[Ints],
) -> None:
    """Shorten the trips, the ways and the stays, if those over these layers of nodes are shorter.

    data node ──arrive[k]──► [own[k]: the work on a node of layer k] ──rest[k]──► data node
    """
    slow = problem.arrays.slow

    def work_on_layers(seconds: Floats) -> list[Floats]:
        return [seconds[part_of_node[layer]] * slow[layer] for layer in layers]

    for way, seconds, link in (
        (trips.there, work.forward, work.one_way),
        (trips.back, work.backward, work.one_way.T),
    ):
        own = work_on_layers(seconds)
        last_link = link[np.ix_(layers[-1], data)].T
        through = _arrivals(data, layers, link, link, own)[-1] + own[-1] + last_link
        np.minimum(way, through.min(axis=1), out=way)
    own = work_on_layers(work.trip_part)
    link = work.inner * work.pair
    last = work.close * work.pair
    arrive = _arrivals(data, layers, link, link, own)
    rest = _arrivals(data, layers[::-1], last, link, own[::-1])[::-1]
    data_work = work.data * slow[data]
    for k, layer in enumerate(layers):
        through = arrive[k] + own[k] + rest[k] + data_work[:, None]
        np.minimum(trips.trip, through.min(axis=1), out=trips.trip)
        held = (own[k] + rest[k]).min(axis=0)
        trips.stay[layer] = np.minimum(trips.stay[layer], held)


def _arrivals(
    data: Ints,
    layers: Sequence[Ints],
    first_link: Floats,
    link: Floats,
    own: Sequence[Floats],
) -> list[Floats]:
    """Return the least seconds from each data node to each node of each layer, without the work there.

    first_link, link: seconds from node to node, for the first link of a way and for the others.
    own: seconds of work on the nodes of each layer.
    """
    arrive = [first_link[np.ix_(data, layers[0])]]
    for k, pair in enumerate(pairwise(layers)):
        arrive.append(min_plus(arrive[k] + own[k], link[np.ix_(*pair)]))
    return arrive


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


def _seconds_outside(problem: Problem, work: LeastWork, data: Ints) -> Floats:
    """Return the least seconds before a first visit of each node and after a last one, together.

    data: the nodes that may be data nodes. A data node is no hop.
    The micro-batch that comes first need not be the one that leaves last. So the two are minimized
    separately, over any nodes.
    """
    slow = problem.arrays.slow
    apart = work.one_way.copy()
    np.fill_diagonal(apart, np.inf)
    middle = slice(1, problem.body)
    sides = []
    for link, seconds in ((apart, work.forward), (apart.T, work.backward)):
        way = (seconds[0] * slow[data][:, None] + link[data]).min(axis=0)
        least = way
        for _ in range(problem.hops - 1):
            onward = (way + seconds[middle].min() * slow)[:, None] + link
            way = onward.min(axis=0)
            least = np.minimum(least, way)
        sides.append(least)
    outside: Floats = sides[0] + sides[1]
    return outside


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
    pairs = zip(label, other, strict=True)
    return all(time <= limit + TIME_TOLERANCE for time, limit in pairs)


def round_down(seconds: float) -> float:
    """Return at most `seconds`, with four digits, so that nodes that are nearly alike share one result."""
    if seconds <= 0 or not math.isfinite(seconds):
        return seconds
    step = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return math.floor(seconds / step) * step


# ---------------------------------------------------------------- prices for good nodes
# A bound for every arrangement, by multipliers: prices for the slots and the time of good nodes.
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


class MultiplierTerms(NamedTuple):
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


class _Optimum(NamedTuple):
    """The bound for some multipliers, the cheapest data nodes, and the cheapest trip from each node."""

    bound: float
    data_nodes: Ints
    trips: Ints


def multiplier_bound(terms: MultiplierTerms, data: int) -> float:
    """Return a time that no plan with this number of data nodes can beat."""
    count = len(terms.data)
    if count > MAX_PRICED_NODES or not 1 <= terms.hops < count or data >= count:
        return 0.0
    links = links_of_trips(terms.link, terms.home, terms.hops)
    # A visit takes seconds of a slot and seconds of work [slots or work, node].
    rooms = np.stack([terms.slots, np.ones(count)])
    prices = np.zeros((2, count))
    best = 0.0
    best_prices = prices
    step = FIRST_PRICE_STEP
    without_gain = 0
    updates = PRICE_UPDATES if count <= LARGE_CLUSTER_NODES else PRICE_UPDATES // 3
    for _ in range(updates):
        optimum = _optimum(terms, data, links, prices)
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
            optimum = _optimum(terms, data, links, prices)
        supply = np.maximum(optimum.bound - terms.outside, 0.0)
        supply[optimum.data_nodes] = 0.0
        excess = _demand(terms, links, optimum) / rooms - supply
        length = float(np.sqrt((excess**2).sum(axis=1).sum()))
        if length < 1e-9:
            break
        prices = np.maximum(prices + step / length / data * excess / rooms, 0.0)
    return best


def _optimum(
    terms: MultiplierTerms, data: int, links: TripLinks, prices: Floats
) -> _Optimum:
    """Return the bound for these multipliers, and the data nodes and trips that are cheapest at it."""
    slot, work = prices
    own = 1.0 / (data * terms.window)
    max_steps = MAX_CHEAPEST_STEPS // len(own) + MIN_CHEAPEST_STEPS_PER_NODE
    visit = work * terms.work + slot * terms.hop
    cheapest, trips = cheapest_trips(links, TripPrices(own, slot, visit), max_steps)
    base = terms.ramp * own + terms.microbatches * (cheapest + own * terms.data)
    rate = slot * terms.slots + work
    gap_value = work * terms.gap

    def offered(end: float) -> Floats:
        """What each node offers until this end, if it is no data node."""
        room = np.maximum(end - terms.outside, 0.0)
        total: Floats = rate * room + gap_value
        return total

    def demanded(end: float) -> Floats:
        """What each node would ask for as a data node, and no longer offer as another one.

        It is infinite for a node that cannot be done by this end as a data node.
        """
        return np.where(terms.least_end <= end, base + offered(end), np.inf)

    def is_enough(end: float) -> bool:
        cheapest_nodes = np.partition(demanded(end), data - 1)[:data]
        return end + float(offered(end).sum()) >= float(cheapest_nodes.sum())

    high = float(base.max()) * data + float(terms.least_end.max()) + 1.0
    least = bisect_times(high, is_enough, PRICE_BISECTIONS)
    data_nodes = np.argpartition(demanded(least.high), data - 1)[:data]
    return _Optimum(least.low, data_nodes, trips)


def _demand(terms: MultiplierTerms, links: TripLinks, optimum: _Optimum) -> Floats:
    """Return the seconds of slots and of work that the cheapest trips take on each node."""
    demand = np.zeros((2, len(terms.data)))
    for node in optimum.data_nodes.tolist():
        trip = optimum.trips[node].tolist()
        if trip[0] < 0:
            continue
        rest = float(links.home[trip[-1], node])
        for before, here in reversed([*pairwise(trip)]):
            visit = np.array([rest + terms.hop[here], terms.work[here]])
            demand[:, here] += terms.microbatches * visit
            rest += float(links.link[before, here])
    return demand


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


def _data_node_ends(
    problem: Problem, work: LeastWork, nodes: Ints, ways: Sequence[Floats]
) -> Floats:
    """Return the least end of each data node, given its shortest ways: the trip, there and back."""
    ends = []
    for node, *seconds in zip(
        nodes.tolist(), *(way.tolist() for way in ways), strict=True
    ):
        ends.append(_data_node_end(problem, work, node, Ways(*seconds)))
    return np.array(ends)


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
    arrays = problem.arrays
    work = LeastWork(problem)
    data = np.flatnonzero(part_of_node == 0)
    trips = shortest_trips(problem, work, part_of_node, data)
    ends = _data_node_ends(problem, work, data, trips[:3])
    bounds = [
        float(ends.max()),
        _least_end_of_sums(problem, part_of_node, data, ends, 0),
    ]
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    # places on the paths, each of which is used in all rounds
    places = len(data) * problem.units * min(problem.hops, len(alive))
    visits = places // max(len(alive), 1) * problem.policy.rounds
    for part in alive:
        nodes = np.flatnonzero(part_of_node == part)
        slots = arrays.slots[nodes].astype(float)
        service = _Service(visits, work.visit(arrays, part, nodes), arrays.gap, slots)
        bounds.append(service.least_time(trips.outside[nodes], trips.stay[nodes]))
        if visits and problem.has_sums:
            at_once = np.zeros(len(nodes))
            served = service.least_time(at_once)
            bounds.append(_least_end_after(problem, part_of_node, nodes, served, part))
    return max(bounds)


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


class _Service(NamedTuple):
    """Nodes that have to serve visits together."""

    visits: int
    each: Floats  # seconds of work of a visit on each node, with its gaps
    gap: float
    slots: Floats  # visits that a node can hold at once

    def least_time(self, outside: Floats, stay: Floats | None = None) -> float:
        """Return the least time in which the nodes can serve all visits.

        outside: seconds before the first visit of each node and after its last.
        stay: seconds that a visit occupies a slot, at least.
        """
        usable = np.isfinite(outside)
        if not usable.any() or not self.visits:
            return 0.0
        longest_stay = 0 if stay is None else stay[usable].max()

        def is_enough(time: float) -> bool:
            inside = np.maximum(time - outside, 0.0)
            counts = _whole_visits(inside + self.gap, self.each)
            if stay is not None:
                by_slots = _whole_visits(self.slots * inside, stay)
                counts = np.minimum(counts, by_slots)
            return int(counts[usable].sum()) >= self.visits

        one_by_one = self.visits * (self.each[usable].max() + longest_stay)
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
    ends = _data_node_ends(problem, work, np.arange(arrays.nodes), (trip, there, back))
    last_ends = [float(np.sort(ends)[data - 1])]
    if _all_slots_are_reserved(problem, data):
        last_ends.append(_end_through_any_node(problem, work, hop))
    if problem.hops:
        terms = _multiplier_terms(problem, work, trip, ends)
        last_ends.append(multiplier_bound(terms, data))
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
    others = arrays.nodes - data
    part = 1 + int(work.whole_part[1:].argmin())
    each = np.sort(work.visit(arrays, part, np.arange(arrays.nodes)))[:others]
    visits = data * problem.microbatches * problem.hops
    service = _Service(visits, each, arrays.gap, np.full(others, np.inf))
    return service.least_time(np.zeros(others))


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


def _multiplier_terms(
    problem: Problem, work: LeastWork, trip: Floats, ends: Floats
) -> MultiplierTerms:
    """Return the input of the bound by multipliers."""
    arrays = problem.arrays
    slow = arrays.slow
    nodes = np.arange(arrays.nodes)
    count = problem.microbatches
    window = np.minimum(arrays.slots, count).astype(float)
    hop = float(work.trip_part[1:].min())
    # The seconds in which the slots of each data node are not yet all in use, or no longer.
    ramp = np.zeros(arrays.nodes)
    if problem.slices == 1:
        first_and_last = (work.first_forward + work.first_backward) * slow
        ramp = first_and_last * window * (window - 1) / 2
    ramp[count * trip < ramp] = 0.0  # then fewer slots might do better
    part = 1 + int(work.whole_part[1:].argmin())
    return MultiplierTerms(
        link=work.inner * work.pair + hop * slow[None, :],
        home=work.close * work.pair + work.head * slow[None, :],
        data=(work.data - work.head) * slow,
        hop=hop * slow,
        work=work.visit(arrays, part, nodes),
        gap=arrays.gap,
        ramp=ramp,
        outside=_seconds_outside(problem, work, nodes),
        least_end=ends,
        window=window,
        slots=arrays.slots.astype(float),
        microbatches=count,
        hops=problem.hops,
    )


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
