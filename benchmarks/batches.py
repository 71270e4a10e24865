"""Which rows of a batch go together through TeraPipe's pipeline, and how each group is cut; for benchmarks alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.errors import ShapeError
from penstock.plan.slices.curves import SliceTimes
from penstock.plan.slices.cuts import (
    SliceSum,
    evaluate_slices,
    latency_with_peaks,
    least_latency,
    pass_over,
    peak_allowance,
    probes_for,
    starting_cuts,
)


class RowGroup(NamedTuple):
    """Rows of a batch that go through together, and the lengths of their slices in grid points."""

    rows: int
    lengths: tuple[int, ...]


class BatchCuts(NamedTuple):
    """The groups of a batch, their latency, and the passes that it took to prove the optimum."""

    groups: tuple[RowGroup, ...]
    latency: float
    passes: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The slices of the first group."""
        return self.groups[0].lengths


def best_batch(times: Mapping[int, SliceTimes], batch: int, stages: int) -> BatchCuts:
    """Find which rows of a batch go together, and how each group is cut, for the least latency.

    `times` maps each number of rows that may go together to the times of their slices.
    All groups pass through one pipeline, so the longest slice of any group counts, and a
    knapsack over the groups fills the batch.
    """
    weight = stages - 1
    known = None
    groups_of: dict[SliceSum, tuple[RowGroup, ...]] = {}
    for rows, row_times in times.items():
        copies, left = divmod(batch, rows)
        for lengths in [] if left else starting_cuts(row_times.points, None):
            single = evaluate_slices(row_times, lengths)
            start = SliceSum(copies * single.sum, single.peaks, single.lengths)
            groups_of[start] = (RowGroup(rows, single.lengths),) * copies
            if known is None or latency_with_peaks(start, weight) < latency_with_peaks(
                known, weight
            ):
                known = start
    if known is None:
        raise ShapeError(f"groups of {sorted(times)} rows cannot fill {batch} rows")
    limit = peak_allowance(latency_with_peaks(known, weight), 0.0, weight)
    grids = {rows: one.grid_below(limit) for rows, one in times.items()}
    passes = {rows: pass_over(grid) for rows, grid in grids.items() if rows <= batch}

    def run_pass(limits: Sequence[float], total: float) -> SliceSum | None:
        """The cheapest groups below the limits that make up a batch: an unbounded knapsack."""
        cheapest = {}
        for rows, one_pass in passes.items():
            slices = one_pass(limits, total)
            if slices is not None:
                cheapest[rows] = slices
        cost = [0.0] + [math.inf] * batch
        last_rows = [0] * (batch + 1)
        for filled in range(1, batch + 1):
            for rows, slices in cheapest.items():
                if rows <= filled and cost[filled - rows] + slices.sum < cost[filled]:
                    cost[filled] = cost[filled - rows] + slices.sum
                    last_rows[filled] = rows
        if cost[batch] == math.inf:
            return None
        chosen = []
        left = batch
        while left:
            chosen.append(last_rows[left])
            left -= last_rows[left]
        every = [cheapest[rows].peaks for rows in chosen]
        peaks = tuple(max(values) for values in zip(*every, strict=True))
        found = SliceSum(cost[batch], peaks, tuple(chosen))
        groups_of[found] = tuple(
            RowGroup(rows, cheapest[rows].lengths) for rows in chosen
        )
        return found

    best = least_latency(
        run_pass, weight, known, probes=max(map(probes_for, grids.values()))
    )
    latency = latency_with_peaks(best.slices, weight)
    if latency == math.inf:
        raise ShapeError("no cuts take a finite time")
    return BatchCuts(groups_of[best.slices], latency, best.passes)
