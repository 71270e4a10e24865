"""The ends of a stage that runs alone: a feed supplies its input, and a sink catches its output.

feed ──x──► stage ──y──► sink
     ◄─dx──       ◄─dy──
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.runtime.bundle import Bundle
from penstock.runtime.edges import Edge
from penstock.runtime.passed_values import Passed, has_gradient


class _CatchGradient(torch.autograd.Function):
    """Pass a value on, and hand over its gradient in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, hand_over: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.hand_over = hand_over
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.hand_over(gradient)
        return None, None, None


class End(nn.Module):
    """A feed or a sink, with the tensors it has caught by their number and the first token of the slice."""

    def __init__(self, edge: Edge | None) -> None:
        super().__init__()
        self.edge = edge
        self.caught: dict[int, dict[int, Tensor]] = {}
        self.many = False

    def catch(self, piece: Slice | None, number: int, tensor: Tensor) -> None:
        """Keep a tensor; the last one counts, since a recorded stage runs more than once."""
        begin = 0 if piece is None else piece.begin
        self.caught.setdefault(number, {})[begin] = tensor.detach()

    def joined(self) -> Tensor | Bundle:
        """The tensors of all slices, joined into one."""
        tensors = []
        for _, pieces in sorted(self.caught.items()):
            parts = [pieces[begin] for begin in sorted(pieces)]
            tensors.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return Bundle(tensors) if self.many else tensors[0]


def _cut(x: Tensor, piece: Slice | None) -> Tensor:
    """The tokens of a slice."""
    return x if piece is None else x[:, piece.begin : piece.end]


class Feed(End):
    """Supplies the stage's input, and catches its gradient. It has bundles itself; a tensor comes from the batch."""

    def __init__(self, x: Tensor | Bundle, edge: Edge | None) -> None:
        super().__init__(edge)
        self.bundle = x if isinstance(x, Bundle) else None
        self.many = self.bundle is not None
        # Autograd only visits this stage if it has a parameter.
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, piece: Slice | None = None) -> Any:
        """Return the input as it is."""
        if self.bundle is None:
            return self.supply(x, 0, piece)
        assert self.edge is not None
        tensors = []
        number = 0  # of those that have gradients
        for tensor in self.bundle.tensors:
            given = _cut(tensor, piece)
            if has_gradient(given.dtype):
                given = self.supply(given, number, piece)
                number += 1
            tensors.append(given)
        count = self.edge.values
        named = dict(zip(self.edge.names, tensors[count:], strict=True))
        return Passed(tuple(tensors[:count]), named)

    def supply(self, x: Tensor, number: int, piece: Slice | None) -> Tensor:
        """A tensor whose gradient is caught."""

        def hand_over(gradient: Tensor) -> None:
            self.catch(piece, number, gradient)

        y: Tensor = _CatchGradient.apply(x, self.anchor, hand_over)  # type: ignore[no-untyped-call]
        return y


class OutputSink(End):
    """Catches the stage's output. For bundles it is also the loss, since their gradients are not in the batch."""

    def __init__(self, target: Tensor | Bundle, edge: Edge | None) -> None:
        super().__init__(edge)
        self.gradients = target if isinstance(target, Bundle) else None
        self.many = self.gradients is not None

    @property
    def asked_names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return self.edge.names if self.edge is not None else ()

    def forward(
        self, *values: Any, piece: Slice | None = None, **named: Tensor
    ) -> Tensor:
        """Return the output as it is, or a number whose gradient is the given one."""
        tensors: list[Tensor] = [*values, *(named[name] for name in self.asked_names)]
        for number, x in enumerate(tensors):
            self.catch(piece, number, x)
        if self.gradients is None:
            return tensors[0]
        total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        differentiable = [x for x in tensors if has_gradient(x.dtype)]
        for x, gradient in zip(differentiable, self.gradients.tensors, strict=True):
            total = total + weighted_sum(x, _cut(gradient, piece))
        return total


def weighted_sum(y: Tensor, gradient: Tensor) -> Tensor:
    """A loss whose gradient is the given one; what is a number already stays as it is."""
    if y.dim() == 0:
        return y
    product = y.to(gradient.dtype) * gradient.conj()
    return (product.real if product.is_complex() else product).sum()
