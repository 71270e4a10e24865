"""The times of all slices that a sequence can be cut into: of one stage, and of every stage of a pipeline.

A sequence is a row of grid points, and a slice goes from one point to another. A row of a grid holds the slices after
one prefix:

    prefix 0 | 1 2 3 4 5      slices of 1, 2, ... points
    prefix 1 | 1 2 3 4        a row ends where no longer slice is below the limit, so that a search
    prefix 2 | 1 2 3          walks over a narrow band instead of the whole triangle
    prefix 3 | 1 2
    prefix 4 | 1

A slice has two sorts of times. Its `sum` is what it adds to the work of a rank. Its `peaks` are what the ranks before
and after it wait for, and only the largest value of each peak counts. Forwards f and backwards b have sum f + b and
two peaks, f and b, each with its hop. Where only one peak counts, the other is 0.

The curves are those that a cost is made of. Formulas are used as they are. Curves with corrections become tables,
because cuts that follow a formula miss the tiles of kernels; where a table would be too large, the points move apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import Cost, ModelCost, PartsCost
from penstock.cost.curve import (
    TERMS,
    CorrectedCurve,
    Curve,
    Seconds,
    Total,
    seconds_along,
    sum_curves,
)
from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import MicroBatch
from penstock.ir.table import Floats, Ints
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import loop_placement

MAX_PEAKS = 2  # the peaks that a slice can have: forward and backward
MAX_TABLE_POINTS = 1024  # of a sequence whose slices are tabulated
# If a table could only have fewer points than this, formulas without corrections are used.
MIN_TABLE_POINTS = 16
NO_TIME = Seconds()


class Grid(NamedTuple):
    """Slices below a limit: the row of prefix p lies from `first[p]` to `first[p + 1]`, the shortest slice first."""

    first: Ints
    sums: Floats
    peaks: Floats  # a row for the first peak, and one for the second


def narrow_grid(grid: Grid, limit: float) -> Grid:
    """Cut each row after its last slice whose peaks together are below a lower limit."""
    widths = np.diff(grid.first)
    rows = np.repeat(np.arange(len(widths)), widths)
    lengths = np.arange(len(rows)) - grid.first[rows] + 1
    fits = grid.peaks.sum(axis=0) < limit
    longest = np.zeros(len(widths), dtype=np.int64)
    # A row occurs once for each of its slices; the last assignment stays, the longest.
    longest[rows[fits]] = lengths[fits]
    inside = lengths <= longest[rows]
    first = np.concatenate([[0], np.cumsum(longest)])
    return Grid(first, grid.sums[inside], grid.peaks[:, inside])


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """The seconds of all slices of a sequence of `points` points.

    of: the sums and peaks of slices, given by prefix and length in points.
    longest_below: the length of the longest slice after each prefix whose peaks together are below a limit.
    least_sum: a lower bound on the sum of any cuts.
    """

    points: int
    of: Callable[[Ints, Ints], tuple[Floats, Floats]]
    longest_below: Callable[[float], Ints]
    least_sum: float

    def grid_below(self, limit: float) -> Grid:
        """Return at least all slices whose peaks together are below a limit."""
        longest = self.longest_below(limit)
        first = np.concatenate([[0], np.cumsum(longest)])
        rows = np.repeat(np.arange(self.points), longest)
        lengths = np.arange(len(rows)) - first[rows] + 1
        sums, peaks = self.of(rows, lengths)
        return Grid(first, sums, peaks)


# ---------------------------------------------------------------- from tables
def tabulated_times(sums: Floats, first: Floats, second: Floats) -> SliceTimes:
    """Return times from tables of sums and peaks, [prefix, length - 1], whose values need not rise with the length.

    An impossible slice has the time `inf`.
    """
    points = len(sums)
    peaks = np.stack([first, second])
    total = first + second

    def times_of(prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        return sums[prefixes, lengths - 1], peaks[:, prefixes, lengths - 1]

    def longest_below(limit: float) -> Ints:
        longest = np.zeros(points, dtype=np.int64)
        compile_if_large(_find_longest, points**2)(total, limit, longest)
        return longest

    least_sum = float(compile_if_large(_find_least_sum, points**2)(sums))
    return SliceTimes(points, times_of, longest_below, least_sum)


def _find_least_sum(sums: Floats) -> float:
    """Return the least sum of slices that make up the sequence."""
    points = len(sums)
    best = np.full(points + 1, np.inf)
    best[0] = 0.0
    for prefix in range(points):
        here = best[prefix]
        for column in range(points - prefix):
            there = here + sums[prefix, column]
            best[prefix + column + 1] = min(best[prefix + column + 1], there)
    return float(best[points])


def _find_longest(total: Floats, limit: float, longest: Ints) -> None:
    """Write the length of the longest slice below the limit, after every prefix, into `longest`."""
    points = len(total)
    for prefix in range(points):
        length = points - prefix
        while length > 0 and not total[prefix, length - 1] < limit:
            length -= 1
        longest[prefix] = length


def _check_seconds(table: Floats) -> None:
    """Refuse a table in which a slice inside the sequence has a negative time or NaN."""
    place = np.zeros(2, dtype=np.int64)
    if compile_if_large(_find_invalid, len(table) ** 2)(table, place):
        prefix, column = place.tolist()
        raise ShapeError(
            f"a slice of {column + 1} points after {prefix} "
            f"takes {table[prefix, column]:g} seconds; a time must be at least 0"
        )


def _find_invalid(table: Floats, place: Ints) -> bool:
    """Whether a slice has a negative time or NaN; its prefix and column go into `place`."""
    for prefix in range(len(table)):
        for column in range(len(table) - prefix):
            if not table[prefix, column] >= 0:  # also true for NaN
                place[0] = prefix
                place[1] = column
                return True
    return False


# ---------------------------------------------------------------- from curves
def times_from_curves(
    points: int, grain: int, sums: Sequence[Curve], peaks: Sequence[Curve]
) -> SliceTimes:
    """Return times from curves in tokens, with points of `grain` tokens; the sum of a slice adds up all `sums`.

    There are one or two peaks.

    Formulas without negative terms do not fall as a slice grows, so they need no table.
    """
    if points < 1 or grain < 1 or not 1 <= len(peaks) <= MAX_PEAKS:
        raise ShapeError(
            f"{points} points of {grain} tokens with {len(peaks)} peaks make no grid; "
            f"it takes at least 1 of each, and at most {MAX_PEAKS} peaks"
        )
    work = sum_curves([(1, curve) for curve in sums])
    peaks = (*peaks, NO_TIME)[:MAX_PEAKS]
    curves = (work, *peaks)
    if not all(_never_falls(curve) for curve in curves):
        tables = [_tabulate(curve, points, grain) for curve in curves]
        for table in tables:
            _check_seconds(table)
        return tabulated_times(*tables)

    def times_of(prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        tokens = (lengths * grain).astype(np.float64)
        before = (prefixes * grain).astype(np.float64)
        highest = [seconds_along(peak, tokens, before) for peak in peaks]
        return seconds_along(work, tokens, before), np.stack(highest)

    def longest_below(limit: float) -> Ints:
        prefixes = np.arange(points)
        low = np.zeros(points, dtype=np.int64)
        high = points - prefixes
        # The longest slice below the limit has a length from low to high.
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = times_of(prefixes, middle)[1].sum(axis=0) < limit
            low = np.where(fits, middle, low)
            high = np.where(fits, high, middle - 1)
        return low

    # Any cuts have the same tokens and pairs as the whole sequence, and at least one base.
    return SliceTimes(points, times_of, longest_below, work.of(points * grain, 0))


def _never_falls(curve: Curve) -> bool:
    """Whether a curve is a formula in which longer slices take no less time."""
    if not isinstance(curve, Seconds):
        return False
    return all(getattr(curve, term) >= 0 for term in TERMS)


def _tabulate(curve: Curve, points: int, grain: int) -> Floats:
    """Return the seconds of every slice, [prefix, length - 1]."""
    prefixes, columns = np.indices((points, points)).reshape(2, -1)
    inside = prefixes + columns < points
    tokens = ((columns[inside] + 1) * grain).astype(np.float64)
    before = (prefixes[inside] * grain).astype(np.float64)
    table = np.zeros(points * points)
    table[inside] = seconds_along(curve, tokens, before)
    return table.reshape(points, points)


# ---------------------------------------------------------------- the stages of a pipeline
@dataclass(frozen=True, slots=True)
class StageTables:
    """Seconds of every slice on every stage, [stage, prefix, length - 1], and of the hops from each stage."""

    forward: Floats
    backward: Floats
    onward: Floats  # to the next stage; not used for the last stage
    homeward: Floats  # to the stage before; not used for the first stage

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def points(self) -> int:
        """The length of the sequence in grid points."""
        return int(self.forward.shape[1])


@dataclass(frozen=True, slots=True)
class SlicedPipeline:
    """The curves of stages one after the other, for sequences of `points` points of `grain` tokens each."""

    points: int
    grain: int
    forward: tuple[Curve, ...]
    backward: tuple[Curve, ...]
    onward: tuple[Curve, ...]  # hops from each stage but the last to the next one
    homeward: tuple[Curve, ...]  # hops from each stage but the first to the one before

    @property
    def groups(self) -> tuple[tuple[Curve, ...], ...]:
        """The curves that are equal on equal stages."""
        return self.forward, self.backward, self.onward, self.homeward

    @property
    def even(self) -> bool:
        """Whether all stages take the same time, and all hops between them do."""
        return all(len(set(group)) <= 1 for group in self.groups)

    def times(self, microbatches: int = 1) -> SliceTimes:
        """Return the times of stages that all take the mean time, with two peaks, forward and backward.

        Each peak has its hop. All micro-batches are cut alike.
        """
        forward, backward, onward, homeward = map(_mean_curve, self.groups)
        whole = sum_curves([(microbatches, forward), (microbatches, backward)])
        peaks = [
            sum_curves([(1, forward), (1, onward)]),
            sum_curves([(1, backward), (1, homeward)]),
        ]
        return times_from_curves(self.points, self.grain, [whole], peaks)

    def tables(self, step: int = 1) -> StageTables:
        """Return the times of all slices between every `step`-th point on all stages."""
        points, grain = self.points // step, self.grain * step

        def table(curves: Sequence[Curve]) -> Floats:
            known = {curve: _tabulate(curve, points, grain) for curve in set(curves)}
            return np.stack([known[curve] for curve in curves])

        return StageTables(
            table(self.forward),
            table(self.backward),
            table((*self.onward, NO_TIME)),
            table((NO_TIME, *self.homeward)),
        )


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of some curves; no time if there are none."""
    if len(set(curves)) == 1:
        return curves[0]
    return sum_curves([(1 / len(curves), curve) for curve in curves])


