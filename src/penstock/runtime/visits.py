"""Chooses the micro-batches over which a part's gradient is a mean, when some micro-batches skip the part.

    part            0     1     2          3 micro-batches of equal size, with the paths  0 1 / 0 2 / 0 2
    visited by    a b c   a    b c

    ALL           1/3    1/3   1/3         the weight of each visitor: a skipped part has a gradient of zero
    VISITS        1/3     1    1/2         a skipped part has no gradient

A pipeline divides every loss by the valid tokens of the whole step, so it computes ALL. VISITS is the same gradient
times (all valid tokens) / (valid tokens that visited the part). If the coverage never changes, that is one constant per
part. Adam divides the constant out again; only its epsilon and clipping by the norm of all gradients see a difference.
The two differ with plain SGD, and where visitors change from step to step or some steps run the full model. With AdamW
we saw no difference (docs/results/convergence.md), so the default is ALL, which needs no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from torch import nn

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batch, counting
from penstock.runtime.gradients import Tied


class Mean(StrEnum):
    """The tokens over which a part's gradient is a mean."""

    ALL = "all"
    VISITS = "visits"


class Visits:
    """How much the gradients of one rank's parts count, by the micro-batches that visited them."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        mean: Mean,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts = schedule.parts
        self.paths = []
        for microbatch in schedule.microbatches:
            self.paths.append([schedule.stages[s].part for s in microbatch.path])
        self.owners: dict[nn.Parameter, int] = {}  # parameters to scale, and their part
        if mean is Mean.ALL:
            return
        skipped = _skipped_parts(self.parts, self.paths)
        _refuse_tied(tied or {}, skipped)
        for stage, module in modules.items():
            part = schedule.stages[stage].part
            if part in skipped:
                self.owners.update(dict.fromkeys(module.parameters(), part))

    def finish(self, batch: Batch, parameters: Iterable[nn.Parameter]) -> None:
        """Scale the gradients of these parameters in this step, without those of earlier steps."""
        if not self.owners:
            return
        counts: Sequence[int] = batch.counts
        if not counts:
            counts = [int(counting(labels).sum()) for labels in batch.labels]
        scales = visit_scales(self.parts, self.paths, counts)
        for parameter in parameters:
            part = self.owners.get(parameter)
            if part is not None and parameter.grad is not None:
                parameter.grad *= scales[part]


def _skipped_parts(parts: int, paths: Sequence[Sequence[int]]) -> set[int]:
    """The parts that at least one micro-batch skips."""
    skipped = set()
    for path in paths:
        skipped.update(set(range(parts)).difference(path))
    return skipped


def _refuse_tied(tied: Mapping[str, Tied], skipped: set[int]) -> None:
    """Raise an error if a parameter belongs to two parts that different micro-batches visit.

    It has no mean over visits.
    """
    for name, shared in tied.items():
        if len(shared.parts) > 1 and skipped.intersection(shared.parts):
            parts = " and ".join(map(str, shared.parts))
            raise ShapeError(
                f"{name} is in parts {parts}, of which some are skipped: take the mean over all tokens"
            )


def visit_scales(
    parts: int, paths: Sequence[Sequence[int]], tokens: Sequence[int]
) -> tuple[float, ...]:
    """The factors that turn each part's gradient into a mean over its visitors.

    `tokens` are the valid tokens of each micro-batch. A part on no path keeps its gradient: nobody visited it, or it is
    the head, where all paths end.

    >>> visit_scales(3, [(0, 1), (0, 2), (0, 2)], [8, 8, 8])
    (1.0, 3.0, 1.5)
    """
    if len(paths) != len(tokens):
        raise ShapeError(
            f"{len(paths)} paths have {len(tokens)} counts of tokens: give each micro-batch its own"
        )
    total = sum(tokens)
    scales = []
    for part in range(parts):
        visited = 0
        for path, count in zip(paths, tokens, strict=True):
            if part in path:
                visited += count
        scales.append(total / visited if visited else 1.0)
    return tuple(scales)


def scale_gradients(parts: Sequence[nn.Module], scales: Sequence[float]) -> None:
    """Multiply the gradients of each part by its scale, in place.

    Call it after all backwards and before any clipping.
    """
    scale_of: dict[int, float] = {}
    for number, (part, scale) in enumerate(zip(parts, scales, strict=True)):
        for parameter in part.parameters():
            if scale_of.setdefault(id(parameter), scale) != scale:
                raise ShapeError(
                    f"part {number} shares a parameter with a part that has another scale ({scale:g} and "
                    f"{scale_of[id(parameter)]:g}): tie only parts that all paths visit"
                )
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None and id(parameter) in scale_of:
                parameter.grad.mul_(scale_of.pop(id(parameter)))
