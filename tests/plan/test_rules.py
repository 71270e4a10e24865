"""Each rule of planned paths allows what it should, and a broken one names the micro-batches at fault."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest

from penstock import UnitCost, make, simulate
from penstock.errors import ScheduleError, ShapeError
from penstock.ir import MicroBatch, Stage
from penstock.plan.paths.rules import (
    Rules,
    check_schedule_rules,
    find_rule_faults,
    order_fault,
    part_orders,
    part_subsets,
)
from penstock.schedules.list_scheduling import list_schedule

# Six parts and the head, on six ranks.
STAGES = [*(Stage(part, part) for part in range(6)), Stage(0, 6)]
LOOSE = Rules(share=1 / 3, uneven=99)


def schedule(*paths, stages=STAGES, cap=None):
    batch = [MicroBatch((*path, len(stages) - 1)) for path in paths]
    return list_schedule(stages, batch, UnitCost(), cap=cap)


def rule_names(found):
    return {fault.rule for fault in found}


def test_the_defaults_are_the_published_ones():
    assert Rules() == Rules(
        share=1 / 3, behind=1, distance=2, swaps=2, ahead=4, full=10
    )
    assert Rules().hops(6) == 3
    assert Rules(share=0.25).hops(4) == 2
    assert Rules(share=0.5).hops(6) == 2


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ((0, 1, 2, 3), ""),
        ((0, 2, 1, 4), ""),
        ((0, 2, 1, 4, 3), ""),
        ((1, 2, 3), "begins with part 1"),
        ((0, 5, 4), "5 parts ahead"),
        ((0, 3, 1), "2 parts behind"),
        ((0, 2, 0), "part 0 comes again"),
    ],
)
def test_an_order_is_bounded_by_its_frontier(path, wrong):
    assert wrong in order_fault(path, Rules())
    assert bool(order_fault(path, Rules())) == bool(wrong)


def test_steps_back_are_counted_and_measured():
    twice = (0, 2, 1, 4, 3)
    assert "2 steps back; at most 1" in order_fault(twice, replace(Rules(), swaps=1))
    assert "over 2 parts; at most 1" in order_fault(twice, replace(Rules(), distance=1))
    assert order_fault(twice, replace(Rules(), behind=0))


def test_part_orders_are_the_orders_without_a_fault():
    for chosen in part_subsets(range(1, 6), 3):
        allowed = {
            order
            for order in permutations(chosen)
            if not order_fault((0, *order), Rules())
        }
        assert set(part_orders(chosen, Rules())) == allowed
        assert tuple(sorted(chosen)) in allowed or min(chosen) > 4
    assert len(part_subsets(range(1, 6), 3)) == 10


def test_a_schedule_that_keeps_to_the_rules_has_no_faults():
    even = schedule(
        (0, 1, 2, 3), (0, 1, 5, 4), (0, 2, 3, 4), (0, 2, 1, 5), (0, 3, 4, 5)
    )
    assert find_rule_faults(even, 6, Rules()) == ()
    check_schedule_rules(even, 6, Rules())


def test_each_broken_rule_is_named_with_the_micro_batches_at_fault():
    good, short, back, headless = (0, 1, 2, 3), (0, 4), (0, 4, 1, 2), (1, 2, 3)
    found = find_rule_faults(schedule(good, short), 6, LOOSE)
    assert [(fault.rule, fault.microbatches) for fault in found] == [("share", (1,))]
    assert "meets 2 of 6 parts, not 4" in found[0].what
    found = find_rule_faults(schedule(good, good, back), 6, LOOSE)
    assert [(fault.rule, fault.microbatches) for fault in found] == [("order", (2,))]
    found = find_rule_faults(schedule(good, headless), 6, replace(LOOSE, share=0.0))
    assert {"first part", "share", "head"} <= rule_names(found)
    assert all(fault.microbatches in ((0,), (1,)) for fault in found)


def test_unequal_coverage_names_the_parts_and_their_micro_batches():
    (found,) = find_rule_faults(schedule((0, 1, 2, 3), (0, 1, 2, 4)), 6, Rules())
    assert found.rule == "coverage"
    assert "2 micro-batches, part 5 0" in found.what
    assert found.microbatches == (0, 1)
    # Six visits, five parts: 99 may be over.
    assert find_rule_faults(schedule((0, 1, 2, 3), (0, 1, 2, 4)), 6, LOOSE) == ()


def test_more_micro_batches_than_slots_are_found_where_they_are_held():
    full = [(0, 1, 2, 3)] * 3
    crowded = schedule(*full, cap=3.0)
    found = find_rule_faults(
        crowded, 6, replace(LOOSE, uneven=99), slots=[2, 3, 3, 3, 3, 3]
    )
    slots = [fault for fault in found if fault.rule == "slots"]
    assert len(slots) == 1
    assert (
        "rank 0 holds 3 micro-batches when 0F2 starts; it has 2 slots" in slots[0].what
    )
    assert slots[0].microbatches == (0, 1, 2)
    assert "slots" not in rule_names(find_rule_faults(crowded, 6, LOOSE, slots=[3] * 6))
    with pytest.raises(ShapeError, match="slots for 2 ranks, but the schedule has 6"):
        find_rule_faults(crowded, 6, LOOSE, slots=[1, 2])


def test_a_wait_for_another_micro_batch_is_a_collision():
    both = schedule((0, 1, 2, 3), (0, 1, 2, 4))
    timeline = simulate(both, UnitCost())
    strict = replace(LOOSE, wait=0.0)
    found = [
        fault
        for fault in find_rule_faults(both, 6, strict, timeline=timeline)
        if fault.rule == "collision"
    ]
    assert found
    # A micro-batch that has not begun waits for nobody, so its first forward does not count.
    assert not any("0F1 waits" in fault.what for fault in found)
    assert found[0].microbatches == (1, 0)
    assert "collision" not in rule_names(
        find_rule_faults(both, 6, replace(LOOSE, wait=math.inf), timeline=timeline)
    )
    alone = schedule((0, 1, 2, 3))
    assert not find_rule_faults(
        alone, 6, replace(strict, uneven=99), timeline=simulate(alone, UnitCost())
    )


def test_every_tenth_step_runs_all_parts_in_order():
    rules = Rules()
    assert [step for step in range(30) if rules.at(step).hops(6) == 5] == [9, 19, 29]
    assert rules.at(9).swaps == 0
    assert rules.at(10) == rules
    assert all(replace(rules, full=0).at(step).hops(6) == 3 for step in range(30))


def test_the_error_lists_every_broken_rule():
    with pytest.raises(ScheduleError, match=r"share: .*\n  micro-batches: 1") as raised:
        check_schedule_rules(schedule((0, 1, 2, 3), (0, 1)), 6, Rules())
    assert len(raised.value.faults) == 2  # share and coverage


def test_the_registry_s_skip_keeps_to_the_rules():
    check_schedule_rules(make("skip", ranks=6, microbatches=5, skips=2), 6, Rules())
    with pytest.raises(ScheduleError, match=r"slots: rank 0 holds 2 micro-batches"):
        check_schedule_rules(
            make("skip", ranks=6, microbatches=5, skips=2), 6, Rules(), slots=[1] * 6
        )


def test_impossible_rules_are_refused():
    for wrong in ({"share": 1.0}, {"share": -0.1}, {"behind": -1}, {"ahead": 0}):
        with pytest.raises(ShapeError):
            Rules(**wrong)
