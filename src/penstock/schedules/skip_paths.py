"""Partial paths as in SkipPipe (Blagoev et al., 2025): each micro-batch leaves out parts, all equally often."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.schedules.deal import deals
from penstock.schedules.list_scheduling import list_schedule, oldest_first
from penstock.schedules.orders import require_at_least


def skip(ranks: int, microbatches: int, skips: int | None = None) -> Schedule:
    """Let every micro-batch leave out `skips` parts, by default as many as a quarter of the ranks.

    Every path begins with part 0 and ends with the head, both on rank 0. The parts left out move on
    from one micro-batch to the next, so that after every ranks - 1 micro-batches each part has been
    left out equally often (ranks=4, microbatches=4):

    rank 0 | F0 F1 F2 F3 .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- B0 -- .  .  B1 -- .  .  B2 -- B3 --
    rank 1 | .  .  F1 -- F2 -- .  .  .  .  .  .  .  .  .  .  .  B1 -- -- -- B2 -- -- -- .  .  .  .
    rank 2 | .  F0 -- .  F3 -- F2 -- .  .  .  .  .  B0 -- -- -- B2 -- -- -- B3 -- -- -- .  .  .  .
    rank 3 | .  .  .  F0 -- F1 -- F3 -- B0 -- -- -- B1 -- -- -- B3 -- -- -- .  .  .  .  .  .  .  .

    The head is the last part. The lanes are a list schedule in which a rank holds at most `ranks`
    micro-batches.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    if skips is None:
        skips = default_skips(ranks)
    max_skips = max(ranks - 2, 0)
    if not 0 <= skips <= max_skips:
        raise ShapeError(
            f"of {ranks} ranks at most {max_skips} can be left out on a path, not {skips}"
        )
    paths = [path_with_skips(ranks, skips, number) for number in range(microbatches)]
    return schedule_along(ranks, paths)


def dealt(
    ranks: int,
    microbatches: int,
    skips: int | None = None,
    count: int = 1,
    swaps: int = 0,
    keep: Sequence[int] = (),
    seed: int = 0,
) -> list[Schedule]:
    """Return `count` schedules over the same stages, with the paths that `deals` draws for as many steps.

    >>> first, second = dealt(ranks=4, microbatches=3, count=2)
    >>> [sorted(one.path for one in schedule.microbatches) for schedule in (first, second)]
    [[(0, 1, 2, 4), (0, 1, 3, 4), (0, 2, 3, 4)], [(0, 1, 2, 4), (0, 1, 3, 4), (0, 2, 3, 4)]]
    """
    if skips is None:
        skips = default_skips(ranks)
    steps = deals(ranks, microbatches, skips, swaps, seed, keep=keep)
    return [schedule_along(ranks, paths) for paths in islice(steps, count)]


def schedule_along(ranks: int, paths: Sequence[Sequence[int]]) -> Schedule:
    """Return a schedule along any paths. Each rank has one part, and rank 0 also has the head.

    A path is the parts of one micro-batch without the head, which comes last. The module `deal`
    draws such paths for every step.
    """
    require_at_least(1, ranks=ranks, microbatches=len(paths))
    head = ranks
    stages = [Stage(rank, rank) for rank in range(ranks)]
    stages.append(Stage(0, head))
    microbatches = [MicroBatch((*path, head)) for path in paths]
    return list_schedule(
        stages, microbatches, UnitCost(), cap=ranks, priority=oldest_first
    )


def default_skips(ranks: int) -> int:
    """Return a quarter of the ranks, but at least one if a part can be left out."""
    return max(ranks // 4, 1) if ranks > 2 else 0


def path_with_skips(parts: int, skips: int, number: int) -> tuple[int, ...]:
    """Return the parts that micro-batch `number` visits: all but `skips` of those after the first.

    >>> path_with_skips(4, 1, 0), path_with_skips(4, 1, 1)
    ((0, 2, 3), (0, 1, 3))
    """
    others = parts - 1
    left_out = {1 + (number * skips + step) % others for step in range(skips)}
    return tuple(part for part in range(parts) if part not in left_out)
