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
not known, but the layers of all ranks together are. The bound is the least time in which the ranks can do all layers,
if each begins when it is reached at the earliest. Every part but the first and the last has at least one layer.

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
must hold. A plan of a cell is on one of these placements, so no plan of the cell beats the least of their bounds.

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

import numpy as np

from penstock.cost.cost import UnitCost
from penstock.cost.curve import seconds_along
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT
from penstock.cost.network import fastest_link
from penstock.cost.profile import TENSORS_PER_WEIGHT, Block, Profile
from penstock.errors import ShapeError
from penstock.ir.action import Op
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Stage
from penstock.ir.table import Bools, Floats, Ints
from penstock.plan.bound import lower_bound
from penstock.plan.candidates import ROUNDING
from penstock.plan.space import (
    Limits,
    StagePlacement,
    allowed_placements,
    even_cuts_only,
    slice_counts,
)
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import require_at_least

CUT_POINTS = 64  # places at which a sequence of a profile may be cut
BISECTIONS = 60


def space_bound(
    cost: UnitCost | Profile,
    ranks: int,
    microbatches: int,
    stages: int,
    slices: int = 1,
    cap: float | None = None,
    split: bool = True,
    least_slice: float | None = None,
    weights: int = 1,
) -> float:
    """Return a time below that of every plan of the space.

    stages: the largest number of stages on a rank.
    slices: the largest number of slices of a micro-batch.
    cap: the most activations on a rank, in micro-batches; only for unit costs.
    split: whether backwards may be split.
    least_slice: the smallest share of the tokens that a slice may have; by default slices are equal.
    weights: copies of the weights, which micro-batches may visit in as many orders of the ranks.

    >>> round(space_bound(UnitCost(comm=0.03), ranks=8, microbatches=8, stages=4, slices=8), 2)
    24.43
    """
    require_at_least(
        1, ranks=ranks, microbatches=microbatches, stages=stages, slices=slices
    )
    share = 1.0 / slices if least_slice is None else least_slice
    if not 0.0 < share <= 1.0 / slices * (1 + 1e-9):
        raise ShapeError(
            f"{slices} slices cannot all have at least {share:g} of the tokens"
        )
    if isinstance(cost, UnitCost):
        space = _UnitSpace(
            cost, ranks, microbatches, stages, slices, split, share, weights
        )
        return max(space.time_bound(), space.memory_bound(cap))
    times = least_times(cost, slices, split)
    return profile_bound(times, ranks, microbatches, weights)


# ---------------------------------------------------------------- unit costs
@dataclass(frozen=True, slots=True)
class _UnitSpace:
    cost: UnitCost
    ranks: int
    microbatches: int
    stages: int
    slices: int
    split: bool
    share: float  # of the smallest slice
    weights: int  # copies of them

    @property
    def depth(self) -> int:
        """The ranks that are visited on every path before a rank that is reached late."""
        return hops_before(self.ranks - 1, self.weights)

    @property
    def back(self) -> float:
        """The least time of a rank until a gradient leaves it, for a whole micro-batch."""
        return self.cost.least_backward(self.split)[0]

    @property
    def backward_work(self) -> float:
        """The least backward work of a rank for one micro-batch."""
        return self.cost.least_backward(self.split)[1]

    def one_way(self, seconds: float) -> float:
        """Return the least time of one micro-batch through all stages, without hops."""
        once = seconds / self.stages
        return once + (self.ranks * seconds - once) / self.slices

    def reach(self, seconds: float, complete: int) -> float:
        """Return the least time until the last rank is reached, if this many ranks are complete by then."""
        others = self.depth
        pieces = complete + (others - complete) / self.stages
        return pieces * seconds * self.share + others * self.cost.comm

    def time_bound(self) -> float:
        """Return the best of all choices of how many ranks are complete when the last one is reached."""
        choices = range(self.ranks)
        if self.weights > 1:  # Nobody knows which path completes a rank.
            choices = range(1)
        return min(
            self._time_bound(there, back) for there in choices for back in choices
        )

    def _time_bound(self, complete_there: int, complete_back: int) -> float:
        work = self.cost.F + self.backward_work
        tail = 0.0
        if not self.split:  # the ranks before it still have backwards to do
            tail = self.reach(self.back, complete_there)
        last_rank = (
            self.reach(self.cost.F, complete_there) + self.microbatches * work + tail
        )
        visited_again = 0
        if self.weights == 1:
            visited_again = self.ranks - 1 - min(complete_there, complete_back)
        hops = (self.ranks - 1 + visited_again) * self.cost.comm
        there = self.one_way(self.cost.F) + hops
        backwards = (
            there
            + self.reach(self.back, complete_back)
            + self.microbatches * self.backward_work
        )
        alone = there + self.one_way(self.back) + hops
        if self.split:
            rest = max(self.backward_work - self.back, 0.0)
            alone += rest * self.share / self.stages
        return max(last_rank, backwards, alone)

    def memory_bound(self, cap: float | None) -> float:
        """Return the least time in which the ranks can hold all that they must hold."""
        if cap is None or cap <= 0:
            return 0.0
        pair = self.cost.F + self.back
        way = pair * (self.ranks + 1 / self.stages) / (2 * self.slices)
        later_slices = pair * (1 - 1 / self.slices) / (2 * self.stages)
        hops = [hops_before(rank, self.weights) for rank in range(self.ranks)]
        hop = self.cost.F * self.share / self.stages + self.cost.comm
        mean_reach = hop * sum(hops) / self.ranks
        return mean_reach + self.microbatches * (way + later_slices) / cap


