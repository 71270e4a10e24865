"""What good nodes cost: a bound for every arrangement, by prices for their slots and their time.

The shortest trips all lead over the same few nodes, which cannot take everybody. Let T be the makespan of a plan, D its
data nodes, and trip(m) a micro-batch's time away from and on its data node, alone. Then

    for a data node d      sum of trip(m) over its micro-batches + ramp   <=  s T         s: its slots
    for any other node n   sum of hold(m, n) over its visits              <=  s (T - o)   o: before the first can come
                           sum of work over its visits                    <=  T - o          and after the last has left

where hold(m, n) is the time from m's forward on n to its backward there, at least: its work on n and the rest of its
way, there and back. (Nothing of n is used if T < o; a data node takes no visits of others.) Multiply the lines by
1 / (s |D|) for each data node, by a price p(n) >= 0 for a second of a slot and w(n) >= 0 for a second of work, and add
them up:

    T + sum of (p s + w)(T - o) over nodes not in D  >=  sum over d in D of (ramp / s |D| + q P(d))

P(d) is the least, over all trips from d, of trip / (s |D|) + sum of (p hold + w work) over the nodes of the trip. For
any prices the least T that satisfies this for the cheapest choice of D is a bound. Prices rise where the cheapest trips
ask for more than there is (a subgradient), and the best bound met counts.

    P(d) = least over d -> a -> b -> c -> d of    (price so far) x (seconds of the next link and node), added up
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.compiled import COMPILE_FROM, at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.cycles import walks_home

PRICE_TURNS = 90  # of the prices
TURNS_WITHOUT_GAIN = 10  # turns without gain before prices change more slowly
MAX_PRICED_NODES = 250  # nodes for which that takes too long
MAX_CHEAPEST_STEPS = 400_000  # steps of the search for cheapest trips, each turn


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """Seconds of everything, as a bound may count them. One number a node, if not for a pair [node, node]."""

    link: Floats  # to the next node of a trip and its work there
    home: Floats  # the last link, and the head
    data: Floats  # a data node's own work for one micro-batch, without the head
    hop: Floats  # another node's, of one slice
    work: Floats  # and of all slices, with the gaps
    gap: float
    ramp: Floats  # seconds of slots a data node cannot use
    outside: Floats  # before the first visit and after the last
    window: Floats  # micro-batches a data node can have under way
    slots: Floats  # and another node can hold
    microbatches: int
    hops: int


def price_bound(market: Market, data: int) -> float:
    """Seconds that no plan with so many data nodes goes below."""
    count = len(market.data)
    if count > MAX_PRICED_NODES or not 1 <= market.hops < count or data >= count:
        return 0.0
    link = market.link.copy()
    np.fill_diagonal(link, np.inf)
    home = market.home.copy()
    np.fill_diagonal(home, np.inf)
    walks = walks_home(link, home, market.hops)
    slot, work = np.zeros(count), np.zeros(count)
    best, best_slot, best_work = 0.0, slot, work
    step, idle = 0.15, 0
    for _ in range(PRICE_TURNS if count <= 60 else PRICE_TURNS // 3):
        end, chosen, trips = _settled(market, data, link, home, walks, slot, work)
        if end > best * (1 + 1e-9):
            best, best_slot, best_work, idle = end, slot, work, 0
        else:
            idle += 1
        if idle >= TURNS_WITHOUT_GAIN:
            step, idle = 0.5 * step, 0
            slot, work = best_slot, best_work
            end, chosen, trips = _settled(market, data, link, home, walks, slot, work)
        held, done = _asked(market, link, home, chosen, trips)
        room = np.maximum(end - market.outside, 0.0)
        room[chosen] = 0.0
        more_slot, more_work = held / market.slots - room, done - room
        scale = float(np.sqrt((more_slot**2).sum() + (more_work**2).sum()))
        if scale < 1e-9:
            break
        slot = np.maximum(slot + step / scale / data * more_slot / market.slots, 0.0)
        work = np.maximum(work + step / scale / data * more_work, 0.0)
    return best


def _settled(
    market: Market,
    data: int,
    link: Floats,
    home: Floats,
    walks: Floats,
    slot: Floats,
    work: Floats,
) -> tuple[float, Ints, Ints]:
    """The bound for these prices, the data nodes that are cheapest at it, and the trips they take."""
    count = len(slot)
    own = 1.0 / (data * market.window)
    found, trips = np.zeros(count), np.zeros((count, market.hops + 1), dtype=np.int64)
    fixed = work * market.work + slot * market.hop
    at_speed(_cheapest, COMPILE_FROM)(
        link,
        home,
        walks,
        market.hops,
        own,
        slot,
        fixed,
        MAX_CHEAPEST_STEPS // count + 200,
        found,
        trips,
    )
    base = market.ramp * own + market.microbatches * (found + own * market.data)
    rate = slot * market.slots + work
    spare = work * market.gap

    def asked(end: float) -> Floats:
        total: Floats = base + rate * np.maximum(end - market.outside, 0.0) + spare
        return total

    low, high = 0.0, float(base.max()) * data + 1.0
    for _ in range(40):
        end = (low + high) / 2
        given = end + float(
            (rate * np.maximum(end - market.outside, 0.0) + spare).sum()
        )
        enough = given >= float(np.partition(asked(end), data - 1)[:data].sum())
        low, high = (low, end) if enough else (end, high)
    return low, np.argpartition(asked(low), data - 1)[:data], trips


def _asked(
    market: Market, link: Floats, home: Floats, chosen: Ints, trips: Ints
) -> tuple[Floats, Floats]:
    """Seconds of slots and of work that the data nodes' cheapest trips take on each node."""
    held, done = np.zeros(len(link)), np.zeros(len(link))
    for node in chosen.tolist():
        trip = trips[node].tolist()
        if trip[0] < 0:
            continue
        rest = float(home[trip[-1], node])
        for place in range(market.hops, 0, -1):
            here = trip[place]
            held[here] += market.microbatches * (rest + market.hop[here])
            done[here] += market.microbatches * market.work[here]
            rest += float(link[trip[place - 1], here])
    return held, done


