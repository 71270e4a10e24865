"""Advice for Megatron-LM (megatron-core 0.16): options of its command line, with a layout of the layers.

    --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*3|t*4|t*4|t*3L'

In the layout E is the embedding, t a layer, L the head with the loss, and | the border of a stage. Stages lie in a
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.integrations.terms import (
    NO_PIPELINE,
    OPTION_BREAK,
    Advice,
    PipelineTerms,
    PlacementKind,
    order_of,
    placement_kind,
    refuse_idle_order,
    refuse_lone_stages,
    refuse_mixed_recomputation,
)
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.space import Limits
from penstock.plan.workload import Cell, Workload


class Megatron:
    """Megatron-LM, which runs 1F1B and interleaved 1F1B."""

    name = "megatron"
    ending = "megatron.sh"
    takes_lists = False

    def narrow(self, limits: Limits) -> Limits:
        """Look for whole sequences, whole backwards and one copy of the weights."""
        return replace(limits, slices=1, weights=1, split=False, runtime=self)

    def adapt(self, workload: Workload) -> Workload:
        """Put all micro-batches of a step into one pass, as Megatron does."""
        return workload.in_one_pass()

    def refuse_cell(self, cell: Cell, tied: bool | None) -> str:
        """Refuse recomputation of some parts."""
        return refuse_mixed_recomputation(cell, self.name)

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse every placement but a loop."""
        if placement_kind(stages) is not PlacementKind.LOOP:
            return "megatron places stages in a loop only"
        return refuse_lone_stages(stages)

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse every order but 1F1B and interleaved 1F1B."""
        reason = refuse_idle_order(schedule)
        if reason:
            return reason
        order = order_of(schedule)
        if order not in ("1f1b", "interleaved"):
            return "megatron runs 1F1B and interleaved 1F1B only"
        microbatches = len(schedule.microbatches)
        if order == "interleaved" and microbatches % schedule.ranks:
            return (
                f"megatron interleaves only if the {schedule.ranks} ranks divide the "
                f"micro-batches, of which there are {microbatches}"
            )
        return ""

    def waits(self, schedule: Schedule) -> bool:
        """1F1B waits for its messages; interleaved 1F1B sends in the background."""
        return schedule.ranks > 1 and len(schedule.stages) == schedule.ranks

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return options of the command line."""
        options = [
            f"--micro-batch-size {pipeline.rows}",
            f"--global-batch-size {pipeline.global_batch}",
            f"--tensor-model-parallel-size {pipeline.tensor}",
            f"--pipeline-model-parallel-size {pipeline.ranks}",
        ]
        if pipeline.tokens:
            options.insert(0, f"--seq-length {pipeline.tokens}")
        if pipeline.partition:
            options.insert(0, f"--num-layers {sum(pipeline.partition)}")
            if pipeline.ranks > 1:
                layout = layout_of(pipeline)
                options.append(f"--pipeline-model-parallel-layout '{layout}'")
        if pipeline.tied is False:
            options.append("--untie-embeddings-and-output-weights")
        if pipeline.shard > 1:
            options.append("--use-distributed-optimizer")
        if pipeline.recomputes:
            options.append(
                "--recompute-granularity full --recompute-method uniform "
                "--recompute-num-layers 1"
            )
        name = "as interleaved 1F1B" if pipeline.stages_per_rank > 1 else "as 1F1B"
        if pipeline.ranks == 1:
            name = NO_PIPELINE
        text = OPTION_BREAK.join(options)
        return Advice(name, f"{text}\n", {}, self._notes(pipeline))

    def _notes(self, pipeline: PipelineTerms) -> tuple[str, ...]:
        notes = [
            f"Megatron computes the number of micro-batches of a step, {pipeline.microbatches} in "
            f"{pipeline.replicas} data-parallel group{'s' * (pipeline.replicas > 1)}, from the "
            "batch sizes and the number of devices."
        ]
        if pipeline.stages_per_rank > 1 and not pipeline.partition:
            notes.append(
                "The layers of the model are not known, so there is no layout: set "
                "--num-virtual-stages-per-pipeline-rank to "
                f"{pipeline.stages_per_rank}."
            )
        if pipeline.shard > 1:
            notes.append(
                f"The plan shards weights over {pipeline.shard} devices; the distributed "
                "optimizer shards what the optimizer keeps. The expected memory is enough "
                "for that: it counts whole weights and gradients, which a step gathers."
            )
        return tuple(notes)


def layout_of(pipeline: PipelineTerms) -> str:
    """The layout of the layers, stage by stage.

    >>> from penstock.integrations.megatron import layout_text
    >>> layout_text((3, 4, 1))
    'Et*3|t*4|tL'
    """
    return layout_text(pipeline.partition)


def layout_text(partition: tuple[int, ...]) -> str:
    """The layout of parts with these numbers of layers."""
    stages = [_layers_text(count) for count in partition]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def _layers_text(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"
