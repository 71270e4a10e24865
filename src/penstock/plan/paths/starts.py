"""Solutions that a search starts from: which node holds which part, and the first paths over them.

A node that is far from all others need not be visited. So there are two kinds of start: circuits
spread the work over all nodes, and routes leave out the bad ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from random import Random
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import (
    NO_PART_HELD,
    CircuitTerms,
    Problem,
    ProblemArrays,
    circuit_terms,
)
from penstock.plan.paths.rules import part_orders, spread_parts
from penstock.plan.paths.simulator import seconds_of_sums

# ---------------------------------------------------------------- circuits
# Cuts the nodes into circuits: a data node and hops that no other circuit uses. Every search starts here.
#
#     circuit 0   d ── a ── b ── c ── back to d    its time: that of the micro-batches' round trips,
#     circuit 1   e ── f ── g ── h ── back to e    or that of the work on its slowest node, whichever is more
#
# Nodes exchange places, between circuits or within one, so that the slowest circuits get faster. This
# is simulated annealing on the sum of the circuits' times to the eighth power. Circuits share no
# nodes, so the time of each is a formula, and a million moves take a second. If the nodes have parts
# already, a place only takes a node whose part keeps the order legal.

NEAREST_NODES = 24  # nearest nodes of each node, which half of the moves choose from


class GivenParts(NamedTuple):
    """The parts of nodes that keep them, and the rules for paths over them."""

    fixed: bool  # whether nodes have parts at all
    part_of_node: Ints
    behind: int
    distance: int
    swaps: int
    ahead: int


def improve_circuits(
    problem: Problem,
    circuits: Ints,
    spare: Ints,
    part_of_node: Ints | None,
    iterations: int,
    seed: int,
) -> tuple[Ints, Ints]:
    """Return the circuits and the spare nodes after `iterations` tried moves.

    part_of_node: the parts of the nodes, if they are fixed.
    """
    terms = circuit_terms(problem)
    distance = terms.pair + np.diag(np.full(len(terms.pair), np.inf))
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :NEAREST_NODES]
    rules = problem.rules
    given = GivenParts(
        part_of_node is not None,
        np.zeros(0, np.int64) if part_of_node is None else part_of_node,
        rules.behind,
        rules.distance,
        rules.swaps,
        rules.ahead,
    )
    place = np.concatenate([circuits.ravel(), spare]).astype(np.int64)
    compile_if_large(_anneal_circuits, MIN_COMPILED_SIZE)(
        place,
        circuits.shape,
        np.ascontiguousarray(nearest),
        terms,
        given,
        iterations,
        seed,
    )
    return place[: circuits.size].reshape(circuits.shape), place[circuits.size :]


def _anneal_circuits(  # noqa: PLR0912, PLR0915
    place: Ints,
    shape: tuple[int, int],
    nearest: Ints,
    terms: CircuitTerms,
    given: GivenParts,
    iterations: int,
    seed: int,
) -> None:
    """Exchange nodes in `place`, the circuits and then the spare nodes, and leave the best there."""
    count, length = shape
    spare = count * length  # the place of the first spare node
    np.random.seed(seed)

    def seconds(i: int) -> float:
        circuit = place[i * length : (i + 1) * length]
        home = circuit[0]
        trip = terms.data[home]
        work = terms.data[home]
        slowest = terms.back[home]
        held = terms.slots[home]
        for p in range(1, length):
            n = circuit[p]
            trip += terms.hop[n] + terms.inner * terms.pair[circuit[p - 1], n]
            work = max(work, terms.hop[n])
            slowest = max(slowest, terms.back[n])
            held = min(held, terms.slots[n])
        trip += terms.close * terms.pair[circuit[length - 1], home]
        held = min(held, terms.microbatches)
        by_trips = trip * terms.microbatches / held + (held - 1) * slowest
        by_work = trip + (terms.microbatches - 1) * work
        return float(max(by_trips, by_work))

    def legal(i: int) -> bool:
        parts = given.part_of_node[place[i * length : (i + 1) * length]]
        frontier = 0
        distance = 0
        swaps = 0
        for p in range(1, length):
            if parts[p] <= 0 or parts[p] - frontier > given.ahead:
                return False
            if (parts[:p] == parts[p]).any() or frontier - parts[p] > given.behind:
                return False
            if parts[p] < frontier:
                distance += frontier - parts[p]
                swaps += 1
            frontier = max(frontier, parts[p])
        within = distance <= given.distance and swaps <= given.swaps
        return bool(parts[0] == 0 and within)

    where = np.full(len(nearest), -1, np.int64)  # the place of each node
    for k in range(len(place)):
        where[place[k]] = k
    time = np.zeros(count + 1)  # the last one is that of the spare nodes
    for i in range(count):
        time[i] = seconds(i)
    best = place.copy()
    scale = time.max()
    value = ((time / scale) ** 8).sum()
    least = value
    for step in range(iterations):
        heat = 0.2 * (1.0 - step / iterations) ** 3 + 1e-9
        i = np.random.randint(count)
        for _ in range(2):  # prefer a slow circuit
            other = np.random.randint(count)
            if time[other] > time[i]:
                i = other
        a = i * length + np.random.randint(length)
        if np.random.random() < 0.5 and nearest.shape[1] > 0:
            # Bring a node that is near to one of the circuit's nodes.
            node = place[i * length + np.random.randint(length)]
            b = where[nearest[node, np.random.randint(nearest.shape[1])]]
        elif spare == len(place) or np.random.random() < 0.9:
            b = np.random.randint(count) * length + np.random.randint(length)
        else:
            b = np.random.randint(spare, len(place))
        if b < 0 or a == b:
            continue
        place[a], place[b] = place[b], place[a]
        j = min(b // length, count)
        allowed = not given.fixed or (legal(i) and (j == count or legal(j)))
        change = np.inf
        if allowed:
            new_i = seconds(i)
            new_j = seconds(j) if j < count else 0.0
            change = (new_i / scale) ** 8 - (time[i] / scale) ** 8
            if j != i:
                change += (new_j / scale) ** 8 - (time[j] / scale) ** 8
        if allowed and (change <= 0 or np.random.random() < np.exp(-change / heat)):
            where[place[a]] = a
            where[place[b]] = b
            time[i] = new_i
            time[j] = new_j
            value += change
            if value < least - 1e-12:
                least = value
                best[:] = place
        else:
            place[a], place[b] = place[b], place[a]
    place[:] = best


# ---------------------------------------------------------------- routes over nodes whose parts are known
# Paths for nodes whose parts are known: one unit after the other takes the cheapest nodes.
#
#     unit 0  parts 1 2 3      the price of a node: the work that it has already been given
#     unit 1  parts 1 4 5
#     unit 2  parts 2 3 4      all parts are visited equally often
#
# A node that is far from all others is simply not visited. A search therefore has two kinds of start:
# circuits spread the work over all nodes, routes leave out the bad ones.

Route = tuple[int, ...]


def deal_parts(problem: Problem, part_of_node: Ints) -> list[tuple[int, ...]]:
    """Return the parts that each unit visits after the first part, all equally often.

    Successive units belong to different data nodes.
    """
    data = int((part_of_node == 0).sum())
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    hops = min(problem.hops, len(alive))
    # If one unit per data node visits all parts equally often, the next such set may be shifted.
    even = len(alive) > 0 and data * hops % len(alive) == 0
    dealt = []
    for unit in range(problem.units * data):
        shift = unit // data if even else 0
        dealt.append(spread_parts(alive, hops, unit + shift))
    return dealt


def route_units(
    problem: Problem,
    part_of_node: Ints,
    weight: float,
    dealt: Sequence[tuple[int, ...]] | None = None,
) -> list[Route]:
    """Return the cheapest path for each unit in turn.

    weight: seconds of travel that one second of work already given to a node counts for.
    dealt: the parts that each unit visits, if they are not to be dealt out here.
    """
    hop = circuit_terms(problem).hop
    data = np.flatnonzero(part_of_node == 0).tolist()
    price = np.zeros(problem.arrays.nodes)
    paths = []
    for unit, parts in enumerate(dealt or deal_parts(problem, part_of_node)):
        data_node = data[unit % len(data)]
        path = cheapest_route(problem, part_of_node, data_node, parts, price)
        for node in path[1:]:
            price[node] += weight * float(hop[node])
        paths.append(path)
    return paths


def cheapest_route(
    problem: Problem,
    part_of_node: Ints,
    data_node: int,
    parts: Sequence[int],
    price: Floats,
) -> Route:
    """Return the cheapest path over these parts in any order, if each node has a price besides its work."""
    terms = circuit_terms(problem)
    orders = part_orders(frozenset(parts), problem.rules)
    if not orders:
        raise ShapeError(
            f"no order of the parts {' '.join(map(str, parts))} keeps to the rules; leave out fewer parts"
        )
    routes = []
    for order in orders:
        layers = [np.flatnonzero(part_of_node == part) for part in order]
        routes.append(cheapest_path(terms, data_node, layers, terms.hop, price))
    return min(routes, key=lambda route: route[0])[1]


def random_routes(problem: Problem, part_of_node: Ints, seed: int) -> list[Route]:
    """Return random paths that keep to the rules: any legal order, any replica with a free place.

    If slots are reserved, a replica has a place for each slot. Otherwise all replicas of a part have equally many.
    """
    random = Random(seed)
    dealt = deal_parts(problem, part_of_node)
    data = np.flatnonzero(part_of_node == 0).tolist()
    needed = Counter(chain.from_iterable(dealt))
    places = {}
    for part in sorted(needed):
        replicas = np.flatnonzero(part_of_node == part)
        places[part] = replicas.tolist() * (needed[part] // len(replicas) + 1)
        if problem.policy.reserved:
            slots = problem.arrays.slots[replicas]
            places[part] = np.repeat(replicas, slots).tolist()
        if len(places[part]) < needed[part]:
            raise ShapeError(
                f"part {part} has {len(places[part])} slots on {len(replicas)} nodes, but {needed[part]} "
                "paths need one; give it more nodes, or do not reserve slots"
            )
        random.shuffle(places[part])
    random.shuffle(dealt)
    paths = []
    for unit, parts in enumerate(dealt):
        order = random.choice(part_orders(frozenset(parts), problem.rules))
        hops = [places[part].pop() for part in order]
        paths.append((data[unit % len(data)], *hops))
    return paths


def cheapest_path(
    terms: CircuitTerms,
    data_node: int,
    layers: Sequence[Ints],
    *prices: Floats,
) -> tuple[float, Route]:
    """Return the cheapest path from a data node over a node of each layer and back, and its seconds.

        data node      replicas of      replicas of
                       the 1st part     the 2nd part
                    ┌── a ────────────── d ──┐
            h ──────┼── b ──────┬─────── e ──┼────── h        each node remembers the cheapest way to it
                    └── c ──────┘        f ──┘

    A way costs the links that it takes, there and back, and all prices of each node that it visits.
    """
    before: Ints = np.array([data_node])
    cost: Floats = np.zeros(1)
    back_pointers: list[Ints] = []
    for layer in layers:
        through = cost[:, None] + terms.inner * terms.pair[np.ix_(before, layer)]
        back_pointers.append(through.argmin(axis=0))
        cost = through.min(axis=0)
        for price in prices:
            cost = cost + price[layer]
        before = layer
    if layers:
        cost = cost + terms.close * terms.pair[before, data_node]
    at = int(cost.argmin())
    seconds = float(cost[at])
    nodes = []
    for layer, pointers in zip(reversed(layers), reversed(back_pointers), strict=True):
        nodes.append(int(layer[at]))
        at = int(pointers[at])
    return seconds, (data_node, *reversed(nodes))


# ---------------------------------------------------------------- arrangements for circuits
# Decides which node holds which part.
#
#     sizes     20 nodes, 6 parts, paths over 4: 5 data nodes for part 0, 3 replicas of every other part
#     circuits  the nodes cut into 5 circuits of 4, whatever their parts       (penstock.plan.paths.circuits)
#     part_of_node    the places of the circuits get parts, rising along each circuit and all equally often, so that the
#               replicas of a part are near each other if they have gradients to sum
#
# Because circuits come first and parts second, arrangement and paths are one search: a circuit
# without parts can always get parts in rising order.
EXCHANGES_PER_CIRCUIT = 40  # exchanges that are tried to bring replicas together
MAX_EXCHANGES = 2000
MEAN_ALLREDUCE_WEIGHT = 1e-3  # of the mean all-reduce, next to the slowest one


def replica_counts(
    nodes: int, parts: int, hops: int, data: int | None = None
) -> tuple[int, ...]:
    """Return the number of data nodes and of the replicas of each other part.

    All nodes get the same amount of work, unless the number of `data` nodes is given.

    >>> replica_counts(20, 6, 3)
    (5, 3, 3, 3, 3, 3)
    """
    if nodes < parts:
        raise ShapeError(
            f"{nodes} nodes cannot hold {parts} parts; give at least {parts} nodes"
        )
    max_data = nodes - (parts - 1)
    if data is None:
        data = max(min(nodes // (hops + 1), max_data), 1)
    if not 1 <= data <= max_data:
        raise ShapeError(
            f"{data} data nodes do not fit {nodes} nodes and {parts} parts; give from 1 to {max_data}"
        )
    each, more = divmod(nodes - data, parts - 1)
    return (data, *(each + (number < more) for number in range(parts - 1)))


def part_of_each_node(partitions: Sequence[Sequence[int]], nodes: int) -> Ints:
    """Return the part of each node, given the nodes of each part."""
    part_of_node = np.full(nodes, NO_PART_HELD, dtype=np.int64)
    for part, members in enumerate(partitions):
        for node in members:
            if not 0 <= node < nodes:
                raise ShapeError(
                    f"part {part} is on node {node}, but there are nodes 0..{nodes - 1}"
                )
            if part_of_node[node] != NO_PART_HELD:
                raise ShapeError(
                    f"node {node} holds parts {part_of_node[node]} and {part}; a node holds one"
                )
            part_of_node[node] = part
    return part_of_node


def part_designs(circuits: int, parts: int, hops: int) -> list[tuple[int, ...]]:
    """Return the parts of each circuit after the first part, in rising order.

    Over all circuits every part occurs equally often.

    >>> part_designs(5, 6, 3)
    [(2, 4, 5), (1, 3, 5), (1, 2, 4), (2, 3, 5), (1, 3, 4)]
    """
    return [spread_parts(range(1, parts), hops, circuit) for circuit in range(circuits)]


def arrange(
    problem: Problem, sizes: Sequence[int], iterations: int, seed: int
) -> tuple[Ints, Ints]:
    """Choose the part of each node, and circuits. A circuit is a data node and its hops."""
    nodes = problem.arrays.nodes
    order = np.random.default_rng(seed).permutation(nodes)
    data_nodes = sizes[0]
    places = data_nodes * (problem.hops + 1)
    if places > nodes:
        # Not every data node can have its own circuit: some share nodes, and the search sorts it out.
        part_of_node = np.empty(nodes, dtype=np.int64)
        part_of_node[order] = np.repeat(np.arange(problem.body), sizes)
        return part_of_node, find_circuits(problem, part_of_node, 1, 0)
    circuits, spare = improve_circuits(
        problem,
        order[:places].reshape(data_nodes, problem.hops + 1),
        order[places:],
        None,
        iterations,
        seed,
    )
    return _label_nodes(problem, sizes, circuits, spare, seed), circuits


def fit_nodes(
    problem: Problem, part_of_node: Ints, circuits: Ints
) -> tuple[Ints, Ints]:
    """Let nodes exchange their places until every part fits into the memory of its nodes.

    A node whose part does not fit exchanges with one for which both parts fit afterwards.
    """
    slots = problem.arrays.part_slots
    part_of_node = part_of_node.copy()
    circuits = circuits.copy()
    for node in np.flatnonzero(part_of_node >= 0).tolist():
        if slots[part_of_node[node], node] > 0:
            continue
        partner = _partner(slots, part_of_node, node)
        mine = circuits == node
        circuits[circuits == partner] = node
        circuits[mine] = partner
        part_of_node[node], part_of_node[partner] = (
            part_of_node[partner],
            part_of_node[node],
        )
    return part_of_node, circuits


def _partner(slots: Ints, part_of_node: Ints, node: int) -> int:
    """Return the node that can take this node's part and whose part fits here, with most room for it."""
    part = part_of_node[node]
    room = np.where(part_of_node >= 0, slots[part_of_node, node], 0) > 0
    gain = np.where(room & (part_of_node != part), slots[part], 0)
    partner = int(gain.argmax())
    if gain[partner] < 1:
        fitting = int((slots[part] > 0).sum())
        raise ShapeError(
            f"part {part} fits into the memory of {fitting} of {len(part_of_node)} nodes, which is "
            "too few\n"
            "  make more parts or fewer data nodes, or shorten the micro-batches"
        )
    return partner