def hops_before(rank: int, weights: int) -> int:
    """Return the hops before a rank is reached, if ranks are numbered in the order in which they are reached.

    With two copies of the weights, two ranks have a first part, two more are one hop away, and so on.
    """
    return rank // weights


# ---------------------------------------------------------------- profiles
@dataclass(frozen=True, slots=True)
class LeastTimes:
    """The least times of a profile over all slicings; they hold for any ranks and micro-batches.

    Layer, embedding and head have their least work for one micro-batch. A piece is the
    shortest slice of one layer, a way the largest slice through the whole model.
    """

    layers: int
    turn: float
    layer: tuple[float, float]  # forward and backward
    embed: tuple[float, float]
    head: tuple[float, float]
    piece: tuple[float, float]
    way: tuple[float, float]
    hop: float


def least_times(
    profile: Profile, slices: int, split: bool = True, granularity: int | None = None
) -> LeastTimes:
    """Find the least times of a profile with at most this many slices.

    Cuts are multiples of `granularity` tokens, by default at `CUT_POINTS` places.
    """
    space = SliceSpace(profile, slices, split, granularity)
    return LeastTimes(
        profile.layers,
        profile.turn,
        space.work(profile.layer),
        space.work(profile.embed),
        space.work(profile.head),
        (space.first_piece(profile.layer), space.last_piece_back(profile.layer)),
        (space.one_way(Op.F), space.one_way_back()),
        least_hop(profile, granularity),
    )


def with_recomputation(times: LeastTimes) -> LeastTimes:
    """Return the least times if every part runs its forward once more before its backward."""

    def again(pair: tuple[float, float]) -> tuple[float, float]:
        forward, backward = pair
        return forward, backward + forward

    return replace(
        times,
        layer=again(times.layer),
        embed=again(times.embed),
        head=again(times.head),
        piece=again(times.piece),
        way=again(times.way),
    )


def profile_bound(
    times: LeastTimes, ranks: int, microbatches: int, weights: int = 1
) -> float:
    """Return a time below that of every plan with these ranks and micro-batches."""
    if weights > 1:
        return _bound_of_copies(times, ranks, microbatches, weights)
    hop, turn = times.hop, times.turn
    forward, backward = times.layer
    count = microbatches
    # A rank rests between its actions; messages leave before that.
    rests = (2 * count - 1) * turn
    first_piece, piece_back = times.piece

    def pieces(rank: int) -> int:
        # The first part may have the embedding alone, and the last part the head.
        return max(rank - 1, 0)

    all_work = _least_finish(
        [rank * hop + pieces(rank) * first_piece + rests for rank in range(ranks)],
        times.layers,
        count * (forward + backward),
        fixed=count * sum(times.embed),
        free=count * sum(times.head),
    )
    there = times.way[0] + (ranks - 1) * hop
    back = [there + rank * hop + pieces(rank) * piece_back for rank in range(ranks)]
    backwards = _least_finish(
        [begin + (count - 1) * turn for begin in back],
        times.layers,
        count * backward,
        fixed=count * times.head[1],
        free=count * times.embed[1],
    )
    alone = there + times.way[1] + (ranks - 1) * hop
    return max(all_work, backwards, alone)


