"""Which well-known order and placement a schedule has.

Frameworks name an order instead of listing its actions. A schedule has a name only if its lanes are exactly those of
the name, whatever a planner called it.
"""

from __future__ import annotations

from enum import StrEnum

from penstock.ir.schedule import Schedule
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, wave_placement


class PlacementKind(StrEnum):
    """How stages lie on ranks."""

    LOOP = "loop"  # stage s on rank s modulo the number of ranks
    V = "v"  # once there and once back
    WAVES = "waves"  # there and back several times
    OTHER = "other"


def placement_kind(schedule: Schedule) -> PlacementKind:
    """How the stages of a schedule lie on its ranks."""
    ranks = schedule.ranks
    stages = list(schedule.stages)
    per_rank, rest = divmod(len(stages), ranks)
    if rest:
        return PlacementKind.OTHER
    if stages == loop_placement(ranks, per_rank):
        return PlacementKind.LOOP
    if per_rank % 2 == 0 and stages == wave_placement(ranks, per_rank // 2):
        return PlacementKind.V if per_rank == 2 else PlacementKind.WAVES
    return PlacementKind.OTHER


def order_of(schedule: Schedule) -> str:
    """The name of a schedule's order in `penstock list`; empty if it has none of these names.

    >>> order_of(make("interleaved", ranks=2, microbatches=4, chunks=3))
    'interleaved'
    """
    ranks = schedule.ranks
    microbatches = len(schedule.microbatches)
    per_rank = len(schedule.stages) // ranks
    if schedule.slices > 1:
        return ""
    names: dict[str, dict[str, int]] = {"1f1b": {}, "gpipe": {}}
    if per_rank > 1:
        chunks = {"chunks": per_rank}
        names = {"interleaved": chunks, "interleaved-zb": chunks, "zb-v": {}}
    for name, shape in names.items():
        known = make(name, ranks=ranks, microbatches=microbatches, **shape)
        if known.stages == schedule.stages and known.lanes == schedule.lanes:
            return name
    return ""
