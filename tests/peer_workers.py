"""The processes of tests/integrations: the same parts and batch through our executor and through torch's runtime."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock import Schedule, make
from penstock.integrations.torch_pipelining import torch_runtime, torch_stages
from penstock.runtime import ProcessComm, batch_of
from process_workers import WORDS, executor_of, loss_of, model_of, part_of

ROWS, TOKENS = 2, 5
Comparison = tuple[str, float, float]  # the case, the worst loss and the worst gradient


def compare_with_torch(
    comm: ProcessComm, cases: list[tuple[str, dict[str, int]]]
) -> list[Comparison]:
    """Two steps of each schedule, ours and torch's; return the largest differences."""
    results = []
    for name, shape in cases:
        schedule = make(name, **shape)
        results.append((f"{name} {shape}", *compare_schedule(comm, schedule)))
    return results


def compare_schedule(comm: ProcessComm, schedule: Schedule) -> tuple[float, float]:
    ours = model_of(schedule.parts)
    theirs = copy.deepcopy(ours)
    own_losses = run_ours(comm, schedule, ours)
    peer_losses = run_torch(comm, schedule, theirs)
    worst = 0.0
    for part in torch_stages(schedule, comm.rank):
        for one, other in zip(
            part_of(ours, part).parameters(),
            part_of(theirs, part).parameters(),
            strict=True,
        ):
            assert one.grad is not None
            assert other.grad is not None
            worst = max(worst, float((one.grad - other.grad).abs().max()))
    loss = 0.0
    if peer_losses:
        pairs = zip(own_losses, peer_losses, strict=True)
        loss = max(abs(one - other) for one, other in pairs)
    return loss, worst


def data_of(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    size = (microbatches * ROWS, TOKENS)
    x = torch.randint(0, WORDS, size, generator=draw)
    return x, torch.randint(0, WORDS, size, generator=draw)


def run_ours(comm: ProcessComm, schedule: Schedule, model: nn.Module) -> list[float]:
    executor = executor_of(schedule, comm, model)
    losses = []
    for step in range(2):
        x, y = data_of(len(schedule.microbatches), step)
        batch = batch_of(list(x.split(ROWS)), list(y.split(ROWS)))
        losses.append(float(executor.step(batch).loss))
    return losses


def stage_of(part: nn.Module, number: int, parts: int, group: Any = None) -> Any:
    """A part as a stage of torch's runtime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it is imported
        from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415
    return PipelineStage(part, number, parts, torch.device("cpu"), group=group)


def run_torch(comm: ProcessComm, schedule: Schedule, model: nn.Module) -> list[float]:
    """Steps of torch's runtime; the losses are known on the rank of the last stage."""
    numbers = torch_stages(schedule, comm.rank)
    stages = [stage_of(part_of(model, n), n, schedule.parts) for n in numbers]
    valid = len(schedule.microbatches) * ROWS * TOKENS

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels) / valid

    runtime = torch_runtime(schedule, stages, loss, scale_grads=False)
    losses = []
    for step in range(2):
        x, y = data_of(len(schedule.microbatches), step)
        found: list[Tensor] = []
        is_last = schedule.parts - 1 in numbers
        extra = {"target": y, "losses": found} if is_last else {}
        runtime.step(*((x,) if 0 in numbers else ()), **extra)
        if found:
            losses.append(float(torch.stack(found).sum()))
    return losses


# ---------------------------------------------------------------- stages under FSDP2
def run_sharded(comm: ProcessComm) -> float:
    """Two steps of a pipeline of one rank whose stages all processes shard; return the worst gradient."""
    schedule = make("interleaved", ranks=1, microbatches=2, chunks=2)
    whole = model_of(schedule.parts)
    own = copy.deepcopy(whole)
    groups = [dist.new_group([rank]) for rank in range(comm.ranks)]
    mesh = init_device_mesh("cpu", (comm.ranks,))
    parts = [part_of(own, number) for number in torch_stages(schedule, 0)]
    for part in parts:
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    own_group = groups[comm.rank]
    stages = [stage_of(one, n, len(parts), own_group) for n, one in enumerate(parts)]
    runtime = torch_runtime(schedule, stages, loss_of, scale_grads=False)
    inputs = [data_of(2, rank)[0] for rank in range(comm.ranks)]
    for _ in range(2):
        runtime.step(inputs[comm.rank], target=inputs[comm.rank], losses=[])
        for x in inputs:
            (loss_of(whole(x), x) / comm.ranks).backward()
    worst = 0.0
    for number, part in enumerate(parts):
        pairs = zip(part_of(whole, number).parameters(), part.parameters(), strict=True)
        for one, other in pairs:
            gradient = other.grad.full_tensor()  # type: ignore[union-attr]
            worst = max(worst, float((one.grad - gradient).abs().max()))
    return worst