def _bound_of_copies(
    times: LeastTimes, ranks: int, microbatches: int, weights: int
) -> float:
    """Return such a time if there are several copies of the weights.

    Nobody knows which copy does how much, but all ranks together do all work. So the step
    takes at least the mean over the ranks.
    """
    hops = [hops_before(rank, weights) for rank in range(ranks)]
    mean_hops = sum(hops) / ranks
    # The first part may have the embedding alone, and the last part the head.
    mean_pieces = sum(max(hop - 1, 0) for hop in hops) / ranks

    def mean_share(pieces: Sequence[int]) -> float:
        """The mean work of a rank: forwards (0), backwards (1), or both."""
        work = sum(times.layers * times.layer[one] for one in pieces)
        work += sum(times.embed[one] + times.head[one] for one in pieces)
        return microbatches * work / ranks

    rests = (2 * microbatches - 1) * times.turn
    reached = mean_hops * times.hop + mean_pieces * times.piece[0]
    all_work = reached + rests + mean_share((0, 1))
    there = times.way[0] + (ranks - 1) * times.hop
    reached_back = mean_hops * times.hop + mean_pieces * times.piece[1]
    back_rests = (microbatches - 1) * times.turn
    backwards = there + reached_back + back_rests + mean_share((1,))
    alone = there + times.way[1] + (ranks - 1) * times.hop
    return max(all_work, backwards, alone)


def _least_finish(
    begins: Sequence[float], layers: int, layer: float, fixed: float, free: float
) -> float:
    """Return the least time in which ranks that begin at these times can do all layers.

    fixed: work of the first of these ranks besides.
    free: work of any one rank besides.
    """
    high = max(begins) + fixed + free + layer * layers
    starts = np.array(begins, dtype=np.float64)
    starts[0] += fixed
    bisect = compile_if_large(_bisect_finish, BISECTIONS * len(starts))
    return float(bisect(starts, float(layers), layer, free, high))


def _bisect_finish(
    starts: Floats, layers: float, layer: float, free: float, high: float
) -> float:
    """The least time in which all layers and the free work can be done, by bisection."""
    low = 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        done = 0.0
        for start in starts:
            if layer > 0 and middle > start:
                done += math.floor((middle - start) / layer + 1e-9)
        possible = False
        for start in starts:  # of the rank with the free work
            left = middle - start - free
            if left < 0 or middle < starts[0]:
                continue
            if layer > 0:
                without = math.floor((middle - start) / layer + 1e-9)
                others = done - without
                possible |= others + math.floor(left / layer + 1e-9) >= layers
            else:
                possible = True
        if possible:
            high = middle
        else:
            low = middle
    return low


