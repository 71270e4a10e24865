"""Advice for torchtitan 0.3: options of its command line, and a CSV for an order that has no name.

    torchrun ... --module llama3 --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 \\
        --parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2 ... \\
        ...
"""

from __future__ import annotations

from pathlib import Path

from penstock.advice.pipeline import NO_PIPELINE, OPTION_BREAK, Advice, PipelineTerms
from penstock.advice.torch_stages import (
    TorchFramework,
    torch_csv,
    torch_name,
    torch_notes,
)


class Torchtitan(TorchFramework):
    """torchtitan, whose runtime is torch's own."""

    name = "torchtitan"
    ending = "torchtitan.sh"

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return options of the command line."""
        csv_file = stem.with_name(f"{stem.name}.csv")
        schedule, has_csv = torch_name(pipeline.schedule)
        options = [
            ("training.local_batch_size", str(pipeline.accumulated_batch)),
            ("training.global_batch_size", str(pipeline.global_batch)),
            ("parallelism.data_parallel_replicate_degree", str(pipeline.copies)),
            ("parallelism.data_parallel_shard_degree", str(pipeline.shard)),
            ("parallelism.tensor_parallel_degree", str(pipeline.tensor)),
            ("parallelism.pipeline_parallel_degree", str(pipeline.ranks)),
        ]
        if pipeline.tokens:
            options.insert(0, ("training.seq_len", str(pipeline.tokens)))
        files = {}
        if pipeline.ranks > 1:
            options += [
                ("parallelism.pipeline_parallel_schedule", schedule),
                ("parallelism.pipeline_parallel_microbatch_size", str(pipeline.rows)),
            ]
            if has_csv:
                file = str(csv_file)
                options.append(("parallelism.pipeline_parallel_schedule_csv", file))
                files[csv_file.name] = torch_csv(pipeline)
            if pipeline.partition:
                names = " ".join(map(",".join, torchtitan_names(pipeline)))
                options.append(("parallelism.module_fqns_per_model_part", names))
        words = [f"--{name} {value}" for name, value in options]
        # A choice between classes of configs is a word of its own, after all options.
        policy = "full" if pipeline.recomputes else "none"
        text = OPTION_BREAK.join([*words, f"activation-checkpoint:{policy}"])
        name = f"as {schedule}" if pipeline.ranks > 1 else NO_PIPELINE
        return Advice(name, f"{text}\n", files, self._notes(pipeline))

    def _notes(self, pipeline: PipelineTerms) -> tuple[str, ...]:
        notes = torch_notes(pipeline)
        if pipeline.partition and pipeline.ranks > 1:
            notes.append(
                "The modules have the names of torchtitan 0.3's decoders; before 0.3, lm_head "
                "is called output."
            )
        return tuple(notes)


def torchtitan_names(pipeline: PipelineTerms) -> list[list[str]]:
    """The modules of each stage, by the names of torchtitan's decoders."""
    names = [[f"layers.{layer}" for layer in layers] for layers in pipeline.layers]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return names
