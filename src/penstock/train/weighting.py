"""Over which micro-batches a part's gradient is a mean, where paths leave out parts.

    part            0     1     2          3 micro-batches of equal size, paths  0 1 / 0 2 / 0 2
    visited by    a b c   a    b c

    ALL           1/3    1/3   1/3         of each visitor's gradient: a part left out got a gradient of zero
    VISITORS      1/3     1    1/2         a part left out was not asked

A pipeline divides every loss by the valid tokens of the whole step, so it computes ALL. VISITORS is the same gradient
times (all valid tokens) / (those that visited the part). With equal coverage that is one constant a part: Adam divides
it out again, and only its epsilon and a clipping of the whole norm see a difference. Where visitors change from step
to step, or some steps are full, and with plain SGD, the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from torch import nn

from penstock.errors import ShapeError


class Weighting(StrEnum):
    """Over whom a part's gradient is a mean."""

    ALL = "all"
    VISITORS = "visitors"


def visitor_scales(parts: int, paths: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[float, ...]:
    """By what each part's gradient is multiplied to be a mean over its visitors, given each micro-batch's valid tokens.

    A part that nobody visited, and one that is on no path because all end there (the head), keeps its gradient.

    >>> visitor_scales(3, [(0, 1), (0, 2), (0, 2)], [8, 8, 8])
    (1.0, 3.0, 1.5)
    """
    if len(paths) != len(tokens):
        raise ShapeError(f"{len(paths)} paths have {len(tokens)} counts of tokens: give each micro-batch its own")
    met = [sum(count for path, count in zip(paths, tokens, strict=True) if part in path) for part in range(parts)]
    return tuple(sum(tokens) / visited if visited else 1.0 for visited in met)


def weigh(parts: Sequence[nn.Module], scales: Sequence[float]) -> None:
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
