"""Hanayo (Liu et al., 2023): stages in waves over the ranks; small bubbles with one copy of the weights."""

from __future__ import annotations

from penstock.cost.unit import UnitCost
from penstock.ir.action import Action, Op
from penstock.ir.schedule import Schedule, schedule_of
from penstock.schedules.listing import Gate, list_schedule
from penstock.schedules.orders import (
    backwards,
    forwards,
    interleave_queues,
    only_first,
    paths_through,
    require_at_least,
    wave_placement,
)
from penstock.sim.simulate import simulate


def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """Two stages a wave on each rank; the turns at both ends cost no message. With B twice F
    (ranks=2, microbatches=2, waves=1):

    rank 0 | F0 F1 .  F0 B0 -- F1 B1 -- .  B0 -- .  .  B1 --
    rank 1 | .  F0 F0 F1 F1 .  B0 -- B0 -- B1 -- B1 -- .  .

    As many micro-batches as ranks is the unit of the paper, in the order of its figures; fewer are a unit with some
    left out. More would be, in the paper, one unit after the other, each with its bubble; here one runs into the next.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, waves=waves)
    if microbatches <= ranks:
        return unit(ranks, microbatches, waves)
    return stream(ranks, microbatches, waves)


def unit(ranks: int, microbatches: int, waves: int) -> Schedule:
    """The paper's order, for at most as many micro-batches as ranks."""
    stages = wave_placement(ranks, waves)
    full = list_schedule(
        stages, paths_through(stages, ranks), UnitCost(), gates=_gates(ranks, waves)
    )
    lanes = [only_first(list(lane), microbatches) for lane in full.lanes]
    return schedule_of(stages, paths_through(stages, microbatches), lanes)


def stream(ranks: int, microbatches: int, waves: int) -> Schedule:
    """Any number of micro-batches without a pause between units, no more than `ranks` of them held on a rank.

    One wave follows zero bubble's V, its backwards whole: 3 * microbatches + 2 * (ranks - 1) in all. More waves are the
    better, at a hop of 1/20 F, of two list schedules: backwards first, counting F and B alike; or each action due when
    a stream of micro-batches, one every half period, would have it.
    """
    if waves == 1:
        return _one_wave(ranks, microbatches)
    stages = wave_placement(ranks, waves)
    table = paths_through(stages, microbatches)
    alike = list_schedule(stages, table, UnitCost(B=1), ranks)
    due = list_schedule(
        stages, table, UnitCost(), ranks, priority=_due, gates=_gates(ranks, waves)
    )
    return min(
        alike,
        due,
        key=lambda schedule: simulate(schedule, UnitCost(comm=0.05)).makespan,
    )


def _one_wave(ranks: int, microbatches: int) -> Schedule:
    """Small letters for the way there, capitals for the way back: f b the one stage of a rank, F B the other."""
    stages, full = wave_placement(ranks, 1), max(microbatches, 2 * ranks - 1)
    lanes = []
    for rank in range(ranks):
        deep, back = ranks - rank, 2 * ranks - 1 - rank
        word = (
            "f" * (2 * deep - 1)
            + "Ff" * rank
            + "FB" * deep
            + "fbFB" * (full - ranks)
            + "bB" * rank
            + "b" * deep
        )
        queues = {
            "f": forwards(rank, full),
            "F": forwards(back, full),
            "b": backwards(rank, full),
        }
        queues["B"] = backwards(back, full)
        lanes.append(only_first(interleave_queues(word, queues), microbatches))
    return schedule_of(stages, paths_through(stages, microbatches), lanes)


def _due(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """In units of one stage's F: when a stream would have the action, B taking two."""
    stages = len(schedule.stages)
    waves = stages // (2 * schedule.ranks)
    turn = (
        action.stage if action.op is Op.F else stages + 2 * (stages - 1 - action.stage)
    )
    return (turn + 3 * waves * action.microbatch,)


def _gates(ranks: int, waves: int) -> list[Gate]:
    """What the paper's figures obey: no leg runs further ahead of the one that follows it than it can use."""
    stages = 2 * ranks * waves
    gates = [
        Gate(Op.F, stage, Op.F, 2 * ranks - 1 - stage, ranks - stage)
        for stage in range(ranks)
    ]
    gates += [Gate(Op.F, stage, Op.B, stage, stages - stage) for stage in range(stages)]
    for rank in range(ranks):
        last, mirrored = stages - 1 - rank, stages - 2 * ranks + rank
        gates.append(Gate(Op.B, last, Op.B, mirrored, ranks - rank))
    return gates
