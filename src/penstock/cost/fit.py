"""From measured points to a curve: the formula if it foretells points it has not seen, else a table if that does.

    points      o o o o o o o o     fitted: the formula's coefficients, and the table's corrections, are made of these
                 x   x   x   x      held out: take no part; how far a curve is from them is its error

Coefficients are never negative (no work takes time back) and make the squares of the RELATIVE errors least: a slice of
32 tokens counts as much as one of 32 thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from penstock.cost.curve import CorrectedCurve, Curve, Measured, Seconds
from penstock.errors import ShapeError
from penstock.ir.table import Floats

GOOD_ERROR = 0.05  # the worst error with which a formula, which smooths and reaches beyond what was measured, is kept


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and its relative errors on points that took no part in it."""

    curve: Curve
    worst: float
    median: float

    @property
    def form(self) -> str:
        """Formula or table."""
        return "table" if isinstance(self.curve, CorrectedCurve) else "formula"


def fit(
    points: Sequence[Measured], held_out: Sequence[Measured], good: float = GOOD_ERROR
) -> Fit:
    """The formula if its worst error on the points held out is no more than `good`; else what foretells them better.

    Better is the lower median, not the lower maximum: one point that was disturbed must not choose.

    >>> points = [(n, 0, 1.0 + 0.5 * n) for n in (1, 2, 4, 8)]
    >>> found = fit(points, [(6, 0, 4.0)])
    >>> found.form, round(found.curve.of(10, 0), 6), round(found.worst, 6)
    ('formula', 6.0, 0.0)
    """
    formula = fit_formula(points)
    plain = _judged(formula, held_out or points)
    if plain.worst <= good or any(
        formula.of(tokens, prefix) <= 0 for tokens, prefix, _ in points
    ):
        return plain  # or a table could not correct it
    table = _judged(CorrectedCurve(formula, tuple(points)), held_out or points)
    return table if table.median < plain.median else plain


def fit_formula(points: Sequence[Measured]) -> Seconds:
    """The formula with the least relative errors, squared; terms of points that have no prefix are left out."""
    if not points or min(seconds for _, _, seconds in points) <= 0:
        raise ShapeError(
            "a formula is fitted to measured points, each of more than 0 seconds"
        )
    rows = [(1.0, i, j, i * j + i * i / 2) for i, j, _ in points]
    seconds = np.array([s for _, _, s in points])
    found = least_squares(np.array(rows) / seconds[:, None], np.ones(len(points)))
    return Seconds(*map(float, found))


def least_squares(a: Floats, b: Floats) -> Floats:
    """x >= 0 with the least |a x - b|, exactly: of all sets of columns, the best whose own solution has no minus.

    The best x solves the plain problem on the columns it uses. There are 16 sets of four columns: all are tried.
    """
    size = np.linalg.norm(a, axis=0)
    size[size == 0] = 1.0
    columns = range(a.shape[1])
    best, least = np.zeros(a.shape[1]), float(np.linalg.norm(b))
    for some in chain.from_iterable(
        combinations(columns, count) for count in range(1, len(columns) + 1)
    ):
        used = list(some)
        x = np.linalg.lstsq(a[:, used] / size[used], b, rcond=None)[0]
        left = float(np.linalg.norm(a[:, used] / size[used] @ x - b))
        if x.min() >= 0 and left < least * (1 - 1e-12):
            best, least = np.zeros(a.shape[1]), left
            best[used] = x / size[used]
    return best


def _judged(curve: Curve, points: Sequence[Measured]) -> Fit:
    errors = [
        abs(curve.of(tokens, prefix) / seconds - 1.0)
        for tokens, prefix, seconds in points
    ]
    return Fit(curve, max(errors), float(np.median(errors)))
