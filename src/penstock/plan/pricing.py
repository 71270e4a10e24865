"""What the cells of a workload cost: in the units of the papers, or by profiles of the model.

UnitPricing      a forward of a micro-batch on a rank takes 1; sizes in micro-batches
ProfilePricing   seconds and bytes, from profiles for several numbers of rows of a micro-batch

A cost together with the profile it was measured in, as the options of a command give them.

from numbers        UnitCost       time in forwards of a micro-batch, memory in micro-batches
from a profile      ProfileCost    seconds and bytes; also the layers, tokens and device of a model

Where the ranks of a cell stand, and over which links they talk.

Devices are numbered machine by machine. Copies of a pipeline can lie one after the other or side by side:

    machines of 4     0  1  2  3 | 4  5  6  7
    in a row          copy 0       copy 1            messages stay inside a machine, sums of gradients leave it
    side by side      r0 r0 r1 r1  r2 r2 r3 r3       sums stay inside a machine, messages leave it

A cluster has its own speed for each node and its own link for each pair; process 2 of a plan runs on node 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import NamedTuple, Protocol

from penstock.config import ModelConfig, is_recording, precision_of
from penstock.cost.cluster import Cluster, Node
from penstock.cost.cost import Cost, UnitCost
from penstock.cost.gpus import Gpu, analytic_profile
from penstock.cost.mesh import gather_seconds, mesh_profile, split_processors
from penstock.cost.network import (
    Link,
    Network,
    fastest_link,
    least_byte_seconds,
    slowest_sum_link,
)
from penstock.cost.placed import PlacedCost, balance_layers, count_of_share
from penstock.cost.profile import TENSORS_PER_WEIGHT, Profile, RowProfiles, send_as
from penstock.errors import ShapeError
from penstock.ir.action import Op
from penstock.ir.plan import Facts, Plan
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.ir.timeline import PAPER_UNITS, REAL_UNITS, Timeline, Units
from penstock.partition import even_partition
from penstock.plan.candidates import Judge
from penstock.plan.slices import cut_choices
from penstock.plan.space import (
    Cuts,
    Limits,
    Setting,
    StagePlacement,
    allowed_placements,
    even_cuts_only,
    visited_layers,
)
from penstock.plan.space_bound import (
    CellLoad,
    Channels,
    Hop,
    LeastBlockTimes,
    LeastTimes,
    PlacedLayers,
    Room,
    least_block_times,
    least_times,
    partial_profile_bound,
    partial_unit_bound,
    placed_bounds,
    profile_bound,
    space_bound,
    tried_bound,
    with_recomputation,
)
from penstock.plan.workload import Cell, Fixed, Workload, cells_of

SHOWN_COPIES = 2  # copies whose links are listed; all others are like these


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal devices in machines, with fast links inside and slow ones between them."""

    per_machine: int
    inside: Link
    between: Link

    def network(self, cell: Cell) -> Network:
        """Return the links between the ranks of a cell's first two copies.

        If some pair of neighbouring copies is not on one machine, the sums of gradients run
        at the pace of the slow links.
        """
        if cell.processes <= self.per_machine:
            return Network(self.inside.latency, self.inside.bandwidth, serial=True)
        copies = min(cell.copies, SHOWN_COPIES)
        places = [(copy, rank) for copy in range(copies) for rank in range(cell.ranks)]

        def link(one: tuple[int, int], other: tuple[int, int]) -> Link:
            if one[0] != other[0]:
                return self.copies_link(cell)
            machines = {self._machine(cell, *place) for place in (one, other)}
            return self.inside if len(machines) == 1 else self.between

        def matrix(value: Callable[[Link], float]) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(value(link(one, other)) for other in places) for one in places
            )

        return Network(
            matrix(lambda one: one.latency),
            matrix(lambda one: one.bandwidth),
            serial=True,
        )

    def copies_link(self, cell: Cell) -> Link:
        """Return the slowest link between copies of a rank."""
        near = cell.processes <= self.per_machine or self._copies_meet(cell)
        return self.inside if near else self.between

    def mesh_links(self, cell: Cell) -> tuple[Link, Link]:
        """Return the links between the processes of a rank: of `tensor`, and of `shard`.

        The processes of a rank are neighbours, and those of a tensor row come first.
        """
        return (
            self._link_inside(cell, cell.tensor),
            self._link_inside(cell, cell.tensor * cell.shard),
        )

    def _link_inside(self, cell: Cell, group: int) -> Link:
        """Return the slowest link inside groups of neighbouring devices."""
        fits = cell.processes <= self.per_machine or self.per_machine % group == 0
        return self.inside if fits else self.between

    def fastest_hop(self, cell: Cell) -> Link:
        """Return the fastest link between two ranks of a copy."""
        distance = cell.tensor * cell.shard
        if cell.side_by_side:
            distance *= cell.copies
        near = cell.processes <= self.per_machine or distance < self.per_machine
        return self.inside if near else self.between

    def _machine(self, cell: Cell, copy: int, rank: int) -> int:
        """Return the machine of a rank's first device."""
        number = copy * cell.ranks + rank
        if cell.side_by_side:
            number = rank * cell.copies + copy
        return number * cell.tensor * cell.shard // self.per_machine

    def _copies_meet(self, cell: Cell) -> bool:
        """Whether all copies of any rank are on one machine."""
        group = cell.copies * cell.tensor * cell.shard
        return cell.side_by_side and self.per_machine % group == 0


