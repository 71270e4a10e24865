"""Advice for NeMo AutoModel 0.7: the sections of its YAML that divide devices, model and batch.

distributed:
  pp_size: 4
  pipeline:
    pp_schedule: interleaved1f1b
    module_fqns_per_model_part: ...
step_scheduler:
  local_batch_size: 16
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.advice.pipeline import NO_PIPELINE, Advice, PipelineTerms
from penstock.advice.torch_stages import (
    TorchFramework,
    torch_csv,
    torch_name,
    torch_notes,
)
from penstock.plan.workload import Cell


class Automodel(TorchFramework):
    """NeMo AutoModel, whose pipeline runtime is torch's own."""

    name = "automodel"
    ending = "automodel.yaml"

    def refuse_cell(self, cell: Cell, tied: bool | None) -> str:
        """Refuse also fewer micro-batches than ranks."""
        if cell.microbatches < cell.ranks:
            return (
                f"it has {cell.microbatches} micro-batches on {cell.ranks} ranks; "
                "automodel wants at least as many micro-batches as ranks"
            )
        return super().refuse_cell(cell, tied)

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return two sections of a recipe's YAML."""
        csv_file = stem.with_name(f"{stem.name}.csv")
        schedule, has_csv = torch_name(pipeline.schedule)
        lines = [
            "distributed:",
            "  strategy: fsdp2",
            f"  pp_size: {pipeline.ranks}",
            f"  tp_size: {pipeline.tensor}",
            f"  dp_size: {pipeline.replicas}",
            f"  dp_replicate_size: {pipeline.copies}",
            f"  activation_checkpointing: {str(pipeline.recomputes).lower()}",
        ]
        files = {}
        if pipeline.ranks > 1:
            lines += [
                "  pipeline:",
                f"    pp_schedule: {schedule}",
                f"    pp_microbatch_size: {pipeline.rows}",
                f"    pp_batch_size: {pipeline.local_batch}",
            ]
            if has_csv:
                lines.append(f"    pp_schedule_csv: {csv_file}")
                files[csv_file.name] = torch_csv(pipeline)
            if pipeline.partition:
                lines += _module_lines(pipeline)
        lines += [
            "step_scheduler:",
            f"  local_batch_size: {pipeline.accumulated_batch}",
            f"  global_batch_size: {pipeline.global_batch}",
        ]
        name = f"as {schedule}" if pipeline.ranks > 1 else NO_PIPELINE
        return Advice(name, "\n".join(lines) + "\n", files, self._notes(pipeline))

    def _notes(self, pipeline: PipelineTerms) -> tuple[str, ...]:
        notes = torch_notes(pipeline)
        if pipeline.partition and pipeline.ranks > 1:
            notes.append(
                "The modules have the names of Hugging Face's Llama; other decoders may have "
                "another prefix than model."
            )
        return tuple(notes)


def _module_lines(pipeline: PipelineTerms) -> Iterator[str]:
    yield "    module_fqns_per_model_part:"
    for names in hugging_face_names(pipeline):
        yield f"    - [{', '.join(names)}]"


def hugging_face_names(pipeline: PipelineTerms) -> list[list[str]]:
    """The modules of each stage, by the names of Hugging Face's Llama.

    Every stage needs the rotary embedding.
    """
    names = [
        [f"model.layers.{layer}" for layer in layers] for layers in pipeline.layers
    ]
    names[0].insert(0, "model.embed_tokens")
    names[-1] += ["model.norm", "lm_head"]
    return [[*modules, "model.rotary_emb"] for modules in names]
