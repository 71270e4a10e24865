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
which `penstock.plan.placed_bound` knows. If cuts can lie at more than `CUT_POINTS` places, the least work is that of
cuts at `CUT_POINTS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.cost.curve import seconds_along
from penstock.cost.network import fastest_link
from penstock.cost.profile import Block, Profile
from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.action import Op
from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats
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
