"""Whether to slice, into how many slices, cut where, in which order: every choice simulated, and ranked.

The cuts come from `best_cuts`, which is exact for TeraPipe's order and equal stages; how good they are in another
order, with uneven stages or serial links, is for the simulator to say. Tried are, each with several numbers of slices,

    terapipe          all forwards, then all backwards       gpipe if not sliced
    seq1f1b           1F1B over slices                        1f1b if not sliced
    hanayo            waves
    zb-h1, zb-v       zero bubble
    ...+split         backwards split, weight gradients where a rank would idle

with slices of equal length, with planned ones, and not sliced at all, which is often the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.model import ModelCost, finer
from penstock.errors import ShapeError
from penstock.ir.needs import BACKWARD
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.plan.candidates import (
    Candidate,
    ShapeWords,
    noisy_makespan,
    title,
    with_split,
)
from penstock.plan.slices.closed_form import equal_length
from penstock.plan.slices.cuts import best_cuts
from penstock.plan.slices.stage_times import (
    Pipeline,
    even_times,
    mean_pipeline,
    pipeline_of,
    tabulate_slices,
)
from penstock.plan.slices.uneven_stages import uneven_cuts
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, require_at_least
from penstock.schedules.transforms import recut, slice_tokens
from penstock.sim.simulate import simulate

SLICE_COUNTS = (
    2,
    4,
    8,
    16,
)  # slices that are tried, beside the number that is best for equal stages
MAX_CUT_PASSES = (
    2_000  # passes of a search for cuts; what it has then is simulated like any other
)
FINALISTS = 8  # the first so many are also simulated under noise
MAX_UNEVEN_POINTS = 64  # points at most, where stages are uneven and every slice of every stage is written out


@dataclass(frozen=True, slots=True)
class SlicedCandidate:
    """A candidate with the cuts of its sequences, in tokens. Its peak includes the gradients of keys and values."""

    candidate: Candidate
    cuts: tuple[int, ...]
    speedup: float | None  # over the best that is not sliced; none: no such fits

    @property
    def slices(self) -> int:
        """Of each sequence; 1: not sliced."""
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True)
class SlicedPlans:
    """All that fit, the fastest first, and why others are not there."""

    rows: tuple[SlicedCandidate, ...]
    too_large: tuple[tuple[str, float], ...]  # name and peak of what exceeds the memory

    @property
    def best(self) -> SlicedCandidate:
        """The fastest."""
        return self.rows[0]

    @property
    def verdict(self) -> str:
        """Whether slicing pays, in a sentence."""
        best = self.best
        name = f"{title(best.candidate.name, best.candidate.shape)} ({best.candidate.makespan:.4g} s)"
        sliced = [row for row in self.rows if row.slices > 1]
        if best.slices == 1 and not sliced:
            return f"not sliced: {name}"
        if best.slices == 1:
            loss = sliced[0].candidate.makespan / best.candidate.makespan - 1
            other = title(sliced[0].candidate.name, sliced[0].candidate.shape)
            return f"do not slice: {name} is best, and the best sliced, {other}, takes {loss:.2%} longer"
        if best.speedup is None:
            return f"slice: {name}; nothing fits that is not sliced"
        return f"slice: {name}, {best.speedup:.3f} times as fast as the best that is not sliced"


def sliced_plans(
    ranks: int,
    microbatches: int,
    tokens: int,
    cost: Cost,
    granularity: int = 8,
    memory: float | None = None,
    slices: Sequence[int] = SLICE_COUNTS,
    waves: Sequence[int] = (1, 2),
    gradients: float = 0.0,
    regrouped: Callable[[int], Cost] | None = None,
    watch: Callable[[str], None] = lambda name: None,
) -> SlicedPlans:
    """Every way to slice sequences of so many tokens, or not to, on so many ranks, ranked by makespan.

    `cost` is for as many parts as ranks; `regrouped` gives that of the model in another number of parts (a `ModelCost`
    has its parts cut evenly without it). `granularity`: cuts are multiples of it. `memory`: bytes of activations that
    fit on a rank, and `gradients` are bytes a token that those of keys and values take there while a sliced sequence
    goes back. `watch` is told each name in turn.
    """
    fewest = {"slices": min(slices, default=1), "waves": min(waves, default=1)}
    require_at_least(1, ranks=ranks, microbatches=microbatches, **fewest)
    if isinstance(cost, ModelCost) and len(cost.parts) != ranks:
        raise ShapeError(
            f"the cost has {len(cost.parts)} parts; for {ranks} ranks it must have {ranks}"
        )
    pipeline = pipeline_of(loop_placement(ranks), cost, tokens, granularity)
    counts = {count for count in slices if count <= pipeline.points}
    if memory is not None:
        counts |= _forced(ranks, tokens, cost, memory, pipeline.points)
    made = cache(
        partial(_made, ranks, microbatches)
    )  # whole orders are made once, and cut
    fits: list[tuple[Candidate, tuple[int, ...]]] = []
    too_large: list[tuple[str, float]] = []
    refused: list[ShapeError] = []
    for sort, cuts in _cuts(pipeline, ranks, microbatches, counts):
        for order in _orders(cuts, waves, made):
            watch(title(order.name, order.shape))
            try:
                found = _scored(
                    order,
                    sort,
                    _priced(cost, regrouped, ranks, order.pieces),
                    memory,
                    gradients,
                )
            except (
                ShapeError
            ) as error:  # a shape that this schedule, or this cost, does not have
                refused.append(error)
                continue
            if memory is not None and found.peak > memory * (1 + 1e-9):
                too_large.append((title(order.name, order.shape), found.peak))
            else:
                fits.append((found, cuts))
    if not fits and not too_large:
        raise refused[0]
    if not fits:
        least = min(too_large, key=lambda row: row[1])
        raise ShapeError(
            f"nothing fits into a memory of {memory:g}; the least is {least[0]} with {least[1]:g}"
        )
    fits.sort(key=lambda row: (row[0].makespan, len(row[1]), row[0].peak))
    fits[:FINALISTS] = [
        (_noised(row, cost, regrouped, ranks), cuts) for row, cuts in fits[:FINALISTS]
    ]
    whole = min((row.makespan for row, cuts in fits if len(cuts) == 2), default=None)
    rows = [
        SlicedCandidate(row, cuts, None if whole is None else whole / row.makespan)
        for row, cuts in fits
    ]
    return SlicedPlans(tuple(rows), tuple(sorted(too_large, key=lambda row: row[1])))


# ---------------------------------------------------------------- what is tried
def _cuts(
    pipeline: Pipeline, ranks: int, microbatches: int, counts: set[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Cuts in tokens, of which sort: not cut, of equal length, planned. None twice."""
    seen = set()
    for sort, lengths in _lengths(pipeline, ranks, microbatches, counts):
        cuts = tuple((np.cumsum([0, *lengths]) * pipeline.grain).tolist())
        if cuts not in seen:
            seen.add(cuts)
            yield sort, cuts


