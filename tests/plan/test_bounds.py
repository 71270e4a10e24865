"""Bounds are below every plan, and close to good ones."""

from __future__ import annotations

import random

import pytest

from penstock import UnitCost, lower_bound, make, simulate
from penstock.cost import Network
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import Point, Profile, block
from penstock.ir import MicroBatch
from penstock.plan.space_bound import least_block_times, mean_bound, space_bound
from penstock.schedules.list_scheduling import (
    backward_first,
    list_schedule,
    oldest_first,
    sequential_schedule,
)
from penstock.schedules.orders import loop_placement, paths_through, wave_placement

ROUNDING = 1 + 1e-9


def test_a_rank_that_holds_one_micro_batch_runs_one_after_the_other():
    stages = loop_placement(4)
    draft = sequential_schedule(stages, paths_through(stages, 3), split=False)
    cost = UnitCost(comm=0.1)
    # Each micro-batch takes 12 seconds and six hops, and rank 0 holds it all the time.
    assert lower_bound(draft, cost, cap=1) == pytest.approx(3 * 12.6)
    assert lower_bound(draft, cost, cap=3) < 3 * 12.6


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved-zb", "gpipe"])
def test_no_bound_exceeds_a_schedule_in_the_memory_that_it_takes(name):
    for ranks, microbatches, comm in [(2, 4, 0.0), (4, 4, 0.1), (4, 8, 0.3)]:
        cost = UnitCost(comm=comm)
        schedule = make(name, ranks=ranks, microbatches=microbatches)
        timeline = simulate(schedule, cost)
        caps = timeline.peak_activations.tolist()
        assert lower_bound(schedule, cost, caps) <= timeline.makespan * ROUNDING
        stages = len(schedule.stages) // ranks
        space = space_bound(cost, ranks, microbatches, stages, cap=max(caps))
        assert space <= timeline.makespan * ROUNDING


def test_the_bound_of_a_space_is_below_random_placements_and_cuts():
    random.seed(3)
    for _ in range(40):
        ranks = random.randint(1, 4)
        counts = random.randint(1, 3)
        slices = random.randint(1, 3)
        microbatches = random.randint(1, 5)
        order = [rank for rank in range(ranks) for _ in range(counts)]
        random.shuffle(order)
        stages = loop_placement(ranks * counts)
        stages = [
            type(stage)(rank, stage.part)
            for stage, rank in zip(stages, order, strict=True)
        ]
        cost = UnitCost(
            F=random.choice([1, 2]),
            B=random.choice([2, 3]),
            comm=random.choice([0, 0.2]),
        )
        cap = random.choice([None, 1.0, 2.0])
        paths = paths_through(stages, microbatches, slices)
        for split in (True, False):
            schedule = list_schedule(stages, paths, cost, cap, split)
            makespan = simulate(schedule, cost).makespan
            bound = space_bound(cost, ranks, microbatches, counts, slices, cap, split)
            assert bound <= makespan * ROUNDING
            assert lower_bound(schedule, cost, cap) <= makespan * ROUNDING


def test_the_bound_with_two_copies_of_the_weights_is_below_both_directions():
    """Chimera reaches its ranks from both ends, so it beats the bound of one copy."""
    random.seed(4)
    beaten = 0
    for _ in range(40):
        ranks = random.choice([2, 4, 6])
        microbatches = random.randint(1, 6)
        slices = random.randint(1, 2)
        cap = random.choice([None, 2.0])
        split = random.choice([True, False])
        cost = UnitCost(F=random.choice([1, 2]), comm=random.choice([0, 0.1, 0.5]))
        draft = make("chimera", ranks=ranks, microbatches=microbatches)
        cuts = tuple(range(slices + 1))
        paths = [MicroBatch(one.path, slices, cuts) for one in draft.microbatches]
        schedule = list_schedule(draft.stages, paths, cost, cap, split)
        makespan = simulate(schedule, cost).makespan
        space = (cost, ranks, microbatches, 1, slices, cap, split)
        assert space_bound(*space, weights=2) <= makespan * ROUNDING
        beaten += makespan < space_bound(*space) / ROUNDING
    assert beaten


