"""The cuts of a sequence that are worth simulating, and the cuts of packed documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.table import Ints
from penstock.plan.slices.curves import SlicedPipeline, coarse_step, sliced_pipeline
from penstock.plan.slices.cuts import best_cuts, equal_length
from penstock.plan.slices.uneven import uneven_cuts

# The numbers of slices to try, besides those that are best for equal and for uneven stages.
SLICE_COUNTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# The most passes of a search for cuts; its best cuts so far are then simulated.
MAX_CUT_PASSES = 2_000
# The most points for uneven stages, where every slice of every stage is tabulated.
MAX_UNEVEN_POINTS = 64
# The labels that the exact search for uneven stages may extend.
UNEVEN_EFFORT = 100_000


def cut_choices(
    ranks: int,
    microbatches: int,
    tokens: int,
    cost: Cost,
    granularity: int = 8,
    limit: int | None = None,
) -> list[tuple[int, ...]]:
    """Return the ways to cut sequences, in tokens, that are worth simulating: whole, equal and planned ones.

    Cuts are multiples of `granularity`. Which cuts are found does not depend on `limit`,
    which only leaves out those with more slices.
    """
    pipeline = sliced_pipeline(ranks, cost, tokens, granularity)
    choices = []
    for lengths in _every_lengths(pipeline, ranks, microbatches, limit):
        ends = np.cumsum([0, *lengths]) * pipeline.grain
        choices.append(tuple(ends.tolist()))
    return list(dict.fromkeys(choices))


def _every_lengths(
    pipeline: SlicedPipeline, ranks: int, microbatches: int, limit: int | None
) -> Iterator[Sequence[int]]:
    """Yield the lengths of at most `limit` slices, in points."""
    points = pipeline.points
    most = points if limit is None else limit
    yield [points]
    if most == 1:
        return
    times = pipeline.times(microbatches)
    found = [best_cuts(times, ranks, patience=MAX_CUT_PASSES).lengths]
    if not pipeline.even:
        found.append(_uneven_lengths(pipeline, microbatches))
    yield from (lengths for lengths in found if len(lengths) <= most)
    best_count = len(found[0])
    for count in sorted({*SLICE_COUNTS, best_count} - {1}):
        if count > min(most, points):
            break
        yield equal_length(points, count)
        if count != best_count:
            yield best_cuts(times, ranks, count, MAX_CUT_PASSES).lengths


def _uneven_lengths(pipeline: SlicedPipeline, microbatches: int) -> tuple[int, ...]:
    """Return slices for the stages as they are, on a grid that is coarse enough to tabulate."""
    step = coarse_step(pipeline.points, MAX_UNEVEN_POINTS)
    slicing = uneven_cuts(pipeline.tables(step), microbatches, effort=UNEVEN_EFFORT)
    return tuple(step * length for length in slicing.lengths)


# ---------------------------------------------------------------- packed documents
def equal_work_cuts(
    starts: Ints, slices: int, token_work: int, step: int = 1
) -> tuple[int, ...]:
    """Cut packed rows into slices of equal work, for the documents that they hold.

    `starts` has the position at which each token's document starts, (rows, tokens). A token
    does `token_work` units of work, and one more for each token of its document that it
    sees. For a given number of slices, the latency is least if the longest takes as little
    as possible. Everything is counted in integers, so that all ranks of a run find the same
    cuts. Cuts are multiples of `step` if the slices are not too many for that.

    >>> equal_work_cuts(np.array([[0, 0, 0, 0, 4, 4, 4, 4]]), slices=2, token_work=1)
    (0, 4, 8)
    >>> equal_work_cuts(np.zeros((1, 8), dtype=np.int64), slices=2, token_work=1)
    (0, 5, 8)
    """
    rows, tokens = starts.shape
    if not 1 <= slices <= tokens or token_work < 0 or step < 1:
        raise ShapeError(
            f"{tokens} tokens cannot be cut into {slices} slices in steps of {step}; "
            f"there must be from 1 to {tokens} slices, and steps of at least 1 token"
        )
    if tokens % step or tokens // step < slices:
        step = 1
    seen = np.arange(1, tokens + 1) - starts
    work = np.concatenate([[0], np.cumsum(seen.sum(axis=0) + rows * token_work)])
    done = work[::step] * slices
    points = tokens // step
    cuts = [0]
    for number in range(1, slices):
        wanted = number * work[-1]
        after = int(np.searchsorted(done, wanted))
        is_nearer = after > 0 and wanted - done[after - 1] <= done[after] - wanted
        point = after - 1 if is_nearer else after
        # Every slice before and after has at least one point.
        cuts.append(min(max(point, cuts[-1] + 1), points - slices + number))
    return tuple(step * cut for cut in (*cuts, points))
