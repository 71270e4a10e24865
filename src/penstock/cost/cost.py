"""What a cost is: the seconds and bytes of everything that a schedule does.

Everything that can be simulated has a `Cost`. A cost may depend on the op, the stage
and the token range of an action, and on nothing else about it. `penstock.cost.columns` relies on
that: it asks once for each such combination instead of once for each of a million
actions.

    UnitCost       the units of the papers' figures
    ModelCost      the parts of a model, in seconds and bytes, on ranks of different speed and any network
    WrappedCost    another cost, but for what a subclass overrides: noise, pauses, another kind of sum
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.cost.curve import Curve, sum_curves
from penstock.cost.network import Network, value_of_pair
from penstock.cost.sums import (
    link_matrices,
    planned_sum_end,
    rounds_end,
    sum_over_network,
)
from penstock.errors import ShapeError
from penstock.ir.action import (
    BACKWARD,
    COMPUTING_OPS,
    FORWARD,
    OFFLOAD,
    RELOAD,
    SPLIT_OPS,
    WEIGHTS,
    Action,
    Op,
)
from penstock.ir.schedule import Schedule, stretch
from penstock.ir.sums import SumPlan
from penstock.ir.timeline import PAPER_UNITS, REAL_UNITS, Units

NETWORK_WITHOUT_DELAY = Network()


class ActionBytes(NamedTuple):
    """What an action holds on its rank.

    held: what a forward leaves until its backward is done; what an O moves to the host, and an R back.
    kept: what an I leaves until its W is done.
    rebuilt: activations that a backward recomputes, and holds while it runs.
    working: what exists only while the action runs, besides what it recomputes.
    carried: keys and values of the tokens that it works on, which `held` contains.
    """

    held: float = 0.0
    kept: float = 0.0
    rebuilt: float = 0.0
    working: float = 0.0
    carried: float = 0.0


class WeightBytes(NamedTuple):
    """The bytes of some weights, with their gradients and optimizer state, and those of the gradients alone."""

    weights: float = 0.0
    gradients: float = 0.0


class Cost(ABC):
    """Seconds and bytes of a schedule.

    A subclass must say how long an action computes. Everything else has a default: no
    bytes, and links that take no time.
    """

    __slots__ = ()

    @property
    def units(self) -> Units:
        """Whether this cost counts seconds and bytes or the units of the papers."""
        return REAL_UNITS

    @property
    def network(self) -> Network:
        """The links between the ranks."""
        return NETWORK_WITHOUT_DELAY

    @property
    def waits(self) -> bool:
        """Whether a rank computes again only when its message has arrived.

        Our own runtime and torch's send in the background. In other runtimes a rank waits:

            in the background   rank 0 | F0 F1 F2            waiting   rank 0 | F0 -- F1 -- F2
                                          └─►0 └─►1                                └─►0  └─►1
        """
        return False

    @property
    def switch(self) -> float:
        """The share of its time that a forward takes longer if the action before it on its rank is a backward."""
        return 0.0

    @property
    def handover(self) -> float:
        """Seconds that a shared processor loses when it goes from one rank to another."""
        return 0.0

    @abstractmethod
    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action. The action's message leaves before."""
        return 0.0

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of an action's result, if it is sent to another rank."""
        return 0.0

    def bytes(self, schedule: Schedule, action: Action) -> ActionBytes:
        """What an action holds on its rank."""
        return ActionBytes()

    def weights(self, schedule: Schedule, stage: int) -> WeightBytes:
        """The weights of a stage, and its gradients without those of tied weights. Replicas sum the gradients."""
        return WeightBytes()

    def tied(self, schedule: Schedule) -> WeightBytes:
        """The weights that the first and the last part share. A rank that holds both parts holds them once."""
        return WeightBytes()

    def updates(self, schedule: Schedule) -> list[float]:
        """Seconds of the optimizer on each rank, after the last action."""
        return [0.0] * schedule.ranks

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks, at least two, have summed `size` bytes of gradients, `ready` at times of their own.

        By default the sum is a ring over their links, which begins when the last rank is ready.
        """
        return max(ready) + sum_over_network(self.network, ranks, size)

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return value_of_pair(self.network.latency, source, target, "latency")

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second; `math.inf` means that bytes take no time."""
        return value_of_pair(self.network.bandwidth, source, target, "bandwidth")


