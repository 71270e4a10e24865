"""torchtitan's trainer with a plan of Penstock, which is made first and handed to its pipelining.

torchtitan's config ──► Config (`workload_config`) ──► Plan (`penstock.plan.planner`) ──► PipelinePlan
sizes of the model        what our planner reads          schedule and layers              modules of each part

`pipeline` takes the place of torchtitan's `pipeline_llm`. Everything else is torchtitan's own `Trainer`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.config import (
    AUTO,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    check_config,
)
from penstock.cost import Profile, RowProfiles
from penstock.cost.gpus import GPUS, Gpu, analytic_profile, gpu_of
from penstock.cost.profile import tile_of
from penstock.errors import ConfigError, refuse_first
from penstock.formats import read_row_profiles
from penstock.integrations.torchtitan import require_torchtitan
from penstock.integrations.torchtitan.options import (
    PenstockOptions,
    modules_of,
    partition_of,
    refuse_other_parallelism,
)
from penstock.ir import Plan
from penstock.plan.planner import plan_run
from penstock.plan.space import Limits
from penstock.plan.workload import USABLE_SHARE, Hardware, workload_of
from penstock.schedules.coverage import visits_all_parts
from penstock.shaped import write_shape
from penstock.torch_internals import provide_set_timeout
from penstock.train.before.forecast import Forecast, forecast
from penstock.train.before.start import plan_workload
from penstock.view.numbers import write_range, write_size, write_time

require_torchtitan()  # It explains why what is imported next is missing.

# ruff: noqa: E402
from torchtitan.components.loss import LossFunction
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part as default_modules,
)
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from penstock.integrations.torchtitan.attention import why_unsliceable
from penstock.integrations.torchtitan.pipeline_schedule import (
    Pipelined,
    PipelineSchedule,
    cut_parts,
)

SPMD_TYPES = "spmd_types"  # torchtitan's default for --parallelism.spmd_backend
FIRST_RANK_NAME = "ZBVZeroBubble"  # torchtitan reads the loss on rank 0
LAST_RANK_NAME = "1F1B"  # torchtitan reads the loss on the last rank


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
    pipelining = partial(pipeline, planned=planned)
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
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    device: torch.device,
    model_config: BaseModel.Config,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
    **others: Any,
) -> Pipelined:
    """Return the schedule, the parts of this rank, and whether it has the first and the last stage.

    `planned` is ours; torchtitan's trainer passes the rest.
    """
    group = parallel_dims.get_mesh("pp").get_group("pp")
    schedule = planned.plan.schedule

    def parallelize(part: nn.Module) -> nn.Module:
        made: nn.Module = parallelize_fn(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            **others,
        )
        return made

    parts = cut_parts(model, schedule, group.rank(), planned.modules, parallelize)
    for number in parts:
        names = list(planned.modules[number])
        logger.info(f"Penstock: part {number} has the modules {names}")
    return PipelineSchedule(
        schedule,
        parts,
        group,
        loss_fn,
        (parallelism.pipeline_parallel_microbatch_size, training.seq_len),
        model_config.dim,
        TORCH_DTYPE_MAP[training.mixed_precision_param],
        device,
        planned.proves,
    ).with_parts()


# ---------------------------------------------------------------- the plan
@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A plan, and the modules of each part by their names in torchtitan's model."""

    plan: Plan
    modules: tuple[tuple[str, ...], ...]
    config: Config  # what the planner was asked
    proves: bool = True  # whether stages are compared with plain calls first

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        path = self.plan.schedule.microbatches[0].path
        return self.plan.schedule.stages[path[-1]].rank


def plan_pipeline(config: Trainer.Config, options: PenstockOptions) -> PipelinePlan:
    """Return the plan that a config of torchtitan asks for, with the modules of each part."""
    refuse_unsupported(config)
    asked = workload_config(config, options)
    layers = asked.model.layers
    settled, plan = plan_run(
        asked, layers, plan_auto=lambda one: search_plan(config, options, one)
    )
    given = config.parallelism.module_fqns_per_model_part
    if given is None and not _brings_partition(options):
        given = own_modules(config, plan.schedule.parts)
    if given is None:
        names = modules_of(plan.partition)
    else:
        names = tuple(map(tuple, given))
        plan = replace(plan, partition=partition_of(names, plan.schedule.parts, layers))
    refuse_foreign(plan, config)
    return PipelinePlan(plan, names, settled, options.prove)


def loss_rank_name(planned: PipelinePlan) -> str:
    """The name of a schedule by which torchtitan finds the rank that logs the loss.

    torchtitan knows two cases, and asks for nothing but this name.
    """
    return FIRST_RANK_NAME if planned.last_rank == 0 else LAST_RANK_NAME


