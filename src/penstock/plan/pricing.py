"""What the divisions of a workload cost: in the units of the papers, or by profiles of the model.

UnitPricing      a forward of a micro-batch on a rank takes 1; sizes in micro-batches
ProfilePricing   seconds and bytes, from profiles for several numbers of rows of a micro-batch

A cost together with the profile it was measured in, as the options of a command give them.

from numbers        UnitCost       time in forwards of a micro-batch, memory in micro-batches
from a profile      ProfileCost    seconds and bytes; also the layers, tokens and device of a model

Where the ranks of a division stand, and over which links they talk.

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
from typing import NamedTuple

from penstock.config import LOSS_CHUNK, ModelConfig, is_recording, precision_of
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
from penstock.cost.sizes import layer_matrices
from penstock.errors import ShapeError
from penstock.ir.plan import Facts, Plan
from penstock.ir.table import Floats
from penstock.ir.timeline import PAPER_UNITS, REAL_UNITS, Timeline, Units
from penstock.partition import even_partition
from penstock.plan.candidates import Evaluator
from penstock.plan.slices import cut_choices
from penstock.plan.space import (
    Cuts,
    Limits,
    PipelineShape,
    StagePlacement,
    allowed_placements,
    even_cuts_only,
    limits_of,
    visited_layers,
)
from penstock.plan.space_bound import (
    Channels,
    DivisionLoad,
    Hop,
    LeastBlockTimes,
    PlacedBound,
    PlacedLayers,
    least_block_times,
    mean_bound,
    space_bound,
    tried_bound,
)
from penstock.plan.workload import Division, Fixed, Workload, divisions_of

SHOWN_COPIES = 2  # copies whose links are listed; all others are like these


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal devices in machines, with fast links inside and slow ones between them."""

    per_machine: int
    inside: Link
    between: Link

    def network(self, division: Division) -> Network:
        """Return the links between the ranks of a division's first two copies.

        If some pair of neighbouring copies is not on one machine, the sums of gradients run
        at the pace of the slow links.
        """
        if division.processes <= self.per_machine:
            return Network(self.inside.latency, self.inside.bandwidth, serial=True)
        copies = min(division.copies, SHOWN_COPIES)
        places = [
            (copy, rank) for copy in range(copies) for rank in range(division.ranks)
        ]

        def link(one: tuple[int, int], other: tuple[int, int]) -> Link:
            if one[0] != other[0]:
                return self.copies_link(division)
            machines = {self._machine(division, *place) for place in (one, other)}
            return self.inside if len(machines) == 1 else self.between

        links = [[link(one, other) for other in places] for one in places]
        latency = tuple(tuple(one.latency for one in row) for row in links)
        bandwidth = tuple(tuple(one.bandwidth for one in row) for row in links)
        return Network(latency, bandwidth, serial=True)

    def copies_link(self, division: Division) -> Link:
        """Return the slowest link between copies of a rank."""
        group = division.copies * division.tensor * division.shard
        return self._link(
            division, division.side_by_side and self.per_machine % group == 0
        )

    def mesh_links(self, division: Division) -> tuple[Link, Link]:
        """Return the links between the processes of a rank: of `tensor`, and of `shard`.

        The processes of a rank are neighbours, and those of a tensor row come first.
        """
        row = division.tensor
        return (
            self._link(division, self.per_machine % row == 0),
            self._link(division, self.per_machine % (row * division.shard) == 0),
        )

    def fastest_hop(self, division: Division) -> Link:
        """Return the fastest link between two ranks of a copy."""
        distance = division.tensor * division.shard
        if division.side_by_side:
            distance *= division.copies
        return self._link(division, distance < self.per_machine)

    def _link(self, division: Division, is_near: bool) -> Link:
        """Return the link inside a machine if processes are near, or if all of a division are on one machine."""
        near = is_near or division.processes <= self.per_machine
        return self.inside if near else self.between

    def _machine(self, division: Division, copy: int, rank: int) -> int:
        """Return the machine of a rank's first device."""
        number = copy * division.ranks + rank
        if division.side_by_side:
            number = rank * division.copies + copy
        return number * division.tensor * division.shard // self.per_machine


