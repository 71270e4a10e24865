"""Seconds of an op on a slice of `tokens` tokens that follows a prefix of `prefix` tokens.

base + token * tokens + prefix * prefix + pair * (tokens * prefix + tokens * tokens / 2)
launch  linear layers   reading the keys    attention: each token with all before it

prefix                            A corrected curve is this formula times a correction. The correction is known at
  |  o                            the measured points and is interpolated linearly between them, on logarithmic
  |  o    o                       axes. Slices without a prefix have a line of their own, because kernels may treat
  |  o    o     o                 them specially (causal attention needs no mask there). So does the whole sequence,
  +--o----o-----o-----w  tokens   w, which keeps nothing for later slices. Beyond the points the nearest correction
                                  holds, so that the formula extrapolates.
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
]  # (place, value), places ascending
TERMS = ("base", "token", "prefix", "pair")  # of the formula


class Curve(Protocol):
    """Seconds of an op."""

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""
        ...


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


@dataclass(frozen=True, slots=True)
class Total:
    """A weighted sum of curves."""

    terms: tuple[tuple[float, Curve], ...]

    def of(self, tokens: int, prefix: int) -> float:
        """Seconds for a slice of `tokens` after `prefix`."""
        return sum(count * curve.of(tokens, prefix) for count, curve in self.terms)


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
