"""A schedule of your own: 1F1B with twice the head start, for slow networks.

    rank 0 | F0 F1 F2 F3 F4 B0 F5 B1 ...
    rank 1 | F0 F1 F2 B0 F3 B1 ...
    rank 2 | F0 B0 F1 B1 ...

1F1B runs `ranks - rank` forwards ahead, so each B waits for a message to the far end and back. With
`2 (ranks - rank) - 1` forwards ahead, messages travel while a rank computes. In return a rank holds more
micro-batches, at most `2 ranks - 1`.

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
    """Each rank runs `2 (ranks - rank) - 1` forwards ahead, then backwards and forwards in turn."""
    lanes = []
    for rank in range(ranks):
        ahead = 2 * (ranks - rank) - 1
        forwards = [Action(Op.F, rank, m) for m in range(microbatches)]
        lanes.append(forwards[:ahead])
        for m in range(microbatches):
            lanes[rank] += [Action(Op.B, rank, m), *forwards[m + ahead :][:1]]
    stages = [Stage(rank, part=rank) for rank in range(ranks)]
    path = MicroBatch(path=tuple(range(ranks)))
    return schedule_of(stages, [path] * microbatches, lanes)


def main() -> None:
    """Check the schedule, compare it with 1F1B, and write it to a file."""
    own = eager(ranks=4, microbatches=16)
    known = make("1f1b", ranks=4, microbatches=16)
    messages = verify(lower(own))
    print(f"the schedule is valid; its {len(messages)} messages cannot deadlock")
    for comm in (0.0, 0.25, 0.5):
        ours = simulate(own, UnitCost(comm=comm))
        theirs = simulate(known, UnitCost(comm=comm))
        times = f"makespan {ours.makespan:4g}, 1f1b {theirs.makespan:4g}"
        peaks = f"{ours.peak_activations.max():g} and {theirs.peak_activations.max():g}"
        print(f"message {comm:4} of a forward: {times}; held {peaks} micro-batches")
    path = sys.argv[1] if len(sys.argv) > 1 else "own.json"
    write_plan(Plan(own, "eager 1f1b"), path)


if __name__ == "__main__":
    main()