def cluster_network(cluster: Cluster, division: Division) -> Network:
    """Return the links between all ranks of a division, the ranks of its first copy first."""
    places = _places(cluster, division)

    def matrix(pairs: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(pairs[one][other] for other in places) for one in places)

    return Network(matrix(cluster.latency), matrix(cluster.bandwidth), cluster.serial)


def cluster_nodes(cluster: Cluster, division: Division) -> list[Node]:
    """Return the nodes of all ranks of a division, the ranks of its first copy first."""
    return [cluster.nodes[place] for place in _places(cluster, division)]


def _places(cluster: Cluster, division: Division) -> list[int]:
    """Return the number of the node of each rank, copy by copy."""
    count = division.copies * division.ranks
    if count > len(cluster.nodes):
        raise ShapeError(f"there are {len(cluster.nodes)} nodes, but {count} ranks")
    if not division.side_by_side:
        return list(range(count))
    return [
        rank * division.copies + copy
        for copy in range(division.copies)
        for rank in range(division.ranks)
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
                "  leave --cluster out, or plan with parallel.tp=1 and parallel.dp_shard=1"
            )
        profile = self.profile
        rows = plan.facts.get("rows")
        if self.profiles is not None and isinstance(rows, int):
            profile = self.profiles.at(rows)
        parts = plan.schedule.parts
        partition = plan.partition or even_partition(profile.layers, parts)
        workload = Workload(
            profile.layers, self.tokens, 1, ranks, fixed=Fixed(partition=partition)
        )
        pricing = ProfilePricing(workload, lambda rows: profile, cluster=cluster)
        division = Division(1, ranks, tensor, shard, 1, profile.rows, 0.0)
        cost = replace(pricing.cost(division), recompute=plan.recompute)
        cost.profile.check(partition, ranks)
        gather = pricing.gather(division)
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


# ---------------------------------------------------------------- the divisions of a workload
class Estimate(NamedTuple):
    """About how long a step of a division takes, and how much its fullest device holds."""

    seconds: float
    bytes: float


NO_LINK = Link(0.0, inf)  # of a process that is alone
ANY_NUMBER_OF_LAYERS = 1 << 30


