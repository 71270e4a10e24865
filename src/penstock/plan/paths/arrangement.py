"""Decides which node holds which part.

    sizes     20 nodes, 6 parts, paths over 4: 5 data nodes for part 0, 3 replicas of every other part
    circuits  the nodes cut into 5 circuits of 4, whatever their parts       (penstock.plan.paths.circuits)
    labels    the places of the circuits get parts, rising along each circuit and all equally often, so that the
              replicas of a part are near each other if they have gradients to sum

Because circuits come first and parts second, arrangement and paths are one search: a circuit
without parts can always get parts in rising order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.allreduce import seconds_of_sums
from penstock.plan.paths.circuits import improve_circuits
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import part_orders, spread_parts

NO_PART_HELD = -1  # the label of a node without a part
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


def tilt_counts(sizes: Sequence[int], hops: int) -> tuple[int, ...]:
    """Return sizes with more nodes for the parts that come early on a path.

    Early parts hold a micro-batch for longer. The new sizes lie halfway between equal shares and
    shares proportional to the time that a part holds a micro-batch. Nodes that remain after
    rounding down go to the parts that lack most.

    >>> tilt_counts((5, 3, 3, 3, 3, 3), hops=5)
    (5, 4, 3, 3, 3, 2)
    """
    data = sizes[0]
    others = len(sizes) - 1
    if others < 2 or hops < 2:
        return tuple(sizes)
    total = sum(sizes[1:])
    held = [hops - part * (hops - 1) / (others - 1) for part in range(others)]
    wanted = [total * (1 / others + share / sum(held)) / 2 for share in held]
    tilted = [max(int(share), 1) for share in wanted]
    while sum(tilted) < total:
        neediest = max(range(others), key=lambda part: wanted[part] - tilted[part])
        tilted[neediest] += 1
    if sum(tilted) != total:
        return tuple(sizes)
    return (data, *tilted)


def part_of_each_node(partitions: Sequence[Sequence[int]], nodes: int) -> Ints:
    """Return the part of each node, given the nodes of each part."""
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
    nodes = problem.traffic.nodes
    order = np.random.default_rng(seed).permutation(nodes)
    data_nodes = sizes[0]
    places = data_nodes * (problem.hops + 1)
    if places > nodes:
        # Not every data node can have its own circuit: some share nodes, and the search sorts it out.
        return _arrange_sharing(problem, sizes, order)
    circuits, spare = improve_circuits(
        problem,
        order[:places].reshape(data_nodes, problem.hops + 1),
        order[places:],
        None,
        iterations,
        seed,
    )
    return _label_nodes(problem, sizes, circuits, spare, seed), circuits


def fit_nodes(problem: Problem, labels: Ints, circuits: Ints) -> tuple[Ints, Ints]:
    """Let nodes exchange their places until every part fits into the memory of its nodes.

    A node whose part does not fit exchanges with one for which both parts fit afterwards.
    """
    slots = problem.traffic.part_slots
    if slots is None:
        return labels, circuits
    labels = labels.copy()
    circuits = circuits.copy()
    for node in np.flatnonzero(labels >= 0).tolist():
        if slots[labels[node], node] > 0:
            continue
        partner = _partner(slots, labels, node)
        mine = circuits == node
        circuits[circuits == partner] = node
        circuits[mine] = partner
        labels[node], labels[partner] = labels[partner], labels[node]
    return labels, circuits


def _partner(slots: Ints, labels: Ints, node: int) -> int:
    """Return the node that can take this node's part and whose part fits here, with most room for it."""
    part = labels[node]
    room = np.where(labels >= 0, slots[labels, node], 0) > 0
    gain = np.where(room & (labels != part), slots[part], 0)
    partner = int(gain.argmax())
    if gain[partner] < 1:
        fitting = int((slots[part] > 0).sum())
        raise ShapeError(
            f"part {part} fits into the memory of {fitting} of {len(labels)} nodes, which is "
            "too few\n"
            "  make more parts or fewer data nodes, or shorten the micro-batches"
        )
    return partner


