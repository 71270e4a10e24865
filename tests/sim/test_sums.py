"""Sums of gradients over copies, replicas and tied weights, beside the actions of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock import ModelCost, Network, PartCost, Seconds, UnitCost, make, simulate
from penstock.cost import NoisyCost, Profile
from penstock.cost.cost import GivenSumsCost, PlannedSumsCost
from penstock.cost.profile import block
from penstock.cost.sums import link_matrices, quickest_sum, ring_seconds
from penstock.errors import ShapeError
from penstock.ir.sums import (
    completion,
    last_backwards,
    ranks_of,
    shared_gradients,
)
from penstock.sim import simulate_shared
from penstock.view import gantt, page, plain, svg, trace
from random_schedules import random_schedule

SVG_GROUP = "{http://www.w3.org/2000/svg}g"


def model(parts: int, gradients: float, tied: float = 0.0, **network) -> ModelCost:
    part = PartCost(
        Seconds(base=1.0), Seconds(base=1.0), Seconds(base=1.0), gradients=gradients
    )
    ends = replace(part, tied_gradients=tied)
    middle = (part,) * (parts - 2)
    return ModelCost((ends, *middle, ends), Network(**network))


def test_copies_end_after_the_ring_over_the_last_part():
    one = make("1f1b", ranks=4, microbatches=8)
    for copies in (2, 3, 4):
        many = make("1f1b", ranks=4, microbatches=8, copies=copies)
        timeline = simulate(many, UnitCost(sum=1.5, comm=0.1))
        alone = simulate(one, UnitCost(sum=1.5, comm=0.1))
        ring = 2 * (copies - 1) * (0.1 + 1.5 / copies)
        assert alone.sums == ()
        assert timeline.end.max() == pytest.approx(alone.makespan)
        assert timeline.makespan == pytest.approx(alone.makespan + ring)


def test_a_sum_overlaps_with_the_actions_that_remain():
    schedule = make("1f1b", ranks=4, microbatches=4, copies=2)
    timeline = simulate(schedule, UnitCost(sum=1.0))
    first = timeline.sums[0]
    assert first.name == "part 3"
    assert first.ranks == (3, 7)
    assert first.end < timeline.end.max()
    assert timeline.makespan == pytest.approx(timeline.end.max() + 1.0)


def test_waiting_for_a_sum_is_idle_time():
    schedule = make("1f1b", ranks=2, microbatches=4, copies=2)
    quick = simulate(schedule, UnitCost())
    slow = simulate(schedule, UnitCost(sum=5.0))
    assert quick.busy.sum() == slow.busy.sum()
    assert slow.bubble == pytest.approx(1 - slow.busy.sum() / (4 * slow.makespan))
    assert slow.bubble > quick.bubble


def test_a_rank_takes_part_in_one_sum_at_a_time():
    schedule = make("hanayo", ranks=2, microbatches=2, waves=1, copies=2)
    timeline = simulate(schedule, UnitCost(sum=40.0))
    for rank in range(schedule.ranks):
        mine = [one for one in timeline.sums if rank in one.ranks]
        assert len(mine) == 2
        assert all(after.start >= before.end for before, after in pairwise(mine))
        # The two parts of a rank are one rank's gradients together.
        assert sum(one.end - one.start for one in mine) == pytest.approx(40.0)


def test_the_critical_path_ends_with_the_action_that_the_last_sum_waited_for():
    schedule = make("1f1b", ranks=3, microbatches=4, copies=2)
    timeline = simulate(schedule, UnitCost(sum=30.0))
    chain = timeline.critical_path()
    last = max(timeline.sums, key=lambda one: one.end)
    assert chain[-1] == schedule.table.action(last.cause)
    ends = {action: end for _, action, _, end in timeline.spans()}
    assert ends[chain[-1]] == pytest.approx(last.start)


def test_ring_of_real_links():
    cost = model(2, gradients=8e6, latency=1e-3, bandwidth=1e9)
    timeline = simulate(make("1f1b", ranks=2, microbatches=2, copies=4), cost)
    expected = 2 * 3 / 4 * 8e6 / 1e9 + 2 * 3 * 1e-3
    assert len(timeline.sums) == 2
    for one in timeline.sums:
        assert one.end - one.start == pytest.approx(expected)


def test_sums_have_a_bandwidth_of_their_own_where_it_was_measured():
    links = {"latency": 1e-3, "bandwidth": 1e9}
    schedule = make("1f1b", ranks=2, microbatches=2, copies=4)
    alike = simulate(schedule, model(2, gradients=8e6, **links))
    rows = tuple(tuple(2e8 for _ in range(8)) for _ in range(8))
    for measured in (2e8, rows):
        cost = model(2, gradients=8e6, sum_bandwidth=measured, **links)
        timeline = simulate(schedule, cost)
        for one in timeline.sums:
            expected = 2 * 3 / 4 * 8e6 / 2e8 + 2 * 3 * 1e-3
            assert one.end - one.start == pytest.approx(expected)
        assert np.array_equal(timeline.end, alike.end), "messages are as fast as before"
    with pytest.raises(ShapeError, match="the bandwidth of sums from rank 0"):
        Network(sum_bandwidth=0.0)


def test_a_step_over_nccl_ends_with_its_sums():
    schedule = make("chimera", ranks=4, microbatches=8)
    links = {"latency": 1e-3, "bandwidth": 1e9, "channels": 1}
    alone = simulate(schedule, model(4, gradients=0.0, **links))
    cost = model(4, gradients=8e6, sum_bandwidth=1e6, **links)
    timeline = simulate(schedule, cost)
    assert np.array_equal(timeline.end, alone.end)
    assert timeline.makespan == max(one.end for one in timeline.sums)
    # Each rank sums two parts, one after the other, and some rank is not done before the end.
    assert timeline.makespan > alone.makespan + 8.0


def test_sums_wait_for_the_last_action_of_their_ranks_if_all_messages_share_a_channel():
    schedule = make("chimera", ranks=4, microbatches=8)
    begins = {}
    for channels in (1, 2):
        links = {"latency": 1e-3, "bandwidth": 1e9, "channels": channels}
        timeline = simulate(schedule, model(4, gradients=8e6, **links))
        begins[channels] = min(one.start for one in timeline.sums)
        lanes = pairwise(schedule.table.first.tolist())
        ends = [timeline.end[begin:end].max() for begin, end in lanes]
        if channels == 1:
            for one in timeline.sums:
                assert one.start >= max(ends[rank] for rank in one.ranks)
    assert begins[2] < begins[1]


def test_planned_sums_send_messages_over_the_links():
    links = {"latency": 1e-3, "bandwidth": 1e9}
    slow = model(2, gradients=8e6, sum_bandwidth=1e6, **links)
    alike = model(2, gradients=8e6, **links)
    ready = [0.0, 0.5, 0.25]
    ends = [
        PlannedSumsCost(one).sum_end((0, 1, 2), 8e6, ready) for one in (slow, alike)
    ]
    assert ends[0] == ends[1]
    matrices = link_matrices((0, 1, 2), alike.latency, alike.bandwidth)
    plan = quickest_sum(*matrices, 8e6, ready, (0, 1, 2), (0,))
    given = [
        GivenSumsCost(one, (plan,)).sum_end((0, 1, 2), 8e6, ready)
        for one in (slow, alike)
    ]
    assert given[0] == given[1]


def test_the_slowest_link_sets_the_pace_of_a_ring():
    latency = np.zeros((4, 4))
    byte = np.full((4, 4), 1e-9)
    byte[:2, 2:] = byte[2:, :2] = 1e-8  # between two machines
    assert ring_seconds(latency, byte, 4e6) == pytest.approx(2 * 3 * 1e6 * 1e-8)


def test_tied_weights_are_summed_over_the_first_and_the_last_part():
    schedule = make("1f1b", ranks=3, microbatches=2)
    free = simulate(schedule, model(3, gradients=1e6, bandwidth=1e6))
    tied = simulate(schedule, model(3, gradients=1e6, tied=2e6, bandwidth=1e6))
    assert free.sums == ()
    assert [(one.name, one.ranks) for one in tied.sums] == [("tied weights", (0, 2))]
    assert tied.makespan == pytest.approx(free.makespan + 2.0)


def test_gradients_of_a_profile_are_a_quarter_of_its_weights():
    embed, layer, head = (block([], weights=size) for size in (1600.0, 400.0, 2000.0))
    profile = Profile(4, 8, 1, 1.0, embed, layer, head, tied=800.0)
    cost = profile.cost((2, 2))
    schedule = make("1f1b", ranks=2, microbatches=1, copies=2)
    assert [cost.weights(schedule, stage).gradients for stage in range(2)] == [
        400.0,
        500.0,
    ]
    assert cost.tied(schedule).gradients == 200.0
    whole = profile.cost((4,))
    alone = make("1f1b", ranks=1, microbatches=1)
    assert whole.weights(alone, 0).gradients == (1600 + 4 * 400 + 2000 - 800) / 4
    assert whole.tied(alone).gradients == 0.0


def test_noise_and_shared_processors_keep_the_sums():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    cost = UnitCost(sum=2.0)
    noisy = simulate(schedule, NoisyCost(cost, spread=0.1))
    assert len(noisy.sums) == 2
    for one in noisy.sums:
        assert 1.8 <= one.end - one.start <= 2.2
    shared = simulate_shared(schedule, cost, processors=2, turn=1.0)
    assert len(shared.sums) == 2
    assert shared.makespan > shared.end.max()


@pytest.mark.parametrize("seed", range(10))
def test_the_simulator_begins_the_sums_in_the_order_of_the_runtime(seed):
    schedule = random_schedule(np.random.default_rng(seed))
    expected = []
    for part in range(schedule.parts):
        ranks = ranks_of(schedule, (part,))
        if len(ranks) > 1:
            _, ready = completion(schedule, (part,), ranks[0])
            expected.append((ready, f"part {part}", ranks))
    found = [(one.ready, one.name, one.ranks) for one in shared_gradients(schedule)]
    assert found == sorted(expected)


# ---------------------------------------------------------------- pictures
def test_a_picture_marks_ranks_that_only_sum():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    timeline = simulate(schedule, UnitCost(sum=2.0))
    lines = plain(timeline).splitlines()
    assert lines[0] == "rank 0 | F0 F1 .  .  B0 -- .  B1 -- +  +"
    assert lines[1] == "rank 1 | .  F0 B0 -- F1 B1 -- +  +  .  ."
    text = gantt(timeline, 80, colours=False).plain
    assert "+++" in text
    assert "sum of gradients" in text


def test_figures_traces_and_pages_show_the_sums():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    timeline = simulate(schedule, UnitCost(sum=2.0))
    figure = ElementTree.fromstring(svg(timeline))
    groups = [one for one in figure.iter(SVG_GROUP) if one.get("class") == "sums"]
    assert [len(group) for group in groups] == [4]
    events = json.loads(trace(timeline))["traceEvents"]
    sums = [event for event in events if event.get("cat") == "sum of gradients"]
    assert sorted(event["tid"] for event in sums) == [4, 5, 6, 7]
    assert max(event["ts"] + event["dur"] for event in sums) == pytest.approx(11e6)
    assert '"sums":[[[1,3],7.0,9.0],[[0,2],9.0,11.0]]' in page([("", timeline)])


def test_pictures_without_sums_do_not_mention_them():
    timeline = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost(sum=2.0))
    assert "sum of gradients" not in svg(timeline)
    assert "sum of gradients" not in trace(timeline)
    assert "sum of gradients" not in gantt(timeline, 80).plain


# ---------------------------------------------------------------- the command line
def test_simulate_takes_the_time_of_sums(run):
    one = "draw 1f1b --pp 4 --microbatches 8"
    two = f"{one} --cost sum=1.5".replace("1f1b", "1f1b:copies=2")
    alone = json.loads(run(f"{one} --json")[1])
    copied = json.loads(run(f"{two} --json")[1])
    assert copied["makespan"] == alone["makespan"] + 1.5
    assert "sums" not in alone
    groups = [each["ranks"] for each in copied["sums"]]
    assert groups == [[3, 7], [2, 6], [1, 5], [0, 4]]
    assert "4; the last ends 1.5 forwards after the last action" in run(two)[1]


def test_draw_and_compare_take_the_time_of_sums(run, tmp_path):
    shape = "--pp 2 --microbatches 2 --cost sum=3"
    assert "sum of gradients" in run(f"draw 1f1b:copies=2 {shape}")[1]
    file = tmp_path / "both.html"
    assert run(f"draw 1f1b:copies=2 gpipe:copies=2 {shape} -o {file}")[0] == 0
    assert '"makespan":12.0' in file.read_text()


def test_a_time_of_sums_below_zero_is_refused(run):
    code, _, error = run("draw 1f1b --pp 2 --microbatches 2 --cost sum=-1")
    assert code == 2
    assert "--cost: sum must be at least 0" in error


def test_the_runtime_begins_its_sums_in_the_order_of_the_simulator():
    nn = pytest.importorskip("torch.nn")
    gradients = pytest.importorskip("penstock.runtime.replicas")
    thread = pytest.importorskip("penstock.runtime.comm.thread")
    schedule = make("hanayo", ranks=2, microbatches=4, waves=2, copies=2)
    shared = shared_gradients(schedule)
    hub = thread.Hub(schedule.ranks)
    for rank in range(schedule.ranks):
        modules = {}
        for number, stage in enumerate(schedule.stages):
            if stage.rank == rank:
                modules[number] = nn.Linear(1, 1)
        replicas = gradients.Replicas(schedule, modules, thread.ThreadComm(hub, rank))
        expected = [one.name for one in shared if rank in one.ranks]
        assert [one.name for one in replicas.order] == expected
        last = [one.last for one in replicas.order]
        mine = last_backwards(schedule)
        assert last == [mine[int(name.split()[1]), rank] for name in expected]


def test_a_matrix_of_equal_links_sums_as_one_number_does():
    rows = tuple(tuple(2e9 for _ in range(8)) for _ in range(8))
    schedule = make("1f1b", ranks=2, microbatches=2, copies=4)
    even = simulate(schedule, model(2, gradients=1e9, latency=1e-3, bandwidth=2e9))
    pairs = simulate(schedule, model(2, gradients=1e9, latency=1e-3, bandwidth=rows))
    assert pairs.makespan == pytest.approx(even.makespan)
    with pytest.raises(ShapeError, match="is for 2 ranks"):
        simulate(schedule, model(2, gradients=1e9, bandwidth=((1e9, 1e9), (1e9, 1e9))))