@dataclass(frozen=True, slots=True)
class UnitPricing:
    """Costs in the units of the papers; a division is a number of ranks and micro-batches."""

    cost: Cost
    memory: float | None = None  # micro-batches of a rank's work
    limits: Limits = field(default_factory=Limits)

    def evaluator(self, division: Division) -> Evaluator:
        """Return what times and weighs the schedules of a division."""
        return Evaluator(self.cost, self.memory, runtime=self.limits.runtime)

    def pipeline(self, division: Division) -> PipelineShape:
        """Return the pipeline of a division, with slices of equal length."""
        limits = limits_of(division, self.limits, ANY_NUMBER_OF_LAYERS)
        pipeline = PipelineShape(
            division, self.evaluator(division), limits, even_cuts_only
        )
        if self.limits.skip or self.limits.weights > 1:
            return pipeline  # Micro-batches must visit all stages, of which there is one copy.

        def least_time(placement: StagePlacement, cuts: Cuts) -> float:
            return self._bound(division, placement.stages_per_rank, len(cuts) - 1)

        return replace(pipeline, least_time=least_time)

    def _bound(self, division: Division, stages: int, slices: int) -> float:
        """Return a time that no plan with at most so many stages of a rank and slices can beat, if units have one."""
        if not isinstance(self.cost, UnitCost):
            return 0.0
        return space_bound(
            self.cost,
            division.ranks,
            division.microbatches,
            stages,
            slices,
            self.memory,
            self.limits.split,
            self.limits.weights,
            self.limits.skip,
        )

    def bound(self, division: Division) -> float:
        """Return a time that no step of this division can beat."""
        return self._bound(division, self.limits.stages, self.limits.slices)

    def close_bound(self, division: Division) -> float:
        """Return a tighter bound, which looks at every placement that the search tries."""
        quick = self.bound(division)
        if self.limits.skip or self.limits.weights > 1:
            return quick
        if not isinstance(self.cost, UnitCost):
            return quick
        close = tried_bound(
            self.cost, division.ranks, division.microbatches, self.limits, self.memory
        )
        return max(quick, close)

    def estimate(self, division: Division) -> Estimate:
        """Return the bound. There is only one division, so nothing is compared."""
        return Estimate(self.bound(division), 0.0)

    def least_bytes(self, division: Division) -> float:
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

    def _cost(self, division: Division) -> PlacedCost:
        """Return the cost of any schedule of a division."""
        return PlacedCost(
            self.profile(division),
            self.workload.tokens,
            division.recomputed,
            partition=self.workload.fixed.partition,
            speeds=self.speeds(division),
        )

    # ------------------------------------------------------------ one process of a division
    def profile(self, division: Division) -> Profile:
        """Return the profile of a process of a division, with the links between its ranks."""
        place = replace(division, microbatches=1, rows=1, recomputed=0.0)
        return replace(self.process(division), network=self.network(place))

    def process(self, division: Division) -> Profile:
        """Return the profile of a process of a division; its links between ranks do not count."""
        worker = self.worker(division)
        if division.shard > 1:
            _, shard_link = self.mesh_links(division)
            worker = worker._replace(shard=division.shard, shard_link=shard_link)
        return self.profile_of(worker)

    def worker(self, division: Division) -> Process:
        """Return what the times of a process depend on: neither micro-batches nor shards."""
        link, _ = self.mesh_links(division)
        return Process(
            division.rows, division.tensor, link, self.processors(division)[1]
        )

    def _profile_of(self, process: Process) -> Profile:
        profile = self.profile_at(process.rows)
        if self.workload.config is not None:
            profile = send_as(profile, self.workload.config.run.comm_dtype)
        return mesh_profile(
            profile,
            process.tensor,
            process.shard,
            process.link,
            process.slowdown,
            process.shard_link,
        )

    def _network(self, division: Division) -> Network:
        if self.machines is not None:
            return self.machines.network(division)
        if self.cluster is not None:
            return cluster_network(self.cluster, division)
        return self.profile_at(division.rows).network

    def mesh_links(self, division: Division) -> tuple[Link, Link]:
        """Return the links between the processes of a rank: of `tensor`, and of `shard`.

        Unless the machines are known, any pair of processes may have the slowest link.
        """
        if self.machines is not None:
            return self.machines.mesh_links(division)
        if division.tensor * division.shard == 1:
            return NO_LINK, NO_LINK
        link = slowest_sum_link(self._network(division))
        return link, link

    def processors(self, division: Division) -> tuple[int | None, float]:
        """Return the processors that ranks share, and how much longer a rank computes on them."""
        processors = self.workload.processors
        if processors is None:
            return None, 1.0
        return split_processors(processors, division.tensor * division.shard)

    def gather(self, division: Division) -> float:
        """Return the seconds in which a step gathers sharded weights."""
        whole = self.profile_at(division.rows)
        _, link = self.mesh_links(division)
        return gather_seconds(whole, division.tensor, division.shard, link)

    def speeds(self, division: Division) -> tuple[float, ...]:
        """Return the speeds of a division's ranks, copy by copy; empty if all are equal."""
        if self.cluster is None:
            return ()
        return tuple(node.speed for node in cluster_nodes(self.cluster, division))

    def evaluator(self, division: Division) -> Evaluator:
        """Return what times and weighs the schedules of a division."""
        return Evaluator(
            self.cost(division),
            self.workload.memory,
            self.processors(division)[0],
            self.workload.passes,
            division.copies,
            uneven=self.cluster is not None,
            recorded=self.workload.recorded,
            gather=self.gather(division),
            runtime=self.limits.runtime,
        )

    def pipeline(self, division: Division) -> PipelineShape:
        """Return the pipeline of a division, and the ways to cut a sequence."""
        limits = limits_of(division, self.limits, self.workload.layers)
        cuts = partial(self.cuts, division)
        pipeline = PipelineShape(division, self.evaluator(division), limits, cuts)
        if self.limits.weights > 1 or self.limits.skip:
            return pipeline
        return replace(pipeline, least_time=partial(self.least_time, division))

    def cuts(self, division: Division, slices: int) -> list[Cuts]:
        """Return the ways to cut a sequence into slices: equal ones, and planned ones."""
        if slices == 1:
            return [(0, self.workload.tokens)]
        return [one for one in self.choices(division) if len(one) == slices + 1]

    def _choices(self, division: Division) -> list[Cuts]:
        return cut_choices(
            division.ranks,
            division.microbatches,
            self.workload.tokens,
            self.cost(division),
            self.workload.granularity,
            limit=self.limits.slices,
        )

    def bound(self, division: Division) -> float:
        """Return a time that no step of this division can beat: gather, passes and optimizer."""
        update = _least_update(self.process(division), division.ranks)
        passes = self.workload.passes * self.pass_bound(division)
        return self.gather(division) + passes + update

    def close_bound(self, division: Division) -> float:
        """Return a time that no step of this division can beat under the memory; infinite if none fits.

        It looks at every placement that the search tries, with the layers of its parts.
        """
        quick = self.bound(division)
        placements = self.placements(division)
        if self.limits.weights > 1 or self.limits.skip or not placements:
            return quick  # Chimera and partial paths need more than these placements.
        least = inf
        for placement in placements:
            least = min(least, float(self.placed_bounds(division, placement).min()))
            if least <= quick:
                return quick
        return least

    def placements(self, division: Division) -> list[StagePlacement]:
        """Return the placements of all schedules that the search tries in a division."""
        partition = self.workload.fixed.partition
        limits = limits_of(division, self.limits, self.workload.layers)
        return [
            one
            for one in allowed_placements(division.ranks, limits)
            if len(partition) in (0, one.stages_per_rank * division.ranks)
        ]

    def least_time(
        self, division: Division, placement: StagePlacement, cuts: Cuts
    ) -> float:
        """Return a time that no step on this placement with these cuts can beat."""
        times = self.slice_times(self.worker(division))
        return float(self.placed_bounds(division, placement)[times.class_of(cuts)])

    def _placed_bounds(self, division: Division, placement: StagePlacement) -> Floats:
        """Return times that no step on this placement can beat, by classes of cuts."""
        process = self.process(division)
        layout = self.layout(
            self.worker(division), division.ranks, placement, self.speeds(division)
        )
        link = self._fastest_hop(division)
        load = DivisionLoad(
            division.microbatches,
            count_of_share(division.recomputed, layout.size),
            Hop(link.latency, process.sent / link.bandwidth),
            division.copies,
            self.workload.memory,
            self._least_ring(division),
            self._channels(division, process.sent),
        )
        times = self.slice_times(self.worker(division))
        bounds = PlacedBound(layout, times, process, load).least_times()
        bounds /= max(self.speeds(division), default=1.0)
        update = layout.on_ranks(layout.of_blocks(process, "update"))
        return (
            self.gather(division) + self.workload.passes * bounds + float(update.max())
        )

    def _channels(self, division: Division, message: float) -> Channels | None:
        """Return what a message costs the channels of its ranks at least, if messages share channels.

        message: bytes of a token.
        """
        network = self.profile(division).network
        if network.channels is None:
            return None
        link = self._fastest_hop(division)
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

    def _ring(self, division: Division) -> Hop:
        """Return the seconds of a ring that sums gradients over the copies of a rank: to start, and for each byte."""
        if division.copies == 1:
            return Hop(0.0, 0.0)
        if self.machines is not None:
            link = self.machines.copies_link(division)
        else:
            link = slowest_sum_link(self.profile_at(division.rows).network)
        steps = 2 * (division.copies - 1)
        return Hop(steps * link.latency, steps / division.copies / link.bandwidth)

    def _least_ring(self, division: Division) -> Hop:
        """Return the least seconds of such a ring: 0 where copies do not sum over equal links."""
        links = self.profile_at(division.rows).network.latency
        uneven = self.cluster is not None or isinstance(links, tuple)
        if self.processors(division)[0] is not None:
            return Hop(0.0, 0.0)
        return (
            Hop(0.0, 0.0) if uneven and self.machines is None else self._ring(division)
        )

    def estimate(self, division: Division) -> Estimate:
        """Return about what the best schedule of a division takes, without building one.

        It counts half the bubble of 1f1b, and its memory on the first rank and on the first one
        that recomputes nothing.
        """
        process = self.process(division)
        forward, backward = self.work(self.worker(division))
        tokens = self.workload.tokens
        ranks, count = division.ranks, division.microbatches
        rank_work = (forward * (1 + division.recomputed) + backward) / ranks
        hop = self.least_hop(division) * (ranks - 1)
        bubble = (ranks - 1) * rank_work / 2
        seconds = self.workload.passes * (count * rank_work + bubble + 2 * hop)
        seconds += self.gather(division) + _least_update(process, ranks)
        blocks = process.blocks(process.layers, first=True, last=True)
        weights = sum(n * (one.weights + one.gathered) for n, one in blocks) / ranks
        ring = self._ring(division)
        seconds += ring.latency + weights / TENSORS_PER_WEIGHT * ring.token
        message = process.message * tokens
        held = process.layers / ranks * process.layer.held * tokens
        again = count_of_share(division.recomputed, ranks)
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
        forward = sum(n * one.F.curve.of(tokens, 0) for n, one in blocks)
        backward = sum(n * one.B.curve.of(tokens, 0) for n, one in blocks)
        return forward, backward

    def pass_bound(self, division: Division) -> float:
        """Return a time that no pass of this division can beat.

        It depends neither on the shards nor on the share that is recomputed, unless that is
        everything. So many divisions have the same bound.
        """
        profile = self.profile_of(self.worker(division))
        times = self.slice_times(self.worker(division)).of_model(
            visited_layers(profile.layers, self.limits.skip),
            self.least_hop(division),
            profile.turn,
            again=division.recomputed == 1.0,
        )
        bound = mean_bound(
            times,
            division.ranks,
            division.microbatches,
            self.limits.weights,
            partial=self.limits.skip > 0,
        )
        bound /= max(self.speeds(division), default=1.0)
        processors, _ = self.processors(division)
        if processors is None:
            return bound
        work = sum(times.work) * division.microbatches * division.copies
        return max(bound, work / processors)

    def least_hop(self, division: Division) -> float:
        """Return the least time of a message between two ranks of a division."""
        link = self._fastest_hop(division)
        shortest = self.process(division).sent * self.workload.granularity
        return link.latency + shortest / link.bandwidth

    def _fastest_hop(self, division: Division) -> Link:
        """Return the fastest link between two ranks of a division."""
        if self.machines is not None:
            return self.machines.fastest_hop(division)
        return fastest_link(self.profile(division).network)

    def least_bytes(self, division: Division) -> float:
        """Return bytes that the fullest device of a division holds at least, with any plan.

        When the forward of a micro-batch ends, the devices together hold all weights and all
        activations of this micro-batch, and the fullest one holds at least the mean. Parts
        that are recomputed hold only their inputs, so where there are some, only the weights
        count. Layers that may be left out do not count either.
        """
        profile = self.profile(division)
        whole = profile.part(profile.layers, first=True, last=True)
        held = whole.weights
        if not division.recomputed:
            held += whole.held * self.workload.tokens * (1.0 - self.limits.skip)
        return held / division.ranks


