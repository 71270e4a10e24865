"""Why a rank is idle, read off a measured timeline.

    rank 1   ▓▓▓▓ 1F0 ▓▓▓▓                              ▓▓▓▓ 1B0 ▓▓▓▓
    rank 2                   ▓▓▓▓ 2B0 ▓▓▓▓
                          │     schedule   │ hop │ host │

*Schedule*: an action that it needs is still running; another order might help.
*Hop*: the result is on its way, for no longer than a message takes.
*Host*: everything was there, but the rank had not started yet: launching, bookkeeping, clocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.timeline import Timeline


class Idle(NamedTuple):
    """The idle seconds of each rank by cause.

    Together with the time in which a rank works, they make up the makespan.
    """

    schedule: list[float]
    hop: list[float]
    host: list[float]
    end: list[float]  # after its last action, while others still work


def message_seconds(timeline: Timeline) -> float:
    """The time that a message is on its way, in the median; 0 without messages."""
    seconds = timeline.arrived - timeline.sent
    known = seconds[np.isfinite(seconds)]
    return float(np.median(known)) if len(known) else 0.0


def split_idle_time(timeline: Timeline, hop: float) -> Idle:
    """Split the idle time by cause, if a message takes `hop` seconds."""
    table = timeline.schedule.table
    ranks = timeline.schedule.ranks
    schedule_seconds = np.zeros(ranks)
    hop_seconds = np.zeros(ranks)
    host_seconds = np.zeros(ranks)
    end_seconds = np.zeros(ranks)
    for rank in range(ranks):
        free = 0.0  # when the rank has finished what it has started so far
        for number in range(int(table.first[rank]), int(table.first[rank + 1])):
            ready = 0.0  # when the last action that it needs has ended
            waits_for_message = False
            for needed in table.needs[number].tolist():
                if needed < 0:
                    continue
                needed_end = float(timeline.end[needed])
                ready = max(ready, needed_end)
                is_elsewhere = table.rank[needed] != rank
                if is_elsewhere and needed_end >= free - hop:
                    waits_for_message = True
            start = float(timeline.start[number])
            possible = max(ready, free)
            schedule_seconds[rank] += max(min(ready, start) - free, 0.0)
            delay = max(start - possible, 0.0)
            on_the_way = 0.0
            if waits_for_message:
                on_the_way = min(delay, max(ready + hop - possible, 0.0))
            hop_seconds[rank] += on_the_way
            host_seconds[rank] += delay - on_the_way
            free = max(free, float(timeline.end[number]))
        end_seconds[rank] = timeline.makespan - free
    return Idle(
        schedule_seconds.tolist(),
        hop_seconds.tolist(),
        host_seconds.tolist(),
        end_seconds.tolist(),
    )
