"""The cost of any schedule by a profile, with the layers divided to suit the placement of its parts.

A planner compares schedules with different numbers of parts, in different places, under one cost. So this cost looks
at the schedule that it is asked about, and divides the layers of the model as that schedule needs them:

    loop of 4       0    1    2    3          rank 0 has the embedding, rank 3 the head: rank 3 gets fewer layers
    one wave of 2   0    1    1    0          rank 0 has both
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.cost.cost import ModelCost, PartsCost
from penstock.cost.network import Network
from penstock.cost.profile import Block, Profile
from penstock.ir.action import WHOLE_OPS, Action
from penstock.ir.schedule import Schedule
from penstock.partition import balanced_partition, even_partition


@dataclass(frozen=True, slots=True)
class LayeredCost(PartsCost):
    """The cost of any schedule by a profile, whose layers are divided as the schedule needs them."""

    profile: Profile
    # The costs of all parts by the ranks that they are on.
    models: dict[tuple[int, ...], ModelCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # The last schedule with its cost: the simulator asks thousands of times about one schedule.
    last: list[tuple[Schedule, ModelCost]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @abstractmethod
    def new_model(self, schedule: Schedule) -> ModelCost:
        """The cost of the parts of a schedule on these ranks."""

    def model(self, schedule: Schedule) -> ModelCost:
        """The cost of this schedule's own parts."""
        for known, cost in self.last:
            if known is schedule:
                return cost
        ranks = _ranks_of_parts(schedule)
        if ranks not in self.models:
            self.models[ranks] = self.new_model(schedule)
        self.last[:] = [(schedule, self.models[ranks])]
        return self.models[ranks]

    @property
    def network(self) -> Network:
        """The links that were measured."""
        return self.profile.network

    @property
    def switch(self) -> float:
        """How much longer a forward takes right after a backward, as a share of its time."""
        return self.profile.switch

    @property
    def handover(self) -> float:
        """Seconds that a shared processor loses when it goes from one rank to another."""
        return self.profile.handover


@dataclass(frozen=True, slots=True)
class ProfileCost(LayeredCost):
    """The cost of any schedule by a profile, with the layers divided evenly among its parts.

    Like `UnitCost`, it looks at the schedule that it is asked about. Every
    sequence has `tokens` tokens, by default as many as in the profile.
    """

    tokens: int | None = None
    recompute: bool = False

    def new_model(self, schedule: Schedule) -> ModelCost:
        """The cost of as many parts as this schedule has."""
        partition = even_partition(self.profile.layers, schedule.parts)
        tokens = self.profile.tokens if self.tokens is None else self.tokens
        return self.profile.cost(partition, None, self.recompute, tokens)


@dataclass(frozen=True, slots=True)
class PlacedCost(LayeredCost):
    """A profile as the cost of any schedule with sequences of `tokens` tokens.

    The layers are balanced over the ranks, as measured.
    `recomputed` is the share of the parts, from the first one on, that keep only their
    input: these hold their activations for the longest time. `recompute` names such parts
    instead, and `partition` fixes the layers of each part.
    """

    tokens: int
    recomputed: float = 0.0
    partition: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()  # of the ranks, copy by copy; empty if all are 1

    def partition_of(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the layers of each part of a schedule."""
        if self.partition:
            return self.partition
        ranks = _ranks_of_parts(schedule)
        count = 1 + max(ranks)
        # The speed of each rank of a copy is that on the slowest copy: all wait for it.
        speeds = [min(self.speeds[rank::count], default=1.0) for rank in range(count)]
        return balance_layers(self.profile, self.tokens, ranks, speeds)

    def recomputed_parts(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the parts of a schedule that are computed again in the backward."""
        first_parts = range(count_of_share(self.recomputed, schedule.parts))
        return self.recompute or tuple(first_parts)

    def new_model(self, schedule: Schedule) -> ModelCost:
        """The cost of the layers of each part, balanced over the ranks."""
        again = self.recomputed_parts(schedule)
        # The overhead of an action is a pause after it, which is how it was measured.
        profile = replace(self.profile, turn=0.0)
        parts = profile.parts(self.partition_of(schedule), again)
        return ModelCost(parts, self.network, self.speeds, self.tokens)

    def updates(self, schedule: Schedule) -> list[float]:
        """Seconds of the optimizer on each rank, and of what else a step does beside its actions."""
        part_updates = self.profile.update(self.partition_of(schedule))
        rank_updates = [self.profile.rest] * schedule.ranks
        for rank, part in sorted({(one.rank, one.part) for one in schedule.stages}):
            rank_updates[rank] += part_updates[part]
        return rank_updates

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the executor takes between two actions."""
        return self.profile.turn

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives, and until the executors have sent and taken it.

        About half of what the executor takes for an action lies between its end and the beginning of the action
        that waits for its message.
        """
        return PartsCost.latency(self, source, target) + self.profile.turn / 2


def balance_layers(
    profile: Profile,
    tokens: int,
    ranks: tuple[int, ...],
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the layers of parts on these ranks, so that the busiest rank has as little work as possible."""
    embed, layer, head = (
        block_seconds(block, tokens)
        for block in (profile.embed, profile.layer, profile.head)
    )
    return balanced_partition(profile.layers, ranks, embed, layer, head, speeds)


def _ranks_of_parts(schedule: Schedule) -> tuple[int, ...]:
    """Return the rank of each part; of several copies of a part, that of the first."""
    ranks = [-1] * schedule.parts
    for stage in schedule.stages:
        if ranks[stage.part] < 0:
            ranks[stage.part] = stage.rank
    return tuple(ranks)


def count_of_share(share: float, whole: int) -> int:
    """Return a share of a number of things, rounded up.

    >>> count_of_share(0.25, 6), count_of_share(1.0, 6)
    (2, 6)
    """
    return min(whole, math.ceil(share * whole))


def block_seconds(block: Block, tokens: int) -> float:
    """Return the seconds of a block's forward and backward of one whole sequence."""
    return sum(block.fit(op).curve.of(tokens, 0) for op in WHOLE_OPS)
