"""A placement with the layers of its parts, and the bytes that each rank holds on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.cost.memory import MAX_SENDS_IN_FLIGHT
from penstock.cost.profile import TENSORS_PER_WEIGHT, Block
from penstock.ir.schedule import Stage
from penstock.ir.table import Bools, Floats, Ints
from penstock.plan.candidates import ROUNDING


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
