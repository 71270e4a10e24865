"""The least times of a model's layers, embedding and head, over all ways to cut a sequence.

Short slices reach the ranks early, but all slices together take longer if they are short. So cuts
are put into classes by their longest slice:

    class     0          1            2           one entry of each column of `BlockTimes`
    longest   1-4        5-8          9-16        tokens of the longest slice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.cost.profile import Block, Profile
from penstock.ir.action import Op
from penstock.ir.table import Bools, Floats
from penstock.plan.space import SliceSpace

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
