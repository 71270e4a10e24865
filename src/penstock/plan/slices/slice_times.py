"""The seconds of every slice that a sequence can be cut into, and of these the ones that an optimum can contain.

A sequence is a row of grid points; a slice goes from one to another. A row of a grid holds the slices after one prefix:

    prefix 0 | 1 2 3 4 5      slices of 1, 2, ... points
    prefix 1 | 1 2 3 4        a row ends where no longer slice is below the limit, so that a search
    prefix 2 | 1 2 3          walks over a narrow band and not over the whole triangle
    prefix 3 | 1 2
    prefix 4 | 1

A slice has two sorts of seconds. Its `sum` is what it adds to the work of a rank; its `peaks` are what the ranks before
and after wait for it, and only the largest of each peak counts. One table t of a pipeline has sum t and peak t;
forwards f and backwards b have sum f + b and two peaks, f and b, each with its hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from penstock.cost.curve import Seconds
from penstock.errors import ShapeError
from penstock.ir.compiled import at_speed
from penstock.ir.table import Floats, Ints

MAX_PEAKS = 2  # peaks a slice can have: there, and back


class Grid(NamedTuple):
    """Slices below a limit: the row of prefix p lies from `first[p]` to `first[p + 1]`, the shortest slice first."""

    first: Ints
    sums: Floats
    peaks: Floats  # one row a peak


def narrow_grid(grid: Grid, limit: float) -> Grid:
    """Each row up to its last slice whose peaks together are below a lower limit."""
    widths = np.diff(grid.first)
    rows = np.repeat(np.arange(len(widths)), widths)
    lengths = np.arange(len(rows)) - grid.first[rows] + 1
    fits = grid.peaks.sum(axis=0) < limit
    reach = np.zeros(len(widths), dtype=np.int64)
    reach[rows[fits]] = lengths[
        fits
    ]  # of several in a row the last, which is the longest, stays
    kept = lengths <= reach[rows]
    return Grid(
        np.concatenate([[0], np.cumsum(reach)]), grid.sums[kept], grid.peaks[:, kept]
    )


class SliceTimes(Protocol):
    """The seconds of all slices of a sequence of so many points."""

    @property
    def points(self) -> int:
        """Steps of the grid: the sequence's length."""
        ...

    @property
    def kinds(self) -> int:
        """How many peaks."""
        ...

    @property
    def floor(self) -> float:
        """No cuts have a lesser sum than this."""
        ...

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """The sums and peaks of slices, given by prefix and length in points."""
        ...

    def below(self, limit: float) -> Grid:
        """At least all slices whose peaks together are below a limit, in rows."""
        ...


def full_grid(times: SliceTimes, length: int) -> Grid:
    """All slices of at most so many points."""
    return Grid(
        *_ragged(np.minimum(length, times.points - np.arange(times.points)), times.of)
    )


# ---------------------------------------------------------------- from tables
@dataclass(frozen=True, slots=True)
class TableTimes:
    """Times as square tables [prefix, length - 1], of any shape: nothing is assumed of how they rise or fall."""

    sums: Floats
    peaks: tuple[Floats, ...]

    @property
    def points(self) -> int:
        """As many as the table has rows."""
        return len(self.sums)

    @property
    def kinds(self) -> int:
        """One table, one peak."""
        return len(self.peaks)

    @property
    def floor(self) -> float:
        """Nothing is known without a pass."""
        return 0.0

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """Looked up."""
        sums = self.sums[prefixes, lengths - 1]
        peaks = [
            sums if peak is self.sums else peak[prefixes, lengths - 1]
            for peak in self.peaks
        ]
        return sums, np.stack(peaks)

    def below(self, limit: float) -> Grid:
        """Each row up to its last slice below the limit."""
        total = self.peaks[0] if self.kinds == 1 else self.peaks[0] + self.peaks[1]
        reach = np.zeros(self.points, dtype=np.int64)
        at_speed(_reaches, self.points**2)(total, limit, reach)
        return Grid(*_ragged(reach, self.of))


def _reaches(total: Floats, limit: float, reach: Ints) -> None:
    """The longest slice below the limit after every prefix."""
    points = len(total)
    for prefix in range(points):
        length = points - prefix
        while length > 0 and not total[prefix, length - 1] < limit:
            length -= 1
        reach[prefix] = length


def _ragged(
    reach: Ints, of: Callable[[Ints, Ints], tuple[Floats, Floats]]
) -> tuple[Ints, Floats, Floats]:
    """All slices up to a length after every prefix, in rows."""
    first = np.concatenate([[0], np.cumsum(reach)])
    rows = np.repeat(np.arange(len(reach)), reach)
    return first, *of(rows, np.arange(len(rows)) - first[rows] + 1)


