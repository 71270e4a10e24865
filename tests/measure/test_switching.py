"""Forwards that follow backwards take longer: measured, simulated, and decisive for a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock import make, simulate
from penstock.config import ModelConfig
from penstock.cost import RowProfiles
from penstock.cost.gpus import analytic_profile
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import Profile
from penstock.ir import Action, MicroBatch, Op, Stage
from penstock.ir.schedule import schedule_of
from penstock.measure.probe import Probe, Subject, switch_share
from penstock.models import Llama, LlamaConfig, split
from penstock.plan.space import Limits
from penstock.plan.workload import Fixed, Workload
from penstock.sim.shared import simulate_shared
from penstock.train.before.start import plan_workload

LAYERS = 8


def profile(switch: float) -> Profile:
    model = ModelConfig(
        layers=LAYERS,
        hidden_size=256,
        heads=4,
        kv_heads=4,
        intermediate_size=704,
        vocab_size=512,
    )
    return replace(analytic_profile(model, 64), switch=switch)


@pytest.mark.parametrize(
    ("forward", "backward", "share"), [(1.5, 2.25, 0.75), (1.0, 1.5, 0.0)]
)
def test_the_share_is_what_forward_and_backward_take_longer_by_turns(
    forward, backward, share, monkeypatch
):
    config = LlamaConfig(vocab=11, width=16, layers=1, heads=2, kv_heads=2, inner=16)
    _, middle, _ = split(Llama(config), (0, 1, 0))
    probe = Probe(Subject(middle, torch.randn(1, 8, 16), prefixes=True))
    kinds = ["B"]

    def clock(act) -> float:
        """Actions take 1 and 2 seconds; after one of the other kind, as given."""
        alive = len(probe.outputs)
        act()
        kinds.append("F" if len(probe.outputs) > alive else "B")
        same = kinds[-1] == kinds[-2]
        if kinds[-1] == "F":
            return 1.0 if same else forward
        return 2.0 if same else backward

    monkeypatch.setattr(probe, "clock", clock)
    assert switch_share(probe, 3.0, lambda: None) == pytest.approx(share)
    assert "".join(kinds[1:]) == "FFFFFBBBBB" + "FFBFBFBFBB"


def test_only_forwards_that_follow_a_backward_take_longer():
    forwards = [Action(Op.F, 0, number) for number in range(3)]
    backwards = [Action(Op.B, 0, number) for number in range(3)]
    turns = [one for pair in zip(forwards, backwards, strict=True) for one in pair]
    plain, slower = (PlacedCost(profile(switch), 64) for switch in (0.0, 0.25))
    orders = {}
    for name, lane in {"rows": forwards + backwards, "turns": turns}.items():
        orders[name] = schedule_of([Stage(0, 0)], [MicroBatch((0,))] * 3, [lane])
    rows, by_turns = orders["rows"], orders["turns"]
    forward = plain.seconds(rows, forwards[0])
    assert simulate(rows, slower).makespan == simulate(rows, plain).makespan
    extra = simulate(by_turns, slower).makespan - simulate(by_turns, plain).makespan
    assert extra == pytest.approx(2 * 0.25 * forward)
    # Ranks on shared processors pay it too, and each lane begins without it.
    two = make("gpipe", ranks=2, microbatches=3)
    assert simulate(two, slower).makespan == simulate(two, plain).makespan
    pair = make("1f1b", ranks=2, microbatches=3)
    shared = [simulate_shared(pair, cost, 1).busy.sum() for cost in (plain, slower)]
    alone = [simulate(pair, cost).busy.sum() for cost in (plain, slower)]
    assert shared[1] - shared[0] == pytest.approx(alone[1] - alone[0])
    assert alone[1] > alone[0]


def test_auto_changes_seldom_between_forwards_and_backwards_where_that_costs_time():
    workload = Workload(LAYERS, 64, 8, 2, fixed=Fixed(2, 8, 1, 1, 1))
    limits = Limits(stages=1, slices=1, split=False)
    found = plan_workload(workload, RowProfiles((profile(0.1),)), limits)
    steps = {row.name: row.step for row in found.landscape.candidates}
    assert found.plan.name == "gpipe"
    assert steps["gpipe"] < steps["1f1b"]