def find_circuits(problem: Problem, labels: Ints, iterations: int, seed: int) -> Ints:
    """Return circuits over nodes whose parts are given. If there are too few nodes, circuits share some."""
    data = np.flatnonzero(labels == 0)
    alive = [part for part in range(1, problem.body) if (labels == part).any()]
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
            replicas = np.flatnonzero(labels == part)
            if taken[part] >= len(replicas):
                disjoint = False
            circuits[circuit, place] = replicas[taken[part] % len(replicas)]
            taken[part] += 1
    if not disjoint or hops == 0:
        return circuits
    spare = np.setdiff1d(np.flatnonzero(labels > 0), circuits[:, 1:])
    improved, _ = improve_circuits(problem, circuits, spare, labels, iterations, seed)
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


def _arrange_sharing(
    problem: Problem, sizes: Sequence[int], order: Ints
) -> tuple[Ints, Ints]:
    """Give the nodes their parts in this order, and find circuits that share nodes."""
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    begin = 0
    for part, size in enumerate(sizes):
        labels[order[begin : begin + size]] = part
        begin += size
    return labels, find_circuits(problem, labels, 1, 0)


# ---------------------------------------------------------------- parts for the places of circuits
def _label_nodes(
    problem: Problem, sizes: Sequence[int], circuits: Ints, spare: Ints, seed: int
) -> Ints:
    """Return the part of each node, given circuits and the nodes that are on none."""
    designs = part_designs(len(circuits), problem.body, problem.hops)
    for design in designs:
        _refuse_design(problem, design)
    if problem.has_sums and len(circuits) > 1:
        designs = _bring_replicas_together(problem, circuits, designs, seed)
    labels = _labels_from(problem, circuits, designs)
    missing = list(sizes)
    for part in labels[labels >= 0].tolist():
        missing[part] -= 1
    for node in spare.tolist():  # goes to the part that lacks most, but never to part 0
        part = 1 + int(np.argmax(missing[1:]))
        labels[node] = part
        missing[part] -= 1
    return labels


def _labels_from(
    problem: Problem, circuits: Ints, designs: list[tuple[int, ...]]
) -> Ints:
    """Return the part of each node on a circuit."""
    labels = np.full(problem.traffic.nodes, NO_PART_HELD, dtype=np.int64)
    labels[circuits[:, 0]] = 0
    for circuit, design in zip(circuits, designs, strict=True):
        labels[circuit[1:]] = design
    return labels


def _refuse_design(problem: Problem, design: tuple[int, ...]) -> None:
    if not part_orders(frozenset(design), problem.rules):
        raise ShapeError(
            f"a path over the parts 0 {' '.join(map(str, design))} takes a step of more than "
            f"{problem.rules.ahead} parts; leave out fewer parts, or allow steps further ahead"
        )


def _bring_replicas_together(
    problem: Problem, circuits: Ints, designs: list[tuple[int, ...]], seed: int
) -> list[tuple[int, ...]]:
    """Let circuits exchange their parts as long as the slowest all-reduce gets no slower."""
    random = np.random.default_rng(seed)
    labels = _labels_from(problem, circuits, designs)
    sums = seconds_of_sums(problem, labels)
    for _ in range(min(EXCHANGES_PER_CIRCUIT * len(circuits), MAX_EXCHANGES)):
        i, j = random.choice(len(circuits), 2, replace=False).tolist()
        if designs[i] == designs[j]:
            continue
        labels[circuits[i, 1:]] = designs[j]
        labels[circuits[j, 1:]] = designs[i]
        new_sums = seconds_of_sums(problem, labels)
        if _allreduce_value(new_sums) <= _allreduce_value(sums):
            sums = new_sums
            designs[i], designs[j] = designs[j], designs[i]
        else:
            labels[circuits[i, 1:]] = designs[i]
            labels[circuits[j, 1:]] = designs[j]
    return designs


def _allreduce_value(sums: Floats) -> float:
    """Return the value to minimize: the slowest all-reduce and, a little, their mean."""
    if len(sums) <= 1:
        return math.inf
    return float(sums[1:].max() + MEAN_ALLREDUCE_WEIGHT * sums[1:].mean())
