"""The times of all slices that a sequence can be cut into, and grids of those that an optimum can contain.

A sequence is a row of grid points, and a slice goes from one point to another. A row of a grid holds the slices after
one prefix:

    prefix 0 | 1 2 3 4 5      slices of 1, 2, ... points
    prefix 1 | 1 2 3 4        a row ends where no longer slice is below the limit, so that a search
    prefix 2 | 1 2 3          walks over a narrow band instead of the whole triangle
    prefix 3 | 1 2
    prefix 4 | 1

A slice has two sorts of times. Its `sum` is what it adds to the work of a rank. Its `peaks` are what the ranks before
and after it wait for, and only the largest value of each peak counts. A pipeline with one table t has sum t and peak t.
Forwards f and backwards b have sum f + b and two peaks, f and b, each with its hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from penstock.cost.curve import TERMS, Seconds, seconds_along
from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats, Ints

MAX_PEAKS = 2  # the peaks that a slice can have: forward and backward


class Grid(NamedTuple):
    """Slices below a limit: the row of prefix p lies from `first[p]` to `first[p + 1]`, the shortest slice first."""

    first: Ints
    sums: Floats
    peaks: Floats  # one row per peak


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


class SliceTimes(Protocol):
    """The seconds of all slices of a sequence of `points` points."""

    @property
    def points(self) -> int:
        """The length of the sequence in grid points."""
        ...

    @property
    def peak_count(self) -> int:
        """The number of peaks of a slice."""
        ...

    @property
    def least_sum(self) -> float:
        """A lower bound on the sum of any cuts."""
        ...

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """Return the sums and peaks of slices, given by prefix and length in points."""
        ...

    def grid_below(self, limit: float) -> Grid:
        """Return at least all slices whose peaks together are below a limit."""
        ...


def full_grid(times: SliceTimes, length: int) -> Grid:
    """Return all slices of at most `length` points."""
    to_the_end = times.points - np.arange(times.points)
    return _grid_up_to(np.minimum(length, to_the_end), times.of)


def _grid_up_to(
    longest: Ints, times_of: Callable[[Ints, Ints], tuple[Floats, Floats]]
) -> Grid:
    """Return all slices up to a length after every prefix."""
    first = np.concatenate([[0], np.cumsum(longest)])
    rows = np.repeat(np.arange(len(longest)), longest)
    lengths = np.arange(len(rows)) - first[rows] + 1
    sums, peaks = times_of(rows, lengths)
    return Grid(first, sums, peaks)


# ---------------------------------------------------------------- from tables
@dataclass(frozen=True, slots=True)
class TableTimes:
    """Times as square tables [prefix, length - 1] with any values: they need not rise with the length."""

    sums: Floats
    peaks: tuple[Floats, ...]

    @property
    def points(self) -> int:
        """The number of rows of the table."""
        return len(self.sums)

    @property
    def peak_count(self) -> int:
        """The number of tables of peaks."""
        return len(self.peaks)

    @property
    def least_sum(self) -> float:
        """The least sum of all cuts, whatever their peaks: a shortest path through the table."""
        walk = compile_if_large(_find_least_sum, self.points**2)
        return float(walk(self.sums))

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """Look up the sums and peaks."""
        sums = self.sums[prefixes, lengths - 1]
        peaks = []
        for table in self.peaks:
            is_sum = table is self.sums
            peaks.append(sums if is_sum else table[prefixes, lengths - 1])
        return sums, np.stack(peaks)

    def grid_below(self, limit: float) -> Grid:
        """Return each row up to its last slice below the limit."""
        total = self.peaks[0]
        if self.peak_count > 1:
            total = self.peaks[0] + self.peaks[1]
        longest = np.zeros(self.points, dtype=np.int64)
        compile_if_large(_find_longest, self.points**2)(total, limit, longest)
        return _grid_up_to(longest, self.of)


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


def times_from_table(forward: Floats, backward: Floats | None = None) -> TableTimes:
    """Return times from one table of whole slices, or from one for forwards and one for backwards.

    The tables are [prefix, length - 1]. Entries beyond the end of the sequence are not
    read. An impossible slice has the time `inf`.
    """
    given = [forward] if backward is None else [forward, backward]
    tables = [np.ascontiguousarray(table, dtype=np.float64) for table in given]
    for table in tables:
        if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table):
            raise ShapeError(
                f"a table of slices is square with a row per prefix; "
                f"this one is {_show_shape(table.shape)}"
            )
        if table.shape != tables[0].shape:
            raise ShapeError(
                f"the table of forwards is {_show_shape(tables[0].shape)}, "
                f"but that of backwards is {_show_shape(table.shape)}"
            )
        _check_seconds(table)
    sums = tables[0] if len(tables) == 1 else tables[0] + tables[1]
    return TableTimes(sums, tuple(tables))


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


def _show_shape(shape: tuple[int, ...]) -> str:
    return " by ".join(map(str, shape))


def whole_sequence_times(times: SliceTimes) -> TableTimes:
    """Return times in which the whole sequence is the only slice."""
    sums, peaks = times.of(np.array([0]), np.array([times.points]))
    return TableTimes(sums.reshape(1, 1), tuple(peak.reshape(1, 1) for peak in peaks))


# ---------------------------------------------------------------- from curves
@dataclass(frozen=True, slots=True)
class CurveTimes:
    """Times as curves in tokens, with points of `grain` tokens each, so that no table is needed.

    `times_from_curves` makes sure that no curve falls as a slice grows, so binary search
    finds where a row ends.
    """

    points: int
    grain: int
    sum: Seconds
    peaks: tuple[Seconds, ...]

    @property
    def peak_count(self) -> int:
        """The number of curves of peaks."""
        return len(self.peaks)

    @property
    def least_sum(self) -> float:
        """The time of the whole sequence: any cuts have the same tokens and pairs, and at least one base."""
        return self.sum.of(self.points * self.grain, 0)

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """Compute the sums and peaks by the formula."""
        tokens = (lengths * self.grain).astype(np.float64)
        before = (prefixes * self.grain).astype(np.float64)
        sums = seconds_along(self.sum, tokens, before)
        peaks = [seconds_along(peak, tokens, before) for peak in self.peaks]
        return sums, np.stack(peaks)

    def grid_below(self, limit: float) -> Grid:
        """Return each row up to its last slice below the limit."""
        prefixes = np.arange(self.points)
        low = np.zeros(self.points, dtype=np.int64)
        high = self.points - prefixes
        # The longest slice below the limit has a length from low to high.
        while (low < high).any():
            middle = (low + high + 1) // 2
            peaks = self.of(prefixes, middle)[1]
            fits = peaks.sum(axis=0) < limit
            low = np.where(fits, middle, low)
            high = np.where(fits, high, middle - 1)
        return _grid_up_to(low, self.of)


def times_from_curves(
    points: int, grain: int, sums: Sequence[Seconds], peaks: Sequence[Seconds]
) -> SliceTimes:
    """Return times from curves; the sum of a slice adds up all `sums`.

    Curves with a negative term may fall as a slice grows, so they become a table.
    """
    if points < 1 or grain < 1 or not 1 <= len(peaks) <= MAX_PEAKS:
        raise ShapeError(
            f"{points} points of {grain} tokens with {len(peaks)} peaks make no grid; "
            f"it takes at least 1 of each, and at most {MAX_PEAKS} peaks"
        )
    times = CurveTimes(points, grain, add_curves(sums), tuple(peaks))
    curves = (times.sum, *peaks)
    if all(getattr(curve, term) >= 0 for curve in curves for term in TERMS):
        return times
    shape = (points, points)
    prefixes, lengths = np.indices(shape)
    beyond = prefixes + lengths >= points
    sum_values, peak_values = times.of(prefixes.ravel(), lengths.ravel() + 1)
    tables = []
    for values in (sum_values, *peak_values):
        table = np.where(beyond, 0.0, values.reshape(shape))
        _check_seconds(table)
        tables.append(table)
    return TableTimes(tables[0], tuple(tables[1:]))


def add_curves(curves: Sequence[Seconds]) -> Seconds:
    """Return the curve of several ops that run one after the other."""
    return Seconds(
        base=sum(curve.base for curve in curves),
        token=sum(curve.token for curve in curves),
        prefix=sum(curve.prefix for curve in curves),
        pair=sum(curve.pair for curve in curves),
    )
