"""Split backwards in one traversal: linear layers compute the input gradient at once and leave the weight gradient.

    I   one walk through the graph; each linear layer gives  grad_x = grad_y W   and keeps (x, grad_y) in the ledger
    W   the ledger is settled: for each entry                grad_W += grad_y^T x

A layer can wait if it is an `nn.Linear`, or a subclass with the same forward, or the `Conv1D` of transformers, and if
its weight is a plain parameter without hooks. Everything else has its weight gradient in I: norms and embeddings, which
are little work, and layers that compute in their own way, of which the executor warns. A module that wants to leave
such work calls `defer` inside the backward of an autograd function. A compiled module is one piece for autograd: its I
does everything, and its W nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.torch_internals import has_gradient_hooks, is_compiled

DeferredWork = Callable[[], None]
_here = threading.local()  # the ledger of the forward that runs on this thread


class Ledger:
    """Weight gradients that are due, of one forward."""

    __slots__ = ("common", "due", "open")

    def __init__(self, common: frozenset[int] = frozenset()) -> None:
        self.due: list[DeferredWork] = []
        self.open = False  # whether the backward that runs now may leave work
        self.common = common  # ids of parameters that other threads add to as well: only autograd does that safely

    def settle(self) -> None:
        """Does what is due."""
        with torch.no_grad():
            for work in self.due:
                work()
        self.due.clear()


def current_ledger() -> Ledger | None:
    """The ledger of the forward that runs now: keep it in an autograd function's context, for `defer`."""
    return getattr(_here, "ledger", None)


def defer(ledger: Ledger | None, work: DeferredWork) -> None:
    """Leaves work for W if this backward is split, else does it now."""
    if ledger is not None and ledger.open:
        ledger.due.append(work)
    else:
        work()


def record_in(ledger: Ledger | None) -> None:
    """Forwards on this thread write into that ledger from now on."""
    _here.ledger = ledger


class _Linear(torch.autograd.Function):
    """y = x W^T + b, or x W + b where the weight lies `turned`. Its weight gradient can wait.

    `dtype` is autocast's, if that is on: the weight is cast in here, so that its gradient can wait for the cast too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # activation checkpointing hands the backward a detached copy, which gathers no gradient
        ctx.bias, ctx.ledger, ctx.turned = bias, current_ledger(), turned
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return (_turned if turned else nn.functional.linear)(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, None, None, None, None]:
        x, _ = ctx.saved_tensors
        weight, bias, turned = ctx.weight, ctx.bias, ctx.turned
        grad_x = None
        if ctx.needs_input_grad[0]:
            there = weight.to(grad.dtype)
            grad_x = grad @ (there.t() if turned else there)

        def settle() -> None:
            rows = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                taken = x.reshape(-1, x.shape[-1]).to(rows.dtype)
                accumulate_product(
                    weight, *((taken, rows) if turned else (rows, taken))
                )
            if bias is not None and bias.requires_grad:
                accumulate(bias, rows.sum(0))

        defer(ctx.ledger, settle)
        return grad_x, None, None, None, None


def _turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b, by the same kernel as transformers' `Conv1D`, so that not even rounding differs."""
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


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


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool = False
) -> Tensor:
    """`nn.functional.linear` whose weight gradient can wait; under autocast in its type."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Linear.apply(x.to(dtype), weight, bias, turned, dtype)  # type: ignore[no-untyped-call]
            return out
    plain: Tensor = _Linear.apply(x, weight, bias, turned, None)  # type: ignore[no-untyped-call]
    return plain


# ---------------------------------------------------------------- which layers can wait
def make_deferrable(module: nn.Module) -> None:
    """Lets the linear layers inside a module leave their weight gradients. Once is enough; nothing else changes."""
    if is_compiled(module):  # one piece
        return
    if (
        "forward" not in module.__dict__
    ):  # else it is done already, or has a forward of its own
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = MethodType(_linear_forward, module)  # type: ignore[method-assign]
        elif _is_turned(module):
            module.forward = MethodType(_turned_forward, module)
    for inner in module.children():
        make_deferrable(inner)


def _is_turned(module: nn.Module) -> bool:
    """Whether this is the linear layer of transformers' GPT-2, known by its name, its shapes and its forward."""
    if (
        type(module).__name__ != "Conv1D"
        or "addmm" not in type(module).forward.__code__.co_names
    ):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shapes = [x.shape if isinstance(x, Tensor) else () for x in (weight, bias)]
    return len(shapes[0]) == 2 and tuple(shapes[1]) == (
        getattr(module, "nf", None),
    ) == tuple(shapes[0][1:])


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer's forward: with a ledger the one that can wait, else its own."""
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):
        return nn.functional.linear(x, weight, bias)
    return linear(x, weight, bias)


def _turned_forward(self: nn.Module, x: Tensor) -> Tensor:
    """The same of a layer whose weight lies turned."""
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):  # type: ignore[arg-type]
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return linear(x, weight, bias, turned=True)  # type: ignore[arg-type]


def _can_wait(ledger: Ledger, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient is what we would add later: of a plain parameter that trains, and that nobody watches.

    A parametrized weight is computed anew each time, and what it is computed from gets its gradient in I.
    """
    if (
        not weight.requires_grad
        or not torch.is_grad_enabled()
        or id(weight) in ledger.common
    ):
        return False
    return _is_plain(weight) and (bias is None or _is_plain(bias))


def _is_plain(parameter: Tensor) -> bool:
    return parameter.is_leaf and not has_gradient_hooks(parameter)
