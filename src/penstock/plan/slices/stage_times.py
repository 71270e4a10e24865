"""The times that slices take on each stage of a pipeline, read off any cost: a few slices are asked for and fitted.

A cost answers for one action at a time, but a planner wants the time of every possible slice. So whole sequences,
halves, quarters and so on are asked for, and the four terms of `Seconds` are fitted to the answers. The fit is exact
for every cost that has such terms. For others, `error` says how far off the curves are, and the times of all slices
are tabulated instead, because cuts that follow a formula miss the tiles of kernels. If the cost has measured curves,
the table comes from them. Otherwise every slice is asked for. Where a table would be too large, the points move apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, seconds_along, sum_curves
from penstock.cost.fit import least_squares
from penstock.cost.model import ModelCost
from penstock.cost.profile import LayeredCost
from penstock.cost.wrapped import WrappedCost
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.ir.table import Floats
from penstock.plan.slices.slice_times import (
    SliceTimes,
    TableTimes,
    add_curves,
    times_from_curves,
)
from penstock.schedules.list_scheduling import sequential_schedule

# Times that differ by less than this share count as equal.
EQUAL_TIME_SHARE = 1e-9
# A table has at most this many entries, over all stages.
MAX_TABLE_SLICES = 4_000_000
# If a table could only have fewer points than this, the fitted curves are used.
MIN_TABLE_POINTS = 16
# At most about this many slices are asked for, over all stages, which takes about a second.
MAX_ASKED_SLICES = 60_000
# Terms below this share of the largest term are rounding errors.
LEAST_TERM_SHARE = 1e-12
# Boundaries, as shares of the sequence, of the slices that are asked for.
# Whole sequences, halves, quarters ... and uneven slices tell the four terms apart.
PROBE_SHARES = (
    (0, 1),
    (0, 1 / 2, 1),
    (0, 1 / 4, 1),
    (0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1),
    (0, 1 / 64, 1 / 3, 61 / 64, 1),
)
NO_TIME = Seconds()


@dataclass(frozen=True, slots=True)
class StageCurves:
    """One stage's forward and backward, and the hops of its results to the next stage and to the one before."""

    forward: Seconds
    backward: Seconds
    onward: Seconds = NO_TIME
    homeward: Seconds = NO_TIME
    error: float = 0.0  # the largest relative error of a curve


@dataclass(frozen=True, slots=True)
class StageTables:
    """Seconds of every slice on every stage, [stage, prefix, length - 1], and of the hops from each stage."""

    forward: Floats
    backward: Floats
    onward: Floats  # to the next stage; not used for the last stage
    homeward: Floats  # to the stage before; not used for the first stage

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def points(self) -> int:
        """The length of the sequence in grid points."""
        return int(self.forward.shape[1])


@dataclass(frozen=True, slots=True)
class SlicedPipeline:
    """Stages one after the other, and sequences of `points` points of `grain` tokens each."""

    points: int
    grain: int
    curves: tuple[StageCurves, ...]
    tables: StageTables | None = None  # only if the curves are not accurate

    @property
    def even(self) -> bool:
        """Whether all stages take the same time, and all hops between them do."""
        if self.tables is not None:
            return _are_even_tables(self.tables)
        onward = [curve.onward for curve in self.curves[:-1]]
        homeward = [curve.homeward for curve in self.curves[1:]]
        forward = [curve.forward for curve in self.curves]
        backward = [curve.backward for curve in self.curves]
        tokens = self.points * self.grain
        groups = (forward, backward, onward, homeward)
        return all(_are_equal_curves(group, tokens) for group in groups)


def _are_even_tables(tables: StageTables) -> bool:
    """Whether the tables of all stages are the same."""
    groups = (
        tables.forward,
        tables.backward,
        tables.onward[:-1],
        tables.homeward[1:],
    )
    for group in groups:
        is_shared = group.strides[0] == 0
        if not is_shared and not np.allclose(
            group, group[:1], rtol=EQUAL_TIME_SHARE, atol=0
        ):
            return False
    return True


def _are_equal_curves(curves: Sequence[Seconds], tokens: int) -> bool:
    """Whether curves are the same for sequences of this many tokens."""
    if not curves:
        return True
    rows = []
    for curve in curves:
        row = (
            curve.base,
            curve.token * tokens,
            curve.prefix * tokens,
            curve.pair * tokens * tokens,
        )
        rows.append(row)
    terms = np.array(rows)
    spread = np.ptp(terms, axis=0).max()
    return bool(spread <= EQUAL_TIME_SHARE * np.abs(terms).max())


