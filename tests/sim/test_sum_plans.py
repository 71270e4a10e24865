"""Planned sums of gradients: the quickest kind, its messages, their proof, and the price of passes that share a sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import make
from penstock.cost import Cluster
from penstock.cost.profile import sum_as
from penstock.cost.sums import planned_sum_end, quickest_sum, ring_plan, rounds_end
from penstock.errors import FileError, ProgramError, ShapeError
from penstock.formats import dump_plan, load_plan
from penstock.ir import Plan
from penstock.ir import verify_sums as proof
from penstock.ir.sums import (
    SumKind,
    SumPlan,
    cell_bounds,
    even_sum,
    rounds_of,
    sums_of_survivors,
)
from penstock.ir.verify_sums import run_rounds, verify_sums
from penstock.plan.paths import (
    Budget,
    Problem,
    even_parts,
    paths_plan,
    plan_paths,
    rule_faults,
)
from penstock.plan.paths.bound import path_bound
from penstock.sim.simulate import simulate

COPIES = make("1f1b", ranks=2, microbatches=2, copies=3)  # parts 0 and 1


def links(seed: int, count: int):
    """Some nodes on three sites: the seconds of a message and of each of its bytes."""
    draw = np.random.default_rng(seed)
    sites = draw.integers(0, 3, count)
    far = sites[:, None] != sites[None]
    shape = (count, count)
    latency = np.where(
        far, draw.uniform(0.1, 2, shape), draw.uniform(0.001, 0.05, shape)
    )
    byte = np.where(
        far, draw.uniform(1e-9, 1e-7, shape), draw.uniform(1e-11, 1e-9, shape)
    )
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(byte, 0.0)
    return latency, byte


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 14), st.floats(4, 9.5), st.booleans())
def test_the_messages_of_the_quickest_sum_take_no_longer_than_its_price(
    seed, count, magnitude, at_once
):
    latency, byte = links(seed, count)
    draw = np.random.default_rng(seed)
    ready = np.zeros(count) if at_once else draw.uniform(0, 20, count)
    ranks = [int(rank) for rank in draw.permutation(40)[:count]]
    size = 10**magnitude
    price = planned_sum_end(latency, byte, size, ready.tolist())
    plan = quickest_sum(latency, byte, size, ready.tolist(), ranks, (0,))
    run_rounds([plan, plan])  # proves that all replicas get the sum
    end = rounds_end(plan, latency, byte, size, ready.tolist(), ranks)
    assert end <= price * (1 + 1e-9)
    ring = ring_plan(latency, byte, size, ranks, (0,))
    assert price <= max(ready) + 2 * (count - 1) * (latency + byte * size / count).max()
    run_rounds([ring])


def test_every_kind_of_sum_is_chosen_where_it_is_the_quickest():
    near, far = 0.001, 1.0
    pairs = np.array(
        [[near if a // 2 == b // 2 else far for b in range(4)] for a in range(4)]
    )
    np.fill_diagonal(pairs, 0.0)
    slow = 1e-7 * pairs

    def kind(latency, byte, size, ready):
        return quickest_sum(latency, byte, size, ready, range(len(ready)), (0,)).kind

    even = np.ones((3, 3)) - np.eye(3)
    assert kind(0.0 * pairs, slow, 1e8, [0.0] * 4) is SumKind.TWO_LEVELS
    assert kind(even, 1e-9 * even, 1e6, [0.0] * 3) is SumKind.DIRECT
    around = np.array([[0, 1, 50], [50, 0, 1], [1, 50, 0]]) * 1.0
    assert kind(0.0 * around, 1e-6 * around, 1e6, [0.0] * 3) is SumKind.RING


def test_the_proof_finds_a_message_that_nobody_receives_and_a_rank_that_is_counted_twice(
    monkeypatch,
):
    plan = even_sum((0,), (0, 2, 4))
    assert verify_sums(COPIES, [plan]) == 12

    def change(number, **fields):
        def rounds(plan, rank):
            own = list(rounds_of(plan, rank))
            if rank == 2:
                own[number] = own[number]._replace(**fields)
            return tuple(own)

        monkeypatch.setattr(proof, "rounds_of", rounds)

    sends = rounds_of(plan, 2)[1].sends
    change(1, sends=sends[:1])
    with pytest.raises(ProgramError, match="sum of part 0 never ends"):
        verify_sums(COPIES, [plan])
    change(1, kind=rounds_of(plan, 2)[0].kind)
    with pytest.raises(
        ProgramError, match="on rank 2, cell 0 has the gradients of rank 2 2 times"
    ):
        verify_sums(COPIES, [plan])
    monkeypatch.undo()
    with pytest.raises(
        ProgramError, match="over ranks 0 1, but the ranks that hold it are 0 2 4"
    ):
        verify_sums(COPIES, [even_sum((0,), (0, 1))])


def test_a_plan_keeps_its_sums_in_json_and_refuses_wrong_ones():
    sums = (
        SumPlan((0,), SumKind.DIRECT, (0, 2, 4), (0.25, 0.75, 0.0)),
        SumPlan((1,), SumKind.TWO_LEVELS, (5, 1, 3), groups=((5,), (1, 3)), whole=True),
    )
    plan = Plan(COPIES, "copies", sums=sums)
    text = dump_plan(plan)
    assert load_plan(text) == plan
    for old, new, message in (
        ("0.75", "0.5", "shares add up to 0.75"),
        (
            '"ranks": [0, 2, 4]',
            '"ranks": [0, 2, 3]',
            "the ranks that hold it are 0 2 4",
        ),
        ('"two levels"', '"three levels"', "no kind of sum called 'three levels'"),
        ("[[5], [1, 3]]", "[[5], [1, 5]]", "names a rank twice"),
    ):
        assert old in text
        with pytest.raises(FileError, match=message):
            load_plan(text.replace(old, new))
    with pytest.raises(ShapeError, match="at least two"):
        SumPlan((0,), SumKind.RING, (3,))


def test_ranks_that_are_left_divide_the_shares_of_lost_ones():
    direct = SumPlan((0,), SumKind.DIRECT, (0, 2, 4), (0.5, 0.5, 0.0))
    ring = SumPlan((1,), SumKind.RING, (5, 1, 3))
    left = (0, 1, 3, 4, 5)
    smaller = sums_of_survivors([direct, ring], left)
    assert smaller[0].ranks == (0, 3)
    assert smaller[0].shares == (1.0, 0.0)
    assert smaller[1].ranks == (4, 1, 2)
    (alone,) = sums_of_survivors([direct], (1, 2, 3, 4, 5))
    assert alone.shares == (1.0, 0.0)
    (even,) = sums_of_survivors(
        [replace(direct, shares=(1.0, 0.0, 0.0))], (1, 2, 3, 4, 5)
    )
    assert even.shares == (0.5, 0.5)
    assert sums_of_survivors([direct], (1, 3, 4, 5)) == ()


@given(st.integers(0, 5000))
def test_cells_cut_any_number_of_gradients_without_gaps(numbers):
    direct = SumPlan((0,), SumKind.DIRECT, (0, 1, 2, 3), (0.1, 0.0, 0.9, 0.0))
    bounds = cell_bounds(direct, numbers)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numbers, 5)
    assert bounds[1] == bounds[2]
    assert bounds[3] == bounds[4]


def test_passes_share_the_time_of_the_sums_in_the_price_and_in_the_bound():
    cluster = Cluster.geo(["Oslo", "Rome", "Paris", "Oslo", "Rome", "Madrid"], slots=4)
    parts = sum_as(even_parts(2, 0.2, message=1e6, gradients=2e8), "bfloat16")
    assert parts[0].gradients == 1e8
    once, often = (
        plan_paths(Problem(cluster, parts, 2, passes=n), Budget(60)) for n in (1, 4)
    )
    assert often.makespan < once.makespan
    timeline = often.timeline
    last = float(timeline.end.max())
    assert timeline.makespan > last
    assert often.makespan == pytest.approx(last + (timeline.makespan - last) / 4)
    assert not rule_faults(often)
    sizes = np.bincount(often.solution.part_of_node)
    bounds = [
        path_bound(problem, sizes, None)
        for problem in (often.problem, often.problem.without_sums())
    ]
    assert often.bound == pytest.approx(
        bounds[1] + (bounds[0] - bounds[1]) / 4, rel=0.2
    )
    assert bounds[1] <= often.bound <= often.makespan
    plan = paths_plan(often, sum_messages="bfloat16")
    assert plan.facts["passes"] == 4
    assert plan.facts["sum_messages"] == "bfloat16"
    assert verify_sums(plan.schedule, plan.sums) > 0
    priced = simulate(plan.schedule, often.problem.cost()).sums
    assert {one.ranks for one in priced} == {
        tuple(sorted(one.ranks)) for one in plan.sums
    }
