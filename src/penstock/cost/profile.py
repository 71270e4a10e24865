"""A model as measured on a device, and the cost of any partition of it.

    embed   layer  layer  layer  layer   head          measured: the embedding, one layer, the head with the loss, links
    '---- part 0 ----'  '---- part 1 -----'            a part: a number of layers; the first part also has the
                                                       embedding, and the last part the head

Seconds and bytes are those of all rows of a micro-batch; bytes are given per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from penstock.cost.cost import ModelCost, PartCost
from penstock.cost.curve import Curve, Fit, Measured, Seconds, fit_curve, sum_curves
from penstock.cost.network import Network
from penstock.cost.sizes import FLOAT32_BYTES, HALF_BYTES, part_moments
from penstock.errors import ShapeError
from penstock.ir.action import COMPUTING_OPS, Op
from penstock.ir.plan import Fact, Facts

# The largest relative error of a curve on held-out points with which plans are made.
# Usual errors are 9 to 25% on a CPU and 1 to 7% on a GPU.
MAX_ERROR = 0.5
# A block matters for an op from this share of the op's time over the whole model on.
MIN_TIME_SHARE = 0.01
# Weights, gradients and AdamW's two moments are as large as each other.
TENSORS_PER_WEIGHT = 4
# Kernels take as long for a part of a tile as for all of it.
HALF_TYPES = ("bfloat16", "float16")
SCALE_BYTES = 4  # a float32 at the end of each row of a message in int8
# Fitted to one step of 1F1B with two processes that take turns on an H200: 131 ms of work took 145 ms.
GPU_HANDOVER_SECONDS = 0.45e-3
KERNEL_TILE_TOKENS = {"cuda": 128}
# Facts about how a profile was measured, by their names in `Profile.device`:
REST = "rest"  # processor seconds of a rank for what a step does beside actions and updates
PROCESSORS = "processors"  # that could compute at the same time
FASTEST_ROUND = "fastest"  # the time of the fastest round of a measurement, as a share of what it says
SLOWEST_ROUND = "slowest"


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of each op on a slice of `tokens` after `prefix`.

    A held-out point takes no part in the fits and measures their error.
    """

    tokens: int
    prefix: int
    F: float
    B: float
    I: float  # noqa: E741
    W: float
    held_out: bool = False

    def of(self, op: Op) -> float:
        """The seconds of one op."""
        return (self.F, self.B, self.I, self.W)[COMPUTING_OPS.index(op)]


@dataclass(frozen=True, slots=True)
class Block:
    """An embedding, one layer or a head. Bytes are per token, except those of the weights."""

    points: tuple[Point, ...]
    F: Fit
    B: Fit
    I: Fit  # noqa: E741
    W: Fit
    held: float = 0.0  # activations, from F to the end of the backward
    kept: float = 0.0  # from I to the end of W
    weights: float = 0.0  # weights, gradients and AdamW's state
    update: float = 0.0  # seconds of AdamW's update
    # Whole weights and gradients of a sharded block while a step runs; they are not in `weights`.
    gathered: float = 0.0

    def fit(self, op: Op) -> Fit:
        """The fit of one op."""
        return (self.F, self.B, self.I, self.W)[COMPUTING_OPS.index(op)]


def send_as(profile: Profile, dtype: str) -> Profile:
    """A profile of a run whose messages travel in this type (run.comm_dtype)."""
    facts = [fact for fact in profile.device if fact[0] != "messages"]
    return replace(profile, device=(*facts, ("messages", dtype)))


def sent_bytes(message: float, rows: int, sent_as: str, halved: bool = False) -> float:
    """Bytes per token of a message that travels in another type (run.comm_dtype).

    `message` is its size on a rank, with two bytes a number if it is `halved`, and four if not. As
    int8, each of the `rows` of a token has a scale of four bytes.
    """
    numbers = message / (2 if halved else 4)
    if sent_as == "int8":
        return numbers + SCALE_BYTES * rows
    if sent_as == "bfloat16":
        return numbers * 2
    return message


