"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

rank 0  [0F0][0F1]            [0B0]        ph X   an action, with stage, part, micro-batch, slice
            └──► s ... f                   ph s,f a message, from its source to the action that uses it
rank 1       [1F0]     [1B0]
sums of rank 0        [part 1][part 0]     ph X   a sum of gradients, beside the actions
activations rank 0  ▁▂▂▂▁                  ph C   bytes held
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from penstock.ir.table import Ints, Table
from penstock.ir.timeline import Timeline
from penstock.view.palette import SUM_NAME, activation_steps

MICROSECONDS = 1e6  # in a second; traces count microseconds
TraceEvent = dict[str, object]


def trace(timeline: Timeline) -> str:
    """The text of a trace file.

    >>> from penstock import UnitCost, make, simulate
    >>> text = trace(simulate(make("1f1b", ranks=2, microbatches=2), UnitCost()))
    >>> [event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"][:3]
    ['0F0', '0F1', '0B0']
    """
    users = consumers(timeline.schedule.table)
    events = [
        *_names(timeline),
        *_work(timeline, users),
        *_sums(timeline),
        *_memory(timeline),
    ]
    return json.dumps(
        {"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")
    )


def consumers(table: Table) -> Ints:
    """The action that uses the message of each action; -1 if it sends none."""
    user = np.full(len(table), -1, dtype=np.int64)
    for column in table.needs.T:
        mine = np.flatnonzero(column >= 0)
        abroad = mine[table.rank[column[mine]] != table.rank[mine]]
        user[column[abroad]] = abroad
    return user


def _names(timeline: Timeline) -> Iterator[TraceEvent]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "penstock"}}
    ranks = timeline.schedule.ranks
    lines = [(rank, f"rank {rank}", 2 * rank) for rank in range(ranks)]
    summing = sorted({rank for one in timeline.sums for rank in one.ranks})
    lines += [(ranks + rank, f"sums of rank {rank}", 2 * rank + 1) for rank in summing]
    for line, name, place in lines:
        yield {
            "ph": "M",
            "pid": 0,
            "tid": line,
            "name": "thread_name",
            "args": {"name": name},
        }
        yield {
            "ph": "M",
            "pid": 0,
            "tid": line,
            "name": "thread_sort_index",
            "args": {"sort_index": place},
        }


def _work(timeline: Timeline, users: Ints) -> Iterator[TraceEvent]:
    """Each action, followed by the arrows that end and begin at it.

    Viewers attach an arrow to the action before it.
    """
    stages = timeline.schedule.stages
    sources: defaultdict[int, list[int]] = defaultdict(list)  # by who uses the message
    for source in np.flatnonzero(users >= 0).tolist():
        sources[int(users[source])].append(source)
    # A message with an unknown time leaves at the end of its action.
    sent = np.where(np.isnan(timeline.sent), timeline.end, timeline.sent).tolist()
    user_list = users.tolist()
    for number, (rank, action, start, end) in enumerate(timeline.spans()):
        op, stage, microbatch, piece = action
        yield {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "name": str(action),
            "cat": op.row.label,
            "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS,
            "args": {
                "stage": stage,
                "part": stages[stage].part,
                "microbatch": microbatch,
                "slice": piece,
            },
        }
        for source in sources[number]:
            yield {**_arrow("f", rank, source, start), "bp": "e"}
        if user_list[number] >= 0:
            yield _arrow("s", rank, number, sent[number])


def _sums(timeline: Timeline) -> Iterator[TraceEvent]:
    """Each sum of gradients, on a line of its own below the actions of each of its ranks."""
    for one in timeline.sums:
        for rank in one.ranks:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": timeline.schedule.ranks + rank,
                "name": one.name,
                "cat": SUM_NAME,
                "ts": one.start * MICROSECONDS,
                "dur": (one.end - one.start) * MICROSECONDS,
                "args": {"ranks": list(one.ranks), "bytes": one.bytes},
            }


def _arrow(phase: str, rank: int, source: int, time: float) -> TraceEvent:
    return {
        "ph": phase,
        "pid": 0,
        "tid": rank,
        "id": source,
        "name": "message",
        "cat": "message",
        "ts": time * MICROSECONDS,
    }


def _memory(timeline: Timeline) -> Iterator[TraceEvent]:
    """The activations of each rank, whenever they change."""
    digits = len(str(timeline.schedule.ranks - 1))
    for rank in range(timeline.schedule.ranks):
        name = f"activations rank {rank:0{digits}}"
        before = None
        times, held = activation_steps(timeline, rank)
        for time, amount in zip(times.tolist(), held.tolist(), strict=True):
            if amount != before:
                yield {
                    "ph": "C",
                    "pid": 0,
                    "name": name,
                    "ts": time * MICROSECONDS,
                    "args": {"bytes": amount},
                }
            before = amount
