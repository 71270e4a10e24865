"""How the gradients of each part are summed in a step whose times were simulated."""

from __future__ import annotations

from penstock.cost.cost import Cost
from penstock.cost.planned_sum import ring_plan
from penstock.cost.wrapped import PlannedSumsCost, link_matrices
from penstock.ir.sums import SumPlan
from penstock.ir.timeline import Timeline
from penstock.sim.completion import sum_turns


def plan_sums(timeline: Timeline, cost: PlannedSumsCost) -> tuple[SumPlan, ...]:
    """The quickest sum of each part, given when each rank is ready for it."""
    plans = []
    for turn in sum_turns(timeline.schedule, cost, timeline.end):
        if turn.bytes > 0:
            plan = cost.plan_sum(turn.parts, turn.ranks, turn.bytes, turn.ready)
            plans.append(plan)
    return tuple(plans)


def plan_rings(timeline: Timeline, cost: Cost) -> tuple[SumPlan, ...]:
    """A ring for each part, over the links that its price assumes."""
    plans = []
    for turn in sum_turns(timeline.schedule, cost, timeline.end):
        if turn.bytes > 0:
            latency, byte = link_matrices(cost, turn.ranks)
            ring = ring_plan(latency, byte, turn.bytes, turn.ranks, turn.parts)
            plans.append(ring)
    return tuple(plans)
