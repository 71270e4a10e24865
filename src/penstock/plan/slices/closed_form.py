"""Cuts from a closed formula, which are good enough to start a search with.

If a slice of i tokens after a prefix of j tokens takes a + p i + c (i j + i i / 2), then the sum over M slices is
M a + W, where W is the time of the whole sequence less one a. This holds however the sequence is cut, so only M and the
longest slice matter. Slices of equal time are best, and through K stages

    M = sqrt((K - 1) W / a)      p x + c x x / 2 = k W / M   at the end x of slice k

Times of another form are first fitted by this one. The search then corrects what the formula gets wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from penstock.cost.curve import Seconds
from penstock.ir.table import Floats
from penstock.plan.slices.slice_times import SliceTimes

# The fit samples this many prefixes, and as many lengths.
FIT_SAMPLES = 12
# A search also tries these multiples of the formula's number of slices.
COUNT_FACTORS = (0.8, 1.0, 1.25)


def starting_cuts(
    times: SliceTimes, stages: float, slices: int | None = None
) -> Iterator[list[int]]:
    """Yield slices worth a try, in points: of equal length, and of equal time by the formula."""
    points = times.points
    curve = fit_slice_curve(times)
    yield equal_length(points, slices or 1)
    if slices:
        yield equal_time(curve, points, slices)
        return
    count = slices_by_formula(curve, points, stages)
    near_counts = {
        min(max(round(count * factor), 1), points) for factor in COUNT_FACTORS
    }
    for near_count in near_counts:
        yield equal_time(curve, points, near_count)


def slices_by_formula(curve: Seconds, points: int, stages: float) -> int:
    """Return M of the formula."""
    whole = curve.token * points + curve.pair * points * points / 2
    if whole <= 0:
        return 1
    if curve.base <= 0:
        return points
    count = round(math.sqrt((stages - 1) * whole / curve.base))
    return min(max(count, 1), points)


def equal_time(curve: Seconds, points: int, slices: int) -> list[int]:
    """Return slices that take the same time by a curve, as nearly as whole points allow; no slice is empty."""
    token = max(curve.token, 0.0)
    pair = max(curve.pair, 0.0) * points
    total = token + pair
    if total <= 0:
        return equal_length(points, slices)
    token = token / total
    pair = pair / total / points
    whole = token * points + pair * points * points / 2
    work = np.arange(1, slices + 1) / slices * whole
    # This solves p x + c x x / 2 = work without the difference of two large numbers.
    ends = 2 * work / (token + np.sqrt(token * token + 2 * pair * work))
    return _round_to_points(np.concatenate([[0.0], ends]), points)


def equal_length(points: int, slices: int) -> list[int]:
    """Return slices whose lengths differ by at most one point."""
    return _round_to_points(np.arange(slices + 1) / slices * points, points)


def _round_to_points(ends: Floats, points: int) -> list[int]:
    """Move ends to whole points such that each slice has at least one, and return the lengths."""
    slices = len(ends) - 1
    whole = np.rint(ends).astype(np.int64)
    whole[0] = 0
    whole[-1] = points
    steps = np.arange(slices + 1)
    # Each end lies after the one before it,
    whole = np.maximum.accumulate(whole - steps) + steps
    # and leaves room for the slices after it.
    whole = np.minimum(whole, points - slices + steps)
    return [int(length) for length in np.diff(whole)]


def fit_slice_curve(times: SliceTimes) -> Seconds:
    """Return the curve, in points, that is nearest to what a slice adds to the sum."""
    samples = np.linspace(0, times.points - 1, FIT_SAMPLES).astype(np.int64)
    samples = np.unique(samples)
    prefix, length = np.meshgrid(samples, samples + 1)
    inside = prefix + length <= times.points
    prefix = prefix[inside]
    length = length[inside]
    sums = times.of(prefix, length)[0]
    finite = np.isfinite(sums)
    if not finite.any():
        return Seconds(token=1.0)
    pairs = length * prefix + length * length / 2
    terms = np.stack([np.ones(len(pairs)), length, pairs], axis=1)[finite]
    scale = np.maximum(sums[finite], 1e-300)  # so that relative errors count
    answer = np.linalg.lstsq(terms / scale[:, None], sums[finite] / scale, rcond=None)
    base, token, pair = answer[0].tolist()
    return Seconds(base=base, token=token, pair=pair)
