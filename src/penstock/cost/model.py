"""Costs of a model's parts, in seconds and bytes, on ranks of different speed and any network.

The seconds of an op are a curve over the tokens of a slice and the tokens before it
(`penstock.cost.curve`). Bytes are proportional to tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.cost.allreduce import sum_over_network
from penstock.cost.buffers import BufferedMessage
from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, sum_curves
from penstock.cost.network import Network, value_of_pair
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, stretch


@dataclass(frozen=True, slots=True)
class PartCost:
    """The cost of one part of the model. B is I and W together unless it is given.

    All bytes but those of the weights are bytes per token.
    """

    F: Curve
    I: Curve  # noqa: E741
    W: Curve
    B: Curve | None = None
    held: float = 0.0  # activations, from F to the end of the backward
    kept: float | None = None  # the part of them that stays until W ends; default: all
    message: float = 0.0  # the result for the next part, or its gradient
    sent: float | None = None  # the same on its way to another rank; default: message
    weights: float = 0.0  # weights, gradients and optimizer state, in bytes
    recompute: bool = False  # keep only the input, and run F again before the backward
    tied: float = 0.0  # the weights that the first and last part share, in bytes
    gradients: float = 0.0  # that replicas sum, without tied ones, in bytes
    tied_gradients: float = 0.0  # of the weights that the first and last part share
    working: float = 0.0  # while F, B or I runs: logits, inner gradients
    scratch: float = 0.0  # while B or W runs: gradients of one matrix, in bytes
    carried: float = 0.0  # keys and values, which `held` contains
    # A planner asks again and again for the seconds of the same slices.
    known: dict[tuple[Op, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def left(self) -> float:
        """Bytes per token that a forward leaves: with recomputation, only its input."""
        return self.message if self.recompute else self.held

    @property
    def rebuilt(self) -> float:
        """Bytes per token that a backward recomputes and holds while it runs."""
        if not self.recompute:
            return 0.0
        return max(self.held - self.message, 0.0)

    def seconds(self, op: Op, tokens: int, prefix: int) -> float:
        """How long an op takes on a slice of `tokens` tokens after `prefix` others."""
        key = (op, tokens, prefix)
        if key not in self.known:
            self.known[key] = sum(one.of(tokens, prefix) for one in self.curves(op))
        return self.known[key]

    def curves(self, op: Op) -> tuple[Curve, ...]:
        """The curves whose sum is the time of an op."""
        if op is Op.F:
            return (self.F,)
        if op is Op.W:
            return (self.W,)
        recomputed = (self.F,) if self.recompute else ()
        if op is Op.I:
            return (*recomputed, self.I)
        whole = (self.I, self.W) if self.B is None else (self.B,)
        return (*recomputed, *whole)


@dataclass(frozen=True, slots=True)
class ModelCost(Cost):
    """The parts of a model, the speed of each rank (2 is twice as fast) and the network.

    All ranks have speed 1 unless speeds are given. If `tokens` is given, every sequence
    has that many tokens, and the schedule's cuts are fractions of it; otherwise the
    schedule's own token counts hold.
    """

    parts: tuple[PartCost, ...]
    network: Network = field(default_factory=Network)
    speeds: tuple[float, ...] = ()
    tokens: int | None = None

    def part(self, schedule: Schedule, stage: int) -> PartCost:
        """The part that a stage holds."""
        number = schedule.stages[stage].part
        if number >= len(self.parts):
            raise ShapeError(
                f"the schedule has {schedule.parts} parts, but the cost has "
                f"{len(self.parts)}"
            )
        return self.parts[number]

    def speed(self, schedule: Schedule, rank: int) -> float:
        """How fast a rank computes."""
        if not self.speeds:
            return 1.0
        if rank >= len(self.speeds):
            raise ShapeError(
                f"the schedule has {schedule.ranks} ranks, but the cost has speeds for "
                f"{len(self.speeds)}"
            )
        return self.speeds[rank]

    def span(self, schedule: Schedule, action: Action) -> tuple[int, int]:
        """The first token that an action works on, and the token after the last."""
        microbatch = schedule.microbatches[action.microbatch]
        if self.tokens is None or self.tokens == microbatch.tokens:
            return microbatch.span(action.slice)
        if microbatch.slices == 1:
            return 0, self.tokens
        return stretch(microbatch, self.tokens).span(action.slice)

    def length(self, schedule: Schedule, action: Action) -> int:
        """How many tokens an action works on."""
        begin, end = self.span(schedule, action)
        return end - begin

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes on its rank."""
        begin, end = self.span(schedule, action)
        part = self.part(schedule, action.stage)
        seconds = part.seconds(action.op, end - begin, begin)
        return seconds / self.speed(schedule, schedule.rank_of(action))

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes that a forward leaves on its rank."""
        part = self.part(schedule, action.stage)
        return part.left * self.length(schedule, action)

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes that an I leaves for its W."""
        part = self.part(schedule, action.stage)
        per_token = part.held if part.kept is None else part.kept
        return per_token * self.length(schedule, action)

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes that the backward of a recomputed part holds while it runs."""
        if action.op not in (Op.B, Op.I):
            return 0.0
        part = self.part(schedule, action.stage)
        return part.rebuilt * self.length(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a result. A gradient is as large as the input that it belongs to."""
        sender = action.stage
        if action.op is not Op.F:
            path = schedule.microbatches[action.microbatch].path
            sender = path[max(path.index(action.stage) - 1, 0)]
        part = self.part(schedule, sender)
        per_token = part.message if part.sent is None else part.sent
        return per_token * self.length(schedule, action)

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        return self.part(schedule, stage).weights

    def tied(self, schedule: Schedule) -> float:
        """Bytes of weights that the first and the last part share."""
        if len(self.parts) < 2:
            return 0.0
        return min(self.parts[0].tied, self.parts[-1].tied)

    def working(self, schedule: Schedule, action: Action) -> float:
        """Bytes that exist only while an action runs."""
        part = self.part(schedule, action.stage)
        size = 0.0
        if action.op is not Op.W:
            size = part.working * self.length(schedule, action)
        return size + (part.scratch if action.op in (Op.B, Op.W) else 0.0)

    def carried(self, schedule: Schedule, action: Action) -> float:
        """Bytes of the keys and values of an action's tokens."""
        part = self.part(schedule, action.stage)
        return part.carried * self.length(schedule, action)

    def gradients(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's gradients, without those of tied weights."""
        return self.part(schedule, stage).gradients

    def tied_gradients(self, schedule: Schedule) -> float:
        """Bytes of the gradients of weights that the first and the last part share."""
        if len(self.parts) < 2:
            return 0.0
        return min(self.parts[0].tied_gradients, self.parts[-1].tied_gradients)

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long these ranks take to sum `size` bytes of gradients."""
        return sum_over_network(self.network, ranks, size)

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time."""
        return self.network.serial

    @property
    def channels(self) -> int | None:
        """How many channels the messages of a rank share."""
        return self.network.channels

    @property
    def buffers(self) -> tuple[BufferedMessage, ...]:
        """How long messages that share channels keep their ranks busy."""
        return self.network.buffers

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return value_of_pair(self.network.latency, source, target, "latency")

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second."""
        return value_of_pair(self.network.bandwidth, source, target, "bandwidth")


def finer(cost: ModelCost, pieces: int) -> ModelCost:
    """The same model with each part cut into equal pieces.

    Schedules with several stages on a rank need as many parts as stages.
    """
    if pieces < 1:
        raise ShapeError(f"a part must be cut into at least 1 piece, not {pieces}")
    parts: list[PartCost] = []
    for part in cost.parts:
        parts += [share_of(part, 1 / pieces)] * pieces
    return replace(cost, parts=tuple(parts))


def share_of(part: PartCost, share: float) -> PartCost:
    """A fraction of a part: less work, memory and weights, but messages of the same size."""

    def scale(curve: Curve) -> Curve:
        return sum_curves([(share, curve)])

    return replace(
        part,
        F=scale(part.F),
        I=scale(part.I),
        W=scale(part.W),
        B=None if part.B is None else scale(part.B),
        held=part.held * share,
        kept=None if part.kept is None else part.kept * share,
        weights=part.weights * share,
        gradients=part.gradients * share,
        carried=part.carried * share,
    )
