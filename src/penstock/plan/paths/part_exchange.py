"""Gives nodes their parts so that paths can stay within a region.

    Europe  d 1 2 3 4 5        no path needs to leave its region
    America d d 1 2 3 4 5
    Sydney  1                  a replica that no path needs

Every region gets all parts, and remote nodes get parts that others have too. Nodes exchange parts so
that the routes get shorter: simulated annealing on an estimate. In the estimate every data node
sends its micro-batches over the cheapest nodes, and a node gets dearer the more work it has been
given. The estimate adds up, to the eighth power, the times that data nodes need for their round
trips and the times that nodes need for their work. So the worst of them counts most. If gradients
count, it also adds the times of the parts' sums, so that the replicas of a part get near each other.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.circuits import circuit_terms
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.routes import deal_parts
from penstock.plan.paths.rules import part_orders

# Steps of the innermost loop that a search may take, about: they take a fraction of a second.
MAX_INNER_STEPS = 20_000_000
MAX_EXCHANGE_MOVES = 8000
MAX_ORDERS_PER_SET = 6  # orders that are tried for a set of parts
# Seconds of travel that one second of work already given to a node counts for.
BUSY_PRICE = 0.4


def exchange_parts(
    problem: Problem,
    labels: Ints,
    seed: int,
    with_sums: bool = False,
    max_moves: int = MAX_EXCHANGE_MOVES,
) -> Ints:
    """Return the parts of the nodes after exchanges that shorten the routes.

    with_sums: also bring the replicas of each part near each other, for their sums of gradients.
    """
    terms = circuit_terms(problem)
    traffic = problem.traffic
    orders: list[tuple[int, ...]] = []
    first = [0]  # the orders of set r are those from first[r] to first[r + 1]
    for parts in sorted(set(deal_parts(problem, labels))):
        allowed = part_orders(frozenset(parts), problem.rules)[:MAX_ORDERS_PER_SET]
        if not allowed:
            raise ShapeError(
                "no order of the remaining parts keeps to the rules; leave out fewer parts"
            )
        orders += allowed
        first.append(len(orders))
    replicas = np.bincount(labels[labels >= 0], minlength=problem.body)
    links = int(replicas[1:].max()) ** 2  # between two parts
    steps_per_move = (
        int(replicas[0]) * len(orders) * problem.hops * links + traffic.nodes
    )
    labels = labels.copy()
    compile_if_large(_anneal, MIN_COMPILED_SIZE)(
        labels,
        np.array(orders, dtype=np.int64),
        np.array(first, dtype=np.int64),
        terms.pair,
        terms.data,
        terms.hop,
        terms.back,
        terms.inner,
        terms.close,
        traffic.slots,
        problem.microbatches,
        problem.body,
        min(max_moves, MAX_INNER_STEPS // steps_per_move),
        BUSY_PRICE,
        seed,
        traffic.latency,
        traffic.byte,
        traffic.sums.sum(axis=1) if with_sums else np.zeros(problem.body),
        not problem.planned_sums,
    )
    return labels


def _anneal(  # noqa: PLR0915
    labels: Ints,
    orders: Ints,
    first: Ints,
    pair: Floats,
    data: Floats,
    hop: Floats,
    back: Floats,
    inner: float,
    close: float,
    slots: Ints,
    microbatches: int,
    parts: int,
    iterations: int,
    price: float,
    seed: int,
    latency: Floats,
    byte: Floats,
    gradients: Floats,
    rings: bool,
) -> None:
    """Exchange the parts in `labels`, and leave the best ones there."""
    count = len(labels)
    hops = orders.shape[1]
    sets = len(first) - 1
    np.random.seed(seed)
    members = np.zeros((parts, count), np.int64)
    sizes = np.zeros(parts, np.int64)
    load = np.zeros(count)
    cost = np.zeros((hops, count))
    came = np.zeros((hops, count), np.int64)  # back-pointers
    chosen = np.zeros(hops, np.int64)

    def estimate() -> float:  # noqa: PLR0912, PLR0915
        sizes[:] = 0
        load[:] = 0.0
        for n in range(count):
            if labels[n] >= 0:
                members[labels[n], sizes[labels[n]]] = n
                sizes[labels[n]] += 1
        total = 0.0
        each = microbatches / sets
        for k in range(sizes[0]):
            home = members[0, k]
            trips = 0.0
            for r in range(sets):
                least = np.inf
                for w in range(first[r], first[r + 1]):
                    for h in range(hops):
                        part = orders[w, h]
                        for j in range(sizes[part]):
                            n = members[part, j]
                            best = np.inf
                            best_at = 0
                            if h == 0:
                                best = inner * pair[home, n]
                            else:
                                before = orders[w, h - 1]
                                for i in range(sizes[before]):
                                    link = inner * pair[members[before, i], n]
                                    through = cost[h - 1, i] + link
                                    if through < best:
                                        best = through
                                        best_at = i
                            cost[h, j] = best + hop[n] + price * load[n]
                            came[h, j] = best_at
                    part = orders[w, hops - 1]
                    for j in range(sizes[part]):
                        there = cost[hops - 1, j] + close * pair[members[part, j], home]
                        if there < least:
                            least = there
                            at = j
                            for h in range(hops - 1, -1, -1):
                                chosen[h] = members[orders[w, h], at]
                                at = came[h, at]
                trip = data[home]
                here = home
                for h in range(hops):
                    n = chosen[h]
                    trip += inner * pair[here, n] + hop[n]
                    load[n] += each * hop[n]
                    here = n
                trips += trip + close * pair[here, home]
            held = min(slots[home], microbatches)
            by_trips = trips / sets * microbatches / held + (held - 1) * back[home]
            total += by_trips**8
        mean = (total / max(sizes[0], 1)) ** 0.125
        for n in range(count):
            if load[n] > 0:
                total += (load[n] + 0.25 * mean) ** 8
        for part in range(parts):
            size = sizes[part]
            if gradients[part] <= 0.0 or size < 2:
                continue
            # Nearly the slowest link between replicas, but all links count.
            slowest = 0.0
            for i in range(size):
                for j in range(size):
                    if i != j:
                        a = members[part, i]
                        b = members[part, j]
                        link = latency[a, b] + byte[a, b] * gradients[part] / size
                        slowest += link**8
            slowest = (slowest / (size * (size - 1))) ** 0.125
            rounds = 2 * (size - 1) if rings else 2
            total += (mean + rounds * slowest) ** 8
        return float(total**0.125)

    best = labels.copy()
    value = np.inf
    least = np.inf
    for step in range(-1, iterations):  # step -1 only estimates the given labels
        u = 0
        v = 0
        if step >= 0:
            u = np.random.randint(count)
            v = np.random.randint(count)
            if labels[u] == labels[v] or labels[u] < 0 or labels[v] < 0:
                continue
        labels[u], labels[v] = labels[v], labels[u]
        new = estimate()
        heat = 0.01 * least * (1.0 - step / max(iterations, 1)) ** 2 + 1e-12
        if new <= value or np.random.random() < np.exp((value - new) / heat):
            value = new
            if value < least:
                least = value
                for n in range(count):
                    best[n] = labels[n]
        else:
            labels[u], labels[v] = labels[v], labels[u]
    for n in range(count):
        labels[n] = best[n]
