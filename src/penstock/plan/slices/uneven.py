"""Cuts for stages that take different times: an embedding in front, a head at the end, ranks of different speed.

Slices go through the stages in order, so the latency of each direction is the longest path down and right in a grid:

    slice    0    1    2    3
    stage 0  f ─► f    .    .        each step leads to the next slice, or over a hop to the next stage; the
    stage 1  .    f ─► f ─► f        way back is the same grid with the backwards in it, from corner to corner
    stage 2  .    .    .    f

No formula gives the best cuts. This module has the following instead:

- `longest_path` is the exact latency of given cuts, as `simulate` has it for `terapipe` (with links that are not
  serial).
- A *bound*: the longest path is at least as long as any path, and as any mean of paths. One path runs along the first
  stage, crosses all stages (or those up to the slowest) at one slice, and then runs along the last. At every slice it
  takes at least the lesser of the two stages, plus the rest of the crossing at the slice where that is most. Another
  path runs along the slowest stage. `best_cuts` finds the least length of a mean of such paths over all cuts, and the
  bound is the largest over several means. It is exact for equal stages.
- The *cuts* are the best of those that the bounds found, moved point by point as long as that helps.
- For one micro-batch, `search_exactly` searches over all ways to cut a prefix. It is exact unless more labels remain
  than `effort` allows; the bound holds in any case. In the tests it is exact up to about 30 points and 8 stages.
  `UnevenSlicing.exact` says whether the bound and the latency meet.

**Labels.** A label is one way to cut a prefix, with the time at which each stage is free:

    prefix 3 | cuts 1 2    stages free at 4 6 9, back 8 12 18
             | cuts 3      stages free at 3 6 9, back 6 12 18     no later anywhere: the other label is dropped

A label can be dropped for two reasons: another label is no later on any stage, forward or backward; or even the least
time that must still follow it ends no earlier than the best cuts known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.curves import StageTables, tabulated_times
from penstock.plan.slices.cuts import best_cuts, check_lengths

# Up to this many points, the exact search is tried.
MAX_EXACT_POINTS = 256
# The most passes for one bound.
MAX_BOUND_PASSES = 400
# The shares of the crossing path in a mean of two paths.
MIXING_SHARES = (1.0, 0.75, 0.5, 0.25)
# The number of moves that are tried, roughly: it decides whether compiling pays.
EXPECTED_MOVES = 64
# The points by which a cut is moved.
CUT_MOVES = (1, -1, 2, -2, 5, -5)
# Latencies that differ by less than this share count as equal.
EQUAL_LATENCY_SHARE = 1e-9
# A move must improve the latency by more than this share.
LEAST_GAIN_SHARE = 1e-12
# The number of limits for which the remaining times are computed.
LIMIT_LEVELS = 128
# Times within this factor of each other count as equal.
EQUAL_TIME_FACTOR = 1 + 1e-12
# A search keeps at least this many labels per prefix.
LEAST_LABELS = 4


@dataclass(frozen=True, slots=True)
class UnevenSlicing:
    """Slices in points, their latency, and a lower bound for all cuts."""

    lengths: tuple[int, ...]
    latency: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether the cuts are proven to be the best."""
        return self.bound >= self.latency * (1 - EQUAL_LATENCY_SHARE)


def uneven_cuts(
    tables: StageTables, microbatches: int = 1, effort: int = 500_000
) -> UnevenSlicing:
    """Find cuts for stages of different times, with all micro-batches cut alike.

    `effort` is about the number of labels that the exact search may extend.
    """
    if microbatches < 1:
        raise ShapeError(f"there must be at least 1 micro-batch, not {microbatches}")
    _check_tables(tables)
    bound = 0.0
    candidates = {(tables.points,), _cuts_of_mean_stage(tables, microbatches)}
    means = _path_means(tables)
    for mean in means:
        times = tabulated_times(*_path_times(tables, mean, microbatches))
        slicing = best_cuts(times, 2, patience=MAX_BOUND_PASSES)
        bound = max(bound, slicing.bound)
        candidates.add(slicing.lengths)
    start = min(
        candidates, key=lambda lengths: longest_path(tables, lengths, microbatches)
    )
    lengths, latency = _improve(tables, start, microbatches)
    found = UnevenSlicing(lengths, latency, min(bound, latency))
    if microbatches == 1 and tables.points <= MAX_EXACT_POINTS and not found.exact:
        rests = [_rest_of_paths(tables, mean) for mean in means]
        result = search_exactly(tables, rests, latency, effort)
        bound = max(bound, result.bound)
        if result.lengths:
            lengths, latency = _improve(tables, result.lengths, 1)
        found = UnevenSlicing(lengths, latency, min(bound, latency))
    return found


