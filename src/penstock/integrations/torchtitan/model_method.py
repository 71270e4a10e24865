"""Our pipeline as the method `pipeline` of a model, which torchtitan's repository calls now that ModelSpec is gone.

    class MyLlama(Llama3Model):
        pipeline = pipeline_with("hanayo", waves=2)

    engine            model.pipeline(parallelism_context=..., training=..., ...) ──► schedule, parts, first, last
    pipeline_with     part.parallelize(...) for each part of this rank

No release of torchtitan has this contract yet. It was read from the repository, in which it has changed several times,
so this was only run with a stand-in for it. A micro-batch there is one row of packed tokens, (tokens,), and the hidden
state is (tokens, features). Sequences are therefore not cut into slices, and stages are not proven before the first
step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.config import is_plan_file
from penstock.errors import ConfigError, refuse_first
from penstock.formats import read_plan
from penstock.integrations.torchtitan.options import (
    modules_of,
    partition_of,
    refuse_other_parallelism,
)
from penstock.integrations.torchtitan.pipeline_schedule import (
    Pipelined,
    PipelineSchedule,
    cut_parts,
)
from penstock.ir import Plan
from penstock.partition import even_partition
from penstock.schedules import make
from penstock.schedules.coverage import visits_all_parts

CONTEXTS = ("parallelism_context", "parallel_dims")  # the newer name, and the older


def pipeline_with(schedule: str = "1f1b", **shape: int) -> Callable[..., Pipelined]:
    """Return the method `pipeline` for a model of torchtitan.

    `schedule` is the name of a schedule, with its shape such as `waves=2`, or a plan.json of `penstock plan`. The
    number of ranks and micro-batches comes from torchtitan's config.
    """

    def pipeline(
        self: nn.Module,
        *,
        training: Any,
        parallelism: Any,
        ac_config: Any,
        dump_folder: str,
        device: torch.device,
        model_config: Any,
        loss_fn: Callable[..., Any],
        **context: Any,
    ) -> Pipelined:
        """Return the schedule, the parts of this rank, and whether it has the first and the last stage."""
        refuse_other_parallelism(parallelism, training.enable_cpu_offload)
        layers = len(model_config.layers)
        plan = plan_for(schedule, shape, parallelism, layers)
        given = parallelism.pipeline_parallel_module_fqns_per_model_part
        names = modules_of(plan.partition) if given is None else given
        partition_of(names, plan.schedule.parts, layers)
        group = pipeline_group(context)

        def parallelize(part: Any) -> Any:
            return part.parallelize(
                training=training,
                parallelism=parallelism,
                ac_config=ac_config,
                dump_folder=dump_folder,
                **context,
            )

        parts = cut_parts(self, plan.schedule, group.rank(), names, parallelize)
        return PipelineSchedule(
            plan.schedule,
            parts,
            group,
            loss_fn,
            (training.num_tokens_per_microbatch_per_dp_rank,),
            model_config.dim,
            getattr(torch, training.mixed_precision_param),
            device,
        ).with_parts()

    return pipeline


def pipeline_group(context: dict[str, Any]) -> dist.ProcessGroup:
    """The processes of this rank's pipeline."""
    for name in CONTEXTS:
        if name in context:
            group: dist.ProcessGroup = context[name].get_mesh("pp").get_group("pp")
            return group
    raise ConfigError(
        f"torchtitan calls model.pipeline without {' or '.join(CONTEXTS)}, so Penstock does not know this version\n"
        "  pip install 'torchtitan==0.3.0'"
    )


def plan_for(
    schedule: str, shape: dict[str, int], parallelism: Any, layers: int
) -> Plan:
    """The plan of a named schedule or of a file, for the ranks and micro-batches of torchtitan's config."""
    ranks = parallelism.pipeline_parallel_degree
    microbatches = parallelism.num_pp_microbatches
    if is_plan_file(schedule):
        plan = read_plan(Path(schedule))
    else:
        made = make(schedule, ranks=ranks, microbatches=microbatches, **shape)
        plan = Plan(made, schedule, partition=even_partition(layers, made.parts))
    found = plan.schedule
    copies = len(found.stages) > found.parts
    whole = not plan.rotation and visits_all_parts(found)
    refuse_first(
        ConfigError,
        (
            (found.ranks, len(found.microbatches)) != (ranks, microbatches),
            f"{plan.name} has {found.ranks} ranks and {len(found.microbatches)} micro-batches, but "
            f"--parallelism.pipeline_parallel_degree is {ranks} and --parallelism.num_pp_microbatches {microbatches}",
        ),
        (
            found.slices > 1 or copies or not whole or plan.recompute,
            f"{plan.name} has token slices, copies of parts, partial paths or recomputed parts, which the method "
            "`pipeline` of a model does not run: choose another schedule",
        ),
    )
    return plan
