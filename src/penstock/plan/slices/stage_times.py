"""What the slices of a pipeline take, read off any cost: asked for a few slices of each stage, and fitted.

A cost answers for one action at a time; a planner wants the time of every slice there could be. Whole sequences,
halves, quarters ... are asked for, and the four terms of `Seconds` fitted to the answers: exact for every cost that has
such terms, and `error` says how far off they are for one that has not (then all slices are asked for, if few).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.curve import Seconds
from penstock.cost.fit import least_squares
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.ir.table import Floats
from penstock.plan.slices.slice_times import (
    SliceTimes,
    TableTimes,
    add_curves,
    seconds_along,
    times_from_curves,
)
from penstock.schedules.list_scheduling import in_turn

EQUAL_TIME_SHARE = 1e-9  # shares of a time closer than this are equal
MAX_TABLE_POINTS = 48  # points for which every slice may be asked for
NO_TIME = Seconds()


@dataclass(frozen=True, slots=True)
class StageCurves:
    """One stage's forward and backward, and the hops of what leaves it: on to the next stage, back to the last."""

    forward: Seconds
    backward: Seconds
    onward: Seconds = NO_TIME
    homeward: Seconds = NO_TIME
    error: float = 0.0  # the largest share of a time by which a curve is off


def stage_curves(
    stages: Sequence[Stage], cost: Cost, tokens: int
) -> tuple[StageCurves, ...]:
    """The curves of stages that a sequence of so many tokens goes through in turn."""
    if tokens < 1:
        raise ShapeError(f"a sequence of {tokens} tokens; the least is 1")
    probe = in_turn(
        stages,
        [
            MicroBatch(tuple(range(len(stages))), tokens, cuts)
            for cuts in _patterns(tokens)
        ],
    )
    return tuple(_of_stage(probe, cost, stage) for stage in range(len(stages)))


@dataclass(frozen=True, slots=True)
class StageTables:
    """Seconds of every slice on every stage, [stage, prefix, length - 1], and of the hops from each stage."""

    forward: Floats
    backward: Floats
    onward: Floats  # to the next stage; the last has none
    homeward: Floats  # to the stage before; the first has none

    @property
    def stages(self) -> int:
        """How many, one after the other."""
        return len(self.forward)

    @property
    def points(self) -> int:
        """Steps of the grid."""
        return int(self.forward.shape[1])


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages one after the other, as a planner sees them: sequences of so many points of `grain` tokens."""

    points: int
    grain: int
    curves: tuple[StageCurves, ...]
    tables: StageTables | None = None  # where the curves are no good

    @property
    def even(self) -> bool:
        """Whether all stages take the same, and all hops between them."""
        if self.tables is not None:
            t = self.tables
            groups = (t.forward, t.backward, t.onward[:-1], t.homeward[1:])
            return all(
                np.allclose(group, group[:1], rtol=EQUAL_TIME_SHARE, atol=0)
                for group in groups
            )
        size, every = self.points * self.grain, self.curves
        work = ([each.forward for each in every], [each.backward for each in every])
        hops = (
            [each.onward for each in every[:-1]],
            [each.homeward for each in every[1:]],
        )
        return all(_alike(curves, size) for curves in (*work, *hops))


def pipeline_of(
    stages: Sequence[Stage], cost: Cost, tokens: int, granularity: int
) -> Pipeline:
    """Stages that a sequence goes through in turn, cut at multiples of `granularity` tokens, under any cost."""
    if granularity < 1 or tokens < 1 or tokens % granularity:
        near = max(granularity, 1) * max(round(tokens / max(granularity, 1)), 1)
        raise ShapeError(
            f"{tokens} tokens in steps of {granularity} do not come out even; {near} would"
        )
    points, curves = tokens // granularity, stage_curves(stages, cost, tokens)
    if (
        max(curve.error for curve in curves) <= EQUAL_TIME_SHARE
        or points > MAX_TABLE_POINTS
    ):
        return Pipeline(points, granularity, curves)
    forward, backward = _asked(stages, cost, points, granularity)
    hops = _tabled(curves, points, granularity)
    return Pipeline(
        points,
        granularity,
        curves,
        StageTables(forward, backward, hops.onward, hops.homeward),
    )


def mean_pipeline(pipeline: Pipeline) -> Pipeline:
    """As many stages, all taking the mean of what they take."""
    stages, tables = len(pipeline.curves), pipeline.tables

    def mean(name: str, hops: bool) -> Seconds:
        whole = add_curves([getattr(curve, name) for curve in pipeline.curves])
        share = 1 / max(stages - hops, 1)
        return Seconds(
            whole.base * share,
            whole.token * share,
            whole.prefix * share,
            whole.pair * share,
        )

    work, hops = (
        (mean("forward", False), mean("backward", False)),
        (mean("onward", True), mean("homeward", True)),
    )
    curves = (
        StageCurves(*work, *hops, error=max(curve.error for curve in pipeline.curves)),
    ) * stages
    if tables is None:
        return replace(pipeline, curves=curves)
    hop = (tables.onward[:-1], tables.homeward[1:])
    every = [
        np.broadcast_to(t.mean(axis=0), (stages, *t.shape[1:]))
        for t in (tables.forward, tables.backward, *hop)
    ]
    return replace(pipeline, curves=curves, tables=StageTables(*every))


def even_times(pipeline: Pipeline, microbatches: int = 1) -> SliceTimes:
    """Times of equal stages, all micro-batches cut alike: two peaks, there and back, each with its hop."""
    curves, tables = pipeline.curves, pipeline.tables
    if tables is not None:
        forward, backward = tables.forward[0], tables.backward[0]
        peaks = (forward + tables.onward[0], backward + tables.homeward[-1])
        return TableTimes(microbatches * (forward + backward), peaks)
    stage = curves[0]
    curve_peaks = [
        add_curves([stage.forward, curves[0].onward]),
        add_curves([stage.backward, curves[-1].homeward]),
    ]
    return times_from_curves(
        pipeline.points,
        pipeline.grain,
        [stage.forward, stage.backward] * microbatches,
        curve_peaks,
    )


def tabulate_slices(pipeline: Pipeline) -> StageTables:
    """All slices of all stages, written out."""
    return pipeline.tables or _tabled(pipeline.curves, pipeline.points, pipeline.grain)


# ---------------------------------------------------------------- asking a cost
def _tabled(curves: Sequence[StageCurves], points: int, grain: int) -> StageTables:
    prefixes, lengths = np.indices((points, points))
    tokens, before = (
        ((lengths + 1) * grain).astype(np.float64),
        (prefixes * grain).astype(np.float64),
    )

    def table(name: str) -> Floats:
        return np.stack(
            [seconds_along(getattr(curve, name), tokens, before) for curve in curves]
        )

    return StageTables(
        table("forward"), table("backward"), table("onward"), table("homeward")
    )


def _asked(
    stages: Sequence[Stage], cost: Cost, points: int, grain: int
) -> tuple[Floats, Floats]:
    """Forwards and backwards, each slice asked for: sequences cut into slices of one length, from every offset."""
    path, tokens = tuple(range(len(stages))), points * grain
    cuts = [
        tuple(sorted({0, *range(offset, points + 1, length), points}))
        for length in range(1, points + 1)
        for offset in range(min(length, points - length + 1))
    ]
    probe = in_turn(
        stages,
        [MicroBatch(path, tokens, tuple(grain * end for end in each)) for each in cuts],
    )
    tables = np.zeros((2, len(stages), points, points))
    for number, each in enumerate(cuts):
        for piece, (begin, end) in enumerate(pairwise(each)):
            for stage in path:
                for way, op in enumerate((Op.F, Op.B)):
                    seconds = cost.seconds(probe, Action(op, stage, number, piece))
                    tables[way, stage, begin, end - begin - 1] = seconds
    return tables[0], tables[1]


def _of_stage(probe: Schedule, cost: Cost, stage: int) -> StageCurves:
    """One stage's curves, and how far off they are."""
    spans, answers = [], []
    for number, microbatch in enumerate(probe.microbatches):
        for piece in range(microbatch.slices):
            there, back = (Action(op, stage, number, piece) for op in (Op.F, Op.B))
            onward = _hop(probe, cost, there, stage + 1)
            homeward = _hop(probe, cost, back, stage - 1)
            spans.append(microbatch.span(piece))
            answers.append(
                (
                    cost.seconds(probe, there),
                    cost.seconds(probe, back),
                    onward,
                    homeward,
                )
            )
    fits = [_fitted(spans, answer) for answer in np.array(answers).T]
    (forward, backward, onward, homeward), errors = zip(*fits, strict=True)
    return StageCurves(forward, backward, onward, homeward, max(errors))


