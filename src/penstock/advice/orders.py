"""Which well-known order and placement a schedule has.

Frameworks name an order instead of listing its actions. A schedule has a name only if its lanes are exactly those of
the name, whatever a planner called it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from penstock.ir.schedule import Schedule, Stage
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, wave_placement


class PlacementKind(StrEnum):
    """How stages lie on ranks."""

    LOOP = "loop"  # stage s on rank s modulo the number of ranks
    V = "v"  # once there and once back
    WAVES = "waves"  # there and back several times
    OTHER = "other"


def placement_kind(placed: Sequence[Stage]) -> PlacementKind:
    """How stages lie on their ranks."""
    stages = list(placed)
    ranks = 1 + max(stage.rank for stage in stages)
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
        known = _known(name, ranks, microbatches, shape.get("chunks", 0))
        if known.stages == schedule.stages and known.lanes == schedule.lanes:
            return name
    return ""


@lru_cache(maxsize=16)  # A search asks again and again for the same few.
def _known(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    shape = {"chunks": chunks} if chunks else {}
    return make(name, ranks=ranks, microbatches=microbatches, **shape)
