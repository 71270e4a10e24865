"""Split backwards in one traversal: linear layers compute the input gradient at once and leave the weight gradient.

    I   one walk through the graph; each linear layer gives  grad_x = grad_y W   and keeps (x, grad_y) in the ledger
    W   the ledger is settled: for each entry                grad_W += grad_y^T x

Everything else (norms, embeddings: little work) has its weight gradient in I. A module that wants to leave other work
calls `defer` inside the backward of an autograd function. A compiled module is one piece for autograd: its I does
everything, and its W nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Work = Callable[[], None]
_here = threading.local()  # the ledger of the forward that runs on this thread


class Ledger:
    """Weight gradients that are due, of one forward."""

    __slots__ = ("due", "open")

    def __init__(self) -> None:
        self.due: list[Work] = []
        self.open = False  # whether the backward that runs now may leave work

    def settle(self) -> None:
        """Does what is due."""
        with torch.no_grad():
            for work in self.due:
                work()
        self.due.clear()


def current_ledger() -> Ledger | None:
    """The ledger of the forward that runs now: keep it in an autograd function's context, for `defer`."""
    return getattr(_here, "ledger", None)


def defer(ledger: Ledger | None, work: Work) -> None:
    """Leaves work for W if this backward is split, else does it now."""
    if ledger is not None and ledger.open:
        ledger.due.append(work)
    else:
        work()


def record_in(ledger: Ledger | None) -> None:
    """Forwards on this thread write into that ledger from now on."""
    _here.ledger = ledger


def walk_back(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` less its argument handling, which costs as much as a small graph does."""
    _ENGINE.run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


_ENGINE = torch.autograd.Variable._execution_engine


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose weight gradient can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.ledger = bias, current_ledger()
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        bias = ctx.bias
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None

        def settle() -> None:
            rows = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                accumulate_product(weight, rows, x.reshape(-1, x.shape[-1]).to(rows.dtype))
            if bias is not None and bias.requires_grad:
                accumulate(bias, rows.sum(0))

        defer(ctx.ledger, settle)
        return grad_x, None, None


def accumulate_product(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Adds grad^T x to a weight's gradient, without a copy of it in between where the types allow."""
    if weight.grad is None or weight.grad.dtype != grad.dtype:
        accumulate(weight, grad.t() @ x)
    else:
        weight.grad.addmm_(grad.t(), x)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Adds to a parameter's gradient, as autograd would."""
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer's forward: with a ledger the one that can wait, else its own."""
    if current_ledger() is None or not torch.is_grad_enabled():
        return nn.functional.linear(x, self.weight, self.bias)
    return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear` whose weight gradient can wait; under autocast in its type."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Cast.apply(x.to(dtype), weight, bias, dtype)  # type: ignore[no-untyped-call]
            return out
    plain: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return plain


class _Cast(_Linear):
    """The same in another type: the weight is cast in here, so that its gradient can wait for the cast too."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.ledger = bias, current_ledger()
        return nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        return (*_Linear.backward(ctx, grad), None)


def make_deferrable(module: nn.Module) -> None:
    """Lets the linear layers inside a module leave their weight gradients. Once is enough; nothing else changes."""
    if hasattr(module, "_orig_mod"):  # compiled: one piece
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and not isinstance(layer.__dict__.get("forward"), MethodType):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
