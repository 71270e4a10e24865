"""Tests of steps whose messages wait for each other, as they do over NCCL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock import ModelCost, Network, PartCost, UnitCost, lower, make, simulate
from penstock.cost import NoisyCost, Seconds
from penstock.cost.network import BufferedMessage, busy_seconds
from penstock.errors import ShapeError
from penstock.ir import Schedule
from penstock.ir.action import Action, Op
from penstock.ir.program import Receive, RunAction, Send
from penstock.sim.simulate import simulate_in_order

SHAPES = [
    ("1f1b", {}),
    ("hanayo", {"waves": 2}),
    ("zb-v", {}),
    ("interleaved-zb", {"chunks": 2}),
    ("chimera", {}),
    ("seq1f1b", {"slices": 2}),
]


def schedule_of(name: str, shape: dict[str, int]):
    return make(name, ranks=4, microbatches=8, **shape)


def test_a_message_waits_for_the_action_before_its_receive():
    """Worked out by hand: F takes 1, B takes 2, a message 1.

    rank 0 | F0 F1 .  .  .  .  .  .  B0 B0 .  B1 B1
    rank 1 | .  .  F0 .  F1 B0 B0 B1 B1 .  .  .  .
    """
    schedule = make("gpipe", ranks=2, microbatches=2)
    cost = UnitCost(comm=1.0)
    timeline = simulate_in_order(schedule, cost)
    start = dict(
        zip((a for lane in schedule.lanes for a in lane), timeline.start, strict=True)
    )
    assert start[Action(Op.F, 1, 0)] == 2
    # 0F1 ends at 2, but rank 1 receives it only after 1F0, which ends at 3.
    assert start[Action(Op.F, 1, 1)] == 4
    assert start[Action(Op.B, 0, 1)] == 11
    assert timeline.makespan == 13
    assert simulate(schedule, cost).makespan == 11


def test_buffers_let_a_sender_go_on_and_shorten_late_receives():
    """Worked out by hand: F takes 1, B takes 2, a message 1. Its sender goes on after 0.25, a late receiver needs 0.5.

    0F1 ends at 2, but rank 1 runs 1F0 until 3, so that it has 0F1 at 3.5 instead of 4:

    rank 0 | F0 F0 F1 F1 .  .  .  .  .  .  .  .  .  .  .  B0 B0 B0 B0 .  B1 B1 B1 B1     in steps of 0.5
    rank 1 | .  .  .  .  F0 F0 .  F1 F1 B0 B0 B0 B0 B1 B1 B1 B1
    """
    schedule = make("gpipe", ranks=2, microbatches=2)
    part = PartCost(Seconds(base=1.0), Seconds(base=1.0), Seconds(base=1.0))
    buffers = (BufferedMessage(1.0, send=0.25, receive=0.5),)
    network = Network(latency=1.0, channels=1, buffers=buffers)
    timeline = simulate(schedule, ModelCost((part,) * 2, network))
    start = dict(
        zip((a for lane in schedule.lanes for a in lane), timeline.start, strict=True)
    )
    assert start[Action(Op.F, 1, 0)] == 2
    assert start[Action(Op.F, 1, 1)] == 3.5
    first, second = schedule.lanes[1][2:]
    assert start[first] == 4.5
    # The first result leaves at 6.5 and is there at 7.5; the other one leaves at 8.5, and rank 0
    # computes until 9.5, so that it finds it there but for the last half.
    assert start[Action(Op.B, 0, first.microbatch)] == 7.5
    assert start[Action(Op.B, 0, second.microbatch)] == 10.0
    assert timeline.makespan == 12.0


def test_a_message_that_no_buffer_can_hold_keeps_its_sender():
    buffers = [BufferedMessage(1.0, 0.1, 0.2), BufferedMessage(3.0, np.inf, 0.6)]
    sizes = np.array([1.0, 2.0, 3.0, 4.0])
    send, receive = busy_seconds(buffers, sizes, hop=np.ones(4))
    assert send.tolist() == [0.1, np.inf, np.inf, np.inf]
    assert receive == pytest.approx([0.2, 0.4, 0.6, 1.0])


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_buffers_never_make_a_step_slower(name, shape, channels):
    schedule = schedule_of(name, shape)
    part = PartCost(Seconds(base=1.0), Seconds(base=1.0), Seconds(base=1.0))
    network = Network(0.4, channels=channels)
    cost = ModelCost((part,) * schedule.parts, network)
    before = simulate(schedule, cost).makespan
    for send, receive in ((np.inf, 0.4), (np.inf, 0.2), (0.2, 0.2), (0.0, 0.0)):
        buffers = (BufferedMessage(1.0, send, receive),)
        buffered = replace(cost, network=replace(network, buffers=buffers))
        takes = simulate(schedule, buffered).makespan
        assert takes <= before
        before = takes
    at_once = replace(cost, network=replace(network, channels=None))
    assert simulate(schedule, at_once).makespan <= before


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(2.0, 0.1, 0.1), (1.0, 0.1, 0.1)], "from the smallest to the largest"),
        ([(0.0, 0.1, 0.1)], "from the smallest to the largest"),
        ([(1.0, -0.1, 0.1)], "at least 0"),
        ([(1.0, 0.1, np.inf)], "the second finite"),
        ([(1.0, np.nan, 0.1)], "at least 0"),
    ],
)
def test_buffers_that_make_no_sense_are_refused(points, said):
    with pytest.raises(ShapeError, match=said):
        Network(channels=1, buffers=tuple(BufferedMessage(*one) for one in points))


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_two_channels_are_quicker_than_one_and_free_links_never_slower(name, shape):
    schedule = schedule_of(name, shape)
    cost = UnitCost(comm=0.25)
    one = simulate_in_order(schedule, cost, channels=1).makespan
    two = simulate_in_order(schedule, cost, channels=2).makespan
    assert simulate(schedule, cost).makespan <= two < one


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_message_comes_after_all_that_its_ranks_have_before_it(name, shape):
    """Checked against the program itself, instruction by instruction."""
    schedule = schedule_of(name, shape)
    program = lower(schedule)
    timeline = simulate_in_order(schedule, UnitCost(comm=0.25))
    actions = [action for lane in schedule.lanes for action in lane]
    number = {action: place for place, action in enumerate(actions)}
    for lane in program.lanes:
        done = 0.0
        for instruction in lane:
            place = number[instruction.action]
            if isinstance(instruction, RunAction):
                done = max(done, float(timeline.end[place]))
            elif isinstance(instruction, Send | Receive):
                assert timeline.sent[place] >= done
                done = max(done, float(timeline.arrived[place]))
    took = timeline.arrived - timeline.sent
    assert took[np.isfinite(took)] == pytest.approx(0.25)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_network_with_channels_is_simulated_in_order(channels):
    schedule = make("hanayo", ranks=4, microbatches=8, waves=2)
    part = PartCost(Seconds(base=1.0), Seconds(base=1.0), Seconds(base=1.0))
    at_once = ModelCost((part,) * schedule.parts, Network(0.25, serial=True))
    waiting = replace(at_once, network=replace(at_once.network, channels=channels))
    found = simulate(schedule, waiting)
    expected = simulate_in_order(schedule, at_once, channels)
    assert np.array_equal(found.start, expected.start)
    assert found.makespan > simulate(schedule, at_once).makespan
    noisy = simulate(schedule, NoisyCost(waiting, spread=0.0))
    assert noisy.makespan == found.makespan


def test_other_numbers_of_channels_are_refused():
    schedule = make("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ShapeError, match="channels is 0"):
        simulate_in_order(schedule, UnitCost(), channels=0)
    with pytest.raises(ShapeError, match="channels is 3"):
        Network(channels=3)


# ---------------------------------------------------------------- rests between actions
class RestingCost(UnitCost):
    """Lets a rank rest for half a forward after every action."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action."""
        return 0.5


@pytest.mark.parametrize("simulated", [simulate, simulate_in_order])
def test_a_rank_rests_between_two_actions_but_its_message_leaves_before(simulated):
    """Worked out by hand: F takes 1, B takes 2, a rest 0.5."""
    alone = simulated(make("gpipe", ranks=1, microbatches=3), RestingCost())
    assert alone.makespan == 3 * 1 + 3 * 2 + 5 * 0.5
    two = simulated(make("gpipe", ranks=2, microbatches=2), RestingCost())
    starts = {(span.rank, str(span.action)): span.start for span in two.spans()}
    assert (starts[0, "0F0"], starts[0, "0F1"]) == (0.0, 1.5)
    assert (starts[1, "1F0"], starts[1, "1F1"]) == (1.0, 2.5)