def _lengths(
    pipeline: Pipeline, ranks: int, microbatches: int, counts: set[int]
) -> Iterator[tuple[str, Sequence[int]]]:
    points = pipeline.points
    times = even_times(
        pipeline if pipeline.even else mean_pipeline(pipeline), microbatches
    )
    yield "whole", [points]
    best = best_cuts(times, ranks, patience=MAX_CUT_PASSES).lengths
    yield "planned", best
    if not pipeline.even:
        yield "planned", _uneven(pipeline, microbatches)
    for count in sorted({*counts, len(best)} - {1}):
        yield "even", equal_length(points, count)
        yield (
            "planned",
            best_cuts(times, ranks, slices=count, patience=MAX_CUT_PASSES).lengths,
        )


def _uneven(pipeline: Pipeline, microbatches: int) -> list[int]:
    """Cuts for stages as they are, on a grid coarse enough to write out."""
    least = -(-pipeline.points // MAX_UNEVEN_POINTS)
    step = next(
        step
        for step in range(least, pipeline.points + 1)
        if pipeline.points % step == 0
    )
    coarse = replace(
        pipeline, points=pipeline.points // step, grain=pipeline.grain * step
    )
    return [
        step * length
        for length in uneven_cuts(
            tabulate_slices(coarse), microbatches, effort=100_000
        ).lengths
    ]


class _Order(NamedTuple):
    """A schedule to try: its name and shape, stages on a rank, and how it is made."""

    name: str
    shape: ShapeWords
    pieces: int
    build: Callable[[], Schedule]
    split: bool = False  # with its weight gradients moved


def _made(
    ranks: int, microbatches: int, name: str, word: str = "slices", number: int = 1
) -> Schedule:
    return make(name, ranks=ranks, microbatches=microbatches, **{word: number})


def _orders(
    cuts: tuple[int, ...], waves: Sequence[int], made: Callable[..., Schedule]
) -> Iterator[_Order]:
    """Every order for given cuts; `made` makes one by its name, a word of its shape, and the number for that."""
    count = len(cuts) - 1
    shape: ShapeWords = (("slices", count),) if count > 1 else ()

    def woven(name: str) -> Schedule:
        return recut(made(name, "slices", count), cuts)

    def cut(name: str, *word: str | int) -> Schedule:
        return slice_tokens(made(name, *word), cuts)

    streamed = "seq1f1b" if count > 1 else "1f1b"
    yield _Order(
        "terapipe" if count > 1 else "gpipe", shape, 1, partial(woven, "terapipe")
    )
    yield _Order(streamed, shape, 1, partial(woven, "seq1f1b"))
    yield _Order(f"{streamed}+split", shape, 1, partial(woven, "seq1f1b"), split=True)
    yield _Order("zb-h1", shape, 1, partial(cut, "zb-h1"))
    yield _Order("zb-v", shape, 2, partial(cut, "zb-v"))
    for number in waves:
        wave = partial(cut, "hanayo", "waves", number)
        yield _Order("hanayo", (("waves", number), *shape), 2 * number, wave)
        yield _Order(
            "hanayo+split", (("waves", number), *shape), 2 * number, wave, split=True
        )


def _priced(
    cost: Cost, regrouped: Callable[[int], Cost] | None, ranks: int, pieces: int
) -> Cost:
    """The cost of the model with so many parts on a rank."""
    if regrouped is not None:
        return regrouped(ranks * pieces)
    return finer(cost, pieces) if isinstance(cost, ModelCost) else cost


def _scored(
    order: _Order, sort: str, cost: Cost, memory: float | None, gradients: float
) -> Candidate:
    """Built and simulated; the peak with the gradients of keys and values."""
    schedule = order.build()
    if order.split:
        schedule = with_split(schedule, cost, memory)
    found = noisy_makespan(order.name, order.shape, sort, schedule, cost, seeds=())
    if not gradients or schedule.slices == 1:
        return found
    levels = simulate(schedule, cost).activations + key_value_gradient_bytes(
        schedule, gradients
    )
    return replace(found, peak=float(levels.max()))


def _noised(
    row: Candidate, cost: Cost, regrouped: Callable[[int], Cost] | None, ranks: int
) -> Candidate:
    """With its makespan under noise."""
    price = _priced(cost, regrouped, ranks, len(row.schedule.stages) // ranks)
    return replace(
        row,
        noisy=noisy_makespan(row.name, row.shape, row.sort, row.schedule, price).noisy,
    )


# ---------------------------------------------------------------- memory
def key_value_gradient_bytes(schedule: Schedule, gradients: float) -> Floats:
    """Bytes on an action's rank, while it runs, of the gradients of keys and values of sequences on their way back.

    They are gathered from the last slice's backward, which gives them for all tokens before it, to the first slice's.
    `gradients` are bytes a token for all of a rank's stages.
    """
    table = schedule.table
    tokens = np.array([m.tokens for m in schedule.microbatches], dtype=np.float64)[
        table.microbatch
    ]
    size = np.where(
        table.slices[table.microbatch] > 1,
        gradients * tokens / table.crowd[table.stage],
        0.0,
    )
    back = table.kind == BACKWARD
    begins = np.where(
        back & (table.slice == table.slices[table.microbatch] - 1), size, 0.0
    )
    ends = np.where(back & (table.slice == 0), size, 0.0)
    found = np.zeros(len(table))
    for begin, end in pairwise(table.first.tolist()):
        found[begin:end] = (
            np.cumsum(begins[begin:end]) - np.cumsum(ends[begin:end]) + ends[begin:end]
        )
    return found


def _forced(
    ranks: int, tokens: int, cost: Cost, memory: float, points: int
) -> set[int]:
    """How many slices 1F1B over slices needs: it holds s + P - 1 of them, so (s + P - 1) / s of one micro-batch."""
    alone = slice_tokens(make("1f1b", ranks=ranks, microbatches=1), (0, tokens))
    one = float(simulate(alone, cost).peak_activations.max())
    if memory <= one or not one:
        return set()
    least = math.ceil((ranks - 1) * one / (memory - one) - 1e-9)
    return {count for count in (least, 2 * least) if 1 < count <= points}
