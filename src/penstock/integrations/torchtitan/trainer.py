"""torchtitan's trainer with a plan of Penstock, which is made first and handed to its pipelining.

`pipeline` takes the place of torchtitan's `pipeline_llm`. Everything else is torchtitan's own `Trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError
from penstock.integrations.torchtitan import require_torchtitan
from penstock.integrations.torchtitan.options import PenstockOptions
from penstock.torch_internals import provide_set_timeout
from penstock.view.numbers import write_range, write_size, write_time

require_torchtitan()  # It explains why what is imported next is missing.

# ruff: noqa: E402
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
from torchtitan.trainer import Trainer

from penstock.integrations.torchtitan.pipeline_schedule import (
    PipelineSchedule,
    cut_parts,
)
from penstock.integrations.torchtitan.planning import (
    PipelinePlan,
    forecast_of,
    loss_rank_name,
    plan_pipeline,
    why_no_profile,
)


class PenstockTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's trainer, with pipelines that Penstock plans and runs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's config with a section for Penstock."""

        penstock: PenstockOptions = field(default_factory=PenstockOptions)

    def __init__(self, config: Config) -> None:
        provide_set_timeout()  # or torch 2.13 ends the first step with an error
        super().__init__(use_plan(config))


def with_penstock(
    config: Trainer.Config, options: PenstockOptions | None = None
) -> PenstockTrainer.Config:
    """Return a config of torchtitan's trainer whose pipelines Penstock plans and runs."""
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"{type(config).__qualname__} is not the config of torchtitan's own Trainer: another trainer may call its "
            "pipeline in another way"
        )
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    # torchtitan refuses CUDA graphs in every pipeline.
    values["training"] = replace(config.training, disable_cuda_graphs=True)
    return PenstockTrainer.Config(**values, penstock=options or PenstockOptions())


def use_plan(config: PenstockTrainer.Config) -> PenstockTrainer.Config:
    """Plan the pipeline of a config, and put our pipelining in the place of torchtitan's.

    Every rank plans for itself. The planner counts its work instead of watching the clock, so all of them get the
    same plan.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return config
    options = config.penstock
    planned = plan_pipeline(config, options)
    log_plan(planned)
    if options.forecast:
        log_forecast(config, planned)
    pipelining = partial(pipeline, planned=planned, proves=options.prove)
    config = replace(config)
    config.model_spec = replace(config.model_spec, pipelining_fn=pipelining)
    config.parallelism = replace(
        config.parallelism, pipeline_parallel_schedule=loss_rank_name(planned)
    )
    return config


def log_plan(planned: PipelinePlan) -> None:
    """Log which plan runs."""
    schedule = planned.plan.schedule
    logger.info(
        f"Penstock runs {planned.plan.name} on {schedule.ranks} pipeline ranks: {schedule.parts} parts with "
        f"{list(planned.plan.partition)} layers, {len(schedule.microbatches)} micro-batches, {schedule.slices} "
        f"slices each; the loss is on pipeline rank {planned.last_rank}"
    )


def log_forecast(config: PenstockTrainer.Config, planned: PipelinePlan) -> None:
    """Log the predicted time of a step with its range, and the memory of the fullest rank."""
    predicted = forecast_of(config, config.penstock, planned)
    if predicted is None:
        logger.info(f"Penstock has no forecast: {why_no_profile(config)}")
        return
    sizes = map(sum, zip(predicted.weights, predicted.activations, strict=True))
    logger.info(
        f"Penstock's forecast: {write_time(predicted.seconds, digits=3)} per step "
        f"({write_range(*predicted.range)}), bubble "
        f"{predicted.timeline.bubble:.1%}, {write_size(max(sizes))} on the fullest rank"
    )


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
