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
    PlacedBound,
    PlacedLayers,
    least_block_times,
    mean_bound,
    space_bound,
    tried_bound,
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
        group = cell.copies * cell.tensor * cell.shard
        return self._link(cell, cell.side_by_side and self.per_machine % group == 0)

    def mesh_links(self, cell: Cell) -> tuple[Link, Link]:
        """Return the links between the processes of a rank: of `tensor`, and of `shard`.

        The processes of a rank are neighbours, and those of a tensor row come first.
        """
        row = cell.tensor
        return (
            self._link(cell, self.per_machine % row == 0),
            self._link(cell, self.per_machine % (row * cell.shard) == 0),
        )

    def fastest_hop(self, cell: Cell) -> Link:
        """Return the fastest link between two ranks of a copy."""
        distance = cell.tensor * cell.shard
        if cell.side_by_side:
            distance *= cell.copies
        return self._link(cell, distance < self.per_machine)

    def _link(self, cell: Cell, is_near: bool) -> Link:
        """Return the link inside a machine if processes are near, or if all of a cell are on one machine."""
        near = is_near or cell.processes <= self.per_machine
        return self.inside if near else self.between

    def _machine(self, cell: Cell, copy: int, rank: int) -> int:
        """Return the machine of a rank's first device."""
        number = copy * cell.ranks + rank
        if cell.side_by_side:
            number = rank * cell.copies + copy
        return number * cell.tensor * cell.shard // self.per_machine


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
        ranks = plan.schedule.ranks
        tensor, shard = plan.mesh
        if cluster is not None and ranks > len(cluster.nodes):
            raise ShapeError(
                f"the plan has {ranks} ranks, but the cluster has "
                f"{len(cluster.nodes)} nodes"
            )
        if cluster is not None and tensor * shard > 1:
            raise ShapeError(
                f"a rank of the plan is tensor {tensor} x shard {shard} processes, but a "
                "cluster.toml says on which node a rank is, not its processes\n"
                "  leave --cluster out, or plan with mesh.tensor=1 and mesh.shard=1"
            )
        profile = self.profile
        rows = plan.facts.get("rows")
        if self.profiles is not None and isinstance(rows, int):
            profile = self.profiles.at(rows)
        partition = plan.partition or self.partition(plan.schedule)
        workload = Workload(
            profile.layers, self.tokens, 1, ranks, fixed=Fixed(partition=partition)
        )
        pricing = ProfilePricing(workload, lambda rows: profile, cluster=cluster)
        cell = Cell(1, ranks, tensor, shard, 1, profile.rows, 0.0)
        cost = replace(pricing.cost(cell), recompute=plan.recompute)
        cost.profile.check(partition, ranks)
        gather = pricing.gather(cell)
        return replace(
            self, cost=cost, profile=cost.profile, gather=gather, shard=shard
        )


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