def error_warning(profile: Profile | RowProfiles) -> str:
    """What is wrong with a profile whose error is too large, and what to do."""
    return (
        f"the measured times are off by up to {profile.worst_error:,.0%} on points held out of the fit; "
        f"do not trust a plan with more than {MAX_ERROR:.0%}\n"
        "  measure again on a quiet machine"
    )


def block(
    points: Sequence[Point],
    held: float = 0.0,
    kept: float = 0.0,
    weights: float = 0.0,
    update: float = 0.0,
) -> Block:
    """Fit curves to the points of a block."""
    f, b, i, w = (fit_op(points, op) for op in COMPUTING_OPS)
    return Block(tuple(points), f, b, i, w, held, kept, weights, update)


def fit_op(points: Sequence[Point], op: Op) -> Fit:
    """Fit the curve of one op. An op that does nothing (the W of an embedding) takes no time."""
    if not any(point.of(op) for point in points):
        return Fit(Seconds(), 0.0, 0.0)
    measured: dict[bool, list[Measured]] = {True: [], False: []}  # by `held_out`
    for point in points:
        seconds = (point.tokens, point.prefix, point.of(op))
        measured[point.held_out].append(seconds)
    return fit_curve(measured[False], measured[True])


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements of a model with `layers` layers.

    They were taken on sequences of `tokens` tokens, with `rows` of them in a micro-batch.
    """

    layers: int
    tokens: int
    rows: int
    message: float  # bytes per token between two parts
    embed: Block
    layer: Block
    head: Block
    network: Network = field(default_factory=Network)
    model: Facts = ()  # which model it is
    device: Facts = ()  # where and how it was measured
    turn: float = 0.0  # seconds of the executor and the messages, per action
    tied: float = 0.0  # bytes of weights and their state that embedding and head share
    # The share of its time that a forward takes longer right after a backward.
    switch: float = 0.0

    def cost(
        self,
        partition: Sequence[int],
        ranks: int | None = None,
        recompute: bool = False,
        tokens: int | None = None,
    ) -> ModelCost:
        """The cost of a partition, given as the number of layers of each part.

        If `ranks` is given, the links must cover that many ranks. If `tokens` is given,
        every sequence has that many, and a schedule's cuts are fractions of it;
        otherwise its cuts are token counts.
        """
        self.check(partition, ranks)
        recomputed = range(len(partition)) if recompute else ()
        return ModelCost(self.parts(partition, recomputed), self.network, tokens=tokens)

    def parts(
        self, partition: Sequence[int], recomputed: Container[int]
    ) -> tuple[PartCost, ...]:
        """The cost of each part of a partition, of which some are recomputed."""
        last = len(partition) - 1
        return tuple(
            self.part(layers, number == 0, number == last, number in recomputed)
            for number, layers in enumerate(partition)
        )

    def check(self, partition: Sequence[int], ranks: int | None = None) -> None:
        """Refuse a partition of another number of layers, and more ranks than have links."""
        if sum(partition) != self.layers or min(partition, default=-1) < 0:
            raise ShapeError(
                f"the partition {tuple(partition)} has {sum(partition)} layers, but the "
                f"model has {self.layers}\n"
                "  use the profile of the model that the plan is for"
            )
        links = self.network.latency
        if ranks is not None and isinstance(links, tuple) and len(links) < ranks:
            raise ShapeError(
                f"the profile has the links of {len(links)} ranks, but the schedule has "
                f"{ranks} ranks\n"
                f"  measure them: penstock profile --ranks {ranks} --links"
            )

    def part(
        self, layers: int, first: bool, last: bool, recompute: bool = False
    ) -> PartCost:
        """The cost of one part."""
        blocks = self.blocks(layers, first, last)

        def curve(op: Op) -> Curve:
            terms: list[tuple[float, Curve]] = [(1, Seconds(self.turn))]
            terms += [(count, block.fit(op).curve) for count, block in blocks]
            return sum_curves(terms)

        held = sum(count * block.held for count, block in blocks)
        if not last:
            held += self.message  # its result
        weights = sum(count * block.weights for count, block in blocks)
        if first and last:
            weights -= self.tied
        tied = self.tied if first != last else 0.0
        gathered = sum(count * block.gathered for count, block in blocks)
        moments = part_moments(
            dict(self.model),
            layers,
            first,
            last,
            self.rows,
            self.is_half,
            int(self.facts.get("tensor") or 1),
            int(self.facts.get("loss_chunk") or 0),
        )
        f, b, i, w = map(curve, COMPUTING_OPS)
        return PartCost(
            F=f,
            I=i,
            W=w,
            B=b,
            held=held,
            kept=sum(count * block.kept for count, block in blocks),
            message=self.message,
            sent=self.sent,
            recompute=recompute,
            tied=tied,
            weights=weights + gathered + self._copies(layers, last, gathered > 0),
            gradients=(weights - tied) / TENSORS_PER_WEIGHT,
            tied_gradients=tied / TENSORS_PER_WEIGHT,
            **moments._asdict(),
        )

    @property
    def facts(self) -> dict[str, Fact]:
        """Where and how it was measured, by name."""
        return dict(self.device)

    @property
    def sent(self) -> float:
        """Bytes per token of a message on its way to another rank.

        Models that compute in half precision throughout have small messages already.
        """
        halved = self.facts.get("dtype") in HALF_TYPES
        sent_as = str(self.facts.get("messages") or "float32")
        return sent_bytes(self.message, self.rows, sent_as, halved)

    def _copies(self, layers: int, last: bool, is_sharded: bool) -> float:
        """Bytes of the weights in the type of autocast, which a step casts once.

        Only linear layers have them, and only if no processes share the weights.
        """
        shared = is_sharded or int(self.facts.get("tensor") or 1) > 1
        if shared or self.facts.get("autocast") not in HALF_TYPES:
            return 0.0
        weights = layers * self.layer.weights + int(last) * self.head.weights
        return weights / TENSORS_PER_WEIGHT * HALF_BYTES / FLOAT32_BYTES

    @property
    def is_half(self) -> bool:
        """Whether products compute with two bytes a number."""
        return (self.facts.get("autocast") or self.facts.get("dtype")) in HALF_TYPES

    @property
    def handover(self) -> float:
        """Seconds that the device loses when processes take turns and it goes from one to another."""
        return GPU_HANDOVER_SECONDS if self.facts.get("device") == "cuda" else 0.0

    def blocks(self, layers: int, first: bool, last: bool) -> list[tuple[int, Block]]:
        """The blocks that make up a part, with the count of each."""
        return [(layers, self.layer), (int(first), self.embed), (int(last), self.head)]

    @property
    def rest(self) -> float:
        """Processor seconds of a rank for what a step does beside its actions and updates."""
        return float(self.facts.get(REST) or 0.0)

    @property
    def processors(self) -> int | None:
        """How many of the processes that measured could compute at the same time; None if nobody measured."""
        return int(self.facts.get(PROCESSORS) or self.facts.get("ranks") or 0) or None

    @property
    def spread(self) -> tuple[float, float]:
        """The shares of the predicted times between which measured ones may lie.

        They are the fastest and the slowest round of the measurement. Old files do not have them; their curves
        say how far off they are.
        """
        low, high = self.facts.get(FASTEST_ROUND), self.facts.get(SLOWEST_ROUND)
        if low is None or high is None:
            error = self.worst_error
            return max(0.0, 1.0 - error), 1.0 + error
        return float(low), float(high)

    @property
    def worst_error(self) -> float:
        """The worst error on held-out points of all curves that matter.

        A block matters for an op if it takes at least a hundredth of the time of that op
        over the whole model.
        """
        blocks = self.blocks(self.layers, first=True, last=True)
        errors = [0.0]
        for op in COMPUTING_OPS:
            fits = [(count, block.fit(op)) for count, block in blocks]
            times = [count * each.curve.of(self.tokens, 0) for count, each in fits]
            total = sum(times)
            for (_, each), seconds in zip(fits, times, strict=True):
                if total > 0 and seconds >= MIN_TIME_SHARE * total:
                    errors.append(each.worst)
        return max(errors)

    def update(self, partition: Sequence[int]) -> tuple[float, ...]:
        """Seconds of AdamW's update of each part.

        The update is not an action of the schedule: it follows the last action of a rank.
        """
        last = len(partition) - 1
        updates = []
        for number, layers in enumerate(partition):
            blocks = self.blocks(layers, number == 0, number == last)
            updates.append(sum(count * block.update for count, block in blocks))
        return tuple(updates)


def enlarge(profile: Profile, rows: int, tokens: int) -> Profile:
    """Scale a profile up to more rows and longer sequences.

    Used where the full size would take too long to measure.
    """
    width_factor = rows / profile.rows
    length_factor = tokens // profile.tokens
    time_factor = width_factor * length_factor
    if tokens % profile.tokens:
        raise ShapeError(
            f"the profile has sequences of {profile.tokens} tokens, and {tokens} is not a "
            "multiple of that\n"
            f"  measure sequences of {tokens} tokens, or of a number that divides them"
        )

    def enlarge_point(point: Point) -> Point:
        tokens, prefix = point.tokens * length_factor, point.prefix * length_factor
        f, b, i, w = (point.of(op) * time_factor for op in COMPUTING_OPS)
        return Point(tokens, prefix, f, b, i, w, point.held_out)

    def enlarge_block(original: Block) -> Block:
        return block(
            [enlarge_point(point) for point in original.points],
            original.held * width_factor,
            original.kept * width_factor,
            original.weights,
            original.update,
        )

    return replace(
        profile,
        tokens=tokens,
        rows=rows,
        message=profile.message * width_factor,
        embed=enlarge_block(profile.embed),
        layer=enlarge_block(profile.layer),
        head=enlarge_block(profile.head),
    )


def tile_of(device: str) -> int:
    """Return the number of tokens that slices should be multiples of on a device.

    >>> tile_of("cuda"), tile_of("cpu")
    (128, 1)
    """
    return KERNEL_TILE_TOKENS.get(device, 1)


Weighted = Sequence[tuple[float, Block]]


@dataclass(frozen=True, slots=True)
class RowProfiles:
    """Profiles of one model, measured with different numbers of rows in a micro-batch, in ascending order.

        rows       1       2       3       4       8
        measured   o-------o---------------o               between two measurements every time and size is linear in
                                   ^               ^       the rows; beyond them, the nearest one is scaled
                             interpolated        scaled

    A planner that chooses how many rows go through together needs a profile for each choice, and
    the times of a layer do not grow in proportion: two rows often take less than twice as long as
    one.
    """

    measured: tuple[Profile, ...]

    def __post_init__(self) -> None:
        rows = self.rows
        if not rows or list(rows) != sorted(set(rows)):
            raise ShapeError(
                f"profiles for {list(rows)} rows make no set; "
                "it takes at least one profile, each with more rows than the one before"
            )
        first = self.measured[0]
        for other in self.measured[1:]:
            if (other.layers, other.tokens) != (first.layers, first.tokens):
                raise ShapeError(
                    f"the profile for {first.rows} rows has {first.layers} layers and "
                    f"{first.tokens} tokens, but the one for {other.rows} rows has "
                    f"{other.layers} layers and {other.tokens} tokens; "
                    "all must be of one model and one length"
                )

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that were measured."""
        return tuple(profile.rows for profile in self.measured)

    @property
    def layers(self) -> int:
        """The layers of the model."""
        return self.measured[0].layers

    @property
    def tokens(self) -> int:
        """The tokens of a sequence."""
        return self.measured[0].tokens

    @property
    def network(self) -> Network:
        """The links between ranks, which do not depend on the rows."""
        return self.measured[0].network

    @property
    def worst_error(self) -> float:
        """The worst error of all measured profiles on held-out points."""
        return max(profile.worst_error for profile in self.measured)

    def at(self, rows: int) -> Profile:
        """Return the profile for a number of rows.

        Where it was measured, it is the measured one. Between two measurements all times
        and sizes are linear in the rows. Beyond them, those of the nearest measurement
        grow in proportion to the rows.
        """
        if rows < 1:
            raise ShapeError(f"a micro-batch must have at least 1 row, not {rows}")
        after = bisect_left(self.rows, rows)
        if after < len(self.measured) and self.rows[after] == rows:
            return self.measured[after]
        if after in (0, len(self.measured)):
            nearest = self.measured[max(after - 1, 0)]
            return _mix(rows, [(rows / nearest.rows, nearest)])
        fewer = self.measured[after - 1]
        more = self.measured[after]
        share = (rows - fewer.rows) / (more.rows - fewer.rows)
        return _mix(rows, [(1 - share, fewer), (share, more)])


