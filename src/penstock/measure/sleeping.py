"""A stage that sleeps instead of computing: real tensors, real autograd, and the times of a cost.

It shows what a runtime and a network cost without needing cores: a hundred ranks fit on a laptop.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.cost.model import PartCost
from penstock.runtime.backward import current_ledger, defer

Naps = tuple[float, float, float, float]  # of F, I, W and a whole backward


class Sleeping(nn.Module):
    """Sleeps as long as a part of that cost takes, on a rank of that speed; times are multiplied by `scale`.

    Sequences are as long as in the cost, or `stretch` times shorter (for small tensors).
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
        self.part, self.factor, self.stretch = part, scale / speed, stretch
        self.known: dict[tuple[int, int], Naps] = {}

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """x, later."""
        shape = (x.shape[1], 0 if piece is None else piece.begin)
        naps = self.known.get(shape)
        if naps is None:
            naps = self.known[shape] = self.naps(*shape)
        y: Tensor = _Sleep.apply(x, self.weight, naps)  # type: ignore[no-untyped-call]
        return y

    def naps(self, tokens: int, prefix: int) -> Naps:
        """Seconds of each op for so many tokens after so many."""
        part, span = (
            self.part,
            (round(tokens * self.stretch), round(prefix * self.stretch)),
        )
        f, i, w = (self.factor * curve.of(*span) for curve in (part.F, part.I, part.W))
        return f, i, w, i + w if part.B is None else self.factor * part.B.of(*span)


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward; its weights' share later, if the backward is split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, naps: Naps) -> Tensor:
        ctx.naps, ctx.ledger = naps, current_ledger()
        time.sleep(naps[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, inputs, weights, whole = ctx.naps
        if ctx.ledger is None or not ctx.ledger.open:
            time.sleep(whole)
        else:
            if inputs:
                time.sleep(inputs)
            defer(ctx.ledger, lambda: time.sleep(weights))
        return grad, None, None
