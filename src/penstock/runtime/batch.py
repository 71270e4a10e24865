"""The data of one step: a micro-batch's tokens and labels, and over how many labels the loss is a mean.

Packed documents: `starts` has, for each token, the first one of its document; attention does not go across.

    tokens   a b c d e f        starts   0 0 0 3 3 3        two documents in a row of six tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ShapeError

IGNORED_LABEL = -100  # the label of a token that does not count


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batches of any number of rows and tokens. Labels are shifted already; `valid` counts those of the step."""

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    valid: int
    starts: tuple[Tensor, ...] = ()  # none: a row is one document

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and tokens of each micro-batch."""
        return tuple((x.shape[0], x.shape[1]) for x in self.inputs)

    @property
    def longest(self) -> tuple[int, ...]:
        """Tokens of the longest sequence of each micro-batch; of packed rows, of the longest document."""
        if not self.starts:
            return tuple(tokens for _, tokens in self.shapes)
        lengths = []
        for starts in self.starts:
            place = torch.arange(starts.shape[1], device=starts.device)
            lengths.append(int((place - starts).max()) + 1)
        return tuple(lengths)


def batch_of(
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    valid: int | None = None,
    starts: Sequence[Tensor] = (),
) -> Batch:
    """A batch from micro-batches; without `valid` the labels that count are counted here."""
    for word, others in (("labels", labels), ("starts", starts or inputs)):
        if len(inputs) != len(others):
            raise ShapeError(
                f"{len(inputs)} micro-batches have {len(others)} {word}: give each its own"
            )
        for number, (x, y) in enumerate(zip(inputs, others, strict=True)):
            if x.shape[:2] != y.shape[:2]:
                raise ShapeError(
                    f"micro-batch {number} has tokens {tuple(x.shape)} and {word} {tuple(y.shape)}"
                )
    count = (
        sum(int((y != IGNORED_LABEL).sum()) for y in labels) if valid is None else valid
    )
    return Batch(tuple(inputs), tuple(labels), max(count, 1), tuple(starts))


def cut_batch(
    inputs: Tensor, labels: Tensor, microbatches: int, starts: Tensor | None = None
) -> Batch:
    """Rows dealt out to so many micro-batches, the first ones one row larger where they do not divide."""
    if microbatches > len(inputs):
        raise ShapeError(
            f"{len(inputs)} rows cannot make {microbatches} micro-batches; the most is {len(inputs)}"
        )
    dealt = [
        torch.tensor_split(one, microbatches)
        for one in (inputs, labels, *([] if starts is None else [starts]))
    ]
    return batch_of(dealt[0], dealt[1], starts=dealt[2] if starts is not None else ())
