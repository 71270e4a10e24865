"""What a step computes: the loss and the gradients of every stage, in float64, with threads as ranks.

registry    every schedule: as it is; sliced and split; all stages recomputed
paths       random schedules, whose paths skip, swap and repeat parts
tied, named, frozen, packed, added, means, recorded, accumulated       on a schedule or two each
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from again_tape import Again
from penstock import REGISTRY, Schedule, lower, make
from penstock.models import document_starts, split, token_loss
from penstock.runtime import Batch, Executor, Mean, add_loss, batch_of, run_threads
from penstock.runtime.executor import RunOptions
from penstock.schedules.transforms import slice_tokens, split_backward
from pipelines import data, gpt, layers_of, llama, own_stages
from random_schedules import random_schedule

TOLERANCE = 1e-12
CUTS = (0, 3, 4, 7)
ALL = frozenset(range(64))
MEAN_WIDTH = 6

Answer = dict[str, object]
Case = Callable[[], Answer]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in REGISTRY:
        found[f"{name}"] = partial(plain, name)
        found[f"{name} sliced split"] = partial(sliced_split, name)
        found[f"{name} recomputed"] = partial(recomputed, name)
    for seed in range(6):
        found[f"paths {seed}"] = partial(paths, seed)
    for name in ("1f1b", "zb-v", "chimera", "zb-h1"):
        found[f"{name} tied"] = partial(tied, name)
    for name in ("1f1b", "zb-v", "hanayo"):
        found[f"{name} named"] = partial(named, name)
    for name in ("1f1b", "zb-h1"):
        for part in (0, 1):
            found[f"{name} frozen {part}"] = partial(frozen, name, part)
    for name in ("1f1b", "terapipe"):
        found[f"{name} packed"] = partial(packed, name)
    found["1f1b added losses"] = partial(added, "1f1b")
    found["zb-h1 added losses recomputed"] = partial(added, "zb-h1", recompute=ALL)
    found["1f1b mean"] = partial(mean_of_labels, "1f1b")
    found["zb-h1 recorded"] = partial(recorded, "zb-h1")
    found["chimera recorded"] = partial(recorded, "chimera")
    found["skip mean of visits"] = partial(mean_of_visits)
    found["1f1b copies in two steps"] = partial(copies_in_two_steps)
    found["dropout recomputed"] = partial(dropout)
    return found


# ---------------------------------------------------------------- running
def small(name: str, ranks: int = 2, microbatches: int = 3) -> Schedule:
    extra = {"slices": 1} if name in ("terapipe", "seq1f1b") else {}
    return make(name, ranks=ranks, microbatches=microbatches, **extra)


def answer_of(
    schedule: Schedule,
    model: nn.Module,
    batches: list[Batch],
    each: Callable[[int], dict[str, Any]] = lambda rank: {},
    loss: Callable[..., Tensor] = token_loss,
    sums: tuple[bool, ...] = (),
    partition: tuple[int, ...] = (),
    **options: Any,
) -> Answer:
    """Losses of steps and of an evaluation, and a sum and a norm of the gradients of each stage."""
    copies = [copy.deepcopy(model) for _ in range(schedule.ranks)]
    program = lower(schedule)

    def work(comm: Any) -> tuple[list[float], dict[str, list[float]]]:
        parts = split(copies[comm.rank], partition or layers_of(schedule))
        mine = own_stages(schedule, parts, comm.rank)
        executor = Executor(program, mine, comm, loss, **options, **each(comm.rank))
        losses = []
        for number, batch in enumerate(batches):
            wanted = sums[number] if sums else True
            losses.append(executor.step(batch, sums=wanted).loss)
        losses.append(executor.evaluate(batches[0]))
        return losses, {f"stage {n}": in_short(part) for n, part in mine.items()}

    return joined(run_threads(schedule.ranks, work, patience=120))


def joined(found: list[tuple[list[float], dict[str, list[float]]]]) -> Answer:
    answer: Answer = {"losses": found[0][0]}
    for losses, stages in found:
        assert losses == found[0][0]
        answer |= stages
    return answer


def in_short(module: nn.Module) -> list[float]:
    """Numbers that change with any gradient, and that no cancellation makes inexact."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not gradients:
        return []
    whole = torch.cat([gradient.flatten() for gradient in gradients]).abs()
    weights = 1 + torch.arange(len(whole), dtype=torch.float64) % 7
    return [len(whole), float((whole * weights).sum()), float(whole.norm())]


# ---------------------------------------------------------------- the registry
def of_llama(
    schedule: Schedule, seeds: tuple[int, ...] = (0,), **options: Any
) -> Answer:
    """The answer of a Llama with a batch of each seed."""
    batches = [data(len(schedule.microbatches), seed=seed) for seed in seeds]
    return answer_of(schedule, llama(sum(layers_of(schedule))), batches, **options)


def plain(name: str) -> Answer:
    return of_llama(small(name))


def cut_and_split(schedule: Schedule) -> Schedule:
    if not any(action.op.value in "IW" for lane in schedule.lanes for action in lane):
        schedule = split_backward(schedule)
    return slice_tokens(schedule, CUTS)


def sliced_split(name: str) -> Answer:
    return of_llama(cut_and_split(small(name)))


def recomputed(name: str) -> Answer:
    return of_llama(small(name), seeds=(0, 0), recompute=ALL)


def paths(seed: int) -> Answer:
    schedule = random_schedule(np.random.default_rng(seed), ends=True)
    batch = data(len(schedule.microbatches), tokens=20, seed=seed)
    partition = (1,) * schedule.parts
    return answer_of(schedule, llama(schedule.parts), [batch], partition=partition)


