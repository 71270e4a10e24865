"""Where to cut a sequence into slices: the least latency of a pipeline of equal stages, exactly, for any times.

All slices go through K stages one after the other, so every slice counts once, and the longest K - 1 times more:

    stage 0 | 1 2 2 2 3 .  .  .         latency = sum of all slices + (K - 1) * the longest
    stage 1 | . 1 2 2 2 3 .  .                    forwards, and the same once more for backwards
    stage 2 | . . 1 . 2 2 2 3                     a hop that all wait for is part of what is longest

Forwards and backwards are two pipelines, one after the other, and the slice that is longest there need not be so on the
way back: (sum f + (K-1) max f) + (sum b + (K-1) max b) is more than the formula for f + b, whose cuts are not the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.errors import ShapeError
from penstock.plan.slices.closed_form import starting_cuts
from penstock.plan.slices.dynamic_program import pass_over, probes_for
from penstock.plan.slices.limit_search import (
    BestSlices,
    LimitedPass,
    RowGroup,
    SliceSum,
    latency_with_peaks,
    least_latency,
    peak_allowance,
)
from penstock.plan.slices.slice_times import SliceTimes


@dataclass(frozen=True, slots=True)
class Slicing:
    """Slices in grid points, and the latency they have. `bound` is no less than it unless the search was stopped."""

    groups: tuple[RowGroup, ...]
    latency: float
    bound: float
    passes: int  # shortest paths that were sought to prove that it is the least

    @property
    def lengths(self) -> tuple[int, ...]:
        """The slices of the first group of rows: of all, if there is one sequence."""
        return self.groups[0].lengths

    @property
    def cuts(self) -> tuple[int, ...]:
        """The points from 0 to the end at which it is cut."""
        return (0, *np.cumsum(self.lengths).tolist())


def best_cuts(
    times: SliceTimes,
    stages: int,
    slices: int | None = None,
    patience: int | None = None,
) -> Slicing:
    """The cuts of least latency through so many equal stages; `slices`: of those with exactly so many slices.

    With `patience` the search stops after so many passes, with the best it has and a bound.

    >>> from penstock.cost import Seconds
    >>> from penstock.plan.slices.slice_times import times_from_curves
    >>> linear = Seconds(base=1.0, token=1.0)
    >>> best_cuts(times_from_curves(12, 1, [linear], [linear]), stages=4).lengths
    (2, 2, 2, 2, 2, 2)
    """
    _check_stages(stages)
    if slices is not None and not 1 <= slices <= times.points:
        raise ShapeError(
            f"{slices} slices of {times.points} points; the least is 1, the most {times.points}"
        )
    weight = stages - 1
    known = _cheapest(
        (_priced(times, lengths) for lengths in starting_cuts(times, stages, slices)),
        weight,
    )
    grid = times.below(
        peak_allowance(
            latency_with_peaks(known, weight), times.floor * (1 - 1e-9), weight
        )
    )
    return _as_slicing(
        least_latency(
            pass_over(grid, slices), weight, known, patience, probes_for(grid)
        ),
        weight,
    )


def best_batch(
    times: Mapping[int, SliceTimes],
    batch: int,
    stages: int,
    patience: int | None = None,
) -> Slicing:
    """Which of a batch's rows go together, and how each group is cut: the least latency of all, exactly.

    `times` has the slices of so many rows at once, for every number of rows that may go together. All groups pass
    through one pipeline, so the longest slice of any of them counts, and the groups are what fills the batch cheapest.

    >>> from penstock.cost import Seconds
    >>> from penstock.plan.slices.slice_times import times_from_curves
    >>> curves = {1: [Seconds(base=1.0, token=1.0)], 2: [Seconds(base=1.0, token=1.5)]}
    >>> best_batch({rows: times_from_curves(4, 1, each, each) for rows, each in curves.items()}, batch=2, stages=2).groups
    (Group(rows=2, lengths=(2, 2)),)
    """
    _check_stages(stages)
    kinds = {each.kinds for each in times.values()}
    if batch < 1 or not times or min(times) < 1 or len(kinds) != 1:
        raise ShapeError(
            f"a batch of {batch} rows, with times for {sorted(times)} rows of {sorted(kinds)} peaks"
        )
    weight = stages - 1
    nothing = SliceSum(math.inf, (math.inf,) * kinds.pop(), ())
    alike = (
        _alike(times[rows], batch // rows, rows, stages)
        for rows in times
        if batch % rows == 0
    )
    known = _cheapest((nothing, *(found for each in alike for found in each)), weight)
    limit = peak_allowance(latency_with_peaks(known, weight), 0.0, weight)
    grids = {
        rows: each.below(limit) for rows, each in sorted(times.items()) if rows <= batch
    }
    seek = partial(
        _filled,
        {rows: pass_over(grid, rows=rows) for rows, grid in grids.items()},
        batch,
    )
    return _as_slicing(
        least_latency(seek, weight, known, patience, probes_for(*grids.values())),
        weight,
    )


def latency_of(times: SliceTimes, stages: int, lengths: Sequence[int]) -> float:
    """What slices of these lengths take through so many equal stages."""
    _check_stages(stages)
    if sum(lengths) != times.points or min(lengths, default=0) < 1:
        raise ShapeError(
            f"slices of {list(lengths)} points make {sum(lengths)}; the sequence has {times.points}"
        )
    return latency_with_peaks(_priced(times, lengths), stages - 1)


def _check_stages(stages: int) -> None:
    """Refuses less than one."""
    if stages < 1:
        raise ShapeError(f"{stages} stages; the least is 1")


def _priced(times: SliceTimes, lengths: Sequence[int]) -> SliceSum:
    """What given slices take."""
    sizes = np.asarray(lengths, dtype=np.int64)
    sums, peaks = times.of(np.cumsum(sizes) - sizes, sizes)
    return SliceSum(
        float(sums.sum()),
        tuple(peaks.max(axis=1).tolist()),
        (RowGroup(1, tuple(sizes.tolist())),),
    )


def _cheapest(found: Iterable[SliceSum], weight: float) -> SliceSum:
    """The one of the least latency."""
    return min(found, key=lambda each: latency_with_peaks(each, weight))


def _as_slicing(best: BestSlices, weight: float) -> Slicing:
    """What a search found, if it found anything."""
    latency = latency_with_peaks(best.found, weight)
    if latency == math.inf:
        raise ShapeError(
            "no cuts take a finite time; allow more slices, or give shorter ones a time"
        )
    return Slicing(best.found.groups, latency, best.bound, best.passes)


def _alike(
    times: SliceTimes, copies: int, rows: int, stages: int
) -> Iterator[SliceSum]:
    """Starts for groups of equal rows: so many copies of the same slices weigh as much as that many fewer stages."""
    for lengths in starting_cuts(times, 1 + (stages - 1) / copies):
        one = _priced(times, lengths)
        yield SliceSum(
            copies * one.sum,
            one.peaks,
            (RowGroup(rows, one.groups[0].lengths),) * copies,
        )


def _filled(
    passes: Mapping[int, LimitedPass], batch: int, limits: Sequence[float], total: float
) -> SliceSum | None:
    """The cheapest groups that make up a batch, each of them the cheapest below the limits."""
    found = {
        rows: each
        for rows, seek in passes.items()
        if (each := seek(limits, total)) is not None
    }
    cost, last = [0.0] + [math.inf] * batch, [0] * (batch + 1)
    for filled in range(1, batch + 1):
        for rows, each in found.items():
            if rows <= filled and cost[filled - rows] + each.sum < cost[filled]:
                cost[filled], last[filled] = cost[filled - rows] + each.sum, rows
    if cost[batch] == math.inf:
        return None
    groups: list[SliceSum] = []
    left = batch
    while left:
        groups.append(found[last[left]])
        left -= last[left]
    peaks = tuple(
        max(peak) for peak in zip(*(each.peaks for each in groups), strict=True)
    )
    return SliceSum(
        cost[batch], peaks, tuple(group for each in groups for group in each.groups)
    )
