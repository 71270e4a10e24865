"""The cross entropy of a head without all of its logits in memory.

    hidden (tokens, width) ──┬─ chunk 0 ─ logits ─ softmax ─┬─► loss
                             ├─ chunk 1 ─ logits ─ softmax ─┤
                             └─ ...                         └─► gradient of the logits, in the precision of the products

Logits take by far the most memory of a model with a large vocabulary: a plain loss keeps them several times, mostly in
float32. Here the forward computes the gradient of a chunk's logits as soon as it has them, and the logits are dropped.
Nothing is computed twice. What is kept until the backward depends on the shape:

    kept      the gradients of the logits, (tokens, vocabulary): the backward computes both products, and a split
              backward leaves that of the weight to W
    at once   the gradients of hidden and of the weight, (vocabulary, width): smaller if there are many tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.cost.sizes import MIN_LOGITS_BYTES
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
from penstock.runtime.batch import IGNORED_LABEL
from penstock.runtime.compiled_stages import compiled_method, let_tokens_vary
from penstock.runtime.loss_reduction import Loss
from penstock.runtime.torch_internals import has_hooks, is_compiled

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
