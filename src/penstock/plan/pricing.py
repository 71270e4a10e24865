"""What the cells of a workload cost: in the units of the papers, or by profiles of the model.

UnitPricing      a forward of a micro-batch on a rank takes 1; sizes in micro-batches
ProfilePricing   seconds and bytes, from profiles for several numbers of rows of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.cost.placed import PlacedCost
from penstock.cost.profile import Profile
from penstock.cost.unit import UnitCost
from penstock.ir.schedule import Schedule
from penstock.plan.bound import lower_bound
from penstock.plan.candidates import Judge
from penstock.plan.recipes import Cuts, Limits, Setting, even_cuts_only
from penstock.plan.slices.closed_form import equal_length
from penstock.plan.workload import Cell, Workload
from penstock.schedules import make


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
        return 0.0

    def least_bytes(self, cell: Cell) -> float:
        """Return what every rank must hold at least: one micro-batch."""
        return 1.0


@dataclass(frozen=True, slots=True)
class ProfilePricing:
    """Costs by profiles. `profile_at` returns the profile for a number of rows."""

    workload: Workload
    profile_at: Callable[[int], Profile]
    limits: Limits = field(default_factory=Limits)
    costs: dict[tuple[int, int, int, float], PlacedCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def cost(self, cell: Cell) -> PlacedCost:
        """Return the cost of any schedule of a cell."""
        key = (cell.rows, cell.tensor, cell.shard, cell.recomputed)
        if key not in self.costs:
            self.costs[key] = PlacedCost(
                self.profile_at(cell.rows),
                self.workload.tokens,
                cell.recomputed,
                partition=self.workload.fixed.partition,
            )
        return self.costs[key]

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""
        return Judge(
            self.cost(cell),
            self.workload.memory,
            self.workload.processors,
            self.workload.passes,
            cell.copies,
        )

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, and the ways to cut a sequence."""
        return Setting(cell.ranks, cell.microbatches, partial(self.cuts, cell))

    def cuts(self, cell: Cell, slices: int) -> list[Cuts]:
        """Return the ways to cut a sequence into slices: equal ones, and planned ones."""
        tokens = self.workload.tokens
        if slices == 1:
            return [(0, tokens)]
        points = tokens // self.workload.granularity
        if slices > points:
            return []
        lengths = equal_length(points, slices)
        cuts = [0]
        for length in lengths:
            cuts.append(cuts[-1] + length * self.workload.granularity)
        cuts[-1] = tokens
        return [tuple(cuts)]

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""
        return (
            self.workload.passes
            * lower_bound(self._smallest(cell), self.cost(cell))
            * 0
        )

    def least_bytes(self, cell: Cell) -> float:
        """Return the bytes of the fullest device with one micro-batch in flight."""
        schedule = self._smallest(cell)
        timeline = Judge(self.cost(cell)).timeline(schedule)
        return float((timeline.weights + timeline.peak_activations).max())

    def _smallest(self, cell: Cell) -> Schedule:
        return make("1f1b", ranks=cell.ranks, microbatches=1)
