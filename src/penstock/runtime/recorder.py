"""From each rank's clock to one `Timeline`, of the same type that the simulator makes.

Clocks of one host agree; those of others are set by pings with rank 0, of which the shortest tells most:

    rank 0  t0 ──────►                  offset = there - (t0 + t1) / 2
    rank r         there ──────►
    rank 0                      t1

A CPU's moments are read off its clock. A GPU's are events on its stream, so that a span is what its kernels took, not
what it took to launch them; they are read when the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from penstock.ir.schedule import Schedule
from penstock.ir.timeline import MEASURED_UNITS, Timeline
from penstock.runtime.comm.comm import Comm, Pending

CLOCK_PINGS = 8
Moment = float | torch.cuda.Event


class Clock:
    """Moments of the device on which a rank's modules are, in seconds of this machine's clock."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.on_gpu = any(
            p.device.type == "cuda" for module in modules for p in module.parameters()
        )
        self.now: Callable[[], Moment] = _event if self.on_gpu else time.perf_counter
        self.zero: Moment = 0.0
        self.zero_seconds = 0.0

    def begin(self) -> None:
        """Sets a GPU's events against the clock; nothing else runs on it meanwhile."""
        if self.on_gpu:
            torch.cuda.synchronize()
            self.zero = _event()
            torch.cuda.synchronize()
            self.zero_seconds = time.perf_counter()

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """Moments as seconds, once they are over."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return [self._second(moment) for moment in moments]

    def _second(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert isinstance(self.zero, torch.cuda.Event)
        return self.zero_seconds + 1e-3 * float(self.zero.elapsed_time(moment))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Recorder:
    """Gathers what the ranks of one schedule have recorded."""

    def __init__(self, schedule: Schedule, comm: Comm) -> None:
        self.schedule, self.comm = schedule, comm
        self.offset: float | None = None  # of this rank's clock against rank 0's

    def gather(
        self, start: Sequence[float], end: Sequence[float], level: Sequence[int]
    ) -> Recording:
        """Begins to bring together what the ranks have recorded. All ranks call it, each with its own."""
        if self.offset is None:
            self.offset = clock_offset(self.comm)
        table, rank = self.schedule.table, self.comm.rank
        columns = torch.zeros(3, len(table), dtype=torch.float64)
        here = slice(int(table.first[rank]), int(table.first[rank + 1]))
        share = 1.0 / table.crowd[table.stage[here]]
        columns[0, here] = torch.tensor(start, dtype=torch.float64) - self.offset
        columns[1, here] = torch.tensor(end, dtype=torch.float64) - self.offset
        columns[2, here] = torch.tensor(level, dtype=torch.float64) * torch.from_numpy(
            share
        )
        return Recording(
            self.schedule,
            columns,
            self.comm.add(columns, tuple(range(self.comm.ranks))),
        )


class Recording:
    """A step's times on their way to every rank."""

    __slots__ = ("columns", "pending", "schedule")

    def __init__(self, schedule: Schedule, columns: Tensor, pending: Pending) -> None:
        self.schedule, self.columns, self.pending = schedule, columns, pending

    def timeline(self) -> Timeline:
        """The timeline, once all times are here."""
        self.pending.wait()
        return _timeline(self.schedule, self.columns)


def _timeline(schedule: Schedule, columns: Tensor) -> Timeline:
    """Columns as a timeline that begins at 0. A message is there when the action that takes it begins."""
    table = schedule.table
    begin, end, held = (column.numpy() for column in columns)
    first = begin.min()
    begin, end = begin - first, end - first
    leaves = table.target() >= 0
    sent, arrived = np.where(leaves, end, np.nan), np.full(len(table), np.nan)
    for column in table.needs.T:
        user = np.flatnonzero(column >= 0)
        abroad = user[table.rank[column[user]] != table.rank[user]]
        arrived[column[abroad]] = begin[abroad]
    return Timeline(
        schedule,
        begin,
        end,
        held,
        np.zeros(schedule.ranks),
        sent,
        arrived,
        np.where(leaves, 1.0, 0.0),
        np.full(len(table), -1, dtype=np.int32),
        MEASURED_UNITS,
    )


def clock_offset(comm: Comm) -> float:
    """How far this rank's clock is ahead of rank 0's. All ranks call it at once."""
    found = 0.0
    for other in range(1, comm.ranks):
        if comm.rank == 0:
            for _ in range(CLOCK_PINGS):
                _echo(comm, other)
        elif comm.rank == other:
            found = min(
                (_ping(comm) for _ in range(CLOCK_PINGS)), key=lambda pair: pair[0]
            )[1]
    return found


def _ping(comm: Comm) -> tuple[float, float]:
    """One ping to rank 0: how long it took, and the offset it shows."""
    begin = time.perf_counter()
    comm.send(torch.zeros(1, dtype=torch.float64), 0).wait()
    there = float(comm.receive((1,), torch.float64, 0).wait())
    end = time.perf_counter()
    return end - begin, (begin + end) / 2 - there


def _echo(comm: Comm, other: int) -> None:
    comm.receive((1,), torch.float64, other).wait()
    comm.send(torch.tensor([time.perf_counter()], dtype=torch.float64), other).wait()
