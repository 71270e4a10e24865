"""What the search over the whole space promises: its bound, its monotony, and that plans keep their prediction."""

from __future__ import annotations

import math
import random
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum import optimum
from penstock import UnitCost, make, simulate
from penstock.config import ModelConfig
from penstock.cost.cluster import Cluster, Node
from penstock.cost.gpus import Link, analytic_profile
from penstock.cost.network import Network
from penstock.cost.placed import PlacedCost
from penstock.errors import ShapeError
from penstock.formats import dump_plan, load_plan
from penstock.ir.action import Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.partition import balanced_partition
from penstock.plan.candidates import Evaluator, add_noise, evaluate_schedule
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import (
    Machines,
    Price,
    cluster_network,
    cluster_nodes,
    profile_question,
    unit_question,
)
from penstock.plan.search import (
    PRINTED_DIGITS,
    SAMPLING,
    Landscape,
    SearchProgress,
    search,
)
from penstock.plan.space import Limits, split_and_defer
from penstock.plan.space_bound import tried_bound
from penstock.plan.workload import (
    Division,
    Fixed,
    Workload,
    divisions_of,
    divisors,
    parse_memory,
)
from penstock.schedules.list_scheduling import list_schedule, sequential_schedule
from penstock.schedules.orders import loop_placement, paths_through, wave_placement

ROUNDING = 1 + 1e-9
FEW = Limits(stages=2, slices=4)
LAYERS = 8
TOKENS = 256
MODEL = ModelConfig(
    layers=LAYERS,
    hidden_size=128,
    heads=4,
    kv_heads=4,
    intermediate_size=256,
    vocab_size=500,
)


@cache
def profile_at(rows: int):
    return analytic_profile(MODEL, TOKENS, rows, "h100")


def find(question) -> Landscape:
    return search(question)


@cache
def unit_search(
    ranks, microbatches, memory, slices=4, stages=4, backward=2.0, comm=0.1
):
    cost = UnitCost(F=1.0, B=backward, comm=comm)
    limits = Limits(stages=stages, slices=slices)
    return find(unit_question(ranks, microbatches, cost, memory, limits))


def workload_for(devices: int, **options) -> Workload:
    options = {"heads": 4, "kv_heads": 4, "granularity": 64, **options}
    fixed = Fixed(tensor=1, shard=1, **options.pop("fixed", {}))
    return Workload(LAYERS, TOKENS, 8, devices, fixed=fixed, **options)


@cache
def model_search(devices, memory=None, cluster=None, limits=FEW, **fixed) -> Landscape:
    workload = workload_for(
        devices, memory=memory, uneven=cluster is not None, fixed=fixed
    )
    question = profile_question(
        workload, profile_at, limits, "a formula", cluster=cluster
    )
    return find(question)


def fastest(landscape: Landscape) -> float:
    return min(row.step for row in landscape.candidates)


# ---------------------------------------------------------------- the bound
@given(
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    stages=st.sampled_from([1, 2, 4]),
    memory=st.sampled_from([None, 1.0, 1.5, 2.0]),
    backward=st.sampled_from([1.0, 2.0, 3.0]),
    comm=st.sampled_from([0.0, 0.1, 0.5]),
)
@settings(max_examples=5)
def test_no_candidate_beats_the_bound_of_the_space(
    ranks, microbatches, stages, memory, backward, comm
):
    found = unit_search(ranks, microbatches, memory, 4, stages, backward, comm)
    assert 0 < found.bound <= fastest(found) * ROUNDING
    for row in found.candidates:
        assert memory is None or row.peak <= memory * ROUNDING


@pytest.mark.parametrize(("devices", "memory"), [(1, None), (4, 9.5e6)])
def test_no_plan_of_a_model_beats_the_bound_of_its_space(devices, memory):
    found = model_search(devices, memory)
    assert 0 < found.bound <= fastest(found) * ROUNDING
    for one in found.divisions:
        if one.best is not None:
            assert one.bound <= one.best.step * ROUNDING
            assert memory is None or one.best.peak <= memory * ROUNDING


@pytest.mark.parametrize("memory", [None, 1.5, 2.0])
def test_no_optimum_of_cp_sat_beats_the_bound_of_the_space(memory):
    cost = UnitCost(comm=0.1)
    found = unit_search(2, 3, memory, slices=1, stages=2)
    for stages in (loop_placement(2, 1), loop_placement(2, 2), wave_placement(2, 1)):
        draft = sequential_schedule(stages, paths_through(stages, 3), split=True)
        judged = optimum(draft, cost, memory, work=1.0)
        assert found.bound <= judged.makespan * ROUNDING
        assert fastest(found) <= judged.makespan * ROUNDING


