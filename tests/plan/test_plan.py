"""The portfolio ranks what fits, and no schedule beats its bound."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import UnitCost, lower_bound, make, portfolio, simulate
from penstock.cost.cost import NoisyCost
from penstock.errors import ShapeError
from penstock.formats import dump_plan, load_plan
from penstock.plan import candidate_plan
from penstock.schedules.transforms import split_backward
from random_schedules import random_cost, random_schedule


@pytest.mark.parametrize("serial", [False, True])
def test_no_schedule_beats_its_bound(serial):
    rng = np.random.default_rng(3)
    for _ in range(150):
        schedule = random_schedule(rng)
        cost = random_cost(rng, schedule.ranks, schedule.parts, serial)
        assert simulate(schedule, cost).makespan >= lower_bound(schedule, cost) - 1e-9


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("comm", [0.0, 0.05, 0.25])
def test_the_bound_for_waves_is_at_least_the_formula(waves, comm):
    for ranks in (2, 4, 8):
        for microbatches in (ranks, 2 * ranks):
            whole = make("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
            cost = UnitCost(comm=comm)
            fused = (
                3 * microbatches
                + 3 * (ranks - 1) / (2 * waves)
                + 2 * (ranks - 1) * comm
            )
            split = 3 * microbatches + (ranks - 1) / (2 * waves) + (ranks - 1) * comm
            alone = 2 * (2 * waves * (ranks - 1)) * comm  # hops of one micro-batch
            bound = lower_bound(whole, cost)
            assert bound >= max(fused, 3 * ranks + alone) - 1e-9
            assert bound <= simulate(whole, cost).makespan + 1e-9
            assert lower_bound(split_backward(whole), cost) >= split - 1e-9


def test_a_schedule_without_idle_time_meets_its_bound():
    one = make("1f1b", ranks=1, microbatches=5)
    assert lower_bound(one, UnitCost()) == simulate(one, UnitCost()).makespan == 15


def test_candidates_within_the_memory_are_ranked_by_makespan():
    found = portfolio(4, 8, UnitCost(comm=0.05), memory=4, stages=4, slices=2)
    spans = [c.makespan for c in found.candidates[1:]]  # noise decides on the first
    assert spans == sorted(spans)
    best = min(c.makespan for c in found.candidates)
    assert found.best.makespan <= best * 1.002
    assert all(c.peak <= 4 + 1e-9 for c in found.candidates)
    assert all(peak > 4 for _, peak in found.too_large)
    assert all(c.makespan >= c.bound - 1e-9 for c in found.candidates)
    names = {c.name for c in found.candidates}
    assert {
        "1f1b",
        "hanayo",
        "zb-h1",
        "zb-v",
        "interleaved-zb",
        "v-half",
        "v-min",
        "listed",
    } <= names
    assert "skip" not in names
    assert "chimera" not in names
    for c in found.candidates:
        again = simulate(c.schedule, UnitCost(comm=0.05))
        assert (again.makespan, again.bubble) == (c.makespan, c.bubble)


def test_chimera_needs_two_copies_of_the_weights():
    found = portfolio(4, 4, UnitCost(), weights=2, slices=1, stages=2)
    assert "chimera" in {c.name for c in found.candidates}
    assert not {"terapipe", "seq1f1b"} & {c.name for c in found.candidates}
    assert all(len(c.schedule.stages) <= 2 * 4 for c in found.candidates)


def test_the_choice_is_no_slower_than_the_best_fixed_order_under_unseen_noise():
    for ranks, microbatches, comm in ((6, 6, 0.1), (4, 6, 0.05), (3, 6, 0.0)):
        cost = UnitCost(comm=comm)
        found = portfolio(ranks, microbatches, cost, ranks, stages=4, slices=1)

        def noisy(candidate, cost=cost):
            costs = [NoisyCost(cost, seed=seed) for seed in range(100, 116)]
            return np.mean([simulate(candidate.schedule, c).makespan for c in costs])

        fixed = [noisy(c) for c in found.candidates if c.order_kind == "fixed"]
        assert noisy(found.best) <= min(fixed) * 1.002  # means of 16 samples


def test_an_error_names_the_smallest_candidate_if_nothing_fits():
    with pytest.raises(
        ShapeError,
        match=r"nothing fits into a memory of 0\.1; the smallest plan needs 1: ",
    ):
        portfolio(3, 4, UnitCost(), memory=0.1, slices=4, stages=2)


def test_the_best_survives_a_plan_file():
    best = portfolio(4, 4, UnitCost(comm=0.1), memory=4, slices=2, stages=2).best
    plan = load_plan(dump_plan(candidate_plan(best, (("memory", 4.0),))))
    assert plan.schedule == best.schedule
    assert plan.facts["makespan"] == best.makespan
    assert plan.facts["memory"] == 4.0


def test_no_memory_limit_gives_the_plan_of_a_huge_limit():
    for ranks, count in ((4, 4), (4, 8), (6, 6)):
        free, huge = (
            portfolio(ranks, count, UnitCost(comm=0.1), memory, slices=1, stages=2)
            for memory in (None, 1e9)
        )
        assert free.best.makespan == pytest.approx(huge.best.makespan)