def _least_update(profile: Profile, ranks: int) -> float:
    """Seconds of the optimizer at least: its mean over the ranks."""
    return sum(profile.update((profile.layers,))) / ranks


# ---------------------------------------------------------------- questions
Pricing = UnitPricing | ProfilePricing
UNIT_COSTS = "unit costs (F = 1: a forward of a micro-batch on a rank takes 1)"
IGNORED_IN_UNITS = "that micro-batches and messages delay each other"
IGNORED = (
    "that micro-batches and messages delay each other, that some links are slower than "
    "the fastest one, and memory that is needed for a moment only"
)


@dataclass(frozen=True, slots=True)
class Question:
    """A workload, and what its plans cost."""

    workload: Workload
    pricing: Pricing
    units: Units = REAL_UNITS
    facts: Facts = ()  # what a plan.json says about the assumptions
    ignored: str = IGNORED  # what the bound leaves out
    source: str = ""  # where the times come from, for people
    analytic: bool = False  # whether a formula gave the times, and nothing was measured
    basis: str = ""  # the precision, and data sheet or measurement: the first line
    # The shares of a predicted time between which steps may lie (`Profile.spread`); None in units of the papers.
    spread: tuple[float, float] | None = None
    # Operations per second of a device by its data sheet, and of training on a token; 0 if they are not known.
    peak_flops: float = 0.0
    token_flops: float = 0.0

    def speed_of(self, step: float) -> float:
        """The tokens per second of each device if a step takes so long; 0 without a model."""
        workload = self.workload
        if not self.units.seconds:
            return 0.0
        return workload.tokens * workload.batch / step / workload.devices

    def mfu_of(self, step: float) -> float | None:
        """The share of a device's peak that such a step uses; None if the peak is not known."""
        if not self.peak_flops:
            return None
        return self.speed_of(step) * self.token_flops / self.peak_flops

    @property
    def limits(self) -> Limits:
        """What its plans must keep to, besides the memory."""
        return self.pricing.limits

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