@pytest.mark.parametrize("stages", [4, 16])
def test_an_optimal_plan_of_three_ranks_has_no_gap(stages):
    found = unit_search(3, 3, None, slices=1, stages=stages)
    assert found.gap == pytest.approx(0.0, abs=1e-9)


def split_some(schedule: Schedule, dice: random.Random) -> Schedule:
    """Split about half of the backwards."""
    lanes = []
    for lane in schedule.lanes:
        actions = []
        for action in lane:
            if action.op is Op.B and dice.random() < 0.5:
                actions += [action._replace(op=Op.I), action._replace(op=Op.W)]
            else:
                actions.append(action)
        lanes.append(actions)
    return schedule_of(schedule.stages, schedule.microbatches, lanes)


@pytest.mark.parametrize("inputs", [None, 0.5, 2.5])
@pytest.mark.parametrize("memory", [None, 2.0])
def test_no_order_with_some_backwards_split_beats_the_bound_of_what_is_tried(
    inputs, memory
):
    """Whether splitting takes time or saves it."""
    dice = random.Random(0)
    for weights in (None, 0.5, 2.5):
        cost = UnitCost(B=2.0, I=inputs, W=weights, comm=0.2)
        bound = tried_bound(cost, 2, 3, Limits(stages=2, slices=1), memory)
        for stages in (loop_placement(2), wave_placement(2, 1)):
            paths = paths_through(stages, 3)
            whole = list_schedule(stages, paths, cost, memory)
            split = list_schedule(stages, paths, cost, memory, split=True)
            for schedule in (whole, split, split_some(whole, dice)):
                assert bound <= simulate(schedule, cost).makespan * ROUNDING


# ---------------------------------------------------------------- monotony
def printed(landscape: Landscape) -> float:
    """The time of the chosen plan, as it is printed."""
    return float(f"{landscape.best.step:.{PRINTED_DIGITS}g}")


def slower_pairs(steps: dict[tuple[float, ...], float]) -> list[tuple[object, object]]:
    """Return the pairs of questions of which the larger one has the slower plan; a missing plan is endless."""
    return [
        (small, large)
        for small, large in product(steps, repeat=2)
        if all(few <= many for few, many in zip(small, large, strict=True))
        and steps[large] > steps[small]
    ]


@pytest.fixture
def little_work(monkeypatch):
    """Make searches of orders poor and quick. What they promise does not depend on their work."""
    monkeypatch.setattr("penstock.plan.orders.WORK_PER_ACTION", 4)


def printed_or_endless(question) -> float:
    try:
        found = find(question)
    except ShapeError:  # nothing fits
        return math.inf
    assert found.left_out == 0
    return printed(found)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "backward", "comm"), [(2, 5, 3.0, 0.0), (3, 4, 2.0, 0.1)]
)
@pytest.mark.usefixtures("little_work")
def test_more_memory_slices_or_stages_never_give_a_slower_plan(
    ranks, microbatches, backward, comm
):
    cost = UnitCost(F=1.0, B=backward, comm=comm)
    steps = {}
    # Memories are those of levels, and between them.
    for memory, slices, stages in product(
        (0.9, 1.0, 1.7, 2.3, math.inf), (1, 2, 3), (1, 3)
    ):
        limits = Limits(stages=stages, slices=slices)
        limit = memory if memory < math.inf else None
        question = unit_question(ranks, microbatches, cost, limit, limits)
        steps[memory, slices, stages] = printed_or_endless(question)
    assert slower_pairs(steps) == []
    assert len({*steps.values()}) > 8  # The questions have different answers.


@pytest.mark.usefixtures("little_work")
def test_more_devices_memory_or_slices_never_give_a_slower_plan_of_a_model():
    steps = {}
    # In 8.3e6 bytes, only slices fit.
    for devices, memory, slices in product((2, 3, 4), (8.3e6, 1.1e7, math.inf), (1, 4)):
        limit = memory if memory < math.inf else None
        workload = workload_for(devices, memory=limit, fixed={"microbatches": 4})
        limits = Limits(stages=2, slices=slices)
        question = profile_question(workload, profile_at, limits, "a formula")
        steps[devices, memory, slices] = printed_or_endless(question)
    assert slower_pairs(steps) == []
    assert len({*steps.values()}) > 4


