"""A small Llama through a schedule, on threads, beside the same model in one piece: are all gradients the same?

schedule ──► part 0 ─ part 1 ─ ... on threads ──► gradients ─┐
the same weights and tokens, one piece         ──► gradients ─┴─ the largest difference, by name
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.ir.program import lower
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.models import Llama, LlamaConfig, part_parameters, split, token_loss
from penstock.runtime import Batch, Comm, Executor, Result, batch_of, run_threads

TRIAL_VOCAB, TRIAL_WIDTH = 61, 16
# Both ways compute in float64, but they may add in another order, and which kernels run depends on the CPU. That moves
# gradients near 1 by some 1e-16 for each addition; a wrong schedule moves them by far more than this.
TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial found."""

    loss: float
    whole_loss: float  # of the model in one piece
    gradients: int  # how many were compared, on all ranks
    worst: float  # the largest difference of any number in any of them
    name: str  # of the parameter with that difference
    timeline: Timeline | None

    @property
    def exact(self) -> bool:
        """Whether all that differs is rounding."""
        return self.worst < TOLERANCE and abs(self.loss - self.whole_loss) < TOLERANCE


def trial(schedule: Schedule, seed: int = 0) -> Trial:
    """Runs one step both ways, in float64, with micro-batches of different sizes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab=TRIAL_VOCAB,
        width=TRIAL_WIDTH,
        layers=schedule.parts,
        heads=4,
        kv_heads=2,
        inner=24,
    )
    model, batch = Llama(config).double(), _batch(schedule)
    whole = copy.deepcopy(model)
    whole_loss = _in_one_piece(schedule, whole, batch)
    copies = [copy.deepcopy(model) for _ in range(schedule.ranks)]
    program = lower(schedule)

    def work(comm: Comm) -> Result:
        parts = split(copies[comm.rank], [1] * schedule.parts)
        mine = {
            n: parts[stage.part]
            for n, stage in enumerate(schedule.stages)
            if stage.rank == comm.rank
        }
        return Executor(
            program, mine, comm, token_loss, TRIAL_WIDTH, torch.float64
        ).step(batch, timed=True)

    results = run_threads(schedule.ranks, work)
    return _compared(schedule, copies, whole, results[0], whole_loss)


def _batch(schedule: Schedule) -> Batch:
    """Sequences as long as they were planned, or a few tokens where only shares matter."""
    tokens = [m.tokens * max(1, 8 // m.tokens) for m in schedule.microbatches]
    inputs = [
        torch.randint(0, TRIAL_VOCAB, (1 + m % 2, length))
        for m, length in enumerate(tokens)
    ]
    return batch_of(inputs, [torch.randint(0, TRIAL_VOCAB, x.shape) for x in inputs])


def _in_one_piece(schedule: Schedule, model: nn.Module, batch: Batch) -> float:
    """Every micro-batch through the parts on its path, one after the other."""
    parts, total = split(model, [1] * schedule.parts), 0.0
    for number, labels in enumerate(batch.labels):
        x: Tensor = batch.inputs[number]
        for stage in schedule.microbatches[number].path:
            x = parts[schedule.stages[stage].part](x)
        loss = token_loss(x, labels) / batch.valid
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def _compared(
    schedule: Schedule,
    copies: Sequence[nn.Module],
    whole: nn.Module,
    result: Result,
    whole_loss: float,
) -> Trial:
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found: list[tuple[float, str]] = []
    for stage in schedule.stages:
        part = split(copies[stage.rank], [1] * schedule.parts)[stage.part]
        for name, parameter in part_parameters(part).items():
            found.append(
                (
                    _difference(parameter.grad, expected[name]),
                    f"{name} on rank {stage.rank}",
                )
            )
    worst, name = max(found)
    return Trial(result.loss, whole_loss, len(found), worst, name, result.timeline)


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        other = theirs if ours is None else ours
        return 0.0 if other is None else float(other.abs().max())
    return float((ours - theirs).abs().max())
