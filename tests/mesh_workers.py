"""The processes of tests/train/test_mesh.py: each runs cases and compares them with the unsplit model."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock import Plan, make
from penstock.config import ModelConfig, ParallelConfig
from penstock.formats import load_plan
from penstock.ir import lower
from penstock.models import IGNORED_LABEL, even_partition, token_loss
from penstock.runtime import (
    Executor,
    ProcessComm,
    batch_of,
    cut_share,
    local_share,
    watching,
)
from penstock.runtime.executor import RunOptions
from penstock.train.history import Counts, OwnNumbers
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.optimizer import Gradients, Optimizer
from penstock.train.weights import (
    Sizes,
    draw_parameters,
    hold,
    hold_whole,
    place_of,
    sizes_of,
)
from trainings import SMALL, VOCAB, corpus

CPU, TOKENS = torch.device("cpu"), 6


@dataclass(frozen=True)
class Case:
    """A schedule, a mesh and a model."""

    name: str = "1f1b"
    shape: dict[str, int] = field(default_factory=dict)
    mesh: ParallelConfig = field(default_factory=ParallelConfig)
    family: str = "llama"
    tied: bool = False
    recompute: bool = False
    passes: int = 1

    def sizes(self, parts: int) -> Sizes:
        model = ModelConfig(
            self.family,
            layers=max(parts, 2),
            hidden_size=16,
            heads=4,
            kv_heads=2,
            intermediate_size=24,
            tie_embeddings=self.tied,
        )
        return sizes_of(model, VOCAB, TOKENS)


def gradients(
    comm: ProcessComm, cases: list[Case], device: str = "cpu"
) -> list[dict[str, float]]:
    """Return how far loss, gradients and norm are from the unsplit model's, for each case."""
    torch.set_default_dtype(torch.float64)
    return [_gradients(comm, case, torch.device(device)) for case in cases]


def _gradients(comm: ProcessComm, case: Case, device: torch.device) -> dict[str, float]:
    schedule = make(case.name, **{"ranks": 2, "microbatches": 2, **case.shape})
    sizes = case.sizes(schedule.parts)
    partition = even_partition(sizes.layers, schedule.parts)
    place = place_of(comm, case.mesh, schedule.ranks, device)
    holding = hold(sizes, schedule, partition, place.pipeline.rank, device, place)
    draw_parameters(holding, 5)
    executor = Executor(
        lower(schedule),
        holding.stages,
        place.pipeline,
        token_loss,
        options=RunOptions(tied=holding.tied),
        recompute=frozenset(holding.stages if case.recompute else ()),
    )
    count = len(schedule.microbatches)
    inputs, labels = _data(count * case.mesh.dp_shard * case.passes)
    inputs, labels = ([x.to(device) for x in each] for each in (inputs, labels))
    valid = sum(int((y != IGNORED_LABEL).sum()) for y in labels)
    loss = 0.0
    for turn in range(case.passes):
        first = (turn * case.mesh.dp_shard + place.shard) * count
        here = slice(first, first + count)
        result = executor.step(batch_of(inputs[here], labels[here], valid))
        loss += result.loss if place.speaks else 0.0
    gradients = Gradients(holding, comm, device)
    gradients.begin()
    total, norm, _, _ = gradients.measure(
        loss, OwnNumbers(0, 0), Counts(0, 0, 0, 0, 0, 0)
    )
    everything = hold_whole(sizes)
    draw_parameters(everything, 5)
    expected = 0.0
    for x, y in zip(inputs, labels, strict=True):
        one = token_loss(everything.stages[0](x.cpu()), y.cpu()) / valid
        one.backward()
        expected += float(one.detach())
    theirs = {name: parameter.grad for name, parameter in everything.parameters.items()}
    wrong = [
        _apart(parameter.grad, theirs[name], parameter)
        for name, parameter in holding.parameters.items()
    ]
    whole_norm = float(
        torch.nn.utils.get_total_norm([g for g in theirs.values() if g is not None])
    )
    held = sum(local_share(p).numel() for p in holding.parameters.values())
    return {
        "gradient": max(wrong),
        "loss": abs(total - expected),
        "norm": abs(norm - whole_norm),
        "held": held,
        "all": sum(p.numel() for p in everything.parameters.values()),
    }


