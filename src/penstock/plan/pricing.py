"""What the cells of a workload cost: in the units of the papers, or by profiles of the model.

UnitPricing      a forward of a micro-batch on a rank takes 1; sizes in micro-batches
ProfilePricing   seconds and bytes, from profiles for several numbers of rows of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import NamedTuple

from penstock.cost.buffers import least_byte_seconds
from penstock.cost.cluster import Cluster
from penstock.cost.mesh import gather_seconds, mesh_profile, split_processors
from penstock.cost.network import Link, Network, fastest_link, slowest_sum_link
from penstock.cost.placed import PlacedCost, balance_layers, count_of_share
from penstock.cost.profile import TENSORS_PER_WEIGHT, Profile, send_as
from penstock.cost.unit import UnitCost
from penstock.ir.action import Op
from penstock.ir.table import Floats
from penstock.plan.block_times import LeastBlockTimes, least_block_times
from penstock.plan.candidates import Judge
from penstock.plan.partial import (
    partial_profile_bound,
    partial_unit_bound,
    visited_layers,
)
from penstock.plan.placed_bound import CellLoad, Channels, Hop, placed_bounds
from penstock.plan.placed_layers import PlacedLayers, Room
from penstock.plan.recipes import (
    Cuts,
    Limits,
    Setting,
    StagePlacement,
    allowed_placements,
    unit_setting,
)
from penstock.plan.slices import cut_choices
from penstock.plan.space import (
    LeastTimes,
    least_times,
    profile_bound,
    space_bound,
    with_recomputation,
)
from penstock.plan.topology import Machines, cluster_network, cluster_nodes
from penstock.plan.tried_bound import tried_bound
from penstock.plan.workload import Cell, Workload

MeshKey = tuple[int, int, int, Link, Link]  # rows, tensor, shard and their links
LeastKey = tuple[int, int, Link, float]  # rows, tensor and its link, slowdown


class Estimate(NamedTuple):
    """About how long a step of a cell takes, and how much its fullest device holds."""

    seconds: float
    bytes: float


NO_LINK = Link(0.0, inf)  # of a process that is alone


@dataclass(frozen=True, slots=True)
class UnitPricing:
    """Costs in the units of the papers; a cell is a number of ranks and micro-batches."""

    cost: UnitCost
    memory: float | None = None  # micro-batches of a rank's work
    limits: Limits = field(default_factory=Limits)

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""
        return Judge(self.cost, self.memory, runtime=self.limits.runtime)

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, with slices of equal length."""
        return unit_setting(
            self.cost, cell.ranks, cell.microbatches, self.memory, self.limits
        )

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""
        if self.limits.skip:
            return partial_unit_bound(
                self.cost,
                cell.ranks,
                cell.microbatches,
                self.limits.stages,
                self.limits.slices,
                self.limits.skip,
                self.limits.split,
                self.limits.weights,
            )
        return space_bound(
            self.cost,
            cell.ranks,
            cell.microbatches,
            self.limits.stages,
            self.limits.slices,
            self.memory,
            self.limits.split,
            weights=self.limits.weights,
        )

    def close_bound(self, cell: Cell) -> float:
        """Return a tighter bound, which looks at every placement that the search tries."""
        quick = self.bound(cell)
        if self.limits.skip or self.limits.weights > 1:
            return quick
        close = tried_bound(
            self.cost, cell.ranks, cell.microbatches, self.limits, self.memory
        )
        return max(quick, close)

    def estimate(self, cell: Cell) -> Estimate:
        """Return the bound. There is only one cell, so nothing is compared."""
        return Estimate(self.bound(cell), 0.0)

    def least_bytes(self, cell: Cell) -> float:
        """Return what the fullest rank must hold at least: all of one micro-batch that it may not leave out."""
        return 1.0 - self.limits.skip


