"""Seconds of an op on a slice of `tokens` tokens after a prefix of `prefix` tokens: a formula, or a measured table.

base + token * tokens + prefix * prefix + pair * (tokens * prefix + tokens * tokens / 2)
launch  linear layers   reading the keys    attention: each token with all before it

prefix                            a table is the formula times a correction, which is known at the points that
  |  o                            were measured and goes straight between them, by the logarithms of both axes.
  |  o    o                       Slices without a prefix have a line of their own: kernels may treat them apart
  |  o    o     o                 (causal attention needs no mask there), and so has the whole sequence, w, of
  +--o----o-----o-----w  tokens   which nothing is kept for later slices. Beyond the points the nearest correction
                                  holds, so that the formula carries on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol, TypeAlias

Measured: TypeAlias = tuple[int, int, float]  # tokens, prefix, seconds
Polyline: TypeAlias = tuple[
    tuple[float, float], ...
]  # places in ascending order, and the value at each


class Curve(Protocol):
    """Seconds of an op."""

    def of(self, tokens: int, prefix: int) -> float:
        """For a slice of `tokens` after `prefix`."""
        ...


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one op: the four terms above."""

    base: float = 0.0
    token: float = 0.0
    prefix: float = 0.0
    pair: float = 0.0

    def of(self, tokens: int, prefix: int) -> float:
        """For a slice of `tokens` after `prefix`."""
        pairs = tokens * prefix + tokens * tokens / 2
        return (
            self.base + self.token * tokens + self.prefix * prefix + self.pair * pairs
        )


@dataclass(frozen=True, slots=True)
class CorrectedCurve:
    """A formula that is corrected to what was measured."""

    formula: Seconds
    measured: tuple[Measured, ...]
    first: Polyline = field(
        init=False, repr=False, compare=False
    )  # the correction by tokens, without a prefix
    whole: tuple[int, float] | None = field(
        init=False, repr=False, compare=False
    )  # from so many tokens on
    later: tuple[tuple[float, Polyline], ...] = field(
        init=False, repr=False, compare=False
    )  # by tokens, then by prefix

    def __post_init__(self) -> None:
        rows: dict[int, dict[int, float]] = {}
        for tokens, prefix, seconds in self.measured:
            rows.setdefault(tokens, {})[prefix] = seconds / self.formula.of(
                tokens, prefix
            )
        first = [
            (log(tokens), row[0]) for tokens, row in sorted(rows.items()) if 0 in row
        ]
        later = [
            (log(tokens), _line(row))
            for tokens, row in sorted(rows.items())
            if max(row)
        ]
        apart = bool(later) and len(first) > 1
        object.__setattr__(
            self,
            "whole",
            (max(rows), first[-1][1]) if apart and 0 in rows[max(rows)] else None,
        )
        object.__setattr__(self, "first", tuple(first[: -1 if self.whole else None]))
        object.__setattr__(self, "later", tuple(later))

    def of(self, tokens: int, prefix: int) -> float:
        """For a slice of `tokens` after `prefix`."""
        line: Polyline = self.first
        if self.whole and not prefix and tokens >= self.whole[0]:
            return self.formula.of(tokens, prefix) * self.whole[1]
        if self.later and (prefix or not line):
            line = tuple(
                (place, between(row, log(max(prefix, 1)))) for place, row in self.later
            )
        return self.formula.of(tokens, prefix) * between(line, log(tokens))


def _line(row: dict[int, float]) -> Polyline:
    return tuple(
        (log(prefix), ratio) for prefix, ratio in sorted(row.items()) if prefix
    )


def between(line: Sequence[tuple[float, float]], place: float) -> float:
    """Straight between two values of a line, the last one beyond its ends.

    >>> between(((0.0, 1.0), (2.0, 3.0)), 0.5), between(((0.0, 1.0), (2.0, 3.0)), 9.0)
    (1.5, 3.0)
    """
    after = bisect_left(line, (place,))
    if after in (0, len(line)):
        return line[min(after, len(line) - 1)][1]
    (left, low), (right, high) = line[after - 1], line[after]
    return low + (high - low) * (place - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Total:
    """Several curves together, each so many times."""

    terms: tuple[tuple[float, Curve], ...]

    def of(self, tokens: int, prefix: int) -> float:
        """For a slice of `tokens` after `prefix`."""
        return sum(count * curve.of(tokens, prefix) for count, curve in self.terms)


def sum_curves(terms: Iterable[tuple[float, Curve]]) -> Curve:
    """So many times each curve, as one; formulas add up to a formula.

    >>> sum_curves([(2, Seconds(1.0, 0.5)), (1, Seconds(3.0))])
    Seconds(base=5.0, token=1.0, prefix=0.0, pair=0.0)
    """
    given = [(count, curve) for count, curve in terms if count]
    formulas = [(count, curve) for count, curve in given if isinstance(curve, Seconds)]
    words = ("base", "token", "prefix", "pair")
    whole = Seconds(
        *(
            sum((count * getattr(curve, word) for count, curve in formulas), 0.0)
            for word in words
        )
    )
    others = [
        (count, curve) for count, curve in given if not isinstance(curve, Seconds)
    ]
    return Total(((1, whole), *others)) if others else whole
