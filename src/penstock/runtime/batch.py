"""The data of one step: the tokens and labels of its micro-batches, and the number of labels that count.

For packed documents, `starts` holds for each token the position at which its document starts. Attention does not cross
documents.

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
    """Micro-batches of any number of rows and tokens.

    Labels are shifted already. `valid` is the number of labels that count in the whole step.
    """

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    valid: int
    starts: tuple[Tensor, ...] = ()  # empty: a row is one document
    # Where each micro-batch is cut, in tokens, with as many slices as the schedule has; empty: as the schedule says.
    cuts: tuple[tuple[int, ...], ...] = ()
    # How many labels of each micro-batch count, if this rank does not have the labels of all; empty: it does.
    counts: tuple[int, ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and tokens of each micro-batch."""
        return tuple((x.shape[0], x.shape[1]) for x in self.inputs)

    @property
    def longest(self) -> tuple[int, ...]:
        """The length of the longest sequence in each micro-batch; in packed rows, of the longest document."""
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
    """A batch of these micro-batches. Without `valid`, the labels that count are counted here."""
    _refuse_unequal("labels", inputs, labels)
    if starts:
        _refuse_unequal("starts", inputs, starts)
    if valid is None:
        valid = sum(int((y != IGNORED_LABEL).sum()) for y in labels)
    return Batch(tuple(inputs), tuple(labels), max(valid, 1), tuple(starts))


def _refuse_unequal(
    name: str, inputs: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    """Raise an error unless each micro-batch has one tensor of its own rows and tokens."""
    if len(inputs) != len(others):
        raise ShapeError(
            f"{len(inputs)} micro-batches have {len(others)} {name}: give each its own"
        )
    for number, (x, other) in enumerate(zip(inputs, others, strict=True)):
        if x.shape[:2] != other.shape[:2]:
            raise ShapeError(
                f"micro-batch {number} has tokens {tuple(x.shape)} and {name} {tuple(other.shape)}"
            )


def cut_batch(
    inputs: Tensor, labels: Tensor, microbatches: int, starts: Tensor | None = None
) -> Batch:
    """Deal rows out to micro-batches; if they do not divide evenly, the first ones get one row more."""
    if microbatches > len(inputs):
        raise ShapeError(
            f"{len(inputs)} rows cannot make {microbatches} micro-batches; the most is {len(inputs)}"
        )
    cut_inputs = torch.tensor_split(inputs, microbatches)
    cut_labels = torch.tensor_split(labels, microbatches)
    if starts is None:
        return batch_of(cut_inputs, cut_labels)
    cut_starts = torch.tensor_split(starts, microbatches)
    return batch_of(cut_inputs, cut_labels, starts=cut_starts)
