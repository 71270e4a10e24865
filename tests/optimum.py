"""The optimal order of a small schedule, found by CP-SAT: a judge that shares no code with our search."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np
import pytest

from penstock.cost import Cost
from penstock.cost.columns import columns
from penstock.ir import Schedule
from penstock.ir.action import BACKWARD, FORWARD, WEIGHTS

MAX_DENOMINATOR = 1000


@dataclass(frozen=True)
class Optimum:
    """The best makespan that was found, and whether it is proved that no order beats it."""

    makespan: float
    proved: bool


def optimum(schedule: Schedule, cost: Cost, cap: float | None, work: float) -> Optimum:
    """Search all orders of a schedule's actions, for `work` units of CP-SAT's deterministic time.

    Skips the test where OR-tools is not installed.
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    table = schedule.table
    costs = columns(schedule, cost)
    hops = np.where(costs.link >= 0, costs.latency + costs.wire, 0.0)
    ticks = _common_denominator([*costs.seconds, *hops])
    seconds = [round(value * ticks) for value in costs.seconds]
    hop = [round(value * ticks) for value in hops]
    horizon = sum(seconds) + sum(hop)
    model = cp_model.CpModel()
    start = [model.new_int_var(0, horizon, "") for _ in seconds]
    end = [start[i] + seconds[i] for i in range(len(start))]
    for number, needs in enumerate(table.needs.tolist()):
        for needed in needs:
            if needed >= 0:
                abroad = table.rank[needed] != table.rank[number]
                arrival = end[needed] + (hop[needed] if abroad else 0)
                model.add(start[number] >= arrival)
    for rank in range(schedule.ranks):
        mine = np.flatnonzero(table.rank == rank).tolist()
        model.add_no_overlap(
            [model.new_interval_var(start[i], seconds[i], end[i], "") for i in mine]
        )
        if cap is not None:
            _add_cap(model, schedule, cost, rank, cap, start, end, horizon)
    if len(set(schedule.microbatches)) == 1:  # they may be numbered as they start
        first = [
            int(table.at[table.slot(FORWARD, m, 0, 0)])
            for m in range(len(schedule.microbatches))
        ]
        for one, other in pairwise(first):
            model.add(start[one] <= start[other])
    makespan = model.new_int_var(0, horizon, "")
    for number in range(len(end)):
        model.add(makespan >= end[number])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # or a later Ctrl-C kills pytest
    solver.parameters.max_deterministic_time = work
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Optimum(solver.objective_value / ticks, status == cp_model.OPTIMAL)


def _add_cap(model, schedule, cost, rank, cap, start, end, horizon):
    """A rank holds a forward's activations until its backward ends, or what the I keeps until its W ends."""
    table = schedule.table
    costs = columns(schedule, cost)
    parts = _common_denominator([*costs.gain, *costs.loss])
    intervals = []
    sizes = []
    for number in np.flatnonzero((table.rank == rank) & (table.kind == FORWARD)):
        slot = int(table.slots[number])
        for kind in (BACKWARD, WEIGHTS):
            freeing = int(table.at[slot + kind])
            if freeing >= 0 and costs.loss[freeing] > 0:
                length = model.new_int_var(0, horizon, "")
                intervals.append(
                    model.new_interval_var(start[int(number)], length, end[freeing], "")
                )
                sizes.append(round(costs.loss[freeing] * parts))
    model.add_cumulative(intervals, sizes, int(cap * parts + 1e-6))


def _common_denominator(values) -> int:
    fractions = {Fraction(float(v)).limit_denominator(MAX_DENOMINATOR) for v in values}
    return lcm(*(fraction.denominator for fraction in fractions))