def sliced_pipeline(
    ranks: int, cost: Cost, tokens: int, granularity: int
) -> SlicedPipeline:
    """Return the curves of a pipeline with a stage on each rank, cut at multiples of `granularity` tokens.

    The cost must be made of curves: a `ModelCost`, or one that divides the layers of a profile.
    """
    if granularity < 1 or tokens < 1:
        raise ShapeError(
            f"{tokens} tokens cannot be cut in steps of {granularity}; "
            "both must be at least 1"
        )
    if tokens % granularity:
        nearest = granularity * max(round(tokens / granularity), 1)
        raise ShapeError(
            f"{tokens} tokens cannot be cut in steps of {granularity} "
            f"without a remainder; {nearest} can"
        )
    whole = MicroBatch(tuple(range(ranks)), tokens)
    probe = sequential_schedule(loop_placement(ranks), [whole])
    model = cost.model(probe) if isinstance(cost, PartsCost) else cost
    assert isinstance(model, ModelCost), "a cost that is made of curves"
    ways = []
    for rank, lane in enumerate(probe.lanes):  # Each has a forward and a backward.
        share = 1 / model.speed(probe, rank)
        part = model.part(probe, rank)
        ways.append(
            [
                sum_curves([(share, one) for one in part.curves(action.op)])
                for action in lane
            ]
        )
    forward, backward = zip(*ways, strict=True)

    def hop(source: int, target: int) -> Curve:
        part = model.part(probe, min(source, target))
        size = part.message if part.sent is None else part.sent
        byte = 1 / cost.bandwidth(source, target)
        return Seconds(cost.latency(source, target), size * byte)

    onward = tuple(hop(rank, rank + 1) for rank in range(ranks - 1))
    homeward = tuple(hop(rank + 1, rank) for rank in range(ranks - 1))
    points, grain = tokens // granularity, granularity
    if not all(isinstance(curve, Seconds) for curve in (*forward, *backward)):
        step = coarse_step(points, MAX_TABLE_POINTS)
        if step > 1 and points // step < MIN_TABLE_POINTS:
            forward = tuple(map(_formula_of, forward))
            backward = tuple(map(_formula_of, backward))
        else:
            points, grain = points // step, grain * step
    return SlicedPipeline(points, grain, forward, backward, onward, homeward)


def coarse_step(points: int, most: int) -> int:
    """Return the least number of points that are joined so that at most `most` are left.

    It divides the number of points; a prime number of points is not divided at all.

    >>> coarse_step(48, 64), coarse_step(96, 40), coarse_step(97, 40)
    (1, 3, 97)
    """
    step = max(1, -(-points // most))
    while points % step:
        step += 1
    return step


def _formula_of(curve: Curve) -> Curve:
    """Return a curve without its corrections."""
    if isinstance(curve, CorrectedCurve):
        return curve.formula
    if isinstance(curve, Total):
        return sum_curves([(count, _formula_of(one)) for count, one in curve.terms])
    return curve
