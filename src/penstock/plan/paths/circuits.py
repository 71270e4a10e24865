"""Cuts the nodes into circuits: a data node and its hops, all for themselves. The start of every search.

    circuit 0   d ── a ── b ── c ── back to d    its time: micro-batches wait for their round trips, or for
    circuit 1   e ── f ── g ── h ── back to e    the slowest of its nodes, whichever is more

Nodes change places, between circuits or within one, so that the slowest circuits get faster: simulated annealing on the
sum of the circuits' times to the eighth power. A circuit shares no node with another, so its time is a formula, and a
million moves take a second. Where the nodes have their parts already, a place takes only a node whose part keeps to
the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.compiled import COMPILE_FROM, at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import Rules

NEIGHBOURS_FIRST = 24  # neighbours of a node that are tried first


@dataclass(frozen=True, slots=True, eq=False)
class CircuitTerms:
    """What a circuit's time is made of."""

    pair: Floats  # seconds over a link and back [node, node]
    data: Floats  # seconds of work for one micro-batch, as a data node [node]
    hop: Floats  # and as a hop
    back: Floats  # seconds of a backward and the gap after it
    inner: float  # how often a link within the circuit is passed, there and back
    close: float  # how often the link home is


def circuit_terms(problem: Problem) -> CircuitTerms:
    """For whole micro-batches; the middle parts are taken as their mean."""
    traffic, body = problem.traffic, problem.body
    forward, backward = traffic.forward.sum(axis=1), traffic.backward.sum(axis=1)
    work = forward + backward
    middle = range(1, body)
    hop, back = (
        float(np.mean([work[p] for p in middle])),
        float(np.mean([backward[p] for p in middle])),
    )
    data = work[0] + work[-1]
    if problem.waves:
        hop, back = 2 * hop, 2 * back
    there = traffic.hop(1)
    # slices overlap: the first carries the wait, the others follow it
    return CircuitTerms(
        there + there.T,
        data * traffic.slow,
        hop * traffic.slow,
        back * traffic.slow + traffic.gap,
        2.0 if problem.waves else 1.0,
        0.0 if problem.waves else 1.0,
    )


def improve_circuits(
    problem: Problem,
    circuits: Ints,
    spare: Ints,
    labels: Ints | None,
    iterations: int,
    seed: int,
) -> tuple[Ints, Ints]:
    """The circuits and the nodes left over, after so many tried moves. `labels`: parts of nodes, if they are fixed."""
    found = circuit_terms(problem)
    apart = found.pair + np.diag(np.full(len(found.pair), np.inf))
    near = np.ascontiguousarray(
        np.argsort(apart, axis=1, kind="stable")[:, :NEIGHBOURS_FIRST]
    )
    fixed = np.full(problem.traffic.nodes, -1) if labels is None else labels
    circuits, spare = (
        np.ascontiguousarray(circuits).copy(),
        np.append(spare, -1).astype(np.int64),
    )
    at_speed(_anneal, COMPILE_FROM)(
        circuits,
        spare,
        len(spare) - 1,
        near,
        found.pair,
        found.data,
        found.hop,
        found.back,
        found.inner,
        found.close,
        problem.traffic.slots,
        problem.microbatches,
        fixed.astype(np.int64),
        labels is not None,
        _limits(problem.rules),
        iterations,
        seed,
    )
    return circuits, spare[:-1]


def _limits(rules: Rules) -> Ints:
    return np.array(
        [rules.behind, rules.distance, rules.swaps, rules.ahead], dtype=np.int64
    )


