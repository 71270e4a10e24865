"""The data of one step: the inputs and labels of its micro-batches, and the number of labels that count.

Inputs are tokens or anything else with a row for each example, such as images. `named` holds further tensors of each
micro-batch, such as masks or positions; a stage gets those that its forward asks for by name.

For packed documents, `starts` holds for each token the position at which its document starts. Attention does not cross
documents.

    tokens   a b c d e f        starts   0 0 0 3 3 3        two documents in a row of six tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import ShapeError

IGNORED_LABEL = -100  # the label of a token that does not count, among whole numbers
NamedShapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


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
    # Further tensors of each micro-batch, by name; empty: there are none.
    named: tuple[Mapping[str, Tensor], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each micro-batch's input: rows, tokens and whatever more it has."""
        return tuple(tuple(x.shape) for x in self.inputs)

    @property
    def named_shapes(self) -> tuple[NamedShapes, ...]:
        """The names and shapes of each micro-batch's further tensors; empty if there are none."""
        return tuple(
            tuple((name, tuple(x.shape)) for name, x in sorted(named.items()))
            for named in self.named
        )

    @property
    def longest(self) -> tuple[int, ...]:
        """The length of the longest sequence in each micro-batch; in packed rows, of the longest document."""
        if not self.starts:
            return tuple(shape[1] for shape in self.shapes)
        lengths = []
        for starts in self.starts:
            place = torch.arange(starts.shape[1], device=starts.device)
            lengths.append(int((place - starts).max()) + 1)
        return tuple(lengths)


def may_ignore(labels: Tensor) -> bool:
    """Whether some labels may not count. The targets of a regression all do: only whole numbers can be ignored."""
    kind = labels.dtype
    return kind.is_signed and not kind.is_floating_point and not kind.is_complex


def counting(labels: Tensor) -> Tensor:
    """Which labels count, as a mask.

    >>> counting(torch.tensor([3, -100])).tolist(), counting(torch.tensor([3.0, -100.0])).tolist()
    ([True, False], [True, True])
    """
    if may_ignore(labels):
        return labels != IGNORED_LABEL
    return torch.ones_like(labels, dtype=torch.bool)


def batch_of(
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    valid: int | None = None,
    starts: Sequence[Tensor] = (),
    named: Sequence[Mapping[str, Tensor]] = (),
) -> Batch:
    """A batch of these micro-batches. Without `valid`, the labels that count are counted here."""
    _refuse_unequal("labels", inputs, labels, 1)
    if starts:
        _refuse_unequal("starts", inputs, starts, 2)
    if named:
        for name in named[0]:
            _refuse_unequal(name, inputs, [each[name] for each in named], 1)
    if valid is None:
        valid = sum(int(counting(y).sum()) for y in labels)
    return Batch(
        tuple(inputs),
        tuple(labels),
        max(valid, 1),
        tuple(starts),
        named=tuple(named),
    )


def _refuse_unequal(
    name: str, inputs: Sequence[Tensor], others: Sequence[Tensor], dimensions: int
) -> None:
    """Raise an error unless each micro-batch has one tensor of its own rows and, with 2 dimensions, tokens."""
    if len(inputs) != len(others):
        raise ShapeError(
            f"{len(inputs)} micro-batches have {len(others)} {name}: give each its own"
        )
    for number, (x, other) in enumerate(zip(inputs, others, strict=True)):
        if x.shape[:dimensions] != other.shape[:dimensions]:
            raise ShapeError(
                f"micro-batch {number} has an input of shape {tuple(x.shape)} and {name} of shape {tuple(other.shape)}"
            )


def cut_batch(
    inputs: Tensor,
    labels: Tensor,
    microbatches: int,
    starts: Tensor | None = None,
    named: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Deal rows out to micro-batches; if they do not divide evenly, the first ones get one row more."""
    if microbatches > len(inputs):
        raise ShapeError(
            f"{len(inputs)} rows cannot make {microbatches} micro-batches; give at most {len(inputs)}"
        )
    for name, tensor in (named or {}).items():
        if tensor.dim() == 0 or len(tensor) != len(inputs):
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)}, but the batch has {len(inputs)} rows: "
                "give it one entry for each row (expand)"
            )
    cut_inputs = torch.tensor_split(inputs, microbatches)
    cut_labels = torch.tensor_split(labels, microbatches)
    cut_starts = () if starts is None else torch.tensor_split(starts, microbatches)
    cut_named: list[dict[str, Tensor]] = []
    if named:
        pieces = {name: x.tensor_split(microbatches) for name, x in named.items()}
        cut_named = [
            {name: cut[number] for name, cut in pieces.items()}
            for number in range(microbatches)
        ]
    return batch_of(cut_inputs, cut_labels, starts=cut_starts, named=cut_named)
