"""Costs of a model's parts, in seconds and bytes, on ranks of different speed joined by any network.

The seconds of an op on a slice of `tokens` tokens after a prefix of `prefix` tokens:

    base + token * tokens + prefix * prefix + pair * (tokens * prefix + tokens * tokens / 2)
    launch  linear layers   reading the keys    attention: each token with all before it
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.cost.network import Network, of_pair
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one op: the four terms above."""

    base: float = 0.0
    token: float = 0.0
    prefix: float = 0.0
    pair: float = 0.0

    def of(self, tokens: int, prefix: int) -> float:
        """For a slice of `tokens` after `prefix`."""
        pairs = tokens * prefix + tokens * tokens / 2
        return self.base + self.token * tokens + self.prefix * prefix + self.pair * pairs


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of the model. B is I and W together unless given; bytes are for each token."""

    F: Seconds
    I: Seconds  # noqa: E741
    W: Seconds
    B: Seconds | None = None
    held: float = 0.0  # activations, from F to the end of the backward
    kept: float | None = None  # of these, from I to the end of W; all unless given
    message: float = 0.0  # the result that goes to the next part, and its gradient back
    weights: float = 0.0  # weights, gradients and optimizer state, not for each token
    recompute: bool = False  # keep the input alone (as large as a message), and run F again before the backward


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The parts of a model, the ranks' speeds (2: twice as fast; all 1 unless given) and the network."""

    parts: tuple[PartCost, ...]
    network: Network = field(default_factory=Network)
    speeds: tuple[float, ...] = ()

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time."""
        return self.network.serial

    def part(self, schedule: Schedule, stage: int) -> PartCost:
        """The part that a stage holds."""
        number = schedule.stages[stage].part
        if number >= len(self.parts):
            raise ShapeError(f"the schedule has {schedule.parts} parts, the cost {len(self.parts)}")
        return self.parts[number]

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes, on its rank."""
        part, rank = self.part(schedule, action.stage), schedule.rank_of(action)
        begin, end = schedule.span(action)
        if self.speeds and rank >= len(self.speeds):
            raise ShapeError(f"the schedule has {schedule.ranks} ranks, the cost the speeds of {len(self.speeds)}")
        speed = self.speeds[rank] if self.speeds else 1.0
        again = (part.F,) if part.recompute and action.op in (Op.B, Op.I) else ()
        whole = (part.I, part.W) if part.B is None else (part.B,)
        curves = {Op.F: (part.F,), Op.B: whole, Op.I: (part.I,), Op.W: (part.W,)}[action.op]
        seconds: float = sum(curve.of(end - begin, begin) for curve in (*again, *curves))
        return seconds / speed

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes a forward leaves on its rank."""
        part, (begin, end) = self.part(schedule, action.stage), schedule.span(action)
        return (part.message if part.recompute else part.held) * (end - begin)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes an I leaves for its W."""
        part, (begin, end) = self.part(schedule, action.stage), schedule.span(action)
        return (part.held if part.kept is None else part.kept) * (end - begin)

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a result on its way: a gradient is as large as the input it belongs to."""
        begin, end = schedule.span(action)
        path = schedule.microbatches[action.microbatch].path
        sender = action.stage if action.op is Op.F else path[max(path.index(action.stage) - 1, 0)]
        return self.part(schedule, sender).message * (end - begin)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        return self.part(schedule, stage).weights

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte is there."""
        return of_pair(self.network.latency, source, target, "latency")

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes a second."""
        return of_pair(self.network.bandwidth, source, target, "bandwidth")


def finer(cost: ModelCost, pieces: int) -> ModelCost:
    """The same model with each part cut into so many equal ones: for schedules with several stages on a rank."""
    if pieces < 1:
        raise ShapeError(f"{pieces} pieces of a part; the least is 1")

    def share(curve: Seconds) -> Seconds:
        return Seconds(curve.base / pieces, curve.token / pieces, curve.prefix / pieces, curve.pair / pieces)

    parts = [
        replace(
            part, F=share(part.F), I=share(part.I), W=share(part.W), B=None if part.B is None else share(part.B),
            held=part.held / pieces, kept=None if part.kept is None else part.kept / pieces,
            weights=part.weights / pieces,
        )
        for part in cost.parts for _ in range(pieces)
    ]  # fmt: skip
    return replace(cost, parts=tuple(parts))
