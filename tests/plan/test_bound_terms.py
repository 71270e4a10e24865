"""Single terms of the bounds: hops, rests, and the memory of what is computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock import UnitCost, lower_bound, make, simulate
from penstock.cost import Network
from penstock.cost.curve import Fit, Seconds
from penstock.cost.profile import Block, Profile
from penstock.ir import Action, Schedule, Stage
from penstock.plan.space_bound import (
    DivisionLoad,
    Hop,
    LeastTimes,
    PlacedBound,
    PlacedLayers,
    least_block_times,
    mean_bound,
)


def test_the_bound_has_the_hops_before_and_after_the_work_of_a_rank():
    schedule = make("1f1b", ranks=2, microbatches=4)
    # Rank 1 works for 12 seconds. Rank 0 has a forward and a backward before and after, each with a hop.
    assert lower_bound(schedule, UnitCost(comm=0.5)) == 12 + 3 + 2 * 0.5


class RestingCost(UnitCost):
    """Lets a rank rest for half a forward after every action."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        return 0.5


def test_a_rank_need_not_rest_after_its_last_action():
    alone = make("gpipe", ranks=1, microbatches=3)
    assert lower_bound(alone, RestingCost()) == simulate(alone, RestingCost()).makespan
    times = LeastTimes(work=(1.0, 2.0), way=(1.0, 2.0), hop=0.0, turn=0.5)
    assert mean_bound(times, ranks=1, microbatches=3) == 3 * 3 + 5 * 0.5


def test_a_recomputed_stage_needs_room_for_one_slice_and_the_inputs_of_all():
    fit = Fit(Seconds(base=1.0), 0.0, 0.0)
    layer = Block((), fit, fit, fit, fit, held=5.0, kept=0.5)
    ends = replace(layer, held=0.0)
    profile = Profile(1, 128, 1, 1.0, ends, layer, ends, Network())
    times = least_block_times(profile, slices=4, split=True, granularity=32)
    # Inputs take 128 bytes, and the layer builds 4 more bytes of each token of a slice again: 128 for the shortest.
    for memory, cuts in ((250.0, ()), (260.0, (0, 32, 64, 96, 128))):
        load = DivisionLoad(1, 1, Hop(0.0, 0.0), copies=1, memory=memory)
        bound = PlacedBound(PlacedLayers([Stage(0, 0)], (1,)), times, profile, load)
        fitting = np.flatnonzero(bound.fitting_classes())
        assert fitting.tolist() == ([times.class_of(cuts)] if cuts else [])
