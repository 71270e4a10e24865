"""Hanayo (Liu et al., 2023): stages run over the ranks in waves, for small bubbles with one copy of the weights."""

from __future__ import annotations

from penstock.cost.cost import UnitCost
from penstock.ir.action import BACKWARD, FORWARD, Action
from penstock.ir.schedule import Schedule
from penstock.schedules.list_scheduling import StartLimit, list_schedule
from penstock.schedules.orders import (
    ActionList,
    backwards,
    forwards,
    interleave_queues,
    paths_through,
    require_at_least,
    schedule_through,
    wave_placement,
)
from penstock.sim.simulate import simulate

STREAM_COMM = 0.05  # latency of a hop, in F, at which the orders of a stream compete


def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """Each wave has two stages on each rank; the turns at both ends need no message.

    Drawn with B twice as long as F (ranks=2, microbatches=2, waves=1):

    rank 0 | F0 F1 .  F0 B0 -- F1 B1 -- .  B0 -- .  .  B1 --
    rank 1 | .  F0 F0 F1 F1 .  B0 -- B0 -- B1 -- B1 -- .  .

    The paper's unit has as many micro-batches as ranks, and its order here is that of
    the paper's figures. Fewer micro-batches make a unit with some left out. More would
    be several units in the paper, one after the other, each with its own bubble; here
    each unit runs into the next.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches, waves=waves)
    if microbatches <= ranks:
        return hanayo_unit(ranks, microbatches, waves)
    return hanayo_stream(ranks, microbatches, waves)


def hanayo_unit(ranks: int, microbatches: int, waves: int) -> Schedule:
    """The order of the paper, for at most as many micro-batches as ranks."""
    stages = wave_placement(ranks, waves)
    full = list_schedule(
        stages, paths_through(stages, ranks), UnitCost(), gates=_gates(ranks, waves)
    )
    return schedule_through(stages, microbatches, lambda rank: list(full.lanes[rank]))


def hanayo_stream(ranks: int, microbatches: int, waves: int) -> Schedule:
    """Run any number of micro-batches without a pause between units; no rank holds more than `ranks` of them.

    One wave follows the V of zero bubble with whole backwards, and takes
    3 * microbatches + 2 * (ranks - 1) in all. More waves take the faster of two list
    schedules. One puts backwards first and counts F and B as equally long. The other
    starts each action when a steady stream would, with one micro-batch every half period.
    """
    if waves == 1:
        return _one_wave(ranks, microbatches)
    stages = wave_placement(ranks, waves)
    table = paths_through(stages, microbatches)
    backward_first = list_schedule(stages, table, UnitCost(B=1), ranks)
    on_time = list_schedule(
        stages, table, UnitCost(), ranks, priority=_due, gates=_gates(ranks, waves)
    )
    cost = UnitCost(comm=STREAM_COMM)
    return min(
        backward_first,
        on_time,
        key=lambda schedule: simulate(schedule, cost).makespan,
    )


def _one_wave(ranks: int, microbatches: int) -> Schedule:
    """A stream of one wave.

    Each lane is spelled in letters: f and b are the actions of the rank's stage on the
    way there, F and B those of its stage on the way back.
    """
    built = max(microbatches, 2 * ranks - 1)

    def lane(rank: int) -> ActionList:
        deep = ranks - rank
        back = 2 * ranks - 1 - rank
        letters = (
            "f" * (2 * deep - 1)
            + "Ff" * rank
            + "FB" * deep
            + "fbFB" * (built - ranks)
            + "bB" * rank
            + "b" * deep
        )
        queues = {
            "f": forwards(rank, built),
            "F": forwards(back, built),
            "b": backwards(rank, built),
            "B": backwards(back, built),
        }
        return interleave_queues(letters, queues)

    return schedule_through(wave_placement(ranks, 1), microbatches, lane)


def _due(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """When a steady stream would start the action, in units of one stage's F, with B twice as long."""
    stages = len(schedule.stages)
    waves = stages // (2 * schedule.ranks)
    turn = action.stage
    if action.op.kind != FORWARD:
        turn = stages + 2 * (stages - 1 - action.stage)
    return (turn + 3 * waves * action.microbatch,)


def _gates(ranks: int, waves: int) -> list[StartLimit]:
    """The rules that the paper's figures obey: no leg runs so far ahead that the next leg cannot keep up."""
    stages = 2 * ranks * waves
    gates = []
    for stage in range(ranks):
        mirrored = 2 * ranks - 1 - stage
        gates.append(StartLimit(FORWARD, stage, FORWARD, mirrored, ranks - stage))
    gates += [
        StartLimit(FORWARD, stage, BACKWARD, stage, stages - stage)
        for stage in range(stages)
    ]
    for rank in range(ranks):
        last = stages - 1 - rank
        mirrored = stages - 2 * ranks + rank
        gates.append(StartLimit(BACKWARD, last, BACKWARD, mirrored, ranks - rank))
    return gates
