"""Bisection: between which two times something begins to be possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Bracket(NamedTuple):
    """A time that is not enough, and a time that is. The first one may count as a lower bound."""

    low: float
    high: float


def bisect_times(
    high: float, is_enough: Callable[[float], bool], halvings: int
) -> Bracket:
    """Narrow down the least time that is enough, given one that is.

    >>> bisect_times(8.0, lambda time: time >= 3.0, 3)
    Bracket(low=2.0, high=3.0)
    """
    low = 0.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return Bracket(low, high)
