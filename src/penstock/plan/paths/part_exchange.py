"""Parts for nodes where paths may choose: every region gets all parts, and bad nodes get what others have as well.

    Europe  d 1 2 3 4 5        a path never leaves its region
    America d d 1 2 3 4 5
    Sydney  1                  a replica that nobody needs

Nodes exchange parts so that the routes get shorter: simulated annealing on an estimate, in which every data node sends
its micro-batches over the cheapest nodes, and a node is dearer the more it has been given. What a data node needs for
its round trips and what a node has to do are both times to the eighth power, so that the worst counts.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import COMPILE_FROM, at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.circuits import circuit_terms
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.routes import deal_parts
from penstock.plan.paths.rules import part_orders

MAX_INNER_STEPS = 20_000_000  # of the innermost loop, about, that a search may take: a part of a second
BUSY_PRICE = (
    0.4  # seconds of a way that one second of work already given to a node is worth
)


def exchange_parts(problem: Problem, labels: Ints, seed: int, most: int = 8000) -> Ints:
    """Parts of nodes, exchanged from what they were."""
    found, traffic = circuit_terms(problem), problem.traffic
    rows = sorted(set(deal_parts(problem, labels)))
    allowed = [part_orders(frozenset(row), problem.rules)[:6] for row in rows]
    if not all(allowed):
        raise ShapeError(
            "no order of the parts that are left keeps to the rules; leave out less"
        )
    ways = np.array([order for some in allowed for order in some], dtype=np.int64)
    first = np.cumsum([0, *map(len, allowed)]).astype(np.int64)
    replicas = np.bincount(labels[labels >= 0], minlength=problem.body)
    work = (
        int(replicas[0]) * len(ways) * problem.hops * int(replicas[1:].max()) ** 2
        + traffic.nodes
    )
    labels = labels.copy()
    at_speed(_anneal, COMPILE_FROM)(
        labels,
        ways,
        first,
        found.pair,
        found.data,
        found.hop,
        found.back,
        found.inner,
        found.close,
        traffic.slots,
        problem.microbatches,
        problem.body,
        int(min(most, MAX_INNER_STEPS // work)),
        BUSY_PRICE,
        seed,
    )
    return labels


def _anneal(  # noqa: PLR0915
    labels: Ints,
    ways: Ints,
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
) -> None:
    count, hops = len(labels), ways.shape[1]
    rows = len(first) - 1
    np.random.seed(seed)
    members = np.zeros((parts, count), np.int64)
    sizes = np.zeros(parts, np.int64)
    load = np.zeros(count)
    cost, came = np.zeros((hops, count)), np.zeros((hops, count), np.int64)
    chosen = np.zeros(hops, np.int64)

    def estimate() -> float:  # noqa: PLR0912
        sizes[:] = 0
        load[:] = 0.0
        for n in range(count):
            if labels[n] >= 0:
                members[labels[n], sizes[labels[n]]] = n
                sizes[labels[n]] += 1
        whole = 0.0
        each = microbatches / rows
        for k in range(sizes[0]):
            home = members[0, k]
            trips = 0.0
            for r in range(rows):
                least = np.inf
                for w in range(first[r], first[r + 1]):
                    for h in range(hops):
                        part = ways[w, h]
                        for j in range(sizes[part]):
                            n = members[part, j]
                            best, best_at = np.inf, 0
                            if h == 0:
                                best = inner * pair[home, n]
                            else:
                                before = ways[w, h - 1]
                                for i in range(sizes[before]):
                                    through = (
                                        cost[h - 1, i]
                                        + inner * pair[members[before, i], n]
                                    )
                                    if through < best:
                                        best, best_at = through, i
                            cost[h, j] = best + hop[n] + price * load[n]
                            came[h, j] = best_at
                    part = ways[w, hops - 1]
                    for j in range(sizes[part]):
                        there = cost[hops - 1, j] + close * pair[members[part, j], home]
                        if there < least:
                            least = there
                            at = j
                            for h in range(hops - 1, -1, -1):
                                chosen[h] = members[ways[w, h], at]
                                at = came[h, at]
                trip, here = data[home], home
                for h in range(hops):
                    n = chosen[h]
                    trip += inner * pair[here, n] + hop[n]
                    load[n] += each * hop[n]
                    here = n
                trips += trip + close * pair[here, home]
            held = min(slots[home], microbatches)
            whole += (trips / rows * microbatches / held + (held - 1) * back[home]) ** 8
        mean = (whole / max(sizes[0], 1)) ** 0.125
        for n in range(count):
            if load[n] > 0:
                whole += (load[n] + 0.25 * mean) ** 8
        return float(whole**0.125)

    value = estimate()
    least, best = value, labels.copy()
    for step in range(iterations):
        heat = 0.01 * least * (1.0 - step / iterations) ** 2 + 1e-12
        u, v = np.random.randint(count), np.random.randint(count)
        if labels[u] == labels[v] or labels[u] < 0 or labels[v] < 0:
            continue
        labels[u], labels[v] = labels[v], labels[u]
        new = estimate()
        if new <= value or np.random.random() < np.exp((value - new) / heat):
            value = new
            if value < least:
                least = value
                best[:] = labels
        else:
            labels[u], labels[v] = labels[v], labels[u]
    labels[:] = best
