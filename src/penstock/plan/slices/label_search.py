"""The exact search for uneven stages: a label is a way to cut a prefix, with the time at which every stage is free.

    prefix 3 | cuts 1 2    stages free at 4 6 9, back 8 12 18
             | cuts 3      stages free at 3 6 9, back 6 12 18     no later anywhere: the other label is left out

A label can be left out if another is no later on any stage, there and back; or if what must still come after it, at
least, ends no earlier than the best cuts known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.compiled import at_speed
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.stage_times import StageTables

LIMIT_LEVELS = 128  # limits for which what must come is reckoned
EQUAL_TIME_FACTOR = 1 + 1e-12  # times within this are equal


@dataclass(frozen=True, slots=True)
class RemainingTimes:
    """After each prefix, the least that a path still adds that goes on from a stage; or some paths, by their shares."""

    shares: Floats  # of the stages from which the paths go on; 1 in all
    least: Floats


def remaining_times(shares: Floats, sums: Floats, peaks: Floats) -> RemainingTimes:
    """For every prefix the least of: the sum of its remaining slices, and the highest of their peaks."""
    points = len(sums)
    inside = np.add.outer(np.arange(points), np.arange(points)) < points
    values = np.unique(peaks[inside])
    floors = values
    if len(values) > LIMIT_LEVELS:
        values = values[np.linspace(0, len(values) - 1, LIMIT_LEVELS).astype(np.int64)]
        floors = np.concatenate(
            [[0.0], values[:-1]]
        )  # a highest peak up to a limit, past the one before
    least = np.full(points + 1, np.inf)
    at_speed(_least_rests, points * points * len(values))(
        sums, peaks, values, floors, least
    )
    return RemainingTimes(shares, least)


def _least_rests(
    sums: Floats, peaks: Floats, values: Floats, floors: Floats, least: Floats
) -> None:
    points = len(sums)
    rest = np.zeros(points + 1)
    for level in range(len(values)):
        for prefix in range(points - 1, -1, -1):
            best = np.inf
            for k in range(points - prefix):
                if (
                    peaks[prefix, k] <= values[level]
                    and sums[prefix, k] + rest[prefix + 1 + k] < best
                ):
                    best = sums[prefix, k] + rest[prefix + 1 + k]
            rest[prefix] = best
            least[prefix] = min(least[prefix], best + floors[level])
    least[points] = 0.0


class ExactResult(NamedTuple):
    """Better cuts, if there are any, and what no cuts go below."""

    lengths: tuple[int, ...]
    bound: float


class _Labels(NamedTuple):
    """Of one prefix: times, there and back, [label, way, stage]; whence each came, [label, (prefix, label)]."""

    free: Floats
    whence: Ints


def search_exactly(
    tables: StageTables, rests: Sequence[RemainingTimes], known: float, effort: int
) -> ExactResult:
    """Cuts better than a known latency, if there are any; about so many labels are gone on with.

    If more labels matter than that, the most promising of each prefix are kept, and the bound is what the others have.
    """
    points, most = (
        tables.points,
        max(effort // (tables.points * (tables.points + 1) // 2), 4),
    )
    nothing = _Labels(np.empty((0, 2, tables.stages)), np.empty((0, 2), dtype=np.int64))
    waiting = [[nothing] for _ in range(points + 1)]
    waiting[0] = [_Labels(np.zeros((1, 2, tables.stages)), np.array([[-1, -1]]))]
    kept: list[_Labels] = []
    dropped, best = (
        np.inf,
        known,
    )  # the least bound of a label that was left out unproven; the best known
    work = np.stack([tables.forward, tables.backward])
    hops = np.stack([tables.onward[:-1], tables.homeward[1:]])
    crossed = work.sum(axis=(0, 1)) + hops.sum(axis=(0, 1))
    for prefix in range(points + 1):
        labels, lost = _pruned(waiting[prefix], prefix, rests, best, most)
        waiting[prefix] = []
        dropped = min(dropped, lost)
        kept.append(labels)
        if not len(labels.free) or prefix == points:
            continue
        begun = (
            labels.free[:, :, 0].sum(axis=1).min()
        )  # from there a slice crosses all stages
        for length in (
            np.flatnonzero(
                begun + crossed[prefix, : points - prefix] < best * EQUAL_TIME_FACTOR
            )
            + 1
        ).tolist():
            free = times_after(
                labels.free,
                work[:, :, prefix, length - 1],
                hops[:, :, prefix, length - 1],
            )
            whence = np.stack(
                [np.full(len(free), prefix), np.arange(len(free))], axis=1
            )
            if prefix + length == points:
                best = min(best, float(free[:, :, -1].sum(axis=1).min()))
            waiting[prefix + length].append(_Labels(free, whence))
    ends = kept[points]
    if not len(ends.free):
        return ExactResult((), min(known, dropped))
    last = int(ends.free[:, :, -1].sum(axis=1).argmin())
    return ExactResult(_retraced(kept, last), min(best, dropped))


def times_after(free: Floats, seconds: Floats, hops: Floats) -> Floats:
    """When each stage is free again after one more slice; the stages are the last axis."""
    ends = np.cumsum(seconds, axis=-1)
    ends[..., 1:] += np.cumsum(hops, axis=-1)
    found: Floats = np.maximum.accumulate(free - (ends - seconds), axis=-1) + ends
    return found


def _bounds(free: Floats, prefix: int, rests: Sequence[RemainingTimes]) -> Floats:
    """What each label's latency is at least."""
    done = free.sum(axis=1)
    bounds = [done[:, -1], *(done @ rest.shares + rest.least[prefix] for rest in rests)]
    found: Floats = np.max(bounds, axis=0)
    return found


def _pruned(
    some: Sequence[_Labels],
    prefix: int,
    rests: Sequence[RemainingTimes],
    best: float,
    most: int,
) -> tuple[_Labels, float]:
    """The labels of a prefix that matter, and the least bound of those left out only because there were too many."""
    free, whence = (np.concatenate(column) for column in zip(*some, strict=True))
    bounds = _bounds(free, prefix, rests)
    order = np.argsort(bounds, kind="stable")
    order = order[bounds[order] <= best * EQUAL_TIME_FACTOR]
    chosen: list[int] = []
    flat = free.reshape(len(free), free.shape[1] * free.shape[2])
    lost = np.inf
    for label in order.tolist():
        if len(chosen) == most:
            lost = float(bounds[label])
            break
        if not chosen or not (flat[chosen] <= flat[label]).all(axis=1).any():
            chosen.append(label)
    return _Labels(free[chosen], whence[chosen]), lost


def _retraced(kept: Sequence[_Labels], label: int) -> tuple[int, ...]:
    """The slices that led to a label at the end."""
    lengths, point = [], len(kept) - 1
    while point > 0:
        before, label = kept[point].whence[label].tolist()
        lengths.append(point - before)
        point = before
    return tuple(reversed(lengths))
