"""Seconds of an op on a slice of `tokens` tokens that follows a prefix of `prefix` tokens.

base + token * tokens + prefix * prefix + pair * (tokens * prefix + tokens * tokens / 2)
launch  linear layers   reading the keys    attention: each token with all before it

prefix                            A corrected curve is this formula times a correction. The correction is known at
  |  o                            the measured points and is interpolated linearly between them, on logarithmic
  |  o    o                       axes. Slices without a prefix have a line of their own, because kernels may treat
  |  o    o     o                 them specially (causal attention needs no mask there). So does the whole sequence,
  +--o----o-----o-----w  tokens   w, which keeps nothing for later slices. Beyond the points the nearest correction
                                  holds, so that the formula extrapolates.

From measured points to a curve, `fit_curve` takes the formula if it predicts well, otherwise a corrected curve:

    points      o o o o o o o o     fitted: these determine the formula's coefficients and the corrections
                 x   x   x   x      held out: these take no part, and the distance to them is the error

Coefficients are never negative, because no work takes time back. They minimize the
squares of the RELATIVE errors, so that a slice of 32 tokens counts as much as one of
32 thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log
from typing import Protocol, TypeAlias

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats

Measured: TypeAlias = tuple[int, int, float]  # tokens, prefix, seconds
# Points (place, value), places ascending.
Polyline: TypeAlias = tuple[tuple[float, float], ...]
TERMS = ("base", "token", "prefix", "pair")  # of the formula


class Curve(Protocol):
    """Seconds of an op."""

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The formula above, for one op."""

    base: float = 0.0
    token: float = 0.0
    prefix: float = 0.0
    pair: float = 0.0

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""
        pairs = tokens * prefix + tokens * tokens / 2
        linear = self.base + self.token * tokens + self.prefix * prefix
        return linear + self.pair * pairs


@dataclass(frozen=True, slots=True)
class CorrectedCurve:
    """A formula, corrected to agree with what was measured."""

    formula: Seconds
    measured: tuple[Measured, ...]
    # The correction without a prefix, by the logarithm of the tokens:
    first: Polyline = field(init=False, repr=False, compare=False)
    # The length of the whole sequence, and the correction from that length on:
    whole: tuple[int, float] | None = field(init=False, repr=False, compare=False)
    # The correction after a prefix, by the logarithm of the tokens, then of the prefix:
    later: tuple[tuple[float, Polyline], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        rows = self._corrections()
        first = [(log(tokens), row[0]) for tokens, row in rows.items() if 0 in row]
        later = [
            (log(tokens), _by_prefix(row)) for tokens, row in rows.items() if max(row)
        ]
        longest = max(rows)
        whole = None
        if later and len(first) > 1 and 0 in rows[longest]:
            whole = (longest, first.pop()[1])
        object.__setattr__(self, "first", tuple(first))
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "later", tuple(later))

    def _corrections(self) -> dict[int, dict[int, float]]:
        """Measured over formula, by tokens (ascending) and by prefix."""
        rows: dict[int, dict[int, float]] = {}
        for tokens, prefix, seconds in self.measured:
            ratio = seconds / self.formula.of(tokens, prefix)
            rows.setdefault(tokens, {})[prefix] = ratio
        return dict(sorted(rows.items()))

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""
        return self.formula.of(tokens, prefix) * self.correction(tokens, prefix)

    def along(self, tokens: Floats, prefixes: Floats) -> Floats:
        """Compute `of` for many slices at once."""
        places = np.log(tokens)
        factors = np.empty(len(tokens))
        after_prefix = (prefixes > 0) if self.first else np.full(len(tokens), True)
        if not self.later:
            after_prefix[:] = False
        alone = ~after_prefix
        if alone.any():
            line = np.array(self.first)
            factors[alone] = np.interp(places[alone], line[:, 0], line[:, 1])
        if after_prefix.any():
            depths = np.log(np.maximum(prefixes[after_prefix], 1))
            rows = []
            for _, row in self.later:
                line = np.array(row)
                rows.append(np.interp(depths, line[:, 0], line[:, 1]))
            lengths = np.array([at for at, _ in self.later])
            factors[after_prefix] = _interpolate_columns(
                lengths, np.array(rows), places[after_prefix]
            )
        if self.whole:
            factors[(prefixes == 0) & (tokens >= self.whole[0])] = self.whole[1]
        return seconds_along(self.formula, tokens, prefixes) * factors

    def correction(self, tokens: int, prefix: int) -> float:
        """The factor between the formula and the measurements."""
        if self.whole and not prefix and tokens >= self.whole[0]:
            return self.whole[1]
        line = self.first
        if self.later and (prefix or not line):
            place = log(max(prefix, 1))
            line = tuple((at, interpolate(row, place)) for at, row in self.later)
        return interpolate(line, log(tokens))


def _by_prefix(row: dict[int, float]) -> Polyline:
    return tuple(
        (log(prefix), ratio) for prefix, ratio in sorted(row.items()) if prefix
    )


def interpolate(line: Sequence[tuple[float, float]], place: float) -> float:
    """The value of a polyline at a place; beyond its ends, the value at the end.

    >>> interpolate(((0.0, 1.0), (2.0, 3.0)), 0.5)
    1.5
    >>> interpolate(((0.0, 1.0), (2.0, 3.0)), 9.0)
    3.0
    """
    after = bisect_left(line, (place,))
    if after == 0:
        return line[0][1]
    if after == len(line):
        return line[-1][1]
    left, low = line[after - 1]
    right, high = line[after]
    return low + (high - low) * (place - left) / (right - left)


