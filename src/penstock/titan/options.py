"""The options of Penstock in torchtitan's config: `--penstock.schedule` and so on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class PenstockOptions:
    """How Penstock runs the pipeline. Zero and empty text leave a choice open."""

    schedule: str = "1f1b"
    """
    A schedule of `penstock list`, a plan.json or plan.csv, or `auto`, which searches for the fastest plan.
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
