"""Advice for DeepSpeed (0.19): its config as JSON, and a `PipelineModule` with the stages of the plan.

DeepSpeed runs 1F1B with one stage on each rank. It has no option for borders between stages, so the second file is a
small subclass whose stages begin where the plan says. It expects a list of the embedding, all layers, the last norm and
the head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from penstock.advice.orders import order_of
from penstock.advice.pipeline import (
    NO_PIPELINE,
    Advice,
    PipelineTerms,
    refuse_idle_order,
    refuse_mixed_recomputation,
)
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.recipes import Limits
from penstock.plan.workload import Cell, Workload

MODULE = '''"""A DeepSpeed pipeline whose stages hold the layers that a plan gives them."""

from deepspeed.pipe import PipelineModule

# The list of layers begins with the embedding and ends with the last norm and the head.
# Stage s holds its items BORDERS[s] to BORDERS[s + 1].
BORDERS = {borders}


class PlannedPipeline(PipelineModule):
    """Use it as PlannedPipeline(layers, loss_fn=...), on {stages} stages."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != BORDERS[-1]:
            raise ValueError(
                f"the plan is for {{BORDERS[-1]}} items: embedding, {layers} layers, norm and "
                f"head; there are {{len(layers)}}"
            )
        options = {{"activation_checkpoint_interval": {checkpoint}, **options}}
        super().__init__(layers, num_stages={stages}, **options)

    def _partition_layers(self, method="uniform"):
        self.parts = list(BORDERS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''


class Deepspeed:
    """DeepSpeed, which runs 1F1B with one stage on each rank."""

    name = "deepspeed"
    ending = "deepspeed.json"
    takes_lists = False

    def narrow(self, limits: Limits) -> Limits:
        """Look for whole sequences and backwards, one copy of the weights and one stage on each rank."""
        return replace(limits, stages=1, slices=1, weights=1, split=False, runtime=self)

    def adapt(self, workload: Workload) -> Workload:
        """Put all micro-batches of a step into one pass, as DeepSpeed does."""
        return workload.in_one_pass()

    def refuse_cell(self, cell: Cell, tied: bool | None) -> str:
        """Refuse recomputation of some parts."""
        return refuse_mixed_recomputation(cell, self.name)

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse several stages on a rank."""
        if len({stage.rank for stage in stages}) < len(stages):
            return "deepspeed runs 1F1B with one stage on each rank only"
        return ""

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse every order but 1F1B."""
        reason = refuse_idle_order(schedule)
        if reason or order_of(schedule) == "1f1b":
            return reason
        return "deepspeed runs 1F1B with one stage on each rank only"

    def waits(self, schedule: Schedule) -> bool:
        """Whether messages are sent at all: all of them are waited for."""
        return schedule.ranks > 1

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return the config, and the subclass with the borders of the stages."""
        config: dict[str, object] = {
            "train_batch_size": pipeline.global_batch,
            "train_micro_batch_size_per_gpu": pipeline.rows,
            "gradient_accumulation_steps": pipeline.microbatches,
        }
        if pipeline.shard > 1:
            config["zero_optimization"] = {"stage": 1}
        files = {}
        if pipeline.partition and pipeline.ranks > 1:
            files[f"{stem.name}_pipeline.py"] = module_text(pipeline)
        text = json.dumps(config, indent=2) + "\n"
        name = "as 1F1B" if pipeline.ranks > 1 else NO_PIPELINE
        return Advice(name, text, files, self._notes(pipeline))

    def _notes(self, pipeline: PipelineTerms) -> tuple[str, ...]:
        notes = [
            f"Launch {pipeline.replicas * pipeline.ranks * pipeline.tensor} processes: pipe "
            f"{pipeline.ranks}, data {pipeline.replicas}, model {pipeline.tensor}."
        ]
        if pipeline.tensor > 1 and pipeline.ranks > 1:
            notes.append(
                f"Your model must divide its layers between {pipeline.tensor} devices itself; tell "
                "DeepSpeed about it with topology=PipeModelDataParallelTopology("
                f"num_pp={pipeline.ranks}, num_mp={pipeline.tensor}, "
                f"num_dp={pipeline.replicas}), from deepspeed.runtime.pipe.topology."
            )
        if pipeline.tied:
            notes.append("The model ties its embedding to its head: use TiedLayerSpec.")
        if pipeline.shard > 1:
            notes.append(
                f"The plan shards weights over {pipeline.shard} devices; in a pipeline "
                "DeepSpeed shards what the optimizer keeps (ZeRO-1). The expected memory is "
                "enough for that: it counts whole weights and gradients, which a step gathers."
            )
        return tuple(notes)


def borders_of(pipeline: PipelineTerms) -> list[int]:
    """Where each stage begins in the list of embedding, layers, norm and head, and where the last ends."""
    counts = list(pipeline.partition)
    counts[0] += 1
    counts[-1] += 2
    return [0, *accumulate(counts)]


def module_text(pipeline: PipelineTerms) -> str:
    """The file with the subclass of `PipelineModule`."""
    return MODULE.format(
        borders=borders_of(pipeline),
        stages=pipeline.ranks,
        layers=sum(pipeline.partition),
        checkpoint=int(pipeline.recomputes),
    )
