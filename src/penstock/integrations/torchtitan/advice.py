"""Advice for torchtitan 0.3: options of its command line, and a CSV for an order that has no name.

    torchrun ... --module llama3 --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 \\
        --parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2 ... \\
        ...

torchtitan builds on torch.distributed.pipelining and places stages by the name of a schedule: in a loop, or in one V.
The order comes from a name or from a CSV file:

    placement   order has a name     any other order
    loop        Interleaved1F1B      PipelineScheduleMulti and a CSV
    V           ZBVZeroBubble        ZBVZeroBubble, for its placement, and a CSV

torch knows some names only for some numbers of micro-batches: its 1F1B refuses fewer micro-batches than ranks, and its
interleaved schedules refuse or reorder micro-batches that do not fill their rounds. Such orders come as a CSV, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.formats import dump_torch_csv
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
from penstock.integrations.torchtitan.options import modules_of
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.space import Limits
from penstock.plan.workload import Cell, Workload

NAMES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
# Names whose own order is replaced by a CSV, and that only place the stages.
PLACING_NAMES = {
    PlacementKind.LOOP: "PipelineScheduleMulti",
    PlacementKind.V: "ZBVZeroBubble",
}


class Torchtitan:
    """torchtitan, whose runtime is torch's own."""

    name = "torchtitan"
    ending = "torchtitan.sh"
    takes_lists = True

    def narrow(self, limits: Limits) -> Limits:
        """Look for whole sequences and one copy of the weights."""
        return replace(limits, slices=1, weights=1, runtime=self)

    def adapt(self, workload: Workload) -> Workload:
        """Keep the passes: torchtitan accumulates gradients over whole passes."""
        return workload

    def refuse_cell(self, cell: Cell, tied: bool | None) -> str:
        """Refuse tied weights over several ranks, and recomputation of some parts."""
        if tied and cell.ranks > 1:
            return (
                "the model ties its embedding to its head, which torchtitan refuses in a "
                "pipeline (--set model.tied=false unties them)"
            )
        return refuse_mixed_recomputation(cell, self.name)

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse waves, and whatever is neither a loop nor a V."""
        placement = placement_kind(stages)
        if placement is PlacementKind.WAVES:
            return (
                "its stages lie in several waves; torchtitan places them in a loop "
                "or in one V"
            )
        if placement not in PLACING_NAMES:
            return (
                "its stages lie neither in a loop nor in a V, and torchtitan knows no other "
                "placement"
            )
        return refuse_lone_stages(stages)

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse token slices and replicas; any other order can be listed."""
        return refuse_idle_order(schedule) or self.refuse_stages(schedule.stages)

    def waits(self, schedule: Schedule) -> bool:
        """Whether ranks wait for their messages: torch's own 1F1B does, its other schedules do not."""
        return schedule.ranks > 1 and torch_name(schedule)[0] == "1F1B"

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
                # Without messages: torch adds them.
                files[csv_file.name] = dump_torch_csv(pipeline.schedule)
            if pipeline.partition:
                names = " ".join(map(",".join, modules_of(pipeline.partition)))
                options.append(("parallelism.module_fqns_per_model_part", names))
        words = [f"--{name} {value}" for name, value in options]
        # A choice between classes of configs is a word of its own, after all options.
        policy = "full" if pipeline.recomputes else "none"
        text = OPTION_BREAK.join([*words, f"activation-checkpoint:{policy}"])
        name = f"as {schedule}" if pipeline.ranks > 1 else NO_PIPELINE
        return Advice(name, f"{text}\n", files, _notes(pipeline))


def torch_name(schedule: Schedule) -> tuple[str, bool]:
    """The name of a schedule in torch, and whether it needs a CSV for its order."""
    order = order_of(schedule)
    if order in NAMES and _torch_has_order(order, schedule):
        return NAMES[order], False
    return PLACING_NAMES[placement_kind(schedule.stages)], True


def _torch_has_order(order: str, schedule: Schedule) -> bool:
    """Whether torch's schedule of this name has our order for this number of micro-batches."""
    microbatches = len(schedule.microbatches)
    if order == "1f1b":
        return microbatches >= schedule.ranks
    if order in ("interleaved", "interleaved-zb"):
        return microbatches % schedule.ranks == 0
    return True


def _notes(pipeline: PipelineTerms) -> tuple[str, ...]:
    """What one should know about the schedule and the modules."""
    notes = []
    name, has_csv = torch_name(pipeline.schedule)
    if has_csv:
        notes.append(
            f"The order comes from the CSV; {name} only says which rank holds which stage."
        )
    if pipeline.partition and pipeline.ranks > 1:
        notes.append(
            "The modules have the names of torchtitan 0.3's decoders; before 0.3, lm_head "
            "is called output."
        )
    return tuple(notes)
