"""The function that takes the place of torchtitan's `pipeline_llm`: from a whole model to this rank's pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import LossFunction
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.logging import logger

from penstock.titan.pipeline_schedule import PipelineSchedule
from penstock.titan.planning import PipelinePlan
from penstock.titan.rank_parts import cut_parts


def pipeline(
    model: nn.Module,
    *,
    planned: PipelinePlan,
    proves: bool,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: BaseModel.Config,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[PipelineSchedule, list[nn.Module], bool, bool]:
    """Return the schedule, the parts of this rank, and whether it has the first and the last stage.

    `planned` and `proves` are ours; torchtitan's trainer passes the rest.
    """
    group: dist.ProcessGroup = parallel_dims.get_mesh("pp").get_group("pp")
    schedule = planned.plan.schedule

    def parallelize(part: nn.Module) -> nn.Module:
        made: nn.Module = parallelize_fn(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        return made

    parts = cut_parts(model, schedule, group.rank(), planned.modules, parallelize)
    for number in parts:
        names = list(planned.modules[number])
        logger.info(f"Penstock: part {number} has the modules {names}")
    pipeline_schedule = PipelineSchedule(
        schedule,
        parts,
        group,
        loss_fn,
        (parallelism.pipeline_parallel_microbatch_size, training.seq_len),
        model_config.dim,
        TORCH_DTYPE_MAP[training.mixed_precision_param],
        device,
        proves,
    )
    has_first = 0 in parts
    has_last = schedule.parts - 1 in parts
    return pipeline_schedule, list(parts.values()), has_first, has_last
