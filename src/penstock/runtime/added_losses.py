"""Losses that a layer adds to the loss of the model, such as the one that balances the experts of a mixture.

    class Experts(nn.Module):
        def forward(self, x):
            ...
            add_loss(0.01 * balance)         one number, the mean over the tokens of x
            return y

A pipeline adds it up wherever the layer is, on inner stages too. Each micro-batch counts by its share of the labels, as
in a mean over all of them, so the gradients are those of

    with collected_losses() as losses:       the model in one piece, one micro-batch at a time
        y = model(x)
    loss = mean_loss(y, labels) + sum(losses)

Outside a pipeline and outside `collected_losses` an added loss is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.runtime.loss_reduction import described

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
