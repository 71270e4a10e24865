"""The exact search for the cuts of uneven stages, over labels.

A label is one way to cut a prefix, with the time at which each stage is free:

    prefix 3 | cuts 1 2    stages free at 4 6 9, back 8 12 18
             | cuts 3      stages free at 3 6 9, back 6 12 18     no later anywhere: the other label is dropped

A label can be dropped for two reasons: another label is no later on any stage, forward or backward; or even the least
time that must still follow it ends no earlier than the best cuts known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.stage_times import StageTables

# The number of limits for which the remaining times are computed.
LIMIT_LEVELS = 128
# Times within this factor of each other count as equal.
EQUAL_TIME_FACTOR = 1 + 1e-12
# A search keeps at least this many labels per prefix.
LEAST_LABELS = 4


@dataclass(frozen=True, slots=True)
class RemainingTimes:
    """The least time that a mean of paths still adds after each prefix, if the paths continue from some stages."""

    shares: Floats  # the share of the paths that continue from each stage; 1 in all
    least: Floats


def remaining_times(shares: Floats, sums: Floats, peaks: Floats) -> RemainingTimes:
    """Return for every prefix the least value of the sum of its remaining slices and their highest peak."""
    points = len(sums)
    inside = np.add.outer(np.arange(points), np.arange(points)) < points
    limits = np.unique(peaks[inside])
    floors = limits
    if len(limits) > LIMIT_LEVELS:
        levels = np.linspace(0, len(limits) - 1, LIMIT_LEVELS).astype(np.int64)
        limits = limits[levels]
        # The highest peak is above the limit before the one that admits it.
        floors = np.concatenate([[0.0], limits[:-1]])
    least = np.full(points + 1, np.inf)
    fill = compile_if_large(_fill_remaining, points * points * len(limits))
    fill(sums, peaks, limits, floors, least)
    return RemainingTimes(shares, least)


def _fill_remaining(
    sums: Floats, peaks: Floats, limits: Floats, floors: Floats, least: Floats
) -> None:
    """Lower `least` to the remaining time of each prefix, for every limit on the peaks."""
    points = len(sums)
    rest = np.zeros(points + 1)
    for level in range(len(limits)):
        for prefix in range(points - 1, -1, -1):
            best = np.inf
            for k in range(points - prefix):
                seconds = sums[prefix, k] + rest[prefix + 1 + k]
                if peaks[prefix, k] <= limits[level] and seconds < best:
                    best = seconds
            rest[prefix] = best
            least[prefix] = min(least[prefix], best + floors[level])
    least[points] = 0.0


class ExactResult(NamedTuple):
    """The lengths of better cuts, or nothing if none were found, and a lower bound for all cuts."""

    lengths: tuple[int, ...]
    bound: float


class _Labels(NamedTuple):
    """The labels of one prefix."""

    free: Floats  # when each stage is free: [label, forward or backward, stage]
    origin: Ints  # back-pointers: [label, (prefix, label)]

    @property
    def latencies(self) -> Floats:
        """When the last stage is done, forward and backward."""
        latencies: Floats = self.free[:, :, -1].sum(axis=1)
        return latencies


def search_exactly(
    tables: StageTables, rests: Sequence[RemainingTimes], known: float, effort: int
) -> ExactResult:
    """Find cuts better than a known latency, if they exist, by extending about `effort` labels.

    If more labels matter than that, the most promising of each prefix are kept, and the
    bound accounts for the others.
    """
    points = tables.points
    slices = points * (points + 1) // 2
    most_labels = max(effort // slices, LEAST_LABELS)
    no_labels = _Labels(
        np.empty((0, 2, tables.stages)), np.empty((0, 2), dtype=np.int64)
    )
    waiting = [[no_labels] for _ in range(points + 1)]
    waiting[0] = [_Labels(np.zeros((1, 2, tables.stages)), np.array([[-1, -1]]))]
    kept: list[_Labels] = []
    best = known
    least_dropped = np.inf  # the least bound of a label that was dropped unproven
    work = np.stack([tables.forward, tables.backward])
    hops = np.stack([tables.onward[:-1], tables.homeward[1:]])
    crossing = work.sum(axis=(0, 1)) + hops.sum(axis=(0, 1))
    for prefix in range(points + 1):
        labels, dropped = _prune(waiting[prefix], prefix, rests, best, most_labels)
        waiting[prefix] = []
        least_dropped = min(least_dropped, dropped)
        kept.append(labels)
        if not len(labels.free) or prefix == points:
            continue
        # The next slice starts when the first stage is free, and crosses all stages.
        begin = labels.free[:, :, 0].sum(axis=1).min()
        ends = begin + crossing[prefix, : points - prefix]
        columns = np.flatnonzero(ends < best * EQUAL_TIME_FACTOR)
        for column in columns.tolist():
            seconds = work[:, :, prefix, column]
            free = times_after(labels.free, seconds, hops[:, :, prefix, column])
            count = len(free)
            origin = np.stack([np.full(count, prefix), np.arange(count)], axis=1)
            extended = _Labels(free, origin)
            end = prefix + column + 1
            if end == points:
                best = min(best, float(extended.latencies.min()))
            waiting[end].append(extended)
    complete = kept[points]
    if not len(complete.free):
        return ExactResult((), min(known, least_dropped))
    last = int(complete.latencies.argmin())
    return ExactResult(_trace_back(kept, last), min(best, least_dropped))


def times_after(free: Floats, seconds: Floats, hops: Floats) -> Floats:
    """Return when each stage is free again after one more slice; the stages are the last axis."""
    ends = np.cumsum(seconds, axis=-1)
    ends[..., 1:] += np.cumsum(hops, axis=-1)
    delays = np.maximum.accumulate(free - (ends - seconds), axis=-1)
    after: Floats = delays + ends
    return after


def _lower_bounds(free: Floats, prefix: int, rests: Sequence[RemainingTimes]) -> Floats:
    """Return a lower bound on the latency of each label."""
    done = free.sum(axis=1)
    bounds = [done[:, -1]]
    bounds += [done @ rest.shares + rest.least[prefix] for rest in rests]
    highest: Floats = np.max(bounds, axis=0)
    return highest


def _prune(
    arrived: Sequence[_Labels],
    prefix: int,
    rests: Sequence[RemainingTimes],
    best: float,
    most_labels: int,
) -> tuple[_Labels, float]:
    """Return the labels of a prefix that matter.

    The second value is the least bound of the labels that were dropped only because
    there were too many.
    """
    free = np.concatenate([labels.free for labels in arrived])
    origin = np.concatenate([labels.origin for labels in arrived])
    bounds = _lower_bounds(free, prefix, rests)
    order = np.argsort(bounds, kind="stable")
    order = order[bounds[order] <= best * EQUAL_TIME_FACTOR]
    flat = free.reshape(len(free), free.shape[1] * free.shape[2])
    chosen: list[int] = []
    least_dropped = np.inf
    for label in order.tolist():
        if len(chosen) == most_labels:
            least_dropped = float(bounds[label])
            break
        dominated = (flat[chosen] <= flat[label]).all(axis=1).any()
        if not dominated:
            chosen.append(label)
    return _Labels(free[chosen], origin[chosen]), least_dropped


def _trace_back(kept: Sequence[_Labels], label: int) -> tuple[int, ...]:
    """Return the slices that led to a label at the end."""
    lengths = []
    point = len(kept) - 1
    while point > 0:
        before, label = kept[point].origin[label].tolist()
        lengths.append(point - before)
        point = before
    return tuple(reversed(lengths))
