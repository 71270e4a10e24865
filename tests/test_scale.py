"""A million actions: fast enough to plan with."""

from __future__ import annotations

import time

import pytest

from penstock import UnitCost, make, simulate


@pytest.fixture(scope="module")
def warm():
    """Compiles, or loads, the loops."""
    simulate(make("1f1b", ranks=64, microbatches=256), UnitCost(comm=0.1))


@pytest.mark.parametrize("name", ["interleaved-zb", "zb-v", "1f1b"])
def test_a_million_actions_are_built_checked_and_simulated_in_seconds(warm, name):
    begin = time.perf_counter()
    schedule = make(name, ranks=256, microbatches=2048 if name == "1f1b" else 1024)
    built = time.perf_counter()
    timeline = simulate(schedule, UnitCost(comm=0.1))
    done = time.perf_counter()
    assert schedule.actions >= 1_000_000
    assert built - begin < 15
    assert done - built < 2
    assert timeline.makespan >= 3 * len(schedule.microbatches)