def _mix(rows: int, terms: Sequence[tuple[float, Profile]]) -> Profile:
    """Return a weighted sum of profiles; what does not grow with the rows is their mean."""
    total = sum(weight for weight, _ in terms)
    return replace(
        terms[0][1],
        rows=rows,
        message=_weighted(terms, "message"),
        embed=_mix_blocks([(weight, profile.embed) for weight, profile in terms]),
        layer=_mix_blocks([(weight, profile.layer) for weight, profile in terms]),
        head=_mix_blocks([(weight, profile.head) for weight, profile in terms]),
        turn=_weighted(terms, "turn") / total,
        switch=_weighted(terms, "switch") / total,
    )


def _weighted(terms: Sequence[tuple[float, Profile | Block]], name: str) -> float:
    """The weighted sum of one of the numbers of profiles or blocks."""
    total: float = sum(weight * getattr(one, name) for weight, one in terms)
    return total


def _mix_blocks(terms: Weighted) -> Block:
    f, b, i, w = (_mix_fits(terms, op) for op in COMPUTING_OPS)
    return Block(
        _mix_points(terms),
        f,
        b,
        i,
        w,
        held=_weighted(terms, "held"),
        kept=_weighted(terms, "kept"),
        weights=terms[0][1].weights,
        update=_weighted(terms, "update") / sum(weight for weight, _ in terms),
    )