def test_a_search_that_leaves_out_divisions_says_so(monkeypatch):
    whole = model_search(4)
    monkeypatch.setattr("penstock.plan.search.RANKING_WORK", 1)
    workload = workload_for(4)
    found = find(profile_question(workload, profile_at, FEW, "a formula"))
    assert found.left_out > whole.left_out == 0
    # A division that was left out could have won, as far as anybody knows.
    assert found.bound < fastest(whole) <= fastest(found)


def test_the_choice_prints_as_the_fastest_plan_and_is_the_simplest_of_the_steady_ones():
    for memory in (1.0, 1.5, 2.0, None):
        found = unit_search(2, 5, memory, 4, 4, 3.0, 0.0)
        best = found.best
        assert printed(found) == float(f"{fastest(found):.{PRINTED_DIGITS}g}")
        for rival in found.candidates:
            if math.isnan(rival.noisy) or rival.step > best.step:
                continue
            # Delays that differ by less than the sampling error count as equal.
            is_steady = rival.noisy <= best.noisy / (1 + SAMPLING)
            assert not is_steady
            if rival.noisy <= best.noisy:
                assert best.schedule.actions <= rival.schedule.actions


def test_the_time_under_noise_is_that_of_a_step():
    """It counts all passes, the gather and the optimizer, and on average noise only delays."""
    evaluator = Evaluator(UnitCost(comm=0.1), passes=3, gather=5.0)
    schedule = make("1f1b", ranks=4, microbatches=4)
    division = Division(1, 4, 1, 1, 4, 1, 0.0)
    one = evaluate_schedule(division, "1f1b", (), "fixed", schedule, evaluator)
    assert one.step == 3 * one.makespan + 5.0
    assert one.step <= add_noise(one, evaluator).noisy < 1.1 * one.step


def test_the_time_under_noise_is_no_less_than_that_of_the_step():
    landscape = model_search(4, microbatches=1)
    for one in landscape.candidates:
        assert math.isnan(one.noisy) or one.noisy >= one.step


# ---------------------------------------------------------------- one plan, one name
def test_a_plan_appears_once_under_its_published_name():
    cost = UnitCost(F=1.0, B=2.0, comm=0.0)
    found = find(unit_question(4, 4, cost, 4, Limits(stages=2, slices=1)))
    split = split_and_defer(make("1f1b", ranks=4, microbatches=4), cost, lambda _: True)
    assert split == make("zb-h1", ranks=4, microbatches=4)
    names = [row.name for row in found.candidates]
    assert "zb-h1" in names
    assert "1f1b+split" not in names


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_no_plan_of_a_model_appears_twice(devices):
    found = model_search(devices)
    plans = [(row.division, row.schedule) for row in found.candidates]
    assert len(set(plans)) == len(plans)
    assert found.candidates[0] is found.best


# ---------------------------------------------------------------- too little memory
def test_what_fits_nowhere_is_refused_with_the_least_that_would_fit():
    with pytest.raises(
        ShapeError, match="into a memory of 6e\\+06; the smallest plan"
    ) as error:
        model_search(4, 6e6)
    needed = re.search(r"needs (\S+): ", str(error.value))
    assert needed
    least = float(needed[1])
    # Little more is enough, and no plan for more memory holds less (the message rounds it).
    assert least < 9.5e6
    for memory in (9.5e6, None):
        peaks = [row.peak for row in model_search(4, memory).candidates]
        assert least <= min(peaks) * (1 + 1e-5)
        assert memory is None or max(peaks) <= memory * ROUNDING
    with pytest.raises(
        ShapeError, match=r"of 0.5; the smallest plan needs 1: one micro-batch "
    ):
        unit_search(2, 2, 0.5)


# ---------------------------------------------------------------- Ctrl-C
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_keeps_the_best_plan_so_far(presses):
    seen: list[SearchProgress] = []

    def press_ctrl_c(progress: SearchProgress) -> None:
        if progress.best < math.inf and len(seen) < presses:
            seen.append(progress)
            raise KeyboardInterrupt

    workload = workload_for(4)
    question = profile_question(workload, profile_at, FEW, "a formula")
    found = search(question, press_ctrl_c)
    assert found.interrupted
    assert chosen_plan(found).facts["cut_short"] is True
    assert found.best.step == seen[-1].best
    bound = model_search(4).bound
    # The second press ends the proof of the bound. What is proven until then holds.
    assert found.bound == bound if presses == 1 else 0 < found.bound < bound
    assert found.bound <= found.best.step


