"""Runs a schedule of ours on torch's own pipeline runtime, with our proven order of messages.

    numbers = torch_stages(schedule, rank)                   the stages of this rank, by torch's numbers
    stages = [PipelineStage(part[n], n, total, device) ...]  torch's own class
    runtime = torch_runtime(schedule, stages, loss)          has torch's `step` and `eval`
    runtime.step(x, target=y, losses=losses)

Every placement works, waves included. A schedule with token slices, replicas or partial paths is refused, because
torch's runtime has none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.errors import ShapeError
from penstock.formats.torch_csv import installed_torch_waits, torch_rows
from penstock.ir.program import lower
from penstock.ir.schedule import Schedule
from penstock.ir.verify import verify
from penstock.torch_internals import schedule_runtime

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti


def torch_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank, by the numbers that torch gives them: their parts."""
    return tuple(sorted(one.part for one in schedule.stages if one.rank == rank))


def torch_runtime(
    schedule: Schedule,
    stages: Sequence[PipelineStage],
    loss: Callable[..., Tensor] | None = None,
    scale_grads: bool = True,
) -> PipelineScheduleMulti:
    """torch's runtime for this rank, which runs a schedule with the messages of `lower`.

    `stages` are those of this rank. With `scale_grads`, torch divides gradients by the number of micro-batches.
    """
    if not stages:
        raise ShapeError(
            "torch's runtime needs at least one stage on each rank\n"
            "  torch_stages(schedule, rank) has the numbers of a rank's stages"
        )
    rank = stages[0].group_rank
    given = tuple(sorted(stage.stage_index for stage in stages))
    expected = torch_stages(schedule, rank)
    if given != expected:
        raise ShapeError(
            f"rank {rank} has the stages {_listed(expected)}, but {_listed(given)} are given"
        )
    program = lower(schedule)
    verify(program)
    rows = torch_rows(program, installed_torch_waits())
    runtime: PipelineScheduleMulti = schedule_runtime(
        stages, len(schedule.microbatches), loss, rows, scale_grads
    )
    return runtime


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "(none)"