# ---------------------------------------------------------------- what the planner is asked
def workload_config(config: Trainer.Config, options: PenstockOptions) -> Config:
    """Translate a config of torchtitan: sizes, tokens, micro-batches and the shape of the schedule.

    The batch is that of one pipeline, times the processes that shard its weights.
    """
    parallelism = config.parallelism
    training = config.training
    rows = parallelism.pipeline_parallel_microbatch_size
    shard = shard_degree(parallelism)
    words = ("waves", "chunks", "slices", "split")
    shape = {word: getattr(options, word) for word in words}
    schedule = ScheduleConfig(
        write_shape(
            options.schedule, {word: one for word, one in shape.items() if one}
        ),
        microbatches=training.local_batch_size // rows,
    )
    asked = Config(
        model=model_config_of(config),
        data=DataConfig(
            seq_len=training.seq_len, global_batch=training.local_batch_size * shard
        ),
        schedule=schedule,
        parallel=ParallelConfig(
            pp=parallelism.pipeline_parallel_degree, dp_shard=shard
        ),
        run=RunConfig(
            precision=training.mixed_precision_param,
            recompute="full"
            if isinstance(config.activation_checkpoint, FullAC.Config)
            else "none",
            cuda_graphs="false",
        ),
    )
    return check_config(asked)


def shard_degree(parallelism: ParallelismConfig) -> int:
    """The number of processes that divide the weights of a part. By default, torchtitan takes all that it has."""
    given: int = parallelism.data_parallel_shard_degree
    if given > 0:
        return given
    copies: int = parallelism.data_parallel_replicate_degree
    ranks: int = parallelism.pipeline_parallel_degree
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, processes // (ranks * copies))


def model_config_of(config: Trainer.Config) -> ModelConfig:
    """The sizes of the model as our planner counts them; those of its first layer count for all."""
    model = config.model_spec.model
    layer = model.layers[0]
    attention = model.first_attention
    heads = attention.n_heads
    feed_forward = getattr(layer, "feed_forward", None)
    inner = 4 * model.dim
    if isinstance(feed_forward, FeedForward.Config):
        inner = feed_forward.w1.out_features
    return ModelConfig(
        layers=len(model.layers),
        hidden_size=model.dim,
        heads=heads,
        kv_heads=getattr(attention, "n_kv_heads", None) or heads,
        intermediate_size=inner,
        vocab_size=model.vocab_size,
    )


def why_unknown_costs(config: Trainer.Config) -> str:
    """Why our formulas do not know what the layers of a model cost; empty if they do."""
    for number, layer in enumerate(config.model_spec.model.layers):
        dense = type(getattr(layer, "feed_forward", None)) is FeedForward.Config
        if not dense or type(layer.attention) is not GQAttention.Config:
            return f"layer {number} is not the layer of a Llama: {type(layer).__qualname__}"
    return ""


# ---------------------------------------------------------------- auto, and the forecast
def search_plan(
    config: Trainer.Config, options: PenstockOptions, asked: Config
) -> Plan:
    """Search for the fastest plan on the ranks and micro-batches of a config."""
    profile = profile_of(config, options, asked)
    if profile is None:
        raise ConfigError(
            f"--penstock.schedule auto must know what the model costs: {why_no_profile(config)}\n"
            "  give --penstock.profile or --penstock.gpu, or name a schedule"
        )
    gpu = gpu_here(options)
    memory = USABLE_SHARE * gpu.memory if gpu is not None else None
    workload = workload_of(
        asked,
        asked.model.layers,
        hardware=Hardware(memory=memory, on_gpu=True),
        granularity=tile_of("cuda"),
    )
    # torchtitan decides what is recomputed, for all layers alike.
    recomputes = asked.run.recompute == "full"
    workload = replace(workload, fixed=replace(workload.fixed, recompute=recomputes))
    slices = 1 if why_unsliceable(config) else Limits().slices
    limits = Limits(slices=slices, weights=1)
    source = options.profile or (gpu.name if gpu is not None else "")
    profiles = RowProfiles((profile,))
    return plan_workload(workload, profiles, limits, source=source).plan


def forecast_of(
    config: Trainer.Config, options: PenstockOptions, planned: PipelinePlan
) -> Forecast | None:
    """The predicted step of a plan; None if nothing is known about what the model costs."""
    profile = profile_of(config, options, planned.config)
    if profile is None:
        return None
    ranks = planned.plan.schedule.ranks * planned.config.parallel.size
    return forecast(planned.config, planned.plan, profile, ranks)


def profile_of(
    config: Trainer.Config, options: PenstockOptions, asked: Config
) -> Profile | None:
    """What the model costs: by a file, or by the data sheet of a GPU; None if neither is known."""
    if options.profile:
        return read_row_profiles(Path(options.profile)).at(asked.rows)
    gpu = gpu_here(options)
    if gpu is None or why_unknown_costs(config):
        return None
    return analytic_profile(
        asked.model,
        asked.data.seq_len,
        asked.rows,
        gpu,
        asked.run.precision,
        ranks=asked.parallel.pp,
        devices_per_rank=asked.parallel.size,
        recorded=False,
    )