def _mix_fits(terms: Weighted, op: Op) -> Fit:
    """The weighted sum of curves; its errors are the largest ones among them."""
    fits = [block.fit(op) for _, block in terms]
    curve = sum_curves((weight, block.fit(op).curve) for weight, block in terms)
    return Fit(curve, max(fit.worst for fit in fits), max(fit.median for fit in fits))


def _mix_points(terms: Weighted) -> tuple[Point, ...]:
    """The weighted sums of the times at the slices that all blocks have."""
    by_slice = [
        {(one.tokens, one.prefix, one.held_out): one for one in block.points}
        for _, block in terms
    ]
    mixed = []
    for tokens, prefix, held_out in by_slice[0]:
        key = (tokens, prefix, held_out)
        if all(key in points for points in by_slice):
            pairs = [
                (weight, points[key])
                for (weight, _), points in zip(terms, by_slice, strict=True)
            ]
            f, b, i, w = (
                sum(n * each.of(op) for n, each in pairs) for op in COMPUTING_OPS
            )
            mixed.append(Point(tokens, prefix, f, b, i, w, held_out))
    return tuple(mixed)


SUM_ROW = 256  # numbers that share a scale in int8
# The bytes of a message, compared with those of gradients in float32.
SUM_SHARES = {
    "float32": 1.0,
    "bfloat16": 0.5,
    "int8": (1 + SCALE_BYTES / SUM_ROW) / 4,
}


def sum_as(parts: Sequence[PartCost], messages: str) -> tuple[PartCost, ...]:
    """The parts with gradients that are summed in messages of this type."""
    share = SUM_SHARES[messages]
    return tuple(
        replace(
            part,
            gradients=part.gradients * share,
            tied_gradients=part.tied_gradients * share,
        )
        for part in parts
    )