# ---------------------------------------------------------------- the papers' units
@dataclass(frozen=True, slots=True)
class UnitCost(Cost):
    """Costs in units of one rank's work for one micro-batch: the arithmetic of the papers' figures.

    F        the forward of everything a micro-batch does on a rank; with k stages of its path
             on the rank, each stage takes 1/k of it, and a slice takes its share of the tokens
    B        its backward; a split backward takes I and W, half of B each unless they are given
    comm     the latency of a hop between two ranks
    sum      the time to send one rank's gradients to another rank: what two replicas take to sum
             them. n replicas sum in a ring: 2 (n-1)/n of it, and 2 (n-1) hops
    copy     the time of an O or an R, which moves what a forward of F has kept
    bytes    1 stands for the activations of one micro-batch on one rank
    """

    F: float = 1.0
    B: float = 2.0
    comm: float = 0.0
    I: float | None = None  # noqa: E741
    W: float | None = None
    sum: float = 0.0
    copy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F", "B", "comm", "I", "W", "sum", "copy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ShapeError(
                    f"{name}={value} is not a time; give a number that is at least 0"
                )

    @property
    def units(self) -> Units:
        """Forwards of a micro-batch, and micro-batches."""
        return PAPER_UNITS

    def time(self, op: Op) -> float:
        """The time of an op on everything that a micro-batch does on a rank."""
        if op.kind in (OFFLOAD, RELOAD):
            return self.copy
        if op not in COMPUTING_OPS:
            return 0.0
        given: float | None = getattr(self, op.value)
        return self.B / 2 if given is None else given

    def least_backward(self, split: bool) -> tuple[float, float]:
        """The least time until a backward sends its gradient, and the least time of all its work.

        `split` says whether backwards may be split.
        """
        if not split:
            return self.B, self.B
        _, inputs, weights = map(self.time, SPLIT_OPS)
        return min(self.B, inputs), min(self.B, inputs + weights)

    def share(self, schedule: Schedule, action: Action) -> float:
        """The fraction of a rank's work for a micro-batch that one action does."""
        stages_on_rank = int(schedule.table.stages_on_rank[action.stage])
        return self.message(schedule, action) / stages_on_rank

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        return self.time(action.op) * self.share(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """The message of a whole micro-batch is one unit."""
        begin, end = schedule.span(action)
        return (end - begin) / schedule.microbatches[action.microbatch].tokens

    def bytes(self, schedule: Schedule, action: Action) -> ActionBytes:
        """A forward leaves its share of the micro-batch's activations, and an I all of them."""
        share = self.share(schedule, action)
        return ActionBytes(share, share)

    def weights(self, schedule: Schedule, stage: int) -> WeightBytes:
        """The gradients of all parts that a path has on one rank are one unit."""
        return WeightBytes(gradients=1.0 / int(schedule.table.stages_on_rank[stage]))

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """A ring: 2 (n-1) hops, each with one n-th of the gradients."""
        count = len(ranks)
        hop = self.comm + self.sum * size / count
        return max(ready) + 2.0 * (count - 1) * hop

    def latency(self, source: int, target: int) -> float:
        """Every hop takes the same time."""
        return self.comm


# ---------------------------------------------------------------- the parts of a model
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
    copy: Curve | None = None  # moves what F holds to the host, or back

    @property
    def left(self) -> float:
        """Bytes per token that a forward leaves: with recomputation, only its input."""
        return self.message if self.recompute else self.held

    def seconds(self, op: Op, tokens: int, prefix: int) -> float:
        """How long an op takes on a slice of `tokens` tokens after `prefix` others."""
        return sum(one.of(tokens, prefix) for one in self.curves(op))

    def curves(self, op: Op) -> tuple[Curve, ...]:
        """The curves whose sum is the time of an op."""
        if op.kind in (OFFLOAD, RELOAD) and self.copy is not None:
            return (self.copy,)
        if op not in COMPUTING_OPS:
            return ()
        own: Curve | None = getattr(self, op.value)
        curves = (self.I, self.W) if own is None else (own,)
        if self.recompute and op.kind == BACKWARD:
            return (self.F, *curves)
        return curves


class PartsCost(Cost):
    """A cost that follows from the parts of a model. `model` says for each schedule what they are."""

    __slots__ = ()

    @abstractmethod
    def model(self, schedule: Schedule) -> ModelCost:
        """The cost of this schedule's own parts."""

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes on its rank."""
        model = self.model(schedule)
        begin, end = model.span(schedule, action)
        part = model.part(schedule, action.stage)
        seconds = part.seconds(action.op, end - begin, begin)
        return seconds / model.speed(schedule, schedule.rank_of(action))

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of a result. A gradient is as large as the input that it belongs to."""
        sender = action.stage
        if action.op.kind != FORWARD:
            path = schedule.microbatches[action.microbatch].path
            sender = path[max(path.index(action.stage) - 1, 0)]
        model = self.model(schedule)
        part = model.part(schedule, sender)
        per_token = part.message if part.sent is None else part.sent
        return per_token * model.length(schedule, action)

    def bytes(self, schedule: Schedule, action: Action) -> ActionBytes:
        """What an action holds on its rank. Bytes are proportional to its tokens."""
        model = self.model(schedule)
        tokens = model.length(schedule, action)
        part = model.part(schedule, action.stage)
        left = part.left
        rebuilt = working = 0.0
        if part.recompute and action.op.kind == BACKWARD:
            rebuilt = max(part.held - part.message, 0.0) * tokens
        if action.op.kind in (FORWARD, BACKWARD):
            working = part.working * tokens
        if action.op.kind in (OFFLOAD, RELOAD):
            left = max(left - part.message, 0.0)  # The input stays where it is.
        has_weights = action.op.kind in (BACKWARD, WEIGHTS)
        if has_weights and action.op.row.then < 0:  # a B or a W
            working += part.scratch
        return ActionBytes(
            held=left * tokens,
            kept=(part.held if part.kept is None else part.kept) * tokens,
            rebuilt=rebuilt,
            working=working,
            carried=part.carried * tokens,
        )

    def weights(self, schedule: Schedule, stage: int) -> WeightBytes:
        """The weights of a stage, and its gradients without those of tied weights."""
        part = self.model(schedule).part(schedule, stage)
        return WeightBytes(part.weights, part.gradients)

    def tied(self, schedule: Schedule) -> WeightBytes:
        """The weights that the first and the last part share."""
        parts = self.model(schedule).parts
        if len(parts) < 2:
            return WeightBytes()
        one, other = parts[0], parts[-1]
        return WeightBytes(
            min(one.tied, other.tied), min(one.tied_gradients, other.tied_gradients)
        )


@dataclass(frozen=True, slots=True)
class ModelCost(PartsCost):
    """The parts of a model, the speed of each rank (2 is twice as fast) and the network.

    All ranks have speed 1 unless speeds are given. If `tokens` is given, every sequence
    has that many tokens, and the schedule's cuts are fractions of it; otherwise the
    schedule's own token counts hold.
    """

    parts: tuple[PartCost, ...]
    network: Network = NETWORK_WITHOUT_DELAY
    speeds: tuple[float, ...] = ()
    tokens: int | None = None

    def model(self, schedule: Schedule) -> ModelCost:
        """The same parts for every schedule."""
        return self

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


# ---------------------------------------------------------------- costs around another cost
@dataclass(frozen=True, slots=True)
class WrappedCost(Cost):
    """Passes every question on to the cost inside."""

    cost: Cost

    @property
    def units(self) -> Units:
        """Whether the cost inside counts seconds and bytes."""
        return self.cost.units

    @property
    def network(self) -> Network:
        """The links of the cost inside."""
        return self.cost.network

    @property
    def waits(self) -> bool:
        """Whether a rank computes again only when its message has arrived."""
        return self.cost.waits

    @property
    def switch(self) -> float:
        """The share of its time that a forward takes longer right after a backward."""
        return self.cost.switch

    @property
    def handover(self) -> float:
        """Seconds that a shared processor loses when it goes from one rank to another."""
        return self.cost.handover

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        return self.cost.seconds(schedule, action)

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action."""
        return self.cost.pause(schedule, action)

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of an action's result."""
        return self.cost.message(schedule, action)

    def bytes(self, schedule: Schedule, action: Action) -> ActionBytes:
        """What an action holds on its rank."""
        return self.cost.bytes(schedule, action)

    def weights(self, schedule: Schedule, stage: int) -> WeightBytes:
        """The weights of a stage, and its gradients."""
        return self.cost.weights(schedule, stage)

    def tied(self, schedule: Schedule) -> WeightBytes:
        """The weights that the first and the last part share."""
        return self.cost.tied(schedule)

    def updates(self, schedule: Schedule) -> list[float]:
        """Seconds of the optimizer on each rank."""
        return self.cost.updates(schedule)

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time."""
        return self.cost.sum_end(ranks, size, ready)

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return self.cost.latency(source, target)

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second."""
        return self.cost.bandwidth(source, target)


@dataclass(frozen=True, slots=True)
class WaitingCost(WrappedCost):
    """Lets a rank rest while its message travels."""

    @property
    def waits(self) -> bool:
        """It does."""
        return True


@dataclass(frozen=True, slots=True)
class NoisyCost(WrappedCost):
    """Makes each op on each stage, and each link, slower or faster by up to `spread`.

    A searched schedule is scored under such costs, which the search has not seen. The
    noise depends on `seed` alone, so it is the same in every run.
    """

    spread: float = 0.1
    seed: int = 0

    def factor(self, *subject: object) -> float:
        """A number between 1 - spread and 1 + spread, always the same for a subject."""
        uniform = random.Random(f"{self.seed} {subject}").random()
        return 1.0 + self.spread * (2.0 * uniform - 1.0)

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes, with noise."""
        part = schedule.stages[action.stage].part
        rank = schedule.rank_of(action)
        noise = self.factor(action.op.value, part, rank)
        return self.cost.seconds(schedule, action) * noise

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives, with noise."""
        noise = self.factor("latency", source, target)
        return self.cost.latency(source, target) * noise

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second, with noise."""
        noise = self.factor("bandwidth", source, target)
        return self.cost.bandwidth(source, target) / noise

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients, with noise."""
        begin = max(ready)
        exact = self.cost.sum_end(ranks, size, ready) - begin
        return begin + exact * self.factor("sum", tuple(ranks))


@dataclass(frozen=True, slots=True)
class PausedCost(WrappedCost):
    """Lets a rank rest between two actions.

        rank 2 | F0 .F1 .B0   .F2 .     a message leaves when its action ends, before the rest

    The rest stands for handing over a tensor, waking a process or launching a kernel.
    It takes `first` seconds after a forward of part 0, `head` seconds after a forward
    of the last part, and `gap` seconds after every other action.
    """

    gap: float = 0.0
    first: float = 0.0
    head: float = 0.0

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action."""
        part = schedule.stages[action.stage].part
        if action.op.kind != FORWARD:
            return self.gap
        if part == schedule.parts - 1:
            return self.head
        if part == 0:
            return self.first
        return self.gap


@dataclass(frozen=True, slots=True)
class CopiedCost(WrappedCost):
    """Prices two copies of a pipeline as if there were `copies` of them.

    All copies do the same at the same time, so two of them show everything but the time of
    their sums. A ring of n ranks sends 2 (n-1) shares of the gradients, each one n-th.
    """

    copies: int = 2

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When all copies have summed `size` bytes of gradients, along a ring."""
        once = self.cost.sum_end(ranks[:2], size, (0.0, 0.0))
        bytes_of_pair = self.cost.sum_end(ranks[:2], 2.0 * size, (0.0, 0.0)) - once
        pair = once - bytes_of_pair  # the latency
        count = self.copies * len(ranks) // 2
        wire = 2.0 * (count - 1) / count * bytes_of_pair
        return max(ready) + ((count - 1) * pair + wire)


@dataclass(frozen=True, slots=True)
class PlannedSumsCost(WrappedCost):
    """Sums gradients in the quickest way that the links allow (`penstock.cost.sums`)."""

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time."""
        links = link_matrices(ranks, self.cost.latency, self.cost.bandwidth)
        return planned_sum_end(*links, size, ready)


@dataclass(frozen=True, slots=True)
class GivenSumsCost(WrappedCost):
    """Sums gradients as a plan says, message by message; sums that it does not have as the cost inside."""

    sums: tuple[SumPlan, ...] = ()

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed gradients that each has ready at its own time."""
        for plan in self.sums:
            if set(plan.ranks) == set(ranks):
                links = link_matrices(ranks, self.cost.latency, self.cost.bandwidth)
                return rounds_end(plan, *links, size, ready, ranks)
        return self.cost.sum_end(ranks, size, ready)