def _check_tables(tables: StageTables) -> None:
    """Refuse tables of different shapes, or without a valid time for every possible slice."""
    every = (tables.forward, tables.backward, tables.onward, tables.homeward)
    shapes = [table.shape for table in every]
    if set(shapes) != {(tables.stages, tables.points, tables.points)}:
        raise ShapeError(
            "the tables of stages must all have the shape "
            f"[stage, prefix, length - 1]; these are {shapes}"
        )
    prefixes, columns = np.indices((tables.points, tables.points))
    inside = prefixes + columns < tables.points
    for table in every:
        valid = np.isfinite(table) & (table >= 0)
        invalid = np.argwhere(inside & ~valid)
        if len(invalid):
            stage, prefix, column = invalid[0].tolist()
            raise ShapeError(
                f"a slice of {column + 1} points after {prefix} "
                f"takes {table[stage, prefix, column]:g} seconds on stage {stage}; "
                "times must be finite and not negative"
            )


def longest_path(
    tables: StageTables, lengths: Sequence[int], microbatches: int = 1
) -> float:
    """Return the latency of given slices, forward and backward."""
    check_lengths(lengths, tables.points)
    sizes = np.tile(np.asarray(lengths, dtype=np.int64), microbatches)
    prefixes = (np.cumsum(sizes) - sizes) % tables.points
    walk = compile_if_large(_walk, len(sizes) * tables.stages * EXPECTED_MOVES)
    there = walk(tables.forward, tables.onward[:-1], prefixes, sizes)
    back = walk(tables.backward, tables.homeward[1:], prefixes, sizes)
    return there + back


def _walk(work: Floats, hops: Floats, prefixes: Ints, sizes: Ints) -> float:
    """Return the length of the longest path: when the last stage is done with the last slice."""
    free = np.zeros(len(work))
    for piece in range(len(sizes)):
        prefix = prefixes[piece]
        column = sizes[piece] - 1
        ready = 0.0
        for stage in range(len(work)):
            if stage > 0:
                ready += hops[stage - 1, prefix, column]
            ready = max(ready, free[stage]) + work[stage, prefix, column]
            free[stage] = ready
    return float(free[-1])


# ---------------------------------------------------------------- bounds
class _PathMean(NamedTuple):
    """A mean of two paths: a share of the one that crosses from stage to stage, the rest along the slowest stage."""

    share: float
    first: int
    last: int
    slowest: int


class _Crossing(NamedTuple):
    """For every slice: the lesser time of two stages, and what crossing from one to the other adds to it."""

    lesser: Floats
    extra: Floats


def _path_means(tables: StageTables) -> list[_PathMean]:
    """Return the means of paths that give the bounds."""
    whole_sequence = (tables.forward + tables.backward)[:, 0, -1]
    slowest = int(whole_sequence.argmax())
    last = tables.stages - 1
    means = [_PathMean(0.0, slowest, slowest, slowest)]
    for begin, end in sorted({(0, last), (0, slowest), (slowest, last)}):
        means += [_PathMean(share, begin, end, slowest) for share in MIXING_SHARES]
    return means


def _crossing(work: Floats, hops: Floats, first: int, last: int) -> _Crossing:
    """Return the crossing from one stage to another in one direction."""
    lesser = np.minimum(work[first], work[last])
    whole = work[first : last + 1].sum(axis=0) + hops[first:last].sum(axis=0)
    return _Crossing(lesser, np.maximum(whole - lesser, 0.0))


