"""A plan: a schedule, how many layers each of its parts has, and why it was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule

Fact: TypeAlias = str | float | int | bool | None
Facts: TypeAlias = tuple[tuple[str, Fact], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, the layers of each part ((): not said), and why it was chosen, as plain facts."""

    schedule: Schedule
    name: str = ""
    partition: tuple[int, ...] = ()
    why: Facts = ()

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "why", tuple(dict(self.why).items())
        )  # the last of two facts of one name
        parts, given = self.schedule.parts, len(self.partition)
        if self.partition and given != parts:
            raise ShapeError(
                f"the partition is for {given} parts, but the schedule has {parts}"
            )
        if min(self.partition, default=0) < 0:
            raise ShapeError(f"a part has {min(self.partition)} layers; the least is 0")

    @property
    def facts(self) -> dict[str, Fact]:
        """Why, by name."""
        return dict(self.why)
