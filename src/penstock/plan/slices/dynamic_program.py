"""TeraPipe's dynamic program, one pass over a grid: the least sum of slices whose peaks stay below limits.

It is a shortest path from the start of the sequence to its end:

points  0 ─► 1 ─► 2 ─► 3 ─► 4        best[0] = 0
        └────────►┘     ▲            best[e] = the least value, over slices from p to e below the limits,
                  └─────┘                      of best[p] + the sum of the slice
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.limit_search import (
    PROBE_ROUNDS,
    LimitedPass,
    RowGroup,
    SliceSum,
)
from penstock.plan.slices.slice_times import Grid, narrow_grid

# The ratio between the limits for which a narrower copy of the grid is made.
LIMIT_RATIO = 1.2
# Limits below this share of the highest peak use the whole grid.
LEAST_LIMIT_SHARE = 1e-6
# Up to this many slices a search ends sooner without probing.
FEW_SLICES = 1000
# The passes that a search makes, roughly: they decide whether compiling pays.
EXPECTED_PASSES = 32


def probes_for(*grids: Grid) -> int:
    """Return the rounds of probing that pay for a search over these grids."""
    slices = sum(len(grid.sums) for grid in grids)
    return PROBE_ROUNDS if slices > FEW_SLICES else 0


def pass_over(grid: Grid, slices: int | None = None, rows: int = 1) -> LimitedPass:
    """Return a function that makes passes over a grid, for any limits.

    The slices it finds are those of `rows` rows. With `slices`, it looks only for paths
    of exactly this many slices.
    """
    points = len(grid.first) - 1
    layers = slices or 1
    size = len(grid.sums) * EXPECTED_PASSES * layers
    walk = compile_if_large(reach if slices is None else _reach_in_layers, size)
    walk_back = compile_if_large(retrace, size)
    reached = np.empty((layers + 1 if slices else 1, points + 1))
    steps = np.empty(points, dtype=np.int64)
    highest = np.empty(2)
    totals = grid.peaks.sum(axis=0)
    highest_total = float(totals.max(initial=0.0, where=np.isfinite(totals)))
    narrow_grids = {0: grid}

    def grid_for(total: float) -> Grid:
        """The slices that a pass must look at: a low limit leaves few."""
        level = 0
        if highest_total * LEAST_LIMIT_SHARE < total < highest_total:
            level = int(math.log(highest_total / total, LIMIT_RATIO))
        if level not in narrow_grids:
            limit = 1.000001 * highest_total / LIMIT_RATIO**level
            narrow_grids[level] = narrow_grid(grid, limit)
        return narrow_grids[level]

    def run_pass(limits: Sequence[float], total: float) -> SliceSum | None:
        total = min(total, sum(limits))
        first, sums, peaks = grid_for(total)
        arguments = (
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
        walk(*arguments)
        least_sum = float(reached[-1, points])
        if least_sum == math.inf:
            return None
        count = walk_back(*arguments, points, steps, highest)
        lengths = tuple(steps[:count][::-1].tolist())
        peak_values = tuple(highest[: len(peaks)].tolist())
        return SliceSum(least_sum, peak_values, (RowGroup(rows, lengths),))

    return run_pass


def reach(
    first: Ints,
    sums: Floats,
    first_peaks: Floats,
    second_peaks: Floats,
    two_peaks: bool,
    first_limit: float,
    second_limit: float,
    total_limit: float,
    reached: Floats,
) -> None:
    """Fill `reached` with the least sum at every point.

    The inner loops have no branches, so that they compile to vector instructions.
    """
    best = reached[0]
    best[:] = np.inf
    best[0] = 0.0
    for prefix in range(len(first) - 1):
        here = best[prefix]
        begin = first[prefix]
        if here == np.inf:
            continue
        if two_peaks:
            for k in range(first[prefix + 1] - begin):
                a = first_peaks[begin + k]
                b = second_peaks[begin + k]
                fits = (a < first_limit) & (b < second_limit) & (a + b < total_limit)
                there = here + sums[begin + k] if fits else np.inf
                known = best[prefix + 1 + k]
                best[prefix + 1 + k] = there if there < known else known
        else:
            for k in range(first[prefix + 1] - begin):
                fits = first_peaks[begin + k] < first_limit
                there = here + sums[begin + k] if fits else np.inf
                known = best[prefix + 1 + k]
                best[prefix + 1 + k] = there if there < known else known


def _reach_in_layers(
    first: Ints,
    sums: Floats,
    first_peaks: Floats,
    second_peaks: Floats,
    two_peaks: bool,
    first_limit: float,
    second_limit: float,
    total_limit: float,
    reached: Floats,
) -> None:
    """Fill `reached` with the least sum at every point with 0, 1, 2, ... slices, a row for each number."""
    reached[:] = np.inf
    reached[0, 0] = 0.0
    for layer in range(len(reached) - 1):
        now = reached[layer]
        then = reached[layer + 1]
        for prefix in range(layer, len(first) - 1):
            here = now[prefix]
            begin = first[prefix]
            if here == np.inf:
                continue
            for k in range(first[prefix + 1] - begin):
                a = first_peaks[begin + k]
                b = second_peaks[begin + k]
                second_fits = (b < second_limit) & (a + b < total_limit)
                fits = (a < first_limit) & ((not two_peaks) | second_fits)
                there = here + sums[begin + k] if fits else np.inf
                known = then[prefix + 1 + k]
                then[prefix + 1 + k] = there if there < known else known


def retrace(
    first: Ints,
    sums: Floats,
    first_peaks: Floats,
    second_peaks: Floats,
    two_peaks: bool,
    first_limit: float,
    second_limit: float,
    total_limit: float,
    reached: Floats,
    point: int,
    steps: Ints,
    highest: Floats,
) -> int:
    """Write the slices of the least sum up to a point into `steps`, last first, and their peaks into `highest`.

    Returns the number of slices.
    """
    layer = len(reached) - 1
    layered = layer > 0
    count = 0
    highest[:] = 0.0
    while point > 0:
        now = reached[layer]
        before = reached[layer - 1] if layered else now
        prefix = point - 1
        while True:
            k = point - 1 - prefix
            index = first[prefix] + k
            if index < first[prefix + 1] and before[prefix] + sums[index] == now[point]:
                a = first_peaks[index]
                b = second_peaks[index]
                second_fits = b < second_limit and a + b < total_limit
                if a < first_limit and (second_fits or not two_peaks):
                    break
            prefix -= 1
        highest[0] = max(highest[0], first_peaks[index])
        highest[1] = max(highest[1], second_peaks[index])
        steps[count] = point - prefix
        count += 1
        point = prefix
        if layered:
            layer -= 1
    return count
