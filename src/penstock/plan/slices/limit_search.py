"""The search behind all cuts: which limits on the longest slice are worth a pass, until nothing better can exist.

Wanted is the least of: sum of all slices + weight * (the longest slice's peak). A *pass* finds the least sum S of
slices whose peaks stay below given limits. If B is the best latency known, anything better below those limits has

    S + weight * peak < B,    so    peak < (B - S) / weight

and the next limit worth a pass is that, or the peak that was found if it is lower. With a good B few passes are left:

    limit  ──────────●────────●───●─●●●─────●──────────●────────   each pass rules out all down to the next
                                    B is found here

Slices with two peaks, one there and one back, have boxes of limits, and a pass leaves two smaller ones. When no box is
left, B is the least there is. Nothing is assumed about the times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

SUM_TOLERANCE = 1e-13  # of a latency: what sums of seconds may be off by
PROBE_ROUNDS = 8  # rounds of passes for a good start
SIDES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (-1,), (0,)],
    2: [(1, 1), (-1, -1), (1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1)],
}  # where, around the best limits known


class RowGroup(NamedTuple):
    """Rows of a batch that go through together, and the lengths of their slices in grid points."""

    rows: int
    lengths: tuple[int, ...]


class SliceSum(NamedTuple):
    """Slices, with their sum and the highest of each of their peaks."""

    sum: float
    peaks: tuple[float, ...]
    groups: tuple[RowGroup, ...]


LimitedPass = Callable[
    [Sequence[float], float], SliceSum | None
]  # limits of the peaks, and of their sum


class BestSlices(NamedTuple):
    """The best there is, how many passes it took, and a latency that nothing goes below (less only if stopped)."""

    found: SliceSum
    passes: int
    bound: float


class LimitBox(NamedTuple):
    """Slices with peaks from `low` up to below `high`, of which no sum is less than `sum`."""

    bound: float
    number: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    sum: float


def latency_with_peaks(found: SliceSum, weight: float) -> float:
    """The latency."""
    return found.sum + weight * sum(found.peaks) if weight else found.sum


def peak_allowance(latency: float, least_sum: float, weight: float) -> float:
    """What the peaks of anything better than a latency add up to, at most, if no sum is less than one given."""
    return (latency * (1 + SUM_TOLERANCE) - least_sum) / weight if weight else math.inf


def least_latency(
    seek: LimitedPass,
    weight: float,
    known: SliceSum,
    patience: int | None = None,
    probes: int = PROBE_ROUNDS,
) -> BestSlices:
    """What has the least latency. `known` is anything, the better the faster; after `patience` passes it stops."""
    best, passes = probe_limits(seek, weight, known, probes) if weight else (known, 0)
    kinds = len(known.peaks)
    boxes = [LimitBox(0.0, 0, (0.0,) * kinds, (math.inf,) * kinds, 0.0)]
    while boxes:
        box = boxes[0]
        most = peak_allowance(latency_with_peaks(best, weight), box.sum, weight)
        spare = most - sum(box.low)
        if patience is not None and passes >= patience and spare > 0:
            return BestSlices(
                best, passes, min(box.bound, latency_with_peaks(best, weight))
            )
        heapq.heappop(boxes)
        if spare <= 0:
            continue
        high = tuple(
            min(top, low + spare) for top, low in zip(box.high, box.low, strict=True)
        )
        found, passes = seek(high, most), passes + 1
        if found is None:
            continue
        best = min(best, found, key=lambda f: latency_with_peaks(f, weight))
        most = peak_allowance(latency_with_peaks(best, weight), found.sum, weight)
        for peak, (low, top) in enumerate(_left(box.low, high, found.peaks, most)):
            if weight and low[peak] < top[peak]:
                bound = found.sum + weight * sum(low)
                heapq.heappush(
                    boxes, LimitBox(bound, passes * kinds + peak, low, top, found.sum)
                )
    return BestSlices(best, passes, latency_with_peaks(best, weight))


def _left(
    low: tuple[float, ...],
    high: tuple[float, ...],
    peaks: tuple[float, ...],
    most: float,
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Where better slices can be: their peaks add up to less than `most`, and not all are as high as those found.

    high ┌────┬───────┐
         │    │ worse │     the first peak is below a split, or from the split on; then the second is lower
         │ 1  ├───────┤     than the one found, since with it the two would add up to `most`
         │    │   2   │
    low  └────┴───────┘
              split = most - second peak found
    """
    if len(peaks) == 1:
        return [(low, (min(high[0], peaks[0]),))]
    split = min(peaks[0], max(low[0], most - peaks[1]))
    return [
        (low, (split, high[1])),
        ((split, low[1]), (high[0], min(high[1], peaks[1]))),
    ]


def probe_limits(
    seek: LimitedPass, weight: float, known: SliceSum, rounds: int
) -> tuple[SliceSum, int]:
    """A good start: passes at limits around the best ones known, first far from them, then ever nearer."""
    best, passes, tried = known, 0, set[tuple[float, ...]]()
    step = 1.25
    if not 0 < sum(known.peaks) < math.inf:
        return best, passes
    for _ in range(rounds):
        centre = tuple(math.nextafter(peak, math.inf) for peak in best.peaks)
        before = latency_with_peaks(best, weight)
        for sides in SIDES[len(centre)]:
            limits = tuple(
                c * step**side for c, side in zip(centre, sides, strict=True)
            )
            if limits not in tried:
                tried.add(limits)
                found, passes = seek(limits, math.inf), passes + 1
                best = (
                    best
                    if found is None
                    else min(best, found, key=lambda f: latency_with_peaks(f, weight))
                )
        if latency_with_peaks(best, weight) >= before:
            step = 1 + (step - 1) / 3
    return best, passes
