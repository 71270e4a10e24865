"""Chimera (Li and Hoefler, 2021): two pipelines in opposite directions over the same ranks, with two weight copies."""

from __future__ import annotations

from penstock.cost.cost import UnitCost
from penstock.errors import ShapeError
from penstock.ir.action import FORWARD, Action
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.schedules.list_scheduling import list_schedule
from penstock.schedules.orders import require_at_least


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Send even micro-batches down the ranks and odd ones up, so that each direction fills the other's gaps.

    Drawn with B twice as long as F (ranks=4, microbatches=4):

    rank 0 | F0 F2 .  F1 B1 -- F3 B3 -- .  B0 -- .  .  B2 --
    rank 1 | .  F0 F1 F2 F3 .  B1 -- B0 -- B3 -- B2 -- .  .
    rank 2 | .  F1 F0 F3 F2 .  B0 -- B1 -- B2 -- B3 -- .  .
    rank 3 | F1 F3 .  F0 B0 -- F2 B2 -- .  B1 -- .  .  B3 --

    Stages 0 to ranks-1 lead down and the others lead up. The two stages of one part are
    replicas, and their gradients are summed.

    The paper runs more micro-batches than ranks in units, one after the other. Here they
    form one stream, which takes 3 * microbatches + 2 * (ranks - 2) in all. No rank holds
    more than `ranks` micro-batches.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise ShapeError(
            f"chimera needs an even number of ranks, not {ranks}; "
            f"the nearest is {ranks + 1}"
        )
    down = [Stage(part, part) for part in range(ranks)]
    up = [Stage(ranks - 1 - part, part) for part in range(ranks)]
    paths = (tuple(range(ranks)), tuple(range(ranks, 2 * ranks)))
    table = [MicroBatch(paths[number % 2]) for number in range(microbatches)]
    if microbatches <= ranks:
        return list_schedule(down + up, table, UnitCost(), cap=ranks)
    return list_schedule(down + up, table, UnitCost(B=1), cap=ranks, priority=_due)


def _due(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """The slot of an action in a stream that starts one micro-batch per slot, where F and B take one slot each."""
    depth = action.stage % schedule.ranks
    turn = depth if action.op.kind == FORWARD else 2 * schedule.ranks - 1 - depth
    return (turn + action.microbatch,)
