"""No plan beats the bound of its division, which knows the layers and the memory of every rank."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from optimum import optimum
from penstock.cost import Network
from penstock.cost.curve import Fit, Seconds
from penstock.cost.network import Link
from penstock.cost.profile import Block, Point, Profile, block
from penstock.errors import ShapeError
from penstock.ir.compiled import many_schedules
from penstock.plan.candidates import Candidate
from penstock.plan.pricing import Machines, ProfilePricing
from penstock.plan.search import rank_pipeline, survey_pipeline
from penstock.plan.space import Limits, StagePlacement
from penstock.plan.workload import Division, Workload
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import loop_placement, paths_through, wave_placement

ROUNDING = 1 + 1e-9
TOKENS = 128


def random_block(rng: random.Random, base: float, token: float, pair: float) -> Block:
    factor = rng.uniform(1.5, 2.5)
    points = []
    for tokens, prefix in [(16, 0), (64, 0), (128, 0), (16, 64), (64, 64)]:
        pairs = tokens * prefix + tokens * tokens / 2
        forward = base + token * tokens + pair * pairs
        halves = (factor * forward * rng.uniform(0.4, 0.7) for _ in range(2))
        points.append(Point(tokens, prefix, forward, factor * forward, *halves))
    return block(
        points,
        held=rng.uniform(5, 20),
        kept=rng.uniform(1, 10),
        weights=rng.uniform(500, 4000),
        update=rng.uniform(0, 3),
    )


def random_profile(rng: random.Random, layers: int) -> Profile:
    return Profile(
        layers=layers,
        tokens=TOKENS,
        rows=1,
        message=rng.uniform(1, 4),
        embed=random_block(rng, rng.uniform(0, 1), 0.01, 0.0),
        layer=random_block(
            rng, rng.uniform(0, 3), rng.uniform(0.01, 0.2), rng.uniform(0, 0.003)
        ),
        head=random_block(rng, rng.uniform(0, 3), rng.uniform(0, 0.3), 0.0),
        network=Network(
            rng.uniform(0, 2), 10 ** rng.uniform(1, 4), serial=rng.random() < 0.5
        ),
        turn=rng.choice([0.0, 1.0]),
        tied=rng.choice([0.0, 400.0]),
    )


def random_division(seed: int) -> tuple[random.Random, Division, ProfilePricing]:
    rng = random.Random(seed)
    layers = rng.randint(2, 8)
    ranks = rng.randint(1, min(4, layers))
    count = rng.randint(1, 6)
    copies = rng.choice([1, 1, 2, 3])
    division = Division(copies, ranks, 1, 1, count, 1, rng.choice([0.0, 0.0, 0.5, 1.0]))
    limits = Limits(
        min(rng.choice([1, 2, 4]), max(1, layers // ranks)),
        rng.choice([1, 2, 4, 8]),
        split=rng.random() < 0.85,
    )
    machines = rng.choice(
        [None, Machines(2, Link(0.3, 1e4), Link(2.0, 10 ** rng.uniform(1, 3)))]
    )
    measured = random_profile(rng, layers)
    if seed % 2:  # sums are slower or faster than messages
        sums = measured.network.bandwidth * (0.3, 2.0)[seed % 4 // 2]
        network = replace(measured.network, sum_bandwidth=sums)
        measured = replace(measured, network=network)
    workload = Workload(
        layers,
        TOKENS,
        copies * count,
        copies * ranks,
        granularity=rng.choice([16, 32, 64]),
        recorded=rng.random() < 0.2,
    )
    return (
        rng,
        division,
        ProfilePricing(workload, lambda rows: measured, limits, machines),
    )


def with_memory(pricing: ProfilePricing, memory: float) -> ProfilePricing:
    return replace(pricing, workload=replace(pricing.workload, memory=memory))


def placement_of(candidate: Candidate) -> StagePlacement:
    for word, count in candidate.shape:
        if word in ("chunks", "waves"):
            return StagePlacement(word, count)
    stages = candidate.schedule.stages
    return StagePlacement(
        "waves" if len(stages) > candidate.schedule.ranks else "chunks", 1
    )


@pytest.mark.parametrize(
    ("find", "seeds"), [(survey_pipeline, range(12)), (rank_pipeline, range(50, 62))]
)
def test_no_plan_of_a_random_division_beats_its_bound_under_any_memory(find, seeds):
    gaps = []
    with many_schedules():
        for seed in seeds:
            rng, division, free = random_division(seed)
            every = find(free.pipeline(division)).candidates
            for one in every:
                cuts = one.schedule.microbatches[0].cuts
                if len(cuts) > 2:
                    assert (
                        free.least_time(division, placement_of(one), cuts) <= one.step
                    )
            for one in rng.sample(every, min(4, len(every))):
                # This plan fits into its own peak. So the bound there is not above it.
                pricing = with_memory(free, one.peak)
                bound = pricing.close_bound(division)
                assert pricing.bound(division) <= bound <= one.step * ROUNDING
            # Machines round differently, so that equal plans come in another order.
            peak = rng.choice(sorted(round(one.peak, 6) for one in every))
            tight = with_memory(free, peak * rng.uniform(0.8, 1.05))
            try:
                found = find(tight.pipeline(division))
            except ShapeError:  # nothing can be built in so little memory
                continue
            for one in found.candidates:
                assert tight.close_bound(division) <= one.step * ROUNDING
                assert (
                    free.close_bound(division) <= tight.close_bound(division) * ROUNDING
                )
            if found.candidates:
                gaps.append(found.candidates[0].step / tight.close_bound(division) - 1)
    assert sorted(gaps)[len(gaps) // 2] < 0.25


def even_block(forward: float) -> Block:
    """A block with round times, which suit CP-SAT, and without weights."""

    def fit(seconds: float) -> Fit:
        return Fit(Seconds(base=seconds), 0.0, 0.0)

    halves = fit(forward), fit(forward)
    return Block((), fit(forward), fit(2 * forward), *halves, held=1.0, kept=0.5)


@pytest.mark.parametrize("in_flight", [1.0, 1.5, 2.0])
def test_no_optimum_of_cp_sat_beats_the_bound_of_its_division(in_flight):
    measured = Profile(
        layers=4,
        tokens=TOKENS,
        rows=1,
        message=0.0,
        embed=even_block(0.0),
        layer=even_block(2.0),
        head=even_block(0.0),
        network=Network(0.5),
    )
    division = Division(1, 2, 1, 1, 3, 1, 0.0)
    workload = Workload(4, TOKENS, 3, 2, granularity=TOKENS)
    free = ProfilePricing(workload, lambda rows: measured, Limits(2, 1))
    for stages in (loop_placement(2, 1), wave_placement(2, 1)):
        draft = sequential_schedule(stages, paths_through(stages, 3), split=True)
        memory = in_flight * free.evaluator(division).peak(draft)
        pricing = with_memory(free, memory)
        judged = optimum(draft, pricing.cost(division), memory, work=1.0)
        bound = pricing.close_bound(division)
        assert 0.7 * judged.makespan <= bound <= judged.makespan * ROUNDING


def test_less_memory_raises_the_bound_until_nothing_fits():
    rng, _, free = random_division(3)
    division = Division(1, 2, 1, 1, 6, 1, 0.0)
    workload = replace(free.workload, layers=8, batch=6, devices=2)
    measured = random_profile(rng, 8)
    pricing = ProfilePricing(workload, lambda rows: measured, Limits(1, 1))
    found = rank_pipeline(pricing.pipeline(division))
    most = max(one.peak for one in found.candidates)
    bounds = [
        with_memory(pricing, most * share).close_bound(division)
        for share in (1.0, 0.8, 0.7, 0.6, 0.5, 0.3)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] < max(one for one in bounds if one < math.inf)
    assert bounds[-1] == math.inf