def times_from_table(forward: Floats, backward: Floats | None = None) -> TableTimes:
    """Times from a table of whole slices, or from one for forwards and one for backwards; [prefix, length - 1].

    What lies beyond the end of the sequence is not read. A slice that cannot be has `inf`.
    """
    tables = [
        np.ascontiguousarray(t, dtype=np.float64)
        for t in (forward, backward)
        if t is not None
    ]
    for table in tables:
        if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table):
            raise ShapeError(
                f"a table of slices is square, a row a prefix; this one is {_by(table.shape)}"
            )
        if table.shape != tables[0].shape:
            raise ShapeError(
                f"forwards are {_by(tables[0].shape)}, backwards {_by(table.shape)}"
            )
        _check_real(table)
    return TableTimes(
        tables[0] if len(tables) == 1 else tables[0] + tables[1], tuple(tables)
    )


def _check_real(table: Floats) -> None:
    """Seconds are not negative, and are numbers, wherever a slice can be."""
    bad = np.zeros(2, dtype=np.int64)
    if at_speed(_is_bad, len(table) ** 2)(table, bad):
        prefix, at = bad.tolist()
        seconds = f"{table[prefix, at]:g} seconds"
        raise ShapeError(
            f"a slice of {at + 1} points after {prefix} takes {seconds}; the least is 0"
        )


def _is_bad(table: Floats, where: Ints) -> bool:
    """Whether a slice has no time, or one below 0, and which."""
    for prefix in range(len(table)):
        for at in range(len(table) - prefix):
            if not table[prefix, at] >= 0:  # also where it is nan
                where[0], where[1] = prefix, at
                return True
    return False


def _by(shape: tuple[int, ...]) -> str:
    return " by ".join(map(str, shape))


def whole_sequence_grid(times: SliceTimes) -> TableTimes:
    """The whole sequence as the only slice."""
    sums, peaks = times.of(np.array([0]), np.array([times.points]))
    return TableTimes(sums.reshape(1, 1), tuple(peak.reshape(1, 1) for peak in peaks))


# ---------------------------------------------------------------- from curves
@dataclass(frozen=True, slots=True)
class CurveTimes:
    """Times as curves in tokens, with so many points of `grain` tokens: no table is ever made.

    No curve falls as a slice grows (`curved` sees to it), so where a row ends is found by halving.
    """

    points: int
    grain: int
    sum: Seconds
    peaks: tuple[Seconds, ...]

    @property
    def kinds(self) -> int:
        """One curve, one peak."""
        return len(self.peaks)

    @property
    def floor(self) -> float:
        """Tokens and pairs add up to the same however they are cut; the whole has one base, and no prefix."""
        return self.sum.of(self.points * self.grain, 0)

    def of(self, prefixes: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """By the formula."""
        tokens, before = (
            (lengths * self.grain).astype(np.float64),
            (prefixes * self.grain).astype(np.float64),
        )
        return seconds_along(self.sum, tokens, before), np.stack(
            [seconds_along(peak, tokens, before) for peak in self.peaks]
        )

    def below(self, limit: float) -> Grid:
        """Each row up to its last slice below the limit."""
        prefixes = np.arange(self.points)
        low, high = np.zeros(self.points, dtype=np.int64), self.points - prefixes
        while (low < high).any():  # the longest that is below lies from low to high
            middle = (low + high + 1) // 2
            fits = self.of(prefixes, middle)[1].sum(axis=0) < limit
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return Grid(*_ragged(low, self.of))


def times_from_curves(
    points: int, grain: int, sums: Sequence[Seconds], peaks: Sequence[Seconds]
) -> SliceTimes:
    """Times from curves: a slice's sum is that of all `sums`. With a negative term they become a table."""
    if points < 1 or grain < 1 or not 1 <= len(peaks) <= MAX_PEAKS:
        raise ShapeError(
            f"{points} points of {grain} tokens with {len(peaks)} peaks; the least is 1 of each"
        )
    found = CurveTimes(points, grain, add_curves(sums), tuple(peaks))
    if all(
        min(curve.base, curve.token, curve.prefix, curve.pair) >= 0
        for curve in (found.sum, *peaks)
    ):
        return found
    prefixes, lengths = np.indices((points, points))
    sum_table, peak_tables = found.of(prefixes.ravel(), lengths.ravel() + 1)
    shape = (points, points)
    beyond = prefixes + lengths >= points
    tables = [
        np.where(beyond, 0.0, table.reshape(shape))
        for table in (sum_table, *peak_tables)
    ]
    for table in tables:
        _check_real(table)
    return TableTimes(tables[0], tuple(tables[1:]))


def add_curves(curves: Sequence[Seconds]) -> Seconds:
    """Curves one after the other."""
    return Seconds(
        *(
            sum(getattr(curve, term) for curve in curves)
            for term in ("base", "token", "prefix", "pair")
        )
    )


def seconds_along(curve: Seconds, tokens: Floats, prefix: Floats) -> Floats:
    """`Seconds.of` for many slices at once."""
    pairs = tokens * prefix + tokens * tokens / 2
    found: Floats = (
        curve.base + curve.token * tokens + curve.prefix * prefix + curve.pair * pairs
    )
    return found
