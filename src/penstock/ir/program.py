"""A schedule with its communication: per rank a list of instructions that cannot deadlock.

    2F0      run an action                 2F0>3    send what it made to rank 3
    ~2F0     drop what it left here        2F0<1    receive what it made on rank 1

`lower` writes all ranks' instructions down one moment after the other, in the order of a clock that gives each action
one tick: what a tick makes goes out at its end. A send and its receive are one moment:

    tick   moment                    rank 0     rank 1     rank 2
     1     rank 0 runs 0F0           0F0
           0F0 goes from 0 to 1      0F0>1 ───► 0F0<0
     2     rank 0 runs 0F1           0F1
           rank 1 runs 1F0                      1F0
           rank 1 drops 0F0                     ~0F0
           0F1 goes from 0 to 1      0F1>1 ───► 0F1<0
           1F0 goes from 1 to 2                 1F0>2 ───► 1F0<1

Read a column and you have a rank's program. Suppose every send blocks until its receive, and some ranks are stuck: look
at the first moment of the page that has not happened. All moments above it are over, so each rank in it stands exactly
there: it can happen. So nobody is ever stuck. Between two ranks messages come in the order in which they leave, so
they need no tags.

`penstock.ir.verify` proves all that of any program, also one edited by hand, without knowing how `lower` works.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, Table


@dataclass(frozen=True, slots=True)
class RunAction:
    """Do an action; what it makes stays on the rank until freed."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Send what `action`, which ran here, has made, to rank `peer`."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.action}>{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive what `action` has made from rank `peer`, which ran it."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.action}<{self.peer}"


@dataclass(frozen=True, slots=True)
class Free:
    """Drop what `action` left on this rank."""

    action: Action

    def __str__(self) -> str:
        return f"~{self.action}"


Instruction: TypeAlias = RunAction | Send | Receive | Free
InstructionLane: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule, and what each rank does to run it, communication and memory included."""

    schedule: Schedule
    lanes: tuple[InstructionLane, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank} | {' '.join(map(str, lane))}"
            for rank, lane in enumerate(self.lanes)
        )


class Transfer(NamedTuple):
    """What an action has made goes from one rank to another."""

    action: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.action} {self.source}>{self.target}"


# ---------------------------------------------------------------- lowering
def lower(schedule: Schedule) -> Program:
    """The schedule's program: sends as soon as there is something to send, frees right after the last use.

    >>> from penstock.schedules import make
    >>> print(lower(make("1f1b", ranks=2, microbatches=1)))
    rank 0 | 0F0 0F0>1 1B0<1 0B0 ~0F0 ~1B0 ~0B0
    rank 1 | 0F0<0 1F0 ~0F0 1B0 ~1F0 1B0>0 ~1B0
    """
    table = schedule.table
    actions = tuple(chain.from_iterable(schedule.lanes))
    rank, needed, target = (
        table.rank.tolist(),
        table.needs.tolist(),
        table.target().tolist(),
    )
    home, abroad = (last.tolist() for last in _last_uses(table))
    lanes: list[list[Instruction]] = [[] for _ in schedule.lanes]
    for _, tick in groupby(table.order.tolist(), table.tick.tolist().__getitem__):
        leaving = []
        for number in tick:
            lane = lanes[rank[number]]
            lane.append(RunAction(actions[number]))
            lane.extend(
                [
                    Free(actions[n])
                    for n in needed[number]
                    if n >= 0 and number in (home[n], abroad[n])
                ]
            )
            if target[number] >= 0:
                leaving.append(number)
            elif home[number] == number:
                lane.append(Free(actions[number]))
        for number in leaving:
            lane = lanes[rank[number]]
            lane.append(Send(actions[number], target[number]))
            lanes[target[number]].append(Receive(actions[number], rank[number]))
            if home[number] == number:
                lane.append(Free(actions[number]))
    return Program(schedule, tuple(map(tuple, lanes)))


def _last_uses(table: Table) -> tuple[Ints, Ints]:
    """Of each action: the last that needs it on its own rank (itself, if none does), and on the rank it is sent to.

    Actions are numbered along the lanes: the last on a rank has the greatest number.
    """
    home, abroad = np.arange(len(table)), np.full(len(table), -1, dtype=np.int64)
    for column in table.needs.T:
        user = np.flatnonzero(column >= 0)
        needed = column[user]
        local = table.rank[needed] == table.rank[user]
        np.maximum.at(home, needed[local], user[local])
        np.maximum.at(abroad, needed[~local], user[~local])
    return home, abroad