def machines_of(gpu: Gpu) -> Machines:
    """Return the machines in which a known GPU comes."""
    return Machines(gpu.per_machine, gpu.inside, gpu.between)


def cluster_network(cluster: Cluster, cell: Cell) -> Network:
    """Return the links between all ranks of a cell, the ranks of its first copy first."""
    places = _places(cluster, cell)

    def matrix(pairs: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(pairs[one][other] for other in places) for one in places)

    return Network(matrix(cluster.latency), matrix(cluster.bandwidth), cluster.serial)


def cluster_nodes(cluster: Cluster, cell: Cell) -> list[Node]:
    """Return the nodes of all ranks of a cell, the ranks of its first copy first."""
    return [cluster.nodes[place] for place in _places(cluster, cell)]


def _places(cluster: Cluster, cell: Cell) -> list[int]:
    """Return the number of the node of each rank, copy by copy."""
    count = cell.copies * cell.ranks
    if count > len(cluster.nodes):
        raise ShapeError(f"there are {len(cluster.nodes)} nodes, but {count} ranks")
    if not cell.side_by_side:
        return list(range(count))
    return [
        rank * cell.copies + copy
        for copy in range(cell.copies)
        for rank in range(cell.ranks)
    ]


# ---------------------------------------------------------------- the price of a plan