def sliced_pipeline(
    stages: Sequence[Stage], cost: Cost, tokens: int, granularity: int
) -> SlicedPipeline:
    """Return the times of stages under any cost, for a sequence that is cut at multiples of `granularity` tokens."""
    if granularity < 1 or tokens < 1:
        raise ShapeError(
            f"{tokens} tokens cannot be cut in steps of {granularity}; "
            "both must be at least 1"
        )
    if tokens % granularity:
        nearest = granularity * max(round(tokens / granularity), 1)
        raise ShapeError(
            f"{tokens} tokens cannot be cut in steps of {granularity} "
            f"without a remainder; {nearest} can"
        )
    points = tokens // granularity
    curves = stage_curves(stages, cost, tokens)
    error = max(curve.error for curve in curves)
    if error <= EQUAL_TIME_SHARE:
        return SlicedPipeline(points, granularity, curves)
    measured = _measured_curves(stages, cost, tokens)
    most = MAX_ASKED_SLICES if measured is None else MAX_TABLE_SLICES
    step = coarse_step(points, int(math.sqrt(most / len(stages))))
    if step > 1 and points // step < MIN_TABLE_POINTS:
        return SlicedPipeline(points, granularity, curves)
    points = points // step
    grain = granularity * step
    if measured is None:
        forward, backward = _ask_every_slice(stages, cost, points, grain)
    else:
        forward = _tabulate([ops.forward for ops in measured], points, grain)
        backward = _tabulate([ops.backward for ops in measured], points, grain)
    hops = _tables_from_curves(curves, points, grain)
    tables = StageTables(forward, backward, hops.onward, hops.homeward)
    return SlicedPipeline(points, grain, curves, tables)


