"""What torchtitan and AutoModel share, because both build on torch.distributed.pipelining.

They place stages by the name of a schedule: in a loop, or in one V. The order comes from a name or from a CSV file:

    placement   order has a name     any other order
    loop        Interleaved1F1B      PipelineScheduleMulti and a CSV
    V           ZBVZeroBubble        ZBVZeroBubble, for its placement, and a CSV

torch knows some names only for some numbers of micro-batches: its 1F1B refuses fewer micro-batches than ranks, and its
interleaved schedules refuse or reorder micro-batches that do not fill their rounds. Such orders come as a CSV, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.advice.orders import PlacementKind, order_of, placement_kind
from penstock.advice.pipeline import (
    PipelineTerms,
    refuse_idle_order,
    refuse_lone_stages,
    refuse_mixed_recomputation,
)
from penstock.formats import dump_torch_csv
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.recipes import Limits
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


class TorchFramework:
    """A framework whose pipeline runtime is torch's own."""

    name = ""
    takes_lists = True

    def narrow(self, limits: Limits) -> Limits:
        """Look for whole sequences and one copy of the weights."""
        return replace(limits, slices=1, weights=1, runtime=self)

    def adapt(self, workload: Workload) -> Workload:
        """Keep the passes: these frameworks accumulate gradients over whole passes."""
        return workload

    def refuse_cell(self, cell: Cell, tied: bool | None) -> str:
        """Refuse tied weights over several ranks, and recomputation of some parts."""
        if tied and cell.ranks > 1:
            return (
                f"the model ties its embedding to its head, which {self.name} refuses in a "
                "pipeline (--set model.tied=false unties them)"
            )
        return refuse_mixed_recomputation(cell, self.name)

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse waves, and whatever is neither a loop nor a V."""
        placement = placement_kind(stages)
        if placement is PlacementKind.WAVES:
            return (
                f"its stages lie in several waves; {self.name} places them in a loop "
                "or in one V"
            )
        if placement not in PLACING_NAMES:
            return (
                f"its stages lie neither in a loop nor in a V, and {self.name} knows no other "
                "placement"
            )
        return refuse_lone_stages(stages)

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse token slices and replicas; any other order can be listed."""
        return refuse_idle_order(schedule) or self.refuse_stages(schedule.stages)

    def waits(self, schedule: Schedule) -> bool:
        """Whether ranks wait for their messages: torch's own 1F1B does, its other schedules do not."""
        return schedule.ranks > 1 and torch_name(schedule)[0] == "1F1B"


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


def torch_csv(pipeline: PipelineTerms) -> str:
    """The order of a pipeline as a CSV, without messages: torch adds them."""
    return dump_torch_csv(pipeline.schedule)


def torch_notes(pipeline: PipelineTerms) -> list[str]:
    """What one should know about the schedule."""
    notes = []
    name, has_csv = torch_name(pipeline.schedule)
    if has_csv:
        notes.append(
            f"The order comes from the CSV; {name} only says which rank holds which stage."
        )
    return notes
