"""Losses of a step: whether one is a sum or a mean, one without all logits in memory, and those that layers add."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.cost.sizes import MIN_LOGITS_BYTES
from penstock.errors import ShapeError
from penstock.models.slice import Slice
from penstock.runtime.backward import (
    Ledger,
    accumulate,
    accumulate_product,
    add_product,
    can_wait,
    current_ledger,
    defer,
    weight_in,
)
from penstock.runtime.batch import IGNORED_LABEL, counting, may_ignore
from penstock.runtime.compiled import compiled_method, let_tokens_vary
from penstock.runtime.module_state import undrawn
from penstock.runtime.passed_values import described
from penstock.torch_internals import has_hooks, is_compiled

# ---------------------------------------------------------------- sums and means
# Checks whether a loss is a sum or a mean over labels: both train, but only one trains as it should.
#
#     sum     loss(a and b) = loss(a) + loss(b)            the executor divides it by the labels of the whole step
#     mean    loss(a and b) = half of that                 the executor first multiplies it by its number of labels
#
# A mean that is taken for a sum would be divided twice. In the first step we therefore compute the loss of a few labels
# at once and of each half of them: once for a few labels of one row, and once for one label in each of two rows. A mean
# must also stay the same if labels that do not count are added.


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> sum or mean

MAX_LABELS_CHECKED = 32

Pieces: TypeAlias = tuple[Tensor, Tensor]  # rows and tokens

# What a loss raises that cannot take what it is given.
LOSS_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)

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
        except LOSS_ERRORS as error:
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
    halves = [_tried(loss, _at(y, piece), _at(labels, piece)) for piece in cut]
    first, second = halves
    both = _tried(loss, _joined(y, cut), _joined(labels, cut))
    if first is None or second is None or both is None:
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


def _tried(loss: Loss, y: Tensor, labels: Tensor) -> float | None:
    """The loss of some labels; None for a loss that takes whole micro-batches only."""
    try:
        return float(loss(y, labels))
    except LOSS_ERRORS:
        return None


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
        one = _tried(loss, outputs.clone(), known)
        if one is None:
            return
        means.append(one)
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
    outputs = _joined(y, cut).to(device)
    known, others = (_at(labels, piece).to(device) for piece in cut)
    dropped = torch.full_like(others, IGNORED_LABEL)
    found = _tried(loss, outputs, torch.cat([known, dropped], dim=_side(cut)))
    # A loss that raises never meets such a label, or it would have raised before.
    if found is None or abs(found - mean) <= 0.02 * abs(mean):
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


def _joined(x: Tensor, cut: tuple[Pieces, Pieces]) -> Tensor:
    """Two pieces as one."""
    return torch.cat([_at(x, piece) for piece in cut], dim=_side(cut))


def _side(cut: tuple[Pieces, Pieces]) -> int:
    """The dimension along which two pieces join: 0 if they are rows, 1 if they lie in the same row."""
    return 1 if torch.equal(cut[0][0], cut[1][0]) else 0


# ---------------------------------------------------------------- chunked loss
# The cross entropy of a head without all of its logits in memory.
#
# hidden (tokens, width) ──┬─ chunk 0 ─ logits ─ softmax ─┬─► loss
#                          ├─ chunk 1 ─ logits ─ softmax ─┤
#                          └─ ...                         └─► gradient of the logits, in the precision of the products
#
# Logits take by far the most memory of a model with a large vocabulary: a plain loss keeps them several times, mostly
# in float32. Here the forward computes the gradient of a chunk's logits as soon as it has them, and the logits are
# dropped. Nothing is computed twice. What is kept until the backward depends on the shape:
#
#     kept      the gradients of the logits, (tokens, vocabulary): the backward computes both products, and a split
#               backward leaves that of the weight to W
#     at once   the gradients of hidden and of the weight, (vocabulary, width): smaller if there are many tokens

DEFAULT_CHUNK = 2048  # tokens: enough to fill a GPU


class Chunk(NamedTuple):
    """The share of a chunk in the loss, and the gradient of its logits in training."""

    loss: Tensor
    gradient: Tensor | None


class ChunkedLoss:
    """A loss for the last stage of a pipeline, which takes its hidden state instead of its logits.

    `loss` is the plain loss: `penstock.models.token_loss`, or another one that computes the same. It also serves stages
    that do not say how they compute their logits, and logits that are small. `compiler` is a backend of torch.compile.
    """

    def __init__(
        self,
        loss: Loss,
        chunk: int = DEFAULT_CHUNK,
        compiler: str = "",
        min_bytes: int = MIN_LOGITS_BYTES,
    ) -> None:
        self.loss = loss
        self.plain: Loss = getattr(loss, "plain", loss)
        self.chunk = chunk
        self.compiler = compiler
        self.min_bytes = min_bytes

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The plain loss."""
        return self.loss(logits, labels)

    def share(
        self,
        module: nn.Module,
        x: Tensor,
        piece: Slice | None,
        labels: Tensor,
        valid: int | Tensor,
    ) -> Tensor | None:
        """The loss of a stage's output, divided by the number of valid labels; None if the plain loss must do it."""
        output = getattr(module, "output_layer", None)
        if not isinstance(output, nn.Linear) or output.bias is not None:
            return None
        if is_compiled(module) or has_hooks(module) or has_hooks(output):
            return None  # calling parts of it would bypass these
        wide_bytes = labels.numel() * output.out_features * torch.float32.itemsize
        if self.chunk <= 0 or wide_bytes < self.min_bytes:
            return None
        find_hidden: Callable[..., Tensor] = module.hidden
        hidden = find_hidden(x, piece)
        ledger = current_ledger()
        if ledger is not None and not can_wait(ledger, output):
            ledger = None
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if not isinstance(valid, Tensor):
            valid = torch.full(
                (), float(valid), dtype=torch.float64, device=hidden.device
            )
        work = _Work(self, ledger, dtype, torch.is_grad_enabled(), output.weight)
        with torch.autocast(device, enabled=False):
            loss: Tensor = _ChunkedLoss.apply(
                hidden, output.weight, labels, valid, work
            )
            return loss

    def chunk_of(
        self, logits: Tensor, labels: Tensor, valid: Tensor, training: bool
    ) -> Chunk:
        """The loss and the gradient of some tokens."""
        if not self.compiler:
            return chunk_loss(logits, labels, valid, training)
        let_tokens_vary((logits, labels))
        call = compiled_method(chunk_loss, self.compiler).call
        loss, gradient = call(chunk_loss, (), logits, labels, valid, training)
        return Chunk(loss, gradient)


