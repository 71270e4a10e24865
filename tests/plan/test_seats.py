"""Which ranks of a plan stay empty: the others are planned nearly as fast as their number allows."""

from __future__ import annotations

import pytest

from penstock import Plan, make
from penstock.plan.survivors import least_time, moves_to_empty_ranks, part_work
from penstock.schedules.coverage import full_schedule
from penstock.schedules.skip import skipping_schedules
from penstock.schedules.transforms import replicate
from penstock.train.elastic import plan_without, speed_limit, step_length

# Three parts in four copies; the first one has the head beside it, and the others are left out in turn.
FIRST, SECOND = (replicate(one, 4) for one in skipping_schedules(3, 3, 1, count=2))
PARTIAL = Plan(
    FIRST, "skip", (1, 1, 1, 0), rotation=(SECOND,), full=full_schedule(FIRST)
)


def speed(plan: Plan, empty: tuple[int, ...]) -> float:
    """The planned speed without some ranks, compared with all of them."""
    return step_length(plan) / step_length(plan_without(plan, empty, {}))


@pytest.mark.parametrize("empty", [(0,), (4,), (8,), (0, 4), (3, 6), (2, 4, 9)])
def test_plans_for_fewer_workers_are_nearly_as_fast_as_possible(empty):
    taken = set(range(PARTIAL.schedule.ranks)) - set(empty)
    limit = speed_limit(PARTIAL, taken, {})
    assert 0.8 * limit <= speed(PARTIAL, empty) <= 1.1
    if {rank % 3 for rank in empty} == {0}:  # They have most of the work.
        assert limit < (12 - len(empty)) / 12


def test_a_worker_with_little_to_do_takes_the_rank_of_a_lost_one_with_much_to_do():
    (rank, goal), *others = moves_to_empty_ranks(PARTIAL, [3]).items()
    assert (others, goal, rank % 3 > 0) == ([], 3, True)
    assert speed(PARTIAL, (rank,)) > 1.15 * speed(PARTIAL, (3,))
    assert not moves_to_empty_ranks(PARTIAL, [4])
    assert len(moves_to_empty_ranks(PARTIAL, [0, 3])) == 2


def test_nobody_moves_away_from_a_part_that_nobody_else_holds():
    plan = Plan(make("1f1b", ranks=3, microbatches=6), "1f1b", (4, 1, 1))
    assert not moves_to_empty_ranks(plan, [0])
    two = Plan(replicate(plan.schedule, 2), "1f1b copies=2", (4, 1, 1))
    moves = moves_to_empty_ranks(two, [0, 4])
    assert moves == {5: 0}  # Rank 1 alone has the second part.


def test_the_least_time_counts_whole_visits_and_the_way_there():
    schedule = replicate(make("1f1b", ranks=2, microbatches=2), 2)
    # Four micro-batches on one rank, which begins one forward late and ends one backward early.
    assert least_time(schedule, [1], (1.0, 1.0)) == 4 * 3 + 3
    # Nobody holds the second part: one rank adopts it.
    assert least_time(schedule, [1, 3], (1.0, 2.0)) == 4 * 6 + 3
    assert least_time(schedule, [], (1.0, 1.0), {0: 2.0, 2: 2.0}) == 4 * 3
    assert part_work(PARTIAL) == [1.0, 1.0, 1.0, 0.5]
