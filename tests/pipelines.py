"""Runs a model through a schedule on threads, and unsplit, so that tests can compare the two."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock import Schedule, lower
from penstock.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    part_parameters,
    shared_names,
    split,
    token_loss,
)
from penstock.runtime import (
    Batch,
    Comm,
    Executor,
    Tied,
    batch_of,
    run_threads,
)
from penstock.runtime.comm.thread import ThreadComm
from penstock.runtime.executor import RunOptions
from penstock.runtime.step import Result

VOCAB, TOKENS = 61, 7


def llama(layers: int, tied: bool = False) -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab=VOCAB, width=16, layers=layers, heads=4, kv_heads=2, inner=24, tied=tied
    )
    return Llama(config).double()


def gpt(layers: int, tied: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return GPT(
        GPTConfig(
            vocab=VOCAB,
            width=16,
            layers=layers,
            heads=4,
            inner=24,
            positions=32,
            tied=tied,
        )
    ).double()


def exact_norm(norm: nn.Module, x: Tensor) -> Tensor:
    gemma = not hasattr(norm, "variance_epsilon")  # whose weights begin as zeros
    eps = norm.eps if gemma else norm.variance_epsilon
    scale = 1.0 + norm.weight if gemma else norm.weight
    return scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def without_float32(model: nn.Module) -> nn.Module:
    """Replace Hugging Face's RMS norms, which round to float32, by norms that do not."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(exact_norm, module)
    return model


def layers_of(schedule: Schedule) -> tuple[int, ...]:
    """Return a partition with one layer per part; a separate head has no layer."""
    head_alone = (
        schedule.parts > schedule.ranks
        and schedule.stages[-1].rank == 0
        and _is_skip(schedule)
    )
    return (*[1] * (schedule.parts - 1), 0 if head_alone else 1)


def _is_skip(schedule: Schedule) -> bool:
    return len(schedule.stages) == schedule.ranks + 1


def own_stages(
    schedule: Schedule, parts: Sequence[nn.Module], rank: int
) -> dict[int, nn.Module]:
    """Return the parts that a rank runs, by their stages."""
    return {
        number: parts[stage.part]
        for number, stage in enumerate(schedule.stages)
        if stage.rank == rank
    }


def data(microbatches: int, tokens: int = TOKENS, seed: int = 0) -> Batch:
    """Return micro-batches of one and two rows in turn; some labels do not count."""
    draw = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(0, VOCAB, (1 + m % 2, tokens), generator=draw)
        for m in range(microbatches)
    ]
    labels = [torch.randint(0, VOCAB, x.shape, generator=draw) for x in inputs]
    for m, label in enumerate(labels):
        label[0, m % tokens] = -100
    return batch_of(inputs, labels)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]
    results: list[Result]
    executors: list[Executor]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def unsplit(
    schedule: Schedule, model: nn.Module, batches: Sequence[Batch]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and summed gradients of the unsplit model.

    Each micro-batch runs only the parts on its path.
    """
    model = copy.deepcopy(model)
    parts = split(model, layers_of(schedule))
    losses = []
    for batch in batches:
        total = 0.0
        for number, labels in enumerate(batch.labels):
            x = batch.inputs[number]
            for stage in schedule.microbatches[number].path:
                x = parts[schedule.stages[stage].part](x)
            loss = token_loss(x, labels) / batch.valid
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
    return losses, gradients_of(model)


def piped(
    schedule: Schedule,
    model: nn.Module,
    batches: Sequence[Batch],
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    timed: bool = False,
    each: Callable[[int], dict[str, object]] = lambda rank: {},
    partition: Sequence[int] = (),
    connect: Callable[[ThreadComm], Comm] = lambda comm: comm,
    **options: object,
) -> Outcome:
    """Run the schedule with one thread per rank, each with its own copy of the model."""
    partition = partition or layers_of(schedule)
    program = lower(schedule)
    copies = [copy.deepcopy(model) for _ in range(schedule.ranks)]
    executors: dict[int, Executor] = {}

    def work(comm):
        parts = split(copies[comm.rank], partition)
        mine = own_stages(schedule, parts, comm.rank)
        stages = {n: prepare(part) if prepare else part for n, part in mine.items()}
        own = each(comm.rank)
        if not mine:  # no part tells this rank what the others share
            shared = shared_names(parts).items()
            tied = {name: Tied(where, None) for name, where in shared}
            known = (options | own).get("options", RunOptions())
            own |= {"options": replace(known, tied=tied)}
        executor = Executor(
            program,
            stages,
            connect(comm),
            token_loss,
            **options | own,
        )
        executors[comm.rank] = executor
        results = [executor.step(batch, timed) for batch in batches]
        return results, executor.evaluate(batches[0])

    done = run_threads(schedule.ranks, work, patience=300)
    gradients: dict[str, Tensor] = {}
    for stage in schedule.stages:
        part = split(copies[stage.rank], partition)[stage.part]
        for name, parameter in part_parameters(part).items():
            if parameter.grad is not None:
                gradients[f"{stage.rank}:{stage.part}:{name}"] = parameter.grad
    return Outcome(
        [[r.loss for r in results] for results, _ in done],
        [e for _, e in done],
        gradients,
        [r for results, _ in done for r in results],
        [executors[r] for r in range(schedule.ranks)],
    )


def worst(ours: Outcome, theirs: dict[str, Tensor]) -> float:
    """Return the largest difference between a gradient and the unsplit model's."""
    found = 0.0
    for name, gradient in ours.gradients.items():
        other = theirs.get(name.split(":")[2])
        found = max(
            found,
            float((gradient - other).abs().max())
            if other is not None
            else float(gradient.abs().max()),
        )
    return found