# ---------------------------------------------------------------- kinds of models and batches
def tied(name: str) -> Answer:
    schedule = small(name)
    model = gpt(sum(layers_of(schedule)), tied=True)
    return answer_of(schedule, model, [data(len(schedule.microbatches))])


def frozen(name: str, part: int) -> Answer:
    schedule = small(name, ranks=3)
    model = llama(3)
    split(model, (1, 1, 1))[part].requires_grad_(False)
    return answer_of(schedule, model, [data(len(schedule.microbatches))])


def packed(name: str) -> Answer:
    schedule = make(name, ranks=2, microbatches=3)
    if schedule.slices == 1:
        schedule = slice_tokens(schedule, CUTS)
    batch = data(3)
    starts = tuple(
        document_starts(torch.tensor([3, 4])).expand(*x.shape) for x in batch.inputs
    )
    batch = Batch(batch.inputs, batch.labels, batch.valid, starts)
    return answer_of(schedule, llama(2), [batch])


def copies_in_two_steps() -> Answer:
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    batches = [data(4), data(4, seed=1)]
    return answer_of(schedule, gpt(2), batches, sums=(False, True))


def mean_of_visits() -> Answer:
    schedule = small("skip", ranks=3, microbatches=4)
    return of_llama(schedule, options=RunOptions(mean=Mean.VISITS))


def recorded(name: str) -> Answer:
    return of_llama(small(name), (0, 1), each=lambda rank: {"tape": Again()})


# ---------------------------------------------------------------- modules of one's own
class Linear(nn.Module):
    """A layer with a dropout, and a loss that it adds."""

    def __init__(self, seed: int, adds: float = 0.0, drops: float = 0.0) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)
        shape = (MEAN_WIDTH, MEAN_WIDTH)
        numbers = torch.randn(shape, generator=dice, dtype=torch.float64)
        self.inner = nn.Linear(*shape, dtype=torch.float64)
        self.inner.weight = nn.Parameter(numbers)
        self.inner.bias = nn.Parameter(numbers[0].clone())
        self.adds = adds
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).tanh()
        if self.drops and self.training:
            y = y * (torch.rand_like(y) >= self.drops)
        if self.adds:
            add_loss(self.adds * y.square().mean())
        return y


class First(Linear):
    """Returns a dict: the main value, a skip connection and its mean."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"x": y, "skip": x * y, "mean": y.mean(-1, keepdim=True)}


class Second(Linear):
    """Returns a dict too, and lets the skip connection travel on."""

    def forward(self, x: Tensor, mean: Tensor) -> dict[str, Tensor]:
        return {"x": super().forward(x) + mean}


class Last(Linear):
    """Asks for the skip connection of the first stage and for a tensor of the batch."""

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + skip) * mask


def square(y: Tensor, labels: Tensor) -> Tensor:
    return (y - labels).square().sum()


def square_mean(y: Tensor, labels: Tensor) -> Tensor:
    return (y - labels).square().mean()


def own_data(microbatches: int, rows: int = 2, tokens: int = 3) -> Batch:
    dice = torch.Generator().manual_seed(9)
    shape = (2, microbatches, rows, tokens, MEAN_WIDTH)
    x, y = torch.randn(shape, generator=dice, dtype=torch.float64)
    return batch_of(list(x), list(y))


def own_answer(
    schedule: Schedule,
    layers: list[nn.Module],
    batch: Batch,
    loss: Callable[..., Tensor] = square,
    **options: Any,
) -> Answer:
    """One layer a part, one module for all ranks, as nothing is replicated."""

    def work(comm: Any) -> tuple[list[float], dict[str, list[float]]]:
        mine = own_stages(schedule, layers, comm.rank)
        executor = Executor(lower(schedule), mine, comm, loss, **options)
        losses = [executor.step(batch).loss for _ in range(2)]
        return losses, {f"stage {n}": in_short(part) for n, part in mine.items()}

    return joined(run_threads(schedule.ranks, work, patience=120))


def named(name: str) -> Answer:
    schedule = small(name)
    layers: list[nn.Module] = [First(0)]
    layers += [Second(number) for number in range(1, schedule.parts - 1)]
    layers.append(Last(schedule.parts))
    if schedule.parts > 3:
        layers[2:-1] = [Linear(number) for number in range(2, schedule.parts - 1)]
    count = len(schedule.microbatches)
    batch = own_data(count)
    mask = (batch.inputs[0] > 0).double()
    batch = Batch(
        batch.inputs, batch.labels, batch.valid, named=({"mask": mask},) * count
    )
    return own_answer(schedule, layers, batch)


def added(name: str, **options: Any) -> Answer:
    schedule = small(name, ranks=3)
    layers: list[nn.Module] = [Linear(number, adds=0.3) for number in range(3)]
    return own_answer(schedule, layers, own_data(3), **options)


def mean_of_labels(name: str) -> Answer:
    schedule = small(name)
    layers: list[nn.Module] = [Linear(0), Linear(1)]
    return own_answer(schedule, layers, own_data(3), square_mean, reduction="mean")


def dropout() -> Answer:
    """One rank, so that the order in which numbers are drawn is certain; the same numbers on any machine."""
    schedule = make("1f1b", ranks=1, microbatches=3)
    layers = OrderedDict((str(n), Linear(n, drops=0.5)) for n in range(2))
    torch.manual_seed(4)
    return own_answer(schedule, [nn.Sequential(layers)], own_data(3), recompute=ALL)