def _cheapest(  # noqa: PLR0912
    link: Floats,
    home: Floats,
    walks: Floats,
    hops: int,
    own: Floats,
    slot: Floats,
    fixed: Floats,
    effort: int,
    found: Floats,
    trips: Ints,
) -> None:
    """Depth first from each node; what is left of a trip costs at least the price so far times the shortest walk."""
    count = len(link)
    path, place = np.zeros(hops + 1, np.int64), np.zeros(hops + 1, np.int64)
    cost, price = np.zeros(hops + 1), np.zeros(hops + 1)
    ranked, least = np.zeros((hops, count), np.int64), np.zeros((hops, count))
    for data in range(count):
        best, steps, depth = np.inf, 0, 0
        path[0], place[0], cost[0], price[0] = data, 0, 0.0, own[data]
        trips[data, 0] = -1
        fresh = True
        while depth >= 0 and steps < effort:
            steps += 1
            here, left = path[depth], hops - depth - 1  # nodes after the next
            if fresh:
                for node in range(count):
                    rest = walks[left, node, data]
                    least[depth, node] = (
                        price[depth] * (link[here, node] + rest)
                        + slot[node] * rest
                        + fixed[node]
                    )
                ranked[depth] = np.argsort(least[depth])
                fresh = False
            if place[depth] >= count:
                depth -= 1
                continue
            there = ranked[depth, place[depth]]
            place[depth] += 1
            if cost[depth] + least[depth, there] >= best:
                depth -= 1  # those after it are no cheaper
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
            path[depth], place[depth], cost[depth] = there, 0, so_far
            price[depth] = price[depth - 1] + slot[there]
            fresh = True
        if depth >= 0:  # too much: a walk without prices is no dearer
            trips[data, 0] = -1
            best = np.inf
            for node in range(count):
                if node != data:
                    best = min(
                        best,
                        own[data] * (link[data, node] + walks[hops - 1, node, data]),
                    )
        found[data] = best