class SliceSpace:
    """Searches the least times of a profile's blocks over all slicings."""

    def __init__(
        self,
        profile: Profile,
        slices: int,
        split: bool,
        granularity: int | None = None,
    ) -> None:
        self.profile = profile
        self.slices = slices
        self.split = split
        self.granularity = granularity or max(1, profile.tokens // CUT_POINTS)
        points = min(CUT_POINTS, max(1, profile.tokens // self.granularity))
        places = {profile.tokens * point // points for point in range(points + 1)}
        self.places = sorted(places)
        ends = np.array(self.places, dtype=np.float64)
        begin, end = np.triu_indices(len(ends), 1)
        self.begin, self.end = begin, end  # of each slice, as numbers of places
        self.prefixes = ends[begin]
        self.tokens = ends[end] - ends[begin]
        whole = profile.tokens
        lengths = range(self.granularity, whole + 1, self.granularity)
        self.lengths = np.array([*lengths, whole], dtype=np.float64)

    def work(self, block: Block) -> tuple[float, float]:
        """The least forward and backward work of a block for one micro-batch."""
        return self.sum_over_slices(self.along(block, Op.F)), self._least_backward(
            block
        )

    # ------------------------------------------------------------ blocks
    def _least_backward(self, block: Block) -> float:
        """The least backward work of a block for one micro-batch."""
        whole = self.sum_over_slices(self.along(block, Op.B))
        if not self.split:
            return whole
        halves = self.along(block, Op.I) + self.along(block, Op.W)
        return min(whole, self.sum_over_slices(halves))

    def sum_over_slices(self, times: Floats) -> float:
        """The least sum of the times of all slices, over all cuts into at most `slices` slices."""
        size = len(self.places)
        seconds = np.full((size, size), math.inf)  # by begin and end
        seconds[self.begin, self.end] = times
        best = np.full(size, math.inf)
        best[0] = 0.0
        for _ in range(min(self.slices, size - 1)):
            longer = np.minimum(best, (best[:, None] + seconds).min(axis=0))
            if (longer == best).all():
                break
            best = longer
        return float(best[-1])

    def along(self, block: Block, op: Op) -> Floats:
        """The seconds of all slices."""
        return seconds_along(block.fit(op).curve, self.tokens, self.prefixes)

    def back_along(self, block: Block) -> Floats:
        """The seconds of the backwards of all slices until their gradients leave."""
        whole = self.along(block, Op.B)
        return np.minimum(whole, self.along(block, Op.I)) if self.split else whole

    def first_piece(self, block: Block) -> float:
        """The least time of the forward of a first slice."""
        return self._least_piece(block, Op.F, np.zeros(len(self.lengths)))

    def last_piece(self, block: Block, op: Op) -> float:
        """The least time of an op on a last slice."""
        return self._least_piece(block, op, self.profile.tokens - self.lengths)

    def last_piece_back(self, block: Block) -> float:
        """The least time of the backward of a last slice until its gradient leaves."""
        whole = self.last_piece(block, Op.B)
        return min(whole, self.last_piece(block, Op.I)) if self.split else whole

    def _least_piece(self, block: Block, op: Op, prefixes: Floats) -> float:
        return float(seconds_along(block.fit(op).curve, self.lengths, prefixes).min())

    def one_way(self, op: Op) -> float:
        """The least time of the largest slice through all layers."""
        profile = self.profile
        longest = -(-profile.tokens // self.slices)
        blocks = profile.blocks(profile.layers, first=True, last=True)
        seconds = sum(count * self.along(block, op) for count, block in blocks)
        assert not isinstance(seconds, int)
        return float(seconds[self.tokens >= longest].min())

    def one_way_back(self) -> float:
        """The least time of the largest slice back through all layers."""
        whole = self.one_way(Op.B)
        return min(whole, self.one_way(Op.I)) if self.split else whole


def least_hop(profile: Profile, granularity: int | None = None) -> float:
    """The least time of a hop between two ranks, with the shortest slice as message."""
    link = fastest_link(profile.network)
    shortest = granularity or max(1, profile.tokens // CUT_POINTS)
    return link.latency + profile.sent * shortest / link.bandwidth


# ---------------------------------------------------------------- partial paths


def partial_profile_bound(
    times: LeastTimes, ranks: int, microbatches: int, weights: int = 1
) -> float:
    """Return a time below that of every plan with partial paths.

    `times` are those of a model with only the layers that every micro-batch visits.
    """
    # Messages leave before a rank rests, so rests count in no chain of actions.
    work = times.layers * sum(times.layer) + sum(times.embed) + sum(times.head)
    waits = max(ranks - weights, 0) * times.hop
    mean = (microbatches * work + waits) / ranks
    there = times.way[0]
    back = times.layers * times.layer[1] + times.embed[1] + times.head[1]
    backwards = there + microbatches * back / ranks
    alone = there + times.way[1]
    return max(mean, backwards, alone)


def partial_unit_bound(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    stages: int,
    slices: int,
    share: float,
    split: bool = True,
    weights: int = 1,
) -> float:
    """Return a time below that of every plan whose micro-batches leave out at most `share` of the work."""
    back, backward = cost.least_backward(split)
    visited = ranks * (1.0 - share)
    waits = max(ranks - weights, 0) * cost.comm

    def one_way(seconds: float) -> float:
        once = min(seconds / stages, visited * seconds)
        return once + (visited * seconds - once) / slices

    mean = (microbatches * visited * (cost.F + backward) + waits) / ranks
    backwards = one_way(cost.F) + microbatches * visited * backward / ranks
    return max(mean, backwards, one_way(cost.F) + one_way(back))


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


def least_block_times(
    profile: Profile, slices: int, split: bool, granularity: int
) -> LeastBlockTimes:
    """Find the least times of a profile whose cuts are multiples of `granularity` tokens."""
    space = SliceSpace(profile, slices, split, granularity)
    lengths = np.unique(space.tokens)
    is_possible = lengths * slices >= profile.tokens
    lengths = lengths[is_possible]
    places = np.linspace(0, len(lengths) - 1, MAX_CLASSES)
    # The most and the fewest tokens of the longest slice, in each class.
    tops = np.unique(lengths[places.astype(np.int64)])
    bottoms = np.full_like(tops, lengths[0])
    for number, top in enumerate(tops[:-1]):
        longer = lengths[lengths > top]
        bottoms[number + 1] = longer[0]
    allowed = []
    is_long = []
    for bottom, top in zip(bottoms, tops, strict=True):
        is_allowed = space.tokens <= top
        allowed.append(is_allowed)
        is_long.append(is_allowed & (space.tokens >= bottom))

    def least_sums(times: Floats) -> Floats:
        sums = []
        for mask in allowed:
            allowed_times = np.where(mask, times, np.inf)
            sums.append(space.sum_over_slices(allowed_times))
        return np.array(sums)

    def least(times: Floats, masks: list[Bools]) -> Floats:
        return np.array([times[mask].min() for mask in masks])

    def block_times(block: Block) -> BlockTimes:
        forward = space.along(block, Op.F)
        back = space.back_along(block)
        backward = least_sums(space.along(block, Op.B))
        if split:
            halves = space.along(block, Op.I) + space.along(block, Op.W)
            backward = np.minimum(backward, least_sums(halves))
        return BlockTimes(
            forward=least_sums(forward),
            back=least_sums(back),
            backward=backward,
            long_forward=least(forward, is_long),
            long_back=least(back, is_long),
            forward_rate=least(forward / space.tokens, allowed),
            back_rate=least(back / space.tokens, allowed),
            first_forward=space.first_piece(block),
            last_forward=space.last_piece(block, Op.F),
            last_back=space.last_piece_back(block),
        )

    return LeastBlockTimes(
        block_times(profile.layer),
        block_times(profile.embed),
        block_times(profile.head),
        bottoms,
        tops,
        np.ceil(profile.tokens / tops),
        granularity,
        slices,
        profile.tokens,
    )


# ---------------------------------------------------------------- layers on a placement


class PlacedLayers:
    """A placement with the layers of its parts, as columns with one entry for each stage or rank."""

    def __init__(self, stages: list[Stage], partition: tuple[int, ...]) -> None:
        self.rank: Ints = np.array([stage.rank for stage in stages])
        self.ranks = int(self.rank.max()) + 1
        self.size = len(stages)
        self.layers: Ints = np.array(partition)
        # The first and the last stage of each rank.
        number = np.arange(self.size)
        self.first: Ints = np.full(self.ranks, self.size)
        np.minimum.at(self.first, self.rank, number)
        self.last: Ints = np.full(self.ranks, -1)
        np.maximum.at(self.last, self.rank, number)
        changes = self.rank[1:] != self.rank[:-1]
        self.hops_before: Ints = np.zeros(self.size, dtype=np.int64)
        self.hops_before[1:] = np.cumsum(changes)
        self.hops = int(self.hops_before[-1])
        self.is_on: Bools = self.rank[:, None] == np.arange(self.ranks)
        self.stages_on: Ints = self.is_on.sum(axis=0)

    def messages(self, channels: int) -> tuple[Ints, Ints]:
        """Return the messages of a micro-batch that each rank sends and receives on each of its channels."""
        sent = np.zeros((self.ranks, channels), dtype=np.int64)
        received = np.zeros((self.ranks, channels), dtype=np.int64)
        for one, other in pairwise(self.rank.tolist()):
            if one == other:
                continue
            for source, target in ((one, other), (other, one)):  # there and back
                channel = 1 % channels if source < target else 0
                sent[source, channel] += 1
                received[target, channel] += 1
        return sent, received

    def on_ranks(self, values: Floats) -> Floats:
        """Add up a quantity of the stages on each rank."""
        total: Floats = values @ self.is_on
        return total

    def least_on_ranks(self, values: Floats) -> Floats:
        """Return the least value of the stages on each rank."""
        on_ranks = np.where(self.is_on, values[..., None], np.inf)
        least: Floats = on_ranks.min(axis=-2)
        return least

    def of_blocks(
        self, layer: float | Floats, embed: float | Floats, head: float | Floats
    ) -> Floats:
        """Return a quantity of each stage, from that of its blocks."""
        layers = self.layers.astype(np.float64)
        stages = np.multiply.outer(layer, layers)
        stages[..., 0] += embed
        stages[..., -1] += head
        return stages


@dataclass(frozen=True, slots=True)
class Room:
    """What a device holds, in bytes, and how much it may hold."""

    layer: Block
    embed: Block
    head: Block
    message: float  # of a token
    tied: float  # weights that embedding and head share
    memory: float | None
    copies: int  # that sum their gradients

    def weights(self, layout: PlacedLayers) -> Floats:
        """Bytes of the weights on each rank."""
        blocks = (self.layer, self.embed, self.head)
        sizes = [block.weights + block.gathered for block in blocks]
        weights = layout.on_ranks(layout.of_blocks(*sizes))
        first_rank = layout.rank[0]
        if first_rank == layout.rank[-1]:
            weights[first_rank] -= self.tied
        return weights

    def gradients(self, layout: PlacedLayers) -> Floats:
        """Bytes of the gradients that each stage sums over the copies, without tied ones."""
        blocks = (self.layer, self.embed, self.head)
        weights = layout.of_blocks(*(block.weights for block in blocks))
        weights[0] -= self.tied
        if layout.size > 1:
            weights[-1] -= self.tied
        return np.maximum(weights, 0.0) / TENSORS_PER_WEIGHT

    def held(self, layout: PlacedLayers, again: int) -> tuple[Floats, Floats]:
        """Bytes of a token on each stage after its forward, and more while its backward runs.

        The first `again` stages are recomputed.
        """
        whole = layout.of_blocks(self.layer.held, self.embed.held, self.head.held)
        whole[:-1] += self.message
        left = whole.copy()
        left[:again] = self.message
        return left, np.maximum(whole - left, 0.0)

    def left_over(self, layout: PlacedLayers, tokens: int, slices: int) -> Floats:
        """Bytes of each rank that are left for activations: all but weights and a sequence of messages."""
        if self.memory is None:
            return np.full(layout.ranks, np.inf)
        memory = self.memory * (1 + ROUNDING)
        messages = 0.0
        if layout.ranks > 1:
            # One message of the longest slice for each slice, up to the limit of the runtime.
            sent = min(1.0, MAX_SENDS_IN_FLIGHT / slices)
            messages = sent * self.message * tokens
        weights = self.weights(layout)
        caps: Floats = memory - weights - messages
        if self.copies > 1:
            sums = layout.on_ranks(self.gradients(layout))
            is_too_full = weights + sums > memory
            caps[is_too_full] = -1.0
        return caps


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
class CellLoad:
    """What a cell asks of a placement: micro-batches, recomputed stages, links and sums."""

    microbatches: int
    recomputed: int  # the first stages of the placement
    hop: Hop
    turn: float  # seconds that a rank rests after an action
    sum_latency: float = 0.0  # seconds of a sum of gradients
    sum_byte: float = 0.0
    channels: Channels | None = None  # that the messages of a rank share


def placed_bounds(
    layout: PlacedLayers, times: LeastBlockTimes, room: Room, load: CellLoad
) -> Floats:
    """Return times that no pass on this placement can beat, by classes of cuts; infinite where nothing fits."""
    caps = room.left_over(layout, times.tokens, times.slices)
    left, rebuilt = room.held(layout, load.recomputed)
    fits = _fitting_classes(layout, times, caps, left, rebuilt)
    if not fits.any():
        return np.full(len(fits), np.inf)
    sums = np.zeros(layout.size)
    if room.copies > 1:
        gradients = room.gradients(layout)
        latency = np.where(gradients > 0, load.sum_latency, 0.0)
        sums = latency + gradients * load.sum_byte
    seconds = _Bound(layout, times, load).least_times(caps, left, sums)
    return np.where(fits, seconds, np.inf)


def _fitting_classes(
    layout: PlacedLayers,
    times: LeastBlockTimes,
    caps: Floats,
    left: Floats,
    rebuilt: Floats,
) -> Bools:
    """Return which classes of cuts fit: one micro-batch, and what a backward recomputes of it."""
    fits = np.ones(len(times.longest), dtype=np.bool_)
    if (caps == np.inf).all():
        return fits
    tokens = times.tokens
    microbatch_bytes = layout.on_ranks(left * tokens)
    if (microbatch_bytes > caps).any():
        return np.zeros_like(fits)
    # When the last slice comes back to a stage, all slices are still on the earlier stages of
    # its rank. When the longest one comes back, that one still is.
    held = np.zeros(layout.ranks)
    for stage in range(int(np.count_nonzero(rebuilt))):
        rank = layout.rank[stage]
        cap = caps[rank]
        held[rank] += left[stage]
        at_last_slice = tokens * held[rank] + times.shortest * rebuilt[stage]
        if at_last_slice > cap:
            return np.zeros_like(fits)
        at_longest_slice = times.longest * (held[rank] + rebuilt[stage])
        fits &= at_longest_slice <= cap
    return fits


class _Bound:
    """The least times of one placement under one load: rows for classes of cuts, columns for stages or ranks."""

    def __init__(
        self, layout: PlacedLayers, times: LeastBlockTimes, load: CellLoad
    ) -> None:
        self.layout = layout
        self.times = times
        self.load = load
        layer, embed, head = times.layer, times.embed, times.head
        self.again = np.arange(layout.size) < load.recomputed
        self.forward = layout.of_blocks(layer.forward, embed.forward, head.forward)
        self.backward = layout.of_blocks(layer.backward, embed.backward, head.backward)
        self.backward[:, self.again] += self.forward[:, self.again]
        hop = load.hop
        self.short_hop = hop.latency + hop.token * times.shortest
        # The first slice there, and the last slice back, on each stage.
        there = layout.of_blocks(
            layer.first_forward, embed.first_forward, head.first_forward
        )
        self.last_there = layout.of_blocks(
            layer.last_forward, embed.last_forward, head.last_forward
        )
        self.last_back = layout.of_blocks(
            layer.last_back, embed.last_back, head.last_back
        )
        self.last_back[self.again] += self.last_there[self.again]
        before = np.cumsum(there) - there
        stages_reached = before + layout.hops_before * self.short_hop
        self.reached = stages_reached[layout.first]
        self.hops_after = layout.hops - layout.hops_before
        # From the first backward of a step to that of each stage.
        self.way_back = _after(self.last_back) + self.hops_after * self.short_hop

    def least_times(self, caps: Floats, left: Floats, sums: Floats) -> Floats:
        """Return the largest of all bounds, for each class of cuts."""
        layout = self.layout
        count = self.load.microbatches
        turn = self.load.turn
        forward = count * layout.on_ranks(self.forward)
        backward = count * layout.on_ranks(self.backward)
        # Rests between a rank's actions; the last action needs none.
        actions = count * np.multiply.outer(self.times.fewest, layout.stages_on)
        turned = self.turned()
        way_back = turned[:, None] + self.way_back
        # When each rank has done all its work.
        late = self.forwards_that_wait(caps, left) + backward
        all_work = self.reached + forward + backward + (2 * actions - 1) * turn
        late_work = way_back[:, layout.last] + late + (actions - 1) * turn
        ends = np.maximum(all_work, late_work)
        # When all backwards of each stage are done, and its gradients can be summed.
        all_forward = (self.reached + forward).max(axis=1)
        after_forwards = all_forward[:, None] + self.last_back
        done = np.maximum(after_forwards, way_back + count * self.backward)
        with_last_sum = ends + layout.least_on_ranks(sums)
        with_all_sums = layout.least_on_ranks(done) + layout.on_ranks(sums)
        byte_seconds = count * layout.on_ranks(self.byte_seconds(left))
        with_memory = self.reached + byte_seconds / np.maximum(caps, LEAST)
        bounds = [
            with_last_sum.max(axis=1),
            with_all_sums.max(axis=1),
            with_memory.max(axis=1),
            turned + self.returned(),
            self.carried(),
        ]
        least: Floats = np.max(bounds, axis=0)
        return least

    def turned(self) -> Floats:
        """Return the least time until all slices of a micro-batch have run on all stages."""
        layer, embed, head = self.times.layer, self.times.embed, self.times.head
        layers = self.layout.layers
        if self.layout.size == 1:
            return self.forward[:, 0]
        ends = int(min(layers[0], layers[-1]))
        long = (int(layers.sum()) - ends) * layer.long_forward
        long += embed.long_forward + head.long_forward
        return long + ends * layer.forward + self.long_hops()

    def returned(self) -> Floats:
        """Return the least time from the first backward of a micro-batch to its last one."""
        layer, embed, head = self.times.layer, self.times.embed, self.times.head
        layers = self.layout.layers
        ends = int(min(layers[0], layers[-1]))
        repeated = int(layers[self.again].sum())
        long = (int(layers.sum()) - ends) * layer.long_back
        long += repeated * layer.long_forward + embed.long_back + head.long_back
        return long + ends * layer.back + self.long_hops()

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
        return self.layout.hops * (hop.latency + hop.token * self.times.longest)

    def forwards_that_wait(self, caps: Floats, left: Floats) -> Floats:
        """Return the least seconds of forwards that each rank runs after its first backward.

        Before it, those forwards run that hold the fewest bytes for their seconds, as many as
        the memory has room for. Any slices can be among them, so all count at the least
        seconds of a token.
        """
        layout = self.layout
        times = self.times
        tokens = times.tokens * self.load.microbatches
        size = tokens * left
        if (layout.on_ranks(size) <= caps).all():
            return np.zeros((len(times.longest), layout.ranks))
        blocks = (times.layer, times.embed, times.head)
        seconds = tokens * layout.of_blocks(*(one.forward_rate for one in blocks))
        # Recomputed stages hold little, so their forwards come first. Of each group, all count
        # as if they held as little as the best of them.
        bytes_of_first, first = self.cheapest(np.where(self.again, seconds, 0.0), size)
        bytes_of_rest, rest = self.cheapest(np.where(self.again, 0.0, seconds), size)
        room = np.maximum(caps, 0.0)
        share = np.minimum(1.0, room / np.maximum(bytes_of_first, LEAST))
        room = room - share * bytes_of_first
        share_of_rest = np.minimum(1.0, room / np.maximum(bytes_of_rest, LEAST))
        return (1 - share) * first + (1 - share_of_rest) * rest

    def cheapest(self, seconds: Floats, size: Floats) -> tuple[Floats, Floats]:
        """Return the bytes of each rank's forwards if all held as few per second as the best, and their seconds."""
        ratio = seconds / np.maximum(size, LEAST)
        best = np.where(self.layout.is_on, ratio[..., None], 0.0).max(axis=-2)
        total = self.layout.on_ranks(seconds)
        return total / np.maximum(best, LEAST), total

    def byte_seconds(self, left: Floats) -> Floats:
        """Return the bytes times seconds that one micro-batch takes at least on each stage."""
        times = self.times
        tokens = times.tokens
        slices = times.slices
        blocks = (times.layer, times.embed, times.head)
        there = self.layout.of_blocks(*(block.forward_rate for block in blocks))
        back = self.layout.of_blocks(*(block.back_rate for block in blocks))
        rate = there + back
        rate[:, self.again] += there[:, self.again]
        way = _after(self.last_there + self.last_back)
        way += 2 * self.hops_after * self.short_hop
        later_slices = rate * tokens * (1 + 1 / slices) / 2 + way
        own_way = (_after(rate) + rate) * tokens / slices
        own_way += 2 * self.hops_after * self.load.hop.latency
        return left * tokens * np.maximum(later_slices, own_way)


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
    cheaper = with_free_choice(cost)
    pairs = [
        (placement, slices)
        for placement in allowed_placements(ranks, limits)
        for slices in slice_counts(limits)
    ]
    waiting = []
    for number, (placement, slices) in enumerate(pairs):
        quick = space_bound(
            cost,
            ranks,
            microbatches,
            placement.stages_per_rank,
            slices,
            memory,
            limits.split,
        )
        waiting.append((quick, number, False))
    heapq.heapify(waiting)
    left = CLOSE_BOUND_WORK
    while True:
        bound, number, is_close = waiting[0]
        placement, slices = pairs[number]
        actions, work = _size(placement, slices, ranks, microbatches, memory)
        if is_close or actions > MAX_CLOSE_ACTIONS or work > left:
            return bound
        left -= work
        stages = placement.stages(ranks)
        cuts = even_cuts_only(slices)[0]
        paths = placement.paths(stages, microbatches, cuts)
        draft = sequential_schedule(stages, paths, limits.split)
        close = max(bound, lower_bound(draft, cheaper, memory))
        heapq.heapreplace(waiting, (close, number, True))


def with_free_choice(cost: UnitCost) -> UnitCost:
    """Return a cost, no higher in anything, in which splitting a backward takes no time."""
    back, backward = cost.least_backward(split=True)
    return replace(cost, I=back, W=backward - back)


def _size(
    placement: StagePlacement,
    slices: int,
    ranks: int,
    microbatches: int,
    memory: float | None,
) -> tuple[int, int]:
    """Return the actions of a schedule, and about how many passes over actions its close bound takes.

    With a limited memory, micro-batches may be numbered by any of their forwards.
    """
    path = ranks * placement.stages_per_rank
    actions = 3 * path * microbatches * slices
    anchors = 1 if memory is None else 2 * path
    return actions, actions * anchors
