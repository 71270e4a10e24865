"""The bytes of a device: weights, activations, what slices carry, moments, messages, sums and recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock import (
    Action,
    MicroBatch,
    ModelCost,
    PartCost,
    Schedule,
    Seconds,
    Stage,
    UnitCost,
    make,
    simulate,
)
from penstock.config import ModelConfig
from penstock.cost import NoisyCost, ProfileCost, memory
from penstock.cost.columns import columns
from penstock.cost.gpus import analytic_profile
from penstock.cost.memory import (
    activation_caps,
    carried_bytes,
    device_bytes,
    device_memory,
    recordings_of,
)
from penstock.cost.sizes import part_moments
from penstock.formats import load_profile
from penstock.ir import Op, lower

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "h200"

TIME = Seconds(base=1.0)
PART = PartCost(TIME, TIME, TIME, held=10.0, message=1.0, weights=1000.0)


def cost_of(parts: int, **change: float) -> ModelCost:
    return ModelCost((replace(PART, **change),) * parts)


def test_a_device_holds_weights_activations_and_messages():
    schedule = make("1f1b", ranks=3, microbatches=4)
    cost = cost_of(3)
    use = device_memory(schedule, cost)
    assert use.weights.tolist() == [1000.0] * 3
    assert use.activations.tolist() == [30.0, 20.0, 10.0]
    assert use.more.tolist() == [0.0] * 3
    # All sends may be in flight, up to 16 of them, and one receive.
    assert use.messages.tolist() == [5.0, 9.0, 5.0]
    assert device_bytes(schedule, cost).tolist() == [1035.0, 1029.0, 1015.0]
    many = make("1f1b", ranks=3, microbatches=20)
    assert device_memory(many, cost).messages.tolist() == [17.0] * 3


def test_moments_count_only_while_an_action_runs():
    schedule = make("1f1b", ranks=1, microbatches=2, split=True)
    cost = cost_of(1, working=3.0, scratch=50.0, kept=4.0)
    assert {one.op for one in schedule.lanes[0]} == {Op.F, Op.I, Op.W}
    use = device_memory(schedule, cost)
    # An I holds 10 and works with 3; a W holds 4 and works with 50.
    assert use.activations[0] == 10.0
    assert use.activations[0] + use.more[0] == 54.0


def test_sliced_sequences_carry_keys_and_values_of_all_tokens():
    schedule = make("terapipe", ranks=1, microbatches=1, slices=4)
    assert [str(one) for one in schedule.lanes[0]][:2] == ["0F0", "0F0.1"]
    cost = cost_of(1, carried=2.0)
    # A buffer of 4 x 2 bytes from the first forward on, of which `held` counts the slices so far;
    # on the way back, as many bytes of gradients.
    forward = [6.0, 4.0, 2.0, 0.0]
    backward = [8.0 + 0.0, 8.0 + 2.0, 8.0 + 4.0, 8.0 + 6.0]
    assert (
        carried_bytes(schedule, columns(schedule, cost).carried).tolist()
        == forward + backward
    )
    whole = make("gpipe", ranks=1, microbatches=1)
    assert not carried_bytes(whole, columns(whole, cost).carried).any()


def test_copies_keep_gradients_until_they_are_summed():
    one = make("1f1b", ranks=2, microbatches=2)
    two = make("1f1b", ranks=2, microbatches=2, copies=2)
    cost = cost_of(2, gradients=250.0)
    assert device_memory(one, cost).sums.tolist() == [0.0, 0.0]
    use = device_memory(two, cost)
    assert use.sums.tolist() == [250.0] * 4
    # The copies come when the activations are gone.
    assert use.total.tolist() == [1250.0] * 4


def test_recorded_lanes_need_what_others_need():
    schedule = make("zb-v", ranks=3, microbatches=6)
    cost = cost_of(6)
    plain = device_memory(schedule, cost)
    assert device_memory(schedule, cost, recorded=True).total.tolist() == (
        plain.total.tolist()
    )


def test_stages_of_long_lanes_keep_buffers_for_every_micro_batch_in_flight(monkeypatch):
    monkeypatch.setattr(memory, "MAX_RECORDED_ACTIONS", 11)
    schedule = make("1f1b", ranks=3, microbatches=6)
    assert recordings_of(schedule).tolist() == [3, 2, 1]
    cost = cost_of(3)
    use = device_memory(schedule, cost, recorded=True)
    # Each set holds 10 bytes and two copies of each message of one byte that it sends.
    assert (use.activations + use.more).tolist() == [3 * 12.0, 2 * 14.0, 12.0]
    # A recomputed part keeps its input, and its backward builds the rest anew in the same set.
    again = device_memory(schedule, cost_of(3, recompute=True), recorded=True)
    assert again.total.tolist() == use.total.tolist()


@pytest.mark.parametrize(
    "shape",
    [
        {"name": "1f1b"},
        {"name": "hanayo", "waves": 2},
        {"name": "zb-v"},
        {"name": "terapipe", "slices": 3},
    ],
)
def test_recordings_are_the_takes_of_the_runtime(shape):
    takes = pytest.importorskip("penstock.runtime.replay")
    lane = pytest.importorskip("penstock.ir.lane")
    schedule = make(**shape, ranks=4, microbatches=6)
    program = lower(schedule)
    found = np.zeros(len(schedule.stages), dtype=int)
    for rank in range(schedule.ranks):
        visits = takes.stage_visits(lane.lane_turns(program, rank))
        cuts = {visit: schedule.microbatches[visit[1]].cuts for visit in visits}
        for (stage, _), (_, number) in takes.assign_takes(visits, cuts).items():
            found[stage] = max(found[stage], number + 1)
    assert recordings_of(schedule).tolist() == found.tolist()


def test_caps_leave_room_for_everything_else():
    schedule = make("hanayo", ranks=4, microbatches=4, waves=1, slices=2)
    model = ModelConfig(
        layers=16,
        hidden_size=512,
        heads=8,
        kv_heads=8,
        intermediate_size=1408,
        vocab_size=8000,
    )
    cost = ProfileCost(analytic_profile(model, 1024, rows=2))
    peaks = simulate(schedule, cost).peak_activations
    total = device_bytes(schedule, cost)
    memory = float(total.max())
    caps = activation_caps(schedule, cost, memory)
    assert (caps >= peaks - 1e-6).all()
    assert caps[total.argmax()] == pytest.approx(peaks[total.argmax()])
    assert (activation_caps(schedule, cost, memory / 100) < 0).all()
    assert (total > simulate(schedule, cost).weights + peaks).all()


def test_without_room_for_the_copies_of_sums_there_is_none_for_activations():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    cost = cost_of(2, gradients=250.0)
    assert (activation_caps(schedule, cost, 1250.0) > 0).all()
    assert (activation_caps(schedule, cost, 1249.0) < 0).all()


def test_a_rank_sums_the_gradients_of_all_its_parts_and_of_tied_weights():
    parts = make("hanayo", ranks=2, microbatches=2, waves=1, copies=2)
    assert device_memory(parts, cost_of(4, gradients=250.0)).sums.tolist() == [500] * 4
    # Without copies only the tied weights are summed, on the first and the last rank.
    tied = make("1f1b", ranks=3, microbatches=2)
    cost = cost_of(3, gradients=250.0, tied_gradients=70.0)
    assert device_memory(tied, cost).sums.tolist() == [70.0, 0.0, 70.0]


def test_weights_that_stages_of_a_rank_share_count_once():
    cost = cost_of(4, tied=100.0)
    # Only the first rank has the first and the last part.
    both = make("hanayo", ranks=2, microbatches=2, waves=1)
    assert device_memory(both, cost).weights.tolist() == [1900.0, 2000.0]
    apart = make("1f1b", ranks=4, microbatches=2)
    assert device_memory(apart, cost).weights.tolist() == [1000.0] * 4
    # Two stages of one part.
    lane = [Action(op, number, number) for op in (Op.F, Op.B) for number in (0, 1)]
    twice = Schedule(
        [Stage(0, 0), Stage(0, 0)], [MicroBatch((0,)), MicroBatch((1,))], [lane]
    )
    assert device_memory(twice, cost_of(1)).weights.tolist() == [1000.0]


def test_only_ranks_with_long_lanes_keep_sets_of_buffers(monkeypatch):
    """Rank 0 has the first and the last of three stages, and so four actions; rank 1 has two."""
    order = [[(Op.F, 0), (Op.F, 2), (Op.B, 2), (Op.B, 0)], [(Op.F, 1), (Op.B, 1)]]
    lanes = [[Action(op, stage, 0) for op, stage in lane] for lane in order]
    stages = [Stage(0, 0), Stage(1, 1), Stage(0, 2)]
    schedule = Schedule(stages, [MicroBatch((0, 1, 2))], lanes)
    cost = cost_of(3, working=3.0)
    for longest, bytes_of_ranks in (
        (4, [20.0 + 3.0, 10.0 + 3.0]),
        # Each stage of rank 0 has a set: what it holds, works with and sends, and what it receives for that.
        (3, [2 * (10.0 + 3.0 + 2.0), 10.0 + 3.0]),
    ):
        monkeypatch.setattr(memory, "MAX_RECORDED_ACTIONS", longest)
        use = device_memory(schedule, cost, recorded=True)
        assert (use.activations + use.more).tolist() == bytes_of_ranks


def test_logits_exist_only_on_the_last_part():
    facts = {"family": "llama", "width": 64, "heads": 4, "kv_heads": 2, "inner": 128}
    facts["vocab"] = 50_000
    middle = part_moments(facts, 2, first=False, last=False, rows=3, half=True)
    last = part_moments(facts, 2, first=False, last=True, rows=3, half=True)
    assert last.working == 3 * 6 * 50_000
    assert middle.working < last.working / 10
    assert middle.carried == 3 * 2 * 2 * (2 * 32)
    assert part_moments({}, 2, first=True, last=True, rows=1, half=True) == (0, 0, 0)


def test_wrapped_costs_and_unit_costs_have_memories_too():
    schedule = make("1f1b", ranks=2, microbatches=2, slices=2)
    cost = cost_of(2, working=1.0, carried=1.0, scratch=2.0)
    noisy = device_bytes(schedule, NoisyCost(cost))
    assert noisy.tolist() == device_bytes(schedule, cost).tolist()
    assert device_memory(schedule, UnitCost()).weights.tolist() == [0.0, 0.0]


SHAPES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved v=4": {"chunks": 4},
    "hanayo W=1": {"waves": 1},
    "hanayo W=2": {"waves": 2},
    "hanayo W=4": {"waves": 4},
    "zb-h1": {},
    "zb-v": {},
    "interleaved-zb v=2": {"chunks": 2},
}


def test_bytes_are_those_that_torch_allocated_on_an_h200():
    """Ranks without embedding and head, whose vocabulary the profile does not share."""
    rows = json.loads((RESULTS / "profiles.json").read_text())["rows"]
    text = json.dumps(next(row["profile"] for row in rows if row["width"] == 1024))
    profile = replace(load_profile(text), layers=64)
    compared = 0
    for row in json.loads((RESULTS / "schedules-8.json").read_text())["rows"]:
        if row["name"] not in SHAPES:
            continue
        schedule = make(
            row["name"].split()[0],
            ranks=8,
            microbatches=row["microbatches"],
            **SHAPES[row["name"]],
        )
        parts = schedule.parts
        cost = profile.cost((64 // parts,) * parts, tokens=2048)
        # The benchmark has no optimizer: only weights and gradients.
        bare = tuple(replace(part, weights=part.weights / 2) for part in cost.parts)
        found = device_bytes(schedule, replace(cost, parts=bare))
        for rank in range(1, 7):
            assert 0.83 < found[rank] / row["memory"][rank] < 1.02
            compared += 1
    assert compared >= 100