def test_ctrl_c_keeps_the_best_schedule_of_a_pipeline():
    """There is one division, so that the best schedule so far is one of its own."""
    seen: list[SearchProgress] = []

    def press_ctrl_c(progress: SearchProgress) -> None:
        if progress.best < math.inf:
            seen.append(progress)
            raise KeyboardInterrupt

    question = unit_question(3, 4, UnitCost(), None, FEW)
    found = search(question, press_ctrl_c)
    assert found.interrupted
    assert found.bound <= found.best.step == seen[0].best


def test_large_pipelines_try_as_many_orders_as_take_half_a_minute(monkeypatch):
    every = len(unit_search(4, 8, None, slices=1, stages=2).candidates)
    module = sys.modules["penstock.plan.search"]
    monkeypatch.setattr(module, "FIXED_ACTIONS", 200)
    monkeypatch.setattr(module, "MAX_LISTED_ACTIONS", 0)
    question = unit_question(4, 8, UnitCost(comm=0.1), None, Limits(2, 1))
    found = find(question)
    assert 1 < len(found.candidates) < every
    assert {"1f1b", "zb-h1"} <= {row.name for row in found.candidates}


def test_ctrl_c_before_the_first_plan_ends_the_search():
    def press_ctrl_c(progress: SearchProgress) -> None:
        raise KeyboardInterrupt

    question = unit_question(2, 2, UnitCost(), None, FEW)
    with pytest.raises(KeyboardInterrupt):
        search(question, press_ctrl_c)


