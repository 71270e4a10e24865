"""Checks whether a loss is a sum or a mean over labels: both train, but only one trains as it should.

    sum     loss(a and b) = loss(a) + loss(b)            the executor divides it by the labels of the whole step
    mean    loss(a and b) = half of that                 the executor first multiplies it by its number of labels

A mean that is taken for a sum would be divided twice. In the first step we therefore compute the loss of a few labels
at once and of each half of them: once for a few labels of one row, and once for one label in each of two rows. A mean
must also stay the same if labels that do not count are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.runtime.batch import IGNORED_LABEL, counting, may_ignore
from penstock.runtime.randomness import undrawn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> sum or mean
MAX_LABELS_CHECKED = 32
Pieces: TypeAlias = tuple[Tensor, Tensor]  # rows and tokens
WHOLE_ROWS = torch.empty(0, dtype=torch.long)  # instead of tokens


class Reduction(StrEnum):
    """How a loss combines the losses of its labels."""

    SUM = "sum"
    MEAN = "mean"


def reduction_of(name: str) -> Reduction:
    """The reduction of this name."""
    if name not in list(Reduction):
        raise ShapeError(
            f"reduction must be 'sum' or 'mean', not {name!r}: it says how the loss combines its labels' losses"
        )
    return Reduction(name)


def plain_loss(loss: Loss) -> Loss:
    """The loss without torch.compile or other machinery, which computes the same from logits and labels."""
    plain: Loss = getattr(loss, "plain", loss)
    return plain


def is_known_sum(loss: Loss) -> bool:
    """Whether a loss says that it is a sum over labels, so that nobody needs to try it."""
    return bool(getattr(loss, "is_known_sum", False))


def as_sum(mean: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses with this mean; zero if no label counts."""
    count = counting(labels).sum()
    return torch.where(count > 0, mean, torch.zeros_like(mean)) * count


def refuse_other_loss(
    loss: Loss, y: object, labels: Tensor, said: Reduction, stage: int, sliced: bool
) -> bool:
    """Raise an error if a loss is not the stated reduction; return whether these labels were enough to tell.

    If `sliced`, the labels of one row come in several calls, so the loss must be a sum over them.
    """
    if not isinstance(y, Tensor):  # several outputs, which only the loss can take apart
        return True
    y = y.detach()
    with torch.no_grad(), undrawn(y.device):
        try:
            whole = loss(y.clone(), labels)  # it may change what it gets
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ShapeError(
                f"the loss on stage {stage} cannot compare its output, {described(y)}, with the labels, "
                f"{described(labels)}: {reason}"
            ) from error
        if not isinstance(whole, Tensor) or whole.numel() != 1:
            raise ShapeError(
                f"the loss on stage {stage} returned {described(whole)}, but it must return one number, the sum of the "
                "losses of all labels that count (or their mean, with reduction='mean')"
            )
        if said is Reduction.MEAN:
            _refuse_uneven_mean(loss, y, labels, float(whole))
        found = [
            _refuse(loss, y, labels, said, pair, sliced and along == 1)
            for along, pair in _cuts(y, labels)
        ]
        return any(found)


def _refuse(
    loss: Loss,
    y: Tensor,
    labels: Tensor,
    said: Reduction,
    cut: tuple[Pieces, Pieces],
    strict: bool,
) -> bool:
    try:
        first, second = (
            float(loss(_at(y, piece), _at(labels, piece))) for piece in cut
        )
        both = float(
            loss(
                *(
                    torch.cat([_at(one, piece) for piece in cut], dim=_side(cut))
                    for one in (y, labels)
                )
            )
        )
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
    ):  # a loss that takes whole micro-batches only
        return False
    total = abs(first) + abs(second)
    if not total < float("inf") or not abs(both) < float("inf") or total == 0.0:
        return False
    is_sum = abs(both - first - second) < 0.02 * total
    # How far it is from a mean that counts the same labels as we do.
    off = abs(both - (first + second) / 2)
    near = 0.2 if said is Reduction.SUM else _tolerance(y)
    is_mean = off < near * total and not is_sum
    if said is Reduction.SUM and is_mean:
        raise ShapeError(
            f"the loss is a mean over labels, not their sum: {both:.4g} of some labels, {first:.4g} and {second:.4g} "
            "of their halves\n  it would be divided by the labels of the step once more; take reduction='sum' in the "
            "loss itself (as penstock.models.token_loss does), or say reduction='mean' to the Pipeline or Executor"
        )
    if said is Reduction.MEAN and not is_mean:
        raise ShapeError(
            f"reduction='mean', but the loss is not a mean over labels: {both:.4g} of some labels, {first:.4g} and "
            f"{second:.4g} of their halves\n  leave out `reduction` if it is a sum; labels that do not count must be "
            f"{IGNORED_LABEL}"
        )
    if strict and not is_sum and said is Reduction.SUM:
        raise ShapeError(
            f"the loss is not a sum over labels: {both:.4g} of some labels, {first:.4g} and "
            f"{second:.4g} of their halves\n"
            "  token slices ask it for some labels of a sequence at a time; shift labels beforehand "
            "(penstock.models.shift_labels), or make the schedule with slices=1"
        )
    if said is Reduction.MEAN and may_ignore(labels):
        _refuse_other_divisor(loss, y, labels, cut, first)
    return True


