"""Times that no plan on a known placement can beat, by a profile and with a limited memory.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.table import Bools, Floats
from penstock.plan.block_times import LeastBlockTimes
from penstock.plan.placed_layers import PlacedLayers, Room

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
