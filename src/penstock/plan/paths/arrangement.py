"""Which node holds which part.

    sizes     20 nodes, 6 parts, paths over 4: 5 data nodes for part 0, 3 replicas of every other part
    circuits  the nodes cut into 5 circuits of 4, whatever their parts       (penstock.plan.paths.circuits)
    labels    the circuits' places get parts, rising along each circuit, all parts equally often, so that the
              replicas of a part are near each other where they have gradients to sum

Taking circuits first and parts afterwards is what makes arrangement and paths one search: the parts of a circuit that
has none yet can always be chosen to rise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import sum_seconds, sum_seconds_by_part
from penstock.plan.paths.circuits import improve_circuits
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders, spread_parts

NO_PART_HELD = -1  # the part of a node that holds none


def replica_counts(
    nodes: int, parts: int, hops: int, data: int | None = None
) -> tuple[int, ...]:
    """Data nodes and replicas of each other part, so that all nodes have the same to do; or with so many data nodes.

    >>> replica_counts(20, 6, 3)
    (5, 3, 3, 3, 3, 3)
    """
    if nodes < parts:
        raise ShapeError(
            f"{nodes} nodes cannot hold {parts} parts; the least is {parts} nodes"
        )
    most = nodes - (parts - 1)
    if data is None:
        data = max(min(nodes // (hops + 1), most), 1)
    if not 1 <= data <= most:
        raise ShapeError(
            f"{data} data nodes of {nodes} nodes and {parts} parts; from 1 to {most} fit"
        )
    each, more = divmod(nodes - data, parts - 1)
    return (data, *(each + (number < more) for number in range(parts - 1)))


def tilt_counts(sizes: Sequence[int], hops: int) -> tuple[int, ...]:
    """As many nodes, but more for parts that come early on a path: those hold a micro-batch longer.

    The mean of equal shares and of shares by how long they hold one; what remains goes to who lacks most.

    >>> tilt_counts((5, 3, 3, 3, 3, 3), hops=5)
    (5, 4, 3, 3, 3, 2)
    """
    data, others = sizes[0], len(sizes) - 1
    if others < 2 or hops < 2:
        return tuple(sizes)
    held = [hops - part * (hops - 1) / (others - 1) for part in range(others)]
    wanted = [sum(sizes[1:]) * (1 / others + share / sum(held)) / 2 for share in held]
    found = [max(int(share), 1) for share in wanted]
    while sum(found) < sum(sizes[1:]):
        found[max(range(others), key=lambda part: wanted[part] - found[part])] += 1
    return (data, *found) if sum(found) == sum(sizes[1:]) else tuple(sizes)


def part_of_each_node(partitions: Sequence[Sequence[int]], nodes: int) -> Ints:
    """The part of each node, from the nodes of each part."""
    labels = np.full(nodes, NO_PART_HELD, dtype=np.int64)
    for part, members in enumerate(partitions):
        for node in members:
            if not 0 <= node < nodes:
                raise ShapeError(
                    f"part {part} is on node {node}, but there are nodes 0..{nodes - 1}"
                )
            if labels[node] != NO_PART_HELD:
                raise ShapeError(
                    f"node {node} holds parts {labels[node]} and {part}; a node holds one"
                )
            labels[node] = part
    return labels


def part_designs(circuits: int, parts: int, hops: int) -> list[tuple[int, ...]]:
    """For each circuit the parts it meets beside the first, rising; over all circuits equally often.

    >>> part_designs(5, 6, 3)
    [(2, 4, 5), (1, 3, 5), (1, 2, 4), (2, 3, 5), (1, 3, 4)]
    """
    return [spread_parts(range(1, parts), hops, circuit) for circuit in range(circuits)]


def arrange(
    problem: Problem, sizes: Sequence[int], iterations: int, seed: int
) -> tuple[Ints, Ints]:
    """The part of each node and the circuits [data node, hops...], both chosen."""
    nodes, hops, count = problem.traffic.nodes, problem.hops, sizes[0]
    order = np.random.default_rng(seed).permutation(nodes)
    places = count * (hops + 1)
    if (
        places > nodes
    ):  # more data nodes than circuits: some share one, and the search sorts it out
        return _shared(problem, sizes, order)
    circuits, spare = improve_circuits(
        problem,
        order[:places].reshape(count, hops + 1),
        order[places:],
        None,
        iterations,
        seed,
    )
    return _labelled(problem, sizes, circuits, spare, seed), circuits


def find_circuits(problem: Problem, labels: Ints, iterations: int, seed: int) -> Ints:
    """Circuits over nodes whose parts are given; where there are not enough nodes, circuits that share some."""
    body, hops = problem.body, problem.hops
    data = np.flatnonzero(labels == 0)
    alive = [part for part in range(1, body) if (labels == part).any()]
    hops = min(hops, len(alive))
    rows, disjoint = np.empty((len(data), hops + 1), dtype=np.int64), True
    taken = dict.fromkeys(range(body), 0)
    chosen = part_designs(len(data), len(alive) + 1, hops)
    for circuit, node in enumerate(data.tolist()):
        allowed = part_orders(
            frozenset(alive[number - 1] for number in chosen[circuit]), problem.rules
        )
        parts = allowed[0] if allowed else _any_order(alive, hops, problem)
        rows[circuit, 0] = node
        for place, part in enumerate(parts, start=1):
            replicas = np.flatnonzero(labels == part)
            disjoint &= taken[part] < len(replicas)
            rows[circuit, place] = replicas[taken[part] % len(replicas)]
            taken[part] += 1
    if not disjoint or hops == 0:
        return rows
    spare = np.setdiff1d(np.flatnonzero(labels > 0), rows[:, 1:])
    return improve_circuits(problem, rows, spare, labels, iterations, seed)[0]


def _any_order(alive: list[int], hops: int, problem: Problem) -> tuple[int, ...]:
    """Parts that a path may meet in order, where the first choice leaves too wide a step."""
    rows = [alive[i : i + hops] for i in range(len(alive) - hops + 1)]
    found = [
        order for row in rows for order in part_orders(frozenset(row), problem.rules)
    ]
    if not found:
        raise ShapeError(
            f"no path over {hops + 1} of the parts 0, {', '.join(map(str, alive))} keeps to the order; "
            f"steps go at most {problem.rules.ahead} ahead"
        )
    return found[0]


def _shared(problem: Problem, sizes: Sequence[int], order: Ints) -> tuple[Ints, Ints]:
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    begin = 0
    for part, size in enumerate(sizes):
        labels[order[begin : begin + size]] = part
        begin += size
    return labels, find_circuits(problem, labels, 1, 0)


# ---------------------------------------------------------------- parts for the places of circuits
def _labelled(
    problem: Problem, sizes: Sequence[int], circuits: Ints, spare: Ints, seed: int
) -> Ints:
    rows = part_designs(len(circuits), problem.body, problem.hops)
    for row in rows:
        _refuse(problem, row)
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    labels[circuits[:, 0]] = 0
    if problem.gradients > 0 and len(circuits) > 1:
        rows = _nearer(problem, circuits, rows, seed)
    for circuit, row in zip(circuits, rows, strict=True):
        labels[circuit[1:]] = row
    missing = list(sizes)
    for part in labels[labels >= 0].tolist():
        missing[part] -= 1
    for node in (
        spare.tolist()
    ):  # the parts that lack most, by what they were meant to have; not data nodes
        part = 1 + int(np.argmax(missing[1:]))
        labels[node] = part
        missing[part] -= 1
    return labels


def _refuse(problem: Problem, row: tuple[int, ...]) -> None:
    if not part_orders(frozenset(row), problem.rules):
        raise ShapeError(
            f"a path over the parts 0 {' '.join(map(str, row))} takes a step of more than {problem.rules.ahead} parts; "
            "leave out less, or allow steps further ahead"
        )


def _nearer(
    problem: Problem, circuits: Ints, rows: list[tuple[int, ...]], seed: int
) -> list[tuple[int, ...]]:
    """Deals the rows to the circuits so that the slowest sum over a part's replicas gets quicker."""
    random = np.random.default_rng(seed)
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    labels[circuits[:, 0]] = 0
    for circuit, row in zip(circuits, rows, strict=True):
        labels[circuit[1:]] = row
    sums = sum_seconds_by_part(problem.traffic, labels, problem.body, problem.gradients)
    for _ in range(min(40 * len(circuits), 2000)):
        i, j = random.choice(len(circuits), 2, replace=False).tolist()
        if rows[i] == rows[j]:
            continue
        labels[circuits[i, 1:]], labels[circuits[j, 1:]] = rows[j], rows[i]
        touched = set(rows[i]) ^ set(rows[j]) | {p for k in (i, j) for p in rows[k]}
        new = sums.copy()
        for part in touched:
            new[part] = sum_seconds(
                problem.traffic, np.flatnonzero(labels == part), problem.gradients
            )
        if _worth(new) <= _worth(sums):
            sums, rows[i], rows[j] = new, rows[j], rows[i]
        else:
            labels[circuits[i, 1:]], labels[circuits[j, 1:]] = rows[i], rows[j]
    return rows


def _worth(sums: Floats) -> float:
    return float(sums[1:].max() + 1e-3 * sums[1:].mean()) if len(sums) > 1 else math.inf