@dataclass(frozen=True, slots=True)
class ProfilePricing:
    """Costs by profiles. `profile_at` returns the profile for a number of rows.

    Links are those of the profile, of equal `machines`, or of a `cluster`.
    """

    workload: Workload
    profile_at: Callable[[int], Profile]
    limits: Limits = field(default_factory=Limits)
    machines: Machines | None = None
    cluster: Cluster | None = None
    costs: dict[Cell, PlacedCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    meshes: dict[MeshKey, Profile] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    networks: dict[Cell, Network] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    least: dict[LeastKey, LeastTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    bounds: dict[object, float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    works: dict[object, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    layouts: dict[object, PlacedLayers] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    placed: dict[tuple[Cell, StagePlacement], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    slice_times: dict[object, LeastBlockTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    choices: dict[Cell, list[Cuts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def cost(self, cell: Cell) -> PlacedCost:
        """Return the cost of any schedule of a cell."""
        if cell not in self.costs:
            self.costs[cell] = PlacedCost(
                self.profile(cell),
                self.workload.tokens,
                cell.recomputed,
                partition=self.workload.fixed.partition,
                speeds=self.speeds(cell),
            )
        return self.costs[cell]

    # ------------------------------------------------------------ one process of a cell
    def profile(self, cell: Cell) -> Profile:
        """Return the profile of a process of a cell, with the links between its ranks."""
        place = replace(cell, microbatches=1, rows=1, recomputed=0.0)
        if place not in self.networks:
            self.networks[place] = self._network(cell)
        return replace(self.process(cell), network=self.networks[place])

    def process(self, cell: Cell) -> Profile:
        """Return the profile of a process of a cell; its links between ranks do not count."""
        key = (cell.rows, cell.tensor, cell.shard, *self.mesh_links(cell))
        if key not in self.meshes:
            profile = self.profile_at(cell.rows)
            if self.workload.config is not None:
                profile = send_as(profile, self.workload.config.run.messages)
            self.meshes[key] = mesh_profile(
                profile,
                cell.tensor,
                cell.shard,
                key[3],
                self.processors(cell)[1],
                shard_link=key[4],
            )
        return self.meshes[key]

    def _network(self, cell: Cell) -> Network:
        if self.machines is not None:
            return self.machines.network(cell)
        if self.cluster is not None:
            return cluster_network(self.cluster, cell)
        return self.profile_at(cell.rows).network

    def mesh_links(self, cell: Cell) -> tuple[Link, Link]:
        """Return the links between the processes of a rank: of `tensor`, and of `shard`.

        Unless the machines are known, any pair of processes may have the slowest link.
        """
        if self.machines is not None:
            return self.machines.mesh_links(cell)
        if cell.tensor * cell.shard == 1:
            return NO_LINK, NO_LINK
        link = slowest_sum_link(self._network(cell))
        return link, link

    def processors(self, cell: Cell) -> tuple[int | None, float]:
        """Return the processors that ranks share, and how much longer a rank computes on them."""
        processors = self.workload.processors
        if processors is None:
            return None, 1.0
        return split_processors(processors, cell.tensor * cell.shard)

    def gather(self, cell: Cell) -> float:
        """Return the seconds in which a step gathers sharded weights."""
        whole = self.profile_at(cell.rows)
        _, link = self.mesh_links(cell)
        return gather_seconds(whole, cell.tensor, cell.shard, link)

    def speeds(self, cell: Cell) -> tuple[float, ...]:
        """Return the speeds of a cell's ranks, copy by copy; empty if all are equal."""
        if self.cluster is None:
            return ()
        return tuple(node.speed for node in cluster_nodes(self.cluster, cell))

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""
        return Judge(
            self.cost(cell),
            self.workload.memory,
            self.processors(cell)[0],
            self.workload.passes,
            cell.copies,
            uneven=self.cluster is not None,
            recorded=self.workload.recorded,
            gather=self.gather(cell),
            runtime=self.limits.runtime,
        )

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, and the ways to cut a sequence."""
        cuts = partial(self.cuts, cell)
        if self.limits.weights > 1 or self.limits.skip:
            return Setting(cell.ranks, cell.microbatches, cuts)
        least_time = partial(self.least_time, cell)
        return Setting(cell.ranks, cell.microbatches, cuts, least_time)

    def cuts(self, cell: Cell, slices: int) -> list[Cuts]:
        """Return the ways to cut a sequence into slices: equal ones, and planned ones."""
        tokens = self.workload.tokens
        if slices == 1:
            return [(0, tokens)]
        if cell not in self.choices:
            self.choices[cell] = cut_choices(
                cell.ranks,
                cell.microbatches,
                tokens,
                self.cost(cell),
                self.workload.granularity,
                limit=self.limits.slices,
            )
        return [one for one in self.choices[cell] if len(one) == slices + 1]

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat: gather, passes and optimizer."""
        update = _least_update(self.process(cell), cell.ranks)
        passes = self.workload.passes * self._pass_bound(cell)
        return self.gather(cell) + passes + update

    def close_bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat under the memory; infinite if none fits.

        It looks at every placement that the search tries, with the layers of its parts.
        """
        quick = self.bound(cell)
        placements = self.placements(cell)
        if self.limits.weights > 1 or self.limits.skip or not placements:
            return quick  # Chimera and partial paths need more than these placements.
        least = inf
        for placement in placements:
            least = min(least, float(self._placed_bounds(cell, placement).min()))
            if least <= quick:
                return quick
        return least

    def placements(self, cell: Cell) -> list[StagePlacement]:
        """Return the placements of all schedules that the search tries in a cell."""
        most = max(1, min(self.limits.stages, self.workload.layers // cell.ranks))
        single = cell.ranks == 1 and cell.copies == 1
        partition = self.workload.fixed.partition
        limits = replace(self.limits, stages=1 if single else most)
        return [
            one
            for one in allowed_placements(cell.ranks, limits)
            if len(partition) in (0, one.stages_per_rank * cell.ranks)
        ]

    def least_time(self, cell: Cell, placement: StagePlacement, cuts: Cuts) -> float:
        """Return a time that no step on this placement with these cuts can beat."""
        times = self._slice_times(cell)
        return float(self._placed_bounds(cell, placement)[times.class_of(cuts)])

    def _placed_bounds(self, cell: Cell, placement: StagePlacement) -> Floats:
        """Return times that no step on this placement can beat, by classes of cuts."""
        if (cell, placement) in self.placed:
            return self.placed[cell, placement]
        process = self.process(cell)
        layout = self._layout(cell, placement)
        latency, byte = self._sum_link(cell)
        link = self._fastest_hop(cell)
        room = Room(
            process.layer,
            process.embed,
            process.head,
            process.message,
            process.tied,
            self.workload.memory,
            cell.copies,
        )
        load = CellLoad(
            cell.microbatches,
            count_of_share(cell.recomputed, layout.size),
            Hop(link.latency, process.sent / link.bandwidth),
            process.turn,
            latency,
            byte,
            self._channels(cell, process.sent),
        )
        bounds: Floats = placed_bounds(layout, self._slice_times(cell), room, load)
        bounds /= max(self.speeds(cell), default=1.0)
        update = layout.on_ranks(
            layout.of_blocks(
                *(one.update for one in (room.layer, room.embed, room.head))
            )
        )
        bounds = self.gather(cell) + self.workload.passes * bounds + float(update.max())
        self.placed[cell, placement] = bounds
        return bounds

    def _channels(self, cell: Cell, message: float) -> Channels | None:
        """Return what a message costs the channels of its ranks at least, if messages share channels.

        message: bytes of a token.
        """
        network = self.profile(cell).network
        if network.channels is None:
            return None
        link = self._fastest_hop(cell)
        if not network.buffers:
            hop = Hop(link.latency, message / link.bandwidth)
            return Channels(network.channels, hop, hop)
        least = least_byte_seconds(network.buffers, link.latency, link.bandwidth)
        sent, received = (Hop(0.0, message * seconds) for seconds in least)
        return Channels(network.channels, sent, received)

    def _layout(self, cell: Cell, placement: StagePlacement) -> PlacedLayers:
        """Return a placement with its layers, which depend neither on micro-batches nor on shards."""
        speeds = self.speeds(cell)
        key = (self._work_key(cell), cell.ranks, placement, speeds)
        if key not in self.layouts:
            stages = placement.stages(cell.ranks)
            partition = self.workload.fixed.partition
            if not partition:
                slowest = (
                    [min(speeds[rank :: cell.ranks]) for rank in range(cell.ranks)]
                    if speeds
                    else []
                )
                ranks = tuple(stage.rank for stage in stages)
                partition = balance_layers(
                    self.process(cell), self.workload.tokens, ranks, slowest
                )
            self.layouts[key] = PlacedLayers(stages, partition)
        return self.layouts[key]

    def _slice_times(self, cell: Cell) -> LeastBlockTimes:
        key = self._work_key(cell)
        if key not in self.slice_times:
            self.slice_times[key] = least_block_times(
                replace(self.process(cell), tokens=self.workload.tokens),
                self.most_slices,
                self.limits.split,
                self.workload.granularity,
            )
        return self.slice_times[key]

    def _sum_link(self, cell: Cell) -> tuple[float, float]:
        """Return the seconds of the latencies of a sum over the copies, and of each byte of it.

        They are 0 where copies do not sum over equal links.
        """
        if cell.copies == 1 or self.processors(cell)[0] is not None:
            return 0.0, 0.0
        if self.machines is None:
            network = self.profile_at(cell.rows).network
            if self.cluster is not None or isinstance(network.latency, tuple):
                return 0.0, 0.0
            link = slowest_sum_link(network)
        else:
            link = self.machines.copies_link(cell)
        steps = 2 * (cell.copies - 1)
        return steps * link.latency, steps / cell.copies / link.bandwidth

    def estimate(self, cell: Cell) -> Estimate:
        """Return about what the best schedule of a cell takes, without building one.

        It counts half the bubble of 1f1b, and its memory on the first rank and on the first one
        that recomputes nothing.
        """
        process = self.process(cell)
        forward, backward = self._work(cell)
        ranks, count = cell.ranks, cell.microbatches
        rank_work = (forward * (1 + cell.recomputed) + backward) / ranks
        hop = self.least_hop(cell) * (ranks - 1)
        bubble = (ranks - 1) * rank_work / 2
        seconds = self.workload.passes * (count * rank_work + bubble + 2 * hop)
        seconds += self.gather(cell) + _least_update(process, ranks)
        blocks = process.blocks(process.layers, first=True, last=True)
        weights = sum(n * (one.weights + one.gathered) for n, one in blocks) / ranks
        seconds += self._sum_seconds(cell, weights / TENSORS_PER_WEIGHT)
        tokens = self.workload.tokens
        message = process.message * tokens
        held = process.layers / ranks * process.layer.held * tokens
        again = count_of_share(cell.recomputed, ranks)
        peaks = [0.0]
        if again:
            peaks.append(min(count, ranks) * message + held)
        if again < ranks:
            peaks.append(min(count, ranks - again) * (held + message))
        return Estimate(seconds, weights + max(peaks))

    def _work(self, cell: Cell) -> tuple[float, float]:
        """Return the seconds of a whole forward and backward of the model."""
        key = self._work_key(cell)
        if key not in self.works:
            process, tokens = self.process(cell), self.workload.tokens
            blocks = process.blocks(process.layers, first=True, last=True)
            forward, backward = (
                sum(n * one.fit(op).curve.of(tokens, 0) for n, one in blocks)
                for op in (Op.F, Op.B)
            )
            self.works[key] = (forward, backward)
        return self.works[key]

    def _work_key(self, cell: Cell) -> object:
        """Return what the times of a process depend on."""
        return (
            cell.rows,
            cell.tensor,
            self.mesh_links(cell)[0],
            self.processors(cell)[1],
        )

    def _sum_seconds(self, cell: Cell, gradients: float) -> float:
        """Return the seconds of a ring that sums gradients over the copies of a rank."""
        if cell.copies == 1:
            return 0.0
        link = slowest_sum_link(self.profile_at(cell.rows).network)
        if self.machines is not None:
            link = self.machines.copies_link(cell)
        steps = 2 * (cell.copies - 1)
        return steps * (link.latency + gradients / cell.copies / link.bandwidth)

    def _pass_bound(self, cell: Cell) -> float:
        """Return a time that no pass of this cell can beat.

        It depends neither on the shards nor on the share that is recomputed, unless that is
        everything. So many cells have the same bound.
        """
        hop = self.least_hop(cell)
        fastest = max(self.speeds(cell), default=1.0)
        again = cell.recomputed == 1.0
        processors, slowdown = self.processors(cell)
        least_key = (cell.rows, cell.tensor, self.mesh_links(cell)[0], slowdown)
        copies = 1 if processors is None else cell.copies
        sizes = (cell.ranks, cell.microbatches, copies)
        key = (least_key, sizes, again, hop, fastest, processors)
        if key in self.bounds:
            return self.bounds[key]
        if least_key not in self.least:
            profile = self.process(cell)
            visited = visited_layers(profile.layers, self.limits.skip)
            self.least[least_key] = least_times(
                replace(profile, layers=visited, tokens=self.workload.tokens),
                self.most_slices,
                self.limits.split,
                self.workload.granularity,
            )
        least = replace(self.least[least_key], hop=hop)
        if again:
            least = with_recomputation(least)
        bound_of = partial_profile_bound if self.limits.skip else profile_bound
        weights = self.limits.weights
        bound = bound_of(least, cell.ranks, cell.microbatches, weights) / fastest
        if processors is not None:
            work = _least_work(least) * cell.microbatches * cell.copies
            bound = max(bound, work / processors)
        self.bounds[key] = bound
        return bound

    def least_hop(self, cell: Cell) -> float:
        """Return the least time of a message between two ranks of a cell."""
        link = self._fastest_hop(cell)
        shortest = self.process(cell).sent * self.workload.granularity
        return link.latency + shortest / link.bandwidth

    def _fastest_hop(self, cell: Cell) -> Link:
        """Return the fastest link between two ranks of a cell."""
        if self.machines is not None:
            return self.machines.fastest_hop(cell)
        return fastest_link(self.profile(cell).network)

    @property
    def most_slices(self) -> int:
        """The most slices of a sequence: as many as the limit allows, and as there are cuts."""
        cuts = self.workload.tokens // self.workload.granularity
        return max(1, min(self.limits.slices, cuts))

    def least_bytes(self, cell: Cell) -> float:
        """Return bytes that the fullest device of a cell holds at least, with any plan.

        When the forward of a micro-batch ends, the devices together hold all weights and all
        activations of this micro-batch, and the fullest one holds at least the mean. Parts
        that are recomputed hold only their inputs, so where there are some, only the weights
        count. Layers that may be left out do not count either.
        """
        profile = self.profile(cell)
        whole = profile.part(profile.layers, first=True, last=True)
        held = whole.weights
        if not cell.recomputed:
            held += whole.held * self.workload.tokens * (1.0 - self.limits.skip)
        return held / cell.ranks


def _least_work(times: LeastTimes) -> float:
    """Seconds that one micro-batch takes at least, over all ranks."""
    return times.layers * sum(times.layer) + sum(times.embed) + sum(times.head)


def _least_update(profile: Profile, ranks: int) -> float:
    """Seconds of the optimizer at least: its mean over the ranks."""
    return sum(profile.update((profile.layers,))) / ranks