def why_no_profile(config: Trainer.Config) -> str:
    """Why `profile_of` knows nothing."""
    return (
        why_unknown_costs(config) or "this machine has no GPU whose data sheet we have"
    )


def gpu_here(options: PenstockOptions) -> Gpu | None:
    """The GPU of --penstock.gpu, or that of this machine if its data sheet is known."""
    if options.gpu:
        return gpu_of(options.gpu)
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties()
    return known_gpu(device.name, device.total_memory)


def known_gpu(name: str, memory: float) -> Gpu | None:
    """The GPU that a driver calls by this name; of several kinds, the one whose memory is nearest.

    >>> known_gpu("NVIDIA A100-SXM4-40GB", 42e9).name, known_gpu("NVIDIA A100-SXM4-80GB", 85e9).name
    ('A100-40', 'A100')
    """
    alike = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name.lower()]
    return min(alike, key=lambda gpu: abs(gpu.memory - memory), default=None)


# ---------------------------------------------------------------- modules of parts
def own_modules(config: Trainer.Config, parts: int) -> list[list[str]]:
    """The modules of each part as torchtitan's own rule divides them.

    Its options say how many layers the first and the last part have less.
    """
    parallelism = config.parallelism
    try:
        modules: list[list[str]] = default_modules(
            parts,
            len(config.model_spec.model.layers),
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
        )
    except ValueError as error:
        raise ConfigError(
            f"torchtitan cannot divide the model into {parts} parts: {error}\n"
            "  set --parallelism.pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers to 0"
        ) from None
    return modules


def _brings_partition(options: PenstockOptions) -> bool:
    """Whether the plan itself says how many layers each part has."""
    return options.schedule == AUTO or options.schedule.endswith(".json")


# ---------------------------------------------------------------- refusals
def refuse_unsupported(config: Trainer.Config) -> None:
    """Raise an error if a config asks for something that Penstock does not do inside torchtitan."""
    spec = config.model_spec
    if spec.pipelining_fn is not pipeline_llm:
        name = getattr(spec.pipelining_fn, "__name__", "none")
        raise ConfigError(
            f"{spec.name} is pipelined by {name}, but Penstock takes the place of pipeline_llm only"
        )
    parallelism = config.parallelism
    refuse_other_parallelism(parallelism, config.training.enable_cpu_offload)
    copies = shard_degree(parallelism) * parallelism.data_parallel_replicate_degree
    backend = parallelism.spmd_backend
    if copies > 1 and backend == SPMD_TYPES and not shards_spmd_types():
        raise ConfigError(
            f"{copies} processes hold each part, and torch {torch.__version__} cannot divide the weights that "
            f"--parallelism.spmd_backend {backend} prepares, with any pipeline: add "
            "--parallelism.spmd_backend partial_dtensor"
        )


def shards_spmd_types() -> bool:
    """Whether this torch is one that torchtitan's newest backend is written for."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 14)


def refuse_foreign(plan: Plan, config: Trainer.Config) -> None:
    """Raise an error if a plan does something that torchtitan cannot know about."""
    schedule = plan.schedule
    parallelism = config.parallelism
    ranks = parallelism.pipeline_parallel_degree
    rows = parallelism.pipeline_parallel_microbatch_size
    microbatches = config.training.local_batch_size // rows
    full = isinstance(config.activation_checkpoint, FullAC.Config)
    reason = why_unsliceable(config)
    refuse_first(
        ConfigError,
        (
            (schedule.ranks, len(schedule.microbatches)) != (ranks, microbatches),
            f"{plan.name} has {schedule.ranks} ranks and {len(schedule.microbatches)} micro-batches, but "
            f"--parallelism.pipeline_parallel_degree is {ranks}, and --training.local_batch_size over "
            f"--parallelism.pipeline_parallel_microbatch_size gives {microbatches}",
        ),
        (
            len(schedule.stages) != schedule.parts,
            f"{plan.name} holds {len(schedule.stages) - schedule.parts} parts more than once: torchtitan would save "
            "and clip their copies twice; copies are what --parallelism.data_parallel_replicate_degree is for",
        ),
        (
            plan.rotation or not visits_all_parts(schedule),
            f"{plan.name} leaves out parts of the model for some micro-batches, which only `penstock train` does",
        ),
        (
            plan.recompute and not full,
            f"{plan.name} recomputes the parts {list(plan.recompute)}, but torchtitan decides what is recomputed: "
            "add activation-checkpoint:full, or plan without recomputation",
        ),
        (
            schedule.slices > 1 and reason,
            f"{plan.name} cuts sequences into token slices, which this model does not take: {reason}\n"
            "  set --penstock.slices 0 and a schedule other than terapipe and seq1f1b",
        ),
    )
