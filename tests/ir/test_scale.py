"""Half a million actions: fast enough to plan with."""

from __future__ import annotations

import time

import pytest

from penstock import UnitCost, make, simulate


@pytest.fixture(scope="module")
def warm():
    """Compiles, or loads, the loops."""
    simulate(make("1f1b", ranks=64, microbatches=256), UnitCost(comm=0.1))


@pytest.mark.parametrize(("name", "microbatches"), [("zb-v", 384), ("1f1b", 1024)])
def test_half_a_million_actions_are_built_checked_and_simulated_in_seconds(
    warm, name, microbatches
):
    begin = time.process_time()  # of one core, whatever else the machine does
    schedule = make(name, ranks=256, microbatches=microbatches)
    built = time.process_time()
    timeline = simulate(schedule, UnitCost(comm=0.1))
    done = time.process_time()
    assert schedule.actions >= 500_000
    assert built - begin < 7.5
    assert done - built < 1
    assert timeline.makespan >= 3 * len(schedule.microbatches)
