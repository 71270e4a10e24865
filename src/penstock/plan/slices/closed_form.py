"""Cuts by a formula, good enough to start a search with.

If a slice of i tokens after j takes a + p i + c (i j + i i / 2), the sum over M slices is M a + W with W the time of
the whole sequence less one a, however it is cut: only M and the longest slice count. So equal times are best,

    M = sqrt((K - 1) W / a)      p x + c x x / 2 = k W / M   at the end x of slice k

through K stages. Times that are not like this are fitted; the search corrects what the formula gets wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from penstock.cost.curve import Seconds
from penstock.ir.table import Floats
from penstock.plan.slices.slice_times import SliceTimes

FIT_SAMPLES = 12  # prefixes, and lengths, that are fitted


def starting_cuts(
    times: SliceTimes, stages: float, slices: int | None = None
) -> Iterator[list[int]]:
    """Slices worth a try, in points: of equal length, and of equal time by the formula."""
    points, curve = times.points, fit_slice_curve(times)
    count = slices or slices_by_formula(curve, points, stages)
    yield equal_length(points, slices or 1)
    for number in (
        {count}
        if slices
        else {min(max(round(count * factor), 1), points) for factor in (0.8, 1.0, 1.25)}
    ):
        yield equal_time(curve, points, number)


def slices_by_formula(curve: Seconds, points: int, stages: float) -> int:
    """M of the formula."""
    whole = curve.token * points + curve.pair * points * points / 2
    if curve.base <= 0 or whole <= 0:
        return points if whole > 0 else 1
    return min(max(round(math.sqrt((stages - 1) * whole / curve.base)), 1), points)


def equal_time(curve: Seconds, points: int, slices: int) -> list[int]:
    """So many slices that take the same time by a curve, as nearly as whole points allow; none is empty."""
    token, pair = max(curve.token, 0.0), max(curve.pair, 0.0) * points
    if token + pair <= 0:
        return equal_length(points, slices)
    token, pair = token / (token + pair), pair / (token + pair) / points
    work = (
        np.arange(1, slices + 1)
        / slices
        * (token * points + pair * points * points / 2)
    )
    # p x + c x x / 2 = w, without the difference of two large numbers
    ends = 2 * work / (token + np.sqrt(token * token + 2 * pair * work))
    return _whole(np.concatenate([[0.0], ends]), points)


def equal_length(points: int, slices: int) -> list[int]:
    """So many slices, the longest and the shortest one point apart."""
    return _whole(np.arange(slices + 1) / slices * points, points)


def _whole(ends: Floats, points: int) -> list[int]:
    """Ends moved to whole points, each slice with one at least."""
    slices = len(ends) - 1
    whole = np.rint(ends).astype(np.int64)
    whole[0], whole[-1] = 0, points
    steps = np.arange(slices + 1)
    whole = (
        np.maximum.accumulate(whole - steps) + steps
    )  # each end past the one before it
    whole = np.minimum(whole, points - slices + steps)  # and room for those after it
    return [int(length) for length in np.diff(whole)]


def fit_slice_curve(times: SliceTimes) -> Seconds:
    """The curve, in points, nearest to what a slice adds to the sum."""
    spread = np.unique(np.linspace(0, times.points - 1, FIT_SAMPLES).astype(np.int64))
    prefix, length = (axis.ravel() for axis in np.meshgrid(spread, spread + 1))
    inside = prefix + length <= times.points
    prefix, length = prefix[inside], length[inside]
    sums = times.of(prefix, length)[0]
    finite = np.isfinite(sums)
    if not finite.any():
        return Seconds(token=1.0)
    pairs = length * prefix + length * length / 2
    terms = np.stack([np.ones(len(pairs)), length, pairs], axis=1)[finite]
    scale = np.maximum(sums[finite], 1e-300)  # errors count by their share
    found = np.linalg.lstsq(terms / scale[:, None], sums[finite] / scale, rcond=None)[0]
    return Seconds(base=float(found[0]), token=float(found[1]), pair=float(found[2]))