# ---------------------------------------------------------------- the cells of a workload
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

    cost: Cost
    memory: float | None = None  # micro-batches of a rank's work
    limits: Limits = field(default_factory=Limits)

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""
        return Judge(self.cost, self.memory, runtime=self.limits.runtime)

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, with slices of equal length."""
        setting = Setting(cell.ranks, cell.microbatches, even_cuts_only)
        if self.limits.skip or self.limits.weights > 1:
            return setting  # Micro-batches must visit all stages, of which there is one copy.

        def least_time(placement: StagePlacement, cuts: Cuts) -> float:
            return self._bound(cell, placement.stages_per_rank, len(cuts) - 1)

        return replace(setting, least_time=least_time)

    def _bound(self, cell: Cell, stages: int, slices: int) -> float:
        """Return a time that no plan with at most so many stages of a rank and slices can beat, if units have one."""
        if not isinstance(self.cost, UnitCost):
            return 0.0
        return space_bound(
            self.cost,
            cell.ranks,
            cell.microbatches,
            stages,
            slices,
            self.memory,
            self.limits.split,
            self.limits.weights,
            self.limits.skip,
        )

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""
        return self._bound(cell, self.limits.stages, self.limits.slices)

    def close_bound(self, cell: Cell) -> float:
        """Return a tighter bound, which looks at every placement that the search tries."""
        quick = self.bound(cell)
        if self.limits.skip or self.limits.weights > 1:
            return quick
        assert isinstance(self.cost, UnitCost)
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


class Process(NamedTuple):
    """What the profile of a process depends on."""

    rows: int
    tensor: int
    link: Link  # between the processes of `tensor`
    slowdown: float = (
        1.0  # how many times longer it computes, because processors are shared
    )
    shard: int = 1
    shard_link: Link = NO_LINK


@dataclass(eq=False)
class ProfilePricing:
    """Costs by profiles. `profile_at` returns the profile for a number of rows.

    Links are those of the profile, of equal `machines`, or of a `cluster`. Whatever takes long is computed once.
    """

    workload: Workload
    profile_at: Callable[[int], Profile]
    limits: Limits = field(default_factory=Limits)
    machines: Machines | None = None
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        self.cost = cache(self._cost)
        self.profile_of = cache(self._profile_of)
        self.network = cache(self._network)
        self.work = cache(self._work)
        self.slice_times = cache(self._slice_times)
        self.layout = cache(self._layout)
        self.placed_bounds = cache(self._placed_bounds)
        self.choices = cache(self._choices)

    def _cost(self, cell: Cell) -> PlacedCost:
        """Return the cost of any schedule of a cell."""
        return PlacedCost(
            self.profile(cell),
            self.workload.tokens,
            cell.recomputed,
            partition=self.workload.fixed.partition,
            speeds=self.speeds(cell),
        )

    # ------------------------------------------------------------ one process of a cell
    def profile(self, cell: Cell) -> Profile:
        """Return the profile of a process of a cell, with the links between its ranks."""
        place = replace(cell, microbatches=1, rows=1, recomputed=0.0)
        return replace(self.process(cell), network=self.network(place))

    def process(self, cell: Cell) -> Profile:
        """Return the profile of a process of a cell; its links between ranks do not count."""
        worker = self.worker(cell)
        if cell.shard > 1:
            _, shard_link = self.mesh_links(cell)
            worker = worker._replace(shard=cell.shard, shard_link=shard_link)
        return self.profile_of(worker)

    def worker(self, cell: Cell) -> Process:
        """Return what the times of a process depend on: neither micro-batches nor shards."""
        link, _ = self.mesh_links(cell)
        return Process(cell.rows, cell.tensor, link, self.processors(cell)[1])

    def _profile_of(self, process: Process) -> Profile:
        profile = self.profile_at(process.rows)
        if self.workload.config is not None:
            profile = send_as(profile, self.workload.config.run.messages)
        return mesh_profile(
            profile,
            process.tensor,
            process.shard,
            process.link,
            process.slowdown,
            process.shard_link,
        )

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
        if slices == 1:
            return [(0, self.workload.tokens)]
        return [one for one in self.choices(cell) if len(one) == slices + 1]

    def _choices(self, cell: Cell) -> list[Cuts]:
        return cut_choices(
            cell.ranks,
            cell.microbatches,
            self.workload.tokens,
            self.cost(cell),
            self.workload.granularity,
            limit=self.limits.slices,
        )

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat: gather, passes and optimizer."""
        update = _least_update(self.process(cell), cell.ranks)
        passes = self.workload.passes * self.pass_bound(cell)
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
            least = min(least, float(self.placed_bounds(cell, placement).min()))
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
        times = self.slice_times(self.worker(cell))
        return float(self.placed_bounds(cell, placement)[times.class_of(cuts)])

    def _placed_bounds(self, cell: Cell, placement: StagePlacement) -> Floats:
        """Return times that no step on this placement can beat, by classes of cuts."""
        process = self.process(cell)
        layout = self.layout(
            self.worker(cell), cell.ranks, placement, self.speeds(cell)
        )
        latency, byte = self._sum_link(cell)
        link = self._fastest_hop(cell)
        load = CellLoad(
            cell.microbatches,
            count_of_share(cell.recomputed, layout.size),
            Hop(link.latency, process.sent / link.bandwidth),
            cell.copies,
            self.workload.memory,
            latency,
            byte,
            self._channels(cell, process.sent),
        )
        times = self.slice_times(self.worker(cell))
        bounds = PlacedBound(layout, times, process, load).least_times()
        bounds /= max(self.speeds(cell), default=1.0)
        update = layout.on_ranks(layout.of_blocks(process, "update"))
        return self.gather(cell) + self.workload.passes * bounds + float(update.max())

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

    def _layout(
        self,
        worker: Process,
        ranks: int,
        placement: StagePlacement,
        speeds: tuple[float, ...],
    ) -> PlacedLayers:
        """Return a placement with its layers, which depend neither on micro-batches nor on shards."""
        stages = placement.stages(ranks)
        partition = self.workload.fixed.partition
        if not partition:
            slowest = [min(speeds[rank::ranks]) for rank in range(ranks) if speeds]
            partition = balance_layers(
                self.profile_of(worker),
                self.workload.tokens,
                tuple(stage.rank for stage in stages),
                slowest,
            )
        return PlacedLayers(stages, partition)

    def _slice_times(self, worker: Process) -> LeastBlockTimes:
        cuts = self.workload.tokens // self.workload.granularity
        return least_block_times(
            replace(self.profile_of(worker), tokens=self.workload.tokens),
            max(1, min(self.limits.slices, cuts)),
            self.limits.split,
            self.workload.granularity,
        )

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
        forward, backward = self.work(self.worker(cell))
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

    def _work(self, worker: Process) -> tuple[float, float]:
        """Return the seconds of a whole forward and backward of the model."""
        profile, tokens = self.profile_of(worker), self.workload.tokens
        blocks = profile.blocks(profile.layers, first=True, last=True)
        forward, backward = (
            sum(n * one.fit(op).curve.of(tokens, 0) for n, one in blocks)
            for op in (Op.F, Op.B)
        )
        return forward, backward

    def _sum_seconds(self, cell: Cell, gradients: float) -> float:
        """Return the seconds of a ring that sums gradients over the copies of a rank."""
        if cell.copies == 1:
            return 0.0
        link = slowest_sum_link(self.profile_at(cell.rows).network)
        if self.machines is not None:
            link = self.machines.copies_link(cell)
        steps = 2 * (cell.copies - 1)
        return steps * (link.latency + gradients / cell.copies / link.bandwidth)

    def pass_bound(self, cell: Cell) -> float:
        """Return a time that no pass of this cell can beat.

        It depends neither on the shards nor on the share that is recomputed, unless that is
        everything. So many cells have the same bound.
        """
        profile = self.profile_of(self.worker(cell))
        times = self.slice_times(self.worker(cell)).of_model(
            visited_layers(profile.layers, self.limits.skip),
            self.least_hop(cell),
            profile.turn,
            again=cell.recomputed == 1.0,
        )
        bound = mean_bound(
            times,
            cell.ranks,
            cell.microbatches,
            self.limits.weights,
            partial=self.limits.skip > 0,
        )
        bound /= max(self.speeds(cell), default=1.0)
        processors, _ = self.processors(cell)
        if processors is None:
            return bound
        work = sum(times.work) * cell.microbatches * cell.copies
        return max(bound, work / processors)

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
