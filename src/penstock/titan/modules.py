"""Which modules of torchtitan's model each part of a schedule has, and which parallelism its ranks cannot have besides.

Nothing here imports torchtitan, so that it serves every version of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError

NOT_SUPPORTED = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


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
    if cpu_offload:
        raise ConfigError(
            "--training.enable_cpu_offload does not work with Penstock's pipeline: leave it out"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ConfigError(
            "--parallelism.pipeline_parallel_schedule_csv is for torchtitan's own pipeline: name the file in "
            "--penstock.schedule instead"
        )