def _interpolate_columns(lengths: Floats, rows: Floats, places: Floats) -> Floats:
    """The value of each column, a polyline over the lengths, at a place of its own."""
    if len(lengths) == 1:
        only: Floats = rows[0]
        return only
    columns = np.arange(len(places))
    after = np.clip(np.searchsorted(lengths, places), 1, len(lengths) - 1)
    left = lengths[after - 1]
    share = np.clip((places - left) / (lengths[after] - left), 0.0, 1.0)
    low = rows[after - 1, columns]
    values: Floats = low + (rows[after, columns] - low) * share
    return values


@dataclass(frozen=True, slots=True)
class Total:
    """A weighted sum of curves."""

    terms: tuple[tuple[float, Curve], ...]

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""
        return sum(count * curve.of(tokens, prefix) for count, curve in self.terms)


def seconds_along(curve: Curve, tokens: Floats, prefixes: Floats) -> Floats:
    """Compute the seconds of many slices at once.

    >>> seconds_along(Seconds(1.0, 2.0), np.array([1.0, 2.0]), np.array([0.0, 5.0])).tolist()
    [3.0, 5.0]
    """
    if isinstance(curve, Seconds):
        pairs = tokens * prefixes + tokens * tokens / 2
        linear = curve.base + curve.token * tokens + curve.prefix * prefixes
        seconds: Floats = linear + curve.pair * pairs
        return seconds
    if isinstance(curve, Total):
        total = np.zeros(len(tokens))
        for count, term in curve.terms:
            total += count * seconds_along(term, tokens, prefixes)
        return total
    if isinstance(curve, CorrectedCurve):
        return curve.along(tokens, prefixes)
    slices = zip(tokens.tolist(), prefixes.tolist(), strict=True)
    return np.array([curve.of(int(length), int(before)) for length, before in slices])


def sum_curves(terms: Iterable[tuple[float, Curve]]) -> Curve:
    """The weighted sum of curves as one curve. A sum of formulas is a formula.

    >>> sum_curves([(2, Seconds(1.0, 0.5)), (1, Seconds(3.0))])
    Seconds(base=5.0, token=1.0, prefix=0.0, pair=0.0)
    """
    coefficients = dict.fromkeys(TERMS, 0.0)
    others: list[tuple[float, Curve]] = []
    for count, curve in terms:
        if not count:
            continue
        if isinstance(curve, Seconds):
            for term in TERMS:
                coefficients[term] += count * getattr(curve, term)
        else:
            others.append((count, curve))
    formula = Seconds(**coefficients)
    return Total(((1, formula), *others)) if others else formula


# A formula smooths and extrapolates, so it is preferred up to this error.
GOOD_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve, and its relative errors on points that took no part in the fit."""

    curve: Curve
    worst: float
    median: float

    @property
    def form(self) -> str:
        """`formula` or `table`."""
        return "table" if isinstance(self.curve, CorrectedCurve) else "formula"


def fit_curve(
    points: Sequence[Measured], held_out: Sequence[Measured], good: float = GOOD_ERROR
) -> Fit:
    """Fit the formula, or correct it if its worst error on the held-out points exceeds `good`.

    Of the two, the curve with the lower median error is taken. The maximum would let a
    single disturbed measurement decide.

    >>> points = [(n, 0, 1.0 + 0.5 * n) for n in (1, 2, 4, 8)]
    >>> found = fit_curve(points, [(6, 0, 4.0)])
    >>> found.form, round(found.curve.of(10, 0), 6), round(found.worst, 6)
    ('formula', 6.0, 0.0)
    """
    judges = held_out or points
    formula = fit_formula(points)
    plain = _judge(formula, judges)
    correctable = all(formula.of(tokens, prefix) > 0 for tokens, prefix, _ in points)
    if plain.worst <= good or not correctable:
        return plain
    corrected = _judge(CorrectedCurve(formula, tuple(points)), judges)
    return corrected if corrected.median < plain.median else plain


def fit_formula(points: Sequence[Measured]) -> Seconds:
    """The formula with the least squares of relative errors."""
    if not points or min(seconds for _, _, seconds in points) <= 0:
        raise ShapeError("a formula needs measured points, each of more than 0 seconds")
    rows = [
        (1.0, tokens, prefix, tokens * prefix + tokens * tokens / 2)
        for tokens, prefix, _ in points
    ]
    seconds = np.array([seconds for _, _, seconds in points])
    relative = np.array(rows) / seconds[:, None]
    coefficients = least_squares(relative, np.ones(len(points)))
    return Seconds(*map(float, coefficients))


def least_squares(a: Floats, b: Floats) -> Floats:
    """The x >= 0 that minimizes |a x - b|, exactly.

    The best x solves the unconstrained problem on the columns that it uses. With four
    columns there are only 15 non-empty sets, so all of them are tried.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    best = np.zeros(a.shape[1])
    least = float(np.linalg.norm(b))
    for used in _column_sets(a.shape[1]):
        scaled = a[:, used] / scale[used]
        x = np.linalg.lstsq(scaled, b, rcond=None)[0]
        residual = float(np.linalg.norm(scaled @ x - b))
        if x.min() >= 0 and residual < least * (1 - 1e-12):
            least = residual
            best = np.zeros(a.shape[1])
            best[used] = x / scale[used]
    return best


def _column_sets(columns: int) -> Iterator[list[int]]:
    for count in range(1, columns + 1):
        for used in combinations(range(columns), count):
            yield list(used)


def _judge(curve: Curve, points: Sequence[Measured]) -> Fit:
    errors = []
    for tokens, prefix, seconds in points:
        errors.append(abs(curve.of(tokens, prefix) / seconds - 1.0))
    return Fit(curve, max(errors), float(np.median(errors)))
