"""A bound for every arrangement, by prices for the slots and the time of good nodes.

The shortest trips all lead over the same few nodes, which cannot serve everybody. Let T be the
makespan of a plan, D the set of its data nodes, q the number of micro-batches per data node, and
trip(m) the time that a micro-batch takes alone, on its data node and away from it. Then

    for a data node d      sum of trip(m) over its micro-batches + ramp   <=  s T         s: its slots
    for any other node n   sum of hold(m, n) over its visits              <=  s (T - o)   o: the time before the first
                           sum of work over its visits                    <=  T - o          visit and after the last

Here hold(m, n) is the least time from m's forward on n to its backward there: its work on n, and the
rest of its way there and back. (If T < o, n is not used at all. A data node has no visits of
others.) Multiply the lines by 1 / (s |D|) for each data node, by a price p(n) >= 0 for a second of a
slot and w(n) >= 0 for a second of work, and add them up:

    T + sum of (p s + w)(T - o) over nodes not in D  >=  sum over d in D of (ramp / s |D| + q P(d))

P(d) is the least value, over all trips from d, of trip / (s |D|) + sum of (p hold + w work) over the
nodes of the trip. D has only nodes that can be done by T as data nodes, with the shortest trip for
every micro-batch (the module `windows`). These are few if T is small, and they lie close together,
so that their trips compete for the same nodes. For any prices, the least T that satisfies the line
above for the cheapest choice of D is a bound: a larger T allows more data nodes and offers more.
Prices rise where the cheapest trips ask for more than a node has (a subgradient method), and
the best bound found on the way counts.

    P(d) = least over d -> a -> b -> c -> d of the sum of (price so far) x (seconds of the next link and node)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.bisection import bisect_times
from penstock.plan.paths.cycles import walks_home

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
