"""Times that no plan of a whole space can beat: any placement, partition, cuts and order.

The space has P ranks, M micro-batches of equal size that all visit every rank, at most K stages on a rank, and at most
S slices of a micro-batch. Backwards may be split or whole. All plans of it share these facts:

**Reaching the last rank.** Number the ranks in the order in which micro-batches reach them. Before rank j starts
anything, a first slice has run on j other ranks and has hopped j times. After that, rank j must do all its work.
A rank that is complete before the last rank is reached has delayed it by all of its stages. A rank that is not complete
must be visited once more, which takes another hop of the way there. The bound takes the best of these choices.

**The first backward.** No backward starts before all slices of a micro-batch have run on all stages. One slice has at
least 1/S of the tokens. It runs on all stages, and all other slices run before it on the first stage or after it on the
last one. From there, backwards reach the other ranks one after the other, as forwards do. All backwards of a rank
follow the first one that reaches it.

**One micro-batch alone** takes the way there and the way back.

**Memory.** A slice is held on a stage from its forward to its backward there. Meanwhile it runs on all later stages and
comes back, and the later slices of its micro-batch run on this stage. Add up bytes times seconds over all stages: this
cannot exceed the cap of all ranks times the time from when they are reached to the end.

**Copies of the weights.** With two of them (Chimera), micro-batches visit the ranks in two orders, so two ranks are
reached at once, two more after one hop, and so on. In both orders some rank comes after half of the others.

A `Profile` has layers, which parts cannot cut, and ranks may have different numbers of them. So the work of a rank is
not known, but the layers of all ranks together are. The bound is the mean over the ranks: each begins when it is
reached at the earliest, and then does its share of all work. Some rank has the mean number of layers, rounded up. Every
part but the first and the last has at least one layer. Where micro-batches leave out layers (`penstock.plan.space`),
only those count that every micro-batch visits.

The bounds ignore what collides: that two micro-batches want a rank at the same time, that links are busy, that ranks
rest after actions. They ignore sums of gradients, optimizer steps and copies. For a `Profile` they ignore the memory,
which the bounds of a placement know. If cuts can lie at more than `CUT_POINTS` places, the least work is that of
cuts at `CUT_POINTS` of them.

The least times of a model's layers, embedding and head, over all ways to cut a sequence.

Short slices reach the ranks early, but all slices together take longer if they are short. So cuts
are put into classes by their longest slice:

    class     0          1            2           one entry of each column of `BlockTimes`
    longest   1-4        5-8          9-16        tokens of the longest slice

A placement with the layers of its parts, and the bytes that each rank holds on it.

Times that no plan on a known placement can beat, by a profile and with a limited memory.

`penstock.plan.space` knows neither the layers of a rank nor its memory. Here both are known: the search tries a short
list of placements, and balances the layers of each one. So the least work of every rank follows, and the bytes that it
must hold. A plan of a division is on one of these placements, so no plan of it beats the least of their bounds.

**What fits.** When the forward of a micro-batch ends, each rank holds this micro-batch's activations of all its stages,
beside its weights. A placement on which this exceeds the memory has no plan.

**All work of a rank** follows the moment at which a first slice reaches it.

**The first backward.** Some slice has at least 1/S of the tokens. It runs on all stages; the slices before it run on
the first stage earlier, those after it on the last stage later. Backwards begin after that, and reach the other ranks
one after the other. Until the first one reaches a rank, the rank can only run forwards, and no more of them than its
memory holds. All other forwards and all backwards come later:

    rank 1 | ....reached.... | F F F | (memory is full) | first backward | all other forwards, all backwards

**Long and short slices.** Short slices reach the ranks early, but all slices together take longer if they are short. So
cuts are put into classes by their longest slice, and the bound is the least one of all classes.

**Memory and time.** A slice is held on a stage from its forward to its backward there. Meanwhile the later slices of
its micro-batch run on this stage, there and back, and the last one runs on all later stages and comes back; or the
slice itself does. Add up bytes times seconds over all slices of a rank: this cannot exceed the bytes that the rank has
room for, times the seconds from when it is reached to the end.

**Sums of gradients.** A rank takes part in one sum at a time. Its first sum begins when all backwards of one of its
parts are done, which is after all forwards of the step. Its last sum begins after all its work.

**Messages that wait for each other.** If the messages of a rank share channels, as over NCCL, each channel carries all
of its messages one after the other, beginning when a first slice is sent to its rank.

The bounds ignore what collides: that two micro-batches want a rank at the same time, and that links are busy, unless
messages share channels. All hops take as long as the fastest one. Of the memory they ignore what exists for a moment
only, keys and values that slices carry on, and recordings. If cuts can lie at more than `CUT_POINTS` places, the least
work is that of cuts at `CUT_POINTS` of them.

Times that no plan on the placements that a search tries can beat, in the units of the papers.

`space_bound` holds for any placement, and so it ignores what collides on one of them. A search returns a plan on one of
a short list of placements, cut into one of a few numbers of slices. For each of these pairs `lower_bound` is closer,
since it knows every chain of actions. So no plan of the search beats the least of them:

    3 ranks, 3 micro-batches, hops of 0.1, whole sequences, at most 4 stages on a rank

    space_bound    any placement   10.1
    lower_bound    1 chunk 11.4    2 chunks 10.7    3 chunks 10.67    1 wave 10.6    2 waves 10.5    the best plan: 10.5

**Split and whole backwards.** Any plan becomes one with split backwards that takes no longer, if an I takes at most as
long as a B, and an I with its W too: put both in the place of the B. The gradient leaves no later, and the memory is
the same. Where the cost does not have this property, the bound is that of a cheaper cost that has it.

The pair with the least bound is looked at first, and the search for the least one ends at the first pair whose close
bound is known. Large schedules, which take long, keep their bound of the space.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import UnitCost
from penstock.cost.curve import Fit, seconds_along
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT
from penstock.cost.profile import TENSORS_PER_WEIGHT, Block, Profile
from penstock.ir.schedule import Stage
from penstock.ir.table import Bools, Floats, Ints
from penstock.plan.bound import lower_bound
from penstock.plan.candidates import ROUNDING
from penstock.plan.space import (
    Limits,
    allowed_placements,
    even_cuts_only,
    slice_counts,
)
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import require_at_least

CUT_POINTS = 64  # places at which a sequence of a profile may be cut


# ---------------------------------------------------------------- all work and its mean over the ranks
class LeastTimes(NamedTuple):
    """The least times of a model for one micro-batch, whatever the cuts; pairs are of forwards and backwards.

    A piece is the shortest slice of one layer, a way the largest slice through the whole model.
    """

    work: tuple[float, float]
    way: tuple[float, float]
    hop: float
    piece: tuple[float, float] = (0.0, 0.0)
    turn: float = 0.0  # that a rank rests after an action
    layers: int = 0  # that no part can cut, if there are any
    layer: float = 0.0  # of one of them, there and back


def mean_bound(
    times: LeastTimes,
    ranks: int,
    microbatches: int,
    weights: int = 1,
    partial: bool = False,
) -> float:
    """Return a time below that of every plan with these ranks and micro-batches.

    Nobody knows which rank does how much, but all ranks together do all work. So the step takes at least the mean over
    the ranks. If there is one copy of the weights, some rank has at least the mean number of layers, rounded up. With
    `partial` paths, `times` are those of a model with only the layers that every micro-batch visits.
    """
    hops = [rank // weights for rank in range(ranks)]
    way_hops = (ranks - 1) * times.hop
    turn = times.turn
    if partial:
        # A path may skip any rank between the first and the last. Messages leave before a rank rests.
        hops = [min(hop, 1) for hop in hops]
        way_hops = turn = 0.0
    mean_hops = sum(hops) / ranks * times.hop
    # The first part may have the embedding alone, and the last part the head.
    mean_pieces = sum(max(hop - 1, 0) for hop in hops) / ranks
    reached, reached_back = (mean_hops + mean_pieces * piece for piece in times.piece)
    rests = (2 * microbatches - 1) * turn
    all_work = reached + rests + microbatches * sum(times.work) / ranks
    there = times.way[0] + way_hops
    back_rests = (microbatches - 1) * turn
    back_work = microbatches * times.work[1] / ranks
    backwards = there + reached_back + back_rests + back_work
    alone = there + times.way[1] + way_hops
    fullest = 0.0
    if weights == 1 and not partial:
        fullest = rests + microbatches * math.ceil(times.layers / ranks) * times.layer
    return max(all_work, backwards, alone, fullest)


# ---------------------------------------------------------------- unit costs
def space_bound(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    stages: int,
    slices: int = 1,
    cap: float | None = None,
    split: bool = True,
    weights: int = 1,
    skip: float = 0.0,
) -> float:
    """Return a time below that of every plan of the space.

    stages: the largest number of stages on a rank.
    slices: the largest number of slices of a micro-batch.
    cap: the most activations on a rank, in micro-batches.
    split: whether backwards may be split.
    weights: copies of the weights, which micro-batches may visit in as many orders of the ranks.
    skip: the share of the work that a micro-batch may leave out.

    >>> round(space_bound(UnitCost(comm=0.03), ranks=8, microbatches=8, stages=4, slices=8), 2)
    24.43
    """
    require_at_least(
        1, ranks=ranks, microbatches=microbatches, stages=stages, slices=slices
    )
    # Until a backward sends its gradient, and all its work.
    back, backward = cost.least_backward(split)
    share = 1.0 / slices  # of the tokens in a slice
    depth = (ranks - 1) // weights  # ranks before the last one on every path
    visited = ranks * (1.0 - skip)

    def one_way(seconds: float) -> float:
        """Return the least time of one micro-batch through all stages, without hops."""
        once = min(seconds / stages, visited * seconds)
        return once + (visited * seconds - once) / slices

    if skip:
        work = (visited * cost.F, visited * backward)
        times = LeastTimes(work, (one_way(cost.F), one_way(back)), cost.comm)
        return mean_bound(times, ranks, microbatches, weights, partial=True)

    def reach(seconds: float, complete: int) -> float:
        """Return the least time until the last rank is reached, if this many ranks are complete by then."""
        pieces = complete + (depth - complete) / stages
        return pieces * seconds * share + depth * cost.comm

    def time_bound(complete_there: int, complete_back: int) -> float:
        """Return the bound if so many ranks are complete when the last one is reached."""
        last_rank = reach(cost.F, complete_there)
        last_rank += microbatches * (cost.F + backward)
        if not split:  # the ranks before it still have backwards to do
            last_rank += reach(back, complete_there)
        visited_again = 0
        if weights == 1:
            visited_again = ranks - 1 - min(complete_there, complete_back)
        hops = (ranks - 1 + visited_again) * cost.comm
        there = one_way(cost.F) + hops
        backwards = there + reach(back, complete_back) + microbatches * backward
        alone = there + one_way(back) + hops
        if split:
            alone += max(backward - back, 0.0) * share / stages
        return max(last_rank, backwards, alone)

    # With several copies, nobody knows which path completes a rank.
    choices = range(ranks) if weights == 1 else range(1)
    bound = min(time_bound(there, home) for there in choices for home in choices)
    if cap is None or cap <= 0:
        return bound
    # The least time in which the ranks can hold all that they must hold.
    way = (cost.F + back) * (ranks + 1 / stages) / (2 * slices)
    later_slices = (cost.F + back) * (1 - 1 / slices) / (2 * stages)
    hops = sum(rank // weights for rank in range(ranks))
    mean_reach = (cost.F * share / stages + cost.comm) * hops / ranks
    return max(bound, mean_reach + microbatches * (way + later_slices) / cap)


# ---------------------------------------------------------------- blocks of layers
MAX_CLASSES = 12  # of cuts, by their longest slice


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """The least seconds of a layer, an embedding or a head.

    A gradient leaves a block after a B or an I, whichever is shorter; that is its way back.
    Columns have one entry for each class of cuts.
    """

    forward: Floats  # all slices of a micro-batch
    back: Floats  # all slices of a micro-batch, until their gradients leave
    backward: Floats  # all backward work of a micro-batch
    long_forward: Floats  # the longest slice
    long_back: Floats
    forward_rate: Floats  # per token
    back_rate: Floats
    first_forward: float  # the first slice of a micro-batch
    last_forward: float  # its last slice
    last_back: float  # its last slice, whose backward comes first


@dataclass(frozen=True, slots=True)
class LeastBlockTimes:
    """The least times of a profile's blocks, for cuts in classes by their longest slice.

    Short slices reach the ranks early, and take more time in all. A class keeps both together.
    """

    layer: BlockTimes
    embed: BlockTimes
    head: BlockTimes
    longest: Floats  # the fewest tokens of the longest slice, in each class
    tops: Floats  # its most tokens
    fewest: Floats  # the fewest slices
    shortest: int  # tokens of any slice, at least
    slices: int  # at most
    tokens: int

    def class_of(self, cuts: Sequence[int]) -> int:
        """Return the number of the class of these cuts."""
        longest = max(end - begin for begin, end in pairwise(cuts))
        return int(np.searchsorted(self.tops, longest))

    def of_model(
        self, layers: int, hop: float, turn: float, again: bool = False
    ) -> LeastTimes:
        """Return the least times of a model with some layers, for cuts of all classes.

        `again` says whether every part runs its forward once more before its backward.
        """

        def total(name: str) -> float:
            blocks = (self.layer, self.embed, self.head)
            layer, embed, head = (getattr(one, name).min() for one in blocks)
            return float(layers * layer + (embed + head))

        layer = self.layer
        forward, backward = total("forward"), total("backward")
        there, back = total("long_forward"), total("long_back")
        first, last = layer.first_forward, layer.last_back
        each = float(layer.forward.min() + layer.backward.min())
        if again:
            backward += forward
            back += there
            last += first
            each += float(layer.forward.min())
        return LeastTimes(
            (forward, backward), (there, back), hop, (first, last), turn, layers, each
        )


def least_block_times(
    profile: Profile, slices: int, split: bool, granularity: int
) -> LeastBlockTimes:
    """Find the least times of a profile whose cuts are multiples of `granularity` tokens."""
    tokens = profile.tokens
    points = min(CUT_POINTS, max(1, tokens // granularity))
    ends = np.unique([tokens * point // points for point in range(points + 1)])
    ends = ends.astype(np.float64)
    begin, end = np.triu_indices(len(ends), 1)  # of each slice, as numbers of places
    prefix, length = ends[begin], ends[end] - ends[begin]
    lengths = np.unique(length)
    lengths = lengths[lengths * slices >= tokens]
    places = np.linspace(0, len(lengths) - 1, MAX_CLASSES)
    # The most and the fewest tokens of the longest slice, in each class.
    tops = np.unique(lengths[places.astype(np.int64)])
    longer = np.searchsorted(lengths, tops[:-1], side="right")
    bottoms = lengths[[0, *longer]]
    is_allowed = length <= tops[:, None]
    is_long = is_allowed & (length >= bottoms[:, None])
    # The first and the last slice may have any length.
    whole_lengths = [*range(granularity, tokens + 1, granularity), tokens]
    any_length = np.array(whole_lengths, dtype=np.float64)
    at_start, at_end = np.zeros(len(any_length)), tokens - any_length

    def least_sum(times: Floats) -> float:
        """Return the least sum of the times of all slices, over all cuts into at most `slices` slices."""
        size = len(ends)
        seconds = np.full((size, size), math.inf)
        seconds[begin, end] = times
        best = np.full(size, math.inf)
        best[0] = 0.0
        for _ in range(min(slices, size - 1)):
            further = np.minimum(best, (best[:, None] + seconds).min(axis=0))
            if (further == best).all():
                break
            best = further
        return float(best[-1])

    def least_sums(times: Floats) -> Floats:
        allowed = np.where(is_allowed, times, np.inf)
        return np.array([least_sum(row) for row in allowed])

    def least(times: Floats, which: Bools) -> Floats:
        lowest: Floats = np.where(which, times, np.inf).min(axis=1)
        return lowest

    def block_times(block: Block) -> BlockTimes:
        def along(fit: Fit, tokens: Floats = length, before: Floats = prefix) -> Floats:
            return seconds_along(fit.curve, tokens, before)

        def back_along(tokens: Floats = length, before: Floats = prefix) -> Floats:
            """Until their gradients leave."""
            whole = along(block.B, tokens, before)
            if not split:
                return whole
            return np.minimum(whole, along(block.I, tokens, before))

        forward, back = along(block.F), back_along()
        backward = least_sums(along(block.B))
        if split:
            halves = along(block.I) + along(block.W)
            backward = np.minimum(backward, least_sums(halves))
        return BlockTimes(
            forward=least_sums(forward),
            back=least_sums(back),
            backward=backward,
            long_forward=least(forward, is_long),
            long_back=least(back, is_long),
            forward_rate=least(forward / length, is_allowed),
            back_rate=least(back / length, is_allowed),
            first_forward=float(along(block.F, any_length, at_start).min()),
            last_forward=float(along(block.F, any_length, at_end).min()),
            last_back=float(back_along(any_length, at_end).min()),
        )

    return LeastBlockTimes(
        block_times(profile.layer),
        block_times(profile.embed),
        block_times(profile.head),
        bottoms,
        tops,
        np.ceil(tokens / tops),
        granularity,
        slices,
        tokens,
    )


# ---------------------------------------------------------------- layers on a placement


class PlacedLayers:
    """A placement with the layers of its parts, as columns with one entry for each stage or rank."""

    def __init__(self, stages: list[Stage], partition: tuple[int, ...]) -> None:
        self.rank: Ints = np.array([stage.rank for stage in stages])
        self.ranks = int(self.rank.max()) + 1
        self.size = len(stages)
        self.layers: Ints = np.array(partition)
        self.is_on: Bools = self.rank[:, None] == np.arange(self.ranks)
        self.stages_on: Ints = self.is_on.sum(axis=0)
        # The first and the last stage of each rank.
        self.first: Ints = self.is_on.argmax(axis=0)
        self.last: Ints = self.size - 1 - self.is_on[::-1].argmax(axis=0)
        changes = self.rank[1:] != self.rank[:-1]
        self.hops_before: Ints = np.concatenate([[0], np.cumsum(changes)])
        self.hops = int(self.hops_before[-1])

    def messages(self, channels: int) -> tuple[Ints, Ints]:
        """Return the messages of a micro-batch that each rank sends and receives on each of its channels."""
        there, back = self.rank[:-1], self.rank[1:]
        source, target = np.concatenate([[there, back], [back, there]], axis=1)
        is_sent = source != target
        channel = np.where(source < target, 1 % channels, 0)[is_sent]
        counts = np.zeros((2, self.ranks, channels), dtype=np.int64)
        for count, ends in zip(counts, (source, target), strict=True):
            np.add.at(count, (ends[is_sent], channel), 1)
        return counts[0], counts[1]

    def on_ranks(self, values: Floats) -> Floats:
        """Add up a quantity of the stages on each rank."""
        total: Floats = values @ self.is_on
        return total

    def least_on_ranks(self, values: Floats) -> Floats:
        """Return the least value of the stages on each rank."""
        on_ranks = np.where(self.is_on, values[..., None], np.inf)
        least: Floats = on_ranks.min(axis=-2)
        return least

    def of_blocks(self, blocks: Profile | LeastBlockTimes, name: str) -> Floats:
        """Return a quantity of each stage, from the fields of this name of its blocks."""
        layer, embed, head = (
            getattr(block, name) for block in (blocks.layer, blocks.embed, blocks.head)
        )
        stages: Floats = np.multiply.outer(layer, self.layers.astype(np.float64))
        stages[..., 0] += embed
        stages[..., -1] += head
        return stages


# ---------------------------------------------------------------- bounds of a placement
LEAST = 1e-100  # instead of a divisor of 0


@dataclass(frozen=True, slots=True)
class Hop:
    """The least seconds of a message from rank to rank."""

    latency: float
    token: float


@dataclass(frozen=True, slots=True)
class Channels:
    """How many channels the messages of a rank share, and the least seconds of one on those of its two ranks."""

    count: int
    sent: Hop
    received: Hop


@dataclass(frozen=True, slots=True)
class DivisionLoad:
    """What a division asks of a placement: micro-batches, recomputed stages, links, sums and memory."""

    microbatches: int
    recomputed: int  # the first stages of the placement
    hop: Hop
    copies: int  # that sum their gradients
    memory: float | None  # bytes of a device
    ring: Hop = Hop(0.0, 0.0)  # of a sum of gradients: to start, and for each byte
    channels: Channels | None = None  # that the messages of a rank share


class PlacedBound:
    """The least times of one placement under one load: rows for classes of cuts, columns for stages or ranks."""

    def __init__(
        self,
        layout: PlacedLayers,
        times: LeastBlockTimes,
        profile: Profile,
        load: DivisionLoad,
    ) -> None:
        self.layout = layout
        self.times = times
        self.profile = profile
        self.load = load
        self.again = np.arange(layout.size) < load.recomputed
        self.forward = layout.of_blocks(times, "forward")
        self.backward = layout.of_blocks(times, "backward")
        self.backward[:, self.again] += self.forward[:, self.again]
        hop = load.hop
        self.short_hop = hop.latency + hop.token * times.shortest
        # The first slice there, and the last slice back, on each stage.
        there = layout.of_blocks(times, "first_forward")
        self.last_there = layout.of_blocks(times, "last_forward")
        self.last_back = layout.of_blocks(times, "last_back")
        self.last_back[self.again] += self.last_there[self.again]
        before = np.cumsum(there) - there
        stages_reached = before + layout.hops_before * self.short_hop
        self.reached = stages_reached[layout.first]
        self.hops_after = layout.hops - layout.hops_before
        # From the first backward of a step to that of each stage.
        self.way_back = _after(self.last_back) + self.hops_after * self.short_hop
        # Bytes of a token on each stage after its forward, and more while its backward runs.
        whole = layout.of_blocks(profile, "held")
        whole[:-1] += profile.message
        self.left = np.where(self.again, profile.message, whole)
        self.rebuilt = np.maximum(whole - self.left, 0.0)
        # Bytes of the gradients that each stage sums over the copies, without tied ones.
        weights = layout.of_blocks(profile, "weights")
        weights[0] -= profile.tied
        if layout.size > 1:
            weights[-1] -= profile.tied
        self.gradients = np.maximum(weights, 0.0) / TENSORS_PER_WEIGHT
        self.caps = self.left_over()

    # ------------------------------------------------------------ memory
    def left_over(self) -> Floats:
        """Return bytes of each rank that are left for activations: all but weights and a sequence of messages."""
        layout, profile = self.layout, self.profile
        if self.load.memory is None:
            return np.full(layout.ranks, np.inf)
        memory = self.load.memory * (1 + ROUNDING)
        messages = 0.0
        if layout.ranks > 1:
            # One message of the longest slice for each slice, up to the limit of the runtime.
            sent = min(1.0, MAX_SENDS_IN_FLIGHT / self.times.slices)
            messages = sent * profile.message * self.times.tokens
        sizes = layout.of_blocks(profile, "weights")
        weights = layout.on_ranks(sizes + layout.of_blocks(profile, "gathered"))
        if layout.rank[0] == layout.rank[-1]:
            weights[layout.rank[0]] -= profile.tied
        caps: Floats = memory - weights - messages
        if self.load.copies > 1:
            caps[weights + layout.on_ranks(self.gradients) > memory] = -1.0
        return caps

    def fitting_classes(self) -> Bools:
        """Return which classes of cuts fit: one micro-batch, and what a backward recomputes of it."""
        layout, times, caps = self.layout, self.times, self.caps
        fits = np.ones(len(times.longest), dtype=np.bool_)
        tokens = times.tokens
        if (layout.on_ranks(self.left * tokens) > caps).any():
            return np.zeros_like(fits)
        # When the last slice comes back to a stage, all slices are still on the earlier stages of
        # its rank. When the longest one comes back, that one still is.
        held = np.zeros(layout.ranks)
        for stage in np.flatnonzero(self.rebuilt):
            rank = layout.rank[stage]
            held[rank] += self.left[stage]
            at_last_slice = tokens * held[rank] + times.shortest * self.rebuilt[stage]
            at_longest_slice = times.longest * (held[rank] + self.rebuilt[stage])
            fits &= np.maximum(at_last_slice, at_longest_slice) <= caps[rank]
        return fits

    # ------------------------------------------------------------ time
    def least_times(self) -> Floats:
        """Return times that no pass on this placement can beat, by classes of cuts; infinite where nothing fits."""
        fits = self.fitting_classes()
        if not fits.any():
            return np.full(len(fits), np.inf)
        layout = self.layout
        count = self.load.microbatches
        turn = self.profile.turn
        sums = np.zeros(layout.size)
        if self.load.copies > 1:
            ring = self.load.ring
            latency = np.where(self.gradients > 0, ring.latency, 0.0)
            sums = latency + self.gradients * ring.token
        forward = count * layout.on_ranks(self.forward)
        backward = count * layout.on_ranks(self.backward)
        # Rests between a rank's actions; the last action needs none.
        actions = count * np.multiply.outer(self.times.fewest, layout.stages_on)
        turned = self.turned()
        way_back = turned[:, None] + self.way_back
        # When each rank has done all its work.
        late = self.forwards_that_wait() + backward
        all_work = self.reached + forward + backward + (2 * actions - 1) * turn
        late_work = way_back[:, layout.last] + late + (actions - 1) * turn
        ends = np.maximum(all_work, late_work)
        # When all backwards of each stage are done, and its gradients can be summed.
        all_forward = (self.reached + forward).max(axis=1)
        after_forwards = all_forward[:, None] + self.last_back
        done = np.maximum(after_forwards, way_back + count * self.backward)
        with_last_sum = ends + layout.least_on_ranks(sums)
        with_all_sums = layout.least_on_ranks(done) + layout.on_ranks(sums)
        byte_seconds = count * layout.on_ranks(self.byte_seconds())
        with_memory = self.reached + byte_seconds / np.maximum(self.caps, LEAST)
        bounds = [
            with_last_sum.max(axis=1),
            with_all_sums.max(axis=1),
            with_memory.max(axis=1),
            turned + self.returned(),
            self.carried(),
        ]
        return np.where(fits, np.max(bounds, axis=0), np.inf)

    def turned(self) -> Floats:
        """Return the least time until all slices of a micro-batch have run on all stages."""
        if self.layout.size == 1:
            return self.forward[:, 0]
        return self.through("forward") + self.long_hops()

    def returned(self) -> Floats:
        """Return the least time from the first backward of a micro-batch to its last one."""
        repeated = int(self.layout.layers[self.again].sum())
        again = repeated * self.times.layer.long_forward
        return self.through("back") + again + self.long_hops()

    def through(self, way: str) -> Floats:
        """Return the least time of the longest slice through all stages, and of the others on the first or last one."""
        blocks = (self.times.layer, self.times.embed, self.times.head)
        layer, embed, head = (getattr(block, f"long_{way}") for block in blocks)
        layers = self.layout.layers
        ends = int(min(layers[0], layers[-1]))
        long = (int(layers.sum()) - ends) * layer + embed + head
        total: Floats = long + ends * getattr(self.times.layer, way)
        return total

    def carried(self) -> Floats:
        """Return the least time until all channels have carried their messages; 0 if messages share none."""
        times, channels = self.times, self.load.channels
        if channels is None:
            return np.zeros(len(times.longest))

        def seconds(hop: Hop) -> Floats:
            """Of all slices of a micro-batch, for each class of cuts."""
            slices: Floats = times.fewest * hop.latency + times.tokens * hop.token
            return slices

        sent, received = self.layout.messages(channels.count)
        busy = np.multiply.outer(seconds(channels.sent), sent)
        busy += np.multiply.outer(seconds(channels.received), received)
        begin = np.maximum(self.reached - self.short_hop, 0.0)
        ends = begin + self.load.microbatches * busy.max(axis=-1)
        latest: Floats = ends.max(axis=1)
        return latest

    def long_hops(self) -> Floats:
        """Return the seconds of all hops of the longest slice."""
        hop = self.load.hop
        seconds: Floats = hop.latency + hop.token * self.times.longest
        return self.layout.hops * seconds

    def forwards_that_wait(self) -> Floats:
        """Return the least seconds of forwards that each rank runs after its first backward.

        Before it, those forwards run that hold the fewest bytes for their seconds, as many as
        the memory has room for. Any slices can be among them, so all count at the least
        seconds of a token.
        """
        layout = self.layout
        tokens = self.times.tokens * self.load.microbatches
        size = tokens * self.left
        if (layout.on_ranks(size) <= self.caps).all():
            return np.zeros((len(self.times.longest), layout.ranks))
        seconds = tokens * self.layout.of_blocks(self.times, "forward_rate")
        room = np.maximum(self.caps, 0.0)
        late = np.zeros_like(layout.on_ranks(seconds))
        # Recomputed stages hold little, so their forwards come first. Of each group, all count
        # as if they held as little as the best of them.
        for group in (self.again, ~self.again):
            mine = np.where(group, seconds, 0.0)
            ratio = mine / np.maximum(size, LEAST)
            best = np.where(layout.is_on, ratio[..., None], 0.0).max(axis=-2)
            total = layout.on_ranks(mine)
            held = total / np.maximum(best, LEAST)
            share = np.minimum(1.0, room / np.maximum(held, LEAST))
            room = room - share * held
            late = late + (1 - share) * total
        return late

    def byte_seconds(self) -> Floats:
        """Return the bytes times seconds that one micro-batch takes at least on each stage."""
        tokens, slices = self.times.tokens, self.times.slices
        there = self.layout.of_blocks(self.times, "forward_rate")
        rate = there + self.layout.of_blocks(self.times, "back_rate")
        rate[:, self.again] += there[:, self.again]
        way = _after(self.last_there + self.last_back)
        way += 2 * self.hops_after * self.short_hop
        later_slices = rate * tokens * (1 + 1 / slices) / 2 + way
        own_way = (_after(rate) + rate) * tokens / slices
        own_way += 2 * self.hops_after * self.load.hop.latency
        return self.left * tokens * np.maximum(later_slices, own_way)


def _after(values: Floats) -> Floats:
    """Return for each stage the sum over the stages after it."""
    backwards = values[..., ::-1]
    from_here_on = np.cumsum(backwards, axis=-1)[..., ::-1]
    after: Floats = from_here_on - values
    return after


# ---------------------------------------------------------------- the placements of a search
MAX_CLOSE_ACTIONS = 3_000  # of a schedule whose close bound is computed
# Passes over actions, in all close bounds of a search. They take about a second.
CLOSE_BOUND_WORK = 20_000_000


def tried_bound(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    limits: Limits,
    memory: float | None,
) -> float:
    """Return a time that no plan on the placements of a search can beat.

    Every micro-batch must visit all stages, and there must be one copy of the weights.
    """
    # A cost, no higher in anything, in which splitting a backward takes no time.
    back, backward = cost.least_backward(split=True)
    cheaper = replace(cost, I=back, W=backward - back)
    pairs = [
        (placement, slices)
        for placement in allowed_placements(ranks, limits)
        for slices in slice_counts(limits)
    ]
    waiting = []
    for number, (placement, slices) in enumerate(pairs):
        crowd = placement.stages_per_rank
        quick = space_bound(
            cost, ranks, microbatches, crowd, slices, memory, limits.split
        )
        waiting.append((quick, number, False))
    heapq.heapify(waiting)
    left = CLOSE_BOUND_WORK
    while True:
        bound, number, is_close = waiting[0]
        placement, slices = pairs[number]
        path = ranks * placement.stages_per_rank
        actions = 3 * path * microbatches * slices
        # With a limited memory, micro-batches may be numbered by any of their forwards.
        work = actions * (1 if memory is None else 2 * path)
        if is_close or actions > MAX_CLOSE_ACTIONS or work > left:
            return bound
        left -= work
        stages = placement.stages(ranks)
        paths = placement.paths(stages, microbatches, even_cuts_only(slices)[0])
        draft = sequential_schedule(stages, paths, limits.split)
        close = max(bound, lower_bound(draft, cheaper, memory))
        heapq.heapreplace(waiting, (close, number, True))