def _hop(probe: Schedule, cost: Cost, action: Action, to: int) -> float:
    """Seconds from the end of an action until its result is on another stage's rank."""
    if not 0 <= to < len(probe.stages):
        return 0.0
    source, target = probe.rank_of(action), probe.stages[to].rank
    if source == target:
        return 0.0
    return cost.latency(source, target) + cost.message(probe, action) / cost.bandwidth(
        source, target
    )


def _patterns(tokens: int) -> list[tuple[int, ...]]:
    """Cuts whose slices tell the terms apart: whole, halves, quarters ... and uneven ones."""
    shares = [
        (0, 1),
        (0, 1 / 2, 1),
        (0, 1 / 4, 1),
        (0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1),
        (0, 1 / 64, 1 / 3, 61 / 64, 1),
    ]
    return [tuple(sorted({round(tokens * share) for share in each})) for each in shares]


def _fitted(spans: Sequence[tuple[int, int]], answers: Floats) -> tuple[Seconds, float]:
    """The curve nearest to the answers, and the largest error by its share; terms that make no difference are 0."""
    if not answers.any():
        return NO_TIME, 0.0
    begin, end = np.array(spans, dtype=np.float64).T
    size, tokens = end.max(), end - begin
    scale = np.array([1.0, size, size, size * size])
    terms = (
        np.stack(
            [np.ones(len(begin)), tokens, begin, tokens * begin + tokens * tokens / 2],
            axis=1,
        )
        / scale
    )
    weight = np.maximum(answers, answers.max() * 1e-6 + 1e-300)
    found = least_squares(
        terms / weight[:, None], answers / weight
    )  # none below 0: no work takes time back
    found[np.abs(found) < 1e-12 * np.abs(found).max()] = 0.0
    error = float(np.max(np.abs(terms @ found - answers) / weight))
    return Seconds(*(found / scale).tolist()), error


def _alike(curves: Sequence[Seconds], size: int) -> bool:
    """Whether curves are the same for sequences of a size."""
    terms = np.array(
        [
            (c.base, c.token * size, c.prefix * size, c.pair * size * size)
            for c in curves
        ]
    )
    return not len(terms) or bool(
        np.ptp(terms, axis=0).max() <= EQUAL_TIME_SHARE * np.abs(terms).max()
    )
