"""Measures what an action, and the rest of a step, cost besides computation, on a pipeline of stages that do nothing.

rank 0 | F0 F1 F2 ... B0 B1 B2 ... figures        CPU seconds of a rank and its threads
rank 1 | F0 F1 F2 ... B0 B1 B2 ... figures

rank 0 | F0 B0 figures                            the difference is that of the actions; what both have is the rest
rank 1 | F0 B0 figures

The messages are as large as the real ones. At the end of a step all ranks add up figures, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.ir.action import backward, forward
from penstock.ir.program import lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.runtime.batch import batch_of
from penstock.runtime.comm.comm import Comm
from penstock.runtime.executor import Executor

FEW_MICROBATCHES = 1

MANY_MICROBATCHES = 8

OVERHEAD_STEPS = 8

OVERHEAD_WARM_UP = 4

FIGURES = 128  # that ranks add up at the end of a step, such as the squares of their gradients


class EmptyStage(nn.Module):
    """A stage that takes no time; the first one turns tokens into a hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or zeros if x has tokens."""
        if not x.is_floating_point():
            x = torch.zeros(*x.shape, self.width)
        y: Tensor = _Nothing.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


class _Nothing(torch.autograd.Function):
    """Passes a value on, and its gradient back, as if it depended on a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Overhead(NamedTuple):
    """Processor seconds of a rank beside its computation."""

    action: float  # of each action
    step: float  # of the rest of a step


def empty_schedule(ranks: int, microbatches: int = MANY_MICROBATCHES) -> Schedule:
    """A schedule with all forwards, then all backwards, and one stage per rank."""
    lanes = []
    for rank in range(ranks):
        forwards = [forward(rank, number) for number in range(microbatches)]
        backwards = [backward(rank, number) for number in range(microbatches)]
        lanes.append(forwards + backwards)
    stages = [Stage(rank, rank) for rank in range(ranks)]
    microbatch = MicroBatch(tuple(range(ranks)))
    return schedule_of(stages, [microbatch] * microbatches, lanes)


def measured_overhead(comm: Comm, rows: int, tokens: int, width: int) -> Overhead:
    """The processor seconds of a rank for an action that computes nothing, and for a step without any actions.

    All ranks must call this. Two steps of different lengths tell the two apart.
    """
    lengths = (FEW_MICROBATCHES, MANY_MICROBATCHES)
    steps = [_empty_steps(comm, rows, tokens, width, count) for count in lengths]
    rounds: list[list[float]] = [[], []]
    for turn in range(OVERHEAD_WARM_UP + OVERHEAD_STEPS):
        for step, seconds in zip(steps, rounds, strict=True):
            comm.barrier()
            begin = time.process_time()
            step()
            if turn >= OVERHEAD_WARM_UP:
                seconds.append(time.process_time() - begin)
    medians = torch.tensor([statistics.median(one) for one in rounds])
    comm.add(medians, tuple(range(comm.ranks))).wait()
    few, many = (medians / comm.ranks).tolist()
    return overhead_between(few, many)


def overhead_between(few: float, many: float) -> Overhead:
    """What an action and the rest of a step take, if steps with few and with many micro-batches take so long.

    >>> overhead_between(3.0, 3.0 + 2 * (MANY_MICROBATCHES - FEW_MICROBATCHES))
    Overhead(action=1.0, step=1.0)
    """
    action = max(0.0, many - few) / (2 * (MANY_MICROBATCHES - FEW_MICROBATCHES))
    return Overhead(action, max(0.0, few - 2 * FEW_MICROBATCHES * action))


def _empty_steps(
    comm: Comm, rows: int, tokens: int, width: int, count: int
) -> Callable[[], None]:
    """A step of so many micro-batches, at whose end all ranks know the loss and the norm of the gradients."""
    executor = Executor(
        lower(empty_schedule(comm.ranks, count)),
        {comm.rank: EmptyStage(width)},
        comm,
        lambda y, labels: y[..., 0].sum(),
    )
    microbatches = [torch.zeros(rows, tokens, dtype=torch.long)] * count
    batch = batch_of(microbatches, microbatches)
    everyone = tuple(range(comm.ranks))

    def step() -> None:
        loss = executor.step(batch).loss
        figures = torch.full((FIGURES,), loss, dtype=torch.float64)
        comm.add(figures, everyone).wait()
        float(figures[0])

    return step
