"""What a planner of paths is given, and the arrays it works on.

cluster ─┐
parts  ──┼──► Problem ──► Traffic (seconds and bytes as arrays)        parts: the model's, and the head last
rules  ──┤                bounds, arrangement, search
policy ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from penstock.cost.cluster import Cluster
from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, sum_curves
from penstock.cost.model import PartCost, share_of
from penstock.cost.wrapped import PausedCost
from penstock.errors import ShapeError
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.path_simulator import QueueOrder, Traffic
from penstock.plan.paths.rules import Rules
from penstock.schedules.orders import require_at_least
from penstock.schedules.size import refuse_size


@dataclass(frozen=True, slots=True)
class Policy:
    """How nodes behave that hold a plan.

    rounds: a path is used so many times, the next micro-batch starting when the one before is back.
    reserved: a slot belongs to one path for the whole step; else to whoever is there, as long as it is there.
    staggers: seconds between the first starts on a data node, to choose from (None: a forward's).
    ordered: nodes keep to a planned order; else they take what comes first, and only the paths are planned.
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
NEXT_ROUND = 2.5  # seconds after the first starts before which a second round may not begin, as published


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A cluster, a model, and what is asked for. `microbatches` is for each data node, `gradients` bytes of a part."""

    cluster: Cluster
    parts: tuple[PartCost, ...]  # of the model, and the head
    microbatches: int
    rules: Rules = field(default_factory=Rules)
    policy: Policy = PLANNED
    tokens: int = 1
    slices: int = 1
    waves: bool = False
    gradients: float = 0.0
    gap: float = 0.0
    first_gap: float = 0.0
    sized: bool = False  # how many nodes each part gets is given
    arranged: bool = False  # which nodes each part gets is given
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        require_at_least(
            1, microbatches=self.microbatches, slices=self.slices, tokens=self.tokens
        )
        if len(self.parts) < 3:
            raise ShapeError(
                f"paths need two parts and a head at least, not {len(self.parts)} parts in all"
            )
        refuse_size(
            2 * (self.hops + 2) * self.microbatches * self.slices,
            f"one data node with microbatches={self.microbatches} slices={self.slices}",
        )
        if self.tokens < self.slices:
            raise ShapeError(
                f"{self.tokens} tokens cannot be cut into {self.slices} slices"
            )
        if self.microbatches % self.policy.rounds:
            raise ShapeError(
                f"{self.microbatches} micro-batches for each data node do not divide into {self.policy.rounds} rounds"
            )
        if self.waves and self.hops < 1:
            raise ShapeError("a wave needs a part beside the first: leave out less")
        object.__setattr__(self, "traffic", _traffic(self))

    @property
    def body(self) -> int:
        """Parts of the model, the head not counted."""
        return len(self.parts) - 1

    @property
    def hops(self) -> int:
        """Parts on a path, beside the first."""
        return self.rules.hops(self.body)

    @property
    def units(self) -> int:
        """Paths for each data node: one a micro-batch, or one for all rounds."""
        return self.microbatches // self.policy.rounds

    @property
    def cuts(self) -> tuple[int, ...]:
        """Token boundaries of the slices."""
        return tuple(
            self.tokens * piece // self.slices for piece in range(self.slices + 1)
        )

    @property
    def pieces(self) -> tuple[PartCost, ...]:
        """The parts as the schedule has them: in waves every part in two halves, the head with the last."""
        return halves_of(self.parts) if self.waves else self.parts

    def cost(self) -> Cost:
        """For the simulator."""
        cost = self.cluster.cost(self.pieces)
        return (
            PausedCost(cost, self.gap, self.first_gap)
            if self.gap or self.first_gap
            else cost
        )

    def stagger(self, choice: float | None) -> float:
        """Seconds between the first starts on a data node."""
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
) -> tuple[PartCost, ...]:
    """Equal parts and a head: seconds of a whole micro-batch's forward; backward and loss as multiples of it.

    Bytes of a message and of what is held are for the whole micro-batch too.
    """
    require_at_least(1, parts=parts)
    refuse_size(2 * parts, f"a path over parts={parts}")
    token = forward / tokens
    half = Seconds(token=backward * token / 2)
    part = PartCost(
        Seconds(token=token),
        half,
        half,
        held=held / tokens,
        message=message / tokens,
        weights=weights,
    )
    third = Seconds(token=loss * token / 3)
    return (*(part,) * parts, PartCost(third, third, third, message=message / tokens))


def halves_of(parts: Sequence[PartCost]) -> tuple[PartCost, ...]:
    """Parts 0 1 2 and a head as a wave passes them: 0 1 2 2 1 0+head, all but the head halved."""
    *body, head = parts
    half = [share_of(part, 0.5) for part in body]
    last = half[0]
    both = [
        sum_curves([(1, one), (1, other)])
        for one, other in zip(_ops(last), _ops(head), strict=True)
    ]
    fused = (
        None
        if last.B is None and head.B is None
        else sum_curves([(1, _backward(last)), (1, _backward(head))])
    )
    closing = replace(last, F=both[0], I=both[1], W=both[2], B=fused)
    return (*half, *reversed(half[1:]), closing)


def _backward(part: PartCost) -> Curve:
    """In one piece."""
    return sum_curves([(1, part.I), (1, part.W)]) if part.B is None else part.B


def _ops(part: PartCost) -> tuple[Curve, Curve, Curve]:
    return part.F, part.I, part.W


def _traffic(problem: Problem) -> Traffic:
    cluster, cuts, pieces = problem.cluster, problem.cuts, problem.pieces
    spans = [(end - begin, begin) for begin, end in pairwise(cuts)]
    backs = [(p.I, p.W) if p.B is None else (p.B,) for p in pieces]
    again = [(p.F,) if p.recompute else () for p in pieces]
    forward = np.array([[p.F.of(*span) for span in spans] for p in pieces])
    backward = np.array(
        [
            [sum(c.of(*span) for c in (*b, *a)) for span in spans]
            for b, a in zip(backs, again, strict=True)
        ]
    )
    message = np.array([[p.message * tokens for tokens, _ in spans] for p in pieces])
    bandwidth = np.array(cluster.bandwidth)
    np.fill_diagonal(bandwidth, np.inf)
    latency = np.array(cluster.latency)
    np.fill_diagonal(latency, 0.0)
    *body, head = problem.parts
    first = (body[0], head)  # which a data node holds both
    held, weights = (
        max(sum(getattr(p, name) for p in first), *(getattr(p, name) for p in body))
        for name in ("left", "weights")
    )
    rebuilt = max(part.rebuilt for part in problem.parts)
    slots = cluster.slots(held * problem.tokens, weights + rebuilt * problem.tokens)
    slow = 1.0 / np.array([node.speed for node in cluster.nodes])
    return Traffic(
        latency,
        1.0 / bandwidth,
        slow,
        np.array(slots, dtype=np.int64),
        forward,
        backward,
        message,
        problem.gap,
        problem.first_gap,
        cluster.serial,
    )


def expand_paths(problem: Problem, paths: Ints, labels: Ints) -> tuple[Ints, Ints]:
    """Nodes and parts of every micro-batch, position by position, from the nodes of the paths and the nodes' parts."""
    rows = (
        np.tile(paths, (problem.policy.rounds, 1))
        if problem.policy.rounds > 1
        else paths
    )
    parts, body = labels[rows], problem.body
    if problem.waves:
        return np.hstack([rows, rows[:, ::-1]]), np.hstack(
            [parts, 2 * body - 1 - parts[:, ::-1]]
        )
    return np.hstack([rows, rows[:, :1]]), np.hstack(
        [parts, np.full((len(rows), 1), body)]
    )


def start_conditions(
    problem: Problem, paths: Ints, stagger: float
) -> tuple[Ints, Floats]:
    """For each micro-batch: which must be back before it starts, and when it may start at the earliest."""
    count, rounds = len(paths), problem.policy.rounds
    after = np.arange(-count, count * (rounds - 1), dtype=np.int64)
    after[:count] = -1
    if not stagger:
        return after, np.zeros(count * rounds)
    order = np.zeros(count)
    seen: dict[int, int] = {}
    for unit, node in enumerate(paths[:, 0].tolist()):
        order[unit] = seen.get(node, 0)
        seen[node] = seen.get(node, 0) + 1
    return after, np.concatenate(
        [order * stagger + NEXT_ROUND * turn for turn in range(rounds)]
    )
