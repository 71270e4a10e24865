"""How many micro-batches a node can hold, for each part that it may get.

A node with a memory holds the weights, gradients and optimizer state of its part, what exists only
while an action runs, messages, copies of gradients for sums, and what is left goes to the
activations of micro-batches:

    memory | weights and optimizer | messages | working | micro-batch | micro-batch | micro-batch |

`penstock.cost.memory` counts all of it for a schedule. So this module asks it about a small
schedule, in which one node of each part holds a given number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.cost.cluster import UNLIMITED_SLOTS, Cluster
from penstock.cost.cost import Cost
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT, device_memory
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Ints

SLOT_ROUNDING = 1e-12


class PartBytes(NamedTuple):
    """The bytes of a node with one part of the model."""

    weights: float  # weights, gradients and optimizer state
    fixed: float  # weights, messages, and whatever exists while an action runs
    sums: float  # copies of the gradients, when the activations are gone
    held: float  # of each micro-batch


def slots_of_parts(
    cluster: Cluster,
    cost: Cost,
    pieces: Sequence[tuple[int, ...]],
    tokens: int,
    cuts: tuple[int, ...],
) -> Ints:
    """Return how many micro-batches each node can hold with each part [part, node]; 0 if the part does not fit.

    pieces: the parts of the schedule that a node holds with each part of the model.
    """
    given = [node.slots for node in cluster.nodes]
    if None not in given:
        return np.tile(np.array(given, dtype=np.int64), (len(pieces), 1))
    sizes = [
        bytes_of_part(cost, pieces, part, tokens, cuts) for part in range(len(pieces))
    ]
    slots = np.empty((len(pieces), len(given)), dtype=np.int64)
    for number, node in enumerate(cluster.nodes):
        if node.slots is not None:
            slots[:, number] = node.slots
            continue
        for part, size in enumerate(sizes):
            slots[part, number] = _slots(number, node.memory, size)
        if slots[:, number].max() < 1:
            least = min(sizes, key=lambda size: size.fixed + size.held)
            raise ShapeError(
                f"node {number} cannot hold a single micro-batch of any part: with one it needs "
                f"{least.fixed + least.held:,.0f} bytes, {least.weights:,.0f} of them for weights and "
                f"optimizer, and its memory has {node.memory:,.0f}\n"
                "  make more parts, shorter micro-batches, or leave the node out"
            )
    return slots


def _slots(number: int, memory: float | None, size: PartBytes) -> int:
    if memory is None or size.held <= 0:
        fact = "has neither slots nor memory"
        if memory is not None:
            fact = "has a memory, but the bytes of a micro-batch are unknown"
        raise ShapeError(
            f"node {number} {fact}\n"
            "  give its slots, or its memory and the held bytes of the parts"
        )
    if size.weights + size.sums > memory or size.fixed > memory:
        return 0
    fit = (memory - size.fixed) / size.held * (1 + SLOT_ROUNDING)
    return int(min(fit, UNLIMITED_SLOTS))


def bytes_of_part(
    cost: Cost,
    pieces: Sequence[tuple[int, ...]],
    part: int,
    tokens: int,
    cuts: tuple[int, ...],
) -> PartBytes:
    """Return the bytes of a node with this part of the model."""
    one, two = (
        _probe(pieces, part, count, MicroBatch((), tokens, cuts)) for count in (1, 2)
    )
    rank = 0 if part == 0 else 1
    use, more = device_memory(one, cost), device_memory(two, cost)
    held = float(more.activations[rank] - use.activations[rank])
    beside = float(use.activations[rank] - held + use.more[rank] + use.messages[rank])
    weights = float(use.weights[rank])
    return PartBytes(weights, weights + beside, float(use.sums[rank]), held)


def _probe(
    pieces: Sequence[tuple[int, ...]], part: int, held: int, shape: MicroBatch
) -> Schedule:
    """Return a schedule in which a node with this part holds `held` micro-batches at once.

    Rank 0 is a data node, and rank 1 has another part. Each has a twin with which it sums
    gradients. Further micro-batches pass one by one, so that there are as many messages as can ever
    be under way.
    """
    other = part or 1
    nodes = [0, other]
    stages = []
    for rank, label in enumerate([*nodes, *nodes]):
        stages += [Stage(rank, piece) for piece in pieces[label]]
    first, *rest = pieces[0]
    order = [first, *pieces[other], *rest]
    number_of = {stage.part: number for number, stage in reversed([*enumerate(stages)])}
    path = tuple(number_of[piece] for piece in order)
    count = held + MAX_SENDS_IN_FLIGHT
    groups = [range(held), *(range(mb, mb + 1) for mb in range(held, count))]
    slices = max(len(shape.cuts) - 1, 1)
    lanes: list[list[Action]] = [[] for _ in range(2 * len(nodes))]
    for group in groups:
        for stage in path:
            rank = stages[stage].rank
            for mb in group:
                lanes[rank] += [Action(Op.F, stage, mb, s) for s in range(slices)]
        for stage in reversed(path):
            rank = stages[stage].rank
            for mb in group:
                backwards = [Action(Op.B, stage, mb, s) for s in range(slices)]
                lanes[rank] += reversed(backwards)
    microbatch = MicroBatch(path, shape.tokens, shape.cuts)
    return schedule_of(stages, [microbatch] * count, lanes)
