"""What an action costs beside its op: a pipeline of stages that do nothing, with messages as large as the real ones.

rank 0 | F0 F1 F2 ... B0 B1 B2 ...        CPU seconds of all ranks and their threads, over the number of actions
rank 1 | F0 F1 F2 ... B0 B1 B2 ...
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

MICROBATCHES = 8
OVERHEAD_STEPS = 12  # the first ones only warm up
OVERHEAD_WARM_UP = 4


class EmptyPipeline(nn.Module):
    """Takes no time; on the first stage it makes a hidden state of words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.nothing = (
            width,
            Sleeping(PartCost(Seconds(), Seconds(), Seconds())),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x, as a hidden state."""
        y: Tensor = self.nothing(
            x if x.is_floating_point() else torch.zeros(*x.shape, self.width)
        )
        return y


def time_empty_pipeline(ranks: int) -> Schedule:
    """All forwards, then all backwards, through so many ranks."""
    lanes = [
        [Action(op, rank, m) for op in (Op.F, Op.B) for m in range(MICROBATCHES)]
        for rank in range(ranks)
    ]
    return schedule_of(
        [Stage(r, r) for r in range(ranks)],
        [MicroBatch(tuple(range(ranks)))] * MICROBATCHES,
        lanes,
    )


def overhead_per_action(comm: Comm, rows: int, tokens: int, width: int) -> float:
    """CPU seconds of an action that does nothing but take its input and pass on its result. All ranks call it."""
    stage = {comm.rank: EmptyPipeline(width)}
    executor = Executor(
        lower(time_empty_pipeline(comm.ranks)),
        stage,
        comm,
        lambda y, labels: y[..., 0].sum(),
        width,
    )
    words = [torch.zeros(rows, tokens, dtype=torch.long)] * MICROBATCHES
    batch, took = batch_of(words, words), []
    for _ in range(OVERHEAD_STEPS):
        comm.barrier()
        begin = time.process_time()
        executor.step(batch)
        comm.barrier()
        took.append(time.process_time() - begin)
    found = torch.tensor(
        [statistics.median(took[OVERHEAD_WARM_UP:])], dtype=torch.float64
    )
    comm.add(found, tuple(range(comm.ranks))).wait()
    return float(found) / (2 * MICROBATCHES * comm.ranks)
