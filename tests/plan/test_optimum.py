"""CP-SAT judges small cases: the search finds its optimum, and no bound exceeds it."""

from __future__ import annotations

import pytest

from optimum import optimum
from penstock import UnitCost, lower_bound, simulate
from penstock.plan.orders import best_order
from penstock.plan.space_bound import space_bound
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import loop_placement, paths_through, wave_placement

PLACEMENTS = {
    "one chunk": (loop_placement, 1, 1),
    "two chunks": (loop_placement, 2, 2),
    "one wave": (wave_placement, 1, 2),
}
COSTS = (
    UnitCost(),
    UnitCost(comm=0.1),
    UnitCost(F=1, B=3, I=2, W=1, comm=0.2),
    UnitCost(F=2, B=2),
)
CAPS = (None, 1.0, 1.5, 2.0, 3.0)
ROUNDING = 1 + 1e-9
CASES = [
    (ranks, microbatches, name, (ranks + 2 * microbatches + place) % 4, cap)
    for ranks in (2, 3)
    for microbatches in (2, 3, 4)
    for place, name in enumerate(PLACEMENTS)
    for cap in CAPS
    if cap is None or cap <= ranks
    # CP-SAT needs about as long for the largest of these cases as for all others.
    if (ranks, microbatches, cap) != (3, 4, 3.0)
    if (microbatches, name) != (4, "one wave") or cap in (None, 1.0)
]


@pytest.mark.parametrize(("ranks", "microbatches", "name", "which", "cap"), CASES)
def test_the_search_finds_the_optimum_of_cp_sat(ranks, microbatches, name, which, cap):
    place, count, on_rank = PLACEMENTS[name]
    cost = COSTS[which]
    stages = place(ranks, count)
    paths = paths_through(stages, microbatches)
    draft = sequential_schedule(stages, paths, split=True)
    best = simulate(best_order(stages, paths, cost, cap, split=True), cost)
    judged = optimum(draft, cost, cap, work=2.0)

    assert best.makespan <= judged.makespan * ROUNDING
    if judged.proved:
        assert best.makespan >= judged.makespan / ROUNDING
    if cap is not None:
        assert best.peak_activations.max() <= cap * ROUNDING
    assert lower_bound(draft, cost, cap) <= best.makespan * ROUNDING
    space = space_bound(cost, ranks, microbatches, on_rank, cap=cap)
    assert space <= best.makespan * ROUNDING