def find_circuits(
    problem: Problem, part_of_node: Ints, iterations: int, seed: int
) -> Ints:
    """Return circuits over nodes whose parts are given. If there are too few nodes, circuits share some."""
    data = np.flatnonzero(part_of_node == 0)
    alive = [part for part in range(1, problem.body) if (part_of_node == part).any()]
    hops = min(problem.hops, len(alive))
    circuits = np.empty((len(data), hops + 1), dtype=np.int64)
    disjoint = True
    taken = dict.fromkeys(range(problem.body), 0)
    designs = part_designs(len(data), len(alive) + 1, hops)
    for circuit, node in enumerate(data.tolist()):
        chosen = frozenset(alive[number - 1] for number in designs[circuit])
        allowed = part_orders(chosen, problem.rules)
        parts = allowed[0] if allowed else _any_order(alive, hops, problem)
        circuits[circuit, 0] = node
        for place, part in enumerate(parts, start=1):
            replicas = np.flatnonzero(part_of_node == part)
            if taken[part] >= len(replicas):
                disjoint = False
            circuits[circuit, place] = replicas[taken[part] % len(replicas)]
            taken[part] += 1
    if not disjoint or hops == 0:
        return circuits
    spare = np.setdiff1d(np.flatnonzero(part_of_node > 0), circuits[:, 1:])
    improved, _ = improve_circuits(
        problem, circuits, spare, part_of_node, iterations, seed
    )
    return improved


