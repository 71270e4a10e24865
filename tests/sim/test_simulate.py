"""The simulator against an oracle nobody here wrote (SimPy), and against arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from penstock import (
    ModelCost,
    Network,
    PartCost,
    Seconds,
    UnitCost,
    lower_bound,
    make,
    needs,
    simulate,
)
from penstock.cost import NoisyCost
from penstock.cost.columns import columns
from penstock.errors import ShapeError
from penstock.ir import MicroBatch, Op, Stage, parse_action, schedule_of
from penstock.schedules.list_scheduling import sequential_schedule
from random_schedules import random_cost, random_schedule


def oracle(schedule, cost) -> dict[object, tuple[float, float]]:
    """The same machine as processes: ranks that act in turn, links that carry."""
    simpy = pytest.importorskip("simpy")
    env = simpy.Environment()
    # Its result is where it is needed.
    there = {action: env.event() for lane in schedule.lanes for action in lane}
    done = {action: env.event() for lane in schedule.lanes for action in lane}
    links = {}
    times = {}

    def carry(action, source, target):
        if cost.network.serial:
            link = links.setdefault((source, target), simpy.Resource(env))
            with link.request() as turn:
                yield turn
                yield env.timeout(
                    cost.message(schedule, action) / cost.bandwidth(source, target)
                )
        else:
            yield env.timeout(
                cost.message(schedule, action) / cost.bandwidth(source, target)
            )
        yield env.timeout(cost.latency(source, target))
        there[action].succeed()

    def rank(number, lane):
        for action in lane:
            for needed in needs(schedule, action):
                yield (
                    done[needed]
                    if schedule.rank_of(needed) == number
                    else there[needed]
                )
            start = env.now
            yield env.timeout(cost.seconds(schedule, action))
            times[action] = (start, env.now)
            done[action].succeed()
            target = next(
                (
                    schedule.rank_of(u)
                    for u in users[action]
                    if schedule.rank_of(u) != number
                ),
                None,
            )
            if target is not None:
                env.process(carry(action, number, target))

    users = {action: [] for action in done}
    for action in done:
        for needed in needs(schedule, action):
            users[needed].append(action)
    for number, lane in enumerate(schedule.lanes):
        env.process(rank(number, lane))
    env.run()
    return times


@pytest.mark.parametrize("serial", [False, True])
def test_it_agrees_with_simpy_on_random_schedules_and_costs(serial):
    rng = np.random.default_rng(2026 + serial)
    for _ in range(120):
        schedule = random_schedule(rng)
        cost = random_cost(rng, schedule.ranks, schedule.parts, serial)
        expected = oracle(schedule, cost)
        for span in simulate(schedule, cost).spans():
            assert (span.start, span.end) == pytest.approx(
                expected[span.action], rel=1e-9, abs=1e-9
            )


def test_memory_equals_the_count_of_a_ledger():
    rng = np.random.default_rng(7)
    for _ in range(60):
        schedule = random_schedule(rng)
        cost = random_cost(rng, schedule.ranks, schedule.parts, serial=False)
        timeline = simulate(schedule, cost)
        for rank, lane in enumerate(schedule.lanes):
            held, levels = 0.0, []
            for action in lane:
                if action.op is Op.F:
                    held += cost.bytes(schedule, action).held
                levels.append(held)
                if action.op in (Op.B, Op.I):
                    held -= cost.bytes(schedule, action).held
                if action.op is Op.I:
                    held += cost.bytes(schedule, action).kept
                if action.op is Op.W:
                    held -= cost.bytes(schedule, action).kept
            assert held == pytest.approx(0.0, abs=1e-9)
            assert timeline.activations[timeline.lane(rank)] == pytest.approx(levels)
            most = max(levels, default=0.0)
            assert timeline.peak_activations[rank] == pytest.approx(most)


def test_the_critical_path_is_a_chain_without_slack_as_long_as_the_makespan():
    rng = np.random.default_rng(11)
    for _ in range(40):
        schedule = random_schedule(rng)
        cost = random_cost(rng, schedule.ranks, schedule.parts, serial=False)
        timeline = simulate(schedule, cost)
        spans = {span.action: span for span in timeline.spans()}
        arrived = {message.action: message.arrived for message in timeline.messages()}
        chain = timeline.critical_path()
        assert spans[chain[0]].start == 0.0
        assert spans[chain[-1]].end == timeline.makespan
        for before, after in pairwise(chain):
            crosses = spans[before].rank != spans[after].rank
            assert spans[after].start == (
                arrived[before] if crosses else spans[before].end
            )


def test_bytes_over_each_link_add_up():
    timeline = simulate(
        make("interleaved", ranks=3, microbatches=6, chunks=2), UnitCost()
    )
    assert timeline.link_bytes() == {
        (0, 1): 12,
        (1, 2): 12,
        (2, 0): 6,
        (1, 0): 12,
        (2, 1): 12,
        (0, 2): 6,
    }
    assert sum(m.bytes for m in timeline.messages()) == sum(
        timeline.link_bytes().values()
    )


def test_a_serial_link_carries_one_message_at_a_time():
    stages = (Stage(0, 0), Stage(1, 1))
    lanes = [
        [parse_action(w) for w in lane.split()]
        for lane in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    ]
    schedule = schedule_of(stages, [MicroBatch((0, 1))] * 2, lanes)
    part = PartCost(Seconds(1), Seconds(1), Seconds(1), message=10)
    free, serial = (
        ModelCost((part, part), Network(0.5, 2.0, serial)) for serial in (False, True)
    )
    arrivals = [
        [m.arrived for m in simulate(schedule, cost).messages() if m.source == 0]
        for cost in (free, serial)
    ]
    assert arrivals == [[6.5, 7.5], [6.5, 11.5]]  # 5 s on the wire each


def test_weights_count_on_the_rank_that_holds_them():
    part = PartCost(Seconds(1), Seconds(1), Seconds(1), held=2, weights=100)
    timeline = simulate(
        make("chimera", ranks=2, microbatches=2), ModelCost((part, part))
    )
    assert timeline.weights.tolist() == [200, 200]
    assert timeline.peak_bytes(0) == 200 + max(timeline.peak_activations[:1])


def test_a_faster_rank_takes_less_time():
    part = PartCost(Seconds(1), Seconds(1), Seconds(1))
    cost = ModelCost((part, part), speeds=(1.0, 4.0))
    spans = {
        str(s.action): s.end - s.start
        for s in simulate(make("gpipe", ranks=2, microbatches=1), cost).spans()
    }
    assert spans == {"0F0": 1, "0B0": 2, "1F0": 0.25, "1B0": 0.5}


def test_a_slice_costs_by_its_length_and_its_prefix():
    one = Seconds(base=1, token=0.1, prefix=0.01, pair=0.001)
    assert one.of(10, 0) == pytest.approx(1 + 1 + 0.05)
    assert one.of(10, 100) == pytest.approx(1 + 1 + 1 + 1.05)


def test_recomputation_costs_a_forward_and_holds_only_the_input_until_then():
    def part(recompute: bool) -> PartCost:
        return PartCost(
            Seconds(1),
            Seconds(1.5),
            Seconds(2),
            held=10,
            message=3,
            recompute=recompute,
        )

    schedule = make("gpipe", ranks=2, microbatches=3)
    kept, again = (simulate(schedule, ModelCost((part(r),) * 2)) for r in (False, True))
    assert {str(s.action): s.end - s.start for s in again.spans()}["1B0"] == 4.5
    assert {str(s.action): s.end - s.start for s in kept.spans()}["1B0"] == 3.5
    assert kept.peak_activations.tolist() == [30, 30]
    # The inputs of three, and what one of them made.
    assert again.peak_activations.tolist() == [9 + 7, 9 + 7]
    split = simulate(
        make("gpipe", ranks=2, microbatches=3, split=True),
        NoisyCost(ModelCost((part(True),) * 2), 0.0),
    )
    assert split.peak_activations.tolist() == [9 + 7, 9 + 7]


def test_noise_is_repeatable_bounded_and_different_by_seed():
    schedule, cost = make("1f1b", ranks=4, microbatches=8), UnitCost(comm=0.1)
    spans = [
        simulate(schedule, NoisyCost(cost, 0.2, seed)).makespan for seed in (0, 0, 1)
    ]
    assert spans[0] == spans[1] != spans[2]
    assert all(0.8 <= span / simulate(schedule, cost).makespan <= 1.2 for span in spans)


@pytest.mark.parametrize(
    ("make_cost", "word"),
    [
        (lambda: Network(latency=-1.0), "latency"),
        (lambda: Network(bandwidth=0.0), "bandwidth"),
        (lambda: Network(latency=math.nan), "latency"),
        (lambda: Network(latency=((0.0, 1.0), (1.0,))), "another length"),
    ],
)
def test_an_impossible_network_is_refused(make_cost, word):
    with pytest.raises(ShapeError, match=word):
        make_cost()


def test_a_cost_for_too_few_parts_or_ranks_is_refused():
    part = PartCost(Seconds(1), Seconds(1), Seconds(1))
    schedule = make("gpipe", ranks=3, microbatches=2)
    with pytest.raises(ShapeError, match="3 parts, but the cost has 2"):
        simulate(schedule, ModelCost((part, part)))
    with pytest.raises(ShapeError, match="3 ranks, but the cost has speeds for 1"):
        simulate(schedule, ModelCost((part,) * 3, speeds=(1.0,)))
    with pytest.raises(ShapeError, match="matrix is for 1 ranks"):
        simulate(schedule, ModelCost((part,) * 3, Network(latency=((0.0,),))))


def test_a_gradient_is_as_large_as_the_input_on_its_own_path():
    sizes = (1000.0, 1.0, 1.0)
    parts = tuple(
        PartCost(Seconds(1), Seconds(1), Seconds(1), message=size) for size in sizes
    )
    cost = ModelCost(parts, Network(0.0, 1.0))
    paths = [MicroBatch(path) for path in ((0, 2), (1, 2), (2,))]
    schedule = sequential_schedule([Stage(0, 0), Stage(1, 1), Stage(2, 2)], paths)
    sizes = columns(schedule, cost).bytes.tolist()
    for number, size in enumerate(sizes):  # of a message that is sent
        assert size in (0.0, cost.message(schedule, schedule.table.action(number)))
    assert sizes.count(1000.0) == 2
    found = simulate(schedule, cost)
    assert found.makespan >= lower_bound(schedule, cost)
