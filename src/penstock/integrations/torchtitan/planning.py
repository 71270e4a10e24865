"""From torchtitan's config to a plan: which schedule runs, and which modules each of its parts has.

torchtitan's config ──► Config (`workload_config`) ──► Plan (`penstock.plan.planner`) ──► PipelinePlan
sizes of the model        what our planner reads          schedule and layers              modules of each part
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part as default_modules,
)
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.trainer import Trainer

from penstock.config import (
    AUTO,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    check_config,
)
from penstock.cost import Profile, RowProfiles
from penstock.cost.gpus import GPUS, Gpu, analytic_profile, gpu_of
from penstock.cost.profile import tile_of
from penstock.errors import ConfigError
from penstock.formats import read_row_profiles
from penstock.integrations.torchtitan.attention import why_unsliceable
from penstock.integrations.torchtitan.options import (
    PenstockOptions,
    modules_of,
    partition_of,
    refuse_other_parallelism,
)
from penstock.ir import Plan
from penstock.plan.planner import plan_run
from penstock.plan.space import Limits
from penstock.plan.workload import USABLE_SHARE, workload_of
from penstock.schedules.coverage import visits_all_parts
from penstock.train.auto import plan_workload
from penstock.train.forecast import Forecast, forecast

SPMD_TYPES = "spmd_types"  # torchtitan's default for --parallelism.spmd_backend
FIRST_RANK_NAME = "ZBVZeroBubble"  # torchtitan reads the loss on rank 0
LAST_RANK_NAME = "1F1B"  # torchtitan reads the loss on the last rank


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A plan, and the modules of each part by their names in torchtitan's model."""

    plan: Plan
    modules: tuple[tuple[str, ...], ...]
    config: Config  # what the planner was asked

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
    return PipelinePlan(plan, names, settled)


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
    schedule = ScheduleConfig(
        options.schedule,
        ranks=parallelism.pipeline_parallel_degree,
        microbatches=training.local_batch_size // rows,
        waves=options.waves,
        chunks=options.chunks,
        slices=options.slices,
        split=options.split,
    )
    asked = Config(
        model=model_config_of(config),
        data=DataConfig(
            tokens=training.seq_len, batch=training.local_batch_size * shard
        ),
        schedule=schedule,
        mesh=MeshConfig(shard=shard),
        run=RunConfig(
            precision=training.mixed_precision_param,
            recompute=isinstance(config.activation_checkpoint, FullAC.Config),
            graphs="false",
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
        width=model.dim,
        heads=heads,
        kv_heads=getattr(attention, "n_kv_heads", None) or heads,
        inner=inner,
        vocab=model.vocab_size,
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
        memory=memory,
        granularity=tile_of("cuda"),
        on_gpu=True,
    )
    # torchtitan decides what is recomputed, for all layers alike.
    recomputes = asked.run.recompute
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
    ranks = planned.plan.schedule.ranks * planned.config.mesh.size
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
        asked.data.tokens,
        asked.rows,
        gpu,
        asked.run.precision,
        ranks=asked.schedule.ranks,
        devices_per_rank=asked.mesh.size,
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
    if schedule.ranks != ranks or len(schedule.microbatches) != microbatches:
        raise ConfigError(
            f"{plan.name} has {schedule.ranks} ranks and {len(schedule.microbatches)} micro-batches, but "
            f"--parallelism.pipeline_parallel_degree is {ranks}, and --training.local_batch_size over "
            f"--parallelism.pipeline_parallel_microbatch_size gives {microbatches}"
        )
    if len(schedule.stages) != schedule.parts:
        raise ConfigError(
            f"{plan.name} holds {len(schedule.stages) - schedule.parts} parts more than once: torchtitan would save "
            "and clip their copies twice; copies are what --parallelism.data_parallel_replicate_degree is for"
        )
    if plan.rotation or not visits_all_parts(schedule):
        raise ConfigError(
            f"{plan.name} leaves out parts of the model for some micro-batches, which only `penstock train` does"
        )
    full = isinstance(config.activation_checkpoint, FullAC.Config)
    if plan.recompute and not full:
        raise ConfigError(
            f"{plan.name} recomputes the parts {list(plan.recompute)}, but torchtitan decides what is recomputed: "
            "add activation-checkpoint:full, or plan without recomputation"
        )
    reason = why_unsliceable(config)
    if schedule.slices > 1 and reason:
        raise ConfigError(
            f"{plan.name} cuts sequences into token slices, which this model does not take: {reason}\n"
            "  set --penstock.slices 0 and a schedule other than terapipe and seq1f1b"
        )
