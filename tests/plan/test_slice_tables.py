"""Cuts on tables of times that no formula describes, with any number of points."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest

from commands import called
from penstock.cost import (
    CorrectedCurve,
    ModelCost,
    PartCost,
    Profile,
    Seconds,
    WrappedCost,
)
from penstock.cost.curve import seconds_along, sum_curves
from penstock.cost.profile import Point, block
from penstock.errors import ShapeError
from penstock.formats import write_profile
from penstock.plan.slices import (
    best_cuts,
    cut_choices,
    latency_of,
    sliced_plans,
    times_from_table,
)
from penstock.plan.slices.stage_times import coarsen, even_times, sliced_pipeline
from penstock.schedules.orders import loop_placement

TILE = 128


@dataclass(frozen=True)
class Tiled:
    """Kernels that work in tiles: a part of a tile takes as long as all of it."""

    factor: float

    def of(self, tokens: int, prefix: int) -> float:
        tiles = math.ceil(tokens / TILE)
        context = math.ceil((prefix + tokens) / TILE)
        return self.factor * (2.0 + tiles + 0.02 * tiles * context)


class Asked(WrappedCost):
    """Answers the same, but nobody knows that it is made of curves."""

    def seconds(self, schedule, action):
        return self.cost.seconds(schedule, action)


TILED = PartCost(Tiled(1.0), Tiled(1.0), Tiled(1.0))


def best_latency(points: int, grain: int, stages: int, microbatches: int) -> float:
    """The least latency by TeraPipe's own program, for backwards that take twice as long.

    One slice is then the longest in both directions, so that one limit is enough.
    """
    curve = Tiled(3.0)
    times = np.full((points, points), np.inf)
    for begin in range(points):
        for end in range(begin + 1, points + 1):
            times[begin, end - 1] = curve.of((end - begin) * grain, begin * grain)
    best = math.inf
    for limit in np.unique(times[np.isfinite(times)]):
        if stages * limit > best:
            break
        least = np.full(points + 1, np.inf)
        least[0] = 0.0
        for end in range(1, points + 1):
            column = times[:end, end - 1]
            sums = least[:end] + np.where(column <= limit, column, np.inf)
            least[end] = sums.min()
        best = min(best, microbatches * least[points] + (stages - 1) * limit)
    return best


@pytest.mark.parametrize(
    ("cost", "tokens", "granularity"),
    [
        (ModelCost((TILED,) * 4), 2048, 16),  # 128 points
        (ModelCost((TILED,) * 4), 4096, 16),  # 256 points
        (Asked(ModelCost((TILED,) * 4)), 2048, 16),  # asked for every slice, 128 points
    ],
    ids=["curves", "more points", "asked"],
)
def test_cuts_of_a_tiled_cost_are_the_best_above_48_points(cost, tokens, granularity):
    best = best_latency(tokens // granularity, granularity, 4, 2)
    pipeline = sliced_pipeline(loop_placement(4), cost, tokens, granularity)
    assert pipeline.tables is not None
    slicing = best_cuts(even_times(pipeline, 2), 4, patience=2_000)
    assert slicing.latency <= 1.01 * best
    plans = sliced_plans(4, 2, tokens, cost, granularity, slices=(2,), waves=())
    terapipe = min(
        row.candidate.makespan for row in plans.rows if row.candidate.name == "terapipe"
    )
    assert terapipe <= 1.01 * best


def test_a_formula_would_miss_the_tiles():
    """The cuts of the fitted curves are clearly worse, so the table is worth its time."""
    cost = ModelCost((TILED,) * 4)
    pipeline = sliced_pipeline(loop_placement(4), cost, 4096, 16)
    by_table = even_times(pipeline)
    by_formula = even_times(
        type(pipeline)(pipeline.points, pipeline.grain, pipeline.curves)
    )
    table_cuts = best_cuts(by_table, 4).lengths
    formula_cuts = best_cuts(by_formula, 4).lengths
    assert latency_of(by_table, 4, formula_cuts) > 1.03 * latency_of(
        by_table, 4, table_cuts
    )


def test_a_table_that_would_be_too_large_has_fewer_points_and_the_same_times():
    cost = ModelCost((TILED,) * 32)
    pipeline = sliced_pipeline(loop_placement(32), cost, 16_384, 16)
    assert pipeline.tables is not None
    assert 16 <= pipeline.points < 1024
    assert pipeline.points * pipeline.grain == 16_384
    forward = pipeline.tables.forward
    assert forward.size <= 4_000_000
    begin, length = 5, 9
    assert forward[3, begin, length - 1] == pytest.approx(
        Tiled(1.0).of(length * pipeline.grain, begin * pipeline.grain)
    )


def test_every_step_th_point_of_a_pipeline_has_the_times_of_its_slices():
    cost = ModelCost((TILED,) * 2)
    fine = sliced_pipeline(loop_placement(2), cost, 2048, 64)
    coarse = coarsen(fine, 4)
    assert (coarse.points, coarse.grain) == (8, 256)
    assert coarse.tables.backward[1, 3, 1] == pytest.approx(Tiled(2.0).of(512, 768))


def test_a_prime_number_of_points_that_cannot_be_joined_is_planned_by_curves():
    cost = ModelCost((TILED,) * 64)
    pipeline = sliced_pipeline(loop_placement(64), cost, 16 * 1021, 16)
    assert pipeline.points == 1021
    assert pipeline.tables is None


def measured_curve() -> CorrectedCurve:
    formula = Seconds(1e-3, 2e-5, 1e-6, 2e-8)
    rng = random.Random(1)
    points = [
        (tokens, prefix, formula.of(tokens, prefix) * rng.uniform(0.7, 1.4))
        for tokens in (16, 64, 256, 1024)
        for prefix in (0, 96, 512, 768)
        if tokens + prefix <= 1024
    ]
    return CorrectedCurve(formula, tuple(points))


@pytest.mark.parametrize(
    "curve",
    [
        Seconds(1.0, 2.0, 3.0, 4.0),
        measured_curve(),
        CorrectedCurve(Seconds(1.0, 1.0), ((8, 0, 20.0), (64, 0, 30.0))),
        CorrectedCurve(Seconds(1.0, 1.0), ((8, 4, 20.0), (64, 9, 30.0))),
        sum_curves([(0.5, measured_curve()), (2.0, Seconds(1.0)), (3.0, Tiled(1.0))]),
    ],
    ids=["formula", "table", "no prefix", "only prefixes", "sum"],
)
def test_many_slices_at_once_take_what_each_takes(curve):
    rng = random.Random(0)
    slices = [
        (rng.randint(1, 1100), rng.choice([0, 0, 1, 97, 700])) for _ in range(300)
    ]
    slices += [(1024, 0), (1024, 1), (16, 0), (16, 96), (1, 0)]
    tokens, prefixes = np.array(slices, dtype=np.float64).T
    expected = [curve.of(length, before) for length, before in slices]
    assert seconds_along(curve, tokens, prefixes) == pytest.approx(expected, rel=1e-12)


def test_the_least_sum_of_a_table_is_that_of_the_best_cuts_through_one_stage():
    rng = np.random.default_rng(3)
    times = times_from_table(rng.random((9, 9)), rng.random((9, 9)))
    assert times.least_sum == pytest.approx(best_cuts(times, 1).latency)


# ---------------------------------------------------------------- limits on slices
LONG = ModelCost(
    (PartCost(Seconds(1e-3, 1e-4), Seconds(1e-3, 1e-4), Seconds(1e-3, 1e-4)),) * 3
)


def test_more_allowed_slices_never_give_a_slower_plan_and_no_limit_is_exceeded():
    before: set[tuple[str, tuple[int, ...]]] = set()
    fastest = math.inf
    for limit in (1, 3, 4, 6, 7, None):
        plans = sliced_plans(3, 1, 1024, LONG, 64, waves=(), limit=limit)
        candidates = {(row.candidate.name, row.cuts) for row in plans.rows}
        assert before <= candidates
        assert plans.best.candidate.makespan <= fastest
        if limit is not None:
            assert max(row.slices for row in plans.rows) <= limit
        before = candidates
        fastest = plans.best.candidate.makespan


@pytest.mark.parametrize("limit", [3, 5, 6])
def test_counts_that_are_no_powers_of_two_are_tried_where_they_help(limit):
    plans = sliced_plans(3, 1, 1024, LONG, 64, waves=(), limit=limit)
    assert plans.best.slices == limit


def test_cut_choices_leave_out_what_has_more_slices_than_the_limit():
    every = cut_choices(3, 1, 1024, LONG, 32)
    few = cut_choices(3, 1, 1024, LONG, 32, limit=4)
    assert few == [choice for choice in every if len(choice.cuts) <= 5]
    assert every[0] == ("whole", (0, 1024))
    with pytest.raises(ShapeError, match="limit must be at least 1, not 0"):
        sliced_plans(3, 1, 1024, LONG, 32, limit=0)


def test_plan_keeps_to_its_limit_on_slices(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    point = [Point(n, 0, *[1e-3 + 1e-5 * n] * 4) for n in (64, 256, 1024)]
    profile = Profile(4, 4096, 1, 64.0, *[block(point)] * 3)
    write_profile(profile, "p.json")
    line = "plan --ranks 4 --microbatches 1 --profile p.json --json --slices"
    fastest = []
    for limit in (4, 6):
        code, out, err = called(monkeypatch, capsys, f"{line} {limit}")
        assert code == 0, err
        answer = json.loads(out)
        rows = answer["schedules"]
        assert max(len(row["cuts"]) - 1 for row in rows) == limit
        fastest.append(min(row["makespan"] for row in rows))
    assert fastest[1] < fastest[0]
