"""What the cells of a workload cost: in the units of the papers, or by profiles of the model.

UnitPricing      a forward of a micro-batch on a rank takes 1; sizes in micro-batches
ProfilePricing   seconds and bytes, from profiles for several numbers of rows of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.cost.cluster import Cluster
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import Profile
from penstock.cost.unit import UnitCost
from penstock.ir.schedule import Schedule
from penstock.plan.candidates import Judge
from penstock.plan.recipes import Cuts, Limits, Setting, even_cuts_only
from penstock.plan.slices.planner import SLICE_COUNTS, CutChoice, cut_choices
from penstock.plan.space import (
    LeastTimes,
    least_hop,
    least_times,
    profile_bound,
    space_bound,
    with_recomputation,
)
from penstock.plan.topology import Machines, cluster_network, cluster_nodes
from penstock.plan.workload import Cell, Workload
from penstock.schedules import make

CostKey = tuple[int, int, int]  # rows, tensor, shard


@dataclass(frozen=True, slots=True)
class UnitPricing:
    """Costs in the units of the papers; a cell is a number of ranks and micro-batches."""

    cost: UnitCost
    memory: float | None = None  # micro-batches of a rank's work
    limits: Limits = field(default_factory=Limits)

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""
        return Judge(self.cost, self.memory)

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, with slices of equal length."""
        return Setting(cell.ranks, cell.microbatches, even_cuts_only)

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""
        return space_bound(
            self.cost,
            cell.ranks,
            cell.microbatches,
            self.limits.stages,
            self.limits.slices,
            self.memory,
            self.limits.split,
        )

    def least_bytes(self, cell: Cell) -> float:
        """Return what every rank must hold at least: one micro-batch."""
        return 1.0


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
    least: dict[CostKey, LeastTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    choices: dict[Cell, list[CutChoice]] = field(
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

    def profile(self, cell: Cell) -> Profile:
        """Return the profile of a cell's micro-batches, with the links of its ranks."""
        profile = self.profile_at(cell.rows)
        if self.machines is not None:
            return replace(profile, network=self.machines.network(cell))
        if self.cluster is not None:
            return replace(profile, network=cluster_network(self.cluster, cell))
        return profile

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
            self.workload.processors,
            self.workload.passes,
            cell.copies,
            uneven=self.cluster is not None,
            recorded=self.workload.recorded,
        )

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, and the ways to cut a sequence."""
        return Setting(cell.ranks, cell.microbatches, partial(self.cuts, cell))

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
                slices=[one for one in SLICE_COUNTS if one <= self.limits.slices],
                limit=self.limits.slices,
            )
        return [one.cuts for one in self.choices[cell] if len(one.cuts) == slices + 1]

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat: its passes, and the optimizer."""
        key = (cell.rows, cell.tensor, cell.shard)
        profile = self.profile(cell)
        if key not in self.least:
            slices = min(self.limits.slices, self.workload.tokens)
            self.least[key] = least_times(profile, slices, self.limits.split)
        least = replace(self.least[key], hop=least_hop(profile))
        if cell.recomputed == 1.0:
            least = with_recomputation(least)
        fastest = max(self.speeds(cell), default=1.0)
        bound = profile_bound(least, cell.ranks, cell.microbatches) / fastest
        processors = self.workload.processors
        if processors is not None:
            work = _least_work(least) * cell.microbatches * cell.copies
            bound = max(bound, work / processors)
        return self.workload.passes * bound + _least_update(profile, cell.ranks)

    def least_bytes(self, cell: Cell) -> float:
        """Return the bytes of the fullest device with one micro-batch in flight."""
        return Judge(self.cost(cell)).peak(self._smallest(cell))

    def _smallest(self, cell: Cell) -> Schedule:
        return make("1f1b", ranks=cell.ranks, microbatches=1)


def _least_work(times: LeastTimes) -> float:
    """Seconds that one micro-batch takes at least, over all ranks."""
    return times.layers * sum(times.layer) + sum(times.embed) + sum(times.head)


def _least_update(profile: Profile, ranks: int) -> float:
    """Seconds of the optimizer at least: its mean over the ranks."""
    return sum(profile.update((profile.layers,))) / ranks
