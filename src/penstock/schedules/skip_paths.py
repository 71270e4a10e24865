"""Partial paths as in SkipPipe (Blagoev et al., 2025): each micro-batch leaves out parts, all equally often."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.schedules.list_scheduling import list_schedule, oldest_first
from penstock.schedules.orders import require_at_least


def skip(ranks: int, microbatches: int, skips: int | None = None) -> Schedule:
    """Every micro-batch begins with part 0 and ends with the head, both on rank 0, and leaves out `skips` other parts.

    Without `skips` it is a quarter of the ranks. The left-out parts move on from one micro-batch to the next, so that
    after every ranks - 1 micro-batches each has been left out equally often (ranks=4, microbatches=4):

    rank 0 | F0 F1 F2 F3 .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- B0 -- .  .  B1 -- .  .  B2 -- B3 --
    rank 1 | .  .  F1 -- F2 -- .  .  .  .  .  .  .  .  .  .  .  B1 -- -- -- B2 -- -- -- .  .  .  .
    rank 2 | .  F0 -- .  F3 -- F2 -- .  .  .  .  .  B0 -- -- -- B2 -- -- -- B3 -- -- -- .  .  .  .
    rank 3 | .  .  .  F0 -- F1 -- F3 -- B0 -- -- -- B1 -- -- -- B3 -- -- -- .  .  .  .  .  .  .  .

    Rank 0 holds part 0 and the head, the last part; the lanes are a list schedule that holds `ranks` micro-batches.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    skips = default_skips(ranks) if skips is None else skips
    most = max(ranks - 2, 0)
    if not 0 <= skips <= most:
        raise ShapeError(
            f"of {ranks} ranks at most {most} can be left out on a path, not {skips}"
        )
    return schedule_along(
        ranks, [_path(ranks, skips, number) for number in range(microbatches)]
    )


def schedule_along(ranks: int, paths: Sequence[Sequence[int]]) -> Schedule:
    """Micro-batches along any paths over part 0 to part ranks - 1, one a rank, and then to the head on rank 0.

    `deal.deals` gives such paths, of step after step.
    """
    require_at_least(1, ranks=ranks, microbatches=len(paths))
    stages = [Stage(rank, rank) for rank in range(ranks)] + [Stage(0, ranks)]
    table = [MicroBatch((*path, ranks)) for path in paths]
    return list_schedule(stages, table, UnitCost(), cap=ranks, priority=oldest_first)


def default_skips(ranks: int) -> int:
    """A quarter of the ranks, at least one where there is one to spare."""
    return max(ranks // 4, 1) if ranks > 2 else 0


def _path(ranks: int, skips: int, number: int) -> tuple[int, ...]:
    left_out = {1 + (number * skips + step) % (ranks - 1) for step in range(skips)}
    return tuple(part for part in range(ranks) if part not in left_out)
