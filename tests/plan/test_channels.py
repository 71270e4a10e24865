"""Plans for networks on which the messages of a rank wait for each other, as over NCCL."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from penstock import ModelCost, Network, PartCost, make, simulate
from penstock.cost import Seconds
from penstock.cost.network import BufferedMessage
from penstock.cost.profile import Point, Profile, RowProfiles, block
from penstock.errors import ScheduleError
from penstock.ir.compiled import many_schedules
from penstock.ir.schedule import Schedule, schedule_of
from penstock.plan.bound import lower_bound
from penstock.plan.improve import improve_order, problem_of, time_lanes
from penstock.plan.pricing import ProfilePricing, Question
from penstock.plan.search import Landscape, rank_pipeline, search
from penstock.plan.space import Limits, StagePlacement
from penstock.plan.workload import Division, profile_workload
from random_schedules import random_schedule

TOKENS = 256
ROUNDING = 1 + 1e-9
PRINTED = 1 + 1e-3  # Of plans that print as the same number, the steadiest is chosen.


def random_buffers(rng: np.random.Generator, scale: float, size: float = 1.0):
    """Two sizes; sometimes the larger one, or both, keep their sender until they have arrived."""
    send, receive = scale * rng.uniform(0, 1, (2, 2))
    send[rng.integers(3) :] = np.inf
    sizes = (size, 2 * size)
    return tuple(map(BufferedMessage, sizes, send.tolist(), receive.tolist()))


def random_cost(rng: np.random.Generator, parts: int, channels: int | None):
    """A cost whose messages are held by buffers, as if they were of the smaller size, or are not."""
    costs = []
    for _ in range(parts):
        forward, back, weights = (Seconds(base=one) for one in rng.uniform(0.5, 2, 3))
        costs.append(PartCost(forward, back, weights))
    latency = float(rng.uniform(0, 1.5))
    buffers = random_buffers(rng, latency) if rng.integers(4) else ()
    network = Network(latency, serial=True, channels=channels, buffers=buffers)
    return ModelCost(tuple(costs), network)


def random_profile(
    rng: np.random.Generator, channels: int | None, buffered: bool = False
) -> Profile:
    """A profile of NCCL: a layer of 0.5 to 2 ms, messages of 2 to 8 MB at 3 GB/s after 0.1 ms."""

    def random_block(seconds: float):
        points = []
        for tokens, prefix in [(64, 0), (128, 0), (256, 0), (64, 128), (128, 128)]:
            pairs = tokens * prefix + tokens * tokens / 2
            part = 0.1 + 0.7 * tokens / TOKENS + 0.4 * pairs / TOKENS**2
            F = seconds * part
            points.append(Point(tokens, prefix, F, 2 * F, 1.1 * F, F))
        return block(points, held=2e4, kept=1e4, weights=1e7)

    buffers = random_buffers(rng, 1e-3, size=5e6) if buffered else ()
    return Profile(
        layers=4,
        tokens=TOKENS,
        rows=1,
        message=float(rng.uniform(2e6, 8e6)) / TOKENS,
        embed=random_block(1e-4),
        layer=random_block(float(rng.uniform(5e-4, 2e-3))),
        head=random_block(5e-4),
        network=Network(1e-4, 3e9, serial=True, channels=channels, buffers=buffers),
        turn=2e-5,
    )


def pricing_of(
    profile: Profile, microbatches: int, memory: float | None = None, ranks: int = 2
) -> ProfilePricing:
    workload = profile_workload(
        RowProfiles((profile,)), ranks, microbatches, TOKENS, memory, granularity=64
    )
    fixed = replace(workload.fixed, recompute=False)
    workload = replace(workload, fixed=fixed)
    return ProfilePricing(workload, lambda rows: profile, Limits(stages=2, slices=2))


def plan_of(pricing: ProfilePricing) -> Landscape:
    return search(Question(pricing.workload, pricing))


@pytest.mark.parametrize("channels", [None, 1, 2])
def test_the_search_for_orders_times_lanes_exactly_as_the_simulator(channels):
    with many_schedules():
        for seed in range(100):
            rng = np.random.default_rng(seed)
            schedule = random_schedule(rng)
            cost = random_cost(rng, schedule.parts, channels)
            problem = problem_of(schedule, cost, None)
            timed = time_lanes(problem, np.arange(len(problem)))
            assert timed == simulate(schedule, cost).makespan


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "hanayo"])
def test_an_improved_order_is_never_slower_when_messages_wait(name, channels):
    given = make(name, ranks=3, microbatches=4)
    cost = random_cost(np.random.default_rng(1), given.parts, channels)
    better = improve_order(given, cost, work=2_000)
    assert simulate(better, cost).makespan < simulate(given, cost).makespan


def every_order(schedule: Schedule):
    """Yield every schedule with these actions that can run to its end."""
    for lanes in product(*(permutations(lane) for lane in schedule.lanes)):
        try:
            yield schedule_of(schedule.stages, schedule.microbatches, lanes)
        except ScheduleError:
            continue


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", {"ranks": 2, "microbatches": 2}),
        ("1f1b", {"ranks": 3, "microbatches": 1}),
        ("hanayo", {"ranks": 2, "microbatches": 1}),
        ("zb-h1", {"ranks": 2, "microbatches": 1}),
    ],
)
def test_no_order_of_a_small_schedule_beats_its_bound(name, shape, channels):
    for seed in range(3):
        schedule = make(name, **shape)
        cost = random_cost(np.random.default_rng(seed), schedule.parts, channels)
        orders = list(every_order(schedule))
        least = min(simulate(order, cost).makespan for order in orders)
        assert len(orders) > 0
        assert lower_bound(schedule, cost) <= least * ROUNDING


@pytest.mark.parametrize("channels", [1, 2])
def test_no_random_schedule_beats_its_bound(channels):
    for seed in range(200):
        rng = np.random.default_rng(seed)
        schedule = random_schedule(rng)
        cost = random_cost(rng, schedule.parts, channels)
        takes = simulate(schedule, cost).makespan
        assert lower_bound(schedule, cost) <= takes * ROUNDING


def test_long_messages_raise_the_bound_to_the_time_of_their_channel():
    """Rank 1 of 3 sends and receives 4 messages of 10 for each of 8 micro-batches, all on one channel."""
    schedule = make("1f1b", ranks=3, microbatches=8)
    part = PartCost(Seconds(base=1.0), Seconds(base=1.0), Seconds(base=1.0))
    at_once = ModelCost((part,) * 3, Network(10.0))
    assert lower_bound(schedule, at_once) < 100
    for channels, least in ((1, 320), (2, 160)):
        network = replace(at_once.network, channels=channels)
        bound = lower_bound(schedule, replace(at_once, network=network))
        assert least < bound <= least + 30


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_candidate_beats_the_bound_of_its_placement(seed, channels):
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, channels, buffered=seed % 2 == 1)
    network = profile.network
    buffers = tuple(
        BufferedMessage(20 * one.bytes, 20 * one.send, 20 * one.receive)
        for one in network.buffers
    )
    network = replace(network, buffers=buffers)
    profile = replace(profile, message=20 * profile.message, network=network)
    division = Division(1, 2, 1, 1, 4, 1, 0.0)
    pricing = pricing_of(profile, 4)
    with many_schedules():
        found = rank_pipeline(pricing.pipeline(division)).candidates
    for one in found:
        shape = dict(one.shape)
        waves = shape.get("waves", int(len(one.schedule.stages) > division.ranks))
        placement = StagePlacement("waves", waves)
        if "chunks" in shape or not waves:
            placement = StagePlacement("chunks", shape.get("chunks", 1))
        cuts = one.schedule.microbatches[0].cuts
        least = pricing.least_time(division, placement, cuts)
        assert least <= one.step * ROUNDING
    assert pricing.close_bound(division) <= found[0].step * ROUNDING
    at_once = replace(profile, network=replace(profile.network, channels=None))
    assert pricing_of(at_once, 4).close_bound(division) <= pricing.close_bound(division)
    if not buffers:
        assert pricing_of(at_once, 4).close_bound(division) < pricing.close_bound(
            division
        )


@pytest.mark.parametrize("channels", [None, 1])
def test_the_bound_knows_that_messages_travel_in_fewer_bytes(channels):
    profile = random_profile(np.random.default_rng(3), channels)
    profile = replace(profile, message=40 * profile.message)
    halved = replace(profile, device=(("messages", "bfloat16"),))
    division = Division(1, 2, 1, 1, 4, 1, 0.0)
    whole = pricing_of(profile, 4).close_bound(division)
    pricing = pricing_of(halved, 4)
    with many_schedules():
        found = rank_pipeline(pricing.pipeline(division)).candidates
    assert pricing.close_bound(division) <= found[0].step * ROUNDING
    assert pricing.close_bound(division) < whole


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_for_channels_is_never_slower_there_than_a_plan_without_them(
    seed, channels
):
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, channels, buffered=seed == 1)
    at_once = replace(profile, network=replace(profile.network, channels=None))
    mine = plan_of(pricing_of(profile, 4))
    other = plan_of(pricing_of(at_once, 4)).best
    cost = pricing_of(profile, 4).evaluator(other.division).cost
    judged = simulate(other.schedule, cost).makespan
    assert mine.best.makespan <= judged * PRINTED
    assert mine.bound <= mine.best.step * ROUNDING


def test_more_memory_never_gives_a_slower_plan_when_messages_wait():
    profile = random_profile(np.random.default_rng(5), channels=1)
    free = plan_of(pricing_of(profile, 4)).best
    steps = []
    for share in (0.7, 0.8, 0.9, 1.0):
        pricing = pricing_of(profile, 4, memory=share * free.peak)
        steps.append(plan_of(pricing).best.step)
    steps.append(free.step)
    for less, more in pairwise(steps):
        assert more <= less * PRINTED