def _tolerance(y: Tensor) -> float:
    """How much a mean may be off because numbers are rounded, as a share of it."""
    coarse = y.element_size() < 4 or torch.is_autocast_enabled(y.device.type)
    return 0.02 if coarse else 1e-4


def _refuse_uneven_mean(loss: Loss, y: Tensor, labels: Tensor, whole: float) -> None:
    """Raise an error if a loss of all labels is not the mean of those of two halves, each by its labels that count."""
    side = 0 if len(labels) > 1 else 1
    if labels.dim() <= side or y.shape[: side + 1] != labels.shape[: side + 1]:
        return
    if y.shape[side] < 2:
        return
    means, counts = [], []
    for outputs, known in zip(y.chunk(2, side), labels.chunk(2, side), strict=True):
        counts.append(int(counting(known).sum()))
        try:
            means.append(float(loss(outputs.clone(), known)))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return  # a loss that takes whole micro-batches only
    if not all(counts):
        return
    size = sum(map(abs, means))
    if not size < float("inf"):
        return
    mean = (means[0] * counts[0] + means[1] * counts[1]) / sum(counts)
    if abs(whole - mean) > _tolerance(y) * size:
        raise ShapeError(
            f"reduction='mean', but the loss is not a mean over labels: {whole:.4g} of {sum(counts)} labels, "
            f"{means[0]:.4g} and {means[1]:.4g} of the first {counts[0]} and the other {counts[1]}\n"
            "  leave out `reduction` and return the sum over labels; labels that do not count must be "
            f"{IGNORED_LABEL}"
        )


def _refuse_other_divisor(
    loss: Loss, y: Tensor, labels: Tensor, cut: tuple[Pieces, Pieces], mean: float
) -> None:
    """Raise an error if a mean over the first piece changes when all labels of the second one do not count."""
    ignores = not bool(counting(labels).all())
    # A label that does not count stops a GPU for good if the loss cannot take it, so only a CPU tries one of our own.
    device = y.device if ignores else torch.device("cpu")
    outputs = torch.cat([_at(y, piece) for piece in cut], dim=_side(cut)).to(device)
    known, others = (_at(labels, piece).to(device) for piece in cut)
    dropped = torch.full_like(others, IGNORED_LABEL)
    try:
        found = float(loss(outputs, torch.cat([known, dropped], dim=_side(cut))))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return  # It never meets such a label, or it would have raised before.
    if abs(found - mean) <= 0.02 * abs(mean):
        return
    divided = mean * known.numel() / (known.numel() + others.numel())
    by_all = abs(found - divided) <= 0.02 * abs(mean)
    if by_all or ignores:
        what = "divides by all labels, also by" if by_all else "counts"
        raise ShapeError(
            f"reduction='mean', but the loss {what} those that do not count ({IGNORED_LABEL}): {mean:.4g} of some "
            f"labels, and {found:.4g} together with others that do not count\n  divide the sum of the labels that "
            f"count by their number, (labels != {IGNORED_LABEL}).sum(), or return the sum and leave out `reduction`"
        )


def _cuts(y: Tensor, labels: Tensor) -> Iterator[tuple[int, tuple[Pieces, Pieces]]]:
    """Two pieces with the same number of labels that count: in one row, and in two rows.

    Where a row has one label, such as a class, or labels and outputs are not laid out alike, only whole rows are cut.
    """
    if not y.dim() or len(y) != len(labels):
        return  # A GPU does not survive a row that is not there.
    counts = counting(labels.detach()).cpu()
    if counts.dim() < 2 or y.shape[:2] != labels.shape[:2]:
        complete = counts.flatten(1).all(1) if counts.dim() > 1 else counts
        rows = complete.nonzero().flatten()[:2]
        if len(rows) == 2:
            yield 0, ((rows[:1], WHOLE_ROWS), (rows[1:], WHOLE_ROWS))
        return
    if counts.dim() > 2:  # further dimensions belong to a label
        counts = counts.flatten(2).all(2)
    # The row and the column with the most labels that count.
    row = int(counts.sum(1).argmax())
    column = int(counts.sum(0).argmax())
    places = counts[row].nonzero().flatten()[:MAX_LABELS_CHECKED]
    half = len(places) // 2
    if half:
        begin, middle, end = (
            int(places[0]),
            int(places[half]),
            int(places[2 * half - 1]) + 1,
        )
        one = torch.tensor([row])
        yield 1, ((one, torch.arange(begin, middle)), (one, torch.arange(middle, end)))
    rows = counts[:, column].nonzero().flatten()[:2]
    if len(rows) == 2:
        at = torch.tensor([column])
        yield 0, ((rows[:1], at), (rows[1:], at))


def _at(x: Tensor, piece: Pieces) -> Tensor:
    rows, tokens = (one.to(x.device) for one in piece)
    chosen = x.index_select(0, rows)
    return chosen.index_select(1, tokens) if len(tokens) else chosen


def _side(cut: tuple[Pieces, Pieces]) -> int:
    """The dimension along which two pieces join: 0 if they are rows, 1 if they lie in the same row."""
    return 1 if torch.equal(cut[0][0], cut[1][0]) else 0


def described(value: object) -> str:
    """A value in words: its type and, for a tensor, its data type and shape."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(one).__name__ for one in value)})"
    return f"a {type(value).__name__}"
