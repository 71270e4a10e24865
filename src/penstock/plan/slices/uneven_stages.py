"""Cuts for stages that take different times: an embedding in front, a head at the end, ranks of different speed.

Slices go through the stages in order, so the latency of each way is the longest path down and right through a grid:

    slice    0    1    2    3
    stage 0  f ─► f    .    .        each step goes on to the next slice, or over a hop to the next stage; on the way
    stage 1  .    f ─► f ─► f        back it is the same grid with the backwards in it, from corner to corner
    stage 2  .    .    .    f

No formula gives the best cuts. What is given here, and which:

- `longest_path`: the latency of given cuts, exactly, as `simulate` has it for `terapipe` (links that are not serial).
- A *bound*: no path is longer than the longest, nor is any mean of paths. One runs along the first stage, crosses all
  (or those up to the slowest) at one slice and runs on there; it is as long as the lesser of the two stages at every
  slice, and the rest of the crossing where that is most. Another runs along the slowest stage. `best_cuts` finds the
  least of such a mean over all cuts, and the largest over several means is the bound. It is exact for equal stages.
- The *cuts*: the best of those that the bounds found, moved point by point as long as that helps.
- For one micro-batch, a search over ways to cut a prefix, with the times at which each stage is free. Left out are
  those that are later on every stage, or cannot end before the best cuts known. It is exact, unless more are left than
  `effort` allows; then the best of them are gone on with, and the bound still holds. In tests it is exact up to about
  30 points and 8 stages. `exact` says whether bound and latency meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.compiled import at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.cuts import best_cuts
from penstock.plan.slices.label_search import (
    RemainingTimes,
    remaining_times,
    search_exactly,
)
from penstock.plan.slices.slice_times import TableTimes
from penstock.plan.slices.stage_times import StageTables

MAX_EXACT_POINTS = 256  # points up to which the exact search is tried
MAX_BOUND_PASSES = 400  # passes for one bound
MIXING_SHARES = (1.0, 0.75, 0.5, 0.25)  # of a crossing path in a mean of two paths
EXPECTED_MOVES = 64  # about as many as are tried: decides whether compiling pays
EQUAL_LATENCY_SHARE = 1e-9  # shares of a latency that are the same


@dataclass(frozen=True, slots=True)
class UnevenSlicing:
    """Slices in points, their latency, and a latency that no cuts go below."""

    lengths: tuple[int, ...]
    latency: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no cuts are better."""
        return self.bound >= self.latency * (1 - EQUAL_LATENCY_SHARE)

    @property
    def gap(self) -> float:
        """How much better cuts could be at most, as a share of the bound."""
        return self.latency / self.bound - 1.0 if self.bound else 0.0

    @property
    def cuts(self) -> tuple[int, ...]:
        """The points from 0 to the end at which it is cut."""
        return (0, *np.cumsum(self.lengths).tolist())


def uneven_cuts(
    tables: StageTables, microbatches: int = 1, effort: int = 500_000
) -> UnevenSlicing:
    """Cuts for stages of different times, all micro-batches cut alike; `effort`: prefixes the exact search may try."""
    if microbatches < 1:
        raise ShapeError(f"{microbatches} micro-batches; the least is 1")
    _check_tables(tables)
    tried, bound = {(tables.points,), _mean_cuts(tables, microbatches)}, 0.0
    mixes = _mixes(tables)
    for mix in mixes:
        found = best_cuts(
            _path_times(tables, mix, microbatches), 2, patience=MAX_BOUND_PASSES
        )
        bound = max(bound, found.bound)
        tried.add(found.lengths)
    known = min(tried, key=lambda lengths: longest_path(tables, lengths, microbatches))
    lengths, latency = _moved(tables, known, microbatches)
    if (
        microbatches == 1
        and tables.points <= MAX_EXACT_POINTS
        and bound < latency * (1 - EQUAL_LATENCY_SHARE)
    ):
        exact = search_exactly(
            tables, [_rest(tables, mix) for mix in mixes], latency, effort
        )
        bound = max(bound, exact.bound)
        if exact.lengths:
            lengths, latency = _moved(tables, exact.lengths, 1)
    return UnevenSlicing(tuple(lengths), latency, min(bound, latency))


def _check_tables(tables: StageTables) -> None:
    """All of one shape, with a time for every slice that can be."""
    every = (tables.forward, tables.backward, tables.onward, tables.homeward)
    shapes = [table.shape for table in every]
    if set(shapes) != {(tables.stages, tables.points, tables.points)}:
        raise ShapeError(
            f"tables of stages are all [stage, prefix, length - 1]; these are {shapes}"
        )
    prefixes, lengths = np.indices((tables.points, tables.points))
    for table in every:
        bad = np.argwhere(
            (prefixes + lengths < tables.points) & ~(np.isfinite(table) & (table >= 0))
        )
        if len(bad):
            stage, prefix, at = bad[0].tolist()
            seconds = f"{table[stage, prefix, at]:g} seconds on stage {stage}"
            raise ShapeError(
                f"a slice of {at + 1} points after {prefix} takes {seconds}; the least is 0, none is inf"
            )


def longest_path(
    tables: StageTables, lengths: Sequence[int], microbatches: int = 1
) -> float:
    """The latency of given slices, there and back."""
    if sum(lengths) != tables.points or min(lengths, default=0) < 1:
        raise ShapeError(
            f"slices of {list(lengths)} points make {sum(lengths)}; the sequence has {tables.points}"
        )
    sizes = np.tile(np.asarray(lengths, dtype=np.int64), microbatches)
    prefixes = (np.cumsum(sizes) - sizes) % tables.points
    walk = at_speed(_walk, len(sizes) * tables.stages * EXPECTED_MOVES)
    there = walk(tables.forward, tables.onward[:-1], prefixes, sizes)
    return there + walk(tables.backward, tables.homeward[1:], prefixes, sizes)


