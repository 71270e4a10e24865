"""Where a rank's time goes while it does nothing, read off a measured timeline.

    rank 1   ▓▓▓▓ 1F0 ▓▓▓▓                              ▓▓▓▓ 1B0 ▓▓▓▓
    rank 2                   ▓▓▓▓ 2B0 ▓▓▓▓
                          │     schedule   │ hop │ host │

*Schedule*: what it needs is not made yet; another order might help. *Hop*: made, and on its way, no longer than a
message takes. *Host*: the rest: everything was there, but the rank had not begun: launching, bookkeeping, the clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.timeline import Timeline


class Idle(NamedTuple):
    """Seconds of each rank (in a list), by cause; together with what it works, the makespan."""

    schedule: list[float]
    hop: list[float]
    host: list[float]
    end: list[float]  # after its last action, while others still work


def idle(timeline: Timeline, hop: float) -> Idle:
    """By cause, where a message takes `hop` seconds."""
    table, ranks = timeline.schedule.table, timeline.schedule.ranks
    schedule, flight, host, end = (np.zeros(ranks) for _ in range(4))
    for rank in range(ranks):
        free = 0.0
        for number in range(int(table.first[rank]), int(table.first[rank + 1])):
            needed = [int(n) for n in table.needs[number] if n >= 0]
            ready = max((float(timeline.end[n]) for n in needed), default=0.0)
            abroad = any(
                table.rank[n] != rank and timeline.end[n] >= free - hop for n in needed
            )
            begin = float(timeline.start[number])
            waited = min(max(ready - free, 0.0), max(begin - free, 0.0))
            rest = max(begin - max(ready, free), 0.0)
            way = min(rest, max(ready + hop - max(ready, free), 0.0)) if abroad else 0.0
            schedule[rank] += waited
            flight[rank] += way
            host[rank] += rest - way
            free = max(free, float(timeline.end[number]))
        end[rank] = timeline.makespan - free
    return Idle(schedule.tolist(), flight.tolist(), host.tolist(), end.tolist())
