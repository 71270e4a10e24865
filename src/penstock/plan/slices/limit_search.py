"""The search over limits on the longest slice (TeraPipe's t_max), which goes on until nothing better can exist.

The goal is the least value of: sum of all slices + weight * (peak of the longest slice). One *pass* finds the least sum
S of slices whose peaks stay below given limits. If B is the best latency known, anything better below those limits has

    S + weight * peak < B,    so    peak < (B - S) / weight

The next limit worth a pass is this value, or the peak that the pass found if that is lower. With a good B, few passes
are left:

    limit  ──────────●────────●───●─●●●─────●──────────●────────   each pass rules out all down to the next
                                    B is found here

Slices with two peaks, one forward and one backward, have boxes of limits, and each pass leaves two smaller boxes. When
no box is left, B is the optimum. The search assumes nothing about the times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# The share of a latency by which sums of seconds may be off because of rounding.
SUM_TOLERANCE = 1e-13
# Rounds of probing that look for a good start.
PROBE_ROUNDS = 8
# The factor between the limits of the first round of probing, and how it shrinks.
FIRST_PROBE_STEP = 1.25
PROBE_STEP_SHRINK = 3
# Where to probe around the best limits known, for one peak and for two.
PROBE_SIDES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (-1,), (0,)],
    2: [(1, 1), (-1, -1), (1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1)],
}


class RowGroup(NamedTuple):
    """Rows of a batch that go through together, and the lengths of their slices in grid points."""

    rows: int
    lengths: tuple[int, ...]


class SliceSum(NamedTuple):
    """Slices with the sum of their times, and the highest value of each peak."""

    sum: float
    peaks: tuple[float, ...]
    groups: tuple[RowGroup, ...]


# A pass takes limits of the peaks and a limit of the sum of the peaks.
# It returns the cheapest slices below these limits, or None.
LimitedPass = Callable[[Sequence[float], float], SliceSum | None]


class BestSlices(NamedTuple):
    """The result of a search, and a lower bound on the latency.

    The bound is below the latency of `slices` only if the search stopped early.
    """

    slices: SliceSum
    passes: int
    bound: float


class LimitBox(NamedTuple):
    """All slices with peaks from `low` up to below `high`; none of their sums is less than `sum`."""

    bound: float
    number: int
    low: tuple[float, ...]
    high: tuple[float, ...]
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
    peaks = len(known.peaks)
    boxes = [LimitBox(0.0, 0, (0.0,) * peaks, (math.inf,) * peaks, 0.0)]
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
        high = tuple(
            min(top, low + spare) for top, low in zip(box.high, box.low, strict=True)
        )
        candidate = run_pass(high, allowance)
        passes += 1
        if candidate is None:
            continue
        best = _better(best, candidate, weight)
        if not weight:
            continue
        allowance = peak_allowance(
            latency_with_peaks(best, weight), candidate.sum, weight
        )
        rest = _remaining_boxes(box.low, high, candidate.peaks, allowance)
        for peak, (low, top) in enumerate(rest):
            if low[peak] < top[peak]:
                bound = candidate.sum + weight * sum(low)
                number = passes * peaks + peak
                heapq.heappush(boxes, LimitBox(bound, number, low, top, candidate.sum))
    return BestSlices(best, passes, latency_with_peaks(best, weight))


def _better(best: SliceSum, candidate: SliceSum, weight: float) -> SliceSum:
    """Return the slices of less latency; the first if both are equally good."""
    return min(best, candidate, key=lambda slices: latency_with_peaks(slices, weight))


def _remaining_boxes(
    low: tuple[float, ...],
    high: tuple[float, ...],
    peaks: tuple[float, ...],
    allowance: float,
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
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
    if len(peaks) == 1:
        return [(low, (min(high[0], peaks[0]),))]
    split = min(peaks[0], max(low[0], allowance - peaks[1]))
    below_split = (low, (split, high[1]))
    from_split = ((split, low[1]), (high[0], min(high[1], peaks[1])))
    return [below_split, from_split]


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
    tried: set[tuple[float, ...]] = set()
    step = FIRST_PROBE_STEP
    for _ in range(rounds):
        centre = tuple(math.nextafter(peak, math.inf) for peak in best.peaks)
        before = latency_with_peaks(best, weight)
        for sides in PROBE_SIDES[len(centre)]:
            limits = tuple(
                peak * step**side for peak, side in zip(centre, sides, strict=True)
            )
            if limits in tried:
                continue
            tried.add(limits)
            candidate = run_pass(limits, math.inf)
            passes += 1
            if candidate is not None:
                best = _better(best, candidate, weight)
        if latency_with_peaks(best, weight) >= before:
            step = 1 + (step - 1) / PROBE_STEP_SHRINK
    return best, passes
