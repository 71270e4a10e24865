"""Cuts of sequences: they have the least latency, they are found fast, and plans use them well."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import called
from penstock import ModelCost, Network, PartCost, Seconds, make, simulate
from penstock.cost import CorrectedCurve, finer
from penstock.cost.curve import seconds_along, sum_curves
from penstock.cost.profile import Point, Profile, block
from penstock.errors import ShapeError
from penstock.formats import write_profile
from penstock.ir import compiled
from penstock.plan.slices import (
    SliceTimes,
    StageTables,
    best_cuts,
    cut_choices,
    cuts,
    longest_path,
    sliced_pipeline,
    times_from_curves,
    uneven_cuts,
)
from penstock.plan.slices.curves import tabulated_times
from penstock.plan.slices.cuts import check_lengths, evaluate_slices, latency_with_peaks
from penstock.plan.slices.uneven import search_exactly
from penstock.schedules.transforms import recut, slice_tokens

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from slicing import best_batch, long_table, tables_of

DATA = json.loads(
    (Path(__file__).parents[1] / "data" / "terapipe.json").read_text(encoding="utf-8")
)
GRAIN = 8  # tokens per point of the official solver's tables


def times_from_table(*tables: np.ndarray) -> SliceTimes:
    """Return the times of whole slices from one table, or from one for forwards and one for backwards."""
    first, second = (*tables, np.zeros_like(tables[0]))[:2]
    return tabulated_times(first + second, first, second)


# ---------------------------------------------------------------- brute force
def compositions(points: int) -> Iterator[tuple[int, ...]]:
    for chosen in product((False, True), repeat=points - 1):
        ends = [0, *(at + 1 for at, cut in enumerate(chosen) if cut), points]
        yield tuple(end - begin for begin, end in pairwise(ends))


def seconds_of(table: np.ndarray, lengths: tuple[int, ...]) -> list[float]:
    ends = np.cumsum(lengths)
    return [
        float(table[end - length, length - 1])
        for end, length in zip(ends, lengths, strict=True)
    ]


def ends_of(lengths: Iterable[int], grain: int) -> tuple[int, ...]:
    """Return the tokens at which slices of these lengths are cut, from 0 on."""
    return (0, *(grain * np.cumsum([*lengths])).tolist())


def latency(tables: list[np.ndarray], lengths: tuple[int, ...], stages: int) -> float:
    every = [seconds_of(table, lengths) for table in tables]
    return sum(sum(t) + (max(t) * (stages - 1) if stages > 1 else 0.0) for t in every)


def random_table(rng: np.random.Generator, points: int, sort: int) -> np.ndarray:
    """Return noise, few values with many ties, rising or falling values, or a table with impossible slices."""
    table = rng.random((points, points))
    if sort == 1:
        table = np.round(3 * table)
    elif sort == 2:
        table = np.cumsum(table, axis=1)
    elif sort == 3:
        table = np.cumsum(table, axis=1)[:, ::-1].copy()
    elif sort == 4 and points > 1:
        table[0, points // 2 :] = np.inf
    return table


# With limits probed first, as for large tables, and without:
@pytest.mark.parametrize("few_slices", [0, 1000])
@pytest.mark.parametrize("peaks", [1, 2])
def test_best_cuts_match_brute_force(peaks, few_slices, monkeypatch):
    monkeypatch.setattr(cuts, "FEW_SLICES", few_slices)
    rng = np.random.default_rng(peaks + few_slices)
    for turn in range(600 if few_slices else 300):
        points, stages = int(rng.integers(1, 8)), int(rng.integers(1, 12))
        tables = [random_table(rng, points, turn % 5) for _ in range(peaks)]
        slicing = best_cuts(times_from_table(*tables), stages)
        least = min(
            latency(tables, lengths, stages) for lengths in compositions(points)
        )
        assert slicing.latency == pytest.approx(least, rel=1e-12)
        assert latency(tables, slicing.lengths, stages) == pytest.approx(
            slicing.latency, rel=1e-12
        )
        assert slicing.bound == slicing.latency


def test_best_cuts_into_a_given_number_of_slices_match_brute_force():
    rng = np.random.default_rng(3)
    for turn in range(400):
        points, stages = int(rng.integers(1, 8)), int(rng.integers(1, 12))
        slices = int(rng.integers(1, points + 1))
        tables = [random_table(rng, points, turn % 4) for _ in range(1 + turn % 2)]
        slicing = best_cuts(times_from_table(*tables), stages, slices)
        every = [lengths for lengths in compositions(points) if len(lengths) == slices]
        assert len(slicing.lengths) == slices
        assert slicing.latency == pytest.approx(
            min(latency(tables, each, stages) for each in every), rel=1e-12
        )


@pytest.mark.parametrize("peaks", [1, 2])
def test_best_batches_match_brute_force(peaks):
    rng = np.random.default_rng(5)
    for turn in range(120):
        points, stages, batch = (
            int(rng.integers(1, 4)),
            int(rng.integers(1, 7)),
            int(rng.integers(1, 5)),
        )
        given = {
            rows: [rows * random_table(rng, points, turn % 3) for _ in range(peaks)]
            for rows in (1, 2, 3)
        }
        slicing = best_batch(
            {rows: times_from_table(*tables) for rows, tables in given.items()},
            batch,
            stages,
        )
        groups = [(rows, lengths) for rows in given for lengths in compositions(points)]
        least = math.inf
        for count in range(1, batch + 1):
            for some in combinations_with_replacement(groups, count):
                if sum(rows for rows, _ in some) == batch:
                    least = min(least, batch_latency(given, some, stages))
        assert slicing.latency == pytest.approx(least, rel=1e-12)
        assert sum(group.rows for group in slicing.groups) == batch
        assert batch_latency(given, slicing.groups, stages) == pytest.approx(
            least, rel=1e-12
        )


def batch_latency(
    given: dict[int, list[np.ndarray]], groups: Any, stages: int
) -> float:
    whole = 0.0
    for kind in range(len(given[1])):
        units = [
            unit
            for rows, lengths in groups
            for unit in seconds_of(given[rows][kind], lengths)
        ]
        whole += sum(units) + (stages - 1) * max(units)
    return whole


@pytest.mark.parametrize(
    "case", DATA["tiny"], ids=lambda case: f"{len(case['table'])} points"
)
def test_published_brute_force_cases_have_the_same_cuts(case):
    slicing = best_cuts(times_from_table(np.array(case["table"]).T), case["stages"])
    assert slicing.latency == pytest.approx(case["latency"], rel=1e-12)
    assert list(slicing.lengths) == case["slices"]


def test_compiled_and_plain_searches_agree(monkeypatch):
    rng = np.random.default_rng(8)
    given = [
        times_from_table(np.cumsum(rng.random((16, 16)), axis=1), rng.random((16, 16))),
        times_from_table(rng.random((16, 16))),
    ]
    results = []
    for large in (0, math.inf):
        monkeypatch.setattr(compiled, "MIN_COMPILED_SIZE", large)
        results.append(
            [best_cuts(times, 9, slices) for times in given for slices in (None, 5)]
        )
    assert results[0] == results[1]


def test_large_tables_match_a_search_over_all_limits():
    rng = np.random.default_rng(7)
    for sort in range(4):
        table = random_table(rng, 46, sort)
        least = math.inf
        inside = np.add.outer(np.arange(46), np.arange(46)) < 46
        for limit in np.unique(table[inside])[::-1]:
            if 11 * limit > least:  # a plan takes at least this
                continue
            best = np.full(47, np.inf)
            best[0] = 0.0
            for prefix in range(46):
                row = table[prefix, : 46 - prefix]
                best[prefix + 1 :] = np.minimum(
                    best[prefix + 1 :],
                    np.where(row <= limit, best[prefix] + row, np.inf),
                )
            least = min(least, best[46] + 10 * limit)
        assert best_cuts(times_from_table(table), 11).latency == pytest.approx(
            least, rel=1e-12
        )


def test_a_stopped_search_has_a_valid_bound():
    rng = np.random.default_rng(9)
    stopped = 0
    for _ in range(20):
        times = times_from_table(
            rng.random((30, 30)).cumsum(axis=1), rng.random((30, 30)).cumsum(axis=1)
        )
        best, hasty = best_cuts(times, 6), best_cuts(times, 6, patience=1)
        assert hasty.bound <= best.latency <= hasty.latency
        stopped += hasty.bound < hasty.latency
    assert stopped


# ---------------------------------------------------------------- the official solver
@pytest.mark.parametrize("case", DATA["official"], ids=lambda case: case["name"])
def test_the_official_solver_is_never_better_and_its_latency_is_reproduced(case):
    tables = tables_of(case)
    lengths = tuple(tokens // GRAIN for tokens in case["slices"])
    groups = [(case["rows"], lengths)] * (case["batch"] // case["rows"])
    given = {rows: [table] for rows, table in tables.items()}
    assert batch_latency(given, groups, case["stages"]) + case[
        "update"
    ] == pytest.approx(case["latency"], rel=1e-12)
    slicing = best_batch(
        {rows: times_from_table(table) for rows, table in tables.items()},
        case["batch"],
        case["stages"],
    )
    assert slicing.latency + case["update"] <= case["latency"] * (1 + 1e-12)
    assert slicing.passes < case["calls"] / 10
    assert batch_latency(given, slicing.groups, case["stages"]) == pytest.approx(
        slicing.latency, rel=1e-12
    )


@pytest.mark.parametrize(
    "row", DATA["long"][:1] + DATA["long"][3:], ids=lambda row: str(row["tokens"])
)
def test_long_contexts_have_the_latency_of_another_exact_search(row):
    slicing = best_cuts(
        times_from_table(long_table(row["tokens"], row["granularity"])), row["stages"]
    )
    assert slicing.latency == pytest.approx(row["latency"], rel=1e-12)
    assert slicing.passes < row["calls"]


# ---------------------------------------------------------------- the simulator agrees
PART = PartCost(
    F=Seconds(1e-3, 2e-6, 1e-8, 3e-10),
    I=Seconds(1.2e-3, 2e-6, 2e-8, 5e-10),
    W=Seconds(5e-4, 2e-6),
    message=100.0,
    held=10.0,
)


def random_part(rng: np.random.Generator) -> PartCost:
    curves = [
        Seconds(*(rng.random(4) * [1.0, 0.1, 0.01, 0.001]).tolist()) for _ in range(3)
    ]
    return PartCost(*curves, message=float(rng.random()), held=1.0)


def test_the_latency_of_two_tables_is_the_simulated_makespan_of_terapipe():
    rng = np.random.default_rng(11)
    for _ in range(40):
        ranks, microbatches, points = (
            int(rng.integers(1, most)) for most in (7, 4, 12)
        )
        part = random_part(rng)
        cost = ModelCost(
            (part,) * ranks, Network(latency=float(rng.random()), bandwidth=2.0)
        )
        pipeline = sliced_pipeline(ranks, cost, 4 * points, 4)
        assert pipeline.even
        slicing = best_cuts(pipeline.times(microbatches), ranks)
        cuts = ends_of(slicing.lengths, 4)
        schedule = recut(
            make(
                "terapipe", ranks=ranks, microbatches=microbatches, slices=len(cuts) - 1
            ),
            cuts,
        )
        assert simulate(schedule, cost).makespan == pytest.approx(
            slicing.latency, rel=1e-9
        )


def test_the_published_objective_misses_cuts_that_the_simulator_prefers():
    cost = ModelCost((PART,) * 12)
    pipeline = sliced_pipeline(12, cost, 4096, 8)
    two = pipeline.times()
    both = (pipeline.forward[0], pipeline.backward[0])
    whole = [sum_curves([(1, curve) for curve in both])]
    one = times_from_curves(pipeline.points, 8, whole, whole)
    by_one, by_two = best_cuts(one, 12), best_cuts(two, 12)
    spans = []
    for slicing in (by_one, by_two):
        schedule = slice_tokens(
            make("gpipe", ranks=12, microbatches=1),
            ends_of(slicing.lengths, 8),
        )
        spans.append(simulate(schedule, cost).makespan)
    assert by_one.latency < spans[0]  # the published objective promises too much
    assert spans[1] == pytest.approx(by_two.latency, rel=1e-9)
    assert spans[1] < spans[0]


def test_curves_and_their_table_are_cut_alike():
    forward, backward = (
        Seconds(3e-4, 2e-6, 1e-9, 4e-10),
        Seconds(5e-4, 4e-6, 3e-9, 9e-10),
    )
    times = times_from_curves(120, 16, [forward, backward], [forward, backward])
    where = [[(16 * (s + 1), 16 * p) for s in range(120)] for p in range(120)]
    tables = [
        np.array([[curve.of(*at) for at in row] for row in where])
        for curve in (forward, backward)
    ]
    for slices in (None, 7):
        a, b = (
            best_cuts(times, 24, slices),
            best_cuts(times_from_table(*tables), 24, slices),
        )
        assert a.latency == pytest.approx(b.latency, rel=1e-12)
    # A long slice may take less than a short one.
    falling = [Seconds(1.0, -0.1, 0.0, 0.01)]
    table = np.array(
        [
            [falling[0].of(s + 1, p) if s + p < 12 else 0.0 for s in range(12)]
            for p in range(12)
        ]
    )
    assert best_cuts(times_from_curves(12, 1, falling, falling), 5) == best_cuts(
        times_from_table(table), 5
    )


# ---------------------------------------------------------------- uneven stages
def random_stages(
    rng: np.random.Generator, stages: int, points: int, smooth: bool
) -> StageTables:
    shape = (stages, points, points)
    if not smooth:
        return StageTables(*(rng.random(shape) for _ in range(4)))
    i, j = (
        np.arange(1.0, points + 1)[None, None, :],
        np.arange(float(points))[None, :, None],
    )
    speed = 1 + rng.random((stages, 1, 1))
    forward = speed * (rng.random() + i * rng.random() + 0.1 * (i * j + i * i / 2))
    return StageTables(
        forward, 2 * forward + 0.1 * i * j, np.full(shape, 0.1), np.full(shape, 0.2)
    )


@pytest.mark.parametrize("smooth", [False, True])
def test_cuts_of_uneven_stages_match_brute_force_and_their_bound_holds(smooth):
    rng = np.random.default_rng(13)
    for turn in range(40):
        stages, points, microbatches = (
            int(rng.integers(1, 6)),
            int(rng.integers(1, 8)),
            1 + (turn % 4 == 3),
        )
        tables = random_stages(rng, stages, points, smooth)
        slicing = uneven_cuts(tables, microbatches)
        least = min(
            longest_path(tables, lengths, microbatches)
            for lengths in compositions(points)
        )
        assert slicing.bound <= least * (1 + 1e-9)
        assert slicing.latency == pytest.approx(
            longest_path(tables, slicing.lengths, microbatches)
        )
        if microbatches == 1:
            assert slicing.exact
            assert slicing.latency == pytest.approx(least, rel=1e-9)


def test_the_label_search_needs_no_good_start_and_its_bound_holds_when_stopped():
    rng = np.random.default_rng(15)
    short = 0
    for turn in range(40):
        stages, points = int(rng.integers(1, 5)), int(rng.integers(2, 8))
        tables = random_stages(rng, stages, points, smooth=turn % 2 == 0)
        least = min(longest_path(tables, lengths) for lengths in compositions(points))
        result = search_exactly(tables, [], 1e9, effort=10**6)
        assert longest_path(tables, result.lengths) == pytest.approx(least)
        assert result.bound == pytest.approx(least)
        hasty = search_exactly(tables, [], 1e9, effort=0)
        assert hasty.bound <= least * (1 + 1e-9)
        short += hasty.bound < least * (1 - 1e-9)
    assert short


def test_the_longest_path_is_the_simulated_makespan_of_uneven_stages_and_hops():
    rng = np.random.default_rng(17)
    for _ in range(15):
        ranks, microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        parts = tuple(random_part(rng) for _ in range(ranks))
        away = [[float(x) for x in row] for row in rng.random((ranks, ranks))]
        network = Network(latency=tuple(map(tuple, away)), bandwidth=3.0)
        cost = ModelCost(parts, network, speeds=tuple((1 + rng.random(ranks)).tolist()))
        pipeline = sliced_pipeline(ranks, cost, 40, 4)
        assert pipeline.even == (ranks == 1)
        lengths = list(compositions(10))[int(rng.integers(512))]
        cuts = ends_of(lengths, 4)
        schedule = slice_tokens(
            make("gpipe", ranks=ranks, microbatches=microbatches), cuts
        )
        expected = simulate(schedule, cost).makespan
        assert longest_path(pipeline.tables(), lengths, microbatches) == pytest.approx(
            expected, rel=1e-9
        )


def test_equal_stages_are_cut_alike_by_both_searches():
    rng = np.random.default_rng(19)
    one = random_stages(rng, 1, 20, smooth=True)
    six = StageTables(
        *(
            np.repeat(t, 6, axis=0)
            for t in (one.forward, one.backward, 0 * one.onward, 0 * one.homeward)
        )
    )
    slicing = uneven_cuts(six)
    assert slicing.exact
    assert slicing.latency == pytest.approx(
        best_cuts(times_from_table(one.forward[0], one.backward[0]), 6).latency
    )


# ---------------------------------------------------------------- invalid input
def stage_tables(points: int, others: int, seconds: float = 1.0) -> StageTables:
    return StageTables(
        np.full((2, points, points), seconds), *[np.ones((2, others, others))] * 3
    )


def invalid_calls() -> list[tuple[str, Callable[[], object]]]:
    square, curve = np.ones((4, 4)), [Seconds(1.0)]
    falling = Seconds(1.0, -1.0)
    cost = ModelCost((PART,) * 2)
    three = make("seq1f1b", ranks=2, microbatches=1, slices=3)
    return [
        (
            r"a slice of 2 points after 0 takes -1 seconds; a time must be at least 0",
            lambda: times_from_curves(4, 1, [falling], [falling]),
        ),
        (
            r"takes nan seconds",
            lambda: times_from_curves(2, 1, [Seconds(math.nan)], curve),
        ),
        (
            r"at least 1 stage, not 0",
            lambda: best_cuts(times_from_table(square), 0),
        ),
        (
            r"4 points cannot have 5 slices; give from 1 to 4",
            lambda: best_cuts(times_from_table(square), 2, slices=5),
        ),
        (
            r"no cuts take a finite time",
            lambda: best_cuts(times_from_table(np.full((2, 2), np.inf)), 2),
        ),
        (
            r"slices of \[1, 2\] points make 3, but the sequence has 4",
            lambda: check_lengths([1, 2], 4),
        ),
        (
            r"0 points of 8 tokens with 1 peaks make no grid",
            lambda: times_from_curves(0, 8, curve, curve),
        ),
        (
            r"4 points of 8 tokens with 3 peaks make no grid",
            lambda: times_from_curves(4, 8, curve, curve * 3),
        ),
        (
            r"these are \[\(2, 3, 3\), \(2, 2, 2\)",
            lambda: uneven_cuts(stage_tables(3, 2)),
        ),
        (
            r"a slice of 1 points after 0 takes inf seconds on stage 0",
            lambda: uneven_cuts(stage_tables(3, 3, np.inf)),
        ),
        (
            r"1000 tokens cannot be cut in steps of 64 without a remainder; 1024 can",
            lambda: cut_choices(2, 1, 1000, cost, 64),
        ),
        (
            r"at least 1 micro-batch, not 0",
            lambda: uneven_cuts(stage_tables(3, 3), 0),
        ),
        (
            r"the cuts make 2 slices, but the schedule has 3",
            lambda: recut(three, (0, 4, 8)),
        ),
        (r"a part must be cut into at least 1 piece, not 0", lambda: finer(cost, 0)),
    ]


@pytest.mark.parametrize(
    ("message", "work"),
    invalid_calls(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_input_is_refused_with_its_numbers(message, work):
    with pytest.raises(ShapeError, match=message):
        work()


# ---------------------------------------------------------------- curves that no formula describes
TILE = 128


@dataclass(frozen=True)
class Tiled:
    """Kernels that work in tiles: a part of a tile takes as long as all of it."""

    factor: float

    def of(self, tokens: int, prefix: int) -> float:
        tiles = math.ceil(tokens / TILE)
        context = math.ceil((prefix + tokens) / TILE)
        return self.factor * (2.0 + tiles + 0.02 * tiles * context)


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


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_cuts_of_a_tiled_cost_are_the_best_and_a_formula_would_miss_the_tiles(tokens):
    cost = ModelCost((TILED,) * 4)
    pipeline = sliced_pipeline(4, cost, tokens, 16)
    times = pipeline.times(2)
    slicing = best_cuts(times, 4, patience=2_000)
    assert slicing.latency <= 1.01 * best_latency(tokens // 16, 16, 4, 2)
    assert ends_of(slicing.lengths, 16) in cut_choices(4, 2, tokens, cost, 16)
    smooth = Seconds(2.0, 1 / TILE, 0.0, 0.02 / TILE**2)
    twice = sum_curves([(2, smooth)])
    formula = times_from_curves(
        pipeline.points, 16, [smooth, twice] * 2, [smooth, twice]
    )
    missed = evaluate_slices(times, best_cuts(formula, 4).lengths)
    assert latency_with_peaks(missed, 3) > 1.03 * slicing.latency


def test_a_table_that_would_be_too_large_has_fewer_points_and_the_same_times():
    cost = ModelCost((TILED,) * 32)
    pipeline = sliced_pipeline(32, cost, 32_768, 16)
    assert (pipeline.points, pipeline.grain) == (1024, 32)
    forward = pipeline.tables(16).forward
    begin, length = 5, 9
    assert forward[3, begin, length - 1] == pytest.approx(
        Tiled(1.0).of(length * 512, begin * 512)
    )


def test_a_prime_number_of_points_that_cannot_be_joined_is_planned_by_formulas():
    part = PartCost(*[measured_curve()] * 3)
    pipeline = sliced_pipeline(2, ModelCost((part, part)), 16 * 1031, 16)
    assert pipeline.points == 1031
    assert set(pipeline.forward) == {measured_curve().formula}


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


# ---------------------------------------------------------------- choices
@pytest.mark.parametrize("uneven", [False, True])
def test_choices_have_the_best_cuts_and_a_limit_only_leaves_some_out(uneven):
    head = PartCost(F=Seconds(1e-3, 6e-6), I=Seconds(1e-3, 6e-6), W=Seconds(5e-4, 6e-6))
    cost = ModelCost((PART, PART, head if uneven else PART))
    every = cut_choices(3, 1, 1024, cost, 128)
    assert every[0] == (0, 1024)
    for limit in (1, 3, 4, 7):
        few = [each for each in every if len(each) - 1 <= limit]
        assert cut_choices(3, 1, 1024, cost, 128, limit) == few
    whole = make("gpipe", ranks=3, microbatches=1)

    def seconds(lengths):
        return simulate(slice_tokens(whole, ends_of(lengths, 128)), cost).makespan

    chosen = [np.diff(each) // 128 for each in every]
    least = min(map(seconds, compositions(8))) if not uneven else None
    found = min(map(seconds, chosen))
    if uneven:
        tables = sliced_pipeline(3, cost, 1024, 64).tables()
        least = uneven_cuts(tables).latency
    assert found == pytest.approx(least, rel=1e-9)


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
