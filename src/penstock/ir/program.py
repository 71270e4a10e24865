"""A program is a schedule with its communication: for each rank, a list of instructions.

Programs made by `lower` cannot deadlock.

    2F0      run an action                 2F0>3    send its result to rank 3
    ~2F0     free its result               2F0<1    receive its result from rank 1

`lower` writes down the instructions of all ranks moment by moment, in the order of a clock
that gives each action one tick. Results are sent at the end of their tick, and a send and its
receive are one moment:

    tick   moment                    rank 0     rank 1     rank 2
     1     rank 0 runs 0F0           0F0
           0F0 goes from 0 to 1      0F0>1 ───► 0F0<0
     2     rank 0 runs 0F1           0F1
           rank 1 runs 1F0                      1F0
           rank 1 frees 0F0                     ~0F0
           0F1 goes from 0 to 1      0F1>1 ───► 0F1<0
           1F0 goes from 1 to 2                 1F0>2 ───► 1F0<1

A column is the program of a rank. Why can it not deadlock? Suppose that every send blocks until
its receive, and that some ranks are stuck. Look at the first moment on the page that has not
happened. All moments above it are over, so each rank that takes part in it has reached it, and
it can happen: a contradiction. Messages between two ranks arrive in the order in which they
are sent, so they need no tags.

`penstock.ir.verify` proves all this for any program, even one edited by hand, without knowing
how `lower` works.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, Table


@dataclass(frozen=True, slots=True)
class RunAction:
    """Run an action. Its result stays on the rank until it is freed."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the result of an action, which ran here, to rank `peer`."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.action}>{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the result of an action from rank `peer`, which ran it."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.action}<{self.peer}"


@dataclass(frozen=True, slots=True)
class Free:
    """Free the result of an action on this rank."""

    action: Action

    def __str__(self) -> str:
        return f"~{self.action}"


Instruction: TypeAlias = RunAction | Send | Receive | Free
InstructionLane: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule, and the instructions with which each rank runs it."""

    schedule: Schedule
    lanes: tuple[InstructionLane, ...]

    def __str__(self) -> str:
        lines = []
        for rank, lane in enumerate(self.lanes):
            instructions = " ".join(map(str, lane))
            lines.append(f"rank {rank} | {instructions}")
        return "\n".join(lines)


# A rank with at most this many actions records each of them (run.cuda_graphs). With more, micro-batches
# that are not in flight at the same time share recordings.
MAX_RECORDED_ACTIONS = 512


class Transfer(NamedTuple):
    """The result of an action goes from one rank to another."""

    action: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.action} {self.source}>{self.target}"


def links_of(program: Program) -> list[tuple[int, int]]:
    """The pairs of ranks between which messages go, each as (source, target).

    The order is the same on every rank. Links between neighbors alternate, so that most of
    them can be opened at the same time.

    >>> from penstock.schedules import make
    >>> links_of(lower(make("1f1b", ranks=4, microbatches=1)))
    [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)]
    """
    links = set()
    for rank, lane in enumerate(program.lanes):
        for instruction in lane:
            if isinstance(instruction, Send):
                links.add((rank, instruction.peer))
    return sorted(links, key=lambda link: (min(link) % 2, sorted(link), link))


# ---------------------------------------------------------------- lowering
def lower(schedule: Schedule) -> Program:
    """The program of a schedule.

    It sends every result at once, and frees it right after its last use.

    >>> from penstock.schedules import make
    >>> print(lower(make("1f1b", ranks=2, microbatches=1)))
    rank 0 | 0F0 0F0>1 1B0<1 0B0 ~0F0 ~1B0 ~0B0
    rank 1 | 0F0<0 1F0 ~0F0 1B0 ~1F0 1B0>0 ~1B0
    """
    table = schedule.table
    actions = tuple(chain.from_iterable(schedule.lanes))
    rank = table.rank.tolist()
    needs = table.needs.tolist()
    targets = table.target()
    target = targets.tolist()
    last_at_home, last_abroad = _last_uses(table)
    lanes: list[list[Instruction]] = [[] for _ in schedule.lanes]
    for moment in moments(table, targets).tolist():
        number = moment if moment >= 0 else ~moment
        lane = lanes[rank[number]]
        if moment >= 0:
            lane.append(RunAction(actions[number]))
            for needed in needs[number]:
                if needed < 0:
                    continue
                if number in (last_at_home[needed], last_abroad[needed]):
                    lane.append(Free(actions[needed]))
        else:
            lane.append(Send(actions[number], target[number]))
            lanes[target[number]].append(Receive(actions[number], rank[number]))
        leaves_now = moment < 0 or target[number] < 0
        if leaves_now and last_at_home[number] == number:
            lane.append(Free(actions[number]))
    return Program(schedule, tuple(map(tuple, lanes)))


def moments(table: Table, target: Ints) -> Ints:
    """The moments of a schedule's program, in order; `target` is that of the table.

    The number of an action stands for its run, and the inverted number (`~number`) for its message.
    """
    sent = table.order[target[table.order] >= 0]
    every = np.concatenate([table.order, ~sent])
    # In each tick, the runs come first, and then the messages of these runs in the same order.
    place = np.concatenate([2 * table.tick[table.order], 2 * table.tick[sent] + 1])
    return every[np.argsort(place, kind="stable")]


def _last_uses(table: Table) -> tuple[list[int], list[int]]:
    """The last action that needs each action: on its own rank, and on the rank it is sent to.

    An action that its own rank does not need is its own last use there. The actions are
    numbered along the lanes, so the last one on a rank has the largest number.
    """
    at_home = np.arange(len(table))
    abroad = np.full(len(table), -1, dtype=np.int64)
    for column in table.needs.T:
        user = np.flatnonzero(column >= 0)
        needed = column[user]
        local = table.rank[needed] == table.rank[user]
        np.maximum.at(at_home, needed[local], user[local])
        np.maximum.at(abroad, needed[~local], user[~local])
    return at_home.tolist(), abroad.tolist()
