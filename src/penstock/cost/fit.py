"""From measured points to a curve: the formula if it predicts well, otherwise a corrected curve.

    points      o o o o o o o o     fitted: these determine the formula's coefficients and the corrections
                 x   x   x   x      held out: these take no part, and the distance to them is the error

Coefficients are never negative, because no work takes time back. They minimize the
squares of the RELATIVE errors, so that a slice of 32 tokens counts as much as one of
32 thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from penstock.cost.curve import CorrectedCurve, Curve, Measured, Seconds
from penstock.errors import ShapeError
from penstock.ir.table import Floats

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
