"""Where to cut a sequence into slices: the least latency of a pipeline of equal stages, exactly, for any times.

All slices go through K stages one after the other. So every slice counts once, and the longest K - 1 times more:

    stage 0 | 1 2 2 2 3 .  .  .         latency = sum of all slices + (K - 1) * the longest
    stage 1 | . 1 2 2 2 3 .  .                    for forwards, and the same again for backwards
    stage 2 | . . 1 . 2 2 2 3                     a hop that all wait for is part of the longest

Forwards and backwards are two pipelines, one after the other, and the slice that is longest in one need not be longest
in the other. The true latency (sum f + (K-1) max f) + (sum b + (K-1) max b) is more than TeraPipe's formula for f + b,
and cuts that minimize the formula do not minimize the latency.

**The limits on the longest slice.** TeraPipe's t_max is searched until nothing better can exist.
The goal is the least value of: sum of all slices + weight * (peak of the longest slice). One *pass* finds the least sum
S of slices whose peaks stay below given limits. If B is the best latency known, anything better below those limits has

    S + weight * peak < B,    so    peak < (B - S) / weight

The next limit worth a pass is this value, or the peak that the pass found if that is lower. With a good B, few passes
are left:

    limit  ──────────●────────●───●─●●●─────●──────────●────────   each pass rules out all down to the next
                                    B is found here

Slices with two peaks, one forward and one backward, have boxes of limits, and each pass leaves two smaller boxes. When
no box is left, B is the optimum. The search assumes nothing about the times.

**A pass** is TeraPipe's dynamic program over a grid: a shortest path from the start of the sequence to its end.

points  0 ─► 1 ─► 2 ─► 3 ─► 4        best[0] = 0
        └────────►┘     ▲            best[e] = the least value, over slices from p to e below the limits,
                  └─────┘                      of best[p] + the sum of the slice
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.curves import Grid, SliceTimes, narrow_grid

LEAST_SUM_FACTOR = 1 - 1e-9  # allows for rounding in a lower bound on the sum
# The share of a latency by which sums of seconds may be off because of rounding.
SUM_TOLERANCE = 1e-13
# Rounds of probing that look for a good start.
PROBE_ROUNDS = 8
# The factor between the limits of the first round of probing, and how it shrinks.
FIRST_PROBE_STEP = 1.25
PROBE_STEP_SHRINK = 3
# Where to probe around the best limits known.
PROBE_SIDES = ((1, 1), (-1, -1), (1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1))
# The ratio between the limits for which a narrower copy of the grid is made.
LIMIT_RATIO = 1.2
# Limits below this share of the highest peak use the whole grid.
LEAST_LIMIT_SHARE = 1e-6
# Up to this many slices a search ends sooner without probing.
FEW_SLICES = 1000
# The passes that a search makes, roughly: they decide whether compiling pays.
EXPECTED_PASSES = 32


Peaks = tuple[float, float]  # forward and backward


class SliceSum(NamedTuple):
    """Slices with the sum of their times, and the highest value of each peak."""

    sum: float
    peaks: Peaks
    lengths: tuple[int, ...]  # of the slices, in grid points


class PeakLimits(NamedTuple):
    """What the peaks of all slices must stay below, each of them and both together."""

    first: float
    second: float
    total: float


# A pass takes limits of the peaks and a limit of the sum of the peaks.
# It returns the cheapest slices below these limits, or None.
LimitedPass = Callable[[Peaks, float], SliceSum | None]


class BestSlices(NamedTuple):
    """The result of a search, and a lower bound on the latency.

    The bound is below the latency of `slices` only if the search stopped early.
    """

    slices: SliceSum
    passes: int
    bound: float


@dataclass(frozen=True, slots=True)
class Slicing:
    """Slices in grid points and their latency. `bound` is less than it only if the search stopped early."""

    lengths: tuple[int, ...]
    latency: float
    bound: float
    passes: int  # passes of the dynamic program that it took to prove the optimum


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
    >>> from penstock.plan.slices.curves import times_from_curves
    >>> linear = Seconds(base=1.0, token=1.0)
    >>> best_cuts(times_from_curves(12, 1, [linear], [linear]), stages=4).lengths
    (2, 2, 2, 2, 2, 2)
    """
    if stages < 1:
        raise ShapeError(f"there must be at least 1 stage, not {stages}")
    if slices is not None and not 1 <= slices <= times.points:
        raise ShapeError(
            f"a sequence of {times.points} points cannot have {slices} slices; "
            f"give from 1 to {times.points}"
        )
    weight = stages - 1
    starts = [
        evaluate_slices(times, lengths)
        for lengths in starting_cuts(times.points, slices)
    ]
    known = _best_of(starts, weight)
    known_latency = latency_with_peaks(known, weight)
    least_sum = times.least_sum * LEAST_SUM_FACTOR
    grid = times.grid_below(peak_allowance(known_latency, least_sum, weight))
    run_pass = pass_over(grid, slices)
    best = least_latency(run_pass, weight, known, patience, probes_for(grid))
    latency = latency_with_peaks(best.slices, weight)
    if latency == math.inf:
        raise ShapeError(
            "no cuts take a finite time; "
            "allow more slices, or give shorter slices a finite time"
        )
    return Slicing(best.slices.lengths, latency, best.bound, best.passes)


