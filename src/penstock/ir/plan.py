"""A plan: a schedule, the number of layers of each part, and the reasons for choosing it.

    step    1         2             3             ...   10      11        12
    runs    schedule  rotation[0]   rotation[1]   ...   full    schedule  rotation[0]  ...

If micro-batches leave out parts, steps may take different paths: several sets of partial
paths in turn, and all parts now and then. Each of them is a schedule over the same stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan, fitting_sums, unfit_sums

Fact: TypeAlias = str | float | int | bool | None
Facts: TypeAlias = tuple[tuple[str, Fact], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, the number of layers of each part, and the reasons for choosing it.

    An empty partition leaves the layers open. The parts in `recompute` keep only their
    input and compute the rest again in the backward. Each rank is `tensor` x `shard`
    processes; 0 leaves them to the config of a run. The reasons are plain facts; if two
    have the same name, the last one counts.
    `rotation` has further schedules, which steps take in turn with the first one, and `full`
    is the schedule of steps that leave out no part. They have the same stages, and the same
    micro-batches on other paths.
    `sums` says how the replicas of a part sum their gradients in every step. The backend of a run
    sums those that it does not have.
    """

    schedule: Schedule
    name: str = ""
    partition: tuple[int, ...] = ()
    why: Facts = ()
    recompute: tuple[int, ...] = ()
    tensor: int = 0
    shard: int = 0
    rotation: tuple[Schedule, ...] = ()
    full: Schedule | None = None
    sums: tuple[SumPlan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", tuple(dict(self.why).items()))
        parts = self.schedule.parts
        given = len(self.partition)
        if self.partition and given != parts:
            raise ShapeError(
                f"the partition is for {given} parts, but the schedule has {parts}"
            )
        if min(self.partition, default=0) < 0:
            raise ShapeError(
                f"a part must have at least 0 layers, not {min(self.partition)}"
            )
        unknown = [part for part in self.recompute if not 0 <= part < parts]
        if unknown:
            raise ShapeError(
                f"part {unknown[0]} is to be recomputed, but the schedule has {parts} "
                "parts, counted from 0"
            )
        mesh = (self.tensor, self.shard)
        if min(mesh) < 0 or (max(mesh) > 0 and min(mesh) == 0):
            raise ShapeError(
                f"a rank has tensor {self.tensor} x shard {self.shard} processes; "
                "both must be at least 1, or both 0, which leaves them open"
            )
        for name, other in self._others():
            _check_alike(self.schedule, name, other)
        for fault in unfit_sums(self.schedule, self.sums):
            raise ShapeError(fault)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All schedules of the plan: the first one, the rotation, and the full one if there is one."""
        return (self.schedule, *(other for _, other in self._others()))

    @property
    def mesh(self) -> tuple[int, int]:
        """The processes of a rank: tensor and shard; 1 and 1 if the plan leaves them open."""
        return max(1, self.tensor), max(1, self.shard)

    def _others(self) -> list[tuple[str, Schedule]]:
        """The further schedules with their names."""
        named = [(f"rotation[{n}]", one) for n, one in enumerate(self.rotation)]
        return [*named, ("full", self.full)] if self.full is not None else named

    def map_schedules(self, change: Callable[[Schedule], Schedule]) -> Plan:
        """Return the plan with every schedule changed in the same way."""
        first = change(self.schedule)
        return replace(
            self,
            schedule=first,
            sums=fitting_sums(first, self.sums),
            rotation=tuple(map(change, self.rotation)),
            full=None if self.full is None else change(self.full),
        )

    @property
    def facts(self) -> dict[str, Fact]:
        """The reasons by name."""
        return dict(self.why)


def _check_alike(schedule: Schedule, name: str, other: Schedule) -> None:
    """Raise ShapeError unless a further schedule has the same stages and micro-batches."""
    if other.stages != schedule.stages or other.ranks != schedule.ranks:
        raise ShapeError(
            f"{name} has other stages than the plan's first schedule: "
            "weights stay where they are from step to step"
        )
    cuts = [(one.tokens, one.cuts) for one in schedule.microbatches]
    others = [(one.tokens, one.cuts) for one in other.microbatches]
    if cuts != others:
        raise ShapeError(
            f"{name} has {len(others)} micro-batches, the plan's first schedule {len(cuts)}; "
            "all schedules need the same micro-batches, with the same slices"
        )
