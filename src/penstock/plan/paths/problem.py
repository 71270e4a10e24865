"""The input of the path planner, and the arrays it works on.

cluster ─┐
parts  ──┼──► Problem ──► Traffic (seconds and bytes as arrays)        parts: those of the model, then the head
rules  ──┤                bounds, arrangement, search
policy ──┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, sum_curves
from penstock.cost.model import PartCost, share_of
from penstock.cost.wrapped import PausedCost, PlannedSumsCost
from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.node_memory import slots_of_parts
from penstock.plan.paths.path_simulator import QueueOrder, Traffic
from penstock.plan.paths.rules import Rules
from penstock.schedules.orders import require_at_least
from penstock.schedules.size import refuse_if_too_large


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
NEXT_ROUND_SECONDS = 2.5  # earliest start of each further round, as published


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
    sized: whether the number of nodes of each part is given.
    arranged: whether the nodes of each part are given.
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
    sized: bool = False
    arranged: bool = False
    planned_sums: bool = True
    passes: int = 1
    traffic: Traffic = field(init=False)

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
        object.__setattr__(self, "traffic", _traffic(self))

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

    @property
    def has_sums(self) -> bool:
        """Whether replicas have gradients to sum."""
        return bool(self.traffic.sums.any())

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
        return float(self.traffic.forward[0].sum()) if choice is None else choice


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


def _traffic(problem: Problem) -> Traffic:
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
    return Traffic(
        latency,
        1.0 / bandwidth,
        1.0 / np.array([node.speed for node in cluster.nodes]),
        part_slots.max(axis=0),
        np.array(forward),
        np.array(backward),
        np.array(message),
        problem.gap,
        problem.first_gap,
        cluster.serial,
        problem.rules.wait,
        None if (part_slots == part_slots[0]).all() else part_slots,
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


def expand_paths(problem: Problem, paths: Ints, labels: Ints) -> tuple[Ints, Ints]:
    """Return the node and the part of every position of every micro-batch.

    paths: the nodes of each unit, the data node first.
    labels: the part of each node.
    """
    rows = paths
    if problem.policy.rounds > 1:
        rows = np.tile(paths, (problem.policy.rounds, 1))
    parts = labels[rows]
    if problem.waves:
        last_piece = 2 * problem.body - 1
        nodes = np.hstack([rows, rows[:, ::-1]])
        return nodes, np.hstack([parts, last_piece - parts[:, ::-1]])
    nodes = np.hstack([rows, rows[:, :1]])
    heads = np.full((len(rows), 1), problem.body)
    return nodes, np.hstack([parts, heads])


def positions_of(problem: Problem) -> int:
    """Return the number of positions of a path, with the head or the way up."""
    return 2 * (problem.hops + 1) if problem.waves else problem.hops + 2


def start_conditions(
    problem: Problem, paths: Ints, stagger: float
) -> tuple[Ints, Floats]:
    """Return, for each micro-batch, which one must be back before it starts, and its earliest start."""
    count = len(paths)
    rounds = problem.policy.rounds
    after = np.arange(-count, count * (rounds - 1), dtype=np.int64)
    after[:count] = -1
    if not stagger:
        return after, np.zeros(count * rounds)
    place = np.zeros(count)  # of each unit, among those of its data node
    started: dict[int, int] = {}
    for unit, data_node in enumerate(paths[:, 0].tolist()):
        place[unit] = started.get(data_node, 0)
        started[data_node] = started.get(data_node, 0) + 1
    release = [
        place * stagger + NEXT_ROUND_SECONDS * number for number in range(rounds)
    ]
    return after, np.concatenate(release)


def numbers_of_nodes(problem: Problem, nodes: Ints) -> tuple[bytes, ...]:
    """Return all numbers of some nodes. Nodes with equal numbers can have the same plan."""
    traffic = problem.traffic
    within = np.ix_(nodes, nodes)
    slots = traffic.slots if traffic.part_slots is None else traffic.part_slots
    numbers = (
        traffic.latency[within],
        traffic.byte[within],
        traffic.slow[nodes],
        slots[..., nodes],
    )
    return tuple(np.ascontiguousarray(one).tobytes() for one in numbers)