@dataclass(frozen=True, slots=True)
class Price:
    """A cost, and the profile it comes from, if it comes from one."""

    cost: Cost
    profile: Profile | None = None
    tokens: int = 0  # tokens of a sequence; only with a profile
    # For other numbers of rows; only with a profile.
    profiles: RowProfiles | None = None
    gather: float = 0.0  # seconds in which a step gathers sharded weights
    shard: int = 1  # processes of a rank that train on different sequences

    def partition(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the layers of each part of an even partition; () without a profile."""
        if self.profile is None:
            return ()
        return even_partition(self.profile.layers, schedule.parts)

    def for_plan(self, plan: Plan, cluster: Cluster | None = None) -> Price:
        """Return the price for one plan: with its own partition, recomputed parts, rows and mesh.

        In a cluster, rank 2 runs on node 2. The processes of a rank have the slowest link of
        the profile between them.
        """
        if self.profile is None:
            return self
        profile = self.profile
        rows = plan.facts.get("rows")
        if self.profiles is not None and isinstance(rows, int):
            profile = self.profiles.at(rows)
        partition = plan.partition or self.partition(plan.schedule)
        ranks = plan.schedule.ranks
        speeds: tuple[float, ...] = ()
        if cluster is not None:
            if ranks > len(cluster.nodes):
                raise ShapeError(
                    f"the plan has {ranks} ranks, but the cluster has "
                    f"{len(cluster.nodes)} nodes"
                )
            profile = replace(profile, network=cluster.network())
            speeds = tuple(node.speed for node in cluster.nodes[:ranks])
        tensor, shard = plan.mesh
        gather = 0.0
        if tensor * shard > 1:
            if cluster is not None:
                raise ShapeError(
                    f"a rank of the plan is tensor {tensor} x shard {shard} processes, but a "
                    "cluster.toml says on which node a rank is, not its processes\n"
                    "  leave --cluster out, or plan with mesh.tensor=1 and mesh.shard=1"
                )
            link = slowest_sum_link(profile.network)
            gather = gather_seconds(profile, tensor, shard, link)
            profile = mesh_profile(profile, tensor, shard, link)
        profile.check(partition, ranks)
        cost = PlacedCost(
            profile,
            self.tokens,
            partition=partition,
            recompute=plan.recompute,
            speeds=speeds,
        )
        return replace(self, cost=cost, profile=profile, gather=gather, shard=shard)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of a step that only a profile knows."""

    tokens: int  # of a sequence
    weights: tuple[float, ...]  # bytes on each rank
    optimizer: float  # seconds of the slowest rank's update
    gather: float  # seconds in which sharded weights are gathered before the first pass
    tokens_per_second: float


def step_facts(price: Price, plan: Plan, timeline: Timeline) -> StepFacts | None:
    """Return the facts of a step that only a profile knows; None without a profile."""
    profile = price.profile
    if profile is None:
        return None
    optimizer = max(price.cost.updates(plan.schedule))
    tokens = price.tokens * profile.rows * len(plan.schedule.microbatches)
    tokens *= price.shard
    seconds = price.gather + timeline.makespan + optimizer
    return StepFacts(
        tokens=price.tokens,
        weights=tuple(timeline.weights.tolist()),
        optimizer=optimizer,
        gather=price.gather,
        tokens_per_second=tokens / seconds,
    )


# ---------------------------------------------------------------- units of the papers


def unit_setting(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    memory: float | None,
    limits: Limits,
) -> Setting:
    """Return a setting in the units of the papers, where all slices have the same length."""
    if limits.skip or limits.weights > 1:
        # The bounds are for micro-batches that visit all stages, of which there is one copy.
        return Setting(ranks, microbatches, even_cuts_only)

    def least_time(placement: StagePlacement, cuts: Cuts) -> float:
        return space_bound(
            cost,
            ranks,
            microbatches,
            placement.stages_per_rank,
            len(cuts) - 1,
            memory,
            limits.split,
        )

    return Setting(ranks, microbatches, even_cuts_only, least_time)


# ---------------------------------------------------------------- the cells of a workload
MeshKey = tuple[int, int, int, Link, Link]  # rows, tensor, shard and their links
LeastKey = tuple[int, int, Link, float]  # rows, tensor and its link, slowdown


class Estimate(NamedTuple):
    """About how long a step of a cell takes, and how much its fullest device holds."""

    seconds: float
    bytes: float


NO_LINK = Link(0.0, inf)  # of a process that is alone


class Pricing(Protocol):
    """What the cells of a workload cost."""

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, and how to cut its sequences."""

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""

    def close_bound(self, cell: Cell) -> float:
        """Return a larger such time, with more work; infinite if no plan fits."""

    def estimate(self, cell: Cell) -> Estimate:
        """Return about how long a step takes and how much a device holds, quickly."""

    def least_bytes(self, cell: Cell) -> float:
        """Return the bytes that the fullest device of a cell holds at least."""


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


# ---------------------------------------------------------------- questions
ANY_NUMBER_OF_LAYERS = 1 << 30
UNITS_OF_PAPERS = "units of the papers: a forward of a micro-batch on a rank takes 1"
IGNORED_IN_UNITS = "that micro-batches and messages delay each other"
IGNORED = (
    "that micro-batches and messages delay each other, that some links are slower than "
    "the fastest one, and memory that is needed for a moment only"
)


@dataclass(frozen=True, slots=True)
class Question:
    """A workload, what its plans cost, and what they must keep to."""

    workload: Workload
    pricing: Pricing
    limits: Limits
    units: Units = REAL_UNITS
    facts: Facts = ()  # what a plan.json says about the assumptions
    ignored: str = IGNORED  # what the bound leaves out
    source: str = ""  # where the times come from, for people
    analytic: bool = False  # whether a formula gave the times, and nothing was measured
    basis: str = ""  # the precision, and data sheet or measurement: the first line
    # The shares of a predicted time between which steps may lie (`Profile.spread`); None in units of the papers.
    spread: tuple[float, float] | None = None

    def range_of(self, step: float) -> tuple[float, float] | None:
        """The times between which a step may lie that is predicted to take `step`; None in units of the papers."""
        if self.spread is None:
            return None
        low, high = self.spread
        return low * step, high * step


def basis_of(profile: Profile) -> str:
    """Name the precision of a profile, and say whether its times were measured."""
    device = dict(profile.device)
    origin = "measured times"
    if device.get("analytic"):
        origin = f"times from the data sheet of the {device.get('name')}"
    return f"in {precision_in(profile)}, with {origin}"


def precision_in(profile: Profile) -> str:
    """Return the type in which the model of a profile computes."""
    device = dict(profile.device)
    return str(device.get("autocast") or device.get("dtype") or "an unknown precision")


def unit_question(
    ranks: int, microbatches: int, cost: UnitCost, memory: float | None, limits: Limits
) -> Question:
    """Ask for a pipeline of some ranks in the units of the papers."""
    fixed = Fixed(
        ranks=ranks,
        microbatches=microbatches,
        copies=1,
        tensor=1,
        shard=1,
        recompute=False,
    )
    workload = Workload(
        layers=ANY_NUMBER_OF_LAYERS,
        tokens=1,
        batch=microbatches,
        devices=ranks,
        memory=memory,
        fixed=fixed,
    )
    facts: Facts = (
        ("memory", memory),
        ("forward", cost.F),
        ("backward", cost.B),
        ("comm", cost.comm),
    )
    return Question(
        workload,
        UnitPricing(cost, memory, limits),
        limits,
        PAPER_UNITS,
        facts,
        IGNORED_IN_UNITS,
        UNITS_OF_PAPERS,
        basis=f"in {UNITS_OF_PAPERS}",
    )


def profile_question(
    workload: Workload,
    profile_at: Callable[[int], Profile],
    limits: Limits,
    source: str,
    machines: Machines | None = None,
    cluster: Cluster | None = None,
) -> Question:
    """Ask for the best plan of a workload by profiles of its model.

    `profile_at` returns the profile for a number of rows; `source` says where it comes from.
    """
    first_cell = next(cells_of(workload))
    profile = profile_at(first_cell.rows)
    facts: Facts = (
        ("memory_bytes", workload.memory),
        ("profile", source),
        ("precision", precision_in(profile)),
        ("tokens", workload.tokens),
    )
    pricing = ProfilePricing(workload, profile_at, limits, machines, cluster)
    return Question(
        workload,
        pricing,
        limits,
        facts=facts,
        source=source,
        analytic=bool(dict(profile.device).get("analytic")),
        basis=basis_of(profile),
        spread=profile.spread,
    )


def gpu_question(
    workload: Workload, model: ModelConfig, gpu: Gpu, limits: Limits
) -> Question:
    """Ask for the best plan on known GPUs, whose times come from a formula."""
    config = workload.config
    assert config is not None
    precision = precision_of(config, on_gpu="bfloat16" in gpu.peak)
    recorded = is_recording(config, on_gpu=True)

    @cache
    def profile_at(rows: int) -> Profile:
        return analytic_profile(
            model,
            workload.tokens,
            rows,
            gpu,
            precision,
            recorded=recorded,
            loss_chunk=config.run.loss_chunk,
        )

    launched = "recorded once and replayed" if recorded else "launched one by one"
    source = (
        f"analytic profile of the {gpu.name}, by formula and not measured: "
        f"kernels {launched}, layers and loss not compiled"
    )
    return profile_question(workload, profile_at, limits, source, machines_of(gpu))
