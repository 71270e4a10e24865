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
from penstock.plan.slices.limit_search import (
    PROBE_ROUNDS,
    LimitedPass,
    RowGroup,
    SliceSum,
)
from penstock.plan.slices.slice_times import Grid, narrow_grid

LIMIT_RATIO = 1.2  # between the limits for which a grid is made narrower
FEW_SLICES = 1000  # slices
EXPECTED_PASSES = 32  # about as many as a search makes: decides whether compiling pays


def probes_for(*grids: Grid) -> int:
    """Rounds of probing that pay: none where passes are so short that a search ends sooner without."""
    return PROBE_ROUNDS if sum(len(grid.sums) for grid in grids) > FEW_SLICES else 0


def pass_over(grid: Grid, slices: int | None = None, rows: int = 1) -> LimitedPass:
    """Passes over a grid for any limits, over the slices of so many rows; `slices`: over exactly so many slices."""
    points, layers = len(grid.first) - 1, slices or 1
    size = len(grid.sums) * EXPECTED_PASSES * layers
    walk = at_speed(reach, size) if slices is None else at_speed(_reach_in_layers, size)
    back = at_speed(retrace, size)
    reached = np.empty((layers + 1 if slices else 1, points + 1))
    steps, highest = np.empty(points, dtype=np.int64), np.empty(2)
    totals = grid.peaks.sum(axis=0)
    most = float(totals.max(initial=0.0, where=np.isfinite(totals)))
    narrow = {0: grid}

    def seek(limits: Sequence[float], total: float) -> SliceSum | None:
        total = min(total, sum(limits))
        level = (
            int(math.log(most / total, LIMIT_RATIO)) if most / 1e6 < total < most else 0
        )
        if level not in narrow:  # a low limit leaves few slices: walk over those alone
            narrow[level] = narrow_grid(grid, 1.000001 * most / LIMIT_RATIO**level)
        first, sums, peaks = narrow[level]
        given = (
            first,
            sums,
            peaks[0],
            peaks[-1],
            len(peaks) > 1,
            min(limits[0], total),
            limits[-1],
            total,
            reached,
        )
        walk(*given)
        if reached[-1, points] == math.inf:
            return None
        group = RowGroup(
            rows, tuple(steps[: back(*given, points, steps, highest)][::-1].tolist())
        )
        return SliceSum(
            float(reached[-1, points]), tuple(highest[: len(peaks)].tolist()), (group,)
        )

    return seek


def reach(
    first: Ints,
    sums: Floats,
    one: Floats,
    other: Floats,
    both: bool,
    limit: float,
    limit_other: float,
    total: float,
    reached: Floats,
) -> None:
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
                there = (
                    here + sums[begin + k]
                    if (a < limit) & (b < limit_other) & (a + b < total)
                    else np.inf
                )
                best[prefix + 1 + k] = (
                    there if there < best[prefix + 1 + k] else best[prefix + 1 + k]
                )
        else:
            for k in range(first[prefix + 1] - begin):
                there = here + sums[begin + k] if one[begin + k] < limit else np.inf
                best[prefix + 1 + k] = (
                    there if there < best[prefix + 1 + k] else best[prefix + 1 + k]
                )


def _reach_in_layers(
    first: Ints,
    sums: Floats,
    one: Floats,
    other: Floats,
    both: bool,
    limit: float,
    limit_other: float,
    total: float,
    reached: Floats,
) -> None:
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
                fits = (a < limit) & (
                    (not both) | ((b < limit_other) & (a + b < total))
                )
                there = here + sums[begin + k] if fits else np.inf
                then[prefix + 1 + k] = (
                    there if there < then[prefix + 1 + k] else then[prefix + 1 + k]
                )


def retrace(
    first: Ints,
    sums: Floats,
    one: Floats,
    other: Floats,
    both: bool,
    limit: float,
    limit_other: float,
    total: float,
    reached: Floats,
    point: int,
    steps: Ints,
    highest: Floats,
) -> int:
    """The slices of the least sum up to a point, last first, into `steps`, and their peaks; how many slices."""
    layer, count = len(reached) - 1, 0
    highest[:] = 0.0
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
        highest[0] = max(highest[0], one[at])
        highest[1] = max(highest[1], other[at])
        steps[count] = point - prefix
        count += 1
        point = prefix
        layer -= 1 if layered else 0
    return count