# ---------------------------------------------------------------- plans keep their prediction
SERIAL_CLUSTER = Cluster(
    tuple(Node(speed=speed) for speed in (1.0, 1.0, 0.5, 0.5)),
    tuple(
        tuple(0.0 if a == b else 1e-5 * (1 + abs(a - b)) for b in range(4))
        for a in range(4)
    ),
    tuple(tuple(1e9 * (1 + (a // 2 == b // 2)) for b in range(4)) for a in range(4)),
    serial=True,
)


@pytest.mark.parametrize(
    ("memory", "cluster", "choices"),
    [
        (None, None, {"copies": 2, "ranks": 2}),
        (None, None, {"copies": 4, "ranks": 1}),
        (None, None, {"copies": 1, "ranks": 3}),
        (None, None, {"copies": 1, "ranks": 2, "recompute": True}),
        (None, SERIAL_CLUSTER, {"copies": 2, "ranks": 2, "microbatches": 4}),
        (None, SERIAL_CLUSTER, {"copies": 1, "ranks": 4, "microbatches": 8}),
    ],
)
def test_a_plan_from_a_file_takes_the_predicted_time(memory, cluster, choices):
    found = model_search(4, memory, cluster, **choices)
    for row in one_of_each_division(found):
        plan = chosen_plan(replace(found, candidates=(row,)))
        plan = load_plan(dump_plan(plan))
        price = Price(UnitCost(), profile_at(row.division.rows), TOKENS)
        cost = price.for_plan(plan, cluster).cost
        makespan = simulate(plan.schedule, cost).makespan
        assert makespan == pytest.approx(row.makespan, rel=1e-9)


def one_of_each_division(found: Landscape):
    rows = {}
    for row in found.candidates:
        rows.setdefault(row.division, row)
    return list(rows.values())


def test_both_layouts_of_copies_are_compared_in_a_cluster():
    found = model_search(4, None, SERIAL_CLUSTER, copies=2, ranks=2, microbatches=4)
    assert {one.division.side_by_side for one in found.divisions} == {False, True}
    # Side by side, the fast nodes are one rank and the slow ones the other, which gets fewer
    # layers. In a row, all ranks of the second copy are slow, and the first copy waits.
    excess: dict[bool, dict[object, int]] = {False: {}, True: {}}
    for row in found.candidates:
        first, second = layers_of_ranks(row)
        key = (row.name, row.shape, row.division.rows)
        excess[row.division.side_by_side][key] = first - second
    both = excess[False].keys() & excess[True].keys()
    assert len(both) > 2
    assert all(excess[True][key] >= excess[False][key] for key in both)
    assert any(excess[True][key] > excess[False][key] for key in both)


def layers_of_ranks(candidate) -> list[int]:
    layers = [0] * candidate.schedule.ranks
    for stage in candidate.schedule.stages:
        layers[stage.rank] += candidate.partition[stage.part]
    return layers


def test_copies_pay_for_the_sums_of_their_gradients():
    alone = model_search(1, copies=1, ranks=1, microbatches=2)
    both = model_search(2, copies=2, ranks=1, microbatches=2)
    rows_alone = {row.division.rows for row in alone.candidates}
    assert rows_alone == {4}
    for row in both.candidates:
        plan = chosen_plan(replace(both, candidates=(row,)))
        cost = PlacedCost(
            profile_at(row.division.rows), TOKENS, partition=plan.partition
        )
        timeline = simulate(plan.schedule, cost)
        assert len(timeline.sums) > 0
        assert timeline.makespan > timeline.end.max()


def test_copies_sum_with_the_bandwidth_that_sums_have():
    """The price, the estimate and the file of a plan agree."""
    profile = replace(profile_at(4), network=Network(1e-5, 1e10, sum_bandwidth=1e8))
    workload = workload_for(4, fixed={"copies": 2, "ranks": 2, "microbatches": 1})
    question = profile_question(workload, lambda rows: profile, FEW, "a formula")
    found = find(question)
    for row in one_of_each_division(found):
        plan = chosen_plan(replace(found, candidates=(row,)))
        cost = Price(UnitCost(), profile, TOKENS).for_plan(plan).cost
        timeline = simulate(plan.schedule, cost)
        assert timeline.makespan == pytest.approx(row.makespan, rel=1e-9)
        last = timeline.sums[-1]
        pair = 2 * 1e-5 + last.bytes / 1e8
        assert last.end - last.start == pytest.approx(pair)
        assert question.pricing.estimate(row.division).seconds > pair
        assert question.pricing.close_bound(row.division) <= row.step * ROUNDING


def test_a_search_is_the_same_twice():
    again = find(unit_question(2, 4, UnitCost(B=3.0, comm=0.3), 2.0, FEW))
    first = unit_search(2, 4, 2.0, 4, 2, 3.0, 0.3)
    assert dump_plan(chosen_plan(again)) == dump_plan(chosen_plan(first))


# ---------------------------------------------------------------- the pieces
@given(
    layers=st.integers(1, 8),
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    embed=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    head=st.sampled_from([0.0, 0.7, 2.0, 3.0]),
    speeds=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3),
)
@settings(max_examples=60)
def test_a_balanced_partition_is_as_good_as_any(layers, ranks, embed, head, speeds):
    parts = len(ranks)
    if parts > layers:
        with pytest.raises(ShapeError, match="cannot fill"):
            balanced_partition(layers, ranks, embed, 1.0, head, speeds)
        return

    def busiest(partition) -> float:
        work = [0.0] * 3
        for part, count in enumerate(partition):
            work[ranks[part]] += count
        work[ranks[0]] += embed
        work[ranks[-1]] += head
        return max(one / speed for one, speed in zip(work, speeds, strict=True))

    found = balanced_partition(layers, ranks, embed, 1.0, head, speeds)
    assert sum(found) == layers
    assert min(found[1:-1], default=1) >= 1
    others = [
        one
        for one in product(range(layers + 1), repeat=parts)
        if sum(one) == layers and min(one[1:-1], default=1) >= 1
    ]
    assert busiest(found) == pytest.approx(min(map(busiest, others)))


@given(
    devices=st.integers(1, 24),
    layers=st.integers(1, 12),
    batch=st.integers(1, 24),
    passes=st.integers(1, 3),
    heads=st.sampled_from([1, 4, 6]),
    inner=st.sampled_from([1, 6, 16]),
    memory=st.sampled_from([None, 1e9]),
    exact=st.booleans(),
    uneven=st.booleans(),
    fixed_ranks=st.sampled_from([0, 2, 5]),
)
@settings(max_examples=80)
def test_every_division_uses_the_devices_and_deals_out_the_batch(
    devices, layers, batch, passes, heads, inner, memory, exact, uneven, fixed_ranks
):
    workload = Workload(
        layers,
        64,
        batch,
        devices,
        heads,
        heads,
        inner,
        memory=memory,
        passes=passes,
        exact=exact,
        uneven=uneven,
        fixed=Fixed(ranks=fixed_ranks),
    )
    divisions = list(divisions_of(workload))
    assert len(divisions) == len(set(divisions))
    for division in divisions:
        used = division.processes
        assert used == devices if exact else used <= devices
        assert division.ranks <= layers
        assert division.ranks == (fixed_ranks or division.ranks)
        assert heads % division.tensor == inner % division.tensor == 0
        dealt = (
            division.copies
            * division.shard
            * passes
            * division.microbatches
            * division.rows
        )
        assert dealt == batch
        assert not division.side_by_side or (
            uneven and min(division.copies, division.ranks) > 1
        )
        assert not (division.recomputed and memory is None)
    plain = {
        (one.copies, one.ranks) for one in divisions if one.tensor == one.shard == 1
    }
    expected = {
        (copies, ranks)
        for copies in range(1, devices + 1)
        for ranks in range(1, min(layers, devices // copies) + 1)
        if batch % (copies * passes) == 0
        and ranks == (fixed_ranks or ranks)
        and (not exact or copies * ranks == devices)
    }
    assert plain == expected


@given(st.integers(1, 2000))
def test_divisors_are_all_numbers_that_divide(number):
    assert divisors(number) == [
        one for one in range(1, number + 1) if number % one == 0
    ]


INSIDE, BETWEEN = Link(1e-6, 1e11), Link(1e-5, 1e9)
MACHINES = Machines(4, INSIDE, BETWEEN)


def slow_pairs(division: Division) -> set[tuple[int, int]]:
    latency = MACHINES.network(division).latency
    if not isinstance(latency, tuple):
        return set() if latency == INSIDE.latency else {(-1, -1)}
    return {
        (a, b)
        for a, row in enumerate(latency)
        for b, value in enumerate(row)
        if a < b and value == BETWEEN.latency
    }


def test_messages_inside_a_machine_use_its_fast_links():
    """Ranks of the first copy are numbered first, then those of the second."""
    assert slow_pairs(Division(1, 4, 1, 1, 8, 1, 0.0)) == set()
    in_a_row = Division(2, 4, 1, 1, 8, 1, 0.0)
    across = {(a, b) for a in range(4) for b in range(4, 8)}
    assert slow_pairs(in_a_row) == across
    # Side by side, ranks 0 and 1 of both copies fill the first machine: 0 0 1 1 | 2 2 3 3.
    near = replace(in_a_row, side_by_side=True)
    inner = {(a, b) for a in (0, 1) for b in (2, 3)}
    assert slow_pairs(near) == inner | {(a + 4, b + 4) for a, b in inner}
    # Two devices for each rank: a machine has two ranks.
    wide = Division(1, 4, 2, 1, 8, 1, 0.0)
    assert slow_pairs(wide) == inner


def test_a_cluster_lists_the_nodes_of_the_first_copy_first():
    division = Division(2, 2, 1, 1, 4, 1, 0.0)
    speeds = [node.speed for node in cluster_nodes(SERIAL_CLUSTER, division)]
    assert speeds == [1.0, 1.0, 0.5, 0.5]
    near = replace(division, side_by_side=True)
    assert [node.speed for node in cluster_nodes(SERIAL_CLUSTER, near)] == [
        1.0,
        0.5,
        1.0,
        0.5,
    ]
    latency = cluster_network(SERIAL_CLUSTER, near).latency
    assert latency[0][1] == SERIAL_CLUSTER.latency[0][2]
    assert latency[0][2] == SERIAL_CLUSTER.latency[0][1]
    with pytest.raises(ShapeError, match="there are 4 nodes, but 6 ranks"):
        cluster_network(SERIAL_CLUSTER, Division(3, 2, 1, 1, 4, 1, 0.0))


def test_sizes_have_units():
    sizes = [parse_memory(text) for text in ("80GiB", "80 GB", "512MB", "1.5MiB")]
    assert sizes == [80 * 2**30, 80e9, 512e6, 1.5 * 2**20]
    assert parse_memory("1.5mb", in_microbatches=True) == 1.5


@pytest.mark.parametrize(
    "text", ["", "abc", "0", "-1", "nan", "inf", "GiB", "80 G", "1e400", "512", "4mb"]
)
def test_a_size_must_be_a_number_above_0(text):
    with pytest.raises(
        ShapeError, match="is a size above 0 with its unit, such as 80GiB"
    ):
        parse_memory(text)


@pytest.mark.parametrize("text", ["80GB", "0mb", "-2mb", "nan", "inf", "4"])
def test_a_memory_without_a_model_is_a_number_of_microbatches(text):
    with pytest.raises(ShapeError, match=r"number of micro-batches above 0.*\n.*80GiB"):
        parse_memory(text, in_microbatches=True)
