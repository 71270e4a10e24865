"""Over which micro-batches a part's gradient is a mean, where paths leave out parts.

    part            0     1     2          3 micro-batches of equal size, paths  0 1 / 0 2 / 0 2
    visited by    a b c   a    b c

    ALL           1/3    1/3   1/3         of each visitor's gradient: a part left out got a gradient of zero
    VISITS        1/3     1    1/2         a part left out was not asked

A pipeline divides every loss by the valid tokens of the whole step, so it computes ALL. VISITS is the same gradient
times (all valid tokens) / (those that visited the part). With equal coverage that is one constant a part: Adam divides
it out again, and only its epsilon and a clipping of the whole norm see a difference. Where visitors change from step
to step, or some steps are full, and with plain SGD, the two differ. With AdamW no difference was seen
(docs/results/convergence.md), so ALL, which needs no work, is the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from torch import nn

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import IGNORED_LABEL, Batch
from penstock.runtime.gradients import Tied


class Mean(StrEnum):
    """Over which tokens a part's gradient is a mean."""

    ALL = "all"
    VISITS = "visits"


class Visits:
    """The weights of one rank's parts; gradients of earlier steps are laid aside meanwhile."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        mean: Mean,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts = schedule.parts
        self.paths = [
            [schedule.stages[stage].part for stage in m.path]
            for m in schedule.microbatches
        ]
        self.owners: dict[nn.Parameter, int] = {}  # of the parts that some skip
        if mean is Mean.VISITS:
            partial = {
                part
                for part in range(schedule.parts)
                if any(part not in path for path in self.paths)
            }
            _refuse_tied(tied or {}, partial)
            for stage, module in modules.items():
                part = schedule.stages[stage].part
                self.owners |= dict.fromkeys(
                    module.parameters() if part in partial else (), part
                )

    def finish(self, batch: Batch) -> None:
        """Scale the gradients of this step, without those of earlier steps."""
        if not self.owners:
            return
        counts = [int((labels != IGNORED_LABEL).sum()) for labels in batch.labels]
        scales = visit_scales(self.parts, self.paths, counts)
        for parameter, part in self.owners.items():
            if parameter.grad is not None:
                parameter.grad *= scales[part]


def _refuse_tied(tied: Mapping[str, Tied], partial: set[int]) -> None:
    """A parameter of two parts that different micro-batches visit has no mean over visits."""
    for name, shared in tied.items():
        if len(shared.parts) > 1 and partial.intersection(shared.parts):
            parts = " and ".join(map(str, shared.parts))
            raise ShapeError(
                f"{name} is in parts {parts}, of which some are skipped: take the mean over all tokens"
            )


def visit_scales(
    parts: int, paths: Sequence[Sequence[int]], tokens: Sequence[int]
) -> tuple[float, ...]:
    """By what each part's gradient is multiplied to be a mean over its visitors, given each micro-batch's valid tokens.

    A part that nobody visited, and one that is on no path because all end there (the head), keeps its gradient.

    >>> visit_scales(3, [(0, 1), (0, 2), (0, 2)], [8, 8, 8])
    (1.0, 3.0, 1.5)
    """
    if len(paths) != len(tokens):
        raise ShapeError(
            f"{len(paths)} paths have {len(tokens)} counts of tokens: give each micro-batch its own"
        )
    met = [
        sum(count for path, count in zip(paths, tokens, strict=True) if part in path)
        for part in range(parts)
    ]
    return tuple(sum(tokens) / visited if visited else 1.0 for visited in met)


def scale_gradients(parts: Sequence[nn.Module], scales: Sequence[float]) -> None:
    """Multiplies the gradients of each part by its scale, in place: after the backwards, before any clipping."""
    scale_of: dict[int, float] = {}
    for number, (part, scale) in enumerate(zip(parts, scales, strict=True)):
        for parameter in part.parameters():
            if scale_of.setdefault(id(parameter), scale) != scale:
                raise ShapeError(
                    f"part {number} shares a parameter with one that is scaled otherwise, by "
                    f"{scale_of[id(parameter)]:g} and {scale:g}: tie only parts that all paths visit"
                )
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None and id(parameter) in scale_of:
                parameter.grad.mul_(scale_of.pop(id(parameter)))