def _walk(work: Floats, hops: Floats, prefixes: Ints, sizes: Ints) -> float:
    """The longest path: when the last stage is done with the last slice."""
    free = np.zeros(len(work))
    for piece in range(len(sizes)):
        prefix, at = prefixes[piece], sizes[piece] - 1
        ready = 0.0
        for stage in range(len(work)):
            if stage > 0:
                ready += hops[stage - 1, prefix, at]
            ready = max(ready, free[stage]) + work[stage, prefix, at]
            free[stage] = ready
    return float(free[-1])


# ---------------------------------------------------------------- bounds
class _Mix(NamedTuple):
    """A mean of two paths: a share of the one that crosses from stage to stage, the rest along the slowest stage."""

    share: float
    first: int
    last: int
    slow: int


def _mixes(tables: StageTables) -> list[_Mix]:
    slow, last = (
        int((tables.forward + tables.backward)[:, 0, -1].argmax()),
        tables.stages - 1,
    )
    pairs = sorted({(0, last), (0, slow), (slow, last)})
    return [
        _Mix(0.0, slow, slow, slow),
        *(_Mix(share, *pair, slow) for pair in pairs for share in MIXING_SHARES),
    ]


def _crossing(
    tables: StageTables, first: int, last: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Of every slice: the lesser of two stages, and what crossing from one to the other adds; there, and back."""
    found = []
    for work, hops in (
        (tables.forward, tables.onward[:-1]),
        (tables.backward, tables.homeward[1:]),
    ):
        lesser = np.minimum(work[first], work[last])
        whole = work[first : last + 1].sum(axis=0) + hops[first:last].sum(axis=0)
        found += [lesser, np.maximum(whole - lesser, 0.0)]
    return found[0], found[1], found[2], found[3]


def _path_times(tables: StageTables, mix: _Mix, microbatches: int) -> TableTimes:
    """The lengths of a mean of two paths: `best_cuts` through two stages finds the least."""
    there, cross_there, back, cross_back = _crossing(tables, mix.first, mix.last)
    slow = tables.forward[mix.slow] + tables.backward[mix.slow]
    sums = microbatches * (mix.share * (there + back) + (1 - mix.share) * slow)
    points, ends = np.arange(tables.points), np.arange(tables.points)[::-1]
    for share, first, last in (
        (mix.share, mix.first, mix.last),
        (1 - mix.share, mix.slow, mix.slow),
    ):
        sums[0] += (
            share * _stages(tables, 0, first)[0]
        )  # stages before are crossed at the first slice,
        sums[points, ends] += (
            share * _stages(tables, last + 1, tables.stages)[points, ends]
        )  # those after at the last
    return TableTimes(sums, (mix.share * cross_there, mix.share * cross_back))


def _stages(tables: StageTables, begin: int, end: int) -> Floats:
    """What crossing some stages takes, hops included, there and back."""
    onward, homeward = tables.onward[:-1], tables.homeward[1:]
    hops = slice(begin, end) if begin == 0 else slice(begin - 1, end - 1)
    whole: Floats = tables.forward[begin:end].sum(axis=0) + tables.backward[
        begin:end
    ].sum(axis=0)
    whole = whole + onward[hops].sum(axis=0) + homeward[hops].sum(axis=0)
    return whole


def _mean_cuts(tables: StageTables, microbatches: int) -> tuple[int, ...]:
    """The best cuts if all stages were alike."""
    forward = (
        tables.forward.mean(axis=0) + tables.onward[:-1].mean(axis=0)
        if tables.stages > 1
        else tables.forward[0]
    )
    backward = tables.backward.mean(axis=0)
    times = TableTimes(microbatches * (forward + backward), (forward, backward))
    return best_cuts(times, tables.stages, patience=MAX_BOUND_PASSES).lengths


def _rest(tables: StageTables, mix: _Mix) -> RemainingTimes:
    """What must still come, at least, after a prefix: the two paths again, from where their stages are free."""
    shares = np.zeros(tables.stages)
    shares[mix.first] += mix.share
    shares[mix.slow] += 1 - mix.share
    times = _path_times(tables, mix, 1)
    sums = times.sums.copy()
    for share, first in ((mix.share, mix.first), (1 - mix.share, mix.slow)):
        sums[0] -= share * _stages(tables, 0, first)[0]  # that is behind it
    return remaining_times(shares, sums, times.peaks[0] + times.peaks[1])


# ---------------------------------------------------------------- moving cuts
def _moved(
    tables: StageTables, lengths: Sequence[int], microbatches: int
) -> tuple[tuple[int, ...], float]:
    """Cuts moved, left out or added, one at a time, as long as that shortens the longest path."""
    best, latency = tuple(lengths), longest_path(tables, lengths, microbatches)
    better = True
    while better:
        better = False
        for other in _neighbours(best):
            found = longest_path(tables, other, microbatches)
            if found < latency * (1 - 1e-12):
                best, latency, better = other, found, True
                break
    return best, latency


def _neighbours(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at in range(len(lengths) - 1):
        pair = lengths[at] + lengths[at + 1]
        for step in (1, -1, 2, -2, 5, -5):
            if 0 < lengths[at] + step < pair:
                yield (
                    *lengths[:at],
                    lengths[at] + step,
                    lengths[at + 1] - step,
                    *lengths[at + 2 :],
                )
        yield (*lengths[:at], pair, *lengths[at + 2 :])
    for at, length in enumerate(lengths):
        if length > 1:
            yield (*lengths[:at], (length + 1) // 2, length // 2, *lengths[at + 1 :])
