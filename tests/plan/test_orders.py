"""Searched orders are never slower than where they began, never above the cap, and repeat."""

from __future__ import annotations

import pytest

from penstock import UnitCost, lower_bound, make, simulate
from penstock.cost import ModelCost, Network, PartCost, Seconds
from penstock.ir import MicroBatch
from penstock.plan.improve import improve_order
from penstock.plan.orders import best_order
from penstock.schedules.list_scheduling import list_schedule
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


@pytest.mark.parametrize(
    ("waves", "paths", "comm", "cap", "split", "work", "target"),
    [
        # The best order is known: it meets the bound, or CP-SAT proved it.
        ((8, 3), (8, 1), 0.03, 8, True, None, 26.64),
        ((4, 2), (4, 1), 0.0, 2, True, None, 15.75),
        ((3, 2), (4, 1), 0.0, 1.5, True, None, 14.75),
        ((3, 2), (4, 1), 0.0, 3, False, None, 14.0),
        # The published order of V-Half takes as long.
        ((8, 1), (16, 1), 0.0, 5, True, 24_000, 56.5),
        # Slices need little memory.
        ((8, 2), (8, 8), 0.03, 8, True, 600, 24.5),
        ((8, 2), (8, 8), 0.03, 4, True, 600, 24.5),
        ((8, 2), (8, 16), 0.03, 2, True, 600, 24.5),
        ((8, 1), (8, 16), 0.03, 1.5, True, 600, 25.2),
    ],
)
def test_orders_are_as_good_as_the_best_known(
    waves, paths, comm, cap, split, work, target
):
    cost = UnitCost(comm=comm)
    stages = wave_placement(*waves)
    microbatches = paths_through(stages, *paths)
    best = best_order(stages, microbatches, cost, cap, work, split=split)
    found = simulate(best, cost)
    assert found.makespan <= target * (1 + 1e-3)
    assert found.peak_activations.max() <= cap + 1e-9


def test_the_search_is_never_slower_than_a_known_schedule():
    cost = UnitCost(comm=0.05)
    known = make("interleaved-zb", ranks=4, microbatches=8, chunks=4)
    found = best_order(known.stages, known.microbatches, cost, 4, work=0)
    before = simulate(known, cost)
    assert before.peak_activations.max() <= 4
    assert simulate(found, cost).makespan <= before.makespan


def test_an_order_of_a_profile_keeps_its_cap_in_bytes():
    part = PartCost(
        Seconds(1e-3, 1e-5), Seconds(1e-3, 1e-5), Seconds(1e-3, 1e-5), held=10.0
    )
    cost = ModelCost((part,) * 6, Network(latency=1e-4, bandwidth=1e6, serial=True))
    stages = wave_placement(3, 1)
    microbatch = MicroBatch(tuple(range(6)), tokens=64, cuts=(0, 30, 64))
    cap = 2 * 64 * 10.0 * 1.5
    found = best_order(stages, [microbatch] * 4, cost, cap, work=2000)
    timeline = simulate(found, cost)
    assert timeline.peak_activations.max() <= cap
    assert timeline.makespan >= lower_bound(found, cost, cap)
    listed = list_schedule(stages, [microbatch] * 4, cost, cap, split=True)
    assert timeline.makespan <= simulate(listed, cost).makespan