@pytest.mark.parametrize(
    "spaces",
    [
        [{"stages": stages, "slices": 4} for stages in (1, 2, 4, 8)],
        [{"stages": 4, "slices": slices} for slices in (1, 2, 4, 8)],
        [{"stages": 4, "cap": cap} for cap in (1, 2, 8, None)],
        [{"stages": 4, "weights": copies} for copies in (1, 2, 4)],
        [{"stages": 4, "cap": 2, "weights": copies} for copies in (1, 2, 4)],
    ],
)
def test_more_freedom_never_raises_the_bound_of_a_space(spaces):
    bounds = [space_bound(UnitCost(comm=0.05), 8, 8, **space) for space in spaces]
    assert bounds == sorted(bounds, reverse=True)


def profile() -> Profile:
    def points(base: float, token: float, pair: float) -> list[Point]:
        found = []
        for tokens, prefix in [(16, 0), (64, 0), (128, 0), (16, 64), (64, 64)]:
            pairs = tokens * prefix + tokens * tokens / 2
            f = base + token * tokens + pair * pairs
            found.append(Point(tokens, prefix, f, 2.2 * f, 1.1 * f, f))
        return found

    return Profile(
        layers=10,
        tokens=128,
        rows=1,
        message=100.0,
        embed=block(points(1.0, 0.01, 0.0)),
        layer=block(points(2.0, 0.1, 0.002)),
        head=block(points(3.0, 0.3, 0.0)),
        network=Network(latency=0.5, bandwidth=1e4),
        turn=0.2,
    )


def profile_bound(
    measured: Profile,
    ranks: int,
    microbatches: int,
    slices: int = 1,
    split: bool = True,
    weights: int = 1,
) -> float:
    times = least_block_times(measured, slices, split, granularity=2)
    hop = measured.network.latency + 2 * measured.message / measured.network.bandwidth
    least = times.of_model(measured.layers, hop, measured.turn)
    return mean_bound(least, ranks, microbatches, weights)


def test_the_bound_of_a_profile_is_below_partitions_cuts_and_orders():
    measured = profile()
    cases = [
        (loop_placement(3), (3, 4, 3), (0, 128)),
        (loop_placement(3), (4, 4, 2), (0, 64, 128)),
        (wave_placement(3, 1), (2, 2, 2, 2, 1, 1), (0, 128)),
        (wave_placement(3, 1), (2, 2, 2, 2, 1, 1), (0, 50, 96, 128)),
        (loop_placement(3, 2), (2, 2, 2, 2, 1, 1), (0, 64, 128)),
    ]
    bound = profile_bound(measured, ranks=3, microbatches=6, slices=3)
    whole = profile_bound(measured, 3, 6, slices=3, split=False)
    best = float("inf")
    for stages, partition, cuts in cases:
        cost = measured.cost(partition)
        path = tuple(range(len(stages)))
        paths = [MicroBatch(path, 128, cuts)] * 6
        for split in (True, False):
            for priority in (backward_first, oldest_first):
                listed = list_schedule(
                    stages, paths, cost, split=split, priority=priority
                )
                makespan = simulate(listed, cost).makespan
                assert makespan >= bound
                assert split or makespan >= whole
                best = min(best, makespan)
    assert bound >= 0.8 * best


def test_the_bound_of_a_profile_with_two_copies_is_below_chimera():
    measured = profile()
    for ranks, microbatches in [(2, 2), (4, 4), (4, 3)]:
        schedule = make("chimera", ranks=ranks, microbatches=microbatches)
        cost = PlacedCost(measured, 128)
        space = (measured, ranks, microbatches)
        makespan = simulate(schedule, cost).makespan
        assert profile_bound(*space, weights=2) <= makespan * ROUNDING
        assert profile_bound(*space, weights=2) <= profile_bound(*space)