def check_lengths(lengths: Sequence[int], points: int) -> None:
    """Refuse slices that are empty or do not add up to the sequence."""
    if sum(lengths) != points or min(lengths, default=0) < 1:
        raise ShapeError(
            f"slices of {list(lengths)} points make {sum(lengths)}, "
            f"but the sequence has {points}; each slice has at least 1"
        )


def evaluate_slices(times: SliceTimes, lengths: Sequence[int]) -> SliceSum:
    """Return the sum and the peaks of given slices."""
    sizes = np.asarray(lengths, dtype=np.int64)
    prefixes = np.cumsum(sizes) - sizes
    sums, peaks = times.of(prefixes, sizes)
    first, second = peaks.max(axis=1).tolist()
    return SliceSum(float(sums.sum()), (first, second), tuple(sizes.tolist()))


def equal_length(points: int, slices: int) -> list[int]:
    """Return slices whose lengths differ by at most one point."""
    ends = np.rint(np.arange(slices + 1) / slices * points)
    return [int(length) for length in np.diff(ends)]


def starting_cuts(points: int, slices: int | None) -> list[list[int]]:
    """Return slices of equal length to start a search with: as many as are asked for, or powers of two."""
    powers = [1 << power for power in range(points.bit_length())]
    return [equal_length(points, count) for count in ([slices] if slices else powers)]


# ---------------------------------------------------------------- limits on the longest slice
class LimitBox(NamedTuple):
    """All slices with peaks from `low` up to below `high`; none of their sums is less than `sum`."""

    bound: float
    number: int
    low: Peaks
    high: Peaks
    sum: float


def latency_with_peaks(slices: SliceSum, weight: float) -> float:
    """Return the sum of the slices plus `weight` times their peaks."""
    if not weight:  # a peak may be infinite
        return slices.sum
    return slices.sum + weight * sum(slices.peaks)


def peak_allowance(latency: float, least_sum: float, weight: float) -> float:
    """Return a bound on the sum of the peaks of any slices that beat a latency, if no sum is below `least_sum`."""
    if not weight:
        return math.inf
    return (latency * (1 + SUM_TOLERANCE) - least_sum) / weight


