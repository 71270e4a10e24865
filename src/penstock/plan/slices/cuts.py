"""Where to cut a sequence into slices: the least latency of a pipeline of equal stages, exactly, for any times.

All slices go through K stages one after the other. So every slice counts once, and the longest K - 1 times more:

    stage 0 | 1 2 2 2 3 .  .  .         latency = sum of all slices + (K - 1) * the longest
    stage 1 | . 1 2 2 2 3 .  .                    for forwards, and the same again for backwards
    stage 2 | . . 1 . 2 2 2 3                     a hop that all wait for is part of the longest

Forwards and backwards are two pipelines, one after the other, and the slice that is longest in one need not be longest
in the other. The true latency (sum f + (K-1) max f) + (sum b + (K-1) max b) is more than TeraPipe's formula for f + b,
and cuts that minimize the formula do not minimize the latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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

LEAST_SUM_FACTOR = 1 - 1e-9  # allows for rounding in a lower bound on the sum


@dataclass(frozen=True, slots=True)
class Slicing:
    """Slices in grid points and their latency. `bound` is less than it only if the search stopped early."""

    groups: tuple[RowGroup, ...]
    latency: float
    bound: float
    passes: int  # passes of the dynamic program that it took to prove the optimum

    @property
    def lengths(self) -> tuple[int, ...]:
        """The slices of the first group of rows; with one sequence, these are all."""
        return self.groups[0].lengths

    @property
    def cuts(self) -> tuple[int, ...]:
        """The points at which the sequence is cut, from 0 to its end."""
        return (0, *np.cumsum(self.lengths).tolist())


def best_cuts(
    times: SliceTimes,
    stages: int,
    slices: int | None = None,
    patience: int | None = None,
) -> Slicing:
    """Find the cuts of least latency through `stages` equal stages.

    With `slices`, only cuts into exactly this many slices count. With `patience`, the
    search stops after this many passes and returns the best cuts so far, and a bound.

    >>> from penstock.cost import Seconds
    >>> from penstock.plan.slices.slice_times import times_from_curves
    >>> linear = Seconds(base=1.0, token=1.0)
    >>> best_cuts(times_from_curves(12, 1, [linear], [linear]), stages=4).lengths
    (2, 2, 2, 2, 2, 2)
    """
    _check_stages(stages)
    if slices is not None and not 1 <= slices <= times.points:
        raise ShapeError(
            f"a sequence of {times.points} points cannot have {slices} slices; "
            f"give from 1 to {times.points}"
        )
    weight = stages - 1
    starts = [
        _evaluate(times, lengths) for lengths in starting_cuts(times, stages, slices)
    ]
    known = _fastest(starts, weight)
    known_latency = latency_with_peaks(known, weight)
    least_sum = times.least_sum * LEAST_SUM_FACTOR
    grid = times.grid_below(peak_allowance(known_latency, least_sum, weight))
    run_pass = pass_over(grid, slices)
    best = least_latency(run_pass, weight, known, patience, probes_for(grid))
    return _as_slicing(best, weight)


def best_batch(
    times: Mapping[int, SliceTimes],
    batch: int,
    stages: int,
    patience: int | None = None,
) -> Slicing:
    """Find which rows of a batch go together, and how each group is cut, for the least latency.

    `times` maps each number of rows that may go together to the times of their slices.
    All groups pass through one pipeline, so the longest slice of any group counts, and a
    knapsack over the groups fills the batch.

    >>> from penstock.cost import Seconds
    >>> from penstock.plan.slices.slice_times import times_from_curves
    >>> alone = [Seconds(base=1.0, token=1.0)]
    >>> together = [Seconds(base=1.0, token=1.5)]
    >>> times = {
    ...     1: times_from_curves(4, 1, alone, alone),
    ...     2: times_from_curves(4, 1, together, together),
    ... }
    >>> best_batch(times, batch=2, stages=2).groups
    (RowGroup(rows=2, lengths=(2, 2)),)
    """
    _check_stages(stages)
    peak_counts = {each.peak_count for each in times.values()}
    if batch < 1 or not times or min(times) < 1 or len(peak_counts) != 1:
        raise ShapeError(
            f"a batch of {batch} rows cannot be cut with times for {sorted(times)} rows "
            f"of {sorted(peak_counts)} peaks; all must be at least 1, "
            f"and all times must have the same number of peaks"
        )
    weight = stages - 1
    known = SliceSum(math.inf, (math.inf,) * peak_counts.pop(), ())
    for rows, row_times in times.items():
        if batch % rows == 0:
            starts = _equal_groups(row_times, batch // rows, rows, stages)
            known = _fastest((known, *starts), weight)

    limit = peak_allowance(latency_with_peaks(known, weight), 0.0, weight)
    grids = {}
    for rows in sorted(times):
        if rows <= batch:
            grids[rows] = times[rows].grid_below(limit)
    passes = {rows: pass_over(grid, rows=rows) for rows, grid in grids.items()}

    def run_pass(limits: Sequence[float], total: float) -> SliceSum | None:
        return _fill_batch(passes, batch, limits, total)

    probes = probes_for(*grids.values())
    best = least_latency(run_pass, weight, known, patience, probes)
    return _as_slicing(best, weight)


def latency_of(times: SliceTimes, stages: int, lengths: Sequence[int]) -> float:
    """Return the latency of slices of these lengths through `stages` equal stages."""
    _check_stages(stages)
    check_lengths(lengths, times.points)
    return latency_with_peaks(_evaluate(times, lengths), stages - 1)


def check_lengths(lengths: Sequence[int], points: int) -> None:
    """Refuse slices that are empty or do not add up to the sequence."""
    if sum(lengths) != points or min(lengths, default=0) < 1:
        raise ShapeError(
            f"slices of {list(lengths)} points make {sum(lengths)}, "
            f"but the sequence has {points}; each slice has at least 1"
        )


def _check_stages(stages: int) -> None:
    """Refuse a pipeline without stages."""
    if stages < 1:
        raise ShapeError(f"there must be at least 1 stage, not {stages}")


def _evaluate(times: SliceTimes, lengths: Sequence[int]) -> SliceSum:
    """Return the sum and the peaks of given slices."""
    sizes = np.asarray(lengths, dtype=np.int64)
    prefixes = np.cumsum(sizes) - sizes
    sums, peaks = times.of(prefixes, sizes)
    group = RowGroup(1, tuple(sizes.tolist()))
    return SliceSum(float(sums.sum()), tuple(peaks.max(axis=1).tolist()), (group,))


def _fastest(candidates: Iterable[SliceSum], weight: float) -> SliceSum:
    """Return the candidate of the least latency."""
    return min(candidates, key=lambda slices: latency_with_peaks(slices, weight))


def _as_slicing(best: BestSlices, weight: float) -> Slicing:
    """Return the result of a search, or refuse one that found nothing."""
    latency = latency_with_peaks(best.slices, weight)
    if latency == math.inf:
        raise ShapeError(
            "no cuts take a finite time; "
            "allow more slices, or give shorter slices a finite time"
        )
    return Slicing(best.slices.groups, latency, best.bound, best.passes)


def _equal_groups(
    times: SliceTimes, copies: int, rows: int, stages: int
) -> list[SliceSum]:
    """Return starts in which all groups have the same rows and slices.

    The sum then counts `copies` times, which is like having fewer stages for one copy.
    """
    starts = []
    for lengths in starting_cuts(times, 1 + (stages - 1) / copies):
        single = _evaluate(times, lengths)
        group = RowGroup(rows, single.groups[0].lengths)
        starts.append(SliceSum(copies * single.sum, single.peaks, (group,) * copies))
    return starts


def _fill_batch(
    passes: Mapping[int, LimitedPass], batch: int, limits: Sequence[float], total: float
) -> SliceSum | None:
    """Return the cheapest groups below the limits that make up a batch.

    This is an unbounded knapsack: a group of each number of rows may occur any number of
    times, and each is cut in the cheapest way below the limits.
    """
    cheapest: dict[int, SliceSum] = {}
    for rows, run_pass in passes.items():
        slices = run_pass(limits, total)
        if slices is not None:
            cheapest[rows] = slices

    cost = [0.0] + [math.inf] * batch
    last_rows = [0] * (batch + 1)
    for filled in range(1, batch + 1):
        for rows, slices in cheapest.items():
            if rows > filled:
                continue
            new_cost = cost[filled - rows] + slices.sum
            if new_cost < cost[filled]:
                cost[filled] = new_cost
                last_rows[filled] = rows
    if cost[batch] == math.inf:
        return None

    chosen: list[SliceSum] = []
    left = batch
    while left:
        chosen.append(cheapest[last_rows[left]])
        left -= last_rows[left]
    peaks_of_groups = [slices.peaks for slices in chosen]
    peaks = tuple(max(values) for values in zip(*peaks_of_groups, strict=True))
    groups = tuple(group for slices in chosen for group in slices.groups)
    return SliceSum(cost[batch], peaks, groups)
