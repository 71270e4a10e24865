"""The input of the path planner, and the arrays it works on.

cluster ─┐
parts  ──┼──► Problem ──► ProblemArrays (seconds and bytes as arrays)        parts: those of the model, then the head
rules  ──┤                bounds, arrangement, search
policy ──┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cluster import UNLIMITED_SLOTS, Cluster
from penstock.cost.cost import Cost, PartCost, PausedCost, PlannedSumsCost, share_of
from penstock.cost.curve import Curve, Seconds, sum_curves
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT, device_memory
from penstock.cost.placed import block_seconds
from penstock.cost.profile import Profile
from penstock.errors import ShapeError
from penstock.ir.action import Action, backward, forward
from penstock.ir.plan import Facts
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Floats, Ints
from penstock.partition import even_partition
from penstock.plan.paths.rules import Rules
from penstock.schedules.facts import refuse_if_too_large
from penstock.schedules.orders import require_at_least


class QueueOrder(IntEnum):
    """Which of the waiting tasks a node takes next."""

    ARRIVAL = 0  # first come, first served; micro-batches that start on the node last
    BACKWARD = 1  # backwards first, then in order of arrival
    OLDEST = 2  # the micro-batch with the lowest number
    TAIL = 3  # backwards first, then the micro-batch with the longest way left
    URGENT = 4  # the micro-batch with the longest way left, forward or backward


class ProblemArrays(NamedTuple):
    """All times and sizes as arrays, indexed by node, part (the head last) and slice."""

    latency: Floats  # seconds [node, node]
    byte: Floats  # seconds per byte [node, node]
    slow: Floats  # seconds that a node needs for one second of work [node]
    slots: Ints  # micro-batches that a node can hold with the part that suits it best [node]
    forward: Floats  # seconds [part, slice]
    backward: Floats  # seconds [part, slice]
    message: Floats  # bytes [part, slice]
    gap: float  # seconds between two tasks on a node
    first_gap: float  # seconds after the first task of a micro-batch
    serial: bool  # whether a link carries only one message at a time
    wait: float  # seconds that a task may wait on its node
    part_slots: Ints  # micro-batches that a node can hold [part, node]
    sums: Floats  # bytes to sum [part, sum]

    def slots_with(self, part_of_node: Ints) -> Ints:
        """Return how many micro-batches each node can hold with the part that it has.

        It is 0 if the part does not fit on the node. A node without a part has its most slots.
        """
        own: Ints = self.part_slots[part_of_node, np.arange(len(part_of_node))]
        return np.where(part_of_node < 0, self.slots, own)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.slow)

    @property
    def slices(self) -> int:
        """The number of slices of a micro-batch."""
        return int(self.forward.shape[1])

    def hop(self, part: int) -> Floats:
        """Return the seconds from node to node for all slices of a part's message.

        The slices travel side by side, or one after the other if links are serial.
        """
        size = self.message[part].sum() if self.serial else self.message[part].max()
        seconds: Floats = self.latency + self.byte * size
        return seconds


NO_PART_HELD = -1  # the label of a node without a part


# ---------------------------------------------------------------- micro-batches that a node can hold
# How many micro-batches a node can hold, for each part that it may get.
#
# A node with a memory holds the weights, gradients and optimizer state of its part, what exists only
# while an action runs, messages, copies of gradients for sums, and what is left goes to the
# activations of micro-batches:
#
#     memory | weights and optimizer | messages | working | micro-batch | micro-batch | micro-batch |
#
# `penstock.cost.memory` counts all of it for a schedule. So this module asks it about a small
# schedule, in which one node of each part holds a given number of micro-batches.

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
                lanes[rank] += [forward(stage, mb, s) for s in range(slices)]
        for stage in reversed(path):
            rank = stages[stage].rank
            for mb in group:
                backwards = [backward(stage, mb, s) for s in range(slices)]
                lanes[rank] += reversed(backwards)
    microbatch = MicroBatch(path, shape.tokens, shape.cuts)
    return schedule_of(stages, [microbatch] * count, lanes)


# ---------------------------------------------------------------- the problem


@dataclass(frozen=True, slots=True)
class Policy:
    """How nodes carry out a plan.

    queue_orders: the orders in which nodes may serve their queues; the search chooses one.
    rounds: how many micro-batches use each path, one after the other. The next one starts when the
        one before is back.
    reserved: whether a slot belongs to one path for the whole step. Otherwise any micro-batch can
        take it while it is free.
    staggers: seconds between the first starts on a data node; the search chooses one. None stands
        for the seconds of a forward.
    ordered: whether nodes keep to a planned order. Otherwise they take what comes first, and only
        the paths are planned.
    """

    queue_orders: tuple[QueueOrder, ...] = (
        QueueOrder.BACKWARD,
        QueueOrder.TAIL,
        QueueOrder.ARRIVAL,
        QueueOrder.OLDEST,
        QueueOrder.URGENT,
    )
    rounds: int = 1
    reserved: bool = False
    staggers: tuple[float | None, ...] = (0.0,)
    ordered: bool = True


PLANNED = Policy()
PUBLISHED = Policy(
    (QueueOrder.ARRIVAL,), rounds=2, reserved=True, staggers=(None, 1.0), ordered=False
)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A cluster, a model, and what to plan.

    parts: the parts of the model, then the head.
    microbatches: micro-batches per data node.
    tokens: tokens of a micro-batch.
    slices: slices of a micro-batch.
    waves: whether paths visit every node twice, down and up.
    gradients: bytes of a part's gradients, which its replicas sum at the end; by default those of
        each part.
    planned_sums: whether each part's gradients are summed in the quickest way; otherwise in rings,
        as gloo and NCCL do.
    gap: seconds between two tasks on a node.
    first_gap: seconds after the first task of a micro-batch.
    arrangement: the nodes of each part. If it is not given, the search chooses them.
    sizes: the number of nodes of each part, if the search may choose only which nodes these are.
    data_nodes: the number of nodes with the first part, if that is all that is given.
    passes: passes of a step over its micro-batches. Gradients are summed once, in the last one, and
        plans are compared by the mean time of a pass.
    """

    cluster: Cluster
    parts: tuple[PartCost, ...]
    microbatches: int
    rules: Rules = field(default_factory=Rules)
    policy: Policy = PLANNED
    tokens: int = 1
    slices: int = 1
    waves: bool = False
    gradients: float = 0.0
    gap: float = 0.0
    first_gap: float = 0.0
    arrangement: Sequence[Sequence[int]] | None = None
    sizes: Sequence[int] | None = None
    data_nodes: int | None = None
    planned_sums: bool = True
    passes: int = 1
    arrays: ProblemArrays = field(init=False)

    def __post_init__(self) -> None:
        require_at_least(
            1,
            microbatches=self.microbatches,
            slices=self.slices,
            tokens=self.tokens,
            passes=self.passes,
        )
        for name in ("gradients", "gap", "first_gap"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ShapeError(
                    f"{name} must be a number that is at least 0, not {value}"
                )
        if len(self.parts) < 3:
            raise ShapeError(
                f"paths need at least two parts and a head, not {len(self.parts)} parts in all"
            )
        refuse_if_too_large(
            2 * (self.hops + 2) * self.microbatches * self.slices,
            f"one data node with microbatches={self.microbatches} slices={self.slices}",
        )
        if self.tokens < self.slices:
            raise ShapeError(
                f"{self.tokens} tokens cannot be cut into {self.slices} slices"
            )
        if self.microbatches % self.policy.rounds:
            raise ShapeError(
                f"{self.microbatches} micro-batches for each data node do not divide into "
                f"{self.policy.rounds} rounds"
            )
        if self.waves and self.hops < 1:
            raise ShapeError(
                "a wave needs at least one part besides the first; leave out fewer parts"
            )
        if self.gradients > 0:
            *body, head = self.parts
            body = [replace(part, gradients=self.gradients) for part in body]
            object.__setattr__(self, "parts", (*body, head))
        object.__setattr__(self, "arrays", _arrays_of(self))

    @property
    def body(self) -> int:
        """The number of parts of the model, without the head."""
        return len(self.parts) - 1

    @property
    def hops(self) -> int:
        """The number of parts on a path, without the first one."""
        return self.rules.hops(self.body)

    @property
    def units(self) -> int:
        """The number of paths per data node. All rounds share the same paths."""
        return self.microbatches // self.policy.rounds

    @property
    def cuts(self) -> tuple[int, ...]:
        """The token boundaries of the slices."""
        return tuple(
            self.tokens * piece // self.slices for piece in range(self.slices + 1)
        )

    @property
    def pieces(self) -> tuple[PartCost, ...]:
        """The parts as the schedule has them. Waves have two halves of every part."""
        return halves_of(self.parts) if self.waves else self.parts

    def cost(self) -> Cost:
        """Return the cost for `penstock.sim.simulate`."""
        cost: Cost = self.cluster.cost(self.pieces)
        if self.gap or self.first_gap:
            cost = PausedCost(cost, self.gap, self.first_gap)
        return PlannedSumsCost(cost) if self.planned_sums else cost

    def pieces_of(self, part: int) -> tuple[int, ...]:
        """Return the parts of the schedule that a node with this part of the model holds."""
        if part < 0:
            return ()
        if self.waves:
            return (part, 2 * self.body - 1 - part)
        if part == 0:
            return (0, self.body)
        return (part,)

    def by_part(self, seconds: Floats) -> Floats:
        """Return the seconds of each part of the model; in waves, those of both its pieces."""
        down: Floats = seconds[: self.body]
        return down + seconds[self.body :][::-1] if self.waves else down

    @property
    def link_uses(self) -> tuple[float, float]:
        """How often a micro-batch uses a link of its path there and back, and the one from its end to its data node."""
        return (2.0, 0.0) if self.waves else (1.0, 1.0)

    @property
    def has_sums(self) -> bool:
        """Whether replicas have gradients to sum."""
        return bool(self.arrays.sums.any())

    def mean_pass(self, last_backward: float, end: float) -> float:
        """Return the mean time of a pass, if the last one ends with the sums of gradients."""
        return last_backward + (end - last_backward) / self.passes

    def without_sums(self) -> Problem:
        """Return the problem of the passes that do not sum gradients."""
        parts = [
            replace(part, gradients=0.0, tied_gradients=0.0) for part in self.parts
        ]
        return replace(self, parts=tuple(parts), gradients=0.0, passes=1)

    def stagger(self, choice: float | None) -> float:
        """Return the seconds between the first starts on a data node."""
        return float(self.arrays.forward[0].sum()) if choice is None else choice


def even_parts(
    parts: int,
    forward: float,
    backward: float = 1.5,
    loss: float = 0.25,
    tokens: int = 1,
    message: float = 0.0,
    held: float = 0.0,
    weights: float = 0.0,
    gradients: float = 0.0,
) -> tuple[PartCost, ...]:
    """Return equal parts and a head.

    forward: seconds of a whole micro-batch's forward over one part.
    backward, loss: seconds of the backward and of the loss, as multiples of `forward`.
    message, held: bytes of a whole micro-batch's message, and of what a part holds of it.
    weights: bytes of a part's weights, gradients and optimizer state.
    gradients: bytes of a part's gradients, which its replicas sum.
    """
    require_at_least(1, parts=parts)
    refuse_if_too_large(2 * parts, f"a path over parts={parts}")
    forward_token = forward / tokens
    half_backward = Seconds(token=backward * forward_token / 2)
    part = PartCost(
        Seconds(token=forward_token),
        half_backward,
        half_backward,
        held=held / tokens,
        message=message / tokens,
        weights=weights,
        gradients=gradients,
    )
    third_loss = Seconds(token=loss * forward_token / 3)
    head = PartCost(third_loss, third_loss, third_loss, message=message / tokens)
    return (*(part,) * parts, head)


def halves_of(parts: Sequence[PartCost]) -> tuple[PartCost, ...]:
    """Return the parts as a wave visits them: 0 1 2 and a head become 0 1 2 2 1 0+head.

    All parts but the head are halved.
    """
    *body, head = parts
    half = [share_of(part, 0.5) for part in body]
    last = half[0]
    fused = None
    if last.B is not None or head.B is not None:
        fused = _sum_of(_backward(last), _backward(head))
    closing = replace(
        last,
        F=_sum_of(last.F, head.F),
        I=_sum_of(last.I, head.I),
        W=_sum_of(last.W, head.W),
        B=fused,
        held=last.held + head.held,
        weights=last.weights + head.weights,
        gradients=last.gradients + head.gradients,
        tied=head.tied,
        tied_gradients=head.tied_gradients,
        working=max(last.working, head.working),
        scratch=max(last.scratch, head.scratch),
    )
    return (*half, *reversed(half[1:]), closing)


def _sum_of(first: Curve, second: Curve) -> Curve:
    return sum_curves([(1, first), (1, second)])


def _backward(part: PartCost) -> Curve:
    """Return the time of a part's backward in one piece."""
    return _sum_of(part.I, part.W) if part.B is None else part.B


def _arrays_of(problem: Problem) -> ProblemArrays:
    """Return the arrays of a problem."""
    cluster = problem.cluster
    spans = [(end - begin, begin) for begin, end in pairwise(problem.cuts)]
    forward = []
    backward = []
    message = []
    for piece in problem.pieces:
        curves = [piece.I, piece.W] if piece.B is None else [piece.B]
        if piece.recompute:
            curves.append(piece.F)
        forward.append([piece.F.of(*span) for span in spans])
        backward.append([sum(curve.of(*span) for curve in curves) for span in spans])
        message.append([piece.message * tokens for tokens, _ in spans])
    bandwidth = np.array(cluster.bandwidth)
    np.fill_diagonal(bandwidth, np.inf)
    latency = np.array(cluster.latency)
    np.fill_diagonal(latency, 0.0)
    part_slots = slots_of_parts(
        cluster,
        cluster.cost(problem.pieces),
        [problem.pieces_of(part) for part in range(problem.body)],
        problem.tokens,
        problem.cuts if problem.slices > 1 else (),
    )
    return ProblemArrays(
        latency,
        1.0 / bandwidth,
        1.0 / np.array([node.speed for node in cluster.nodes]),
        part_slots.max(axis=0),
        np.array(forward),
        np.array(backward),
        np.array(message),
        float(problem.gap),
        float(problem.first_gap),
        cluster.serial,
        float(problem.rules.wait),
        part_slots,
        _sums(problem),
    )


def _sums(problem: Problem) -> Floats:
    """Return the bytes that the nodes of each part sum, one sum after the other [part, sum].

    They begin as `penstock.ir.sums` says: first the head's or, in a wave, that of the way up, then
    that of the part itself, and then that of the tied weights.
    """
    pieces = problem.pieces
    sums = np.zeros((problem.body, 3))
    for part in range(problem.body):
        for column, piece in zip((1, 0), problem.pieces_of(part), strict=False):
            sums[part, column] = pieces[piece].gradients
    sums[0, 2] = min(pieces[0].tied_gradients, pieces[-1].tied_gradients)
    return sums


def numbers_of_nodes(problem: Problem, nodes: Ints) -> tuple[bytes, ...]:
    """Return all numbers of some nodes. Nodes with equal numbers can have the same plan."""
    arrays = problem.arrays
    within = np.ix_(nodes, nodes)
    numbers = (
        arrays.latency[within],
        arrays.byte[within],
        arrays.slow[nodes],
        arrays.part_slots[:, nodes],
    )
    return tuple(np.ascontiguousarray(one).tobytes() for one in numbers)


# ---------------------------------------------------------------- the parts of a profiled model
# Parts of a model for paths, with the times and sizes of a profile.
#
#     embed  layer layer | layer layer layer | layer layer layer | head       8 layers in 3 parts and a head
#     '---- part 0 ----'   '--- part 1 ----'   '--- part 2 ----'   part 3
#
# A data node holds the first part and the head. So the first part gets fewer layers than the others,
# if embedding and head take much time, and the head gets no layer.


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model divided for paths: the layers of each part, and their costs, the head last."""

    partition: tuple[int, ...]
    costs: tuple[PartCost, ...]
    turn: float  # seconds that the executor takes between two actions
    recompute: tuple[int, ...]  # parts that keep only their input
    facts: Facts  # what the plan.json says about it


def model_parts(
    profile: Profile, parts: int, tokens: int, recompute: bool, source: str
) -> ModelParts:
    """Divide a profiled model into parts and a head. The busiest node has as little work as possible.

    source: where the profile comes from, for the plan.json.
    """
    if parts > profile.layers:
        raise ShapeError(
            f"{profile.layers} layers cannot fill {parts} parts; give --parts {profile.layers} or less"
        )
    layer = block_seconds(profile.layer, tokens)
    ends = block_seconds(profile.embed, tokens) + block_seconds(profile.head, tokens)
    best: tuple[int, ...] = ()
    least = float("inf")
    for first in range(1, profile.layers - (parts - 1) + 1):
        others = even_partition(profile.layers - first, parts - 1) if parts > 1 else ()
        busiest = max(first * layer + ends, max(others, default=0) * layer)
        if busiest < least:
            best = (first, *others, 0)
            least = busiest
    working = replace(profile, turn=0.0)  # It is a pause here, and no work.
    last = len(best) - 1
    costs = [
        working.part(layers, number == 0, number == last, recompute)
        for number, layers in enumerate(best)
    ]
    again = tuple(range(len(best))) if recompute else ()
    facts: Facts = (("profile", source), ("tokens", tokens), ("rows", profile.rows))
    return ModelParts(best, tuple(costs), profile.turn, again, facts)


def choose_data_nodes(batch: int, microbatches: int, wanted: int, given: bool) -> int:
    """Return a number of data nodes that share a batch equally: the wanted one, or fewer.

    given: whether the number was asked for, and must not change.
    """
    shares, left = divmod(batch, microbatches)
    fitting = [count for count in range(1, wanted + 1) if shares % count == 0]
    if left or not shares or (given and fitting[-1] != wanted):
        nearest = -(-batch // (microbatches * wanted)) * microbatches * wanted
        raise ShapeError(
            f"data.global_batch = {batch} is not divisible by {wanted} data nodes with "
            f"{microbatches} micro-batches each; {nearest} is\n"
            "  change --microbatches, --stages 4:data_nodes=2 or --set data.global_batch"
        )
    return fitting[-1]


def waved_partition(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers of each part of a wave: half of a part on the way down, the rest on the way up.

    >>> waved_partition((3, 4, 4, 0))
    (2, 2, 2, 2, 2, 1)
    """
    down = [(layers + 1) // 2 for layers in partition[:-1]]
    up = [layers - half for layers, half in zip(partition, down, strict=False)]
    return (*down, *reversed(up))


# ---------------------------------------------------------------- terms of the formulas for times


class CircuitTerms(NamedTuple):
    """The terms of the formula for the time of a circuit."""

    pair: Floats  # seconds over a link and back [node, node]
    data: Floats  # seconds of work on one micro-batch as a data node [node]
    hop: Floats  # seconds of work on one micro-batch as a hop [node]
    back: Floats  # seconds of a backward and the gap after it [node]
    # How often a micro-batch uses a link within the circuit, there and back.
    inner: float
    close: float  # how often it uses the link from the last hop to the data node
    slots: Ints  # micro-batches that a node can hold [node]
    microbatches: int  # per data node


def circuit_terms(problem: Problem) -> CircuitTerms:
    """Return the terms for whole micro-batches; all hops have the mean work of the middle parts.

    Slices overlap: the first one carries the wait, and the others follow it.
    """
    arrays = problem.arrays
    backward = arrays.backward.sum(axis=1)
    work = arrays.forward.sum(axis=1) + backward
    there = arrays.hop(1)
    return CircuitTerms(
        there + there.T,
        (work[0] + work[-1]) * arrays.slow,
        problem.by_part(work)[1:].mean() * arrays.slow,
        problem.by_part(backward)[1:].mean() * arrays.slow + arrays.gap,
        *problem.link_uses,
        arrays.slots,
        problem.microbatches,
    )


class LeastWork:
    """Seconds of work and of links, as a bound may count them: the least slice of each part.

    forward, backward: a slice over each part; in waves each half of a part counts alone.
    trip_part: forward and backward of a slice over each part; in waves over both its halves.
    head: forward and backward of a slice over the head; in waves it is on the way up.
    data: a data node's work on the first part and the head, for one micro-batch.
    first_forward, first_backward: a data node's first forward and last backward of a micro-batch.
    whole_part: all slices of a micro-batch over each part.
    whole_data: all slices of a micro-batch over the first part and the head.
    one_way, pair: seconds of a link, and of a link and back.
    inner, close: as in `CircuitTerms`.
    """

    def __init__(self, problem: Problem) -> None:
        arrays = problem.arrays
        self.forward: Floats = arrays.forward.min(axis=1)
        self.backward: Floats = arrays.backward.min(axis=1)
        both = self.forward + self.backward
        whole = (arrays.forward + arrays.backward).sum(axis=1)
        self.trip_part = problem.by_part(both)
        self.whole_part = problem.by_part(whole)
        # The other slices of the first part follow one after the other on the data node.
        self.data = float(whole[0] + both[-1])
        self.head = 0.0 if problem.waves else float(self.data - whole[0])
        self.whole_data = float(whole[0] + whole[-1])
        self.first_forward = float(arrays.forward[0].sum())
        self.first_backward = float(arrays.backward[0].sum())
        self.one_way: Floats = arrays.latency + arrays.byte * arrays.message.min()
        self.pair: Floats = self.one_way + self.one_way.T
        self.inner, self.close = problem.link_uses
        self.tasks_per_hop = (4 if problem.waves else 2) * problem.slices

    def visit(self, arrays: ProblemArrays, part: int, nodes: Ints) -> Floats:
        """Return the seconds of a visit of these nodes with this part, with the gaps between its tasks."""
        gaps = self.tasks_per_hop * arrays.gap
        seconds: Floats = self.whole_part[part] * arrays.slow[nodes] + gaps
        return seconds
