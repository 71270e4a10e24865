"""A timeline for Perfetto (ui.perfetto.dev) and chrome://tracing.

rank 0  [0F0][0F1]            [0B0]        ph X   an action, with stage, part, micro-batch, slice
            └──► s ... f                   ph s,f a message: from where and when it left to what used it
rank 1       [1F0]     [1B0]
activations rank 0  ▁▂▂▂▁                  ph C   bytes held
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from penstock.ir.table import Ints, Table
from penstock.ir.timeline import Timeline
from penstock.view.palette import OP_NAMES, activation_steps

MICRO = 1e6  # a trace counts microseconds
Event = dict[str, object]


def trace(timeline: Timeline) -> str:
    """The text of a trace file.

    >>> from penstock import UnitCost, make, simulate
    >>> text = trace(simulate(make("1f1b", ranks=2, microbatches=2), UnitCost()))
    >>> [event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"][:3]
    ['0F0', '0F1', '0B0']
    """
    users = consumers(timeline.schedule.table)
    events = [*_names(timeline), *_work(timeline, users), *_memory(timeline)]
    return json.dumps(
        {"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")
    )


def consumers(table: Table) -> Ints:
    """The action on another rank that uses each action's message; -1 where there is no message."""
    user = np.full(len(table), -1, dtype=np.int64)
    for column in table.needs.T:
        mine = np.flatnonzero(column >= 0)
        abroad = mine[table.rank[column[mine]] != table.rank[mine]]
        user[column[abroad]] = abroad
    return user


def _names(timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "penstock"}}
    for rank in range(timeline.schedule.ranks):
        yield {
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "name": "thread_name",
            "args": {"name": f"rank {rank}"},
        }
        yield {
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "name": "thread_sort_index",
            "args": {"sort_index": rank},
        }


def _work(timeline: Timeline, users: Ints) -> Iterator[Event]:
    """An action, then the arrows that end and begin at it: a reader binds an arrow to the action before it."""
    stages, sources = timeline.schedule.stages, _sources(users)
    sent = np.where(
        np.isnan(timeline.sent), timeline.end, timeline.sent
    ).tolist()  # unknown: at once
    using = users.tolist()
    for number, (rank, action, start, end) in enumerate(timeline.spans()):
        op, stage, microbatch, piece = action
        yield {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "name": str(action),
            "cat": OP_NAMES[op],
            "ts": start * MICRO,
            "dur": (end - start) * MICRO,
            "args": {
                "stage": stage,
                "part": stages[stage].part,
                "microbatch": microbatch,
                "slice": piece,
            },
        }
        for source in sources.get(number, ()):
            yield {**_arrow("f", rank, source, start), "bp": "e"}
        if using[number] >= 0:
            yield _arrow("s", rank, number, sent[number])


def _sources(users: Ints) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for source in np.flatnonzero(users >= 0).tolist():
        found.setdefault(int(users[source]), []).append(source)
    return found


def _arrow(phase: str, rank: int, source: int, time: float) -> Event:
    return {
        "ph": phase,
        "pid": 0,
        "tid": rank,
        "id": source,
        "name": "message",
        "cat": "message",
        "ts": time * MICRO,
    }


def _memory(timeline: Timeline) -> Iterator[Event]:
    """What a rank holds, whenever that changes."""
    digits = len(str(timeline.schedule.ranks - 1))
    for rank in range(timeline.schedule.ranks):
        name, before = f"activations rank {rank:0{digits}}", None
        times, held = activation_steps(timeline, rank)
        for time, amount in zip(times.tolist(), held.tolist(), strict=True):
            if amount != before:
                yield {
                    "ph": "C",
                    "pid": 0,
                    "name": name,
                    "ts": time * MICRO,
                    "args": {"bytes": amount},
                }
            before = amount
