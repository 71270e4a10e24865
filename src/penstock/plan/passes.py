"""One pass over a grid: the least sum of slices whose peaks stay below limits, a shortest path from start to end.

    points  0 ─► 1 ─► 2 ─► 3 ─► 4        best[0] = 0
            └────────►┘     ▲            best[e] = the least, over slices from p to e below the limits,
                      └─────┘                      of best[p] + its sum
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.ir.compiled import at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.grid import Grid, narrowed
from penstock.plan.limits import Found, Group, Pass

FINER = 1.2  # between the limits for which a grid is made narrower
PASSES = 32  # about as many as a search makes: decides whether compiling pays


def pass_over(grid: Grid, slices: int | None = None, rows: int = 1) -> Pass:
    """Passes over a grid for any limits, over the slices of so many rows; `slices`: over exactly so many slices."""
    points, layers = len(grid.first) - 1, slices or 1
    size = len(grid.sums) * PASSES * layers
    walk = at_speed(_reach, size) if slices is None else at_speed(_reach_in_layers, size)
    back = at_speed(_retrace, size)
    reached, steps = np.empty((layers + 1 if slices else 1, points + 1)), np.empty(points, dtype=np.int64)
    totals = grid.peaks.sum(axis=0)
    most = float(totals.max(initial=0.0, where=np.isfinite(totals)))
    narrow = {0: grid}

    def seek(limits: Sequence[float], total: float) -> Found | None:
        total = min(total, sum(limits))
        level = int(math.log(most / total, FINER)) if most / 1e6 < total < most else 0
        if level not in narrow:  # a low limit leaves few slices: walk over those alone
            narrow[level] = narrowed(grid, 1.000001 * most / FINER**level)
        first, sums, peaks = narrow[level]
        given = (first, sums, peaks[0], peaks[-1], len(peaks) > 1, min(limits[0], total), limits[-1], total, reached)
        walk(*given)
        if reached[-1, points] == math.inf:
            return None
        lengths = steps[: back(*given, steps)][::-1]
        longest = peaks[:, first[np.cumsum(lengths) - lengths] + lengths - 1].max(axis=1)
        group = Group(rows, tuple(lengths.tolist()))
        return Found(float(reached[-1, points]), tuple(longest.tolist()), (group,))

    return seek


def _reach(
    first: Ints, sums: Floats, one: Floats, other: Floats, both: bool, limit: float, limit_other: float, total: float,
    reached: Floats,
) -> None:  # fmt: skip
    """The least sum at every point. Written without branches inside, so that it compiles to vector instructions."""
    best = reached[0]
    best[:] = np.inf
    best[0] = 0.0
    for prefix in range(len(first) - 1):
        here, begin = best[prefix], first[prefix]
        if here == np.inf:
            continue
        if both:
            for k in range(first[prefix + 1] - begin):
                a, b = one[begin + k], other[begin + k]
                there = here + sums[begin + k] if (a < limit) & (b < limit_other) & (a + b < total) else np.inf
                best[prefix + 1 + k] = there if there < best[prefix + 1 + k] else best[prefix + 1 + k]
        else:
            for k in range(first[prefix + 1] - begin):
                there = here + sums[begin + k] if one[begin + k] < limit else np.inf
                best[prefix + 1 + k] = there if there < best[prefix + 1 + k] else best[prefix + 1 + k]


def _reach_in_layers(
    first: Ints, sums: Floats, one: Floats, other: Floats, both: bool, limit: float, limit_other: float, total: float,
    reached: Floats,
) -> None:  # fmt: skip
    """The least sum at every point with 0, 1, 2, ... slices, a row for each number."""
    reached[:] = np.inf
    reached[0, 0] = 0.0
    for layer in range(len(reached) - 1):
        now, then = reached[layer], reached[layer + 1]
        for prefix in range(layer, len(first) - 1):
            here, begin = now[prefix], first[prefix]
            if here == np.inf:
                continue
            for k in range(first[prefix + 1] - begin):
                a, b = one[begin + k], other[begin + k]
                fits = (a < limit) & ((not both) | ((b < limit_other) & (a + b < total)))
                there = here + sums[begin + k] if fits else np.inf
                then[prefix + 1 + k] = there if there < then[prefix + 1 + k] else then[prefix + 1 + k]


def _retrace(
    first: Ints, sums: Floats, one: Floats, other: Floats, both: bool, limit: float, limit_other: float, total: float,
    reached: Floats, steps: Ints,
) -> int:  # fmt: skip
    """The slices of the least sum, last first, into `steps`; how many."""
    layer, count, point = len(reached) - 1, 0, len(first) - 1
    layered = layer > 0
    while point > 0:
        now = reached[layer]
        before = reached[layer - 1] if layered else now
        prefix = point - 1
        while True:
            k = point - 1 - prefix
            at = first[prefix] + k
            if at < first[prefix + 1] and before[prefix] + sums[at] == now[point]:
                a, b = one[at], other[at]
                if a < limit and (not both or (b < limit_other and a + b < total)):
                    break
            prefix -= 1
        steps[count] = point - prefix
        count += 1
        point = prefix
        layer -= 1 if layered else 0
    return count
