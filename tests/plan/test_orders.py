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
    ("stages", "microbatches", "comm", "cap", "split", "target"),
    [
        # The best order is known: it meets the bound, or CP-SAT proved it.
        (wave_placement(8, 3), 8, 0.03, 8, True, 26.64),
        (wave_placement(4, 2), 4, 0.0, 2, True, 15.75),
        (wave_placement(3, 2), 4, 0.0, 1.5, True, 14.75),
        (wave_placement(3, 2), 4, 0.0, 3, False, 14.0),
    ],
)
def test_orders_are_as_good_as_the_best_known(
    stages, microbatches, comm, cap, split, target
):
    cost = UnitCost(comm=comm)
    paths = paths_through(stages, microbatches)
    found = simulate(best_order(stages, paths, cost, cap, split=split), cost)
    assert found.makespan <= target * (1 + 1e-3)
    assert found.peak_activations.max() <= cap + 1e-9


def test_an_order_takes_no_longer_than_the_published_v_half_and_holds_no_more():
    cost = UnitCost()
    stages = wave_placement(8, 1)
    paths = paths_through(stages, 16)
    found = simulate(best_order(stages, paths, cost, 5, 24_000, split=True), cost)
    assert found.makespan <= 56.5 * (1 + 1e-3)
    assert found.peak_activations.max() <= 5 + 1e-9


@pytest.mark.parametrize(
    ("waves", "slices", "cap", "target"),
    [(2, 8, 8, 24.5), (2, 8, 4, 24.5), (2, 16, 2, 24.5), (1, 16, 1.5, 25.2)],
)
def test_slices_reach_their_times_in_little_memory(waves, slices, cap, target):
    cost = UnitCost(comm=0.03)
    stages = wave_placement(8, waves)
    paths = paths_through(stages, 8, slices)
    found = simulate(best_order(stages, paths, cost, cap, 600, split=True), cost)
    assert found.makespan <= target
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
