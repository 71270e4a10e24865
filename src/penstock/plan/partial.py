"""Partial paths in a search: each micro-batch may leave out a share of the layers (SkipPipe, Blagoev et al., 2025).

    parts   0 1 2 3 4 5 6 7      two parts left out of eight: at most a quarter of the layers
    mb 0    x . . x x x x x      the first part has the embedding and the last one the head, so all visit them
    mb 1    x x x . . x x x      the parts left out move on, so that all others are left out equally often
    mb 2    x x x x x . . x

Leaving out layers changes what is computed: every micro-batch trains a shorter model. So a search does it only where
the user allows it, and a bound for such a search must count only the layers that every micro-batch visits.

**The bound.** Every micro-batch runs at least V layers, the embedding and the head. A rank without a first part can
begin only after a hop. The ranks share all work, so the step takes at least the mean over the ranks. One micro-batch
takes the way there and the way back, and no backward starts before a way there. The bounds do not count hops between
the later ranks, since a path may skip any of them.
"""

from __future__ import annotations

import math

from penstock.cost.unit import UnitCost
from penstock.ir.schedule import MicroBatch, Schedule
from penstock.plan.space import LeastTimes
from penstock.schedules.skip_paths import path_with_skips

# A share of a count may come out just below a whole number.
COUNT_ROUNDING = 1e-9


def partial_paths(
    parts: int, skips: int, microbatches: int, cuts: tuple[int, ...]
) -> list[MicroBatch]:
    """Return micro-batches that each leave out `skips` of the parts between the first and the last.

    >>> [one.path for one in partial_paths(5, 1, 3, (0, 1))]
    [(0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4)]
    """
    last = parts - 1
    return [
        MicroBatch((*path_with_skips(last, skips, number), last), cuts[-1], cuts)
        for number in range(microbatches)
    ]


def most_skips(parts: int, share: float) -> int:
    """Return how many of some equal parts may be left out if `share` of the layers may.

    One of the parts between the first and the last must be visited, or no path would visit it.

    >>> most_skips(8, 0.25), most_skips(3, 0.25), most_skips(4, 0.9)
    (2, 0, 1)
    """
    return min(math.floor(parts * share + COUNT_ROUNDING), max(parts - 3, 0))


def skipped_share(schedule: Schedule, partition: tuple[int, ...] = ()) -> float:
    """Return the largest share of the layers that a micro-batch leaves out.

    Without a partition, all ranks have equally many layers, and so have the parts of a rank.
    """
    work = [0.0] * schedule.parts
    for number, stage in enumerate(schedule.stages):
        layers = 1.0 / int(schedule.table.crowd[number])
        if partition:
            layers = float(partition[stage.part])
        work[stage.part] = layers
    whole = sum(work)
    least = whole
    for path in {microbatch.path for microbatch in schedule.microbatches}:
        visited = {schedule.stages[stage].part for stage in path}
        least = min(least, sum(work[part] for part in visited))
    return 1.0 - least / whole if whole else 0.0


def visited_layers(layers: int, share: float) -> int:
    """Return the fewest layers that a micro-batch visits if it may leave out `share` of them."""
    return layers - math.floor(layers * share + COUNT_ROUNDING)


def partial_profile_bound(
    times: LeastTimes, ranks: int, microbatches: int, weights: int = 1
) -> float:
    """Return a time below that of every plan with partial paths.

    `times` are those of a model with only the layers that every micro-batch visits.
    """
    # Messages leave before a rank rests, so rests count in no chain of actions.
    work = times.layers * sum(times.layer) + sum(times.embed) + sum(times.head)
    waits = max(ranks - weights, 0) * times.hop
    mean = (microbatches * work + waits) / ranks
    there = times.way[0]
    back = times.layers * times.layer[1] + times.embed[1] + times.head[1]
    backwards = there + microbatches * back / ranks
    alone = there + times.way[1]
    return max(mean, backwards, alone)


def partial_unit_bound(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    stages: int,
    slices: int,
    share: float,
    split: bool = True,
    weights: int = 1,
) -> float:
    """Return a time below that of every plan whose micro-batches leave out at most `share` of the work."""
    back, backward = cost.least_backward(split)
    visited = ranks * (1.0 - share)
    waits = max(ranks - weights, 0) * cost.comm

    def one_way(seconds: float) -> float:
        once = min(seconds / stages, visited * seconds)
        return once + (visited * seconds - once) / slices

    mean = (microbatches * visited * (cost.F + backward) + waits) / ranks
    backwards = one_way(cost.F) + microbatches * visited * backward / ranks
    return max(mean, backwards, one_way(cost.F) + one_way(back))