def least_latency(
    run_pass: LimitedPass,
    weight: float,
    known: SliceSum,
    patience: int | None = None,
    probes: int = PROBE_ROUNDS,
) -> BestSlices:
    """Find the slices of least latency.

    The search starts from `known`, which may be any slices; better ones make it faster.
    It stops after `patience` passes even if it has not proven its result.
    """
    best = known
    passes = 0
    if weight:
        best, passes = probe_limits(run_pass, weight, known, probes)
    boxes = [LimitBox(0.0, 0, (0.0, 0.0), (math.inf, math.inf), 0.0)]
    while boxes:
        box = boxes[0]
        best_latency = latency_with_peaks(best, weight)
        allowance = peak_allowance(best_latency, box.sum, weight)
        spare = allowance - sum(box.low)
        if patience is not None and passes >= patience and spare > 0:
            return BestSlices(best, passes, min(box.bound, best_latency))
        heapq.heappop(boxes)
        if spare <= 0:
            continue
        high = (
            min(box.high[0], box.low[0] + spare),
            min(box.high[1], box.low[1] + spare),
        )
        candidate = run_pass(high, allowance)
        passes += 1
        if candidate is None:
            continue
        best = _best_of((best, candidate), weight)
        if not weight:
            continue
        allowance = peak_allowance(
            latency_with_peaks(best, weight), candidate.sum, weight
        )
        rest = _remaining_boxes(box.low, high, candidate.peaks, allowance)
        for peak, (low, top) in enumerate(rest):
            if low[peak] < top[peak]:
                bound = candidate.sum + weight * sum(low)
                number = 2 * passes + peak
                heapq.heappush(boxes, LimitBox(bound, number, low, top, candidate.sum))
    return BestSlices(best, passes, latency_with_peaks(best, weight))


def _best_of(candidates: Iterable[SliceSum], weight: float) -> SliceSum:
    """Return the slices of least latency; the first of equally good ones."""
    return min(candidates, key=lambda slices: latency_with_peaks(slices, weight))


def _remaining_boxes(
    low: Peaks, high: Peaks, peaks: Peaks, allowance: float
) -> tuple[tuple[Peaks, Peaks], tuple[Peaks, Peaks]]:
    """Return the boxes of limits that can still hold better slices.

    The peaks of better slices add up to less than `allowance`, and at least one of them
    is lower than the peak that the pass found.

    high ┌────┬───────┐
         │    │ worse │     The first peak is either below a split, or at least the split. In the second case
         │ 1  ├───────┤     the second peak is lower than the one found, since with that one the two would
         │    │   2   │     add up to the allowance.
    low  └────┴───────┘
              split = allowance - second peak found
    """
    split = min(peaks[0], max(low[0], allowance - peaks[1]))
    below_split = (low, (split, high[1]))
    from_split = ((split, low[1]), (high[0], min(high[1], peaks[1])))
    return below_split, from_split


def probe_limits(
    run_pass: LimitedPass, weight: float, known: SliceSum, rounds: int
) -> tuple[SliceSum, int]:
    """Find a good start with passes at limits around the best ones known, first far from them, then nearer.

    Returns the best slices and the number of passes.
    """
    best = known
    passes = 0
    if not 0 < sum(known.peaks) < math.inf:
        return best, passes
    tried: set[Peaks] = set()
    step = FIRST_PROBE_STEP
    for _ in range(rounds):
        first, second = (math.nextafter(peak, math.inf) for peak in best.peaks)
        before = latency_with_peaks(best, weight)
        for side, other in PROBE_SIDES:
            limits = (first * step**side, second * step**other)
            if limits in tried:
                continue
            tried.add(limits)
            candidate = run_pass(limits, math.inf)
            passes += 1
            if candidate is not None:
                best = _best_of((best, candidate), weight)
        if latency_with_peaks(best, weight) >= before:
            step = 1 + (step - 1) / PROBE_STEP_SHRINK
    return best, passes


# ---------------------------------------------------------------- one pass
def probes_for(*grids: Grid) -> int:
    """Return the rounds of probing that pay for a search over these grids."""
    slices = sum(len(grid.sums) for grid in grids)
    return PROBE_ROUNDS if slices > FEW_SLICES else 0


