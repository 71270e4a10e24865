"""What is left of a schedule without some ranks: the same work, on other ranks, in no more memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import REGISTRY, lower, make, simulate, verify
from penstock.errors import ShapeError
from penstock.ir.action import Op
from penstock.plan.survivors import PacedCost, least_time, orphans, without_ranks
from penstock.schedules.transforms import replicate


def visited(schedule, microbatch: int) -> list[int]:
    """The parts that a micro-batch visits, in order."""
    path = schedule.microbatches[microbatch].path
    return [schedule.stages[stage].part for stage in path]


@settings(max_examples=25)
@given(st.data())
def test_every_micro_batch_still_visits_the_same_parts_in_the_same_order(data):
    name = data.draw(st.sampled_from(sorted(REGISTRY)))
    copies = data.draw(st.integers(1, 3))
    schedule = replicate(make(name, ranks=4, microbatches=4), copies)
    ranks = st.integers(0, schedule.ranks - 1)
    lost = data.draw(st.sets(ranks, min_size=1, max_size=schedule.ranks - 1))
    smaller = without_ranks(schedule, lost)
    verify(lower(smaller))
    assert smaller.ranks == schedule.ranks - len(lost)
    assert len(smaller.microbatches) == len(schedule.microbatches)
    for number in range(len(schedule.microbatches)):
        assert visited(smaller, number) == visited(schedule, number)
        assert smaller.microbatches[number].cuts == schedule.microbatches[number].cuts
    work = (1.0,) * schedule.parts
    cost = PacedCost(parts=work)
    timeline = simulate(smaller, cost)
    assert timeline.makespan >= least_time(schedule, lost, work) - 1e-9
    if not orphans(schedule, lost):
        before = simulate(schedule, cost).peak_activations.tolist()
        after = timeline.peak_activations.tolist()
        assert max(after) <= max(*before, most_of_one(smaller)) + 1e-9


def test_a_rank_holds_more_than_before_only_if_one_with_as_many_weights_did():
    schedule = replicate(make("1f1b", ranks=3, microbatches=6), 3)
    work = (2.0, 1.0, 1.0)
    cost = PacedCost(parts=work)
    before = simulate(schedule, cost).peak_activations.tolist()
    assert before[:3] == [6.0, 2.0, 1.0]
    after = simulate(without_ranks(schedule, [5], work), cost).peak_activations.tolist()
    # Rank 0 has most weights, so the others have the memory that it has.
    assert max(after) <= 6.0
    assert max(after[rank] for rank in (1, 4, 6)) > 2.0
    # If rank 0 has the fewest weights, its memory says nothing about that of the others.
    few = (0.5, 2.0, 2.0)
    before = simulate(schedule, PacedCost(parts=few)).peak_activations.tolist()
    after = simulate(
        without_ranks(schedule, [5], few), PacedCost(parts=few)
    ).peak_activations
    assert max(after[rank] for rank in (1, 4, 6)) <= max(before[1], before[2])


def most_of_one(schedule) -> float:
    """The most activations that one micro-batch has on a rank."""
    most = 0
    for microbatch in schedule.microbatches:
        ranks = [schedule.stages[stage].rank for stage in microbatch.path]
        most = max(most, *map(ranks.count, ranks))
    return float(most)


def test_the_work_of_a_lost_rank_is_dealt_out_evenly():
    schedule = replicate(make("gpipe", ranks=2, microbatches=6), 4)
    smaller = without_ranks(schedule, [3])
    visits = [0] * smaller.ranks
    for microbatch in smaller.microbatches:
        for stage in microbatch.path:
            visits[smaller.stages[stage].rank] += 1
    assert sorted(visits) == [6, 6, 6, 6, 8, 8, 8]


def test_a_part_that_nobody_else_holds_goes_to_its_home_or_to_who_has_the_least_to_do():
    schedule = make("1f1b", ranks=4, microbatches=4)
    assert orphans(schedule, [1]) == (1,)
    smaller = without_ranks(schedule, [1], work=(1.0, 2.0, 3.0, 2.0))
    assert [stage.rank for stage in smaller.stages if stage.part == 1] == [0]
    smaller = without_ranks(schedule, [1], homes={1: 3})
    assert [stage.rank for stage in smaller.stages if stage.part == 1] == [2]
    smaller = without_ranks(schedule, [1, 3], homes={1: 3})  # Its home is lost, too.
    assert {stage.rank for stage in smaller.stages} == {0, 1}


def test_a_slow_rank_gets_less_work():
    schedule = replicate(make("1f1b", ranks=1, microbatches=6), 3)
    slower = without_ranks(schedule, [], paces=(1.0, 1.0, 2.0))
    visits = [0, 0, 0]
    for microbatch in slower.microbatches:
        visits[slower.stages[microbatch.path[0]].rank] += 1
    assert visits[2] < 6
    cost = PacedCost(parts=(1.0,), paces=(1.0, 1.0, 2.0))
    even = simulate(schedule, cost).makespan
    assert simulate(slower, cost).makespan == pytest.approx(even * 24 / 36)


def test_split_backwards_stay_split():
    schedule = replicate(make("zb-h1", ranks=2, microbatches=2), 2)
    actions = [action for lane in without_ranks(schedule, [0]).lanes for action in lane]
    assert {action.op for action in actions} == {Op.F, Op.I, Op.W}


def test_without_any_rank_there_is_no_schedule():
    with pytest.raises(ShapeError, match="all ranks are lost"):
        without_ranks(make("1f1b", ranks=2, microbatches=2), [0, 1])
