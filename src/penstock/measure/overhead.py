"""Measures what an action costs besides its computation, on a pipeline of stages that do nothing.

rank 0 | F0 F1 F2 ... B0 B1 B2 ...        CPU seconds of all ranks and their threads, over the number of actions
rank 1 | F0 F1 F2 ... B0 B1 B2 ...

The messages are as large as the real ones.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from penstock.cost.curve import Seconds
from penstock.cost.model import PartCost
from penstock.ir.action import Action, Op
from penstock.ir.program import lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.measure.sleeping import Sleeping
from penstock.runtime.batch import batch_of
from penstock.runtime.comm.comm import Comm
from penstock.runtime.executor import Executor

TIMED_MICROBATCHES = 8
OVERHEAD_STEPS = 12  # with those that only warm up
OVERHEAD_WARM_UP = 4


class EmptyStage(nn.Module):
    """A stage that takes no time; the first one turns tokens into a hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.nothing = Sleeping(PartCost(Seconds(), Seconds(), Seconds()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or zeros if x has tokens."""
        if not x.is_floating_point():
            x = torch.zeros(*x.shape, self.width)
        y: Tensor = self.nothing(x)
        return y


def empty_schedule(ranks: int) -> Schedule:
    """A schedule with all forwards, then all backwards, and one stage per rank."""
    lanes = []
    for rank in range(ranks):
        forwards = [Action(Op.F, rank, number) for number in range(TIMED_MICROBATCHES)]
        backwards = [Action(Op.B, rank, number) for number in range(TIMED_MICROBATCHES)]
        lanes.append(forwards + backwards)
    stages = [Stage(rank, rank) for rank in range(ranks)]
    microbatch = MicroBatch(tuple(range(ranks)))
    return schedule_of(stages, [microbatch] * TIMED_MICROBATCHES, lanes)


def overhead_per_action(comm: Comm, rows: int, tokens: int, width: int) -> float:
    """The CPU seconds of an action that only receives its input and sends its result.

    All ranks must call this.
    """
    schedule = empty_schedule(comm.ranks)
    executor = Executor(
        lower(schedule),
        {comm.rank: EmptyStage(width)},
        comm,
        lambda y, labels: y[..., 0].sum(),
    )
    microbatches = [torch.zeros(rows, tokens, dtype=torch.long)] * TIMED_MICROBATCHES
    batch = batch_of(microbatches, microbatches)
    seconds = []
    for _ in range(OVERHEAD_STEPS):
        comm.barrier()
        begin = time.process_time()
        executor.step(batch)
        comm.barrier()
        seconds.append(time.process_time() - begin)
    median = statistics.median(seconds[OVERHEAD_WARM_UP:])
    total = torch.tensor([median], dtype=torch.float64)
    comm.add(total, tuple(range(comm.ranks))).wait()
    return float(total) / schedule.actions
