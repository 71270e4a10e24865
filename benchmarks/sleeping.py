"""A stage that sleeps instead of computing, with real tensors, real autograd and the times of a cost.

It shows what the runtime and the network cost without needing cores: a hundred ranks fit on a laptop.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import PartCost
from penstock.models.slice import Slice
from penstock.runtime.backward import current_ledger, defer


class Naps(NamedTuple):
    """The seconds to sleep for each operation on a slice."""

    forward: float
    inputs: float  # I, the input's part of a split backward
    weights: float  # W, the weights' part
    backward: float  # a whole backward


class Sleeping(nn.Module):
    """Sleeps as long as a part with this cost takes on a rank of this speed.

    `scale` multiplies all times. Sequences are as long as in the cost, or `stretch` times
    shorter, which allows for small tensors.
    """

    def __init__(
        self,
        part: PartCost,
        speed: float = 1.0,
        scale: float = 1.0,
        stretch: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.part = part
        self.factor = scale / speed
        self.stretch = stretch
        self.known_naps: dict[tuple[int, int], Naps] = {}  # by tokens and prefix

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Sleep, and return x."""
        prefix = 0 if piece is None else piece.begin
        shape = (x.shape[1], prefix)
        naps = self.known_naps.get(shape)
        if naps is None:
            naps = self.naps(*shape)
            self.known_naps[shape] = naps
        y: Tensor = _Sleep.apply(x, self.weight, naps)  # type: ignore[no-untyped-call]
        return y

    def naps(self, tokens: int, prefix: int) -> Naps:
        """The seconds to sleep for a slice of `tokens` tokens after `prefix` tokens."""
        part = self.part
        span = (round(tokens * self.stretch), round(prefix * self.stretch))
        forward = self.factor * part.F.of(*span)
        inputs = self.factor * part.I.of(*span)
        weights = self.factor * part.W.of(*span)
        backward = inputs + weights
        if part.B is not None:
            backward = self.factor * part.B.of(*span)
        return Naps(forward, inputs, weights, backward)


class _Sleep(torch.autograd.Function):
    """Sleeps in the forward and the backward; if that is split, partly in W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, naps: Naps) -> Tensor:
        ctx.naps = naps
        ctx.ledger = current_ledger()
        time.sleep(naps.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        naps: Naps = ctx.naps
        if ctx.ledger is None or not ctx.ledger.open:
            time.sleep(naps.backward)
        else:
            if naps.inputs:
                time.sleep(naps.inputs)
            defer(ctx.ledger, lambda: time.sleep(naps.weights))
        return gradient, None, None