def _any_order(alive: list[int], hops: int, problem: Problem) -> tuple[int, ...]:
    """Return neighboring parts that a path may visit, if the first choice would need too wide a step."""
    for first in range(len(alive) - hops + 1):
        neighbors = frozenset(alive[first : first + hops])
        orders = part_orders(neighbors, problem.rules)
        if orders:
            return orders[0]
    raise ShapeError(
        f"no path over {hops + 1} of the parts 0, {', '.join(map(str, alive))} keeps to the "
        f"order; steps go at most {problem.rules.ahead} ahead"
    )


# ---------------------------------------------------------------- parts for the places of circuits
def _label_nodes(
    problem: Problem, sizes: Sequence[int], circuits: Ints, spare: Ints, seed: int
) -> Ints:
    """Return the part of each node, given circuits and the nodes that are on none."""
    designs = part_designs(len(circuits), problem.body, problem.hops)
    for design in designs:
        if not part_orders(frozenset(design), problem.rules):
            raise ShapeError(
                f"a path over the parts 0 {' '.join(map(str, design))} takes a step of more than "
                f"{problem.rules.ahead} parts; leave out fewer parts, or allow steps further ahead"
            )
    part_of_node = np.full(problem.arrays.nodes, NO_PART_HELD, dtype=np.int64)
    part_of_node[circuits[:, 0]] = 0
    part_of_node[circuits[:, 1:]] = designs
    if problem.has_sums and len(circuits) > 1:
        _bring_replicas_together(problem, circuits[:, 1:], part_of_node, seed)
    missing = list(sizes)
    for part in part_of_node[part_of_node >= 0].tolist():
        missing[part] -= 1
    for node in spare.tolist():  # goes to the part that lacks most, but never to part 0
        part = 1 + int(np.argmax(missing[1:]))
        part_of_node[node] = part
        missing[part] -= 1
    return part_of_node


