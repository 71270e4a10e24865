"""Cuts the nodes into circuits: a data node and hops that no other circuit uses. Every search starts here.

    circuit 0   d ── a ── b ── c ── back to d    its time: that of the micro-batches' round trips,
    circuit 1   e ── f ── g ── h ── back to e    or that of the work on its slowest node, whichever is more

Nodes exchange places, between circuits or within one, so that the slowest circuits get faster. This
is simulated annealing on the sum of the circuits' times to the eighth power. Circuits share no
nodes, so the time of each is a formula, and a million moves take a second. If the nodes have parts
already, a place only takes a node whose part keeps the order legal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import Rules

NEAREST_NODES = 24  # nearest nodes of each node, which half of the moves choose from


@dataclass(frozen=True, slots=True, eq=False)
class CircuitTerms:
    """The terms of the formula for the time of a circuit."""

    pair: Floats  # seconds over a link and back [node, node]
    data: Floats  # seconds of work on one micro-batch as a data node [node]
    hop: Floats  # seconds of work on one micro-batch as a hop [node]
    back: Floats  # seconds of a backward and the gap after it [node]
    # How often a micro-batch uses a link within the circuit, there and back.
    inner: float
    close: float  # how often it uses the link from the last hop to the data node


def circuit_terms(problem: Problem) -> CircuitTerms:
    """Return the terms for whole micro-batches; all hops have the mean work of the middle parts.

    Slices overlap: the first one carries the wait, and the others follow it.
    """
    traffic = problem.traffic
    forward = traffic.forward.sum(axis=1)
    backward = traffic.backward.sum(axis=1)
    work = forward + backward
    middle = range(1, problem.body)
    hop = float(np.mean([work[part] for part in middle]))
    back = float(np.mean([backward[part] for part in middle]))
    data = work[0] + work[-1]
    inner = 1.0
    close = 1.0
    if problem.waves:
        hop *= 2
        back *= 2
        inner = 2.0
        close = 0.0
    there = traffic.hop(1)
    return CircuitTerms(
        there + there.T,
        data * traffic.slow,
        hop * traffic.slow,
        back * traffic.slow + traffic.gap,
        inner,
        close,
    )


def improve_circuits(
    problem: Problem,
    circuits: Ints,
    spare: Ints,
    labels: Ints | None,
    iterations: int,
    seed: int,
) -> tuple[Ints, Ints]:
    """Return the circuits and the spare nodes after `iterations` tried moves.

    labels: the parts of the nodes, if they are fixed.
    """
    terms = circuit_terms(problem)
    distance = terms.pair + np.diag(np.full(len(terms.pair), np.inf))
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :NEAREST_NODES]
    circuits = np.ascontiguousarray(circuits).copy()
    spare = np.append(spare, -1).astype(np.int64)  # never empty, for the compiler
    fixed = labels is not None
    if labels is None:
        labels = np.full(problem.traffic.nodes, -1)
    compile_if_large(_anneal, MIN_COMPILED_SIZE)(
        circuits,
        spare,
        len(spare) - 1,
        np.ascontiguousarray(nearest),
        terms.pair,
        terms.data,
        terms.hop,
        terms.back,
        terms.inner,
        terms.close,
        problem.traffic.slots,
        problem.microbatches,
        labels.astype(np.int64),
        fixed,
        _limits(problem.rules),
        iterations,
        seed,
    )
    return circuits, spare[:-1]


def _limits(rules: Rules) -> Ints:
    """Return the limits of the order as an array, for the compiled loop."""
    limits = [rules.behind, rules.distance, rules.swaps, rules.ahead]
    return np.array(limits, dtype=np.int64)


def _anneal(  # noqa: PLR0912, PLR0915
    circuits: Ints,
    spare: Ints,
    spares: int,
    nearest: Ints,
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
    """Exchange nodes in `circuits` and `spare`, and leave the best circuits there."""
    count, length = circuits.shape
    np.random.seed(seed)

    def seconds(circuit: Ints) -> float:
        home = circuit[0]
        trip = data[home]
        work = data[home]
        slowest = back[home]
        held = slots[home]
        for p in range(1, length):
            n = circuit[p]
            trip += hop[n] + inner * pair[circuit[p - 1], n]
            work = max(work, hop[n])
            slowest = max(slowest, back[n])
            held = min(held, slots[n])
        trip += close * pair[circuit[length - 1], home]
        held = min(held, microbatches)
        by_trips = trip * microbatches / held + (held - 1) * slowest
        by_work = trip + (microbatches - 1) * work
        return float(max(by_trips, by_work))

    def legal(circuit: Ints) -> bool:
        if labels[circuit[0]] != 0:
            return False
        frontier = 0
        distance = 0
        swaps = 0
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

    # the circuit and the place of each node; for a spare node -1 and its place in `spare`
    where = np.full((len(data), 2), -1, np.int64)
    time = np.zeros(count)
    for i in range(count):
        time[i] = seconds(circuits[i])
        for p in range(length):
            where[circuits[i, p], 0] = i
            where[circuits[i, p], 1] = p
    for k in range(spares):
        where[spare[k], 0] = -1
        where[spare[k], 1] = k
    best = circuits.copy()
    best_spare = spare.copy()

    def keep() -> None:
        for i in range(count):
            for p in range(length):
                best[i, p] = circuits[i, p]
        for k in range(len(spare)):
            best_spare[k] = spare[k]

    scale = time.max()
    value = 0.0
    for i in range(count):
        value += (time[i] / scale) ** 8
    least = value
    for step in range(iterations):
        heat = 0.2 * (1.0 - step / iterations) ** 3 + 1e-9
        i = np.random.randint(count)
        for _ in range(2):  # prefer a slow circuit
            other = np.random.randint(count)
            if time[other] > time[i]:
                i = other
        a = np.random.randint(length)
        if np.random.random() < 0.5 and nearest.shape[1] > 0:
            # Bring a node that is near to one of the circuit's nodes.
            node = circuits[i, np.random.randint(length)]
            v = nearest[node, np.random.randint(nearest.shape[1])]
            j = where[v, 0]
            b = where[v, 1]
        else:
            j = -1
            if spares == 0 or np.random.random() < 0.9:
                j = np.random.randint(count)
            if j >= 0:
                b = np.random.randint(length)
                v = circuits[j, b]
            else:
                b = np.random.randint(spares)
                v = spare[b]
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
            where[v, 0] = i
            where[v, 1] = a
            where[u, 0] = j
            where[u, 1] = b
            time[i] = new_i
            if j >= 0:
                time[j] = new_j
            value += change
            if value < least - 1e-12:
                least = value
                keep()
        else:
            circuits[i, a] = u
            if j >= 0:
                circuits[j, b] = v
            else:
                spare[b] = v
    for i in range(count):
        for p in range(length):
            circuits[i, p] = best[i, p]
    for k in range(len(spare)):
        spare[k] = best_spare[k]