def unit_workload(ranks: int, microbatches: int, memory: float | None) -> Workload:
    """Return the workload of one pipeline of some ranks, whatever its model."""
    fixed = Fixed(
        ranks=ranks,
        microbatches=microbatches,
        copies=1,
        tensor=1,
        shard=1,
        recompute=False,
    )
    return Workload(
        layers=ANY_NUMBER_OF_LAYERS,
        tokens=1,
        batch=microbatches,
        devices=ranks,
        memory=memory,
        fixed=fixed,
    )


def unit_question(
    ranks: int, microbatches: int, cost: UnitCost, memory: float | None, limits: Limits
) -> Question:
    """Ask for a pipeline of some ranks in the units of the papers."""
    facts: Facts = (
        ("memory", memory),
        ("forward", cost.F),
        ("backward", cost.B),
        ("comm", cost.comm),
    )
    return Question(
        unit_workload(ranks, microbatches, memory),
        UnitPricing(cost, memory, limits),
        PAPER_UNITS,
        facts,
        IGNORED_IN_UNITS,
        UNIT_COSTS,
        basis=f"with {UNIT_COSTS}",
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
    first_division = next(divisions_of(workload))
    profile = profile_at(first_division.rows)
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
            loss_chunk=LOSS_CHUNK,
        )

    launched = "recorded once and replayed" if recorded else "launched one by one"
    source = (
        f"analytic profile of the {gpu.name}, by formula and not measured: "
        f"kernels {launched}, layers and loss not compiled"
    )
    machines = Machines(gpu.per_machine, gpu.inside, gpu.between)
    question = profile_question(workload, profile_at, limits, source, machines)
    return replace(
        question,
        peak_flops=gpu.peak[precision],
        token_flops=_training_operations(model, workload.tokens),
    )


def _training_operations(model: ModelConfig, tokens: int) -> float:
    """The operations of training on one token of a sequence, without what is recomputed."""
    matrices = model.layers * sum(
        one.rows * one.columns for one in layer_matrices(model)
    )
    matrices += model.vocab_size * model.hidden_size
    return 6.0 * matrices + 12.0 * model.layers * model.hidden_size * tokens