def _anneal(  # noqa: PLR0912, PLR0915
    circuits: Ints,
    spare: Ints,
    spares: int,
    near: Ints,
    pair: Floats,
    data: Floats,
    hop: Floats,
    back: Floats,
    inner: float,
    close: float,
    slots: Ints,
    microbatches: int,
    labels: Ints,
    fixed: bool,
    limits: Ints,
    iterations: int,
    seed: int,
) -> None:
    count, length = circuits.shape
    np.random.seed(seed)

    def seconds(circuit: Ints) -> float:
        trip = data[circuit[0]]
        work, slowest, held = data[circuit[0]], back[circuit[0]], slots[circuit[0]]
        for p in range(1, length):
            n = circuit[p]
            trip += hop[n] + inner * pair[circuit[p - 1], n]
            work, slowest, held = (
                max(work, hop[n]),
                max(slowest, back[n]),
                min(held, slots[n]),
            )
        trip += close * pair[circuit[length - 1], circuit[0]]
        held = min(held, microbatches)
        return float(
            max(
                trip * microbatches / held + (held - 1) * slowest,
                trip + (microbatches - 1) * work,
            )
        )

    def legal(circuit: Ints) -> bool:
        if labels[circuit[0]] != 0:
            return False
        frontier = distance = swaps = 0
        for p in range(1, length):
            part = labels[circuit[p]]
            if part <= 0 or part - frontier > limits[3]:
                return False
            for q in range(1, p):
                if labels[circuit[q]] == part:
                    return False
            if part < frontier:
                if frontier - part > limits[0]:
                    return False
                distance += frontier - part
                swaps += 1
            frontier = max(frontier, part)
        return bool(distance <= limits[1] and swaps <= limits[2])

    where = np.full(
        (len(data), 2), -1, np.int64
    )  # circuit and place; of a spare node -1 and its number
    time = np.zeros(count)
    for i in range(count):
        time[i] = seconds(circuits[i])
        for p in range(length):
            where[circuits[i, p], 0], where[circuits[i, p], 1] = i, p
    for k in range(spares):
        where[spare[k], 0], where[spare[k], 1] = -1, k
    best, best_spare = circuits.copy(), spare.copy()
    scale = time.max()
    value = ((time / scale) ** 8).sum()
    least = value
    for step in range(iterations):
        heat = 0.2 * (1.0 - step / iterations) ** 3 + 1e-9
        i = np.random.randint(count)
        for _ in range(2):  # rather a slow circuit
            other = np.random.randint(count)
            if time[other] > time[i]:
                i = other
        a = np.random.randint(length)
        if (
            np.random.random() < 0.5 and near.shape[1] > 0
        ):  # bring a neighbour of one of its nodes
            v = near[
                circuits[i, np.random.randint(length)], np.random.randint(near.shape[1])
            ]
            j, b = where[v, 0], where[v, 1]
        else:
            j = (
                np.random.randint(count)
                if spares == 0 or np.random.random() < 0.9
                else -1
            )
            b = np.random.randint(length) if j >= 0 else np.random.randint(spares)
            v = circuits[j, b] if j >= 0 else spare[b]
        u = circuits[i, a]
        if u == v:
            continue
        circuits[i, a] = v
        if j >= 0:
            circuits[j, b] = u
        else:
            spare[b] = u
        allowed = not fixed or (legal(circuits[i]) and (j < 0 or legal(circuits[j])))
        change = 0.0
        if allowed:
            new_i = seconds(circuits[i])
            new_j = seconds(circuits[j]) if j >= 0 else 0.0
            change = (new_i / scale) ** 8 - (time[i] / scale) ** 8
            if j >= 0 and j != i:
                change += (new_j / scale) ** 8 - (time[j] / scale) ** 8
        if allowed and (change <= 0 or np.random.random() < np.exp(-change / heat)):
            where[v, 0], where[v, 1], where[u, 0], where[u, 1] = i, a, j, b
            time[i] = new_i
            if j >= 0:
                time[j] = new_j
            value += change
            if value < least - 1e-12:
                least = value
                best[:] = circuits
                best_spare[:] = spare
        else:
            circuits[i, a] = u
            if j >= 0:
                circuits[j, b] = v
            else:
                spare[b] = v
    circuits[:] = best
    spare[:] = best_spare