def pass_over(grid: Grid, slices: int | None = None) -> LimitedPass:
    """Return a function that makes passes over a grid, for any limits.

    With `slices`, it looks only for paths of exactly this many slices.
    """
    points = len(grid.first) - 1
    layers = slices or 1
    size = len(grid.sums) * EXPECTED_PASSES * layers
    walk = compile_if_large(reach, size)
    walk_back = compile_if_large(retrace, size)
    reached = np.empty((layers + 1 if slices else 1, points + 1))
    steps = np.empty(points, dtype=np.int64)
    highest = np.empty(2)
    totals = grid.peaks.sum(axis=0)
    highest_total = float(totals.max(initial=0.0, where=np.isfinite(totals)))
    narrow_grids = {0: grid}

    def grid_for(total: float) -> Grid:
        """The slices that a pass must look at: a low limit leaves few."""
        level = 0
        if highest_total * LEAST_LIMIT_SHARE < total < highest_total:
            level = int(math.log(highest_total / total, LIMIT_RATIO))
        if level not in narrow_grids:
            limit = 1.000001 * highest_total / LIMIT_RATIO**level
            narrow_grids[level] = narrow_grid(grid, limit)
        return narrow_grids[level]

    def run_pass(peaks: Peaks, total: float) -> SliceSum | None:
        total = min(total, sum(peaks))
        limits = PeakLimits(min(peaks[0], total), min(peaks[1], total), total)
        narrow = grid_for(total)
        walk(narrow, limits, reached)
        least_sum = float(reached[-1, points])
        if least_sum == math.inf:
            return None
        count = walk_back(narrow, limits, reached, points, steps, highest)
        lengths = tuple(steps[:count][::-1].tolist())
        return SliceSum(least_sum, (float(highest[0]), float(highest[1])), lengths)

    return run_pass


def reach(grid: Grid, limits: PeakLimits, reached: Floats) -> None:
    """Fill `reached` with the least sum at every point: one row for any slices, or a row for 0, 1, 2, ... slices.

    The inner loop has no branches, so that it compiles to vector instructions.
    """
    first, sums, peaks = grid
    first_peaks = peaks[0]
    second_peaks = peaks[1]
    reached[:] = np.inf
    reached[0, 0] = 0.0
    layered = len(reached) > 1
    for layer in range(max(len(reached) - 1, 1)):
        now = reached[layer]
        then = reached[layer + 1] if layered else now
        for prefix in range(layer, len(first) - 1):
            here = now[prefix]
            begin = first[prefix]
            if here == np.inf:
                continue
            for k in range(first[prefix + 1] - begin):
                a = first_peaks[begin + k]
                b = second_peaks[begin + k]
                fits = (a < limits.first) & (b < limits.second) & (a + b < limits.total)
                there = here + sums[begin + k] if fits else np.inf
                known = then[prefix + 1 + k]
                then[prefix + 1 + k] = there if there < known else known


def retrace(
    grid: Grid,
    limits: PeakLimits,
    reached: Floats,
    point: int,
    steps: Ints,
    highest: Floats,
) -> int:
    """Write the slices of the least sum up to a point into `steps`, last first, and their peaks into `highest`.

    Returns the number of slices.
    """
    first, sums, peaks = grid
    layer = len(reached) - 1
    layered = layer > 0
    count = 0
    highest[:] = 0.0
    while point > 0:
        now = reached[layer]
        before = reached[layer - 1] if layered else now
        prefix = point - 1
        while True:
            index = first[prefix] + point - 1 - prefix
            if index < first[prefix + 1] and before[prefix] + sums[index] == now[point]:
                a = peaks[0, index]
                b = peaks[1, index]
                if a < limits.first and b < limits.second and a + b < limits.total:
                    break
            prefix -= 1
        highest[0] = max(highest[0], a)
        highest[1] = max(highest[1], b)
        steps[count] = point - prefix
        count += 1
        point = prefix
        if layered:
            layer -= 1
    return count