def _bring_replicas_together(
    problem: Problem, hops: Ints, part_of_node: Ints, seed: int
) -> None:
    """Let circuits with these hops exchange their parts as long as the slowest all-reduce gets no slower."""
    random = np.random.default_rng(seed)

    def value() -> float:
        """Return the slowest all-reduce and, a little, their mean."""
        sums = seconds_of_sums(problem, part_of_node)[1:]
        if not len(sums):
            return math.inf
        return float(sums.max() + MEAN_ALLREDUCE_WEIGHT * sums.mean())

    least = value()
    for _ in range(min(EXCHANGES_PER_CIRCUIT * len(hops), MAX_EXCHANGES)):
        pair = hops[random.choice(len(hops), 2, replace=False)]
        parts = part_of_node[pair]
        if (parts[0] == parts[1]).all():
            continue
        part_of_node[pair] = parts[::-1]
        new = value()
        if new <= least:
            least = new
        else:
            part_of_node[pair] = parts


# ---------------------------------------------------------------- arrangements for routes
# Gives nodes their parts so that paths can stay within a region.
#
#     Europe  d 1 2 3 4 5        no path needs to leave its region
#     America d d 1 2 3 4 5
#     Sydney  1                  a replica that no path needs
#
# Every region gets all parts, and remote nodes get parts that others have too. Nodes exchange parts so
# that the routes get shorter: simulated annealing on an estimate. In the estimate every data node
# sends its micro-batches over the cheapest nodes, and a node gets dearer the more work it has been
# given. The estimate adds up, to the eighth power, the times that data nodes need for their round
# trips and the times that nodes need for their work. So the worst of them counts most. If gradients
# count, it also adds the times of the parts' sums, so that the replicas of a part get near each other.