def _path_times(
    tables: StageTables, mean: _PathMean, microbatches: int
) -> tuple[Floats, Floats, Floats]:
    """Return the length of a mean of two paths as sums and peaks: `best_cuts` through two stages finds the least."""
    there = _crossing(tables.forward, tables.onward[:-1], mean.first, mean.last)
    back = _crossing(tables.backward, tables.homeward[1:], mean.first, mean.last)
    slowest = tables.forward[mean.slowest] + tables.backward[mean.slowest]
    crossing = mean.share * (there.lesser + back.lesser)
    sums = microbatches * (crossing + (1 - mean.share) * slowest)
    prefixes = np.arange(tables.points)
    to_the_end = prefixes[::-1]
    for share, first, last in (
        (mean.share, mean.first, mean.last),
        (1 - mean.share, mean.slowest, mean.slowest),
    ):
        # A path crosses the stages before it at the first slice,
        stages_before = _cross_stages(tables, 0, first)
        sums[0] += share * stages_before[0]
        # and the stages after it at the last slice.
        stages_after = _cross_stages(tables, last + 1, tables.stages)
        sums[prefixes, to_the_end] += share * stages_after[prefixes, to_the_end]
    return sums, mean.share * there.extra, mean.share * back.extra


def _cross_stages(tables: StageTables, begin: int, end: int) -> Floats:
    """Return the time of crossing some stages with their hops, forward and backward."""
    onward = tables.onward[:-1]
    homeward = tables.homeward[1:]
    hops = slice(begin, end) if begin == 0 else slice(begin - 1, end - 1)
    forward = tables.forward[begin:end].sum(axis=0)
    backward = tables.backward[begin:end].sum(axis=0)
    whole: Floats = forward + backward
    whole = whole + onward[hops].sum(axis=0) + homeward[hops].sum(axis=0)
    return whole


def _cuts_of_mean_stage(tables: StageTables, microbatches: int) -> tuple[int, ...]:
    """Return the best cuts if all stages took the mean time."""
    forward = tables.forward[0]
    if tables.stages > 1:
        forward = tables.forward.mean(axis=0) + tables.onward[:-1].mean(axis=0)
    backward = tables.backward.mean(axis=0)
    times = tabulated_times(microbatches * (forward + backward), forward, backward)
    return best_cuts(times, tables.stages, patience=MAX_BOUND_PASSES).lengths


def _rest_of_paths(tables: StageTables, mean: _PathMean) -> RemainingTimes:
    """Return the least time that must follow each prefix: the two paths, from where their stages are free."""
    shares = np.zeros(tables.stages)
    shares[mean.first] += mean.share
    shares[mean.slowest] += 1 - mean.share
    sums, *peaks = _path_times(tables, mean, 1)
    for share, first in ((mean.share, mean.first), (1 - mean.share, mean.slowest)):
        # The stages before the path lie behind the prefix.
        sums[0] -= share * _cross_stages(tables, 0, first)[0]
    return remaining_times(shares, sums, peaks[0] + peaks[1])


# ---------------------------------------------------------------- moving cuts
def _improve(
    tables: StageTables, lengths: tuple[int, ...], microbatches: int
) -> tuple[tuple[int, ...], float]:
    """Move, leave out or add one cut at a time, as long as that shortens the longest path."""
    best = lengths
    latency = longest_path(tables, lengths, microbatches)
    improved = True
    while improved:
        improved = False
        for neighbor in _neighbors(best):
            candidate = longest_path(tables, neighbor, microbatches)
            if candidate < latency * (1 - LEAST_GAIN_SHARE):
                best = neighbor
                latency = candidate
                improved = True
                break
    return best, latency


def _neighbors(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield slices with one cut moved, left out or added."""
    for index in range(len(lengths) - 1):
        before = lengths[:index]
        left = lengths[index]
        right = lengths[index + 1]
        after = lengths[index + 2 :]
        for step in CUT_MOVES:
            if 0 < left + step < left + right:
                yield (*before, left + step, right - step, *after)
        yield (*before, left + right, *after)
    for index, length in enumerate(lengths):
        if length > 1:
            halves = ((length + 1) // 2, length // 2)
            yield (*lengths[:index], *halves, *lengths[index + 1 :])


# ---------------------------------------------------------------- labels
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
