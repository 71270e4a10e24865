"""Partial paths: a part that some micro-batches skip has a gradient from fewer tokens. Over how many is it a mean?

    tokens of the step      100        over all      what skipped it counts as zero: the gradient is small
    of those, through part 3 60        over visits   the mean of those that came: 100 / 60 of that

Where every micro-batch visits every part both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import IGNORED, Batch
from penstock.runtime.replicas import Tied


class Mean(StrEnum):
    """Over which tokens a part's gradient is a mean."""

    ALL = "all"
    VISITS = "visits"


class Visits:
    """The weights of one rank's parts; gradients of earlier steps are laid aside meanwhile."""

    def __init__(
        self, schedule: Schedule, modules: Mapping[int, nn.Module], mean: Mean, tied: Mapping[str, Tied] | None = None
    ) -> None:
        self.visitors = [_visitors(schedule, part) for part in range(schedule.parts)]
        self.owners: dict[nn.Parameter, int] = {}  # of the parts that some skip
        self.before: list[tuple[nn.Parameter, Tensor | None]] = []
        if mean is Mean.VISITS:
            partial = {part for part, some in enumerate(self.visitors) if len(some) < len(schedule.microbatches)}
            _refuse_tied(tied or {}, partial)
            for stage, module in modules.items():
                part = schedule.stages[stage].part
                self.owners |= dict.fromkeys(module.parameters() if part in partial else (), part)

    def begin(self) -> None:
        """A new step."""
        self.before = [(parameter, parameter.grad) for parameter in self.owners]
        for parameter in self.owners:
            parameter.grad = None

    def finish(self, batch: Batch) -> None:
        """Weighs the gradients of this step and adds them to those of earlier ones."""
        if not self.owners:
            return
        counts = [int((labels != IGNORED).sum()) for labels in batch.labels]
        came = [sum(counts[m] for m in some) for some in self.visitors]
        for parameter, earlier in self.before:
            if parameter.grad is not None:
                parameter.grad *= sum(counts) / max(came[self.owners[parameter]], 1)
                if earlier is not None:
                    parameter.grad += earlier
            else:
                parameter.grad = earlier


def _refuse_tied(tied: Mapping[str, Tied], partial: set[int]) -> None:
    """A parameter of two parts that different micro-batches visit has no mean over visits."""
    for name, shared in tied.items():
        if len(shared.parts) > 1 and partial.intersection(shared.parts):
            parts = " and ".join(map(str, shared.parts))
            raise ShapeError(f"{name} is in parts {parts}, of which some are skipped: take the mean over all tokens")


def _visitors(schedule: Schedule, part: int) -> list[int]:
    """Micro-batches whose path has a stage of that part."""
    stages = {number for number, stage in enumerate(schedule.stages) if stage.part == part}
    return [number for number, microbatch in enumerate(schedule.microbatches) if stages & set(microbatch.path)]
