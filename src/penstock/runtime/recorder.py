"""Measures when the actions of a step run on every rank, and makes one `Timeline` of it, as the simulator does.

The ranks of one host read the same clock. The clocks of other hosts are compared with rank 0's by pings, of which the
shortest is the most exact:

    rank 0  t0 ──────►                  offset = there - (t0 + t1) / 2
    rank r         there ──────►
    rank 0                      t1

A moment on a CPU is read from its clock. A moment on a GPU is an event on its stream, so that a span is the time of the
kernels and not of their launch. Events are read when the step is over.
"""

from __future__ import annotations

import gc
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan
from penstock.ir.timeline import MEASURED_UNITS, Sum, Timeline
from penstock.ir.verify_sums import ordered_sums
from penstock.runtime.comm.comm import Comm, Pending
from penstock.torch_internals import sleep_until_done

CLOCK_PINGS = 8

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of Linux: another one on each host

Moment = float | torch.cuda.Event


class Clock:
    """Notes moments on the device of a rank's modules, and converts them to seconds of this host's clock."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.on_gpu = any(
            p.device.type == "cuda" for module in modules for p in module.parameters()
        )
        self.now: Callable[[], Moment] = _event if self.on_gpu else time.perf_counter
        self.zero: Moment = 0.0
        self.zero_seconds = 0.0

    def begin(self) -> None:
        """Relate the events of a GPU to the host's clock, while nothing else runs on the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
            self.zero = _event()
            torch.cuda.synchronize()
            self.zero_seconds = time.perf_counter()

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """Convert moments to seconds, once they are over."""
        if self.on_gpu:
            sleep_until_done()
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


class SumTimes(NamedTuple):
    """When a rank had its gradients for a sum, when it had the sum, and the bytes of the gradients."""

    begin: float
    end: float
    bytes: float


class Recorder:
    """Gathers the times that the ranks of one schedule have measured, and those of its planned sums."""

    def __init__(
        self, schedule: Schedule, comm: Comm, sums: Sequence[SumPlan] = ()
    ) -> None:
        self.schedule = schedule
        self.comm = comm
        self.sums = ordered_sums(schedule, sums)
        self.offset: float | None = None  # seconds ahead of rank 0's clock

    def gather(
        self,
        start: Sequence[float],
        end: Sequence[float],
        level: Sequence[int],
        sums: Mapping[tuple[int, ...], SumTimes],
    ) -> Recording:
        """Begin to gather the times of all ranks. All ranks call it, each with its own times."""
        if self.offset is None:
            self.offset = clock_offset(self.comm)
        table = self.schedule.table
        rank = self.comm.rank
        # Behind the actions, there is a place for each rank in each sum.
        places = len(table) + len(self.sums) * self.comm.ranks
        columns = torch.zeros(3, places, dtype=torch.float64)
        here = slice(int(table.first[rank]), int(table.first[rank + 1]))
        share = 1.0 / table.stages_on_rank[table.stage[here]]
        columns[0, here] = torch.tensor(start, dtype=torch.float64) - self.offset
        columns[1, here] = torch.tensor(end, dtype=torch.float64) - self.offset
        columns[2, here] = torch.tensor(level, dtype=torch.float64) * torch.from_numpy(
            share
        )
        for number, plan in enumerate(self.sums):
            times = sums.get(plan.parts)
            if times is not None:
                place = len(table) + number * self.comm.ranks + rank
                columns[0, place] = times.begin - self.offset
                columns[1, place] = times.end - self.offset
                columns[2, place] = times.bytes
        return Recording(
            self.schedule,
            self.sums,
            columns,
            self.comm.add(columns, tuple(range(self.comm.ranks))),
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """The times of a step, on their way to every rank."""

    schedule: Schedule
    sums: Sequence[SumPlan]
    columns: Tensor
    pending: Pending

    def timeline(self) -> Timeline:
        """Wait for all times, and return the timeline."""
        self.pending.wait()
        actions = len(self.schedule.table)
        timeline = _timeline(self.schedule, self.columns[:, :actions])
        if not self.sums:
            return timeline
        first = float(self.columns[0, :actions].min())
        of_sums = self.columns[:, actions:].view(3, len(self.sums), -1)
        return replace(timeline, sums=_sums(self.sums, of_sums, first))


def _sums(plans: Sequence[SumPlan], columns: Tensor, zero: float) -> tuple[Sum, ...]:
    """The sums of a step that began at `zero`. A sum begins when the last rank is ready for it."""
    sums = []
    for plan, begin, end, size in zip(plans, *columns, strict=True):
        if not float(size.max()):
            continue  # This step did not sum.
        ranks = tuple(sorted(plan.ranks))
        members = list(ranks)
        name = f"part {plan.parts[0]}" if len(plan.parts) == 1 else "tied weights"
        start = float(begin[members].max()) - zero
        done = float(end[members].max()) - zero
        sums.append(Sum(name, ranks, start, done, float(size.max()), -1))
    return tuple(sums)


def _timeline(schedule: Schedule, columns: Tensor) -> Timeline:
    """A timeline that begins at 0. A message arrives, as far as we know, when the action that needs it begins."""
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
    """The seconds by which this rank's clock is ahead of rank 0's. All ranks call it at the same time.

    A ping takes half of its time each way. Even on one host, pings would find some microseconds, so ranks that read the
    same clock do not believe them.
    """
    offset = 0.0
    for other in range(1, comm.ranks):
        if comm.rank == 0:
            for _ in range(CLOCK_PINGS):
                _echo(comm, other)
        elif comm.rank == other:
            pings = [_ping(comm) for _ in range(CLOCK_PINGS)]
            shortest = min(pings, key=lambda ping: ping.seconds)
            offset = 0.0 if shortest.clock == clock_id() else shortest.offset
    return offset


def clock_id() -> float:
    """A number that the processes of this host share, and no other host has; a float64 holds all of its 48 bits."""
    if BOOT_ID.exists():
        return float(int(BOOT_ID.read_text()[-13:], 16))
    return float(uuid.getnode())


class Ping(NamedTuple):
    """How long a ping to rank 0 took, the offset that it shows, and which clock rank 0 reads."""

    seconds: float
    offset: float
    clock: float


def _ping(comm: Comm) -> Ping:
    begin = time.perf_counter()
    comm.send(torch.zeros(1, dtype=torch.float64), 0).wait()
    there, clock = comm.receive((2,), torch.float64, 0).wait().tolist()
    end = time.perf_counter()
    return Ping(end - begin, (begin + end) / 2 - there, clock)


def _echo(comm: Comm, other: int) -> None:
    comm.receive((1,), torch.float64, other).wait()
    answer = torch.tensor([time.perf_counter(), clock_id()], dtype=torch.float64)
    comm.send(answer, other).wait()


# ---------------------------------------------------------------- collector
# Pauses the garbage collector of Python while ranks run a step.
#
#     rank 0   ├── walks ──────┤
#     rank 1         ├── walks ─────────┤
#     collector  on  │ off              │ on
#
# Ranks may be threads of one process, which has one collector. So the first one switches it off, and the last one
# switches it on again. If each rank switched it back to what it had found, one that began late would find it off, and
# could leave it off for good.


class Pauses:
    """The pauses that are under way in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_on = False  # before the first of them


_pauses = Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest; afterwards it does what it did before, unless another thread still wants it to rest."""
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.was_on = gc.isenabled()
            gc.disable()
        _pauses.count += 1
    try:
        yield
    finally:
        with _pauses.lock:
            _pauses.count -= 1
            if _pauses.count == 0 and _pauses.was_on:
                gc.enable()
