"""Partial paths in a search: what may be left out, and bounds for it."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum import optimum
from penstock import UnitCost, simulate
from penstock.config import ModelConfig
from penstock.cost.gpus import analytic_profile
from penstock.cost.placed import PlacedCost
from penstock.plan.pricing import profile_question, unit_question
from penstock.plan.search import Landscape, search
from penstock.plan.space import Limits, partial_paths, skipped_share, visited_layers
from penstock.plan.space_bound import least_block_times, mean_bound, space_bound
from penstock.plan.workload import Fixed, Workload
from penstock.schedules.coverage import visited_parts, visits_all_parts
from penstock.schedules.list_scheduling import list_schedule, sequential_schedule
from penstock.schedules.orders import loop_placement, wave_placement

ROUNDING = 1 + 1e-9
SKIP = 0.25
MODEL = ModelConfig(
    layers=8,
    hidden_size=128,
    heads=4,
    kv_heads=4,
    intermediate_size=256,
    vocab_size=500,
)
TOKENS = 256


@cache
def profile_at(rows: int):
    return analytic_profile(MODEL, TOKENS, rows, "h100")


@cache
def model_search(skip: float) -> Landscape:
    workload = Workload(
        8, TOKENS, 8, 2, memory=40e6, granularity=64, fixed=Fixed(tensor=1, shard=1)
    )
    limits = Limits(stages=2, slices=2, skip=skip)
    question = profile_question(workload, profile_at, limits, "a formula")
    return search(question)


def fastest(rows) -> float:
    return min(row.step for row in rows)


def test_a_search_lists_partial_paths_beside_whole_ones_and_keeps_to_the_share():
    found = model_search(SKIP)
    whole = [row for row in found.candidates if visits_all_parts(row.schedule)]
    partial_rows = [row for row in found.candidates if row not in whole]
    assert whole
    assert partial_rows
    for row in partial_rows:
        schedule = row.schedule
        share = skipped_share(schedule, row.partition)
        assert 0 < share <= SKIP * ROUNDING
        assert len(visited_parts(schedule)) == schedule.parts
        assert row.peak <= 40e6 * ROUNDING
    assert fastest(partial_rows) < fastest(whole)
    nothing_skipped = model_search(0.0).candidates
    assert all(visits_all_parts(row.schedule) for row in nothing_skipped)
    assert fastest(whole) == fastest(nothing_skipped)
    for one in found.divisions:
        if one.best is not None:
            assert one.bound <= one.best.step * ROUNDING
    assert model_search(0.0).bound > found.bound > 0


@settings(max_examples=40)
@given(
    st.sampled_from([loop_placement, wave_placement]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.4]),
)
def test_no_listed_order_beats_the_bounds(
    place, ranks, count, microbatches, skips, slices, comm
):
    stages = place(ranks, count)
    skips = min(skips, len(stages) - 2)
    unit_paths = partial_paths(
        len(stages), skips, microbatches, tuple(range(slices + 1))
    )
    cost = UnitCost(comm=comm)
    crowd = len(stages) // ranks
    listed = list_schedule(stages, unit_paths, cost)
    share = skipped_share(listed)
    bound = space_bound(cost, ranks, microbatches, crowd, slices, skip=share)
    assert bound <= simulate(listed, cost).makespan * ROUNDING

    profile = profile_at(1)
    cuts = tuple(TOKENS * place // slices for place in range(slices + 1))
    measured = PlacedCost(profile, TOKENS)
    if len(stages) > profile.layers:
        return
    paths = partial_paths(len(stages), skips, microbatches, cuts)
    listed = list_schedule(stages, paths, measured)
    share = skipped_share(listed, measured.partition_of(listed))
    times = least_block_times(profile, slices, split=True, granularity=4)
    layers = visited_layers(profile.layers, share)
    least = times.of_model(layers, profile.network.latency, profile.turn)
    bound = mean_bound(least, ranks, microbatches, partial=True)
    assert bound <= simulate(listed, measured).makespan * ROUNDING


@pytest.mark.parametrize("skips", [1, 2])
def test_no_optimum_of_cp_sat_beats_the_bound(skips):
    cost = UnitCost(comm=0.1)
    stages = loop_placement(2, 2)
    paths = partial_paths(4, skips, 3, (0, 1))
    draft = sequential_schedule(stages, paths, split=True)
    bound = space_bound(cost, 2, 3, 2, 1, skip=skipped_share(draft))
    assert 0 < bound <= optimum(draft, cost, None, work=1.0).makespan * ROUNDING


def test_a_search_in_units_leaves_out_what_it_may():
    question = unit_question(
        3, 6, UnitCost(comm=0.05), 3.0, Limits(stages=4, slices=1, skip=SKIP)
    )
    found = search(question)
    best = found.best
    assert dict(best.shape)["skips"] >= 1
    assert skipped_share(best.schedule) <= SKIP * ROUNDING
    assert found.bound <= best.step * ROUNDING