# Steps of the innermost loop that a search may take, about: they take a fraction of a second.
MAX_INNER_STEPS = 20_000_000
MAX_EXCHANGE_MOVES = 8000
MAX_ORDERS_PER_SET = 6  # orders that are tried for a set of parts
# Seconds of travel that one second of work already given to a node counts for.
BUSY_PRICE = 0.4


def exchange_parts(
    problem: Problem,
    part_of_node: Ints,
    seed: int,
    with_sums: bool = False,
    max_moves: int = MAX_EXCHANGE_MOVES,
) -> Ints:
    """Return the parts of the nodes after exchanges that shorten the routes.

    with_sums: also bring the replicas of each part near each other, for their sums of gradients.
    """
    terms = circuit_terms(problem)
    arrays = problem.arrays
    orders = []  # of each set
    for parts in sorted(set(deal_parts(problem, part_of_node))):
        allowed = part_orders(frozenset(parts), problem.rules)[:MAX_ORDERS_PER_SET]
        if not allowed:
            raise ShapeError(
                "no order of the remaining parts keeps to the rules; leave out fewer parts"
            )
        orders.append(allowed)
    most = max(map(len, orders))
    # A set with fewer orders has its last one several times, which changes nothing.
    padded = [allowed + allowed[-1:] * (most - len(allowed)) for allowed in orders]
    replicas = np.bincount(part_of_node[part_of_node >= 0], minlength=problem.body)
    links = int(replicas[1:].max()) ** 2  # between two parts
    steps_per_move = (
        int(replicas[0]) * sum(map(len, orders)) * problem.hops * links + arrays.nodes
    )
    part_of_node = part_of_node.copy()
    compile_if_large(_anneal_parts, MIN_COMPILED_SIZE)(
        part_of_node,
        np.array(padded, dtype=np.int64),
        terms,
        arrays,
        min(max_moves, MAX_INNER_STEPS // steps_per_move),
        seed,
        arrays.sums.sum(axis=1) if with_sums else np.zeros(problem.body),
        not problem.planned_sums,
    )
    return part_of_node


def _anneal_parts(  # noqa: PLR0915
    part_of_node: Ints,
    orders: Ints,
    terms: CircuitTerms,
    arrays: ProblemArrays,
    iterations: int,
    seed: int,
    gradients: Floats,
    rings: bool,
) -> None:
    """Exchange the parts in `part_of_node`, and leave the best ones there.

    orders: the parts that units visit, in some orders of each set of parts [set, order, hop].
    """
    count = len(part_of_node)
    sets, ways, hops = orders.shape
    microbatches = terms.microbatches
    np.random.seed(seed)
    members = np.zeros((len(gradients), count), np.int64)
    sizes = np.zeros(len(gradients), np.int64)
    load = np.zeros(count)
    cost = np.zeros(count)  # of the cheapest way to each node
    came = np.zeros(count, np.int64)  # the node before it on that way
    chosen = np.zeros(hops, np.int64)

    def estimate() -> float:  # noqa: PLR0912
        sizes[:] = 0
        load[:] = 0.0
        for n in range(count):
            part = part_of_node[n]
            if part >= 0:
                members[part, sizes[part]] = n
                sizes[part] += 1
        total = 0.0
        for home in members[0, : sizes[0]]:
            trips = 0.0
            for r in range(sets):
                least = np.inf
                for w in range(ways):
                    before = np.full(1, home)
                    cost[home] = 0.0
                    for part in orders[r, w]:
                        layer = members[part, : sizes[part]]
                        for n in layer:
                            best = np.inf
                            for b in before:
                                through = cost[b] + terms.inner * terms.pair[b, n]
                                if through < best:
                                    best = through
                                    came[n] = b
                            cost[n] = best + terms.hop[n] + BUSY_PRICE * load[n]
                        before = layer
                    for n in before:
                        there = cost[n] + terms.close * terms.pair[n, home]
                        if there < least:
                            least = there
                            at = n
                            for h in range(hops - 1, -1, -1):
                                chosen[h] = at
                                at = int(came[at])
                trip = terms.data[home]
                here = home
                for node in chosen:
                    trip += terms.inner * terms.pair[here, node] + terms.hop[node]
                    load[node] += microbatches / sets * terms.hop[node]
                    here = node
                trips += trip + terms.close * terms.pair[here, home]
            held = min(arrays.slots[home], microbatches)
            rest = (held - 1) * terms.back[home]
            total += (trips / sets * microbatches / held + rest) ** 8
        mean = (total / max(sizes[0], 1)) ** 0.125
        for n in range(count):
            if load[n] > 0:
                total += (load[n] + 0.25 * mean) ** 8
        for part in range(len(gradients)):
            size = sizes[part]
            if gradients[part] <= 0.0 or size < 2:
                continue
            # Nearly the slowest link between replicas, but all links count.
            slowest = 0.0
            for a in members[part, :size]:
                for b in members[part, :size]:
                    if a != b:
                        share = arrays.byte[a, b] * gradients[part] / size
                        slowest += (arrays.latency[a, b] + share) ** 8
            slowest = (slowest / (size * (size - 1))) ** 0.125
            rounds = 2 * (size - 1) if rings else 2
            total += (mean + rounds * slowest) ** 8
        return float(total**0.125)

    best = part_of_node.copy()
    value = np.inf
    least = np.inf
    for step in range(-1, iterations):  # step -1 only estimates the given part_of_node
        u = 0
        v = 0
        if step >= 0:
            u = np.random.randint(count)
            v = np.random.randint(count)
            if (
                part_of_node[u] == part_of_node[v]
                or min(part_of_node[u], part_of_node[v]) < 0
            ):
                continue
        part_of_node[u], part_of_node[v] = part_of_node[v], part_of_node[u]
        new = estimate()
        heat = 0.01 * least * (1.0 - step / max(iterations, 1)) ** 2 + 1e-12
        if new <= value or np.random.random() < np.exp((value - new) / heat):
            value = new
            if value < least:
                least = value
                best[:] = part_of_node
        else:
            part_of_node[u], part_of_node[v] = part_of_node[v], part_of_node[u]
    part_of_node[:] = best
