"""Costs of a model's parts, in seconds and bytes, on ranks of different speed joined by any network.

What an op takes is a curve over the tokens of a slice and those before it (`penstock.cost.curve`); bytes go by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.cost.curve import Curve, sum_curves
from penstock.cost.network import Network, of_pair
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, stretch


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of the model. B is I and W together unless given; bytes are for each token."""

    F: Curve
    I: Curve  # noqa: E741
    W: Curve
    B: Curve | None = None
    held: float = 0.0  # activations, from F to the end of the backward
    kept: float | None = None  # of these, from I to the end of W; all unless given
    message: float = 0.0  # the result that goes to the next part, and its gradient back
    weights: float = 0.0  # weights, gradients and optimizer state, not for each token
    recompute: bool = False  # keep the input alone (as large as a message), and run F again before the backward
    tied: float = (
        0.0  # of the weights, those that the first and the last part have in common
    )

    @property
    def left(self) -> float:
        """Bytes that a forward leaves."""
        return self.message if self.recompute else self.held

    @property
    def rebuilt(self) -> float:
        """Bytes that a backward adds to them while it runs."""
        return max(self.held - self.message, 0.0) if self.recompute else 0.0


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The parts of a model, the ranks' speeds (2: twice as fast; all 1 unless given) and the network.

    With `tokens` every sequence has so many, and the schedule's cuts are shares of them.
    """

    parts: tuple[PartCost, ...]
    network: Network = field(default_factory=Network)
    speeds: tuple[float, ...] = ()
    tokens: int | None = None  # None: as the schedule says

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time."""
        return self.network.serial

    def part(self, schedule: Schedule, stage: int) -> PartCost:
        """The part that a stage holds."""
        number = schedule.stages[stage].part
        if number >= len(self.parts):
            raise ShapeError(
                f"the schedule has {schedule.parts} parts, the cost {len(self.parts)}"
            )
        return self.parts[number]

    def span(self, schedule: Schedule, action: Action) -> tuple[int, int]:
        """The tokens an action works on."""
        microbatch = schedule.microbatches[action.microbatch]
        return (
            microbatch if self.tokens is None else stretch(microbatch, self.tokens)
        ).span(action.slice)

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes, on its rank."""
        part, rank = self.part(schedule, action.stage), schedule.rank_of(action)
        begin, end = self.span(schedule, action)
        if self.speeds and rank >= len(self.speeds):
            raise ShapeError(
                f"the schedule has {schedule.ranks} ranks, the cost the speeds of {len(self.speeds)}"
            )
        speed = self.speeds[rank] if self.speeds else 1.0
        again = (part.F,) if part.recompute and action.op in (Op.B, Op.I) else ()
        whole = (part.I, part.W) if part.B is None else (part.B,)
        curves = {Op.F: (part.F,), Op.B: whole, Op.I: (part.I,), Op.W: (part.W,)}[
            action.op
        ]
        seconds: float = sum(
            curve.of(end - begin, begin) for curve in (*again, *curves)
        )
        return seconds / speed

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes a forward leaves on its rank."""
        part, (begin, end) = (
            self.part(schedule, action.stage),
            self.span(schedule, action),
        )
        return part.left * (end - begin)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes an I leaves for its W."""
        part, (begin, end) = (
            self.part(schedule, action.stage),
            self.span(schedule, action),
        )
        return (part.held if part.kept is None else part.kept) * (end - begin)

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a part that kept its input alone, while its backward runs."""
        part, (begin, end) = (
            self.part(schedule, action.stage),
            self.span(schedule, action),
        )
        return part.rebuilt * (end - begin) if action.op in (Op.B, Op.I) else 0.0

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a result on its way: a gradient is as large as the input it belongs to."""
        begin, end = self.span(schedule, action)
        path = schedule.microbatches[action.microbatch].path
        sender = (
            action.stage
            if action.op is Op.F
            else path[max(path.index(action.stage) - 1, 0)]
        )
        return self.part(schedule, sender).message * (end - begin)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        return self.part(schedule, stage).weights

    def tied(self, schedule: Schedule) -> float:
        """Bytes of weights that the first and the last part have in common."""
        return (
            min(self.parts[0].tied, self.parts[-1].tied) if len(self.parts) > 1 else 0.0
        )

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

    parts = [share_of(part, 1 / pieces) for part in cost.parts for _ in range(pieces)]
    return replace(cost, parts=tuple(parts))


def share_of(part: PartCost, share: float) -> PartCost:
    """A piece of a part: its share of the work, of what is held and of the weights; a message stays as large."""

    def less(curve: Curve) -> Curve:
        return sum_curves([(share, curve)])

    return replace(
        part,
        F=less(part.F),
        I=less(part.I),
        W=less(part.W),
        B=None if part.B is None else less(part.B),
        held=part.held * share,
        kept=None if part.kept is None else part.kept * share,
        weights=part.weights * share,
    )
