"""Splits a backward in one traversal: linear layers compute their input gradient and defer their weight gradient.

    I   one walk through the graph; each linear layer gives  grad_x = grad_y W   and keeps (x, grad_y) in the ledger
    W   settles the ledger; for each entry                   grad_W += grad_y^T x

A layer can wait if it is an `nn.Linear`, a subclass with the same forward, or the `Conv1D` of transformers, and if its
weight is a plain parameter without hooks. All other weight gradients are computed in I: norms and embeddings, which are
little work, and layers with their own computation, about which the executor warns. A custom module can defer such work
too: it calls `defer` inside the backward of an autograd function. A compiled module is a single node for autograd, so
its I does everything and its W nothing.
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
    """The deferred weight gradients of one forward."""

    __slots__ = ("common", "due", "open")

    def __init__(self, common: frozenset[int] = frozenset()) -> None:
        self.due: list[DeferredWork] = []
        self.open = False  # whether the current backward may defer work
        # Ids of parameters to which other threads add too. Only autograd does that safely.
        self.common = common

    def settle(self) -> None:
        """Do all deferred work."""
        with torch.no_grad():
            for work in self.due:
                work()
        self.due.clear()


def current_ledger() -> Ledger | None:
    """The ledger of the forward that runs now. Keep it in the context of an autograd function, for `defer`."""
    return getattr(_here, "ledger", None)


def defer(ledger: Ledger | None, work: DeferredWork) -> None:
    """Leave work for W if this backward is split; otherwise do it now."""
    if ledger is not None and ledger.open:
        ledger.due.append(work)
    else:
        work()


def record_in(ledger: Ledger | None) -> None:
    """Make forwards on this thread use this ledger from now on."""
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
    """Add grad^T x to a weight's gradient, without a temporary copy where the types allow it."""
    if weight.grad is None or weight.grad.dtype != grad.dtype:
        accumulate(weight, grad.t() @ x)
    else:
        weight.grad.addmm_(grad.t(), x)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd would."""
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool = False
) -> Tensor:
    """`nn.functional.linear` with a weight gradient that can wait. Under autocast it computes in autocast's type."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Linear.apply(x.to(dtype), weight, bias, turned, dtype)  # type: ignore[no-untyped-call]
            return out
    plain: Tensor = _Linear.apply(x, weight, bias, turned, None)  # type: ignore[no-untyped-call]
    return plain


# ---------------------------------------------------------------- which layers can wait
def make_deferrable(module: nn.Module) -> None:
    """Let the linear layers inside a module defer their weight gradients. Calling it again changes nothing."""
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
    """Whether this is the linear layer of transformers' GPT-2, judged by its name, shapes and forward."""
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
    """The forward of a linear layer, whose weight gradient can wait if there is a ledger."""
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):
        return nn.functional.linear(x, weight, bias)
    return linear(x, weight, bias)


def _turned_forward(self: nn.Module, x: Tensor) -> Tensor:
    """The same for a layer with a transposed weight."""
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):  # type: ignore[arg-type]
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return linear(x, weight, bias, turned=True)  # type: ignore[arg-type]


def _can_wait(ledger: Ledger, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether adding the gradient later gives the same result: for plain trained parameters without hooks.

    A parametrized weight is computed in every forward, and the parameters it is computed from get their gradient in I.
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