class _Work(NamedTuple):
    """How one loss is computed."""

    loss: ChunkedLoss
    ledger: Ledger | None
    dtype: torch.dtype
    training: bool
    weight: Tensor


def tensors_held(loss: Tensor) -> list[Tensor]:
    """Return what a chunked loss keeps for its backward, which hooks on saved tensors do not see."""
    node: Any = loss.grad_fn
    found: list[Tensor] = list(getattr(node, "gradients", None) or ())
    for name in ("flat", "product"):
        tensor = getattr(node, name, None)
        if isinstance(tensor, Tensor):
            found.append(tensor)
    return found


def chunk_loss(logits: Tensor, labels: Tensor, valid: Tensor, training: bool) -> Chunk:
    """The cross entropy of some tokens divided by `valid`, and the gradient of their logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logs = F.log_softmax(wide, dim=-1)
    counts = labels != IGNORED_LABEL
    words = labels.where(counts, 0)[:, None]
    each = logs.gather(1, words)[:, 0].where(counts, 0.0)
    valid = valid.to(wide.dtype)
    loss = -each.sum() / valid
    if not training:
        return Chunk(loss, None)
    factor = (counts / valid).to(wide.dtype)[:, None]
    if torch.compiler.is_compiling():  # the compiler makes one kernel of it
        right = torch.arange(logits.shape[1], device=logits.device) == words
        gradient = (logs.exp() - right.to(logs.dtype)) * factor
    else:
        gradient = logs.exp_()
        gradient.scatter_add_(1, words, -torch.ones_like(gradient[:, :1]))
        gradient *= factor
    return Chunk(loss, gradient.to(logits.dtype))


class _ChunkedLoss(torch.autograd.Function):
    """The loss of a hidden state and the weight of an output layer."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        valid: Tensor,
        work: _Work,
    ) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1]).to(work.dtype)
        matrix = weight_in(work.ledger, weight, work.dtype)
        tokens = flat.shape[0]
        count = -(-tokens // work.loss.chunk)
        size = -(-tokens // count)
        trains = work.training and weight.requires_grad
        kept_bytes = tokens * weight.shape[0] * work.dtype.itemsize
        at_once = trains and (work.ledger is None or not work.ledger.splits)
        at_once = at_once and kept_bytes > weight.numel() * weight.element_size()
        wide = torch.promote_types(work.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=flat.device)
        gradients: list[Tensor] = []  # of the logits, or of hidden if at once
        product = torch.zeros_like(weight, dtype=wide) if at_once else None
        for rows, words in zip(
            torch.split(flat, size), torch.split(labels.flatten(), size), strict=True
        ):
            logits = rows @ matrix.t()
            loss, gradient = work.loss.chunk_of(logits, words, valid, work.training)
            del logits
            total += loss
            if gradient is None:
                continue
            if product is None:
                gradients.append(gradient)
            else:
                gradients.append(gradient @ matrix)
                add_product(product, gradient.t(), rows)
        ctx.work, ctx.shape, ctx.size = work, hidden.shape, size
        ctx.type, ctx.gradients, ctx.product, ctx.flat = (
            hidden.dtype,
            gradients,
            product,
            flat,
        )
        return total

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        work: _Work = ctx.work
        weight = work.weight
        gradients: list[Tensor] = ctx.gradients
        flat: Tensor = ctx.flat
        product: Tensor | None = ctx.product
        ctx.gradients = ctx.flat = ctx.product = None
        # This comes first: torch warns if a thread's first work on a GPU is a product.
        scale = grad.to(work.dtype)
        grad_hidden = None
        if ctx.needs_input_grad[0]:
            parts = gradients
            if product is None:
                matrix = weight_in(work.ledger, weight, work.dtype)
                parts = [gradient @ matrix for gradient in gradients]
            grad_hidden = torch.cat(parts) * scale
            grad_hidden = grad_hidden.to(ctx.type).view(ctx.shape)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None, None
        if product is not None:
            product *= grad
            if work.ledger is None:
                return grad_hidden, product.to(weight.dtype), None, None, None
            accumulate(weight, product)
            return grad_hidden, None, None, None, None
        rows = torch.split(flat * scale, ctx.size)
        if work.ledger is None:
            total = torch.zeros_like(weight)
            for gradient, taken in zip(gradients, rows, strict=True):
                total += gradient.t() @ taken
            return grad_hidden, total, None, None, None

        def settle() -> None:
            for gradient, taken in zip(gradients, rows, strict=True):
                accumulate_product(weight, gradient, taken)

        defer(work.ledger, settle)
        return grad_hidden, None, None, None, None


# ---------------------------------------------------------------- added losses
# Losses that a layer adds to the loss of the model, such as the one that balances the experts of a mixture.
#
#     class Experts(nn.Module):
#         def forward(self, x):
#             ...
#             add_loss(0.01 * balance)         one number, the mean over the tokens of x
#             return y
#
# A pipeline adds it up wherever the layer is, on inner stages too. Each micro-batch counts by its share of the labels,
# as in a mean over all of them, so the gradients are those of
#
#     with collected_losses() as losses:       the model in one piece, one micro-batch at a time
#         y = model(x)
#     loss = mean_loss(y, labels) + sum(losses)
#
# Outside a pipeline and outside `collected_losses` an added loss is ignored.

_here = threading.local()  # the losses that were added on this thread


def add_loss(loss: Tensor) -> None:
    """Add a number to the loss of the forward that runs now."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ShapeError(
            f"add_loss takes one number as a tensor, not {described(loss)}"
        )
    if torch.compiler.is_compiling():
        raise ShapeError(
            "add_loss cannot be compiled: do not compile the layer that calls it"
        )
    losses: list[Tensor] | None = getattr(_here, "losses", None)
    if losses is not None:
        losses.append(loss.reshape(()))


@contextmanager
def adding_to(losses: list[Tensor]) -> Iterator[None]:
    """Append the losses that layers add on this thread to a list."""
    before = getattr(_here, "losses", None)
    _here.losses = losses
    try:
        yield
    finally:
        _here.losses = before


@contextmanager
def collected_losses() -> Iterator[list[Tensor]]:
    """Collect the losses that layers add, in a list."""
    losses: list[Tensor] = []
    with adding_to(losses):
        yield losses


def take_sum(losses: list[Tensor]) -> Tensor:
    """The sum of some losses, which are forgotten here."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    losses.clear()
    return total