def _data(count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return micro-batches of different sizes; some labels do not count."""
    numbers = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(0, VOCAB, (1 + m % 2, TOKENS), generator=numbers)
        for m in range(count)
    ]
    labels = [torch.randint(0, VOCAB, x.shape, generator=numbers) for x in inputs]
    for m, y in enumerate(labels):
        y[0, : m % 4] = IGNORED_LABEL
    return inputs, labels


def _apart(ours: Tensor | None, theirs: Tensor | None, parameter: Tensor) -> float:
    assert ours is not None
    assert theirs is not None
    here = local_share(ours)
    return (
        float((here.cpu() - cut_share(theirs, parameter)).abs().max())
        if here.numel()
        else 0.0
    )


# ---------------------------------------------------------------- training
def trains(
    comm: ProcessComm,
    folder: str,
    case: Case,
    steps: int,
    resume: bool = False,
    until: int = 0,
) -> int:
    """Run the training of tests/trainings.py on a mesh; stop early after step `until`."""
    given = {"ranks": 2, "microbatches": 2, **case.shape}
    schedule = make(case.name, **given)
    config = replace(
        SMALL,
        model=replace(SMALL.model, family=case.family, tie_embeddings=case.tied),
        schedule=replace(
            SMALL.schedule, name=case.name, microbatches=len(schedule.microbatches)
        ),
        parallel=replace(case.mesh, pp=2),
        run=replace(SMALL.run, steps=steps, accumulate=case.passes, eval_every=steps),
    )
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    job = Job(
        config, Plan(schedule, case.name), sizes, corpus(config), Path(folder), resume
    )
    trainer = Trainer(job, comm)
    return trainer.run(lambda: bool(until) and trainer.step + 1 >= until).step


def trains_along(
    comm: ProcessComm,
    folder: str,
    plan: str,
    meshes: dict[str, ParallelConfig],
    steps: int,
) -> None:
    """Train along the paths of a plan, on one mesh after the other, each in its own folder."""
    found = load_plan(plan)
    for name, mesh in meshes.items():
        shape = replace(
            SMALL.schedule, name="own", microbatches=len(found.schedule.microbatches)
        )
        config = replace(
            SMALL,
            schedule=shape,
            parallel=replace(mesh, pp=2),
            run=replace(SMALL.run, steps=steps),
        )
        sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
        Trainer(
            Job(config, found, sizes, corpus(config), Path(folder) / name), comm
        ).run()


# ---------------------------------------------------------------- memory
def peaks(comm: ProcessComm, meshes: list[ParallelConfig], sizes: Sizes) -> list[int]:
    """Return the peak memory of two steps of this process, in bytes, for each mesh."""
    torch.set_num_threads(1)
    small = sizes_of(
        ModelConfig(
            layers=2, hidden_size=16, heads=4, kv_heads=4, intermediate_size=24
        ),
        VOCAB,
        TOKENS,
    )
    found = []
    for mesh in meshes:
        _steps(comm, mesh, small)  # costs that occur once per process
        found.append(_steps(comm, mesh, sizes))
    return found


def _steps(comm: ProcessComm, mesh: ParallelConfig, sizes: Sizes) -> int:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    schedule = make("gpipe", ranks=1, microbatches=1)
    place = place_of(comm, mesh, 1, CPU)
    holding = hold(sizes, schedule, (sizes.layers,), 0, CPU, place)
    executor = Executor(lower(schedule), holding.stages, place.pipeline, token_loss)
    for parameter in holding.parameters.values():
        # Drawing random weights would take long.
        local_share(parameter).detach().fill_(0.01)
    optimizer = Optimizer(holding.parameters, SMALL.optimizer)
    for _ in range(2):
        executor.step(batch_of(*_data(1)))
        optimizer.step(1.0)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# ---------------------------------------------------------------- trouble
def sleeps(comm: ProcessComm) -> None:
    """Let rank 1 of one of two pipelines that share layers fall asleep."""
    schedule, mesh = make("1f1b", ranks=2, microbatches=4), ParallelConfig(tp=2)
    place = place_of(comm, mesh, schedule.ranks, CPU)
    sizes = Case().sizes(schedule.parts)
    holding = hold(
        sizes,
        schedule,
        even_partition(sizes.layers, schedule.parts),
        place.pipeline.rank,
        CPU,
        place,
    )
    draw_parameters(holding, 5)
    executor = Executor(
        lower(schedule),
        holding.stages,
        place.pipeline,
        token_loss,
        options=RunOptions(tied=holding.tied),
    )
    if place.pipeline.rank == 1 and place.tensor == 1:
        holding.stages[1].register_forward_pre_hook(lambda *_: time.sleep(600))
    with watching(executor):
        executor.step(batch_of(*_data(4)))
