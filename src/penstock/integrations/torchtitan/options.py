"""Options in torchtitan's config: those of Penstock (`--penstock.schedule` and so on), and what it reads of the others.

Nothing here imports torchtitan, so that it serves every version of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, refuse_first

NOT_SUPPORTED = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


@dataclass(kw_only=True, slots=True)
class PenstockOptions:
    """How Penstock runs the pipeline. Zero and empty text leave a choice open."""

    schedule: str = "1f1b"
    """
    A schedule of `penstock draw`, a plan.json or plan.csv, or `auto`, which searches for the fastest plan.
    """

    waves: int = 0
    """Waves over the ranks (hanayo)."""

    chunks: int = 0
    """Chunks of the model per rank (interleaved)."""

    slices: int = 0
    """Token slices per micro-batch, for models with grouped-query attention."""

    split: bool = False
    """Whether to split backwards into input gradients and weight gradients."""

    profile: str = ""
    """A profile.json of `penstock profile` to plan and forecast with."""

    gpu: str = ""
    """
    The GPU to plan and forecast for by its data sheet, such as h100; without it, the GPU of this machine.
    """

    prove: bool = True
    """
    Whether to compare every stage, as the plan runs it, with a plain call before the first step. Weights that FSDP
    shards over several processes are not compared.
    """

    forecast: bool = True
    """Whether to log the time of a step and the memory of each rank that the simulator predicts."""


def modules_of(partition: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The modules of parts with these numbers of layers.

    >>> modules_of((1, 2))
    (('tok_embeddings', 'layers.0'), ('layers.1', 'layers.2', 'norm', 'lm_head'))
    """
    parts = []
    layer = 0
    for count in partition:
        parts.append([f"layers.{layer + number}" for number in range(count)])
        layer += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return tuple(map(tuple, parts))


def partition_of(
    modules: Sequence[Sequence[str]], parts: int, layers: int
) -> tuple[int, ...]:
    """The number of layers of each part, from the names of its modules."""
    counts = [sum(name.startswith("layers.") for name in names) for names in modules]
    if len(counts) != parts or sum(counts) != layers:
        raise ConfigError(
            f"--parallelism.module_fqns_per_model_part has {len(counts)} parts with {sum(counts)} layers, "
            f"but the schedule has {parts} parts and the model {layers} layers"
        )
    return tuple(counts)


def refuse_other_parallelism(parallelism: Any, cpu_offload: bool) -> None:
    """Raise an error if the config asks for parallelism that does not work together with our pipeline."""
    for key in NOT_SUPPORTED:
        degree = getattr(parallelism, key)
        if degree > 1:
            raise ConfigError(
                f"--parallelism.{key} {degree} does not work with Penstock's pipeline yet: set it to 1, or take "
                "torchtitan's own pipeline"
            )
    refuse_first(
        ConfigError,
        (
            cpu_offload,
            "--training.enable_cpu_offload does not work with Penstock's pipeline: leave it out",
        ),
        (
            parallelism.pipeline_parallel_schedule_csv,
            "--parallelism.pipeline_parallel_schedule_csv is for torchtitan's own pipeline: name the file in "
            "--penstock.schedule instead",
        ),
    )
