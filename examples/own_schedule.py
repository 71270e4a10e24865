"""A schedule of your own: 1F1B with twice the head start, for slow networks.

    rank 0 | F0 F1 F2 F3 F4 B0 F5 B1 ...        1F1B: ranks - rank forwards ahead; each B waits for a message to come
    rank 1 | F0 F1 F2 B0 F3 B1 ...              from the far end and back. Here 2 (ranks - rank) - 1: messages are on
    rank 2 | F0 B0 F1 B1 ...                    their way while a rank computes. It holds more: 2 ranks - 1 at most.

    python examples/own_schedule.py own.json    checks it, compares it with 1F1B, writes its three tables
    penstock train --set schedule.name=own.json

The idea is known as eager 1F1B (Zhuang et al. 2022, arXiv 2211.05322).
"""

from __future__ import annotations

import sys

from penstock import (
    Action,
    MicroBatch,
    Op,
    Plan,
    Schedule,
    Stage,
    UnitCost,
    lower,
    make,
    simulate,
    verify,
    write_plan,
)
from penstock.ir import schedule_of


def eager(ranks: int, microbatches: int) -> Schedule:
    """Each rank runs `2 (ranks - rank) - 1` forwards ahead, then one backward and one forward in turn."""
    stages = [Stage(rank, part=rank) for rank in range(ranks)]
    path = MicroBatch(path=tuple(range(ranks)))
    lanes = []
    for rank in range(ranks):
        forwards, backwards = (
            [Action(op, rank, m) for m in range(microbatches)] for op in (Op.F, Op.B)
        )
        ahead = min(2 * (ranks - rank) - 1, microbatches)
        turns = [
            action
            for pair in zip(backwards, forwards[ahead:], strict=False)
            for action in pair
        ]
        lanes.append(forwards[:ahead] + turns + backwards[microbatches - ahead :])
    return schedule_of(stages, [path] * microbatches, lanes)


if __name__ == "__main__":
    own, known = eager(ranks=4, microbatches=16), make("1f1b", ranks=4, microbatches=16)
    print(f"a schedule; its {len(verify(lower(own)))} messages cannot block each other")
    for comm in (0.0, 0.25, 0.5):
        ours, theirs = (simulate(one, UnitCost(comm=comm)) for one in (own, known))
        held = f"{ours.peak_activations.max():g} and {theirs.peak_activations.max():g} micro-batches"
        print(
            f"message {comm:4} of a forward: makespan {ours.makespan:4g}, 1f1b {theirs.makespan:4g}; held {held}"
        )
    write_plan(
        Plan(own, "eager 1f1b"), sys.argv[1] if len(sys.argv) > 1 else "own.json"
    )
