"""Idle time is split by cause: the parts add up, and a simulation has no host time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock import UnitCost, make, simulate
from penstock.ir.timeline import split_idle_time

NAMES = ["gpipe", "1f1b", "hanayo", "zb-v", "interleaved"]


@pytest.mark.parametrize("comm", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_idle_time_adds_up_and_a_simulation_has_no_host_time(name, comm):
    timeline = simulate(make(name, ranks=4, microbatches=8), UnitCost(comm=comm))
    found = split_idle_time(timeline, comm)
    total = (
        np.sum([found.schedule, found.hop, found.host, found.end], axis=0)
        + timeline.busy
    )
    assert total == pytest.approx(np.full(4, timeline.makespan))
    assert found.host == pytest.approx([0.0] * 4, abs=1e-9)
    assert (sum(found.hop) > 0) == (comm > 0)


def test_the_delay_of_a_rank_that_starts_late_is_host_time():
    timeline = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())
    late = np.full(len(timeline.start), 0.5)
    late[0] = 0.0
    found = split_idle_time(
        replace(timeline, start=timeline.start + late, end=timeline.end + late), 0.0
    )
    assert found.host[0] == pytest.approx(0.5)