def coarse_step(points: int, most: int) -> int:
    """Return the least number of points that are joined so that at most `most` are left.

    It divides the number of points; a prime number of points is not divided at all.

    >>> coarse_step(48, 64), coarse_step(96, 40), coarse_step(97, 40)
    (1, 3, 97)
    """
    step = max(1, -(-points // most))
    while points % step:
        step += 1
    return step


def coarsen(pipeline: SlicedPipeline, step: int) -> SlicedPipeline:
    """Return the same stages with only every `step`-th point, which must divide them."""
    tables = pipeline.tables
    if tables is not None and step > 1:
        tables = StageTables(
            tables.forward[:, ::step, step - 1 :: step],
            tables.backward[:, ::step, step - 1 :: step],
            tables.onward[:, ::step, step - 1 :: step],
            tables.homeward[:, ::step, step - 1 :: step],
        )
    return replace(
        pipeline,
        points=pipeline.points // step,
        grain=pipeline.grain * step,
        tables=tables,
    )


def mean_pipeline(pipeline: SlicedPipeline) -> SlicedPipeline:
    """Return as many stages that all take the mean time."""
    stages = len(pipeline.curves)
    hops = max(stages - 1, 1)
    mean_curves = StageCurves(
        _scale_sum([curve.forward for curve in pipeline.curves], 1 / stages),
        _scale_sum([curve.backward for curve in pipeline.curves], 1 / stages),
        _scale_sum([curve.onward for curve in pipeline.curves], 1 / hops),
        _scale_sum([curve.homeward for curve in pipeline.curves], 1 / hops),
        error=max(curve.error for curve in pipeline.curves),
    )
    curves = (mean_curves,) * stages
    tables = pipeline.tables
    if tables is None:
        return replace(pipeline, curves=curves)

    def mean_table(table: Floats) -> Floats:
        return np.broadcast_to(table.mean(axis=0), (stages, *table.shape[1:]))

    mean_tables = StageTables(
        mean_table(tables.forward),
        mean_table(tables.backward),
        mean_table(tables.onward[:-1]),
        mean_table(tables.homeward[1:]),
    )
    return replace(pipeline, curves=curves, tables=mean_tables)


def _scale_sum(curves: Sequence[Seconds], factor: float) -> Seconds:
    """Return the sum of curves times a factor."""
    total = add_curves(curves)
    return Seconds(
        total.base * factor,
        total.token * factor,
        total.prefix * factor,
        total.pair * factor,
    )


def even_times(pipeline: SlicedPipeline, microbatches: int = 1) -> SliceTimes:
    """Return the times of equal stages, with two peaks, forward and backward, each with its hop.

    All micro-batches are cut alike.
    """
    tables = pipeline.tables
    if tables is not None:
        table_peaks = (
            tables.forward[0] + tables.onward[0],
            tables.backward[0] + tables.homeward[-1],
        )
        work = tables.forward[0] + tables.backward[0]
        return TableTimes(microbatches * work, table_peaks)
    first = pipeline.curves[0]
    last = pipeline.curves[-1]
    return times_from_curves(
        pipeline.points,
        pipeline.grain,
        sums=[first.forward, first.backward] * microbatches,
        peaks=[
            add_curves([first.forward, first.onward]),
            add_curves([first.backward, last.homeward]),
        ],
    )


def tabulate_slices(pipeline: SlicedPipeline) -> StageTables:
    """Return the times of all slices on all stages."""
    if pipeline.tables is not None:
        return pipeline.tables
    return _tables_from_curves(pipeline.curves, pipeline.points, pipeline.grain)


def _tables_from_curves(
    curves: Sequence[StageCurves], points: int, grain: int
) -> StageTables:
    return StageTables(
        _tabulate([curve.forward for curve in curves], points, grain),
        _tabulate([curve.backward for curve in curves], points, grain),
        _tabulate([curve.onward for curve in curves], points, grain),
        _tabulate([curve.homeward for curve in curves], points, grain),
    )


def _tabulate(of_stages: Sequence[Curve], points: int, grain: int) -> Floats:
    """Return the seconds of every slice on every stage; equal stages share a table."""
    prefixes, columns = np.indices((points, points)).reshape(2, -1)
    inside = prefixes + columns < points
    tokens = ((columns[inside] + 1) * grain).astype(np.float64)
    before = (prefixes[inside] * grain).astype(np.float64)
    distinct: list[Curve] = []
    tables = []
    for curve in of_stages:
        if curve not in distinct:
            distinct.append(curve)
            table = np.zeros(points * points)
            table[inside] = seconds_along(curve, tokens, before)
            tables.append(table.reshape(points, points))
    if len(tables) == 1:
        return np.broadcast_to(tables[0], (len(of_stages), points, points))
    return np.stack([tables[distinct.index(curve)] for curve in of_stages])


# ---------------------------------------------------------------- asking a cost
def stage_curves(
    stages: Sequence[Stage], cost: Cost, tokens: int
) -> tuple[StageCurves, ...]:
    """Return the curves of stages that a sequence of this many tokens goes through in turn."""
    if tokens < 1:
        raise ShapeError(f"a sequence must have at least 1 token, not {tokens}")
    probe = _probe_schedule(stages, tokens)
    return tuple(_fit_stage(probe, cost, stage) for stage in range(len(stages)))


class _MeasuredCurves(NamedTuple):
    """The curves of one stage's forward and backward, as the cost itself has them."""

    forward: Curve
    backward: Curve


def _measured_curves(
    stages: Sequence[Stage], cost: Cost, tokens: int
) -> list[_MeasuredCurves] | None:
    """Return the curves that a cost is made of; None if it is not made of curves.

    The curves are compared with what the cost answers, because a cost may add something.
    """
    while isinstance(cost, WrappedCost) and type(cost).seconds is WrappedCost.seconds:
        cost = cost.cost
    probe = _probe_schedule(stages, tokens)
    model = cost.model_cost(probe) if isinstance(cost, LayeredCost) else cost
    if not isinstance(model, ModelCost):
        return None
    measured = []
    for stage, place in enumerate(stages):
        share = 1 / model.speed(probe, place.rank)
        part = model.part(probe, stage)
        ops = []
        for op in (Op.F, Op.B):
            curve = sum_curves([(share, each) for each in part.curves(op)])
            if not _is_answer(curve, cost, probe, op, stage):
                return None
            ops.append(curve)
        measured.append(_MeasuredCurves(*ops))
    return measured


def _is_answer(curve: Curve, cost: Cost, probe: Schedule, op: Op, stage: int) -> bool:
    """Whether a cost answers what a curve says, for all slices of a schedule."""
    for number, microbatch in enumerate(probe.microbatches):
        for piece in range(microbatch.slices):
            begin, end = microbatch.span(piece)
            answer = cost.seconds(probe, Action(op, stage, number, piece))
            if not math.isclose(answer, curve.of(end - begin, begin)):
                return False
    return True


def _probe_schedule(stages: Sequence[Stage], tokens: int) -> Schedule:
    """Return a schedule with the slices that are asked for to tell the terms apart."""
    path = tuple(range(len(stages)))
    microbatches = []
    for shares in PROBE_SHARES:
        cuts = sorted({round(tokens * share) for share in shares})
        microbatches.append(MicroBatch(path, tokens, tuple(cuts)))
    return sequential_schedule(stages, microbatches)


def _ask_every_slice(
    stages: Sequence[Stage], cost: Cost, points: int, grain: int
) -> tuple[Floats, Floats]:
    """Return tables of forwards and backwards, with each slice asked for.

    The questions are sequences cut into slices of one length, from every offset.
    """
    path = tuple(range(len(stages)))
    every_cuts = []
    microbatches = []
    for length in range(1, points + 1):
        for offset in range(min(length, points - length + 1)):
            cuts = sorted({0, *range(offset, points + 1, length), points})
            every_cuts.append(cuts)
            token_cuts = tuple(grain * end for end in cuts)
            microbatches.append(MicroBatch(path, points * grain, token_cuts))
    probe = sequential_schedule(stages, microbatches)
    forward = np.zeros((len(stages), points, points))
    backward = np.zeros((len(stages), points, points))
    for number, cuts in enumerate(every_cuts):
        for piece, (begin, end) in enumerate(pairwise(cuts)):
            column = end - begin - 1
            for stage in path:
                there = Action(Op.F, stage, number, piece)
                back = Action(Op.B, stage, number, piece)
                forward[stage, begin, column] = cost.seconds(probe, there)
                backward[stage, begin, column] = cost.seconds(probe, back)
    return forward, backward


def _fit_stage(probe: Schedule, cost: Cost, stage: int) -> StageCurves:
    """Return one stage's curves, and how far off they are."""
    spans = []
    answers = []
    for number, microbatch in enumerate(probe.microbatches):
        for piece in range(microbatch.slices):
            there = Action(Op.F, stage, number, piece)
            back = Action(Op.B, stage, number, piece)
            answer = (
                cost.seconds(probe, there),
                cost.seconds(probe, back),
                _hop_seconds(probe, cost, there, stage + 1),
                _hop_seconds(probe, cost, back, stage - 1),
            )
            spans.append(microbatch.span(piece))
            answers.append(answer)
    fits = [_fit_curve(spans, column) for column in np.array(answers).T]
    (forward, backward, onward, homeward), errors = zip(*fits, strict=True)
    return StageCurves(forward, backward, onward, homeward, max(errors))


def _hop_seconds(probe: Schedule, cost: Cost, action: Action, to: int) -> float:
    """Return the seconds from the end of an action until its result is on another stage's rank."""
    if not 0 <= to < len(probe.stages):
        return 0.0
    source = probe.rank_of(action)
    target = probe.stages[to].rank
    if source == target:
        return 0.0
    wire = cost.message(probe, action) / cost.bandwidth(source, target)
    return cost.latency(source, target) + wire


def _fit_curve(
    spans: Sequence[tuple[int, int]], answers: Floats
) -> tuple[Seconds, float]:
    """Return the curve nearest to the answers, and its largest relative error."""
    if not answers.any():
        return NO_TIME, 0.0
    begin, end = np.array(spans, dtype=np.float64).T
    size = end.max()
    tokens = end - begin
    pairs = tokens * begin + tokens * tokens / 2
    scale = np.array([1.0, size, size, size * size])
    terms = np.stack([np.ones(len(begin)), tokens, begin, pairs], axis=1) / scale
    weight = np.maximum(answers, answers.max() * 1e-6 + 1e-300)
    # No coefficient is negative, because no work gives time back.
    coefficients = least_squares(terms / weight[:, None], answers / weight)
    sizes = np.abs(coefficients)
    coefficients[sizes < LEAST_TERM_SHARE * sizes.max()] = 0.0
    error = float(np.max(np.abs(terms @ coefficients - answers) / weight))
    return Seconds(*(coefficients / scale).tolist()), error
