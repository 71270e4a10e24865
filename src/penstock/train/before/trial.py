"""Trains a small Llama one step through a schedule, and compares all gradients with the unsplit model.

schedule ──► part 0 ─ part 1 ─ ... on threads ──► gradients ─┐
the same weights and tokens, one piece         ──► gradients ─┴─ the largest difference, by name
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.ir import Schedule, Timeline, lower
from penstock.models import Llama, LlamaConfig, part_parameters, split, token_loss
from penstock.runtime import Batch, Comm, Executor, Result, batch_of, run_threads

TRIAL_VOCAB = 61
TRIAL_WIDTH = 16
# Both sides compute in float64, but they may add in another order, and the kernels depend on
# the CPU. Each addition changes a gradient near 1 by about 1e-16; a wrong schedule changes
# it by far more than this tolerance.
GRADIENT_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial."""

    loss: float
    whole_loss: float  # of the unsplit model
    gradients: int  # the number of compared gradients, on all ranks
    worst: float  # the largest difference of any number
    name: str  # the parameter with the largest difference
    timeline: Timeline | None

    @property
    def exact(self) -> bool:
        """Whether the two differ only by rounding."""
        loss_difference = abs(self.loss - self.whole_loss)
        return self.worst < GRADIENT_TOLERANCE and loss_difference < GRADIENT_TOLERANCE


def trial(schedule: Schedule, seed: int = 0) -> TrialResult:
    """Run one step both ways, in float64, with micro-batches of different sizes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab=TRIAL_VOCAB,
        width=TRIAL_WIDTH,
        layers=schedule.parts,
        heads=4,
        kv_heads=2,
        inner=24,
    )
    model = Llama(config).double()
    batch = _random_batch(schedule)
    whole = copy.deepcopy(model)
    whole_loss = _train_unsplit(schedule, whole, batch)
    copies = [copy.deepcopy(model) for _ in range(schedule.ranks)]
    program = lower(schedule)

    def work(comm: Comm) -> Result:
        parts = split(copies[comm.rank], [1] * schedule.parts)
        mine = {}
        for number, stage in enumerate(schedule.stages):
            if stage.rank == comm.rank:
                mine[number] = parts[stage.part]
        executor = Executor(program, mine, comm, token_loss)
        return executor.step(batch, timed=True)

    results = run_threads(schedule.ranks, work)
    return _compare(schedule, copies, whole, results[0], whole_loss)


def _random_batch(schedule: Schedule) -> Batch:
    """Sequences of the planned lengths, or of a few tokens where only shares matter."""
    inputs = []
    for number, microbatch in enumerate(schedule.microbatches):
        tokens = microbatch.tokens * max(1, 8 // microbatch.tokens)
        rows = 1 + number % 2
        inputs.append(torch.randint(0, TRIAL_VOCAB, (rows, tokens)))
    labels = [torch.randint(0, TRIAL_VOCAB, words.shape) for words in inputs]
    return batch_of(inputs, labels)


def _train_unsplit(schedule: Schedule, model: nn.Module, batch: Batch) -> float:
    """Send every micro-batch through the parts on its path, one after the other."""
    parts = split(model, [1] * schedule.parts)
    total = 0.0
    for number, labels in enumerate(batch.labels):
        x: Tensor = batch.inputs[number]
        for stage in schedule.microbatches[number].path:
            x = parts[schedule.stages[stage].part](x)
        loss = token_loss(x, labels) / batch.valid
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def _compare(
    schedule: Schedule,
    copies: Sequence[nn.Module],
    whole: nn.Module,
    result: Result,
    whole_loss: float,
) -> TrialResult:
    expected = dict(whole.named_parameters())
    differences: list[tuple[float, str]] = []
    for stage in schedule.stages:
        part = split(copies[stage.rank], [1] * schedule.parts)[stage.part]
        for name, parameter in part_parameters(part).items():
            difference = _gradient(parameter) - _gradient(expected[name])
            most = float(difference.abs().max())
            differences.append((most, f"{name} on rank {stage.rank}"))
    worst, name = max(differences)
    count = len(differences)
    return TrialResult(result.loss, whole_loss, count, worst, name, result.timeline)


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter; zeros if nothing has used it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
