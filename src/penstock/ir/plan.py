"""A plan: a schedule, the number of layers of each part, and the reasons for choosing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule

Fact: TypeAlias = str | float | int | bool | None
Facts: TypeAlias = tuple[tuple[str, Fact], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, the number of layers of each part, and the reasons for choosing it.

    An empty partition leaves the layers open. The parts in `recompute` keep only their
    input and compute the rest again in the backward. Each rank is `tensor` x `shard`
    processes. The reasons are plain facts; if two have the same name, the last one counts.
    """

    schedule: Schedule
    name: str = ""
    partition: tuple[int, ...] = ()
    why: Facts = ()
    recompute: tuple[int, ...] = ()
    tensor: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", tuple(dict(self.why).items()))
        parts = self.schedule.parts
        given = len(self.partition)
        if self.partition and given != parts:
            raise ShapeError(
                f"the partition is for {given} parts, but the schedule has {parts}"
            )
        if min(self.partition, default=0) < 0:
            raise ShapeError(f"a part has {min(self.partition)} layers; the least is 0")
        unknown = [part for part in self.recompute if not 0 <= part < parts]
        if unknown:
            raise ShapeError(
                f"part {unknown[0]} is to be recomputed, but the schedule has {parts} "
                "parts, counted from 0"
            )
        if min(self.tensor, self.shard) < 1:
            raise ShapeError(
                f"a rank has tensor {self.tensor} x shard {self.shard} processes; "
                "both must be at least 1"
            )

    @property
    def facts(self) -> dict[str, Fact]:
        """The reasons by name."""
        return dict(self.why)
