"""Searched orders are never slower than where they began, never above the cap, and repeat."""

from __future__ import annotations

import pytest

from penstock import UnitCost, make, simulate
from penstock.plan.improve import improve_order
from penstock.plan.orders import best_order
from penstock.schedules.orders import loop_placement, paths_through, wave_placement

WORK = 3000


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved", "hanayo"])
@pytest.mark.parametrize("comm", [0.0, 0.1])
def test_an_improved_order_is_never_slower_nor_larger(name, comm):
    cost = UnitCost(comm=comm)
    given = make(name, ranks=4, microbatches=4)
    before = simulate(given, cost)
    after = simulate(improve_order(given, cost, cap=1.0, work=WORK), cost)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert (after.peak_activations <= before.peak_activations + 1e-9).all()


def test_more_work_is_never_worse_and_the_same_work_gives_the_same_order():
    cost = UnitCost(comm=0.1)
    stages = wave_placement(3, 2)
    paths = paths_through(stages, 4)
    makespans = []
    for work in (0, 100, 1000, 5000, 10_000):
        first = best_order(stages, paths, cost, 1.5, work)
        assert first == best_order(stages, paths, cost, 1.5, work)
        makespans.append(simulate(first, cost).makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < makespans[0]


@pytest.mark.parametrize("stages", [wave_placement(3, 3), loop_placement(2, 5)])
def test_orders_of_slices_and_odd_numbers_of_stages_keep_each_ranks_cap(stages):
    cost = UnitCost(comm=0.05)
    ranks = 1 + max(stage.rank for stage in stages)
    caps = [1.0 + 0.5 * rank for rank in range(ranks)]
    best = best_order(stages, paths_through(stages, 3, slices=3), cost, caps, work=200)
    peaks = simulate(best, cost).peak_activations
    assert all(peak <= cap + 1e-9 for peak, cap in zip(peaks, caps, strict=True))
